//! Tests one user against the others, and limits of the machine. What could go wrong: answers that a user does not read, requests that a user does
//! not finish, or messages that a user causes too often cost others memory, descriptors or log lines; a limit of the machine ends the daemon for all.

use std::io::{BufRead, BufReader};
use std::os::fd::OwnedFd;
use std::panic::AssertUnwindSafe;
use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use offload_api::fault::{Fault, FaultKind};
use offload_api::handoff;
use offload_api::ids::SessionToken;
use offload_api::proto::offload_client::OffloadClient;
use offload_api::proto::{self, DescribeJobRequest};
use rustix::net::{AddressFamily, SendFlags, SocketAddrUnix, SocketFlags, SocketType};
use rustix::process::{Resource, Rlimit};
use tonic::transport::Endpoint;

use crate::another_user::{again, expect_success};
use crate::common::{Control, Daemon, Store, eventually, open, open_sized};

const SOON: Duration = Duration::from_secs(60);

fn resident_bytes(daemon: &Daemon) -> u64 {
    let status = format!("/proc/{}/status", daemon.child.id());
    let status = std::fs::read_to_string(status).unwrap();
    let line = status.lines().find_map(|l| l.strip_prefix("VmRSS:"));
    let kib = line.unwrap().trim().strip_suffix("kB").unwrap();
    kib.trim().parse::<u64>().unwrap() << 10
}

/// 32 connections ask 8 times each for a record of 1 MiB and read none of it.
#[test]
fn answers_that_a_user_does_not_read_do_not_grow_the_daemon() {
    let store = Store::new(1, "psync");
    let daemon = store.serve();
    let mut control = daemon.control();
    let session = control.session("large");
    let tile = proto::Tile {
        unit: 0,
        kind: 1,
        elem_offset: 0,
        tile_bytes: 4096,
    };
    control
        .define_tiles(proto::DefineTilesRequest {
            token: session.token.clone(),
            layout: vec![7; 1 << 20],
            tiles: vec![tile],
            durability: 1,
            nodes: 1,
        })
        .unwrap();
    let record = control.job(&session.token).expect("just defined");
    assert_eq!(record.layout.len(), 1 << 20);
    let before = resident_bytes(&daemon);
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(1)
        .enable_all()
        .build()
        .unwrap();
    let untaken = Arc::new(Mutex::new(Vec::new()));
    for _ in 0..32 {
        let endpoint = Endpoint::from_shared(format!("unix:{}", daemon.socket.display())).unwrap();
        let endpoint = endpoint.initial_stream_window_size(1024);
        let channel = runtime.block_on(endpoint.connect()).unwrap();
        for _ in 0..8 {
            let mut client = OffloadClient::new(channel.clone());
            let (token, untaken) = (session.token.clone(), untaken.clone());
            runtime.spawn(async move {
                let answer = client.describe_job(DescribeJobRequest { token }).await;
                if let Ok(answer) = answer {
                    untaken.lock().unwrap().push(answer);
                }
            });
        }
    }
    eventually("as many as may be under way", SOON, || {
        untaken.lock().unwrap().len() >= 16
    });
    // All of these calls were made before this one, which is answered after them.
    control.arena_free_bytes();
    let grown = resident_bytes(&daemon).saturating_sub(before);
    assert!(grown < 48 << 20, "grown by {grown} bytes");
    assert_eq!(untaken.lock().unwrap().len(), 16, "the others wait");
    drop(runtime);
    eventually("room again", SOON, || control.job(&session.token).is_some());
}

fn connect(path: &Path) -> OwnedFd {
    let flags = SocketFlags::CLOEXEC;
    let kind = SocketType::SEQPACKET;
    let socket = rustix::net::socket_with(AddressFamily::UNIX, kind, flags, None).unwrap();
    rustix::net::connect(&socket, &SocketAddrUnix::new(path).unwrap()).unwrap();
    socket
}

const CHILD: &str = "OFFLOADD_TEST_BESIDE_SILENT";

