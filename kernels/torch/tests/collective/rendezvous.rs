//! Tests of faults before the first operation: a rank that never comes, comes twice or dies while connecting, a place that cannot be used, and a
//! store that other machines can reach.

use std::time::{Duration, Instant};

use kernels_torch::collective::Comm;
use test_hooks::port::ReservedPort;
use training_ranks::{CollectiveError, DIR_VARIABLE, Rendezvous, Timeouts, World};

use crate::harness::{
    Meet, TIMEOUTS, all_succeed, connect, is_rank_of, on_ranks, rank_command, run, signal_myself,
};

const IMPATIENT: Timeouts = Timeouts {
    connect: Duration::from_secs(2),
    ..TIMEOUTS
};

/// Ranks 0 and 1 of three must fail to connect, with an error for which `holds` is true.
fn connecting_fails(
    test: &str,
    meet: Meet,
    missing: &[u32],
    timeouts: Timeouts,
    holds: impl Fn(&CollectiveError) -> bool,
) {
    if is_rank_of(test) {
        if std::env::var("RANK").unwrap() == "2" {
            // This rank dies while it connects.
            std::thread::spawn(|| {
                std::thread::sleep(Duration::from_millis(300));
                signal_myself("KILL");
            });
        }
        let began = Instant::now();
        let error = connect(timeouts).map(|_| ()).unwrap_err();
        assert!(holds(&error), "{error:?}");
        assert!(
            began.elapsed() < Duration::from_secs(15),
            "{:?}",
            began.elapsed()
        );
        std::process::exit(0);
    }
    let ended = run(test, 3, meet, missing);
    all_succeed(&ended, |rank| rank < 2 && !missing.contains(&rank));
}

#[test]
fn a_rank_that_never_comes_is_named() {
    let name = "rendezvous::a_rank_that_never_comes_is_named";
    let holds = |error: &CollectiveError| {
        matches!(error, CollectiveError::Absent { ranks, .. } if ranks == &[2])
            // The other rank noticed it first and reported it.
            || matches!(error, CollectiveError::Left { reason, .. } if reason.contains("rank 2 is still missing"))
    };
    connecting_fails(name, Meet::Dir, &[2], IMPATIENT, holds);
}

#[test]
fn a_rank_that_should_run_the_store_and_never_comes_is_named() {
    let name = "rendezvous::a_rank_that_should_run_the_store_and_never_comes_is_named";
    let holds = |error: &CollectiveError| matches!(error, CollectiveError::Absent { ranks, .. } if ranks == &[0]);
    connecting_fails(name, Meet::Tcp, &[0, 2], IMPATIENT, holds);
}

#[test]
fn a_rank_that_dies_on_the_way_is_named() {
    let name = "rendezvous::a_rank_that_dies_on_the_way_is_named";
    if is_rank_of(name) && std::env::var("RANK").unwrap() == "1" {
        // Late, so that rank 2 is dead before all ranks have met.
        std::thread::sleep(Duration::from_millis(1000));
    }
    let holds = |error: &CollectiveError| matches!(error, CollectiveError::Died { rank: 2, .. });
    connecting_fails(name, Meet::Dir, &[], TIMEOUTS, holds);
}

#[test]
fn two_processes_with_one_rank_are_refused() {
    let name = "rendezvous::two_processes_with_one_rank_are_refused";
    if is_rank_of(name) {
        let error = connect(IMPATIENT).map(|_| ()).unwrap_err();
        println!("error: {error}");
        std::process::exit(0);
    }
    for tcp in [false, true] {
        let dir = tempfile::tempdir().unwrap();
        let port = ReservedPort::new();
        let children = [0, 1, 1].map(|rank| {
            let mut command = rank_command(name, rank, 3);
            if tcp {
                command
                    .env("MASTER_ADDR", "127.0.0.1")
                    .env("MASTER_PORT", port.number().to_string());
            } else {
                command.env(DIR_VARIABLE, dir.path());
            }
            command.spawn().unwrap()
        });
        let outputs = children.map(|child| {
            String::from_utf8_lossy(&child.wait_with_output().unwrap().stdout).into_owned()
        });
        let taken = outputs
            .iter()
            .filter(|output| output.contains("two processes have RANK=1"));
        assert_eq!(taken.count(), 1, "{outputs:?}");
    }
}

#[test]
fn a_directory_that_cannot_be_used_is_named() {
    let dir = tempfile::tempdir().unwrap();
    let world = World {
        rank: 0,
        ranks: 2,
        local_rank: 0,
        local_ranks: 2,
    };
    let try_at = |dir: &std::path::Path| {
        let at = Rendezvous::Dir(dir.to_path_buf());
        Comm::connect(world, &at, IMPATIENT)
            .map(|_| ())
            .unwrap_err()
    };
    let missing = dir.path().join("missing");
    let error = try_at(&missing).to_string();
    assert!(error.contains(&missing.display().to_string()), "{error}");
    // Not even root can write there.
    let error = try_at(std::path::Path::new("/proc/self")).to_string();
    assert!(error.contains("/proc/self"), "{error}");
}

#[test]
fn an_address_that_cannot_be_used_is_named() {
    let world = |rank| World {
        rank,
        ranks: 2,
        local_rank: 0,
        local_ranks: 1,
    };
    let at = |host: &str, port, ours| Rendezvous::Tcp {
        host: host.to_owned(),
        port,
        ours,
        prefix: String::new(),
        has_token: false,
        interface: None,
    };
    let try_at = |rank, at: &Rendezvous| {
        let began = Instant::now();
        let error = Comm::connect(world(rank), at, IMPATIENT)
            .map(|_| ())
            .unwrap_err();
        assert!(began.elapsed() < Duration::from_secs(15));
        error.to_string()
    };
    // An address of a network reserved for documentation: no machine has it.
    let error = try_at(0, &at("192.0.2.1", 29500, true));
    assert!(
        error.contains("listening at the rendezvous 192.0.2.1:29500"),
        "{error}"
    );
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let error = try_at(0, &at("127.0.0.1", port, true));
    assert!(error.contains("in use"), "{error}");
    // A listener that is not a store.
    let error = try_at(1, &at("127.0.0.1", port, false));
    assert!(error.contains(&port.to_string()), "{error}");
}

#[test]
fn the_store_listens_on_its_address_only() {
    const NAME: &str = "rendezvous::the_store_listens_on_its_address_only";
    on_ranks(NAME, &[2], Meet::Tcp, |comm| {
        let port: u16 = std::env::var("MASTER_PORT").unwrap().parse().unwrap();
        let listening = |path: &str| -> Vec<String> {
            let table = std::fs::read_to_string(path).unwrap_or_default();
            let rows = table
                .lines()
                .skip(1)
                .map(|row| row.split_whitespace().collect::<Vec<_>>());
            rows.filter(|row| row[3] == "0A" && row[1].ends_with(&format!(":{port:04X}")))
                .map(|row| row[1].to_owned())
                .collect()
        };
        assert_eq!(
            listening("/proc/self/net/tcp"),
            [format!("0100007F:{port:04X}")]
        );
        assert!(listening("/proc/self/net/tcp6").is_empty());
        comm.close().unwrap();
    });
}
