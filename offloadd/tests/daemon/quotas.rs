//! Tests the quotas of users and jobs. What could go wrong: a limit that is not kept, that counts against the wrong user or job, or that is not
//! freed; a refusal that does not say what is free and who has the rest; a raised limit that needs a restart.

use std::time::Duration;

use offload_api::fault::{Fault, FaultKind};
use offload_api::proto;
use rustix::process::Signal;

use crate::common::{
    Control, Daemon, Session, Store, eventually, fill_tiles, open, program, words,
};

const SOON: Duration = Duration::from_secs(60);

/// Starts a daemon whose settings end with `quotas`.
fn with(quotas: &str) -> (Store, Daemon) {
    let store = Store::new(1, "auto");
    let text = std::fs::read_to_string(&store.config).unwrap();
    std::fs::write(&store.config, text + quotas).unwrap();
    let daemon = store.serve();
    (store, daemon)
}

fn own_uid() -> u32 {
    rustix::process::geteuid().as_raw()
}

fn refused(result: Result<proto::OpenSessionReply, Fault>, kind: FaultKind, words: &[&str]) {
    let fault = result.expect_err("more than the quota");
    assert_eq!(fault.kind, kind, "{fault}");
    for word in words {
        assert!(fault.message.contains(word), "{word}: {fault}");
    }
}

#[test]
fn host_memory_beyond_a_users_quota_is_refused_with_who_holds_it_and_given_back() {
    let arena_bytes = Store::new(1, "auto")
        .serve()
        .control()
        .session("x")
        .geometry
        .arena_bytes();
    let max = 2 * arena_bytes + 1;
    let quota = format!("[quota.uid.{}]\nhost_bytes_max = {max}\n", own_uid());
    let (store, daemon) = with(&quota);
    let mut control = daemon.control();
    assert_eq!(
        control.arena_free_bytes(),
        max,
        "what he may have, not what there is"
    );
    let first = control.session("one");
    let _second = control.session("two");
    assert_eq!(arena_bytes, 2 << 20);
    refused(
        control.open_session(open("three")),
        FaultKind::NoMemory,
        &[
            "may have 4.0 MiB and has 4.0 MiB, so 1 bytes are free",
            "one 2.0 MiB",
            "host_bytes_max",
        ],
    );
    let listed = list_of_jobs(&store);
    let line = format!("uid {}", own_uid());
    let line = listed.lines().find(|one| one.starts_with(&line));
    let columns: Vec<_> = line.expect(&listed).split_whitespace().collect();
    let expected = ["2/32", "0/256", "4.0", "MiB/4.0", "MiB", "0", "bytes"];
    assert_eq!(columns[2..], expected, "{listed}");
    drop(first);
    eventually("its memory is his again", SOON, || {
        control.arena_free_bytes() > arena_bytes
    });
    control.session("three");
    let log = daemon.last_words();
    let lines = |what: &str| log.lines().filter(|line| line.contains(what)).count();
    let begun = format!(
        "session begins uid={} pid={} host_memory=2.0 MiB",
        own_uid(),
        std::process::id()
    );
    assert_eq!(lines(&begun), 3, "{log}");
    assert!(
        log.contains("session ends") && log.contains("its process ended"),
        "{log}"
    );
}

/// Returns what `offloadd job list` prints.
fn list_of_jobs(store: &Store) -> String {
    let mut list = program();
    list.args(["job", "list", "--config"]).arg(&store.config);
    words(&list.output().unwrap())
}

#[test]
fn another_users_quota_is_not_ours() {
    let quota = format!("[quota.uid.{}]\nsessions_max = 0\n", own_uid() + 1);
    let (_store, daemon) = with(&quota);
    daemon.control().session("tiny");
}

#[test]
fn sessions_and_operations_in_flight_have_their_limits() {
    let (_store, daemon) = with(
        "[quota.default]\nsessions_max = 3\ninflight_max = 10\n[quota.job]\nsessions_max = 1\n",
    );
    let mut control = daemon.control();
    let granted = |reply: &proto::OpenSessionReply| reply.iodepth;
    let one = control.open_session(open("one")).unwrap();
    let _one = Session::attach(&one).unwrap();
    let another_rank = proto::OpenSessionRequest {
        rank: 1,
        local_ranks: 1,
        ..open("one")
    };
    let fault = control.open_session(another_rank).unwrap_err();
    assert!(
        fault.kind == FaultKind::Busy || fault.message.contains("job one of uid"),
        "{fault}"
    );
    let two = control.open_session(open("two")).unwrap();
    let _two = Session::attach(&two).unwrap();
    let three = control.open_session(open("three")).unwrap();
    let _three = Session::attach(&three).unwrap();
    // Each asked for 4, and there are 10.
    assert_eq!([&one, &two, &three].map(granted), [4, 4, 2]);
    refused(
        control.open_session(open("four")),
        FaultKind::TooMany,
        &["may have 3 sessions and has 3 (", "sessions_max"],
    );
}

