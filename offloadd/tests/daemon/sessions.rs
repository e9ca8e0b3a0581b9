//! Tests sessions over real sockets, on each engine. What could go wrong: bytes at the wrong place, a commit that a restart forgets, descriptors for
//! any process that asks, memory that a dead process keeps, an endless wait.

use std::io::{BufRead, BufReader};
use std::path::PathBuf;
use std::process::Command;
use std::time::{Duration, Instant};

use offload_api::fault::{Fault, FaultKind};
use offload_api::handoff::{self, HandoffError};
use offload_api::ids::{SessionToken, SlotIndex};
use offload_api::proto;

use crate::another_user::{again, expect_success};
use crate::common::{
    Control, Session, Store, engines, eventually, expect_tiles, fill_tiles, open, readable,
    swap_out,
};

const SOON: Duration = Duration::from_secs(60);

#[test]
fn what_was_committed_is_there_after_kill_9_on_each_engine() {
    for engine in engines() {
        let store = Store::new(2, engine);
        let mut daemon = store.serve();
        let mut control = daemon.control();
        let about = control.describe(proto::DescribeRequest {}).unwrap();
        println!("engine {} ({})", about.engine, about.engine_reason);
        assert!(!about.engine_reason.is_empty() && about.devices.len() == 2);
        let mut session = control.session("tiny");
        let working = session.begin(&mut control, 6);
        fill_tiles(&mut session, 6, working, 10);
        let working = session.commit(&mut control, working, b"step 1");
        // Written after the commit and never committed.
        fill_tiles(&mut session, 6, working, 50);
        daemon.child.kill().unwrap();
        daemon.child.wait().unwrap();
        assert!(session.hung_up(SOON), "the process learns it");

        let daemon = store.serve();
        let mut control = daemon.control();
        let reply = control.open_session(open("tiny")).unwrap();
        let job = control.job(&reply.token).expect("the store knows it");
        assert_eq!((job.tiles.len(), &job.layout[..]), (6, &b"layout"[..]));
        let newest = job.generations.last().unwrap();
        assert_eq!((newest.generation, newest.confirmed), (1, true));
        assert_eq!(newest.blobs[0].blob, b"step 1");
        let mut session = Session::attach(&reply).unwrap();
        session.resume(&mut control, 1);
        expect_tiles(&mut session, 6, 10);
    }
}

#[test]
fn a_dead_process_gives_its_memory_and_its_rank_back() {
    let store = Store::new(1, "auto");
    let daemon = store.serve();
    let mut control = daemon.control();
    let free_bytes = control.arena_free_bytes();
    let session = control.session("tiny");
    assert!(control.arena_free_bytes() < free_bytes);
    let fault = control.open_session(open("tiny")).unwrap_err();
    assert_eq!(fault.kind, FaultKind::Busy);
    // Dropping the session closes its descriptors, as the kernel does for a dead process.
    drop(session);
    eventually("its memory is free", SOON, || {
        control.arena_free_bytes() == free_bytes
    });
    control.session("tiny");
}

#[test]
fn closing_in_order_frees_the_session_and_hangs_up() {
    let store = Store::new(1, "auto");
    let daemon = store.serve();
    let mut control = daemon.control();
    let free_bytes = control.arena_free_bytes();
    let session = control.session("tiny");
    let token = session.token.clone();
    control
        .close_session(proto::CloseSessionRequest { token })
        .unwrap();
    eventually("its memory is free", SOON, || {
        control.arena_free_bytes() == free_bytes
    });
    assert!(session.hung_up(SOON));
    let token = session.token.clone();
    let again = control.close_session(proto::CloseSessionRequest { token });
    assert_eq!(again.unwrap_err().kind, FaultKind::NotFound);
}

#[test]
fn as_many_operations_as_settings_can_allow_make_a_session_like_others() {
    let store = Store::new(1, "auto");
    let depth = offload_api::IODEPTH_MAX;
    let text = std::fs::read_to_string(&store.config).unwrap();
    std::fs::write(&store.config, format!("{text}iodepth_max = {depth}\n")).unwrap();
    let daemon = store.serve();
    let mut control = daemon.control();
    let reply = control.open_session(proto::OpenSessionRequest {
        iodepth: depth,
        ..open("deep")
    });
    let reply = reply.unwrap();
    assert_eq!(reply.iodepth, depth);
    let mut session = Session::attach(&reply).unwrap();
    let working = session.begin(&mut control, 8);
    fill_tiles(&mut session, 8, working, 3);
    expect_tiles(&mut session, 8, 3);
}

