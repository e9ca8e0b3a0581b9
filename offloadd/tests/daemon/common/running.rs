//! A running daemon: its settings, the program under its own name or another, and the engines of this machine.

use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use offloadd::blocks::Blocks;
use offloadd::device::{Device, DeviceBlocks};
use offloadd::engine::{Engine, EngineChoice};
use offloadd::store::{SUPERBLOCK_OFFSETS, recover};

use super::process::Control;
use super::store::{Store, program, words};

/// Links the program under another name. A copy would be open for writing, and a process that another test starts meanwhile would inherit it, so it
/// could not be started ("text file busy").
pub(crate) fn link_program(name: &Path) {
    let program = env!("CARGO_BIN_EXE_offloadd");
    if std::fs::hard_link(program, name).is_err() {
        let copied = Command::new("cp").arg(program).arg(name).status().unwrap();
        assert!(copied.success());
    }
}

impl Store {
    /// Adds a setting before the first table of the file.
    pub(crate) fn add_setting(&self, line: &str) {
        let text = std::fs::read_to_string(&self.config).unwrap();
        std::fs::write(&self.config, format!("{line}\n{text}")).unwrap();
    }

    /// Sets the stored rates of each device, for reads and writes, while no daemon runs.
    pub(crate) fn set_rates(&self, bytes_per_s: &[u64]) {
        let opened = self.devices.iter().map(|path| Device::open(path).unwrap());
        let opened: Vec<Device> = opened.collect();
        let mut blocks = DeviceBlocks(&opened);
        for device in recover::read(&mut blocks).unwrap().devices {
            let mut superblock = device.superblock;
            superblock.read_bytes_per_s = bytes_per_s[device.position];
            superblock.write_bytes_per_s = bytes_per_s[device.position];
            for offset in SUPERBLOCK_OFFSETS {
                let block = superblock.encode();
                blocks.write(device.position, offset, &block).unwrap();
            }
        }
    }

    pub(crate) fn serve_command(&self) -> Command {
        let mut command = program();
        command.args(["serve", "--config"]).arg(&self.config);
        command
    }

    pub(crate) fn serve(&self) -> Daemon {
        Daemon::start(self.serve_command(), self.socket())
    }

    /// Returns the output of a daemon that must refuse to start.
    pub(crate) fn refusal(&self) -> String {
        let mut command = self.serve_command();
        command.stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let mut printed = String::new();
        let stdout = child.stdout.as_mut().unwrap();
        BufReader::new(stdout).read_line(&mut printed).unwrap();
        if printed.starts_with("READY ") {
            // Otherwise the wait would not end.
            child.kill().unwrap();
            child.wait().unwrap();
            panic!("it started: {printed}");
        }
        let output = child.wait_with_output().unwrap();
        assert!(!output.status.success(), "{}", words(&output));
        printed + &words(&output)
    }
}

/// A running daemon, killed when dropped.
pub(crate) struct Daemon {
    pub(crate) child: Child,
    pub(crate) ready: String,
    pub(crate) socket: PathBuf,
}

impl Daemon {
    pub(crate) fn start(mut command: Command, socket: PathBuf) -> Self {
        let mut child = command
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let mut ready = String::new();
        BufReader::new(child.stdout.as_mut().unwrap())
            .read_line(&mut ready)
            .unwrap();
        if !ready.starts_with("READY ") {
            let mut error = String::new();
            child
                .stderr
                .take()
                .unwrap()
                .read_to_string(&mut error)
                .unwrap();
            let _ = child.wait();
            panic!("the daemon did not start: {error}");
        }
        Self {
            child,
            ready,
            socket,
        }
    }

    pub(crate) fn pid(&self) -> rustix::process::Pid {
        rustix::process::Pid::from_child(&self.child)
    }

    pub(crate) fn signal(&self, signal: rustix::process::Signal) {
        rustix::process::kill_process(self.pid(), signal).unwrap();
    }

    /// Returns its exit code, `None` when a signal ended it.
    pub(crate) fn wait(&mut self, limit: Duration) -> Option<i32> {
        let end = Instant::now() + limit;
        while Instant::now() < end {
            if let Some(status) = self.child.try_wait().unwrap() {
                return status.code();
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        panic!("the daemon has not ended after {limit:?}");
    }

    /// Ends the daemon in order and returns its log.
    pub(crate) fn last_words(mut self) -> String {
        self.signal(rustix::process::Signal::TERM);
        assert_eq!(self.wait(Duration::from_secs(60)), Some(0));
        let mut log = String::new();
        let mut stderr = self.child.stderr.take().unwrap();
        stderr.read_to_string(&mut log).unwrap();
        log
    }

    /// Whether a scrub runs: its thread has its own name. Starting another scrub to test this would take its place.
    pub(crate) fn is_scrubbing(&self) -> bool {
        let tasks = std::fs::read_dir(format!("/proc/{}/task", self.child.id())).unwrap();
        tasks.flatten().any(|task| {
            std::fs::read_to_string(task.path().join("comm")).is_ok_and(|name| name == "scrub\n")
        })
    }

    pub(crate) fn control(&self) -> Control {
        Control::connect(&self.socket)
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Returns the engines of this machine; prints which ones it lacks.
pub(crate) fn engines() -> Vec<&'static str> {
    let any = std::sync::Arc::new(tempfile::tempfile().unwrap());
    any.set_len(4096).unwrap();
    let mut found = Vec::new();
    for choice in EngineChoice::AUTO {
        match Engine::open(choice, std::slice::from_ref(&any), 16) {
            Ok(_) => found.push(choice.name()),
            Err(error) => println!(
                "skipped: {}: {error}",
                std::thread::current().name().unwrap_or("a test")
            ),
        }
    }
    found
}
