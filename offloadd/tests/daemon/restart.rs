//! The daemon restarted under living processes. What could go wrong: bytes, tickets or commits that are lost or come twice, a
//! session that goes on with what is no longer true, one that does not end when its process has, a state that somebody
//! changed. The test is the service manager: it keeps what the daemon gives it, and gives the next one what it likes.

use std::io::{BufRead, BufReader, IoSliceMut, Read};
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixDatagram;
use std::process::Stdio;
use std::time::Duration;

use offload_api::fault::FaultKind;
use offload_api::ids::{SlotIndex, TicketId};
use offload_api::proto;
use offload_api::ring::entry::Request;
use offloadd::device::{Device, DeviceBlocks};
use offloadd::handover::message::{self, State};
use offloadd::handover::{self, inherited, is_state};
use offloadd::store::recover;
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags};
use rustix::process::Signal;

use crate::common::{
    Control, Daemon, Session, Store, engines, eventually, expect_tiles, fill_tiles, link_program,
    open, swap_in, swap_out,
};

const LONG: Duration = Duration::from_secs(60);

type Kept = Vec<(String, OwnedFd)>;

/// Keeps descriptors by systemd's rules.
struct Manager {
    store: Store,
    socket: UnixDatagram,
}

impl Manager {
    fn new(store: Store) -> Self {
        let socket = UnixDatagram::bind(store.folder.path().join("notify")).unwrap();
        socket.set_nonblocking(true).unwrap();
        Self { store, socket }
    }

    /// With what is kept, and keeps no longer what it says that it has.
    fn start(&self, kept: &mut Kept) -> Daemon {
        let mut command = self.store.serve_command();
        command.env("NOTIFY_SOCKET", self.store.folder.path().join("notify"));
        let _numbers = inherited::pass(&mut command, kept).unwrap();
        std::thread::scope(|scope| {
            let started = scope.spawn(|| Daemon::start(command, self.store.socket()));
            while !started.is_finished() {
                self.hear(kept);
                std::thread::sleep(Duration::from_millis(1));
            }
            self.hear(kept);
            started.join().unwrap()
        })
    }

    /// What it said since, as `kept` changes by it.
    fn hear(&self, kept: &mut Kept) {
        loop {
            let mut bytes = [0; 4096];
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(8))];
            let mut control = RecvAncillaryBuffer::new(&mut space);
            let mut parts = [IoSliceMut::new(&mut bytes)];
            let flags = RecvFlags::CMSG_CLOEXEC;
            let Ok(message) = rustix::net::recvmsg(&self.socket, &mut parts, &mut control, flags)
            else {
                return;
            };
            let mut fds = Vec::new();
            for item in control.drain() {
                if let RecvAncillaryMessage::ScmRights(rights) = item {
                    fds.extend(rights);
                }
            }
            let words = String::from_utf8_lossy(&bytes[..message.bytes]).into_owned();
            let says = |word| words.lines().any(|line| line == word);
            let name = words.lines().find_map(|l| l.strip_prefix("FDNAME="));
            if says("FDSTORE=1") {
                assert!(says("FDPOLL=0") && fds.len() == 1, "{words}");
                kept.push((name.unwrap().to_owned(), fds.pop().unwrap()));
            } else if says("FDSTOREREMOVE=1") {
                kept.retain(|(kept, _)| kept != name.unwrap());
            }
        }
    }

    /// Ends `daemon` in order. What it gave to be kept, and what it logged.
    fn stop(&self, mut daemon: Daemon) -> (Kept, String) {
        daemon.signal(Signal::TERM);
        let mut kept = Vec::new();
        eventually("it ends", LONG, || {
            self.hear(&mut kept);
            daemon.child.try_wait().unwrap().is_some()
        });
        self.hear(&mut kept);
        assert_eq!(daemon.wait(LONG), Some(0));
        let mut log = String::new();
        let mut stderr = daemon.child.stderr.take().unwrap();
        stderr.read_to_string(&mut log).unwrap();
        (kept, log)
    }

    /// The next daemon, which has what the one before gave.
    fn restart(&self, daemon: Daemon) -> Daemon {
        let (mut kept, _) = self.stop(daemon);
        let daemon = self.start(&mut kept);
        assert!(kept.is_empty(), "what it has taken is kept no longer");
        daemon
    }

    /// What a daemon logs that is started with `kept` and ended again.
    fn log_with(&self, mut kept: Kept) -> String {
        let daemon = self.start(&mut kept);
        assert!(kept.is_empty(), "what was refused is kept no longer");
        self.stop(daemon).1
    }
}

