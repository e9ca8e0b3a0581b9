//! A daemon that is restarted under a living session. Memory, rings and life line live on in whoever keeps the daemon: tiles
//! move on as soon as the next one serves, and here nothing has to be done for them. Only calls are lost with the
//! connection. Whether one had been answered is asked from the next daemon, not guessed.
//!
//! While the life line is silent the session is not over: it hangs up when no daemon will take it up.

use std::time::{Duration, Instant};

use offload_api::fault::FaultKind;
use offload_api::proto;

use super::Session;
use crate::ClientError;
use crate::control::{Control, Pending, SHORT_WAIT};

/// How long a session waits for the next daemon: a stop waits up to a minute for a device, a start may have much to recover.
pub const RESTART_WAIT: Duration = Duration::from_secs(180);

/// Nobody listens for some milliseconds mostly.
pub(super) const TRY_EVERY: Duration = Duration::from_millis(20);

/// A shorter one is not worth a word.
const QUIET: Duration = Duration::from_secs(1);

/// A call that failed with this may find a daemon again that knows the session.
pub(super) fn is_lost(error: &ClientError) -> bool {
    match error {
        ClientError::DaemonGone { .. } => true,
        ClientError::Refused(fault) => fault.kind == FaultKind::Stopping,
        _ => false,
    }
}

/// Another daemon, which does not know the session or the call.
fn is_final(error: &ClientError) -> bool {
    match error {
        ClientError::Refused(fault) => {
            matches!(fault.kind, FaultKind::NotFound | FaultKind::Version)
        }
        ClientError::Version { .. } | ClientError::Protocol { .. } => true,
        _ => false,
    }
}

/// Looks for the session in the daemon that comes, without waiting.
#[derive(Debug)]
pub(super) struct Reattaching {
    began: Instant,
    try_at: Instant,
    told: bool,
    asking: Option<Pending<proto::ReattachReply>>,
}

impl Reattaching {
    pub(super) fn begin() -> Self {
        let now = Instant::now();
        Self {
            began: now,
            try_at: now,
            told: false,
            asking: None,
        }
    }

    /// How far the session is, once a daemon answers; or that the session is over.
    pub(super) fn poll(
        &mut self,
        control: &Control,
        token: &[u8],
        hung_up: bool,
    ) -> Option<Result<proto::ReattachReply, Over>> {
        let socket = control.socket().display();
        let waited = self.began.elapsed();
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
                Err(error) if is_final(&error) => return Some(Err(Over)),
                // One that has too much to do, say: the life line tells when it is over.
                Err(_) => self.try_at = Instant::now() + TRY_EVERY,
            }
        }
        if hung_up || waited > RESTART_WAIT {
            return Some(Err(Over));
        }
        if !self.told && waited > QUIET {
            self.told = true;
            tracing::warn!(
                "offloadd on {socket} does not answer and still holds this session: waiting up to {} s for it to be restarted",
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
}

/// No daemon knows the session any more.
#[derive(Debug)]
pub(super) struct Over;

impl Session {
    /// Waits for a daemon that knows this session. `lost`: what the call that was lost ended with, and this one too if none
    /// comes.
    pub(super) fn reattach(&self, lost: ClientError) -> Result<proto::ReattachReply, ClientError> {
        let mut reattaching = Reattaching::begin();
        loop {
            match reattaching.poll(&self.control, &self.token, self.hung_up()) {
                Some(Ok(reply)) => return Ok(reply),
                Some(Err(Over)) => return Err(lost),
                None => self.pause_for(TRY_EVERY)?,
            }
        }
    }
}
