//! What systemd is told: that the daemon serves, what it does, that it still lives. Without systemd there is nobody to tell.

use std::os::linux::net::SocketAddrExt;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::time::Duration;

use offloadd::driver::DriverHandle;
use sd_notify::NotifyState;

/// A word about work that goes on asks for so much more time, should the start take longer than the unit allows.
const MORE_TIME: Duration = Duration::from_secs(60);

/// For what is said once.
const WAIT: Duration = Duration::from_secs(1);

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

/// The same of work that takes long and progresses: it is not given up while it does.
pub(super) fn say_progress(words: &str) {
    let more = NotifyState::ExtendTimeoutUsec(MORE_TIME.as_micros() as u32);
    tell(&[NotifyState::Status(words), more], WAIT);
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

/// Gives up after the time allowed: who does not take what is said must not keep the daemon from serving, nor from ending.
fn tell(words: &[NotifyState], wait: Duration) {
    let Some(name) = std::env::var_os("NOTIFY_SOCKET") else {
        return;
    };
    let told: Vec<String> = words.iter().map(ToString::to_string).collect();
    let send = || {
        let address = match name.as_bytes().strip_prefix(b"@") {
            Some(name) => SocketAddr::from_abstract_name(name)?,
            None => SocketAddr::from_pathname(&name)?,
        };
        let socket = UnixDatagram::unbound()?;
        if wait.is_zero() {
            socket.set_nonblocking(true)?;
        } else {
            socket.set_write_timeout(Some(wait))?;
        }
        socket.send_to_addr(told.join("\n").as_bytes(), &address)
    };
    // Nobody there, or nobody who listens: there is nobody to tell that.
    let _: std::io::Result<usize> = send();
}