/// Each connection may be silent for 2 s, and a session's process must get its descriptors within 10 s.
#[test]
fn silent_connections_of_one_user_keep_no_other_from_his_descriptors() {
    if let Some(socket) = std::env::var_os(CHILD) {
        Control::connect(Path::new(&socket)).session("theirs");
        return;
    }
    if !rustix::process::geteuid().is_root() {
        println!(
            "skipped: {}: only root can become another user",
            std::thread::current().name().unwrap_or("a test")
        );
        return;
    }
    let most = rustix::process::getrlimit(Resource::Nofile).maximum;
    let raised = Rlimit {
        current: most,
        maximum: most,
    };
    rustix::process::setrlimit(Resource::Nofile, raised).unwrap();
    let store = Store::new(1, "psync");
    let daemon = store.serve();
    let descriptors = store.dir.path().join("run/offloadd.sock.fds");
    let all = |mode| std::os::unix::fs::PermissionsExt::from_mode(mode);
    std::fs::set_permissions(store.dir.path(), all(0o755)).unwrap();
    for socket in [&daemon.socket, &descriptors] {
        std::fs::set_permissions(socket, all(0o666)).unwrap();
    }
    let silent: Vec<_> = (0..700).map(|_| connect(&descriptors)).collect();
    // The user's own other connections are not affected either.
    let token = SessionToken([7; 16]);
    let refused = Fault::from(handoff::receive(&descriptors, token, SOON).unwrap_err());
    assert_eq!(refused.kind, FaultKind::NotFound, "{refused}");
    let mut child =
        again("limits::silent_connections_of_one_user_keep_no_other_from_his_descriptors");
    child.env(CHILD, &daemon.socket);
    expect_success(child);
    drop(silent);
}

#[test]
fn a_user_who_is_refused_without_end_does_not_fill_the_log() {
    const REFUSED: u64 = 400;
    let store = Store::new(1, "psync");
    let mut daemon = store.serve();
    let descriptors = store.dir.path().join("run/offloadd.sock.fds");
    let lines = Arc::new(Mutex::new(Vec::new()));
    let (seen, stderr) = (lines.clone(), daemon.child.stderr.take().unwrap());
    std::thread::spawn(move || {
        for line in BufReader::new(stderr).lines().map_while(Result::ok) {
            seen.lock().unwrap().push(line);
        }
    });
    for _ in 0..REFUSED {
        let socket = connect(&descriptors);
        rustix::net::send(&socket, b"no token", SendFlags::NOSIGNAL).unwrap();
        // The refusal is sent before the daemon hangs up.
        let mut answer = [0; 512];
        rustix::net::recv(&socket, &mut answer, rustix::net::RecvFlags::empty()).unwrap();
    }
    let uid = rustix::process::geteuid().as_raw();
    let more = format!(" more log lines about uid {uid} were dropped");
    let told = || {
        let lines = lines.lock().unwrap();
        let whole = lines.iter().filter(|l| l.contains("refused descriptors"));
        let counted = lines.iter().filter_map(|l| l.strip_suffix(&more));
        let counted = counted.filter_map(|line| line.rsplit(' ').next());
        let counted: Vec<u64> = counted.map(|n| n.parse().unwrap()).collect();
        (whole.count() as u64, counted)
    };
    eventually("all are counted", SOON, || {
        let (whole, counted) = told();
        whole + counted.iter().sum::<u64>() == REFUSED
    });
    let (whole, counted) = told();
    assert!(
        whole < REFUSED / 2 && !counted.is_empty(),
        "{whole} lines, and {counted:?}"
    );
}

#[test]
fn a_limit_of_file_sizes_is_an_error_and_not_the_daemons_end() {
    let store = Store::new(1, "psync");
    let mut command = Command::new("sh");
    // In units of 512 bytes: 12 MiB, of which the store's file takes 8.
    command
        .args(["-c", "ulimit -f 24576 && exec \"$@\"", "sh"])
        .arg(env!("CARGO_BIN_EXE_offloadd"))
        .args(["serve", "--config"])
        .arg(&store.config);
    let daemon = Daemon::start(command, store.socket());
    let mut control = daemon.control();
    let fault = control
        .open_session(open_sized("large", 4 << 20))
        .unwrap_err();
    assert_eq!(fault.kind, FaultKind::NoMemory, "{fault}");
    assert!(fault.message.contains("File too large"), "{fault}");
    control.open_session(open("small")).unwrap();
}

