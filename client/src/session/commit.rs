//! Commits: making a generation durable, and with several nodes confirming it.

use offload_api::fault::FaultKind;
use offload_api::ids::Generation;
use offload_api::{BLOB_BYTES_MAX, proto};

use super::Session;
use super::restart::{Reattaching, SessionUnknown, TRY_EVERY, is_lost};
use crate::ClientError;
use crate::control::{LONG_WAIT, Pending};

/// State of the commit or confirmation. A session has at most one.
pub(super) enum Commit {
    None,
    /// The call and what it asks, kept to repeat it.
    Pending(Call, CallRequest),
    /// The connection was lost before the answer.
    Lost(Box<LostCall>),
    Ended(Result<CommittedGeneration, ClientError>),
}

/// A call in progress.
pub(super) enum Call {
    Commit(Pending<proto::CommitReply>),
    Confirm(Pending<proto::ConfirmReply>),
}

/// What a call asks.
#[derive(Clone)]
pub(super) enum CallRequest {
    Commit(proto::CommitRequest),
    Confirm(proto::ConfirmRequest),
}

impl Call {
    /// The answer, if it has arrived: of a commit its reply, of a confirmation nothing.
    fn poll(&self) -> Option<Result<Option<proto::CommitReply>, ClientError>> {
        match self {
            Self::Commit(pending) => pending.poll().map(|result| result.map(Some)),
            Self::Confirm(pending) => pending.poll().map(|result| result.map(|_| None)),
        }
    }

    fn last_words(&self) -> Result<Option<proto::CommitReply>, ClientError> {
        match self {
            Self::Commit(pending) => pending.last_words().map(Some),
            Self::Confirm(pending) => pending.last_words().map(|_| None),
        }
    }
}

/// A call of which nobody knows whether the daemon received it.
pub(super) struct LostCall {
    reattaching: Reattaching,
    asked: CallRequest,
    /// The call's error if no daemon knows the session.
    error: ClientError,
}

/// A generation that is durable on this node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CommittedGeneration {
    /// Number of the generation.
    pub generation: Generation,
    /// Whether the generation is confirmed. With one node it always is; with several it is prepared, and the next write waits
    /// for [`Session::begin_confirm`].
    pub confirmed: bool,
    /// Generation that writes belong to from now on.
    pub working: Generation,
}

impl Session {
    /// Commits this rank's part of the working generation, with a blob of at most 64 KiB. The commit ends when all local ranks
    /// have joined it and the generation is durable. Reads continue meanwhile.
    ///
    /// Refusals: `Busy` while tiles are being swapped out or a commit is pending, `Invalid` for a blob that is too long.
    pub fn begin_commit(&mut self, blob: Vec<u8>) -> Result<(), ClientError> {
        let refuse = |kind, words| Err(ClientError::refused(kind, words));
        let Some(working) = self.working else {
            let words = "a commit needs a working generation: call resume first".into();
            return refuse(FaultKind::WrongGeneration, words);
        };
        if blob.len() > BLOB_BYTES_MAX {
            let words = format!("a blob of {} bytes; at most {BLOB_BYTES_MAX}", blob.len());
            return refuse(FaultKind::Invalid, words);
        }
        let writing = self.in_flight.swap_out_count();
        if writing > 0 {
            let words =
                format!("{writing} tiles of generation {working} are still being swapped out");
            return refuse(FaultKind::Busy, words);
        }
        if !matches!(self.commit, Commit::None) {
            return refuse(FaultKind::Busy, "another commit is pending".into());
        }
        self.ask(CallRequest::Commit(proto::CommitRequest {
            token: self.token.clone(),
            generation: working.0,
            blob,
        }));
        Ok(())
    }

    /// Confirms that `generation` is prepared on every node; the generation before it may be overwritten from now on. The
    /// result comes as that of a commit, from [`Session::poll_commit`].
    ///
    /// Refusals: `Busy` while a commit is pending.
    pub fn begin_confirm(&mut self, generation: Generation) -> Result<(), ClientError> {
        if !matches!(self.commit, Commit::None) {
            return Err(ClientError::refused(FaultKind::Busy, "a commit is pending"));
        }
        self.ask(CallRequest::Confirm(proto::ConfirmRequest {
            token: self.token.clone(),
            generation: generation.0,
        }));
        Ok(())
    }

    fn ask(&mut self, asked: CallRequest) {
        let control = &self.control;
        let call = match asked.clone() {
            CallRequest::Commit(request) => {
                Call::Commit(control.begin("Commit", LONG_WAIT, |mut client| async move {
                    client.commit(request).await
                }))
            }
            CallRequest::Confirm(request) => Call::Confirm(control.begin(
                "Confirm",
                LONG_WAIT,
                |mut client| async move { client.confirm(request).await },
            )),
        };
        self.commit = Commit::Pending(call, asked);
    }

