//! Tests the daemon restarted under living processes. What could go wrong: bytes, tickets or commits that are lost or come twice, a session that
//! continues with outdated state, one that does not end when its process has ended, a state that was modified. The test is the service manager: it
//! keeps what the daemon stores with it, and passes what it wants to the next one.

mod manager;
mod states;
mod supervised;

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use offload_api::fault::FaultKind;
use offload_api::ids::{SlotIndex, TicketId};
use offload_api::proto;
use offload_api::ring::entry::Request;
use rustix::process::Signal;

use self::manager::{Manager, reattach};
use crate::common::{
    Control, Session, Store, engines, eventually, expect_tiles, fill_tiles, open, swap_in, swap_out,
};
use crate::reading::with_failing;

const LONG: Duration = Duration::from_secs(60);

#[test]
fn memory_rings_and_what_was_written_since_the_commit_outlive_the_daemon() {
    for engine in engines() {
        let manager = Manager::new(Store::new(2, engine));
        let mut daemon = manager.start(&mut Vec::new());
        let mut control = daemon.control();
        let mut session = control.session("tiny");
        let mut working = session.begin(&mut control, 6);
        for round in 0..3_u8 {
            let fill = 10 * (round + 1);
            fill_tiles(&mut session, 6, working, fill);
            daemon = manager.restart(daemon);
            let mut control = daemon.control();
            let found = reattach(&mut control, &session);
            assert_eq!(
                (found.epoch, found.working_generation),
                (session.epoch.0, working)
            );
            assert!(!session.hung_up(Duration::ZERO));
            // Written before, read after, through the same rings, and committed after.
            expect_tiles(&mut session, 6, fill);
            working = session.commit(&mut control, working, &[round]);
            expect_tiles(&mut session, 6, fill);
        }
        // The store reports the same to a new session.
        drop(session);
        drop(daemon);
        let daemon = manager.start(&mut Vec::new());
        let mut control = daemon.control();
        let reply = control.open_session(open("tiny")).unwrap();
        let newest = (control.job(&reply.token).unwrap().generations)
            .pop()
            .unwrap();
        assert_eq!(
            (newest.generation, newest.blobs[0].blob.as_slice()),
            (3, &[2][..])
        );
        let mut session = Session::attach(&reply).unwrap();
        session.resume(&mut control, 3);
        expect_tiles(&mut session, 6, 30);
    }
}

#[test]
fn a_start_that_cannot_write_leaves_sessions_to_the_next() {
    let manager = Manager::new(Store::new(2, "psync"));
    let daemon = manager.start(&mut Vec::new());
    let mut control = daemon.control();
    let mut session = control.session("tiny");
    let working = session.begin(&mut control, 6);
    fill_tiles(&mut session, 6, working, 10);
    let (mut kept, _) = manager.stop(daemon);
    let kept_count = kept.len();
    for calls in ["pwrite64", "fdatasync"] {
        let served = manager.store.serve_command();
        let Some(command) = with_failing(calls, &manager.store, &served) else {
            return;
        };
        let printed = manager.start_in_vain(command, &mut kept);
        assert!(printed.contains("remain for the next start"), "{printed}");
        assert_eq!(kept.len(), kept_count, "nothing is taken: {printed}");
    }
    let daemon = manager.start(&mut kept);
    let mut control = daemon.control();
    reattach(&mut control, &session);
    assert!(!session.hung_up(Duration::ZERO));
    expect_tiles(&mut session, 6, 10);
    session.commit(&mut control, working, b"one");
}

#[test]
fn a_flush_that_fails_before_the_hand_over_poisons_what_the_next_daemon_adopts() {
    let manager = Manager::new(Store::new(2, "auto"));
    let failing = manager.store.dir.path().join("flushes-fail");
    let mut command = manager.store.serve_command();
    command.env("OFFLOADD_FAULT_FLUSH", &failing);
    let daemon = manager.start_as(command, &mut Vec::new());
    let mut control = daemon.control();
    let mut session = control.session("tiny");
    let working = session.begin(&mut control, 6);
    fill_tiles(&mut session, 6, working, 10);
    let working = session.commit(&mut control, working, b"one");
    fill_tiles(&mut session, 6, working, 20);
    std::fs::write(&failing, []).unwrap();
    let (mut kept, _) = manager.stop(daemon);
    std::fs::remove_file(&failing).unwrap();

    let daemon = manager.start(&mut kept);
    let mut control = daemon.control();
    reattach(&mut control, &session);
    let committed = control.commit(proto::CommitRequest {
        token: session.token.clone(),
        generation: working,
        blob: Vec::new(),
    });
    let fault = committed.unwrap_err();
    assert_eq!(fault.kind, FaultKind::Poisoned, "{fault}");
    // The acknowledged state is there.
    drop(session);
    let mut session = control.session("tiny");
    session.resume(&mut control, working - 1);
    expect_tiles(&mut session, 6, 10);
}