#[test]
fn descriptors_are_handed_out_once_and_to_nobody_who_guesses() {
    let store = Store::new(1, "psync");
    let daemon = store.serve();
    let mut control = daemon.control();
    let reply = control.open_session(open("tiny")).unwrap();
    let refused = |token: &[u8]| {
        let token = SessionToken::from_bytes(token).unwrap();
        let path = PathBuf::from(&reply.descriptor_socket);
        match handoff::receive(&path, token, SOON) {
            Err(HandoffError::Refused(fault)) => fault.kind,
            other => panic!("{other:?}"),
        }
    };
    assert_eq!(refused(&[0; 16]), FaultKind::NotFound);
    let _session = Session::attach(&reply).unwrap();
    assert_eq!(refused(&reply.token), FaultKind::Busy);
}

#[test]
fn many_processes_at_once_each_get_their_own_bytes() {
    for engine in engines() {
        let store = Store::new(3, engine);
        let daemon = store.serve();
        std::thread::scope(|scope| {
            for process in 0..8u8 {
                let daemon = &daemon;
                scope.spawn(move || {
                    let mut control = daemon.control();
                    let mut session = control.session(&format!("job{process}"));
                    let mut working = session.begin(&mut control, 10);
                    for round in 0..4 {
                        let fill = process * 31 + round;
                        fill_tiles(&mut session, 10, working, fill);
                        expect_tiles(&mut session, 10, fill);
                        working = session.commit(&mut control, working, &[fill]);
                    }
                    expect_tiles(&mut session, 10, process * 31 + 3);
                });
            }
        });
    }
}

const CHILD: &str = "OFFLOADD_TEST_OTHER_USER";

#[test]
fn another_users_token_and_job_are_not_ours() {
    if let Some(place) = std::env::var_os(CHILD) {
        return other_user(&place.into_string().unwrap());
    }
    if !rustix::process::geteuid().is_root() {
        println!(
            "skipped: {}: only root can become another user",
            std::thread::current().name().unwrap_or("a test")
        );
        return;
    }
    let store = Store::new(1, "psync");
    let daemon = store.serve();
    let mut control = daemon.control();
    let _committed = control.session("mine");
    let reply = control.open_session(open("tiny")).unwrap();
    // Let the other user reach the sockets, as a shared group would.
    let all = |mode| std::os::unix::fs::PermissionsExt::from_mode(mode);
    std::fs::set_permissions(store.dir.path(), all(0o755)).unwrap();
    for socket in [
        daemon.socket.clone(),
        PathBuf::from(&reply.descriptor_socket),
    ] {
        std::fs::set_permissions(socket, all(0o666)).unwrap();
    }
    let token: String = reply.token.iter().map(|b| format!("{b:02x}")).collect();
    let mut child = again("sessions::another_users_token_and_job_are_not_ours");
    let (socket, device) = (daemon.socket.display(), store.devices[0].display());
    child.env(
        CHILD,
        format!("{socket}|{token}|{}|{device}", daemon.child.id()),
    );
    expect_success(child);
    // The refusals have no effect on the owner.
    Session::attach(&reply).unwrap();
    // The user who runs the daemon sees all jobs.
    let seen = control.metrics(proto::MetricsRequest {}).unwrap();
    let mine = (seen.jobs.iter()).filter(|job| job.job == "mine" && job.uid == 0);
    assert_eq!(mine.count(), 1);
}

