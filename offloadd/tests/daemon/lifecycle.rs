//! Tests start and end of the daemon. What could go wrong: two daemons on one store or socket, a dead daemon's socket that blocks the
//! next one, an orphan, an end that leaves sockets or loses acknowledged state, a refusal without a reason.

use std::io::{BufRead, Read};
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt};
use std::process::Stdio;
use std::time::Duration;

use rustix::process::Signal;

use crate::common::{Daemon, Store, engines, eventually, expect_tiles, fill_tiles, program, words};
use crate::loops::Loop;

const SOON: Duration = Duration::from_secs(60);

#[test]
fn sigterm_ends_in_order_and_leaves_no_sockets() {
    let store = Store::new(2, "auto");
    for signal in [Signal::TERM, Signal::INT] {
        let mut daemon = store.serve();
        assert!(
            daemon.ready.contains("2 devices, engine "),
            "{}",
            daemon.ready
        );
        let run = store.socket().parent().unwrap().to_owned();
        assert_eq!(std::fs::read_dir(&run).unwrap().count(), 2);
        for entry in std::fs::read_dir(&run).unwrap() {
            let mode = entry.unwrap().metadata().unwrap().mode() & 0o777;
            assert_eq!(mode, 0o660, "user and group");
        }
        daemon.signal(signal);
        assert_eq!(daemon.wait(SOON), Some(0));
        assert_eq!(std::fs::read_dir(&run).unwrap().count(), 0);
    }
}

#[test]
fn a_daemon_that_is_given_nothing_sleeps() {
    let store = Store::new(1, "auto");
    let daemon = store.serve();
    let mut control = daemon.control();
    let mut session = control.session("tiny");
    let working = session.begin(&mut control, 1);
    // After each completion it looks for the next one.
    for fill in 1..20 {
        fill_tiles(&mut session, 1, working, fill);
    }
    let ticks = || -> u64 {
        let stat = format!("/proc/{}/stat", daemon.pid().as_raw_nonzero());
        let stat = std::fs::read_to_string(stat).unwrap();
        let words: Vec<&str> = stat.rsplit_once(')').unwrap().1.split(' ').collect();
        words[12].parse::<u64>().unwrap() + words[13].parse::<u64>().unwrap()
    };
    let before = ticks();
    std::thread::sleep(Duration::from_millis(500));
    // In hundredths of a second.
    let used = ticks() - before;
    assert!(used < 10, "{used} of 50 ticks");
}

#[test]
fn a_second_daemon_on_a_store_is_refused_by_name() {
    let store = Store::new(1, "psync");
    let daemon = store.serve();
    let other = store.dir.path().join("other.sock");
    store.write_config(&other, "psync");
    let message = store.refusal();
    let device = store.devices[0].display();
    assert!(
        message.contains(&format!("device {device}: locked by another offloadd")),
        "{message}"
    );
    assert!(
        message.contains(&format!("pid {}", daemon.child.id())),
        "{message}"
    );
    // Verifying and formatting are refused too.
    let verify = program()
        .args(["verify", "--config"])
        .arg(&store.config)
        .output()
        .unwrap();
    assert!(words(&verify).contains("by another offloadd"));
    let mut format = program();
    format
        .arg("format")
        .args(&store.devices)
        .args(["--size", "8MiB", "--force"]);
    assert!(words(&format.output().unwrap()).contains("by another offloadd"));
}

#[test]
fn a_killed_daemons_store_and_socket_go_to_the_next() {
    let store = Store::new(2, "auto");
    for _ in 0..5 {
        let mut daemon = store.serve();
        daemon.child.kill().unwrap();
        daemon.child.wait().unwrap();
        assert!(store.socket().exists(), "it had no time to remove it");
    }
    let mut daemon = store.serve();
    assert_eq!(daemon.control().arena_free_bytes(), 64 << 20);
    daemon.signal(Signal::TERM);
    assert_eq!(daemon.wait(SOON), Some(0));
}

