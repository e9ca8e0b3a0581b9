//! Tests the daemon as systemd runs it. What could go wrong: a unit that systemd does not understand, one that is more open than
//! docs/administration.md promises, a sandbox in which the daemon does not work, a stuck owner thread that is not noticed.

use std::collections::BTreeSet;
use std::os::unix::net::UnixDatagram;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use rustix::process::Signal;

use crate::common::{
    Daemon, Store, engines, eventually, expect_tiles, fill_tiles, link_program, words,
};

const SOON: Duration = Duration::from_secs(10);

fn packaging() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("packaging")
}

fn unit() -> String {
    std::fs::read_to_string(packaging().join("offloadd.service")).unwrap()
}

/// Returns the unit followed by a drop-in, in the order in which systemd reads them.
fn unit_with(drop_in: &str) -> String {
    let drop_in = std::fs::read_to_string(packaging().join(drop_in)).unwrap();
    format!("{}\n{drop_in}", unit())
}

fn skipped(why: &str) {
    println!(
        "skipped: {}: {why}",
        std::thread::current().name().unwrap_or("a test")
    );
}

/// Returns the output of `systemd-analyze` for a unit of this text; `None` without the program.
fn analyze(text: &str, arguments: &[&str]) -> Option<Output> {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("offloadd.service");
    // The installed program has another path.
    let text = text.replace("/usr/bin/offloadd", env!("CARGO_BIN_EXE_offloadd"));
    std::fs::write(&file, text).unwrap();
    let output = Command::new("systemd-analyze")
        .args(arguments)
        .arg(&file)
        .output();
    if output.is_err() {
        skipped("there is no systemd-analyze");
    }
    output.ok()
}

/// Whether the exposure of a unit of this text is at most `tenths` of 1.0; `None` without `systemd-analyze`.
fn exposure_at_most(text: &str, tenths: u32) -> Option<bool> {
    let threshold = format!("--threshold={tenths}");
    let arguments = ["security", "--offline=true", "--no-pager", &threshold];
    let output = analyze(text, &arguments)?;
    let printed = words(&output);
    assert!(printed.contains("Overall exposure level"), "{printed}");
    Some(output.status.success())
}

#[test]
fn the_units_exposure_is_as_low_as_promised() {
    let Some(files) = exposure_at_most(&unit(), 5) else {
        return;
    };
    assert!(files, "files: at most 0.5");
    assert_eq!(
        exposure_at_most(&unit_with("raw-drives.conf"), 20),
        Some(true),
        "raw drives"
    );
    let loopback = exposure_at_most(&unit_with("metrics-loopback.conf"), 15);
    assert_eq!(loopback, Some(true), "counts on loopback");
    // The measure tells open units from closed ones.
    let open: String = (unit().lines())
        .filter(|line| {
            !["Protect", "SystemCall", "Private"]
                .map(|w| line.starts_with(w))
                .contains(&true)
        })
        .map(|line| format!("{line}\n"))
        .collect();
    assert_eq!(exposure_at_most(&open, 20), Some(false));
}

#[test]
fn systemd_understands_every_line_of_the_unit() {
    for text in [
        unit(),
        unit_with("raw-drives.conf"),
        unit_with("metrics-loopback.conf"),
        // A drive that is missing.
        unit() + "\n[Service]\nReadWritePaths=-/none/offloadd\n",
    ] {
        let Some(output) = analyze(&text, &["verify", "--man=no"]) else {
            return;
        };
        assert!(
            output.status.success() && words(&output).is_empty(),
            "{}",
            words(&output)
        );
    }
    let wrong = unit().replace("WatchdogSec=", "WatchdogSecs=");
    let printed = words(&analyze(&wrong, &["verify", "--man=no"]).unwrap());
    assert!(printed.contains("WatchdogSecs"), "{printed}");
}

/// Adds the calls that systemd's `name` stands for: a group of system calls with an @, or one call.
fn expand(name: &str, calls: &mut BTreeSet<String>) {
    if !name.starts_with('@') {
        calls.insert(name.to_owned());
        return;
    }
    let output = Command::new("systemd-analyze")
        .args(["syscall-filter", "--no-pager", name])
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", words(&output));
    let printed = String::from_utf8_lossy(&output.stdout).into_owned();
    let members =
        (printed.lines().skip(1).map(str::trim)).filter(|l| !l.is_empty() && !l.starts_with('#'));
    for member in members {
        expand(member, calls);
    }
}

/// Returns the system calls that the unit allows, from its lines in their order.
fn allowed_calls() -> BTreeSet<String> {
    let mut allowed = BTreeSet::new();
    // Always allowed where a list is given.
    expand("@default", &mut allowed);
    for words in unit()
        .lines()
        .filter_map(|line| line.strip_prefix("SystemCallFilter="))
    {
        let (denies, names) = match words.strip_prefix('~') {
            Some(names) => (true, names),
            None => (false, words),
        };
        for name in names.split_whitespace() {
            let mut calls = BTreeSet::new();
            expand(name, &mut calls);
            match denies {
                true => allowed.retain(|call| !calls.contains(call)),
                false => allowed.extend(calls),
            }
        }
    }
    allowed
}