fn other_user(place: &str) {
    let mut words = place.split('|');
    let [socket, token, pid, device] = [(); 4].map(|()| words.next().unwrap());
    // It can be read neither through the daemon's process nor through its devices.
    let refused = |path: String| {
        let opened = std::fs::File::open(&path).map(|_| path).unwrap_err();
        assert_eq!(opened.kind(), std::io::ErrorKind::PermissionDenied);
    };
    assert!(std::fs::read_dir(format!("/proc/{pid}/fd")).is_err());
    refused(format!("/proc/{pid}/mem"));
    refused(device.to_owned());
    let token: Vec<u8> = (0..16)
        .map(|i| u8::from_str_radix(&token[2 * i..2 * i + 2], 16).unwrap())
        .collect();
    let fds = PathBuf::from(format!("{socket}.fds"));
    let stolen = handoff::receive(&fds, SessionToken::from_bytes(&token).unwrap(), SOON);
    let fault = Fault::from(stolen.expect_err("another user's session"));
    assert_eq!(fault.kind, FaultKind::Denied, "{fault}");
    let mut control = Control::connect(socket.as_ref());
    let tile = proto::Tile {
        unit: 0,
        kind: 1,
        elem_offset: 0,
        tile_bytes: 4096,
    };
    let define = proto::DefineTilesRequest {
        token: token.clone(),
        layout: Vec::new(),
        tiles: vec![tile],
        durability: 1,
        nodes: 1,
    };
    let resume = proto::ResumeRequest {
        token: token.clone(),
        generation: 0,
    };
    let commit = proto::CommitRequest {
        token: token.clone(),
        generation: 1,
        blob: Vec::new(),
    };
    let damage = proto::ReportDamageRequest {
        token: token.clone(),
        ..Default::default()
    };
    let answers = [
        control.define_tiles(define).err(),
        control.resume(resume).err(),
        control.commit(commit).err(),
        control.report_damage(damage).err(),
        control
            .close_session(proto::CloseSessionRequest { token })
            .err(),
    ];
    for (call, answer) in answers.into_iter().enumerate() {
        let kind = answer.expect("another user's session").kind;
        assert!(
            [FaultKind::Denied, FaultKind::NotFound].contains(&kind),
            "call {call}: {kind:?}"
        );
    }
    for job in ["mine", "tiny"] {
        let job = job.to_owned();
        let dropped = control.drop_job(proto::DropJobRequest { job, uid: None });
        assert_eq!(dropped.unwrap_err().kind, FaultKind::NotFound);
    }
    // The same name is another job.
    let mine = control.open_session(open("mine")).unwrap();
    assert_eq!(control.job(&mine.token), None);
    // Others' jobs are not shown either.
    let seen = control.metrics(proto::MetricsRequest {}).unwrap();
    let jobs: Vec<_> = seen.jobs.iter().map(|job| (job.uid, &*job.job)).collect();
    assert_eq!(jobs, [(65534, "mine")]);
    assert_eq!(seen.devices.len(), 1);
}

#[test]
fn a_session_nobody_comes_for_is_given_up() {
    let store = Store::new(1, "psync");
    let daemon = store.serve();
    let mut control = daemon.control();
    let free_bytes = control.arena_free_bytes();
    let reply = control.open_session(open("tiny")).unwrap();
    assert!(control.arena_free_bytes() < free_bytes);
    eventually("its memory is free", 10 * SOON, || {
        std::thread::sleep(Duration::from_millis(100));
        control.arena_free_bytes() == free_bytes
    });
    let late = Session::attach(&reply).map(|_| ()).unwrap_err();
    assert_eq!(Fault::from(late).kind, FaultKind::NotFound);
}

#[test]
fn a_silent_connection_to_the_descriptor_socket_is_closed_and_delays_nobody() {
    let store = Store::new(1, "psync");
    let daemon = store.serve();
    let mut control = daemon.control();
    let path = PathBuf::from(format!("{}.fds", daemon.socket.display()));
    let address = rustix::net::SocketAddrUnix::new(&path).unwrap();
    let connect = || {
        let (unix, kind) = (
            rustix::net::AddressFamily::UNIX,
            rustix::net::SocketType::SEQPACKET,
        );
        let socket = rustix::net::socket(unix, kind, None).unwrap();
        rustix::net::connect(&socket, &address).unwrap();
        socket
    };
    // More than may be silent at a time.
    let silent: Vec<_> = (0..100).map(|_| connect()).collect();
    let since = Instant::now();
    control.session("tiny");
    assert!(
        since.elapsed() < Duration::from_secs(8),
        "{:?}",
        since.elapsed()
    );
    for socket in silent {
        assert!(readable(&socket, Duration::from_secs(8)), "still open");
    }
}

