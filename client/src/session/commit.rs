//! Commits: making a generation durable.

use offload_api::fault::FaultKind;
use offload_api::ids::Generation;
use offload_api::{BLOB_BYTES_MAX, proto};

use super::Session;
use super::restart::{Over, Reattaching, TRY_EVERY, is_lost};
use crate::ClientError;
use crate::control::{Client, LONG_WAIT, Pending};

/// State of the commit. A session has at most one.
pub(super) enum Commit {
    None,
    /// The call and its request, kept to repeat it.
    Pending(Pending<proto::CommitReply>, proto::CommitRequest),
    /// The connection was lost before the answer.
    Lost(Box<Lost>),
    Ended(Result<Committed, ClientError>),
}

/// A commit of which nobody knows whether the daemon received it.
pub(super) struct Lost {
    reattaching: Reattaching,
    request: proto::CommitRequest,
    /// The commit's error if no daemon knows the session.
    error: ClientError,
}

/// A generation that is durable on this node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Committed {
    /// Number of the generation.
    pub generation: Generation,
    /// Whether the generation is confirmed. With one node it always is; with several it is prepared, and the next write waits
    /// for [`Session::confirm`].
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
        let request = proto::CommitRequest {
            token: self.token.clone(),
            generation: working.0,
            blob,
        };
        self.ask_to_commit(request);
        Ok(())
    }

    fn ask_to_commit(&mut self, request: proto::CommitRequest) {
        let asked = request.clone();
        let pending = self
            .control
            .begin("Commit", LONG_WAIT, |mut client| async move {
                client.commit(asked).await
            });
        self.commit = Commit::Pending(pending, request);
    }

    /// Returns the result of [`Session::begin_commit`], once.
    pub fn poll_commit(&mut self) -> Option<Result<Committed, ClientError>> {
        if !self.advance_commit() {
            return None;
        }
        match std::mem::replace(&mut self.commit, Commit::None) {
            Commit::Ended(result) => Some(result),
            _ => unreachable!("advance_commit reported that it ended"),
        }
    }

    /// Commits as [`Session::begin_commit`] and waits for the result. Completions meanwhile remain to be polled.
    pub fn commit(&mut self, blob: Vec<u8>) -> Result<Committed, ClientError> {
        self.begin_commit(blob)?;
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
                        Commit::Pending(pending, _) => pending.last_words(),
                        Commit::Lost(lost) => Err(lost.error),
                        _ => unreachable!("begun above and not ended"),
                    };
                    self.commit = Commit::Ended(ended.map(|r| self.committed(r)));
                }
                other => other?,
            }
        }
    }

    /// Confirms that `generation` is prepared on every node; the generation before it may be overwritten from now on.
    pub fn confirm(&mut self, generation: Generation) -> Result<(), ClientError> {
        let request = proto::ConfirmRequest {
            token: self.token.clone(),
            generation: generation.0,
        };
        self.call("Confirm", LONG_WAIT, || {
            let request = request.clone();
            |mut client: Client| async move { client.confirm(request).await }
        })?;
        Ok(())
    }

    /// Whether a commit has ended whose result was not taken yet.
    pub(super) fn advance_commit(&mut self) -> bool {
        if let Commit::Pending(pending, request) = &self.commit
            && let Some(result) = pending.poll()
        {
            self.commit = match result {
                Err(error) if is_lost(&error) => Commit::Lost(Box::new(Lost {
                    reattaching: Reattaching::begin(),
                    request: request.clone(),
                    error,
                })),
                result => Commit::Ended(result.map(|reply| self.committed(reply))),
            };
        }
        self.look_for_commit();
        matches!(self.commit, Commit::Ended(_))
    }

    /// Asks the next daemon for the result of a commit whose answer was lost.
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
        match found {
            Err(Over) => self.commit = Commit::Ended(Err(lost.error)),
            // It is still the working generation: the daemon did not receive the commit, or waited for other ranks.
            Ok(found) if found.working_generation == lost.request.generation => {
                self.ask_to_commit(lost.request);
            }
            Ok(found) => {
                let reply = proto::CommitReply {
                    generation: lost.request.generation,
                    confirmed: found.confirmed,
                    working_generation: found.working_generation,
                };
                self.commit = Commit::Ended(Ok(self.committed(reply)));
            }
        }
    }

    fn committed(&mut self, reply: proto::CommitReply) -> Committed {
        let working = Generation(reply.working_generation);
        self.working = Some(working);
        Committed {
            generation: Generation(reply.generation),
            confirmed: reply.confirmed,
            working,
        }
    }
}