#[test]
fn a_store_beyond_the_limit_of_file_sizes_is_refused_with_the_limit() {
    let dir = tempfile::tempdir().unwrap();
    let mut command = Command::new("sh");
    command.args(["-c", "ulimit -f 8192 && exec \"$@\"", "sh"]);
    command.arg(env!("CARGO_BIN_EXE_offloadd")).arg("format");
    let output = command
        .arg(dir.path().join("tiles"))
        .args(["--size", "16MiB"])
        .output();
    let output = output.unwrap();
    let words = crate::common::words(&output);
    assert_eq!(output.status.code(), Some(1), "{words}");
    assert!(
        words.contains("4.0 MiB at most (`ulimit -f`), 16.0 MiB are needed"),
        "{words}"
    );
    assert!(!dir.path().join("tiles").exists());
}

const BESIDE_FLOOD: &str = "OFFLOADD_TEST_BESIDE_FLOOD";

/// Starts of a process of another user beside the flood.
const STARTS: u32 = 4;

/// Several threads connect to both sockets and hang up, as fast as they can.
#[test]
fn beside_a_user_who_connects_without_end_others_start_within_seconds() {
    if let Some(socket) = std::env::var_os(BESIDE_FLOOD) {
        return start_beside_flood(Path::new(&socket));
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
    let descriptors = store.dir.path().join("run/offloadd.sock.fds");
    let all = |mode| std::os::unix::fs::PermissionsExt::from_mode(mode);
    std::fs::set_permissions(store.dir.path(), all(0o755)).unwrap();
    for socket in [&daemon.socket, &descriptors] {
        std::fs::set_permissions(socket, all(0o666)).unwrap();
    }
    let (flooding, count) = (AtomicBool::new(true), AtomicU64::new(0));
    let (floods, connected) = (&flooding, &count);
    std::thread::scope(|scope| {
        for (path, kind) in [
            (&daemon.socket, SocketType::STREAM),
            (&daemon.socket, SocketType::STREAM),
            (&descriptors, SocketType::SEQPACKET),
        ] {
            scope.spawn(move || {
                let address = SocketAddrUnix::new(path.as_path()).unwrap();
                // The queue is kept full: the next connect does not wait for the last one.
                let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
                while floods.load(Ordering::Relaxed) {
                    let socket = rustix::net::socket_with(AddressFamily::UNIX, kind, flags, None);
                    if rustix::net::connect(socket.unwrap(), &address).is_ok() {
                        connected.fetch_add(1, Ordering::Relaxed);
                    }
                }
            });
        }
        let mut child =
            again("limits::beside_a_user_who_connects_without_end_others_start_within_seconds");
        child.env(BESIDE_FLOOD, &daemon.socket);
        let child = std::panic::catch_unwind(AssertUnwindSafe(|| expect_success(child)));
        floods.store(false, Ordering::Relaxed);
        if let Err(panic) = child {
            std::panic::resume_unwind(panic);
        }
    });
    let connected = count.into_inner();
    assert!(connected > 500, "{connected} connects are no flood");
}

fn start_beside_flood(socket: &Path) {
    for number in 0..STARTS {
        let begun = Instant::now();
        let session = offload_client::Session::open(offload_client::SessionSettings {
            socket: socket.to_owned(),
            job: format!("start-{number}"),
            rank: offload_client::Rank(0),
            local_ranks: 1,
            classes: vec![offload_client::SlotClass {
                slot_bytes: 4096,
                slot_count: 4,
            }],
            iodepth: 4,
        });
        session
            .unwrap_or_else(|error| panic!("start {number}: {error}"))
            .close()
            .unwrap();
        assert!(
            begun.elapsed() < Duration::from_secs(5),
            "{:?}",
            begun.elapsed()
        );
    }
}