#[test]
fn what_is_submitted_while_no_daemon_runs_is_served_once_by_the_next() {
    let manager = Manager::new(Store::new(1, "auto"));
    let daemon = manager.start(&mut Vec::new());
    let mut control = daemon.control();
    let mut session = control.session("tiny");
    let working = session.begin(&mut control, 4);
    fill_tiles(&mut session, 4, working, 1);
    let (mut kept, _) = manager.stop(daemon);
    let place = session.geometry.slot_place(SlotIndex(0)).unwrap();
    session.write_slot(place.offset, &[77; 4096]);
    session.submit(swap_out(0, 0, working, &[77; 4096]));
    session.submit(swap_in(3, 1));
    let daemon = manager.start(&mut kept);
    let mut tickets = [session.complete(), session.complete()].map(|cqe| {
        assert_eq!(cqe.fault, 0, "{cqe:?}");
        cqe.ticket
    });
    tickets.sort_unstable();
    assert_eq!(tickets, [100, 203]);
    assert!(
        session.rings.pop().unwrap().is_none(),
        "nothing comes twice"
    );
    // The daemon after that one repeats none of it.
    let daemon = manager.restart(daemon);
    let again = Request {
        ticket: TicketId(9),
        ..swap_in(0, 2)
    };
    session.submit(again);
    assert_eq!(session.complete().ticket, 9);
    let bytes = session.read_slot(session.geometry.slot_place(SlotIndex(2)).unwrap().offset);
    assert_eq!(bytes, [77; 4096]);
    drop(daemon);
}

#[test]
fn a_commit_that_waits_for_another_rank_is_called_again_and_made_once() {
    let manager = Manager::new(Store::new(1, "auto"));
    let daemon = manager.start(&mut Vec::new());
    let mut control = daemon.control();
    let rank = |control: &mut Control, rank| {
        let request = proto::OpenSessionRequest {
            rank,
            local_ranks: 2,
            ..open("tiny")
        };
        Session::attach(&control.open_session(request).unwrap()).unwrap()
    };
    let (mut one, two) = (rank(&mut control, 0), rank(&mut control, 1));
    let working = one.begin(&mut control, 4);
    two.resume(&mut control, 0);
    fill_tiles(&mut one, 4, working, 3);
    let commit = |session: &Session, rank: u8| proto::CommitRequest {
        token: session.token.clone(),
        generation: working,
        blob: vec![rank],
    };
    let mut waiting = daemon.control();
    let first = commit(&one, 0);
    let waits = std::thread::spawn(move || waiting.commit(first));
    let gathering = |control: &mut Control| {
        let seen = control.metrics(proto::MetricsRequest {}).unwrap();
        seen.jobs[0].commit_ranks_called == 1
    };
    eventually("it waits", LONG, || gathering(&mut control));
    let daemon = manager.restart(daemon);
    let fault = waits.join().unwrap().unwrap_err();
    assert_eq!(fault.kind, FaultKind::Stopping, "{fault}");
    let mut control = daemon.control();
    assert_eq!(reattach(&mut control, &one).working_generation, working);
    let mut waiting = daemon.control();
    let first = commit(&one, 0);
    let waits = std::thread::spawn(move || waiting.commit(first));
    let reply = control.commit(commit(&two, 1)).unwrap();
    assert_eq!(reply.working_generation, working + 1);
    assert_eq!(waits.join().unwrap().unwrap(), reply);
    // A process that did not get the answer can ask for it.
    let daemon = manager.restart(daemon);
    let found = reattach(&mut daemon.control(), &two);
    assert_eq!(
        (found.working_generation, found.confirmed),
        (working + 1, true)
    );
    expect_tiles(&mut one, 4, 3);
}

#[test]
fn a_process_that_ends_while_no_daemon_runs_gives_its_memory_back() {
    let manager = Manager::new(Store::new(1, "auto"));
    let daemon = manager.start(&mut Vec::new());
    let mut control = daemon.control();
    let free_bytes = control.arena_free_bytes();
    let (gone, mut stays) = (control.session("gone"), control.session("stays"));
    stays.begin(&mut control, 2);
    let (mut kept, _) = manager.stop(daemon);
    drop(gone);
    let daemon = manager.start(&mut kept);
    let mut control = daemon.control();
    let arena_bytes = stays.geometry.arena_bytes();
    eventually("only the other's is taken", LONG, || {
        free_bytes - control.arena_free_bytes() == arena_bytes
    });
    fill_tiles(&mut stays, 2, 1, 5);
    control.session("gone");
}