/// Runs a process's whole session with this daemon, which ends in order.
fn run_session(store: &Store, daemon: &mut Daemon) {
    let mut control = daemon.control();
    let mut session = control.session("tiny");
    let working = session.begin(&mut control, 8);
    fill_tiles(&mut session, 8, working, 10);
    expect_tiles(&mut session, 8, 10);
    session.commit(&mut control, working, b"step 1");
    assert!(store.socket().exists());
    drop(session);
    daemon.signal(Signal::QUIT);
    assert_eq!(daemon.wait(SOON), Some(0));
}

#[test]
fn a_daemon_needs_no_system_call_that_the_unit_forbids() {
    for program in ["strace", "systemd-analyze"] {
        let found = Command::new(program)
            .arg("--version")
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .status();
        if found.is_err() {
            return skipped(&format!("there is no {program}"));
        }
    }
    let allowed = allowed_calls();
    assert!(
        allowed.contains("io_uring_enter") && !allowed.contains("mount"),
        "{allowed:?}"
    );
    for engine in engines() {
        let store = Store::new(2, engine);
        let calls = store.dir.path().join("calls");
        let mut command = Command::new("strace");
        command
            .args(["-f", "-qq", "-e", "signal=none", "-o"])
            .arg(&calls);
        // Private, because killing strace leaves its child running.
        command
            .arg(env!("CARGO_BIN_EXE_offloadd"))
            .args(["serve", "--private", "--config"])
            .arg(&store.config);
        let notify = store.dir.path().join("notify");
        // Never read from: a manager that hangs must not stop the daemon.
        let _manager = UnixDatagram::bind(&notify).unwrap();
        command
            .env("NOTIFY_SOCKET", &notify)
            .env("WATCHDOG_USEC", "90000");
        let mut strace = Daemon::start(command, store.socket());
        let child = format!("/proc/{0}/task/{0}/children", strace.child.id());
        let child: i32 = std::fs::read_to_string(child)
            .unwrap()
            .trim()
            .parse()
            .unwrap();
        let mut control = strace.control();
        let mut session = control.session("tiny");
        let working = session.begin(&mut control, 8);
        fill_tiles(&mut session, 8, working, 10);
        expect_tiles(&mut session, 8, 10);
        session.commit(&mut control, working, b"step 1");
        std::thread::sleep(Duration::from_millis(100));
        drop(session);
        let child = rustix::process::Pid::from_raw(child).unwrap();
        rustix::process::kill_process(child, Signal::QUIT).unwrap();
        assert_eq!(strace.wait(2 * SOON), Some(0));
        // `1234 openat(AT_FDCWD, ...`, or `1234 <... openat resumed>...`
        let used: BTreeSet<String> = (std::fs::read_to_string(&calls).unwrap().lines())
            .filter_map(|line| {
                Some(
                    line.split_whitespace()
                        .nth(1)?
                        .split_once('(')?
                        .0
                        .to_owned(),
                )
            })
            // A call of a thread that had ended before strace looked at it.
            .filter(|call| call != "???")
            .collect();
        assert!(used.len() > 30, "{used:?}");
        let forbidden: Vec<_> = used.difference(&allowed).collect();
        assert!(forbidden.is_empty(), "engine {engine} uses {forbidden:?}");
    }
}

#[test]
fn it_lives_as_a_user_without_any_capability() {
    if !rustix::process::geteuid().is_root() {
        return skipped("only root can become another user");
    }
    let store = Store::new(1, "auto");
    let program = store.dir.path().join("offloadd");
    link_program(&program);
    let user = 65534;
    for path in [store.dir.path(), &store.devices[0], &store.config] {
        std::os::unix::fs::chown(path, Some(user), Some(user)).unwrap();
    }
    // An ordinary user may lock this little; the unit's LimitMEMLOCK allows all.
    let limit = rustix::process::getrlimit(rustix::process::Resource::Memlock).current;
    if limit.is_some_and(|bytes| bytes < 4 << 20) {
        return skipped("a user may not lock 4 MiB here");
    }
    let text = std::fs::read_to_string(&store.config).unwrap();
    let text = text.replace("64MiB", "4MiB");
    std::fs::write(&store.config, format!("{text}require_locked = true\n")).unwrap();
    let with = |more: &[&str]| {
        let mut command = Command::new("setpriv");
        command
            .args(["--reuid=65534", "--regid=65534", "--clear-groups"])
            .args(more)
            .arg(&program)
            .current_dir("/");
        command
    };
    let plain = with(&[]).arg("--version").output();
    if !plain.is_ok_and(|output| output.status.success()) {
        return skipped("another user cannot run this program");
    }
    let mut command = with(&[
        "--no-new-privs",
        "--bounding-set=-all",
        "--inh-caps=-all",
        "--ambient-caps=-all",
    ]);
    command.args(["serve", "--config"]).arg(&store.config);
    let mut daemon = Daemon::start(command, store.socket());
    let status = std::fs::read_to_string(format!("/proc/{}/status", daemon.child.id())).unwrap();
    assert!(status.contains("\nCapEff:\t0000000000000000"), "{status}");
    assert!(status.contains("\nNoNewPrivs:\t1"), "{status}");
    run_session(&store, &mut daemon);
}

