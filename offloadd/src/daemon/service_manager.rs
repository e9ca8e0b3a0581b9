//! Messages to the service manager (systemd or `offloadd supervise`): readiness, status, watchdog, and descriptors to keep for the next
//! daemon. Without a service manager they do nothing.

use std::io::{self, IoSlice};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::UnixDatagram;
use std::time::{Duration, Instant};

use crate::driver::DriverHandle;
use crate::handover::{self, HandedOver};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{
    SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketAddrUnix, sendmsg_addr,
};
use sd_notify::NotifyState;

/// Time by which each progress message extends the unit's start timeout.
const MORE_TIME: Duration = Duration::from_secs(60);

/// Limit for sending a message.
const WAIT: Duration = Duration::from_secs(1);

/// Limit for the manager to take all descriptors.
const KEEP_WAIT: Duration = Duration::from_secs(10);

/// Limit for asking the manager at the start to forget descriptors. It may read nothing until the daemon is ready.
const FORGET_WAIT: Duration = Duration::from_secs(1);

/// Attempts to ask again in the background after that, of [`WAIT`] each.
const FORGET_TRIES: usize = 600;

pub(super) fn say_ready() {
    notify(&[NotifyState::Ready], WAIT);
}

/// Tells that settings are being reloaded. Call [`say_ready`] afterwards.
pub(super) fn say_reloading() {
    if let Ok(now) = NotifyState::monotonic_usec_now() {
        notify(&[NotifyState::Reloading, now], WAIT);
    }
}

pub(super) fn say_stopping() {
    notify(&[NotifyState::Stopping], WAIT);
}

/// Sets the status that `systemctl status` shows.
pub(super) fn say_status(text: &str) {
    notify(&[NotifyState::Status(text)], WAIT);
}

/// Logs `line`, sets it as the status, and extends the start timeout, for long work that makes progress.
pub(super) fn report_progress(line: &str) {
    tracing::info!("{line}");
    let more = NotifyState::ExtendTimeoutUsec(MORE_TIME.as_micros() as u32);
    notify(&[NotifyState::Status(line), more], WAIT);
}

/// Sends watchdog messages as often as the unit's `WatchdogSec` demands, each after a full turn of the owner thread. If that thread
/// is stuck, the messages stop and systemd restarts the daemon.
pub(super) async fn feed_watchdog(owner: DriverHandle) {
    let Some(limit) = sd_notify::watchdog_enabled() else {
        return;
    };
    let mut tick = tokio::time::interval(limit / 3);
    loop {
        tick.tick().await;
        // Refused because the inbox is full: the owner thread is stuck, or will soon catch up.
        let Ok(turn) = owner.turn() else { continue };
        if turn.await.is_err() {
            return;
        }
        // Without waiting: the next message follows soon.
        notify(&[NotifyState::Watchdog], Duration::ZERO);
    }
}

/// Whether there is a service manager that may keep descriptors for the next daemon.
pub(super) fn has_manager() -> bool {
    std::env::var_os("NOTIFY_SOCKET").is_some()
}

/// Passes the descriptors to the manager and waits until it has taken them.
///
/// # Errors
/// Fails with the system's error; then the next daemon inherits nothing that it can use.
pub(super) fn keep(handed: &HandedOver) -> io::Result<()> {
    if handed.state.sessions.is_empty() {
        return Ok(());
    }
    let end = Instant::now() + KEEP_WAIT;
    handed.give(|name, fd| {
        // FDPOLL=0: the manager must not drop a descriptor on hang-up, because the next daemon must see the hang-up.
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
        // Interrupted: harmless, because the manager reads the messages before it notices the daemon's end.
        Err(Errno::INTR) => Ok(()),
        Ok(0) => Err(io::ErrorKind::TimedOut.into()),
        Err(errno) => Err(errno.into()),
    }
}

/// Asks the manager to forget descriptors that this process now has.
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
        tracing::warn!(%error, "{count} descriptors remain with the service manager, so ends of sessions may go unnoticed");
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
        // A full socket may be read later; any other error means that there is no manager.
        let may_read = |error: &io::Error| {
            let kind = error.kind();
            kind == io::ErrorKind::WouldBlock || kind == io::ErrorKind::TimedOut
        };
        if waiting.is_empty() || !last.as_ref().is_some_and(may_read) {
            break;
        }
    }
    if let (Some(name), Some(error)) = (waiting.last(), last) {
        tracing::warn!(%error, "the service manager still keeps {name} and {} other descriptors, so their processes may not notice when sessions end", waiting.len() - 1);
    }
}

fn forget(name: &str, wait: Duration) -> io::Result<()> {
    send(&format!("FDSTOREREMOVE=1\nFDNAME={name}"), None, wait)
}

/// Time until `end`; an error if it has passed.
fn left_until(end: Instant) -> io::Result<Duration> {
    let left = end.saturating_duration_since(Instant::now());
    if left.is_zero() {
        return Err(io::ErrorKind::TimedOut.into());
    }
    Ok(left)
}

/// Sends states; failures are ignored, because a stuck manager must not keep the daemon from serving or stopping.
fn notify(states: &[NotifyState], wait: Duration) {
    let lines: Vec<String> = states.iter().map(ToString::to_string).collect();
    let _: io::Result<()> = send(&lines.join("\n"), None, wait);
}

/// Sends a message with an optional descriptor; fails after `wait`.
fn send(message: &str, fd: Option<BorrowedFd<'_>>, wait: Duration) -> io::Result<()> {
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
        assert!(room, "the buffer holds one descriptor");
    }
    let flags = SendFlags::NOSIGNAL;
    let bytes = [IoSlice::new(message.as_bytes())];
    sendmsg_addr(&socket, &address, &bytes, &mut control, flags)?;
    Ok(())
}
