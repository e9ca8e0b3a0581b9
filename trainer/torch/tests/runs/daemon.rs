//! An `offloadd` that serves a store of a test through a socket.

use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;

use crate::harness::{Harness, succeed};

/// Time for a daemon to start, which reads only some blocks; generous for a busy machine.
const START_WAIT: Duration = Duration::from_secs(60);

/// Time for a daemon to end; it waits at most a minute for a device.
const END_WAIT: Duration = Duration::from_secs(90);

/// Daemon that ends on drop.
pub(crate) struct Daemon {
    child: Child,
    socket: PathBuf,
    log: PathBuf,
    /// Directory of the socket, whose path may have at most 107 bytes.
    _dir: TempDir,
}

impl Daemon {
    /// Formats a store of 256 MiB in the test's directory and serves it.
    pub(crate) fn start(harness: &Harness) -> Self {
        Self::start_as("serve", harness)
    }

    /// Like [`Daemon::start`], under `offloadd supervise`, for [`Daemon::restart`].
    pub(crate) fn supervised(harness: &Harness) -> Self {
        Self::start_as("supervise", harness)
    }

    fn start_as(command: &str, harness: &Harness) -> Self {
        let device = harness.path("shared.tiles");
        let mut format = Command::new(program());
        format.arg("format").arg(&device).args(["--size", "256MiB"]);
        format.stdout(Stdio::piped()).stderr(Stdio::piped());
        succeed(format);
        let dir = tempfile::tempdir().expect("a directory for the socket");
        let socket = dir.path().join("offloadd.sock");
        let config = harness.path("offloadd.toml");
        let text = format!(
            "socket = \"{}\"\ndevices = [\"{}\"]\narena_bytes_max = \"512MiB\"\n",
            socket.display(),
            device.display()
        );
        std::fs::write(&config, text).expect("the daemon's settings are written");
        let mut serve = Command::new(program());
        serve
            .arg(command)
            .arg("--config")
            .arg(&config)
            .stdin(Stdio::null());
        let log = std::fs::File::create(harness.path("offloadd.log")).expect("a log");
        serve
            .stdout(log.try_clone().expect("the log again"))
            .stderr(log);
        let mut child = serve.spawn().expect("offloadd starts");
        let deadline = Instant::now() + START_WAIT;
        while std::os::unix::net::UnixStream::connect(&socket).is_err() {
            let log = || std::fs::read_to_string(harness.path("offloadd.log")).unwrap_or_default();
            assert!(
                child.try_wait().expect("it can be asked").is_none(),
                "offloadd ended: {}",
                log()
            );
            assert!(
                Instant::now() < deadline,
                "offloadd does not listen: {}",
                log()
            );
            std::thread::sleep(Duration::from_millis(10));
        }
        Self {
            child,
            socket,
            log: harness.path("offloadd.log"),
            _dir: dir,
        }
    }

    /// Replaces the daemon by another one and returns when that one listens.
    pub(crate) fn restart(&self) {
        let served = || {
            let log = std::fs::read_to_string(&self.log).expect("its log");
            let ready = log.lines().filter(|line| line.starts_with("READY"));
            ready.count()
        };
        let before = served();
        self.signal(Signal::USR2);
        let deadline = Instant::now() + 3 * START_WAIT;
        while served() == before {
            assert!(Instant::now() < deadline, "no other daemon came");
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    fn signal(&self, signal: Signal) {
        let _ = kill_process(Pid::from_child(&self.child), signal);
    }

    /// Settings with which a run uses this daemon.
    pub(crate) fn socket(&self) -> Vec<String> {
        vec![format!("offload.socket={}", self.socket.display())]
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        // The daemon may have ended by itself; tests check that if it matters. A supervised daemon ends with
        // its supervisor.
        self.signal(Signal::INT);
        let deadline = Instant::now() + END_WAIT;
        while matches!(self.child.try_wait(), Ok(None)) {
            if Instant::now() > deadline {
                let _ = self.child.kill();
                let _ = self.child.wait();
                return;
            }
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

/// `offloadd` beside the trainer under test.
pub(crate) fn program() -> PathBuf {
    let program = crate::harness::trainer().with_file_name("offloadd");
    assert!(
        program.is_file(),
        "{} is missing: build it first (cargo build -p offloadd)",
        program.display()
    );
    program
}