/// Receives the messages to the service manager, one at a time, until `limit`.
struct Manager {
    socket: UnixDatagram,
}

impl Manager {
    fn at(path: &Path) -> Self {
        let socket = UnixDatagram::bind(path).unwrap();
        Self { socket }
    }

    /// Returns the number of watchdog messages within `limit`.
    fn watchdog_count(&self, limit: Duration) -> usize {
        let end = Instant::now() + limit;
        let mut count = 0;
        while let Some(left) = end
            .checked_duration_since(Instant::now())
            .filter(|l| !l.is_zero())
        {
            self.socket.set_read_timeout(Some(left)).unwrap();
            let mut bytes = [0; 256];
            if let Ok(length) = self.socket.recv(&mut bytes) {
                count += usize::from(bytes[..length].starts_with(b"WATCHDOG=1"));
            }
        }
        count
    }
}

#[test]
fn the_watchdog_is_told_while_the_owner_thread_turns_and_not_when_it_is_stuck() {
    let store = Store::new(1, "psync");
    let path = store.dir.path().join("notify");
    let manager = Manager::at(&path);
    let mut command = store.serve_command();
    command
        .env("NOTIFY_SOCKET", &path)
        .env("WATCHDOG_USEC", "300000");
    let daemon = Daemon::start(command, store.socket());
    let second = Duration::from_secs(1);
    eventually("it is told three times in a second", SOON, || {
        (3..=20).contains(&manager.watchdog_count(second))
    });

    let tasks = std::fs::read_dir(format!("/proc/{}/task", daemon.child.id())).unwrap();
    let owner = (tasks.map(|task| task.unwrap().path()))
        .find(|task| std::fs::read_to_string(task.join("comm")).unwrap().trim() == "owner")
        .expect("an owner thread");
    let owner = owner.file_name().unwrap().to_str().unwrap();
    let stuck = Command::new("strace")
        .args([
            "-qq",
            "-o",
            "/dev/null",
            "-e",
            "trace=epoll_wait,epoll_pwait,epoll_pwait2",
        ])
        .args([
            "-e",
            "inject=epoll_wait,epoll_pwait,epoll_pwait2:delay_exit=5000000",
            "-p",
            owner,
        ])
        .stderr(Stdio::null())
        .spawn();
    let Ok(mut strace) = stuck else {
        return skipped("there is no strace to hold the owner thread up");
    };
    let traced = || {
        let status = format!("/proc/{}/task/{owner}/status", daemon.child.id());
        !std::fs::read_to_string(status)
            .unwrap()
            .contains("TracerPid:\t0\n")
    };
    let limit = Instant::now() + SOON;
    while !traced() && Instant::now() < limit {
        std::thread::sleep(Duration::from_millis(5));
    }
    if traced() {
        // After its last messages, and one that was in transit.
        eventually("nothing is printed for a second", SOON, || {
            manager.watchdog_count(second) == 0
        });
    } else {
        skipped("strace cannot attach here");
    }
    strace.kill().unwrap();
    strace.wait().unwrap();
}

#[test]
fn the_services_settings_hold_together_and_fit_the_unit() {
    let config = offloadd::config::Config::read(&packaging().join("offloadd.toml")).unwrap();
    // RuntimeDirectory=, StateDirectory=, PrivateNetwork=, LimitMEMLOCK=.
    assert!(config.socket.starts_with("/run/offloadd"));
    assert!(
        config
            .devices
            .iter()
            .all(|device| device.starts_with("/var/lib/offloadd"))
    );
    let listen = config.metrics_listen.as_ref().unwrap().to_string();
    assert!(listen.starts_with("unix:/run/offloadd/"), "{listen}");
    assert!(config.require_locked);
    // Seven descriptors per session and two more outlive a restart.
    let unit = unit();
    let kept = unit
        .lines()
        .find_map(|l| l.strip_prefix("FileDescriptorStoreMax="));
    let kept: u32 = kept.expect("the unit keeps descriptors").parse().unwrap();
    assert!(kept >= 7 * config.limits().sessions_max + 2, "{kept}");
}