#[test]
fn a_living_daemons_socket_is_not_taken() {
    let (one, two) = (Store::new(1, "psync"), Store::new(1, "psync"));
    let daemon = one.serve();
    two.write_config(&one.socket(), "psync");
    let message = two.refusal();
    assert!(message.contains("another offloadd (pid "), "{message}");
    assert!(
        message.contains(&daemon.child.id().to_string()),
        "{message}"
    );
    daemon.control().arena_free_bytes();
    // A file that is not a socket is not removed either.
    let file = two.dir.path().join("notes.txt");
    std::fs::write(&file, "mine").unwrap();
    two.write_config(&file, "psync");
    assert!(
        two.refusal()
            .contains("a file that is not a socket exists there")
    );
    assert_eq!(std::fs::read_to_string(&file).unwrap(), "mine");
}

#[test]
fn a_private_daemon_ends_with_its_parent() {
    let store = Store::new(1, "psync");
    // A shell between this process and the daemon, killed so that it cannot notify anyone.
    let mut shell = std::process::Command::new("sh")
        .args(["-c", "\"$0\" serve --private --config \"$1\" & wait"])
        .arg(env!("CARGO_BIN_EXE_offloadd"))
        .arg(&store.config)
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let mut ready = String::new();
    std::io::BufReader::new(shell.stdout.as_mut().unwrap())
        .read_line(&mut ready)
        .unwrap();
    assert!(ready.starts_with("READY "), "{ready}");
    assert!(store.socket().exists());
    shell.kill().unwrap();
    shell.wait().unwrap();
    eventually("the orphan removes its sockets and ends", SOON, || {
        !store.socket().exists()
    });
    // The orphan's lock is free again.
    store.serve();
}

#[test]
fn a_private_daemon_leaves_the_signals_of_a_group_to_its_parent() {
    let store = Store::new(1, "psync");
    let mut command = store.serve_command();
    command.arg("--private");
    let mut daemon = Daemon::start(command, store.socket());
    for signal in [Signal::TERM, Signal::INT] {
        daemon.signal(signal);
        // Long enough to end, as it does after the signal below.
        std::thread::sleep(Duration::from_millis(200));
        assert!(store.socket().exists(), "{signal:?}");
    }
    daemon.signal(Signal::QUIT);
    assert_eq!(daemon.wait(SOON), Some(0));
}

#[test]
fn a_private_daemon_has_its_socket_where_nobody_else_gets() {
    let store = Store::new(1, "psync");
    let mut command = store.serve_command();
    command.arg("--private");
    let daemon = Daemon::start(command, store.socket());
    let run = store.socket().parent().unwrap().to_owned();
    assert_eq!(std::fs::metadata(&run).unwrap().mode() & 0o777, 0o700);
    drop(daemon);
    std::fs::set_permissions(&run, std::fs::Permissions::from_mode(0o755)).unwrap();
    let output = store.serve_command().arg("--private").output().unwrap();
    assert!(
        words(&output).contains("mode 0700, but belongs to uid"),
        "{}",
        words(&output)
    );
}

#[test]
fn refusals_name_the_key_the_device_and_what_to_do() {
    let store = Store::new(2, "psync");
    let whole = std::fs::read_to_string(&store.config).unwrap();
    let refused_with = |text: &str, parts: &[&str]| {
        std::fs::write(&store.config, text).unwrap();
        let message = store.refusal();
        for part in parts {
            assert!(message.contains(part), "{part}: {message}");
        }
    };
    refused_with(
        &format!("{whole}requre_locked = true\n"),
        &[
            "unknown key `requre_locked`",
            "did you mean `require_locked`",
        ],
    );
    refused_with(
        &whole.replace("64MiB", "64 parsecs"),
        &["arena_bytes_max", "parsecs"],
    );
    refused_with(
        &whole.replace("device1", "device9"),
        &["device9: no such file", "offloadd format"],
    );
    let one = whole.replace(&format!(", {:?}", store.devices[1]), "");
    let away = store.dir.path().join("away");
    std::fs::rename(&store.devices[1], &away).unwrap();
    refused_with(&one, &["device 1 of the store"]);
    std::fs::rename(&away, &store.devices[1]).unwrap();

    // One superblock is repaired from the other, with a note; without either there is no store.
    std::fs::write(&store.config, &whole).unwrap();
    let device = std::fs::OpenOptions::new()
        .write(true)
        .open(&store.devices[0])
        .unwrap();
    device.write_all_at(&[0xA5; 512], 32).unwrap();
    let verify = program()
        .args(["verify", "--config"])
        .arg(&store.config)
        .output()
        .unwrap();
    assert_eq!(verify.status.code(), Some(1), "damage is not success");
    assert!(words(&verify).contains("superblock"), "{}", words(&verify));
    drop(store.serve());
    let verify = program()
        .args(["verify", "--config"])
        .arg(&store.config)
        .output()
        .unwrap();
    assert_eq!(
        verify.status.code(),
        Some(0),
        "repaired: {}",
        words(&verify)
    );
    for offset in [0, 64 << 10] {
        device.write_all_at(&[0xA5; 4096], offset).unwrap();
    }
    assert!(
        store
            .refusal()
            .contains(&store.devices[0].display().to_string())
    );
    // Too small for any structure.
    let small = store.dir.path().join("small");
    let output = program()
        .arg("format")
        .arg(&small)
        .args(["--size", "1MiB"])
        .output()
        .unwrap();
    assert!(
        words(&output).contains("a device of a store needs at least"),
        "{}",
        words(&output)
    );
    assert!(!small.exists(), "what was made for nothing goes again");
}

