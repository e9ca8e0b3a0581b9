//! Making a generation durable.

use offload_api::fault::FaultKind;
use offload_api::ids::Generation;
use offload_api::{BLOB_BYTES_MAX, proto};

use super::Session;
use super::restart::{Over, Reattaching, TRY_EVERY, is_lost};
use crate::ClientError;
use crate::control::{Client, LONG_WAIT, Pending};

/// A commit on its way. At most one.
pub(super) enum Commit {
    None,
    /// With what was asked, to ask it again.
    Pending(Pending<proto::CommitReply>, proto::CommitRequest),
    /// The connection was lost on the way.
    Lost(Box<Lost>),
    Ended(Result<Committed, ClientError>),
}

/// A commit of which nobody knows whether it was heard.
pub(super) struct Lost {
    reattaching: Reattaching,
    request: proto::CommitRequest,
    /// What it ends with if no daemon comes that knows the session.
    error: ClientError,
}

/// A generation is durable on this node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Committed {
    /// Its number.
    pub generation: Generation,
    /// With one node always. With several it is still prepared, and the next write waits for [`Session::confirm`].
    pub confirmed: bool,
    /// What writes belong to from now on.
    pub working: Generation,
}

impl Session {
    /// Gives this rank's part of the working generation, with its blob (at most 64 KiB). It ends when all local ranks
    /// have and the generation is durable. Reading goes on meanwhile.
    ///
    /// Refused: `Busy` while tiles are being swapped out or a commit is pending, `Invalid` for a long blob.
    pub fn begin_commit(&mut self, blob: Vec<u8>) -> Result<(), ClientError> {
        let refuse = |kind, words| Err(ClientError::refused(kind, words));
        let Some(working) = self.working else {
            let words = "nothing to commit before resume".into();
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
            return refuse(FaultKind::Busy, "a commit is pending already".into());
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

    /// The result of [`Session::begin_commit`], once.
    pub fn poll_commit(&mut self) -> Option<Result<Committed, ClientError>> {
        if !self.advance_commit() {
            return None;
        }
        match std::mem::replace(&mut self.commit, Commit::None) {
            Commit::Ended(result) => Some(result),
            _ => unreachable!("advance_commit said that it ended"),
        }
    }

    /// [`Session::begin_commit`], waited for. Completions meanwhile stay to be polled.
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

    /// The generation is prepared on every node; the one before it may be overwritten.
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

    /// Whether a commit has ended whose result nobody took yet.
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

    /// Finds out from the next daemon what became of a commit whose answer was lost.
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
            // It is still the one that is worked on: nobody heard, or other ranks were waited for.
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
