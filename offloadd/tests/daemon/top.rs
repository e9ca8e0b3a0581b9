//! `offloadd top` as a program. What could go wrong: a table that is not of this daemon, JSON that is none, an error that
//! does not say what to do, a reader that goes away.

use std::process::Output;
use std::time::Duration;

use crate::common::{Daemon, Store, expect_tiles, fill_tiles, program, words};

fn top(daemon: &Daemon, more: &[&str]) -> Output {
    let mut command = program();
    command
        .arg("top")
        .arg("--socket")
        .arg(&daemon.socket)
        .args(more);
    command.output().unwrap()
}

#[test]
fn the_table_and_the_json_are_of_the_daemon_that_is_asked() {
    let store = Store::new(2, "auto");
    let daemon = store.serve();
    let mut control = daemon.control();
    let mut session = control.session("tiny");
    let working = session.begin(&mut control, 6);
    fill_tiles(&mut session, 6, working, 10);
    expect_tiles(&mut session, 6, 10);
    session.commit(&mut control, working, b"step 1");

    let once = ["--once", "--interval", "0.2"];
    let table = words(&top(&daemon, &once));
    assert!(table.starts_with("offloadd up "), "{table}");
    assert!(table.contains(", 1 session, host memory "), "{table}");
    for device in &store.devices {
        let name = device.file_name().unwrap().to_str().unwrap();
        assert!(table.contains(name), "{table}");
    }
    let line = table
        .lines()
        .find(|line| line.starts_with("tiny (uid "))
        .expect(&table);
    let fields: Vec<_> = line.split_whitespace().collect();
    assert_eq!(&fields[3..8], ["-", "-", "100", "-", "0/4"], "{table}");
    assert_eq!(&fields[9..], ["1", "0.0", "MB", "-"], "{table}");

    let mut command = program();
    command.arg("top").arg("--config").arg(&store.config);
    let output = command.args(once).arg("--json").output().unwrap();
    let json: serde_json::Value = serde_json::from_slice(&output.stdout).expect("JSON");
    let read: u64 = (json["devices"].as_array().unwrap().iter())
        .map(|device| device["read"]["bytes"].as_u64().unwrap())
        .sum();
    assert_eq!(read, 6 * 4096);
    assert_eq!(json["jobs"][0]["written"]["count"], 6);
    assert_eq!(json["jobs"][0]["commit_count"], 1);
    assert!(json["interval_s"].as_f64().unwrap() >= 0.2);
}

#[test]
fn a_daemon_that_is_not_there_and_an_output_that_is_no_terminal_are_told() {
    let store = Store::new(1, "psync");
    let mut daemon = store.serve();
    let output = top(&daemon, &[]);
    assert!(!output.status.success());
    assert!(words(&output).contains("--once"), "{}", words(&output));
    let output = top(&daemon, &["--once", "--interval", "0"]);
    assert!(
        words(&output).contains("from 0.1 to 3600 seconds"),
        "{}",
        words(&output)
    );
    daemon.child.kill().unwrap();
    daemon.wait(Duration::from_secs(60));
    let output = top(&daemon, &["--once"]);
    assert!(!output.status.success());
    let message = words(&output);
    assert!(message.contains("no daemon at "), "{message}");
    assert!(message.contains("does `offloadd serve` run"), "{message}");
    assert!(message.contains("refused"), "{message}");
}

#[test]
fn lines_of_json_end_when_nobody_reads_them() {
    let store = Store::new(1, "psync");
    let daemon = store.serve();
    let line = "\"$0\" top --socket \"$1\" --json --interval 0.1 | head -2";
    let output = std::process::Command::new("timeout")
        .args(["60", "sh", "-c", line])
        .arg(env!("CARGO_BIN_EXE_offloadd"))
        .arg(&daemon.socket)
        .output()
        .unwrap();
    let lines = String::from_utf8(output.stdout).unwrap();
    assert_eq!(lines.lines().count(), 2, "{lines}");
    for line in lines.lines() {
        let json: serde_json::Value = serde_json::from_str(line).expect(line);
        assert_eq!(json["devices"].as_array().unwrap().len(), 1);
    }
    assert_eq!(output.status.code(), Some(0), "it ended by itself");
    assert!(output.stderr.is_empty(), "{:?}", output.stderr);
}