#[test]
fn a_stop_ends_sessions_and_says_so_to_those_who_wait() {
    let store = Store::new(1, "auto");
    let mut daemon = store.serve();
    let mut control = daemon.control();
    // A rank that waits for one that never comes.
    let mut request = open("pair");
    request.local_ranks = 2;
    let reply = control.open_session(request).unwrap();
    let session = Session::attach(&reply).unwrap();
    daemon.signal(rustix::process::Signal::TERM);
    assert!(session.hung_up(SOON));
    assert_eq!(daemon.wait(SOON), Some(0));
    let fault = control.open_session(open("late")).unwrap_err();
    assert_eq!(fault.kind, FaultKind::Stopping);
}

/// Makes calls on `device` fail in a running daemon; ends when dropped.
struct Refusing(std::process::Child);

impl Refusing {
    /// Returns `None` without strace, or where attaching is forbidden.
    fn attach(pid: u32, inject: &str, device: &std::path::Path) -> Option<Self> {
        let call = inject.split(':').next().unwrap();
        let mut strace = Command::new("strace")
            .args(["-f", "-o", "/dev/null", "-p", &pid.to_string(), "-P"])
            .arg(device)
            .args(["-e", &format!("trace={call}")])
            .args(["-e", &format!("inject={inject}")])
            .stderr(std::process::Stdio::piped())
            .spawn()
            .ok()?;
        let mut told = String::new();
        BufReader::new(strace.stderr.as_mut().unwrap())
            .read_line(&mut told)
            .unwrap();
        let attached = told.contains("attached");
        let refusing = Self(strace);
        // The first line is for the whole process or for its first thread.
        std::thread::sleep(Duration::from_millis(300));
        attached.then_some(refusing)
    }
}

impl Drop for Refusing {
    fn drop(&mut self) {
        // If strace were killed, the daemon would stay stopped.
        let pid = rustix::process::Pid::from_child(&self.0);
        let _ = rustix::process::kill_process(pid, rustix::process::Signal::TERM);
        let _ = self.0.wait();
    }
}

