//! Tests which handed-over states the next daemon accepts: a state is valid once, and only if it is intact and fits the store and the settings.

use std::os::fd::OwnedFd;
use std::time::Duration;

use offload_api::proto;
use offloadd::device::{Device, DeviceBlocks};
use offloadd::handover::message::{self, HandoverState};
use offloadd::handover::{self, inherited, is_state};
use offloadd::store::recover;
use rustix::process::Signal;

use super::LONG;
use super::manager::{Manager, StoredDescriptors, reattach};
use crate::common::{Session, Store, expect_tiles, fill_tiles};

/// Makes a daemon with one session of 4 tiles, all written and none committed; then stops the daemon.
fn stopped() -> (Manager, Session, StoredDescriptors) {
    let manager = Manager::new(Store::new(1, "auto"));
    let daemon = manager.start(&mut Vec::new());
    let mut control = daemon.control();
    let mut session = control.session("tiny");
    let mut working = session.begin(&mut control, 4);
    fill_tiles(&mut session, 4, working, 1);
    working = session.commit(&mut control, working, b"one");
    fill_tiles(&mut session, 4, working, 2);
    let token = session.token.clone();
    let tile_bytes = vec![4096; 2];
    let scratch = proto::ReserveScratchRequest { token, tile_bytes };
    control.reserve_scratch(scratch).unwrap();
    let (kept, log) = manager.stop(daemon);
    assert!(
        log.contains("handed 1 session over to the next daemon"),
        "{log}"
    );
    assert!(kept.len() >= 8, "{kept:?}");
    (manager, session, kept)
}

/// Returns `kept` with another state.
fn with_state(mut kept: StoredDescriptors, state: OwnedFd) -> StoredDescriptors {
    let at = kept.iter().position(|(name, _)| is_state(name)).unwrap();
    kept[at].1 = state;
    kept
}

fn state_of(kept: &StoredDescriptors) -> HandoverState {
    let (_, state) = kept.iter().find(|(name, _)| is_state(name)).unwrap();
    handover::open(state).unwrap()
}

