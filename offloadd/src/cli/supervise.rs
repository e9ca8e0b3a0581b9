//! `offloadd supervise`: keeps a daemon running where there is no systemd, and its sessions over a restart, by systemd's own
//! protocol: it reads what the daemon sends to `NOTIFY_SOCKET`, keeps the descriptors among it, and starts the next daemon
//! with them.
//!
//! ```text
//!   SIGUSR2 ─▶ SIGTERM to the daemon ─▶ it hands over and ends ─▶ the next one, of the program that lies there now
//!   it fails, or cannot be started ─▶ the next one after a second, five times in five minutes
//!   SIGTERM, SIGINT ─▶ the daemon ends, and so does this; sessions end with it
//! ```

use std::collections::VecDeque;
use std::fmt::Display;
use std::io::{self, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use offloadd::config::Config;
use offloadd::handover::{DESCRIPTORS_MAX, inherited, is_ours, is_state};
use offloadd::server;
use rustix::fs::Mode;
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags};
use rustix::process::{PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use tokio::io::Interest;
use tokio::net::UnixDatagram;
use tokio::signal::unix::{SignalKind, signal};

use super::{log, raise_descriptor_limit, whole};

/// As the unit has it.
const FAILURES_MAX: usize = 5;
const FAILURES_WITHIN: Duration = Duration::from_secs(300);
const RESTART_AFTER: Duration = Duration::from_secs(1);

pub(crate) fn run(config: &Path) -> Result<()> {
    let _last_lines = log::to_stderr();
    // What is kept is open here, and once more while a daemon is started with it.
    raise_descriptor_limit();
    let socket = Config::read(config)?.socket;
    server::prepare_dir(&socket, false)?;
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
            let (child, daemon) = match self.start() {
                Ok(started) => started,
                // The program is just being replaced, the machine is out of processes: what is kept waits.
                Err(error) => {
                    self.count_failure(format!("could not be started: {}", whole(&error)))?;
                    tokio::select! {
                        () = tokio::time::sleep(RESTART_AFTER) => continue,
                        _ = terminate.recv() => return Ok(()),
                        _ = interrupt.recv() => return Ok(()),
                    }
                }
            };
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
            let goes_on = renewing || self.kept.iter().any(|(name, _)| is_state(name));
            if ending || (status.success() && !goes_on) {
                return match status.success() {
                    true => Ok(()),
                    false => bail!("the daemon ended with {status}"),
                };
            }
            // One that was asked to end before it could listen is no failure.
            if !status.success() && !renewing {
                self.count_failure(format!("ended with {status}"))?;
                tokio::select! {
                    () = tokio::time::sleep(RESTART_AFTER) => {}
                    _ = terminate.recv() => return Ok(()),
                    _ = interrupt.recv() => return Ok(()),
                }
            }
        }
    }

    /// With everything that is kept, and goes on being kept until it says that it has it. And the way to signal it: by
    /// descriptor, as a number may become another process's.
    fn start(&self) -> Result<(Child, OwnedFd)> {
        let mut command = Command::new(&self.program);
        command.args(["serve", "--config"]).arg(&self.config);
        command
            .env("NOTIFY_SOCKET", &self.path)
            .env_remove("WATCHDOG_USEC");
        let _numbers =
            inherited::pass(&mut command, &self.kept).context("passing descriptors on")?;
        let mut child = command
            .spawn()
            .with_context(|| format!("starting {}", self.program.display()))?;
        let pid = rustix::process::Pid::from_child(&child);
        match pidfd_open(pid, PidfdFlags::empty()) {
            Ok(daemon) => Ok((child, daemon)),
            Err(errno) => {
                let _ = child.kill();
                let _ = child.wait();
                Err(errno).context("watching the daemon")
            }
        }
    }

    fn count_failure(&mut self, how: impl Display) -> Result<()> {
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
                "the daemon {how}: failure {} in {} minutes",
                self.failures.len(),
                FAILURES_WITHIN.as_secs() / 60
            );
        }
        tracing::warn!("the daemon {how}: another one is started in a second");
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
        } else if says("FDSTORE=1") {
            if self.kept.len() + fds.len() > DESCRIPTORS_MAX {
                tracing::warn!(
                    "{DESCRIPTORS_MAX} descriptors are kept already: the session of {name} will end"
                );
                return;
            }
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
    if received.flags.contains(ReturnFlags::CTRUNC) {
        tracing::error!(
            "a descriptor of the daemon could not be taken: its session will end. Too many are open here: `ulimit -Hn`"
        );
    }
    let mut fds = Vec::new();
    for item in control.drain() {
        if let RecvAncillaryMessage::ScmRights(rights) = item {
            fds.extend(rights);
        }
    }
    let words = String::from_utf8_lossy(&bytes[..received.bytes]).into_owned();
    Ok((words, fds))
}