#[test]
fn a_devices_errors_arrive_typed_and_nothing_acknowledged_is_lost() {
    let store = Store::new(1, "psync");
    let mut daemon = store.serve();
    let mut control = daemon.control();
    let mut session = control.session("tiny");
    let working = session.begin(&mut control, 3);
    fill_tiles(&mut session, 3, working, 10);
    let working = session.commit(&mut control, working, b"one");
    let refusing = |daemon: &crate::common::Daemon, inject: &str| {
        Refusing::attach(daemon.child.id(), inject, &store.devices[0])
    };

    let bytes = [99; 4096];
    let place = session.geometry.slot_place(SlotIndex(1)).unwrap();
    session.write_slot(place.offset, &bytes);
    for (inject, fault, errno) in [
        ("pwrite64:error=EIO", FaultKind::Io, 5),
        ("pwrite64:error=ENOSPC", FaultKind::NoSpace, 28),
        ("pwrite64:retval=512", FaultKind::Short, 0),
    ] {
        let Some(_refusing) = refusing(&daemon, inject) else {
            println!(
                "skipped: {}: strace cannot attach here",
                std::thread::current().name().unwrap_or("a test")
            );
            return;
        };
        session.submit(swap_out(0, 1, working, &bytes));
        let cqe = session.complete();
        assert_eq!(
            FaultKind::from_number(cqe.fault),
            Some(fault),
            "{inject}: {cqe:?}"
        );
        assert_eq!(
            (cqe.errno, cqe.device, cqe.asked_bytes),
            (errno, 0, 4096),
            "{cqe:?}"
        );
        assert!(cqe.offset > 0, "it says where");
    }
    // A failed write leaves the tile unwritten: its old content must not be committed in its place.
    let token = session.token.clone();
    let commit = |control: &mut Control| {
        control.commit(proto::CommitRequest {
            token: token.clone(),
            generation: working,
            blob: b"two".to_vec(),
        })
    };
    assert!(commit(&mut control).is_err());
    session.submit(swap_out(0, 1, working, &bytes));
    assert_eq!(session.complete().fault, 0, "the device is well again");
    let flushing = refusing(&daemon, "fdatasync:error=EIO");
    let fault = commit(&mut control).unwrap_err();
    drop(flushing);
    assert!(
        fault
            .message
            .contains(&store.devices[0].display().to_string()),
        "{fault}"
    );
    // Nobody knows what a failed flush lost: a later successful one proves nothing.
    let again = commit(&mut control).unwrap_err();
    assert_eq!(again.kind, FaultKind::Poisoned, "{again}");
    // A refusal in the ring has no words: the process asks for them.
    session.submit(swap_out(0, 1, working, &bytes));
    assert_eq!(session.complete().fault, FaultKind::Poisoned as u32);
    let token = session.token.clone();
    let found = control.reattach(proto::ReattachRequest { token }).unwrap();
    let unusable = found.unusable.expect("it can write nothing more").message;
    let flushing = format!("flushing {}: ", store.devices[0].display());
    for words in [fault.message, again.message, unusable] {
        assert!(
            words.contains(&flushing) && words.contains("os error 5"),
            "{words}"
        );
    }
    daemon.child.kill().unwrap();
    let mut log = String::new();
    let mut stderr = daemon.child.stderr.take().unwrap();
    std::io::Read::read_to_string(&mut stderr, &mut log).unwrap();
    let of_flush = log.lines().filter(|line| line.contains(&flushing));
    assert!(
        of_flush.clone().all(|line| line.contains("os error 5")),
        "{log}"
    );
    assert!(of_flush.count() > 0, "{log}");
    daemon.child.wait().unwrap();

    let daemon = store.serve();
    let mut control = daemon.control();
    let reply = control.open_session(open("tiny")).unwrap();
    let job = control.job(&reply.token).unwrap();
    let newest = job.generations.last().unwrap();
    assert_eq!(
        (newest.generation, &newest.blobs[0].blob[..]),
        (1, &b"one"[..])
    );
    let mut session = Session::attach(&reply).unwrap();
    session.resume(&mut control, 1);
    expect_tiles(&mut session, 3, 10);
}

const HOLDER: &str = "OFFLOADD_TEST_HOLDER";

#[test]
fn a_dead_process_is_dead_even_when_its_child_holds_the_life_line() {
    if let Some(socket) = std::env::var_os(HOLDER) {
        return hold_for_ever(&PathBuf::from(socket));
    }
    let store = Store::new(1, "auto");
    let daemon = store.serve();
    let mut control = daemon.control();
    let free_bytes = control.arena_free_bytes();
    let mut process = Command::new(std::env::current_exe().unwrap())
        .args([
            "--exact",
            "sessions::a_dead_process_is_dead_even_when_its_child_holds_the_life_line",
        ])
        .arg("--nocapture")
        .env(HOLDER, &daemon.socket)
        .stdout(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    let lines = BufReader::new(process.stdout.take().unwrap()).lines();
    let child = lines
        .map_while(Result::ok)
        .find_map(|line| Some(line.split_once("holder ")?.1.parse::<i32>().unwrap()))
        .expect("the process says who holds the line");
    assert!(control.arena_free_bytes() < free_bytes);
    process.kill().unwrap();
    process.wait().unwrap();
    eventually("its memory is free", SOON, || {
        control.arena_free_bytes() == free_bytes
    });
    let child = rustix::process::Pid::from_raw(child).unwrap();
    rustix::process::test_kill_process(child).expect("the child still held the line");
    rustix::process::kill_process(child, rustix::process::Signal::KILL).unwrap();
}

/// Holds all inherited descriptors forever, like a data loader's worker.
fn hold_for_ever(socket: &std::path::Path) {
    let mut control = Control::connect(socket);
    let session = control.session("tiny");
    let line = &session.received.life_line;
    rustix::io::fcntl_setfd(line, rustix::io::FdFlags::empty()).unwrap();
    let child = Command::new("sleep")
        .arg("60")
        .stdout(std::process::Stdio::null())
        .spawn();
    println!("holder {}", child.unwrap().id());
    std::thread::sleep(Duration::from_secs(60));
}
