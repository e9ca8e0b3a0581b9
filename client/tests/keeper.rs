//! Tests with a program that fails, prints much or does not end when it is started as a private daemon: its user must not hang, and must get the
//! reason. The program here is a shell script.

use std::fs;
use std::time::{Duration, Instant};

use offload_client::ClientError;
use offload_client::private::{PrivateDaemon, PrivateSettings};

fn start(dir: &std::path::Path, script: &str) -> Result<PrivateDaemon, ClientError> {
    let program = dir.join("offloadd");
    // Another process writes the file: a file open for writing here would be inherited by a process that another test starts at this moment, and a
    // program that is open for writing cannot be started.
    let script = format!("#!/bin/sh\n{script}\n");
    let made = std::process::Command::new("sh")
        .args(["-c", r#"printf %s "$1" > "$0" && chmod 755 "$0""#])
        .args([program.as_os_str(), script.as_ref()])
        .status();
    assert!(made.unwrap().success());
    PrivateDaemon::start(PrivateSettings {
        program: Some(program),
        dir: dir.to_owned(),
        devices: vec![(dir.join("quote\" and space.tiles"), 1 << 20)],
        arena_bytes_max: 1 << 20,
        iodepth_max: 64,
        engine: "auto".into(),
    })
}

#[test]
fn it_is_formatted_once_and_its_settings_are_as_asked() {
    let dir = tempfile::tempdir().unwrap();
    let script = r#"echo "$0 $@" >> "$(dirname $0)/calls"
        case $1 in
            format) touch "$2" ;;
            serve) echo READY; exec sleep 60 ;;
        esac"#;
    for _ in 0..2 {
        drop(start(dir.path(), script).unwrap());
    }
    let calls = fs::read_to_string(dir.path().join("calls")).unwrap();
    let verbs: Vec<_> = calls
        .lines()
        .map(|l| l.split(' ').nth(1).unwrap())
        .collect();
    assert_eq!(verbs, ["format", "serve", "serve"], "{calls}");
    assert!(
        (calls.lines().next().unwrap()).ends_with("space.tiles.new --size 1048576 --private"),
        "{calls}"
    );
    let settings = fs::read_to_string(dir.path().join("offloadd.toml")).unwrap();
    assert!(
        settings.contains(r#"quote\" and space.tiles"]"#),
        "{settings}"
    );
    assert!(
        settings.contains("arena_bytes_max = 1048576\niodepth_max = 64\nengine = \"auto\""),
        "{settings}"
    );
}

#[test]
fn one_that_ends_at_once_is_reported_with_the_end_of_its_log() {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("quote\" and space.tiles"), "").unwrap();
    let words = start(dir.path(), "echo the reason >&2; exit 3")
        .unwrap_err()
        .to_string();
    assert!(
        words.contains("exit status: 3") && words.contains("the reason"),
        "{words}"
    );
}

#[test]
fn a_long_log_is_moved_away_at_the_next_start() {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("quote\" and space.tiles"), "").unwrap();
    let log = dir.path().join("offloadd.log");
    let of_before = vec![b'.'; 5 << 20];
    fs::write(&log, &of_before).unwrap();
    drop(start(dir.path(), "echo READY; exec sleep 60").unwrap());
    assert!(fs::read(dir.path().join("offloadd.log.old")).unwrap() == of_before);
    assert!(fs::metadata(&log).unwrap().len() < 4096);
}

#[test]
fn a_failed_format_is_reported_and_nothing_is_served() {
    let dir = tempfile::tempdir().unwrap();
    let words = start(
        dir.path(),
        "echo no room; [ $1 = serve ] && echo READY; exit 1",
    )
    .unwrap_err()
    .to_string();
    assert!(
        words.contains("cannot format") && words.contains("no room"),
        "{words}"
    );
}

#[test]
fn one_that_chatters_does_not_block_and_one_that_will_not_end_is_killed() {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("quote\" and space.tiles"), "").unwrap();
    // A pipe holds 64 KiB; the marker shows that the script got past its output.
    let script = r#"trap '' QUIT
        echo READY
        i=0; while [ $i -lt 4000 ]; do echo "line $i of much that nobody asked for"; i=$((i+1)); done
        touch "$(dirname $0)/past"
        while :; do sleep 0.05; done"#;
    let daemon = start(dir.path(), script).unwrap();
    let before = Instant::now();
    while !dir.path().join("past").exists() {
        assert!(before.elapsed() < Duration::from_secs(60), "it blocks");
        std::thread::sleep(Duration::from_millis(10));
    }
    let pid = daemon.pid();
    let before = Instant::now();
    drop(daemon);
    assert!(before.elapsed() < Duration::from_secs(60));
    assert!(!std::path::Path::new(&format!("/proc/{pid}")).exists());
}