    /// Returns the result of [`Session::begin_commit`] or [`Session::begin_confirm`], once.
    pub fn poll_commit(&mut self) -> Option<Result<CommittedGeneration, ClientError>> {
        if !self.advance_commit() {
            return None;
        }
        match std::mem::replace(&mut self.commit, Commit::None) {
            Commit::Ended(result) => Some(result),
            _ => unreachable!("advance_commit reported that it ended"),
        }
    }

    /// Commits as [`Session::begin_commit`] and waits for the result. Completions meanwhile remain to be polled.
    pub fn commit(&mut self, blob: Vec<u8>) -> Result<CommittedGeneration, ClientError> {
        self.begin_commit(blob)?;
        self.wait_for_commit()
    }

    /// Confirms as [`Session::begin_confirm`] and waits for the result.
    pub fn confirm(&mut self, generation: Generation) -> Result<(), ClientError> {
        self.begin_confirm(generation)?;
        self.wait_for_commit().map(drop)
    }

    fn wait_for_commit(&mut self) -> Result<CommittedGeneration, ClientError> {
        loop {
            if let Some(result) = self.poll_commit() {
                return result;
            }
            let paused = match &self.commit {
                Commit::Lost(_) => self.pause_for(TRY_EVERY),
                _ => self.pause(),
            };
            match paused {
                Err(ClientError::DaemonGone { .. }) => {
                    let ended = match std::mem::replace(&mut self.commit, Commit::None) {
                        Commit::Pending(call, asked) => {
                            let answer = call.last_words();
                            answer.map(|reply| self.answered(&asked, reply))
                        }
                        Commit::Lost(lost) => Err(lost.error),
                        _ => unreachable!("begun above and not ended"),
                    };
                    self.commit = Commit::Ended(ended);
                }
                other => other?,
            }
        }
    }

    /// Whether a commit has ended whose result was not taken yet.
    pub(super) fn advance_commit(&mut self) -> bool {
        if let Commit::Pending(call, _) = &self.commit
            && let Some(answer) = call.poll()
        {
            let Commit::Pending(_, asked) = std::mem::replace(&mut self.commit, Commit::None)
            else {
                unreachable!("just seen");
            };
            self.commit = match answer {
                Err(error) if is_lost(&error) => Commit::Lost(Box::new(LostCall {
                    reattaching: Reattaching::begin(),
                    asked,
                    error,
                })),
                answer => Commit::Ended(answer.map(|reply| self.answered(&asked, reply))),
            };
        }
        self.look_for_commit();
        matches!(self.commit, Commit::Ended(_))
    }

    /// Asks the next daemon for the result of a call whose answer was lost.
    fn look_for_commit(&mut self) {
        if !matches!(self.commit, Commit::Lost(_)) {
            return;
        }
        let hung_up = self.hung_up();
        let Commit::Lost(lost) = &mut self.commit else {
            unreachable!("just seen");
        };
        let Some(found) = lost.reattaching.poll(&self.control, &self.token, hung_up) else {
            return;
        };
        let Commit::Lost(lost) = std::mem::replace(&mut self.commit, Commit::None) else {
            unreachable!("just seen");
        };
        let found = match found {
            Ok(found) => found,
            Err(SessionUnknown) => return self.commit = Commit::Ended(Err(lost.error)),
        };
        match lost.asked {
            // It is still the working generation: the daemon did not receive the commit, or waited for other ranks.
            CallRequest::Commit(request) if found.working_generation == request.generation => {
                self.ask(CallRequest::Commit(request));
            }
            CallRequest::Commit(request) => {
                let reply = proto::CommitReply {
                    generation: request.generation,
                    confirmed: found.confirmed,
                    working_generation: found.working_generation,
                };
                self.commit = Commit::Ended(Ok(self.committed(reply)));
            }
            // A confirmation may be repeated.
            asked @ CallRequest::Confirm(_) => self.ask(asked),
        }
    }

    /// Result of a call; a confirmation has no reply.
    fn answered(
        &mut self,
        asked: &CallRequest,
        reply: Option<proto::CommitReply>,
    ) -> CommittedGeneration {
        match (asked, reply) {
            (CallRequest::Commit(_), Some(reply)) => self.committed(reply),
            (CallRequest::Confirm(request), None) => CommittedGeneration {
                generation: Generation(request.generation),
                confirmed: true,
                working: self.working.expect("it has committed"),
            },
            _ => unreachable!("each call has its kind of answer"),
        }
    }

    fn committed(&mut self, reply: proto::CommitReply) -> CommittedGeneration {
        let working = Generation(reply.working_generation);
        self.working = Some(working);
        CommittedGeneration {
            generation: Generation(reply.generation),
            confirmed: reply.confirmed,
            working,
        }
    }
}
