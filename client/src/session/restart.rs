//! Reattaching to a daemon that restarts under a living session. The process that keeps the daemon's descriptors keeps memory,
//! rings and life line too, so tiles move again as soon as the next daemon serves. Only calls are lost with the connection; the
//! next daemon is asked whether a lost call was executed.
//!
//! The session lives as long as its life line is silent. The line hangs up when no daemon will adopt the session.

use std::io::ErrorKind;
use std::time::{Duration, Instant};

use offload_api::fault::FaultKind;
use offload_api::proto;

use super::Session;
use crate::control::{Control, LONG_WAIT, Pending, SHORT_WAIT};
use crate::{ClientError, WaitTimer};

/// How long a session waits for the next daemon: a stop waits up to a minute for a device, and a start may have much to
/// recover.
pub const RESTART_WAIT: Duration = Duration::from_secs(180);

/// Time between two attempts. A restart usually takes some milliseconds.
pub(super) const TRY_EVERY: Duration = Duration::from_millis(20);

/// A shorter wait is not logged.
const QUIET: Duration = Duration::from_secs(1);

/// How long an open waits for a daemon to listen again after one has removed its socket.
const NEXT_WAIT: Duration = Duration::from_secs(10);

/// How long an open waits where nobody listens on the socket: a daemon that has just bound it, or one that was killed.
const LISTEN_WAIT: Duration = Duration::from_secs(1);

/// How long an open waits for the last operations of a session that it follows. A device that is slower hangs.
const ENDING_WAIT: Duration = Duration::from_secs(60);

/// Attempts to open a session, or to delete a job. A daemon that stops, or that is being replaced, is waited for, and one that can do it soon; one that was
/// never there is not.
#[derive(Debug)]
pub(crate) struct Attempts {
    began: Instant,
    /// Whether the log says what is waited for.
    told: bool,
    /// Error with which a daemon was lost that had answered or listened, and when.
    lost: Option<(Instant, ClientError)>,
}

impl Attempts {
    pub(crate) fn begin() -> Self {
        Self {
            began: Instant::now(),
            told: false,
            lost: None,
        }
    }

    /// Pauses before the next attempt, or returns the error that stands.
    pub(crate) fn again_after(&mut self, error: ClientError) -> Result<(), ClientError> {
        let again = match &error {
            ClientError::Refused(fault)
                if matches!(fault.kind, FaultKind::Queued | FaultKind::Ending) =>
            {
                if !self.told && self.began.elapsed() > QUIET {
                    self.told = true;
                    tracing::warn!("waiting for offloadd: {}", fault.message);
                }
                let limit = match fault.kind {
                    FaultKind::Ending => ENDING_WAIT,
                    _ => LONG_WAIT,
                };
                self.began.elapsed() < limit
            }
            ClientError::Connect { source, .. } => {
                let limit = match source.kind() {
                    ErrorKind::NotFound => NEXT_WAIT,
                    ErrorKind::ConnectionRefused => LISTEN_WAIT,
                    _ => Duration::ZERO,
                };
                let lost = self.lost.as_ref();
                lost.is_some_and(|(at, _)| at.elapsed() < limit)
            }
            error => is_lost(error) && self.began.elapsed() < RESTART_WAIT,
        };
        if !again {
            // Nobody listens because the daemon was lost.
            return Err(match (error, self.lost.take()) {
                (ClientError::Connect { .. }, Some((_, lost))) => lost,
                (error, _) => error,
            });
        }
        if is_lost(&error) {
            self.lost = Some((Instant::now(), error));
        }
        std::thread::sleep(TRY_EVERY);
        Ok(())
    }
}

/// Whether a daemon that knows the session may still come after this error.
pub(super) fn is_lost(error: &ClientError) -> bool {
    match error {
        ClientError::DaemonGone { .. } => true,
        ClientError::Refused(fault) => fault.kind == FaultKind::Stopping,
        _ => false,
    }
}

