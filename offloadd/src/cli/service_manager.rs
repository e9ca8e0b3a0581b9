//! What systemd is told: that the daemon serves, what it does, that it still lives; and what it keeps for the next daemon.
//! `offloadd supervise` listens as systemd does. Without either there is nobody to tell.

use std::io::{self, IoSlice};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::UnixDatagram;
use std::time::{Duration, Instant};

use offloadd::driver::DriverHandle;
use offloadd::handover::{self, HandedOver};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{
    SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketAddrUnix, sendmsg_addr,
};
use sd_notify::NotifyState;

/// A word about work that goes on asks for so much more time, should the start take longer than the unit allows.
const MORE_TIME: Duration = Duration::from_secs(60);

/// For what is said once.
const WAIT: Duration = Duration::from_secs(1);

/// For all descriptors to be taken.
const KEEP_WAIT: Duration = Duration::from_secs(10);

/// For those that are kept no longer: a manager may read nothing until it has heard that the daemon serves.
const FORGET_WAIT: Duration = Duration::from_secs(1);

/// What it has not heard then is said beside everything else: so often, each time for [`WAIT`].
const FORGET_TRIES: usize = 600;

/// Calls are taken.
pub(super) fn say_ready() {
    tell(&[NotifyState::Ready], WAIT);
}

/// Settings are read again; [`say_ready`] follows.
pub(super) fn say_reloading() {
    if let Ok(now) = NotifyState::monotonic_usec_now() {
        tell(&[NotifyState::Reloading, now], WAIT);
    }
}

/// No calls are taken any more.
pub(super) fn say_stopping() {
    tell(&[NotifyState::Stopping], WAIT);
}

/// What `systemctl status` shows.
pub(super) fn say_status(words: &str) {
    tell(&[NotifyState::Status(words)], WAIT);
}

/// Logs `line`, shows it as systemd's status, and extends the start's time limit, as long as the work makes progress.
pub(super) fn report_progress(line: &str) {
    tracing::info!("{line}");
    let more = NotifyState::ExtendTimeoutUsec(MORE_TIME.as_micros() as u32);
    tell(&[NotifyState::Status(line), more], WAIT);
}

/// Tells again and again that the daemon lives, as often as the unit's `WatchdogSec` asks for: each time after a whole
/// turn of the owner thread, so that one that is stuck falls silent and systemd starts another daemon.
pub(super) async fn keep_watchdog_quiet(owner: DriverHandle) {
    let Some(limit) = sd_notify::watchdog_enabled() else {
        return;
    };
    let mut tick = tokio::time::interval(limit / 3);
    loop {
        tick.tick().await;
        // Refused: so many messages wait for the owner thread that it has been stuck for a while, or will soon have time.
        let Ok(turn) = owner.turn() else { continue };
        if turn.await.is_err() {
            return;
        }
        // The next one comes soon.
        tell(&[NotifyState::Watchdog], Duration::ZERO);
    }
}

/// Whether there is somebody who may keep descriptors for the next daemon.
pub(super) fn somebody_keeps() -> bool {
    std::env::var_os("NOTIFY_SOCKET").is_some()
}

/// Gives everything to be kept, and waits until it has been taken.
///
/// # Errors
/// As the system names them; then the next daemon gets nothing that it can use.
pub(super) fn keep(handed: &HandedOver) -> io::Result<()> {
    if handed.state.sessions.is_empty() {
        return Ok(());
    }
    let end = Instant::now() + KEEP_WAIT;
    handed.give(|name, fd| {
        // Hang-ups are ours to see: whoever gives a session up must know of it.
        send(
            &format!("FDSTORE=1\nFDNAME={name}\nFDPOLL=0"),
            Some(fd),
            left_until(end)?,
        )
    })?;
    let (reader, writer) = io::pipe()?;
    send("BARRIER=1", Some(writer.as_fd()), left_until(end)?)?;
    drop(writer);
    let mut fds = [PollFd::new(&reader, PollFlags::IN)];
    let limit = Timespec::try_from(left_until(end)?).expect("some seconds");
    match poll(&mut fds, Some(&limit)) {
        Ok(1..) => Ok(()),
        // Interrupted, which is as rare as it is harmless: what was sent is taken before our end is noticed.
        Err(Errno::INTR) => Ok(()),
        Ok(0) => Err(io::ErrorKind::TimedOut.into()),
        Err(errno) => Err(errno.into()),
    }
}

