//! Tests that a stopped or killed measurement leaves no files, no jobs in a store and no running fio.

use std::time::{Duration, Instant};

use offload_client::Daemon;
use rustix::process::{Pid, Signal, kill_process};

use crate::harness::{assert_empty, bench_io, daemon, drive, json, program};

#[test]
fn a_measurement_that_is_stopped_leaves_nothing() {
    for signal in [Signal::TERM, Signal::HUP] {
        let dir = drive();
        let mut running = in_the_middle(dir.path());
        kill_process(Pid::from_child(&running), signal).unwrap();
        let stopped = Instant::now();
        let status = running.wait().unwrap();
        assert!(!status.success());
        assert!(stopped.elapsed().as_secs() < 20, "{:?}", stopped.elapsed());
        assert_empty(dir.path());
    }
}

#[test]
fn under_nohup_a_measurement_outlives_its_terminal() {
    let dir = drive();
    let mut running = in_the_middle_with(dir.path(), "--ignore-signal=HUP");
    kill_process(Pid::from_child(&running), Signal::HUP).unwrap();
    std::thread::sleep(Duration::from_secs(1));
    assert!(running.try_wait().unwrap().is_none());
    kill_process(Pid::from_child(&running), Signal::TERM).unwrap();
    assert!(!running.wait().unwrap().success());
    assert_empty(dir.path());
}

#[test]
fn what_a_killed_measurement_left_the_next_one_removes() {
    let dir = drive();
    let mut killed = in_the_middle(dir.path());
    killed.kill().unwrap();
    killed.wait().unwrap();
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1);
    let path = dir.path().to_str().unwrap();
    let words = [
        "run",
        "--rw=read",
        "--bs=64k",
        "--size=16m",
        "--runtime=0.3",
    ];
    json(&[&words[..], &["--json", "--directory", path]].concat());
    assert_empty(dir.path());
}

#[test]
fn fio_is_ended_with_the_measurement() {
    let dir = drive();
    let fio = dir.path().join("fio");
    // Prints its version; otherwise runs for an hour.
    let text = "#!/bin/sh\n[ \"$1\" = --version ] && echo fio-9 && exit\ntouch \"$0.runs\"\nexec sleep 3600\n";
    std::fs::write(dir.path().join("new"), text).unwrap();
    let made = std::process::Command::new("install")
        .arg(dir.path().join("new"))
        .arg(&fio)
        .status();
    assert!(made.unwrap().success());
    let work = drive();
    let mut running = program()
        .args(["scale", "--size=8m", "--bs=64k", "--runtime=0.1", "--fio"])
        .arg(&fio)
        .arg("--directory")
        .arg(work.path())
        .stderr(std::process::Stdio::null())
        .spawn()
        .unwrap();
    let since = Instant::now();
    while !dir.path().join("fio.runs").exists() {
        assert!(since.elapsed().as_secs() < 60, "fio was not started");
        std::thread::sleep(Duration::from_millis(10));
    }
    kill_process(Pid::from_child(&running), Signal::TERM).unwrap();
    let stopped = Instant::now();
    assert!(!running.wait().unwrap().success());
    assert!(stopped.elapsed().as_secs() < 60, "{:?}", stopped.elapsed());
    assert_empty(work.path());
}

#[test]
fn what_a_killed_measurement_left_in_a_daemons_store_the_next_one_drops() {
    let dir = drive();
    let daemon = daemon(dir.path());
    let socket = daemon.socket().to_str().unwrap();
    let jobs = || Daemon::connect(daemon.socket()).unwrap().jobs().unwrap();
    let words = ["--bs=64k", "--size=16m", "--iodepth=4", "--socket", socket];
    let mut killed = program()
        .args(["run", "--runtime=60"])
        .args(words)
        .spawn()
        .unwrap();
    let until = |what: &str, is: &dyn Fn() -> bool| {
        let since = Instant::now();
        while !is() {
            assert!(since.elapsed().as_secs() < 60, "{what}");
            std::thread::sleep(Duration::from_millis(10));
        }
    };
    until("no job", &|| {
        jobs().iter().any(|job| job.open && job.reserved_bytes > 0)
    });
    killed.kill().unwrap();
    killed.wait().unwrap();
    until("still open", &|| jobs().iter().all(|job| !job.open));
    assert_eq!(jobs().len(), 1);
    let output = bench_io(&[&["run", "--runtime=1"], &words[..]].concat());
    let printed = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{printed}");
    assert!(printed.contains("of a killed measurement"), "{printed}");
    assert_eq!(jobs().len(), 0);
}

/// Starts a measurement that would take a minute, and returns one second after it began to make files in `dir`.
fn in_the_middle(dir: &std::path::Path) -> std::process::Child {
    in_the_middle_with(dir, "--default-signal=HUP")
}

/// Like [`in_the_middle`]; `hangup` is the option of `env` that sets the disposition of SIGHUP, whatever the test runner has set.
fn in_the_middle_with(dir: &std::path::Path, hangup: &str) -> std::process::Child {
    let running = std::process::Command::new("env")
        .arg(hangup)
        .arg(program().get_program())
        .args([
            "run",
            "--size=16m",
            "--bs=64k",
            "--runtime=60",
            "--directory",
        ])
        .arg(dir)
        .stderr(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    let since = Instant::now();
    while std::fs::read_dir(dir).unwrap().count() == 0 {
        assert!(since.elapsed().as_secs() < 20, "nothing was made");
        std::thread::sleep(Duration::from_millis(10));
    }
    std::thread::sleep(Duration::from_secs(1));
    running
}