#[test]
fn nobody_is_told_of_a_session_that_is_not_his() {
    let manager = Manager::new(Store::new(1, "auto"));
    let daemon = manager.start(&mut Vec::new());
    let mut control = daemon.control();
    let session = control.session("tiny");
    let daemon = manager.restart(daemon);
    let mut control = daemon.control();
    let mut wrong = session.token.clone();
    wrong[15] ^= 1;
    let fault = control
        .reattach(proto::ReattachRequest { token: wrong })
        .unwrap_err();
    assert_eq!(fault.kind, FaultKind::NotFound);
    // The descriptors were already given to this process; another one with its token gets none.
    let reply = proto::OpenSessionReply {
        token: session.token.clone(),
        descriptor_socket: format!("{}.fds", daemon.socket.display()),
        ..proto::OpenSessionReply::default()
    };
    assert!(Session::attach(&reply).is_err());
    reattach(&mut control, &session);
    drop(daemon);
}

#[test]
fn without_somebody_who_keeps_them_sessions_end_with_the_daemon() {
    let manager = Manager::new(Store::new(1, "auto"));
    let daemon = manager.start(&mut Vec::new());
    let session = daemon.control().session("tiny");
    let (kept, _) = manager.stop(daemon);
    assert!(!session.hung_up(Duration::ZERO), "kept");
    drop(kept);
    assert!(session.hung_up(LONG), "given up");

    let mut daemon = manager.store.serve();
    let session = daemon.control().session("tiny");
    daemon.signal(Signal::TERM);
    assert_eq!(daemon.wait(LONG), Some(0));
    assert!(session.hung_up(LONG), "nobody keeps");
}

#[test]
fn a_daemon_serves_though_nobody_reads_what_it_says() {
    let store = Store::new(1, "auto");
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    let mut daemon = store.serve_command().stdout(writer).spawn().unwrap();
    eventually("it listens", LONG, || {
        std::os::unix::net::UnixStream::connect(store.socket()).is_ok()
    });
    Control::connect(&store.socket()).session("tiny");
    let pid = rustix::process::Pid::from_child(&daemon);
    rustix::process::kill_process(pid, Signal::TERM).unwrap();
    assert!(daemon.wait().unwrap().success());
}

#[test]
fn sessions_outlive_a_restart_after_a_device_has_left() {
    // The device that leaves is neither the first, which has the metadata, nor the last.
    let mut manager = Manager::new(Store::new(3, "auto"));
    let daemon = manager.start(&mut Vec::new());
    let mut control = daemon.control();
    let mut session = control.session("tiny");
    let working = session.begin(&mut control, 6);
    fill_tiles(&mut session, 6, working, 1);
    let working = session.commit(&mut control, working, b"");
    let leaves = manager.store.devices[1].clone();
    let drain = crate::common::program()
        .args(["device", "drain"])
        .arg(&leaves)
        .arg("--config")
        .arg(&manager.store.config)
        .output();
    let drain = drain.unwrap();
    assert!(drain.status.success(), "{}", crate::common::words(&drain));
    eventually("it has left", LONG, || {
        let seen = control.metrics(proto::MetricsRequest {}).unwrap();
        seen.devices.len() == 2
    });
    manager.store.devices.remove(1);
    (manager.store).write_config(&manager.store.socket(), "auto");
    let daemon = manager.restart(daemon);
    let mut control = daemon.control();
    assert_eq!(reattach(&mut control, &session).working_generation, working);
    expect_tiles(&mut session, 6, 1);
    fill_tiles(&mut session, 6, working, 2);
    session.commit(&mut control, working, b"");
    expect_tiles(&mut session, 6, 2);
}

#[test]
fn a_start_while_the_daemon_is_replaced_waits_for_the_next() {
    let manager = Manager::new(Store::new(1, "auto"));
    let mut daemon = manager.start(&mut Vec::new());
    let (socket, goes_on) = (daemon.socket.clone(), AtomicBool::new(true));
    std::thread::scope(|scope| {
        let starts = scope.spawn(|| {
            let mut count = 0;
            while goes_on.load(Ordering::Relaxed) {
                let session = offload_client::Session::open(offload_client::SessionSettings {
                    socket: socket.clone(),
                    job: "starts".into(),
                    rank: offload_client::Rank(0),
                    local_ranks: 1,
                    classes: vec![offload_client::SlotClass {
                        slot_bytes: 4096,
                        slot_count: 1,
                    }],
                    iodepth: 1,
                });
                match session {
                    Ok(session) => count += u32::from(session.close().is_ok()),
                    // Nobody listened from the beginning.
                    Err(offload_client::ClientError::Connect { .. }) => {}
                    Err(error) => panic!("{error}"),
                }
            }
            count
        });
        for _ in 0..5 {
            daemon = manager.restart(daemon);
        }
        goes_on.store(false, Ordering::Relaxed);
        assert!(starts.join().unwrap() > 0);
    });
}