fn reattach(control: &mut Control, session: &Session) -> proto::ReattachReply {
    let token = session.token.clone();
    control.reattach(proto::ReattachRequest { token }).unwrap()
}

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
        // The store says the same to whoever comes anew.
        drop(session);
        drop(daemon);
        let daemon = manager.start(&mut Vec::new());
        let mut control = daemon.control();
        let reply = control.open_session(open("tiny")).unwrap();
        let newest = reply.job.clone().unwrap().generations.pop().unwrap();
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
fn what_is_submitted_while_no_daemon_runs_is_served_once_by_the_next() {
    let manager = Manager::new(Store::new(1, "auto"));
    let daemon = manager.start(&mut Vec::new());
    let mut control = daemon.control();
    let mut session = control.session("tiny");
    let working = session.begin(&mut control, 4);
    fill_tiles(&mut session, 4, working, 1);
    let (mut kept, _) = manager.stop(daemon);
    let place = session.geometry.place(SlotIndex(0)).unwrap();
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
        session.rings.take().unwrap().is_none(),
        "nothing comes twice"
    );
    // And by the one after it nothing of that again.
    let daemon = manager.restart(daemon);
    let again = Request {
        ticket: TicketId(9),
        ..swap_in(0, 2)
    };
    session.submit(again);
    assert_eq!(session.complete().ticket, 9);
    let bytes = session.read_slot(session.geometry.place(SlotIndex(2)).unwrap().offset);
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
    // Who did not hear the answer finds it out.
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
    // The descriptors were handed out, to this process: not to another one with its token.
    let reply = proto::OpenSessionReply {
        token: session.token.clone(),
        descriptor_socket: format!("{}.fds", daemon.socket.display()),
        ..proto::OpenSessionReply::default()
    };
    assert!(Session::attach(&reply).is_err());
    reattach(&mut control, &session);
    drop(daemon);
}

/// A daemon with one session of 4 tiles, of which all are written and none is committed; stopped.
fn stopped() -> (Manager, Session, Kept) {
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
    assert!(log.contains("1 sessions wait for the next daemon"), "{log}");
    assert!(kept.len() >= 8, "{kept:?}");
    (manager, session, kept)
}

/// `kept` with another state.
fn with_state(mut kept: Kept, state: OwnedFd) -> Kept {
    let at = kept.iter().position(|(name, _)| is_state(name)).unwrap();
    kept[at].1 = state;
    kept
}

fn state_of(kept: &Kept) -> State {
    let (_, state) = kept.iter().find(|(name, _)| is_state(name)).unwrap();
    handover::open(state).unwrap()
}

