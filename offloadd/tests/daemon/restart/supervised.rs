//! Tests restarts by `offloadd supervise`, where no service manager keeps descriptors.

use std::io::{BufRead, BufReader};
use std::process::Stdio;
use std::time::Duration;

use rustix::process::Signal;

use super::LONG;
use super::manager::reattach;
use crate::common::{Daemon, Store, eventually, expect_tiles, fill_tiles, link_program};

/// Returns the process id of the running daemon.
fn daemon_of(supervisor: &Daemon) -> Option<i32> {
    let tasks = std::fs::read_dir(format!("/proc/{}/task", supervisor.child.id())).unwrap();
    let children = tasks.map(|task| {
        std::fs::read_to_string(task.unwrap().path().join("children")).unwrap_or_default()
    });
    let children = children.collect::<String>();
    // Another child checks settings.
    let serves = |pid: &&str| {
        std::fs::read_to_string(format!("/proc/{pid}/cmdline"))
            .is_ok_and(|line| line.contains("serve\0"))
    };
    let daemon = children.split_whitespace().find(serves);
    daemon.map(|pid| pid.parse::<i32>().unwrap())
}

#[test]
fn more_sessions_than_the_usual_limit_of_descriptors_outlive_a_restart_by_a_supervisor() {
    let store = Store::new(1, "auto");
    let mut command = std::process::Command::new("sh");
    // Seven descriptors per session, and some for both processes.
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
    let [here, away] = ["offloadd", "away"].map(|name| store.dir.path().join(name));
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
    let kept = lines.find(|line| line.contains("was not replaced and continues"));
    assert!(kept.unwrap().contains("No such file"));
    // The daemon itself is asked to hand over.
    let pid = rustix::process::Pid::from_raw(daemon_of(&supervisor).unwrap()).unwrap();
    rustix::process::kill_process(pid, Signal::TERM).unwrap();
    let printed = lines.find(|line| line.contains("could not be started"));
    assert!(printed.unwrap().contains("starting it again in a second"));
    assert!(!session.hung_up(Duration::ZERO));
    std::fs::rename(&away, &here).unwrap();
    assert!(lines.any(|line| line.contains("1 session of the previous daemon")));
    eventually("it listens", LONG, || {
        std::os::unix::net::UnixStream::connect(store.socket()).is_ok()
    });
    reattach(&mut supervisor.control(), &session);
    supervisor.signal(Signal::TERM);
    assert_eq!(supervisor.wait(LONG), Some(0));
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
    // Settings that cannot be served replace no daemon that works.
    let good = std::fs::read_to_string(&store.config).unwrap();
    std::fs::write(
        &store.config,
        good.replace("arena_bytes_max", "arena_bytes_mx"),
    )
    .unwrap();
    supervisor.signal(Signal::USR2);
    let log = BufReader::new(supervisor.child.stderr.take().unwrap());
    let mut lines = log.lines().map(Result::unwrap);
    let kept = lines.find(|line| line.contains("was not replaced and continues"));
    let kept = kept.unwrap();
    assert!(
        kept.contains("ERROR") && kept.contains("arena_bytes_mx"),
        "{kept}"
    );
    assert_eq!(daemon_of(&supervisor), Some(first));
    std::thread::spawn(move || lines.for_each(drop));
    std::fs::write(&store.config, good).unwrap();
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