#[test]
fn a_store_is_not_formatted_twice_by_accident() {
    let store = Store::new(1, "psync");
    let mut format = program();
    format
        .arg("format")
        .args(&store.devices)
        .args(["--size", "8MiB"]);
    let output = format.output().unwrap();
    assert!(!output.status.success());
    assert!(words(&output).contains("--force"), "{}", words(&output));
    assert!(format.arg("--force").output().unwrap().status.success());
}

/// Starts a daemon whose system calls fail or are interrupted as `injected` says (in strace's syntax); `None` without strace.
fn daemon_under(store: &Store, injected: &[&str]) -> Option<Daemon> {
    if std::process::Command::new("strace")
        .arg("-V")
        .output()
        .is_err()
    {
        println!(
            "skipped: {}: there is no strace to refuse system calls with",
            std::thread::current().name().unwrap_or("a test")
        );
        return None;
    }
    let mut command = std::process::Command::new("strace");
    let calls: Vec<&str> = injected
        .iter()
        .map(|words| words.split(':').next().expect("a system call"))
        .collect();
    command.args(["-f", "-qq", "-o", "/dev/null", "-e"]);
    command.arg(format!("trace={}", calls.join(",")));
    for words in injected {
        command.args(["-e", &format!("inject={words}")]);
    }
    // Private, because killing strace leaves its child running.
    command
        .arg(env!("CARGO_BIN_EXE_offloadd"))
        .args(["serve", "--private", "--config"])
        .arg(&store.config);
    Some(Daemon::start(command, store.socket()))
}

#[test]
fn where_io_uring_is_forbidden_the_next_engine_serves_and_says_why() {
    let no_uring = "io_uring_setup:error=EPERM";
    let no_aio = "io_setup:error=EPERM";
    for (injected, engine, why) in [
        (&[no_uring][..], "aio", "io_uring is forbidden"),
        (
            &[no_uring, no_aio],
            "psync",
            "engine aio: kernel AIO is forbidden",
        ),
    ] {
        let store = Store::new(1, "auto");
        if engine == "aio" && !engines().contains(&"aio") {
            continue;
        }
        let Some(daemon) = daemon_under(&store, injected) else {
            return;
        };
        let ready = &daemon.ready;
        let printed = format!("engine {engine} (instead of uring: ");
        assert!(ready.contains(&printed) && ready.contains(why), "{ready}");
        let mut control = daemon.control();
        let session = control.session("tiny");
        session.begin(&mut control, 1);
        let about = control
            .describe(offload_api::proto::DescribeRequest {})
            .unwrap();
        assert_eq!(about.engine, engine);
        assert!(about.engine_reason.contains(why), "{}", about.engine_reason);
    }
}

