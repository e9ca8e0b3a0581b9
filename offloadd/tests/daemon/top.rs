//! Tests `offloadd top` as a program. What could go wrong: a table of another daemon, invalid JSON, an error that does not say what to do, a reader
//! that closes the pipe.

use std::process::Output;
use std::time::Duration;

use crate::common::{Daemon, Store, eventually, expect_tiles, fill_tiles, program, words};

const SOON: Duration = Duration::from_secs(60);

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
    daemon.wait(SOON);
    let output = top(&daemon, &["--once"]);
    assert!(!output.status.success());
    let message = words(&output);
    assert!(message.contains("no daemon at "), "{message}");
    assert!(
        message.contains("check that `offloadd serve` runs"),
        "{message}"
    );
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

/// A terminal, its content, and the program in it.
struct Terminal {
    script: std::process::Child,
    dir: tempfile::TempDir,
}

impl Terminal {
    fn top(daemon: &Daemon) -> Self {
        Self::top_in(daemon, "", "0.1")
    }

    /// Starts `offloadd top` in a terminal. `prepare` is a shell command to run before.
    fn top_in(daemon: &Daemon, prepare: &str, interval: &str) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let line = format!(
            "echo $$ >{dir}/pid; {prepare} exec {} top --interval {interval} --socket {}",
            env!("CARGO_BIN_EXE_offloadd"),
            daemon.socket.display(),
            dir = dir.path().display()
        );
        let script = std::process::Command::new("script")
            .args(["--quiet", "--flush", "--return", "--command", &line])
            .arg(dir.path().join("drawn"))
            .stdin(std::process::Stdio::piped())
            .stdout(std::process::Stdio::null())
            .spawn()
            .unwrap();
        Self { script, dir }
    }

    fn drawn(&self) -> String {
        let drawn = std::fs::read(self.dir.path().join("drawn")).unwrap_or_default();
        String::from_utf8_lossy(&drawn).into_owned()
    }

    fn pid(&self) -> String {
        let pid = std::fs::read_to_string(self.dir.path().join("pid")).unwrap();
        pid.trim().to_owned()
    }

    fn signal(&self, signal: rustix::process::Signal) {
        let pid = rustix::process::Pid::from_raw(self.pid().parse().unwrap()).unwrap();
        rustix::process::kill_process(pid, signal).unwrap();
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        // The terminal ends with `script`, and so do the programs in it.
        let _ = self.script.kill();
        let _ = self.script.wait();
    }
}

#[test]
fn the_live_view_outlasts_its_daemon_and_ends_beside_one_that_hangs() {
    if std::process::Command::new("script")
        .arg("--version")
        .output()
        .is_err()
    {
        println!("skipped: no `script`, which makes a terminal: the live view of top");
        return;
    }
    let store = Store::new(1, "psync");
    let mut daemon = store.serve();
    let mut terminal = Terminal::top(&daemon);
    eventually("a table", SOON, || {
        terminal.drawn().contains("offloadd up ")
    });
    daemon.child.kill().unwrap();
    daemon.wait(SOON);
    eventually("that it waits", SOON, || {
        terminal
            .drawn()
            .contains("waiting for the daemon to return")
    });
    let tables = || terminal.drawn().matches("offloadd up ").count();
    let before = tables();
    let next = store.serve();
    eventually("another table", SOON, || tables() > before);
    next.signal(rustix::process::Signal::STOP);
    // `top` asks the daemon and gets no answer.
    std::thread::sleep(Duration::from_millis(300));
    let since = std::time::Instant::now();
    terminal.signal(rustix::process::Signal::INT);
    let status = terminal.script.wait().unwrap();
    let took = since.elapsed();
    next.signal(rustix::process::Signal::CONT);
    assert!(status.success(), "{status}");
    assert!(
        took < Duration::from_secs(8),
        "{took:?}: it waited for an answer"
    );
    let drawn = terminal.drawn();
    assert!(
        drawn.contains("\x1b[?1049l"),
        "the screen is as it was: {drawn}"
    );
}

#[test]
fn a_terminal_that_is_too_small_says_how_much_is_left_out_until_it_is_made_larger() {
    for program in ["script", "stty"] {
        if std::process::Command::new(program)
            .arg("--version")
            .output()
            .is_err()
        {
            println!("skipped: no `{program}`: top in a small terminal");
            return;
        }
    }
    let store = Store::new(3, "psync");
    let daemon = store.serve();
    // `top` asks once: later output is drawn because of the new size.
    let mut terminal = Terminal::top_in(&daemon, "stty rows 6 cols 100;", "3600");
    eventually("a part of the table", SOON, || {
        terminal
            .drawn()
            .contains("and 3 more lines: offloadd top --once")
    });
    let device = |number| format!("/device{number}");
    assert!(terminal.drawn().contains(&device(0)));
    assert!(!terminal.drawn().contains(&device(2)));
    let resized = std::process::Command::new("stty")
        .arg("-F")
        .arg(format!("/proc/{}/fd/1", terminal.pid()))
        .args(["rows", "30"])
        .output()
        .unwrap();
    assert!(resized.status.success(), "{}", words(&resized));
    eventually("all of it", SOON, || {
        let drawn = terminal.drawn();
        drawn.contains(&device(2)) && drawn.contains("Ctrl-C ends")
    });
    terminal.signal(rustix::process::Signal::INT);
    assert!(terminal.script.wait().unwrap().success());
}

#[test]
fn a_reader_that_has_gone_does_not_make_a_command_fail() {
    let store = Store::new(1, "psync");
    // Nobody reads: the pipe's other end is closed before anything is printed.
    let line = "(sleep 0.2; \"$0\" doctor --config \"$1\"; echo $? >\"$2\") | true";
    let code = store.dir.path().join("code");
    let output = std::process::Command::new("sh")
        .args(["-c", line])
        .arg(env!("CARGO_BIN_EXE_offloadd"))
        .args([&store.config, &code])
        .output()
        .unwrap();
    eventually("the end", SOON, || {
        std::fs::read_to_string(&code).is_ok_and(|code| code.ends_with('\n'))
    });
    let printed = words(&output);
    assert!(!printed.contains("panicked"), "{printed}");
    assert_ne!(
        std::fs::read_to_string(&code).unwrap(),
        "101\n",
        "{printed}"
    );
}