/// What was kept is here now, and is not to be given to anybody again.
pub(super) fn forget_kept(names: &[String]) {
    let mut waiting: Vec<String> = (names.iter())
        .filter(|name| handover::is_ours(name))
        .cloned()
        .collect();
    waiting.reverse();
    let end = Instant::now() + FORGET_WAIT;
    while let Some(name) = waiting.last()
        && let Ok(left) = left_until(end)
        && forget(name, left).is_ok()
    {
        waiting.pop();
    }
    if waiting.is_empty() {
        return;
    }
    let count = waiting.len();
    let started = (std::thread::Builder::new().name("forget".into()))
        .spawn(move || forget_patiently(waiting, FORGET_TRIES));
    if let Err(error) = started {
        tracing::warn!(%error, "{count} descriptors stay with the service manager: ends of sessions may not be seen");
    }
}

fn forget_patiently(mut waiting: Vec<String>, tries: usize) {
    let mut last = None;
    for _ in 0..tries {
        while let Some(name) = waiting.last() {
            match forget(name, WAIT) {
                Ok(()) => drop(waiting.pop()),
                Err(error) => {
                    last = Some(error);
                    break;
                }
            }
        }
        // It waits; anything else says that nobody is there.
        let may_read = |error: &io::Error| {
            let kind = error.kind();
            kind == io::ErrorKind::WouldBlock || kind == io::ErrorKind::TimedOut
        };
        if waiting.is_empty() || !last.as_ref().is_some_and(may_read) {
            break;
        }
    }
    if let (Some(name), Some(error)) = (waiting.last(), last) {
        tracing::warn!(%error, "the service manager still keeps {name} and {} more: their processes may not see their sessions end", waiting.len() - 1);
    }
}

fn forget(name: &str, wait: Duration) -> io::Result<()> {
    send(&format!("FDSTOREREMOVE=1\nFDNAME={name}"), None, wait)
}

/// An error when nothing is left.
fn left_until(end: Instant) -> io::Result<Duration> {
    let left = end.saturating_duration_since(Instant::now());
    if left.is_zero() {
        return Err(io::ErrorKind::TimedOut.into());
    }
    Ok(left)
}

/// Who does not take what is said must not keep the daemon from serving, nor from ending.
fn tell(words: &[NotifyState], wait: Duration) {
    let told: Vec<String> = words.iter().map(ToString::to_string).collect();
    // Nobody there, or nobody who listens: there is nobody to tell that.
    let _: io::Result<()> = send(&told.join("\n"), None, wait);
}

/// Gives up after the time allowed.
fn send(words: &str, fd: Option<BorrowedFd<'_>>, wait: Duration) -> io::Result<()> {
    let Some(name) = std::env::var_os("NOTIFY_SOCKET") else {
        return Err(io::ErrorKind::NotConnected.into());
    };
    let address = match name.as_bytes().strip_prefix(b"@") {
        Some(name) => SocketAddrUnix::new_abstract_name(name)?,
        None => SocketAddrUnix::new(name.as_bytes())?,
    };
    let socket = UnixDatagram::unbound()?;
    if wait.is_zero() {
        socket.set_nonblocking(true)?;
    } else {
        socket.set_write_timeout(Some(wait))?;
    }
    let fds: Vec<_> = fd.into_iter().collect();
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() {
        let room = control.push(SendAncillaryMessage::ScmRights(&fds));
        assert!(room, "the buffer is made for one descriptor");
    }
    let flags = SendFlags::NOSIGNAL;
    let bytes = [IoSlice::new(words.as_bytes())];
    sendmsg_addr(&socket, &address, &bytes, &mut control, flags)?;
    Ok(())
}
