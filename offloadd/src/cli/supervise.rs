//! `offloadd supervise`: runs a daemon where there is no systemd, and keeps its sessions over a restart. It speaks systemd's protocol:
//! it reads the messages that the daemon sends to `NOTIFY_SOCKET`, keeps the descriptors in them, and passes them to the next daemon.
//!
//! ```text
//!   SIGUSR2 ─▶ the installed program checks the settings ─▶ SIGTERM to the daemon ─▶ it hands over and ends ─▶ start the installed program
//!                                     └▶ they cannot be served: the daemon stays
//!   the daemon fails, or cannot be started ─▶ retry after a second, at most five times in five minutes
//!   SIGTERM, SIGINT ─▶ SIGINT to the daemon ─▶ it ends its sessions and ends ─▶ exit
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
use offloadd::error_text::whole;
use offloadd::handover::{DESCRIPTORS_MAX, inherited, is_ours, is_state};
use offloadd::server;
use rustix::fs::Mode;
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags};
use rustix::process::{PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use tokio::io::Interest;
use tokio::net::UnixDatagram;
use tokio::signal::unix::{SignalKind, signal};

use super::{log, raise_descriptor_limit};

/// The same limits as in the systemd unit.
const FAILURES_MAX: usize = 5;
const FAILURES_WITHIN: Duration = Duration::from_secs(300);
const RESTART_AFTER: Duration = Duration::from_secs(1);

pub(crate) fn run(config: &Path) -> Result<()> {
    let _last_lines = log::to_stderr();
    // Kept descriptors are open here, and twice while a daemon is being started with them.
    raise_descriptor_limit();
    let socket = Config::read(config)?.socket;
    server::prepare_dir(&socket, false)?;
    // A path, so that the next daemon is the program installed there by then.
    let program = std::env::current_exe().context("finding the path of this program")?;
    let (notify, path) = listen(&socket)?;
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(1)
        .enable_all()
        .build()
        .context("starting the async runtime")?;
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
    // A check of settings may hang on a drive.
    runtime.shutdown_background();
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

/// Binds a socket beside the daemon's that only this user can write to.
fn listen(socket: &Path) -> Result<(net::UnixDatagram, PathBuf)> {
    let mut name = socket.as_os_str().to_owned();
    name.push(".sup");
    let path = PathBuf::from(name);
    if net::UnixDatagram::unbound()?.connect(&path).is_ok() {
        bail!(
            "another `offloadd supervise` listens at {}; end it first",
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
                // For example while the program is being replaced. Kept descriptors stay for the next attempt.
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
                // Fails only if the daemon has ended, which is handled below.
                let _ = pidfd_send_signal(&daemon, signal);
            };
            let mut ended = tokio::task::spawn_blocking(move || wait(child));
            let (mut ending, mut renewing) = (false, false);
            // Reading a drive that hangs may take long, and the daemon's messages are read meanwhile.
            let mut checking = None;
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
                    _ = renew.recv() => {
                        let (program, config) = (self.program.clone(), self.config.clone());
                        checking = Some(tokio::task::spawn_blocking(move || check(&program, &config)));
                    }
                    checked = async { checking.as_mut().expect("the condition").await }, if checking.is_some() => {
                        checking = None;
                        match checked.context("checking the settings")? {
                            Ok(()) => { renewing = true; tell(Signal::TERM); }
                            Err(error) => tracing::error!(
                                "the daemon was not replaced and continues: {}; send SIGUSR2 again once this is corrected",
                                whole(&error)
                            ),
                        }
                    }
                }
            };
            // Read the last messages of the ended daemon.
            self.read(notify);
            // The daemon may also have been asked directly to hand over.
            let continues = renewing || self.kept.iter().any(|(name, _)| is_state(name));
            if ending || (status.success() && !continues) {
                return match status.success() {
                    true => Ok(()),
                    false => bail!("the daemon ended with {status}"),
                };
            }
            // A daemon that was asked to end before it handled signals is not a failure.
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

    /// Starts the daemon with the kept descriptors, which stay kept until the daemon confirms them. Returns a pidfd to signal it,
    /// because its pid may be reused.
    fn start(&self) -> Result<(Child, OwnedFd)> {
        let mut command = Command::new(&self.program);
        command.args(["serve", "--config"]).arg(&self.config);
        command
            .env("NOTIFY_SOCKET", &self.path)
            .env_remove("WATCHDOG_USEC");
        let _numbers = inherited::pass(&mut command, &self.kept)
            .context("passing descriptors to the daemon")?;
        let mut child = command
            .spawn()
            .with_context(|| format!("starting {}", self.program.display()))?;
        let pid = rustix::process::Pid::from_child(&child);
        match pidfd_open(pid, PidfdFlags::empty()) {
            Ok(daemon) => Ok((child, daemon)),
            Err(errno) => {
                let _ = child.kill();
                let _ = child.wait();
                Err(errno).context("opening a pidfd of the daemon")
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
                "the daemon {how}; giving up after {} failures in {} minutes",
                self.failures.len(),
                FAILURES_WITHIN.as_secs() / 60
            );
        }
        tracing::warn!("the daemon {how}; starting it again in a second");
        Ok(())
    }

    /// Reads the daemon's messages.
    fn read(&mut self, notify: &UnixDatagram) {
        loop {
            match notify.try_io(Interest::READABLE, || receive(notify)) {
                Ok((message, fds)) => self.handle(&message, fds),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return,
                Err(error) => {
                    tracing::warn!(%error, "cannot receive a message of the daemon");
                    return;
                }
            }
        }
    }

    fn handle(&mut self, message: &str, fds: Vec<OwnedFd>) {
        let has = |line: &str| message.lines().any(|other| other == line);
        let name = message
            .lines()
            .find_map(|line| line.strip_prefix("FDNAME="));
        let Some(name) = name.filter(|name| is_ours(name)) else {
            // Closing the descriptor of a barrier is its answer. Other messages are for systemd only.
            return;
        };
        if has("FDSTOREREMOVE=1") {
            self.kept.retain(|(kept, _)| kept != name);
        } else if has("FDSTORE=1") {
            if self.kept.len() + fds.len() > DESCRIPTORS_MAX {
                tracing::warn!(
                    "{DESCRIPTORS_MAX} descriptors are already kept, so the session of {name} will end at the next restart"
                );
                return;
            }
            self.kept
                .extend(fds.into_iter().map(|fd| (name.to_owned(), fd)));
        }
    }
}

/// Asks the program that would be started whether it could serve `config`.
fn check(program: &Path, config: &Path) -> Result<()> {
    let mut command = Command::new(program);
    let output = command.arg("check-config").arg(config).output();
    let output = output.with_context(|| format!("starting {}", program.display()))?;
    if !output.status.success() {
        bail!("{}", String::from_utf8_lossy(&output.stderr).trim());
    }
    Ok(())
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
            "too many open files to receive a descriptor of the daemon, so its session will end at the next restart; raise `ulimit -Hn`"
        );
    }
    let mut fds = Vec::new();
    for item in control.drain() {
        if let RecvAncillaryMessage::ScmRights(rights) = item {
            fds.extend(rights);
        }
    }
    let message = String::from_utf8_lossy(&bytes[..received.bytes]).into_owned();
    Ok((message, fds))
}