/// How a state is made wrong, and what the daemon says of it.
type Lie = (&'static str, fn(&mut State));

const LIES: &[Lie] = &[
    ("another store", |state| state.store[3] ^= 1),
    ("the store has", |state| state.devices.push(7)),
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
        state.jobs[0].poison = Some(message::Fault { kind: 999, message });
    }),
    ("out of order", |state| state.jobs[0].tiles.reverse()),
    ("out of order", |state| state.jobs[0].tiles[3].index = 4),
    ("does not lie where", |state| written(state).which ^= 1),
    ("does not lie where", |state| written(state).which = 9),
    ("does not lie where", |state| written(state).offset += 4096),
    ("does not lie where", |state| written(state).generation -= 1),
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
    ("bytes of host memory", |state| {
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
    ("stands there twice", |state| {
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

fn stored(state: &mut State) -> &mut message::Stored {
    state.jobs[0].stored.as_mut().unwrap()
}

fn written(state: &mut State) -> &mut message::Written {
    state.jobs[0].tiles[0].written.as_mut().unwrap()
}

fn copies(kept: &Kept) -> Kept {
    let copy = |(name, fd): &(String, OwnedFd)| (name.clone(), fd.try_clone().unwrap());
    kept.iter().map(copy).collect()
}

#[test]
fn a_state_that_does_not_fit_the_store_or_the_settings_is_refused_by_name() {
    let (manager, session, kept) = stopped();
    for (words, lie) in LIES {
        let mut told = copies(&kept);
        // The one before has served, and has emptied what can be emptied once.
        renew(&manager.store, &mut told);
        let truth = state_of(&told);
        let mut state = truth.clone();
        lie(&mut state);
        assert_ne!(state, truth, "{words}");
        let told = with_state(told, handover::seal(&state).unwrap());
        let log = manager.log_with(told);
        assert!(log.contains(words), "{words:?} is not in: {log}");
        assert!(log.contains("session"), "{log}");
        assert!(!log.contains("go on"), "{words:?}: {log}");
    }
    // As they were they still fit.
    let mut told = copies(&kept);
    renew(&manager.store, &mut told);
    let daemon = manager.start(&mut told);
    assert_eq!(reattach(&mut daemon.control(), &session).scratch_count, 2);
    drop((kept, told));
    assert!(!session.hung_up(Duration::ZERO));
}

/// Makes it as if nobody had taken it up, and no daemon had served since.
fn renew(store: &Store, kept: &mut Kept) {
    let ends = |kept: &Kept, end| kept.iter().position(|(name, _)| name.ends_with(end));
    let claim = ends(kept, "-claim").unwrap();
    kept[claim].1 = rustix::event::eventfd(1, rustix::event::EventfdFlags::NONBLOCK).unwrap();
    if let Some(at) = ends(kept, "-state") {
        let devices = store.devices.iter().map(|path| Device::look(path).unwrap());
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
    // Its manager was deaf to the words that it is kept no longer.
    let mut both: Kept = copies(&first);
    both.extend(copies(&second));
    let daemon = manager.start(&mut both);
    reattach(&mut daemon.control(), &session);
    expect_tiles(&mut session, 4, 9);
    let (third, _) = manager.stop(daemon);
    // Two that nobody took up: neither is believed. Nor one whose names are there twice.
    let (mut both, mut again) = (copies(&third), copies(&second));
    renew(&manager.store, &mut again);
    both.extend(again);
    let log = manager.log_with(both);
    assert!(log.contains("two daemons have handed over"), "{log}");
    let mut twice = copies(&third);
    twice.extend(copies(&third));
    let log = manager.log_with(twice);
    assert!(log.contains("two descriptors are called"), "{log}");
}

#[test]
fn a_start_that_fails_leaves_the_sessions_to_the_next() {
    let (manager, session, kept) = stopped();
    // Fails late: somebody listens where the counts would be.
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

/// The session is over, and what was committed is there.
fn ends_and_goes_on_from_the_first(manager: &Manager, session: &Session) {
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
    // What the first one writes, the state does not know.
    fill_tiles(&mut session, 4, 2, 9);
    drop(daemon);
    let log = manager.log_with(copies(&kept));
    assert!(log.contains("taken up before"), "{log}");
    drop(kept);
    ends_and_goes_on_from_the_first(&manager, &session);
}

#[test]
fn a_daemon_that_served_without_the_sessions_ends_them_and_nothing_committed_is_lost() {
    let (manager, session, kept) = stopped();
    // Started by hand, so that nobody gives it anything, and killed before it has committed what it wrote.
    let mut by_hand = manager.store.serve();
    let mut control = by_hand.control();
    let mut other = control.session("tiny");
    other.resume(&mut control, 1);
    fill_tiles(&mut other, 4, 2, 9);
    by_hand.signal(Signal::KILL);
    by_hand.wait(LONG);
    let log = manager.log_with(kept);
    assert!(log.contains("another daemon has served"), "{log}");
    assert!(log.contains("its sessions end"), "{log}");
    ends_and_goes_on_from_the_first(&manager, &session);
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
    let said = [
        ("state", "without the state"),
        ("claim", "without the state"),
        ("arena", "descriptors of its sessions are missing"),
        ("line", "descriptors of its sessions are missing"),
    ];
    for (end, words) in said {
        let log = manager.log_with(without(&[end]));
        assert!(log.contains(words), "{log}");
    }
    // Not what they are called.
    for (name, words) in [
        ("-arena", "another size, or not sealed"),
        ("-ring", "memory file"),
    ] {
        let mut other = without(&[name]);
        let (full, _) = kept.iter().find(|(kept, _)| kept.ends_with(name)).unwrap();
        other.push((full.clone(), tempfile::tempfile().unwrap().into()));
        let log = manager.log_with(other);
        assert!(
            log.contains(words) || log.contains("reading its seals"),
            "{log}"
        );
        assert!(log.contains("not taken up"), "{log}");
    }
    drop(kept);
    assert!(session.hung_up(LONG));
    let daemon = manager.start(&mut Vec::new());
    daemon.control().session("tiny");
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

/// The process id of the daemon that runs.
fn daemon_of(supervisor: &Daemon) -> Option<i32> {
    let tasks = std::fs::read_dir(format!("/proc/{}/task", supervisor.child.id())).unwrap();
    let children = tasks.map(|task| {
        std::fs::read_to_string(task.unwrap().path().join("children")).unwrap_or_default()
    });
    let children = children.collect::<String>();
    children
        .split_whitespace()
        .next()
        .map(|pid| pid.parse::<i32>().unwrap())
}

#[test]
fn more_sessions_than_the_usual_limit_of_descriptors_outlive_a_restart_by_a_supervisor() {
    let store = Store::new(1, "auto");
    let mut command = std::process::Command::new("sh");
    // Seven a session, and some for both processes.
    command.args(["-c", "ulimit -Sn 64; exec \"$0\" supervise --config \"$1\""]);
    command
        .arg(env!("CARGO_BIN_EXE_offloadd"))
        .arg(&store.config);
    let mut supervisor = Daemon::start(command, store.socket());
    let mut control = supervisor.control();
    let sessions: Vec<_> = (0..16)
        .map(|nth| control.session(&format!("job{nth}")))
        .collect();
    let first = daemon_of(&supervisor).unwrap();
    supervisor.signal(Signal::USR2);
    eventually("another one runs", LONG, || {
        daemon_of(&supervisor).is_some_and(|pid| pid != first)
    });
    eventually("it listens", LONG, || {
        std::os::unix::net::UnixStream::connect(store.socket()).is_ok()
    });
    let mut control = supervisor.control();
    for session in &sessions {
        reattach(&mut control, session);
        assert!(!session.hung_up(Duration::ZERO));
    }
    supervisor.signal(Signal::TERM);
    assert_eq!(supervisor.wait(LONG), Some(0));
}

#[test]
fn sessions_wait_while_the_program_cannot_be_started() {
    let store = Store::new(1, "auto");
    let [here, away] = ["offloadd", "away"].map(|name| store.folder.path().join(name));
    link_program(&here);
    let mut command = std::process::Command::new(&here);
    command.args(["supervise", "--config"]).arg(&store.config);
    let mut supervisor = Daemon::start(command, store.socket());
    let mut control = supervisor.control();
    let session = control.session("tiny");
    std::fs::rename(&here, &away).unwrap();
    supervisor.signal(Signal::USR2);
    let log = BufReader::new(supervisor.child.stderr.take().unwrap());
    let mut lines = log.lines().map(Result::unwrap);
    let said = lines.find(|line| line.contains("could not be started"));
    assert!(said.unwrap().contains("another one is started in a second"));
    assert!(!session.hung_up(Duration::ZERO));
    std::fs::rename(&away, &here).unwrap();
    assert!(lines.any(|line| line.contains("sessions of the daemon before go on")));
    eventually("it listens", LONG, || {
        std::os::unix::net::UnixStream::connect(store.socket()).is_ok()
    });
    reattach(&mut supervisor.control(), &session);
    supervisor.signal(Signal::TERM);
    assert_eq!(supervisor.wait(LONG), Some(0));
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
    let mut manager = Manager::new(Store::new(2, "auto"));
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
        seen.devices.len() == 1
    });
    manager.store.devices.pop();
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
fn a_supervisor_restarts_its_daemon_when_asked_and_when_it_fails_and_ends_it_with_itself() {
    let store = Store::new(1, "auto");
    let mut command = crate::common::program();
    command.args(["supervise", "--config"]).arg(&store.config);
    command.stdin(Stdio::null());
    let mut supervisor = Daemon::start(command, store.socket());
    let mut control = supervisor.control();
    let mut session = control.session("tiny");
    let working = session.begin(&mut control, 3);
    fill_tiles(&mut session, 3, working, 4);
    let first = daemon_of(&supervisor).unwrap();
    supervisor.signal(Signal::USR2);
    eventually("another one runs", LONG, || {
        daemon_of(&supervisor).is_some_and(|pid| pid != first)
    });
    expect_tiles(&mut session, 3, 4);
    let second = daemon_of(&supervisor).unwrap();

    let pid = rustix::process::Pid::from_raw(second).unwrap();
    rustix::process::kill_process(pid, Signal::KILL).unwrap();
    assert!(session.hung_up(LONG), "nothing was handed over");
    eventually("a third one serves", LONG, || {
        daemon_of(&supervisor).is_some_and(|pid| pid != second)
            && std::os::unix::net::UnixStream::connect(store.socket()).is_ok()
    });
    let session = supervisor.control().session("tiny");
    let mut second = crate::common::program();
    second.args(["supervise", "--config"]).arg(&store.config);
    let refused = crate::common::words(&second.output().unwrap());
    assert!(
        refused.contains("another `offloadd supervise`"),
        "{refused}"
    );
    supervisor.signal(Signal::TERM);
    assert_eq!(supervisor.wait(LONG), Some(0));
    assert!(session.hung_up(LONG));
    assert!(!store.socket().exists());
}