/// How a state is made wrong, and the daemon's message about it.
type Lie = (&'static str, fn(&mut HandoverState));

const LIES: &[Lie] = &[
    ("another store", |state| state.store[3] ^= 1),
    ("its epoch is 0", |state| state.epoch = 0),
    ("another daemon has served", |state| state.catalog -= 1),
    ("another daemon has served", |state| {
        (state.catalog, state.catalog_unsure) = (state.catalog + 1, true);
    }),
    ("another daemon has served", |state| {
        (state.catalog, state.catalog_unsure) = (u64::MAX, true);
    }),
    ("sessions of no job", |state| state.sessions[0].job = 9),
    ("job name", |state| state.jobs[0].name = "../up".into()),
    ("the devices have", |state| state.jobs[0].uid += 1),
    ("the devices have", |state| state.jobs[0].stored = None),
    ("the devices have", |state| stored(state).job_id += 1),
    ("the devices have", |state| stored(state).revision += 1),
    ("the devices have", |state| stored(state).newest -= 1),
    ("the devices have", |state| stored(state).newest_epoch ^= 1),
    ("it works on", |state| state.jobs[0].working += 1),
    ("before it resumed", |state| state.jobs[0].resumed = None),
    ("local ranks", |state| state.jobs[0].local_ranks = 0),
    ("no device 7", |state| state.jobs[0].touched.push(7)),
    ("unknown kind", |state| {
        let message = "lies".into();
        state.jobs[0].poison = Some(message::HandoverFault { kind: 999, message });
    }),
    ("out of order", |state| state.jobs[0].tiles.reverse()),
    ("out of order", |state| state.jobs[0].tiles[3].index = 4),
    ("was written elsewhere", |state| written(state).which ^= 1),
    ("was written elsewhere", |state| written(state).which = 9),
    ("was written elsewhere", |state| {
        written(state).offset += 4096
    }),
    ("was written elsewhere", |state| {
        written(state).generation -= 1
    }),
    ("no device 9", |state| written(state).device = 9),
    ("a token of 3 bytes", |state| {
        state.sessions[0].token.truncate(3)
    }),
    ("operations in flight", |state| {
        state.sessions[0].iodepth = 0
    }),
    ("operations in flight", |state| {
        state.sessions[0].iodepth = 1 << 30
    }),
    ("slot", |state| state.sessions[0].classes.clear()),
    ("slot", |state| state.sessions[0].classes[0].slot_bytes = 1),
    ("of host memory", |state| {
        state.sessions[0].classes[0].slot_count = 1 << 19;
    }),
    ("is not free", |state| {
        state.sessions[0].scratch[0].offset = 4096
    }),
    ("is not free", |state| {
        state.sessions[0].scratch[1].bytes = 0
    }),
    ("is not free", |state| {
        state.sessions[0].scratch[1] = state.sessions[0].scratch[0];
    }),
    ("is not free", |state| {
        state.sessions[0].scratch[0].offset = u64::MAX - 4095
    }),
    ("no device 3", |state| {
        state.sessions[0].scratch[0].device = 3
    }),
    ("descriptors of its sessions", |state| {
        state.sessions[0].number += 1
    }),
    ("is listed twice", |state| {
        let same = state.jobs[0].clone();
        state.jobs.push(same);
        let same = state.sessions[0].clone();
        state.sessions.push(same);
        state.sessions[1].job = 1;
    }),
    // One set of descriptors serves one session.
    ("descriptors of its sessions", |state| {
        state.jobs[0].local_ranks = 2;
        let same = state.sessions[0].clone();
        state.sessions.push(same);
    }),
];

fn stored(state: &mut HandoverState) -> &mut message::HandoverJobState {
    state.jobs[0].stored.as_mut().unwrap()
}

fn written(state: &mut HandoverState) -> &mut message::HandoverWrite {
    state.jobs[0].tiles[0].written.as_mut().unwrap()
}

fn copies(kept: &StoredDescriptors) -> StoredDescriptors {
    let copy = |(name, fd): &(String, OwnedFd)| (name.clone(), fd.try_clone().unwrap());
    kept.iter().map(copy).collect()
}

#[test]
fn a_state_that_does_not_fit_the_store_or_the_settings_is_refused_by_name() {
    let (manager, session, kept) = stopped();
    for (words, lie) in LIES {
        let mut told = copies(&kept);
        // The previous daemon has served, and has emptied the eventfd that can be emptied once.
        renew(&manager.store, &mut told);
        let truth = state_of(&told);
        let mut state = truth.clone();
        lie(&mut state);
        assert_ne!(state, truth, "{words}");
        let told = with_state(told, handover::seal(&state).unwrap());
        let log = manager.log_with(told);
        assert!(log.contains(words), "{words:?} is not in: {log}");
        assert!(log.contains("session"), "{log}");
        assert!(!log.contains("adopted "), "{words:?}: {log}");
    }
    // The unchanged descriptors still fit.
    let mut told = copies(&kept);
    renew(&manager.store, &mut told);
    let daemon = manager.start(&mut told);
    assert_eq!(reattach(&mut daemon.control(), &session).scratch_count, 2);
    drop((kept, told));
    assert!(!session.hung_up(Duration::ZERO));
}

/// Restores the claim and the catalog's sequence, as if no daemon had adopted the state or served since.
fn renew(store: &Store, kept: &mut StoredDescriptors) {
    let ends =
        |kept: &StoredDescriptors, end| kept.iter().position(|(name, _)| name.ends_with(end));
    let claim = ends(kept, "-claim").unwrap();
    kept[claim].1 = rustix::event::eventfd(1, rustix::event::EventfdFlags::NONBLOCK).unwrap();
    if let Some(at) = ends(kept, "-state") {
        let devices = store
            .devices
            .iter()
            .map(|path| Device::open_readonly(path).unwrap());
        let devices: Vec<_> = devices.collect();
        let found = recover::read(&mut DeviceBlocks(&devices)).unwrap();
        let mut state = state_of(kept);
        state.catalog = found.catalog.sequence;
        kept[at].1 = handover::seal(&state).unwrap();
    }
}

#[test]
fn what_is_left_of_a_hand_over_before_does_not_mix_with_the_next() {
    let (manager, mut session, first) = stopped();
    let daemon = manager.start(&mut copies(&first));
    fill_tiles(&mut session, 4, 2, 9);
    let (second, _) = manager.stop(daemon);
    // In this case the manager did not process the request to remove the descriptors.
    let mut both: StoredDescriptors = copies(&first);
    both.extend(copies(&second));
    let daemon = manager.start(&mut both);
    reattach(&mut daemon.control(), &session);
    expect_tiles(&mut session, 4, 9);
    let (third, _) = manager.stop(daemon);
    // Two states that no daemon adopted: neither is accepted. Nor is a state whose names occur twice.
    let (mut both, mut again) = (copies(&third), copies(&second));
    renew(&manager.store, &mut again);
    both.extend(again);
    let log = manager.log_with(both);
    assert!(log.contains("two daemons have handed over"), "{log}");
    let mut twice = copies(&third);
    twice.extend(copies(&third));
    let log = manager.log_with(twice);
    assert!(log.contains("two descriptors have the name"), "{log}");
}

#[test]
fn a_start_that_fails_leaves_the_sessions_to_the_next() {
    let (manager, session, kept) = stopped();
    // Fails late: the metrics port is taken.
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let config = std::fs::read_to_string(&manager.store.config).unwrap();
    let address = taken.local_addr().unwrap();
    let wrong = format!("metrics_listen = \"{address}\"\n{config}");
    std::fs::write(&manager.store.config, wrong).unwrap();
    let mut command = manager.store.serve_command();
    let mut given = copies(&kept);
    let numbers = inherited::pass(&mut command, &given).unwrap();
    let output = command.output().unwrap();
    drop((numbers, command));
    assert!(
        !output.status.success(),
        "{}",
        crate::common::words(&output)
    );
    manager.store.write_config(&manager.store.socket(), "auto");
    let daemon = manager.start(&mut given);
    assert_eq!(reattach(&mut daemon.control(), &session).scratch_count, 2);
}

/// Asserts that the session is over, and that the committed state is there.
fn ends_and_resumes_from_the_first(manager: &Manager, session: &Session) {
    assert!(session.hung_up(LONG), "the process learns that it is over");
    let daemon = manager.start(&mut Vec::new());
    let mut control = daemon.control();
    let mut session = control.session("tiny");
    session.resume(&mut control, 1);
    expect_tiles(&mut session, 4, 1);
}

#[test]
fn a_state_counts_once() {
    let (manager, mut session, kept) = stopped();
    let daemon = manager.start(&mut copies(&kept));
    // The state does not know what the first daemon writes.
    fill_tiles(&mut session, 4, 2, 9);
    drop(daemon);
    let log = manager.log_with(copies(&kept));
    assert!(log.contains("used before"), "{log}");
    drop(kept);
    ends_and_resumes_from_the_first(&manager, &session);
}

#[test]
fn a_daemon_that_served_without_the_sessions_ends_them_and_nothing_committed_is_lost() {
    let (manager, session, kept) = stopped();
    // Started by hand, so that it gets no descriptors, and killed before it has committed what it wrote.
    let mut by_hand = manager.store.serve();
    let mut control = by_hand.control();
    let mut other = control.session("tiny");
    other.resume(&mut control, 1);
    fill_tiles(&mut other, 4, 2, 9);
    by_hand.signal(Signal::KILL);
    by_hand.wait(LONG);
    let log = manager.log_with(kept);
    assert!(log.contains("another daemon has served"), "{log}");
    assert!(log.contains("they end"), "{log}");
    ends_and_resumes_from_the_first(&manager, &session);
}

#[test]
fn what_is_not_whole_ends_the_sessions_and_nothing_else() {
    let (manager, session, kept) = stopped();
    let without = |ends: &[&str]| {
        let mut less = copies(&kept);
        less.retain(|(name, _)| !ends.iter().any(|end| name.ends_with(end)));
        if !ends.contains(&"claim") {
            renew(&manager.store, &mut less);
        }
        less
    };
    let printed = [
        ("state", "without the state"),
        ("claim", "without the state"),
        ("arena", "descriptors of its sessions are missing"),
        ("line", "descriptors of its sessions are missing"),
    ];
    for (end, words) in printed {
        let log = manager.log_with(without(&[end]));
        assert!(log.contains(words), "{log}");
    }
    // With other names.
    for (name, words) in [
        ("-arena", "another size or is not sealed"),
        ("-ring", "memory file"),
    ] {
        let mut other = without(&[name]);
        let (full, _) = kept.iter().find(|(kept, _)| kept.ends_with(name)).unwrap();
        other.push((full.clone(), tempfile::tempfile().unwrap().into()));
        let log = manager.log_with(other);
        assert!(
            log.contains(words) || log.contains("read its seals"),
            "{log}"
        );
        assert!(log.contains("cannot adopt"), "{log}");
    }
    drop(kept);
    assert!(session.hung_up(LONG));
    let daemon = manager.start(&mut Vec::new());
    daemon.control().session("tiny");
}