/// Whether the error comes from a daemon that does not know the session or the call.
fn is_final(error: &ClientError) -> bool {
    match error {
        ClientError::Refused(fault) => {
            matches!(fault.kind, FaultKind::NotFound | FaultKind::Version)
        }
        ClientError::Version { .. } | ClientError::Protocol { .. } => true,
        _ => false,
    }
}

/// Looks for a daemon that knows the session, without blocking.
#[derive(Debug)]
pub(super) struct Reattaching {
    waiting: WaitTimer,
    try_at: Instant,
    told: bool,
    asking: Option<Pending<proto::ReattachReply>>,
}

impl Reattaching {
    pub(super) fn begin() -> Self {
        let now = Instant::now();
        Self {
            waiting: WaitTimer::start(now),
            try_at: now,
            told: false,
            asking: None,
        }
    }

    /// Returns the state of the session once a daemon answers, or that the session is over.
    pub(super) fn poll(
        &mut self,
        control: &Control,
        token: &[u8],
        hung_up: bool,
    ) -> Option<Result<proto::ReattachReply, SessionUnknown>> {
        let socket = control.socket().display();
        let now = Instant::now();
        let waited = self.waiting.waited(now);
        if let Some(asking) = &self.asking {
            let result = asking.poll()?;
            self.asking = None;
            match result {
                Ok(reply) => {
                    if self.told {
                        tracing::warn!("offloadd on {socket} is back after {waited:.1?}");
                    }
                    return Some(Ok(reply));
                }
                Err(error) if is_lost(&error) => self.try_at = Instant::now() + TRY_EVERY,
                Err(ClientError::Timeout { .. }) => {}
                Err(error) if is_final(&error) => return Some(Err(SessionUnknown)),
                // For example a daemon that is overloaded. The life line tells when the session is over.
                Err(_) => self.try_at = Instant::now() + TRY_EVERY,
            }
        }
        if hung_up || self.is_too_late(now) {
            return Some(Err(SessionUnknown));
        }
        if !self.told && waited > QUIET {
            self.told = true;
            tracing::warn!(
                "offloadd on {socket} does not answer but has not ended this session; waiting up to {} s for its restart",
                RESTART_WAIT.as_secs()
            );
        }
        if Instant::now() >= self.try_at {
            let token = token.to_vec();
            let request = proto::ReattachRequest { token };
            let asking = control.begin("Reattach", SHORT_WAIT, |mut client| async move {
                client.reattach(request).await
            });
            self.asking = Some(asking);
        }
        None
    }

    /// Whether no daemon came within [`RESTART_WAIT`]; time in which this process was suspended does not count.
    fn is_too_late(&mut self, now: Instant) -> bool {
        self.waiting.waited(now) > RESTART_WAIT
    }
}

/// No daemon knows the session.
#[derive(Debug)]
pub(super) struct SessionUnknown;

impl Session {
    /// Waits for a daemon that knows this session. If none comes, returns `lost`, the error of the lost call.
    pub(super) fn reattach(&self, lost: ClientError) -> Result<proto::ReattachReply, ClientError> {
        let mut reattaching = Reattaching::begin();
        loop {
            match reattaching.poll(&self.control, &self.token, self.hung_up()) {
                Some(Ok(reply)) => return Ok(reply),
                Some(Err(SessionUnknown)) => return Err(lost),
                None => self.pause_for(TRY_EVERY)?,
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_suspended_while_it_waits_for_a_daemon_goes_on_waiting() {
        let mut reattaching = Reattaching::begin();
        let mut now = Instant::now() + 10 * RESTART_WAIT;
        assert!(!reattaching.is_too_late(now));
        for _ in 0..RESTART_WAIT.as_secs() - 1 {
            now += Duration::from_secs(1);
            assert!(!reattaching.is_too_late(now));
        }
        now += Duration::from_secs(1);
        assert!(reattaching.is_too_late(now));
    }
}