/// Every third call of the engine is interrupted by a signal; nothing is lost, and nothing is done twice.
#[test]
fn interrupted_system_calls_of_an_engine_are_made_again() {
    for (engine, calls) in [
        ("uring", &["io_uring_enter"][..]),
        ("aio", &["io_submit", "io_getevents"]),
        // Not pread64, with which the program itself is loaded.
        ("psync", &["pwrite64", "fdatasync"]),
    ] {
        if !engines().contains(&engine) {
            continue;
        }
        let store = Store::new(2, engine);
        let injected: Vec<String> = calls
            .iter()
            .map(|call| format!("{call}:error=EINTR:when=1+3"))
            .collect();
        let injected: Vec<&str> = injected.iter().map(String::as_str).collect();
        let Some(daemon) = daemon_under(&store, &injected) else {
            return;
        };
        moves_and_commits(&daemon);
    }
}

fn moves_and_commits(daemon: &Daemon) {
    let mut control = daemon.control();
    let mut session = control.session("tiny");
    let mut working = session.begin(&mut control, 10);
    for fill in [1, 40] {
        fill_tiles(&mut session, 10, working, fill);
        expect_tiles(&mut session, 10, fill);
        working = session.commit(&mut control, working, &[fill]);
    }
}

/// The kernel lacks memory for operations: for half a second from the probe on, or now and then. No wait is endless.
#[test]
fn what_io_uring_does_not_take_for_now_is_offered_to_it_again() {
    if !engines().contains(&"uring") {
        return;
    }
    for when in ["1..100", "1+3"] {
        let store = Store::new(2, "uring");
        let injected = format!("io_uring_enter:error=EAGAIN:when={when}");
        let Some(mut daemon) = daemon_under(&store, &[&injected]) else {
            return;
        };
        assert!(daemon.ready.contains("engine uring"), "{}", daemon.ready);
        moves_and_commits(&daemon);
        let log = log_of(&mut daemon);
        assert!(log.contains("refuses operations for now"), "{log}");
    }
}

#[test]
fn kernel_aio_with_little_room_serves_and_says_so() {
    if !engines().contains(&"aio") {
        return;
    }
    let store = Store::new(2, "aio");
    // Tries 1024, 512, 256 and 128 events.
    let Some(mut daemon) = daemon_under(&store, &["io_setup:error=EAGAIN:when=1..4"]) else {
        return;
    };
    moves_and_commits(&daemon);
    let log = log_of(&mut daemon);
    let printed = "kernel AIO has room for 64 operations instead of 1024";
    assert!(log.contains(printed), "{log}");
}

/// Ends the daemon, whose parent is a tracing program, and returns its log.
fn log_of(daemon: &mut Daemon) -> String {
    daemon.child.kill().unwrap();
    let mut log = String::new();
    let mut stderr = daemon.child.stderr.take().unwrap();
    stderr.read_to_string(&mut log).unwrap();
    log
}

#[test]
fn the_service_manager_is_told_when_it_serves_and_when_it_stops() {
    let store = Store::new(1, "psync");
    let path = store.dir.path().join("notify");
    let manager = std::os::unix::net::UnixDatagram::bind(&path).unwrap();
    manager.set_read_timeout(Some(SOON)).unwrap();
    let mut command = store.serve_command();
    command.env("NOTIFY_SOCKET", &path);
    let mut daemon = Daemon::start(command, store.socket());
    let next = || {
        let mut bytes = [0; 256];
        let length = manager.recv(&mut bytes).expect("a word from the daemon");
        String::from_utf8_lossy(&bytes[..length]).into_owned()
    };
    assert_eq!(next().trim_end(), "STATUS=recovering the store");
    assert!(next().starts_with("READY=1"));
    let status = format!("STATUS=serving at {}", store.socket().display());
    assert_eq!(next().trim_end(), status);
    daemon.signal(Signal::TERM);
    assert!(next().starts_with("STOPPING=1"));
    assert_eq!(daemon.wait(SOON), Some(0));
}

#[test]
fn more_memory_than_there_is_is_refused_before_the_devices_are_touched() {
    let store = Store::new(1, "psync");
    let whole = std::fs::read_to_string(&store.config).unwrap();
    let text = whole
        .replace("64MiB", "4000TiB")
        .replace("device0", "device9");
    std::fs::write(&store.config, text).unwrap();
    let message = store.refusal();
    assert!(
        message.contains("`arena_bytes_max` is 4000.0 TiB, but this machine has "),
        "{message}"
    );
}

