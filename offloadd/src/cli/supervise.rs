//! `offloadd supervise`: keeps a daemon running where there is no systemd, and its sessions over a restart, by systemd's own
//! protocol: it reads what the daemon sends to `NOTIFY_SOCKET`, keeps the descriptors among it, and starts the next daemon
//! with them.
//!
//! ```text
//!   SIGUSR2 ─▶ SIGTERM to the daemon ─▶ it hands over and ends ─▶ the next one, of the program that lies there now
//!   it fails ─▶ the next one after a second, five times in five minutes
//!   SIGTERM, SIGINT ─▶ the daemon ends, and so does this; sessions end with it
//! ```

use std::collections::VecDeque;
use std::io::{self, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use offloadd::config::Config;
use offloadd::handover::{STATE, inherited, is_ours};
use offloadd::server;
use rustix::fs::Mode;
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags};
use rustix::process::{PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use tokio::io::Interest;
use tokio::net::UnixDatagram;
use tokio::signal::unix::{SignalKind, signal};

use super::log;

/// As the unit has it.
const FAILURES_MAX: usize = 5;
const FAILURES_WITHIN: Duration = Duration::from_secs(300);
const RESTART_AFTER: Duration = Duration::from_secs(1);

/// Kept at most: seven a session.
const KEPT_MAX: usize = 16 << 10;

pub(crate) fn run(config: &Path) -> Result<()> {
    let _last_lines = log::to_stderr();
    let socket = Config::read(config)?.socket;
    server::prepare_folder(&socket, false)?;
    // Found once: the next daemon is of the program that lies there then.
    let program = std::env::current_exe().context("finding this program")?;
    let (notify, path) = listen(&socket)?;
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(1)
        .enable_all()
        .build()
        .context("starting a thread")?;
    let mut supervisor = Supervisor {
        program,
        config: config.to_owned(),
        path: path.clone(),
        kept: Vec::new(),
        failures: VecDeque::new(),
    };
    let result = runtime.block_on(async {
        let notify = UnixDatagram::from_std(notify)?;
        supervisor.run(&notify).await
    });
    let _ = std::fs::remove_file(path);
    result
}

struct Supervisor {
    program: PathBuf,
    config: PathBuf,
    path: PathBuf,
    kept: Vec<(String, OwnedFd)>,
    failures: VecDeque<Instant>,
}

/// A socket that this user alone may write to, beside the daemon's.
fn listen(socket: &Path) -> Result<(net::UnixDatagram, PathBuf)> {
    let mut name = socket.as_os_str().to_owned();
    name.push(".sup");
    let path = PathBuf::from(name);
    if net::UnixDatagram::unbound()?.connect(&path).is_ok() {
        bail!(
            "another `offloadd supervise` listens at {}: end it first",
            path.display()
        );
    }
    let _ = std::fs::remove_file(&path);
    let before = rustix::process::umask(Mode::from_raw_mode(0o177));
    let notify = net::UnixDatagram::bind(&path);
    rustix::process::umask(before);
    let notify = notify.with_context(|| format!("binding {}", path.display()))?;
    notify.set_nonblocking(true)?;
    Ok((notify, path))
}

impl Supervisor {
    async fn run(&mut self, notify: &UnixDatagram) -> Result<()> {
        let mut terminate = signal(SignalKind::terminate())?;
        let mut interrupt = signal(SignalKind::interrupt())?;
        let mut reload = signal(SignalKind::hangup())?;
        let mut renew = signal(SignalKind::user_defined2())?;
        loop {
            let child = self.start()?;
            let pid = rustix::process::Pid::from_child(&child);
            // By descriptor: a number may become another process's.
            let daemon = pidfd_open(pid, PidfdFlags::empty()).context("watching the daemon")?;
            let tell = |signal: Signal| {
                // It has ended: that is heard of below.
                let _ = pidfd_send_signal(&daemon, signal);
            };
            let mut ended = tokio::task::spawn_blocking(move || wait(child));
            let (mut ending, mut renewing) = (false, false);
            let status = loop {
                tokio::select! {
                    status = &mut ended => break status.context("waiting for the daemon")??,
                    ready = notify.readable() => {
                        ready?;
                        self.read(notify);
                    }
                    _ = terminate.recv() => { ending = true; tell(Signal::INT); }
                    _ = interrupt.recv() => { ending = true; tell(Signal::INT); }
                    _ = reload.recv() => tell(Signal::HUP),
                    _ = renew.recv() => { renewing = true; tell(Signal::TERM); }
                }
            };
            // What it said last.
            self.read(notify);
            // Somebody may have asked the daemon itself to end for the next one.
            let goes_on = renewing || self.kept.iter().any(|(name, _)| name == STATE);
            if ending || (status.success() && !goes_on) {
                return match status.success() {
                    true => Ok(()),
                    false => bail!("the daemon ended with {status}"),
                };
            }
            // One that was asked to end before it could listen is no failure.
            if !status.success() && !renewing {
                self.count_failure(status)?;
                tokio::select! {
                    () = tokio::time::sleep(RESTART_AFTER) => {}
                    _ = terminate.recv() => return Ok(()),
                    _ = interrupt.recv() => return Ok(()),
                }
            }
        }
    }

    /// With everything that is kept, and goes on being kept until it says that it has it.
    fn start(&self) -> Result<Child> {
        let mut command = Command::new(&self.program);
        command.args(["serve", "--config"]).arg(&self.config);
        command
            .env("NOTIFY_SOCKET", &self.path)
            .env_remove("WATCHDOG_USEC");
        let _numbers =
            inherited::pass(&mut command, &self.kept).context("passing descriptors on")?;
        command
            .spawn()
            .with_context(|| format!("starting {}", self.program.display()))
    }

    fn count_failure(&mut self, status: ExitStatus) -> Result<()> {
        let now = Instant::now();
        self.failures.push_back(now);
        while self
            .failures
            .front()
            .is_some_and(|at| now - *at > FAILURES_WITHIN)
        {
            self.failures.pop_front();
        }
        if self.failures.len() > FAILURES_MAX {
            bail!(
                "the daemon ended with {status}, for the {}th time in {} minutes",
                self.failures.len(),
                FAILURES_WITHIN.as_secs() / 60
            );
        }
        tracing::warn!(%status, "the daemon ended: another one is started in a second");
        Ok(())
    }

    /// All that the daemon has said.
    fn read(&mut self, notify: &UnixDatagram) {
        loop {
            match notify.try_io(Interest::READABLE, || receive(notify)) {
                Ok((words, fds)) => self.hear(&words, fds),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return,
                Err(error) => {
                    tracing::warn!(%error, "a word of the daemon was lost");
                    return;
                }
            }
        }
    }

    fn hear(&mut self, words: &str, fds: Vec<OwnedFd>) {
        let says = |word: &str| words.lines().any(|line| line == word);
        let name = words.lines().find_map(|line| line.strip_prefix("FDNAME="));
        let Some(name) = name.filter(|name| is_ours(name)) else {
            // A barrier's descriptor is closed here, which is its answer. The rest is for systemd.
            return;
        };
        if says("FDSTOREREMOVE=1") {
            self.kept.retain(|(kept, _)| kept != name);
        } else if says("FDSTORE=1") && self.kept.len() + fds.len() <= KEPT_MAX {
            self.kept
                .extend(fds.into_iter().map(|fd| (name.to_owned(), fd)));
        }
    }
}

fn wait(mut child: Child) -> io::Result<ExitStatus> {
    child.wait()
}

fn receive(notify: &UnixDatagram) -> io::Result<(String, Vec<OwnedFd>)> {
    let mut bytes = [0_u8; 4096];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(8))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let received = rustix::net::recvmsg(
        notify.as_fd(),
        &mut [IoSliceMut::new(&mut bytes)],
        &mut control,
        RecvFlags::CMSG_CLOEXEC | RecvFlags::DONTWAIT,
    )?;
    let mut fds = Vec::new();
    for item in control.drain() {
        if let RecvAncillaryMessage::ScmRights(rights) = item {
            fds.extend(rights);
        }
    }
    let words = String::from_utf8_lossy(&bytes[..received.bytes]).into_owned();
    Ok((words, fds))
}