#[test]
fn an_operation_too_many_is_refused_before_it_is_made() {
    let (_store, daemon) = with("[quota.default]\ninflight_max = 4\n");
    let mut control = daemon.control();
    let _one = control.session("one");
    refused(
        control.open_session(open("two")),
        FaultKind::TooMany,
        &["may have 4 operations in flight", "(one 4)", "inflight_max"],
    );
}

#[test]
fn room_on_devices_beyond_the_quota_is_refused_until_the_limit_is_raised() {
    let (store, daemon) = with("[quota.default]\ndevice_bytes_max = \"1MiB\"\n");
    let mut control = daemon.control();
    let session = control.session("large");
    let define = |session: &Session, count: u32| proto::DefineTilesRequest {
        token: session.token.clone(),
        layout: Vec::new(),
        tiles: (0..count)
            .map(|unit| proto::Tile {
                unit,
                kind: 1,
                elem_offset: 0,
                tile_bytes: 64 << 10,
            })
            .collect(),
        durability: 1,
        nodes: 1,
    };
    let fault = control.define_tiles(define(&session, 16)).unwrap_err();
    assert_eq!(fault.kind, FaultKind::NoSpace, "{fault}");
    assert!(
        fault.message.contains("may have 1.0 MiB and has 0 bytes"),
        "{fault}"
    );
    // The refused request reserves nothing: it is refused again in the same way, and one that fits is granted.
    let before = control.describe(proto::DescribeRequest {}).unwrap().devices[0].free_bytes;
    assert!(control.define_tiles(define(&session, 16)).is_err());
    let after = control.describe(proto::DescribeRequest {}).unwrap().devices[0].free_bytes;
    assert_eq!(before, after);

    let text = std::fs::read_to_string(&store.config).unwrap();
    std::fs::write(&store.config, text.replace("\"1MiB\"", "\"4MiB\"")).unwrap();
    daemon.signal(Signal::HUP);
    eventually("the limit is raised", SOON, || {
        control.define_tiles(define(&session, 16)).is_ok()
    });
    let reserved_bytes = control.define_tiles(define(&session, 16)).unwrap();
    let reserved_bytes = reserved_bytes.reserved_bytes;
    let users = control.metrics(proto::MetricsRequest {}).unwrap().users;
    let of = |user: &proto::UserMetrics| (user.device_bytes, user.device_bytes_max);
    assert_eq!(of(&users[0]), (reserved_bytes, Some(4 << 20)));
    let second = control.session("second");
    let fault = control.define_tiles(define(&second, 24)).unwrap_err();
    assert!(fault.message.contains("(large "), "who holds it: {fault}");
    let mut small = control.session("small");
    let working = small.begin(&mut control, 2);
    fill_tiles(&mut small, 2, working, 1);
}

/// Returns the weights of users and jobs as the metrics show them.
fn weights(control: &mut Control) -> Vec<(String, u32, u32)> {
    let jobs = control.metrics(proto::MetricsRequest {}).unwrap().jobs;
    let of = |job: proto::JobMetrics| (job.job, job.user_weight, job.weight);
    jobs.into_iter().map(of).collect()
}

#[test]
fn weights_of_users_and_jobs_are_seen_and_change_while_jobs_run() {
    let uid = own_uid();
    let quota = format!(
        "[quota.uid.{uid}]\nweight = 300\n[quota.uid.{uid}.job.\"large.7b\"]\nweight = 200\ninflight_max = 2\n\
         [quota.uid.{}.job.small]\nweight = 7\n",
        uid + 1
    );
    let (store, daemon) = with(&quota);
    let mut control = daemon.control();
    let reply = control.open_session(open("large.7b")).unwrap();
    assert_eq!(reply.iodepth, 2, "its other limits as well");
    let _large = Session::attach(&reply).unwrap();
    let mut small = control.session("small");
    let named = |large, small| {
        let of = |name: &str, (user, own)| (name.to_owned(), user, own);
        vec![of("large.7b", large), of("small", small)]
    };
    assert_eq!(weights(&mut control), named((300, 200), (300, 100)));
    let text = std::fs::read_to_string(&store.config).unwrap();
    let text = text.replace("weight = 200", "weight = 50") + "[quota.job]\nweight = 10\n";
    std::fs::write(&store.config, text).unwrap();
    daemon.signal(Signal::HUP);
    eventually("the weights have changed", Duration::from_secs(60), || {
        weights(&mut control) == named((300, 50), (300, 10))
    });
    let working = small.begin(&mut control, 2);
    fill_tiles(&mut small, 2, working, 1);
}