#[test]
fn a_raw_block_device_is_taken_whole_and_by_one_daemon() {
    let mut store = Store::new(1, "auto");
    let file = store.dir.path().join("image");
    std::fs::write(&file, vec![0; 16 << 20]).unwrap();
    let Some(device) = Loop::new(&file) else {
        println!(
            "skipped: {}: no loop device to be had",
            std::thread::current().name().unwrap_or("a test")
        );
        return;
    };
    store.devices = vec![device.0.clone().into()];
    store.write_config(&store.socket(), "auto");
    // The byte where ext4 has its magic number.
    let foreign = |byte: u8| {
        let mut block = vec![0; 4096];
        block[1080] = byte;
        std::fs::write(&device.0, &block).unwrap();
    };
    foreign(0x53);
    let refused = program().arg("format").arg(&device.0).output().unwrap();
    assert!(
        !refused.status.success() && words(&refused).contains("not blank: it begins with"),
        "{}",
        words(&refused)
    );
    foreign(0);
    let output = program().arg("format").arg(&device.0).output().unwrap();
    assert!(output.status.success(), "{}", words(&output));
    assert!(
        words(&output).contains("15.0 MiB"),
        "all but the first: {}",
        words(&output)
    );
    let again = program().arg("format").arg(&device.0).output().unwrap();
    assert!(
        words(&again).contains("already holds a store"),
        "{}",
        words(&again)
    );

    for _ in 0..3 {
        let mut daemon = store.serve();
        let mut control = daemon.control();
        control.session("tiny");
        assert!(store.refusal().contains("in use by another offloadd"));
        // The daemon's claim outlives it for a moment, and the next daemon waits for its release.
        daemon.child.kill().unwrap();
        daemon.child.wait().unwrap();
    }
}

#[test]
fn what_the_system_refuses_is_named_and_reserving_by_writing_is_as_good() {
    if std::process::Command::new("strace")
        .arg("-V")
        .output()
        .is_err()
    {
        println!(
            "skipped: {}: there is no strace to refuse with",
            std::thread::current().name().unwrap_or("a test")
        );
        return;
    }
    let store = Store::new(1, "psync");
    let under = |inject: &str, file: &std::path::Path, arguments: &[&std::ffi::OsStr]| {
        let call = inject.split(':').next().unwrap();
        std::process::Command::new("strace")
            .args(["-f", "-qq", "-o", "/dev/null", "-e"])
            .arg(format!("trace={call}"))
            .arg("-e")
            .arg(format!("inject={inject}"))
            .arg("-P")
            .arg(file)
            .arg(env!("CARGO_BIN_EXE_offloadd"))
            .args(arguments)
            .output()
            .unwrap()
    };
    let new = store.dir.path().join("new");
    let format = [
        "format".as_ref(),
        new.as_os_str(),
        "--size".as_ref(),
        "9MiB".as_ref(),
    ];
    let full = under("fallocate:error=ENOSPC", &new, &format);
    assert!(!full.status.success());
    assert!(
        words(&full).contains("9.0 MiB are needed"),
        "{}",
        words(&full)
    );
    assert!(!new.exists());
    let broken = under("fdatasync:error=EIO", &new, &format);
    assert!(
        !broken.status.success(),
        "a store that was not flushed is none"
    );
    assert!(
        words(&broken).contains(&new.display().to_string()),
        "{}",
        words(&broken)
    );
    assert!(!new.exists());
    // FUSE and some network file systems answer fallocate with EOPNOTSUPP.
    let filled = under("fallocate:error=EOPNOTSUPP", &new, &format);
    assert!(filled.status.success(), "{}", words(&filled));
    let found = std::fs::metadata(&new).unwrap();
    assert_eq!(found.len(), 9 << 20);
    assert!(found.blocks() * 512 >= 9 << 20, "it has holes");

    let serve = [
        "serve".as_ref(),
        "--config".as_ref(),
        store.config.as_os_str(),
    ];
    let unreadable = words(&under("pread64:error=EIO", &store.devices[0], &serve));
    let device = store.devices[0].display();
    assert!(
        unreadable.contains(&format!("device {device}: read its first block: ")),
        "{unreadable}"
    );
    let no_lock = words(&under("flock:error=ENOLCK", &store.devices[0], &serve));
    assert!(
        no_lock.contains(&format!("device {device}: locking it: ")),
        "{no_lock}"
    );
}
