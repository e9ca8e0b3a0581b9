//! Performs the core's actions: queues operations, puts completions into rings, answers calls, makes and frees memory.

use std::time::Instant;

use offload_api::fault::Fault;
use offload_api::ids::DeviceIndex;
use offload_support::units::ApproxBytes;
use tokio::sync::oneshot;
use tracing::Span;

use super::session::{DriverSession, SessionState};
use super::{Driver, trace};
use crate::core::{Action, Peer, Reply};
use crate::engine::{Io, Memory};
use crate::io::Buffer;
use crate::metrics::ledger::JobPlace;
use crate::queue::Owner;
use crate::quota::Weights;
use crate::store::definition::JobName;

/// A call that waits for the core's answer.
pub(super) struct Waiting {
    pub(super) peer: Peer,
    pub(super) answer: oneshot::Sender<Result<Reply, Fault>>,
    pub(super) noted: AnswerNote,
}

impl Waiting {
    /// Span of a call to commit.
    pub(super) fn span(&self) -> Option<&Span> {
        match &self.noted {
            AnswerNote::Commit(_, span) => Some(span),
            _ => None,
        }
    }
}

/// What the answer to a call changes in the ledger and tells the log.
pub(super) enum AnswerNote {
    Nothing,
    Commit(JobPlace, Span),
    /// Owner and name.
    DropJob(u32, JobName),
    AddDevice(DeviceIndex),
    /// Path of the device.
    DrainDevice(String),
}

impl Driver {
    /// Passes events to the core and performs its actions until there are no more events.
    pub(super) fn decide(&mut self) {
        let mut actions = std::mem::take(&mut self.actions);
        while let Some(event) = self.events.pop_front() {
            // Lines about the actions of an event carry its fields.
            let span = self.event_span(&event);
            let _entered = span.enter();
            self.core.on_event(event, &mut actions);
            for action in actions.drain(..) {
                self.perform(action);
            }
        }
        self.actions = actions;
    }

    fn perform(&mut self, action: Action) {
        match action {
            Action::Io {
                io,
                device,
                op,
                offset,
                bytes,
                buffer,
                priority,
                weights,
            } => {
                self.spans.queued(io, &buffer, &self.sessions);
                let (memory, owner, job) = self.memory_of(buffer, weights);
                let now = Instant::now();
                let part = [offset, u64::from(bytes)];
                self.ledger.started(io, device, op, part, job, now);
                if let Some(span) = self.spans.operation(io) {
                    let (io, device) = (io.0, device.0);
                    tracing::debug!(parent: span, io, device, ?op, offset, bytes, "operation queued");
                }
                let io = Io {
                    id: io,
                    device,
                    op,
                    offset,
                    bytes,
                    memory,
                };
                self.queue.push(io, priority, owner);
            }
            Action::Promote { io, priority } => self.queue.promote(io, priority),
            Action::Complete { session, entry } => {
                self.spans.completed(session, &entry);
                let Some(found) = self.sessions.get_mut(&session) else {
                    return;
                };
                if let Err(error) = found.put(&entry) {
                    self.gone(session, &error.to_string());
                }
            }
            Action::Reply { call, reply } => {
                if let Some(waiting) = self.calls.remove(&call) {
                    self.answer(waiting, reply);
                }
            }
            Action::MakeArena {
                session,
                token,
                peer,
                job,
                geometry,
                ring_entries,
                iodepth,
            } => {
                let span = trace::session(session, peer.uid, &job);
                let (pid, arena_bytes) = (peer.pid, geometry.arena_bytes());
                tracing::debug!(parent: &span, pid, arena_bytes, iodepth, "opened");
                let new = DriverSession {
                    span,
                    token,
                    peer,
                    job: self.ledger.session_begins(peer.uid, &job),
                    state: SessionState::Making,
                    unrung: false,
                };
                let before = self.sessions.insert(session, new);
                assert!(before.is_none(), "a session is made once");
                let making = (self.keeper).make(peer.uid, session, geometry, ring_entries);
                if let Err(fault) = making {
                    self.made(session, Err(fault));
                }
            }
            Action::ForgetDevice { device } => self.forget_device(device),
            Action::DropArena { session } => self.drop_arena(session),
            Action::Evict { session, why } => {
                if let Some(DriverSession { span, peer, .. }) = self.sessions.get(&session) {
                    tracing::warn!(parent: span, uid = peer.uid, pid = peer.pid, %why, "evicted a process");
                }
                self.detach(session);
            }
        }
    }

    /// Returns where an operation's bytes are, whose share of the device it takes, and the job that it counts for.
    fn memory_of(
        &mut self,
        buffer: Buffer,
        weights: Option<Weights>,
    ) -> (Memory, Owner, Option<JobPlace>) {
        match buffer {
            Buffer::Slot { session: id, place } => {
                let session = self.sessions.get_mut(&id).expect("a live session");
                let weights = weights.expect("an operation of a session has weights");
                let owner = Owner::Session {
                    uid: session.peer.uid,
                    user_weight: weights.user,
                    job_weight: weights.job,
                    job: session.job.number(),
                    session: id,
                };
                let made = session.made().expect("I/O only after its arena was made");
                let memory = Memory::Arena {
                    arena: made.arena.clone(),
                    offset: place.offset,
                    piece: place.piece,
                };
                (memory, owner, Some(session.job))
            }
            Buffer::Meta(own) => (Memory::Meta(own), Owner::Daemon, None),
            Buffer::None => (Memory::None, Owner::Daemon, None),
        }
    }

    /// Counts and logs the answer to a call, and sends it.
    fn answer(&mut self, waiting: Waiting, reply: Result<Reply, Fault>) {
        let Peer { uid, pid } = waiting.peer;
        match (waiting.noted, &reply) {
            (AnswerNote::Commit(job, span), reply) => {
                trace::commit_answered(&span, reply);
                let now = Instant::now();
                self.ledger.commit_answered(job, reply.is_ok(), now);
            }
            (AnswerNote::DropJob(owner, job), Ok(Reply::DropJob { freed_bytes })) => {
                let freed = ApproxBytes(*freed_bytes);
                tracing::info!(uid, pid, "deleted job {job} of uid {owner}: {freed} freed");
                self.ledger.job_dropped(owner, &job);
            }
            (AnswerNote::AddDevice(device), reply) => {
                self.device_answered(waiting.peer, device, reply.as_ref().ok());
            }
            (AnswerNote::DrainDevice(path), Ok(Reply::DrainDevice { left_bytes })) => {
                let left = ApproxBytes(*left_bytes);
                tracing::info!(uid, pid, "draining device {path}: {left} to move");
            }
            (AnswerNote::DropJob(..) | AnswerNote::DrainDevice(_) | AnswerNote::Nothing, _) => {}
        }
        // Fails only if the caller has gone.
        let _ = waiting.answer.send(reply);
    }
}
