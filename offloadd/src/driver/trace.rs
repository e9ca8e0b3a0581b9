//! Log lines about sessions, tiles and commits. With `RUST_LOG=offloadd=debug` each tile is shown from submission to completion:
//!
//! ```text
//!   session{session=1 uid=1000 job=llama}: opened pid=4711 arena_bytes=1073741824 iodepth=64
//!   session{..}:tile{tile=7 ticket=12}: submitted verb=2 slot=3 generation=5
//!   session{..}:tile{tile=7 ticket=12}: operation queued io=31 device=0 op=Write offset=8392704 bytes=4194304
//!   session{..}:tile{tile=7 ticket=12}: operation ended io=31 outcome=Ok(4194304) device_us=1310
//!   session{..}:tile{tile=7 ticket=12}: completed fault=0 device=0 offset=8392704 generation=0
//!   session{..}:commit{generation=5}: called
//!   session{..}:commit{generation=5}: operation queued io=32 device=0 op=Flush offset=0 bytes=0
//!   session{..}:commit{generation=5}: durable
//! ```
//!
//! When the level is off, an event costs one relaxed load, and nothing is stored.

use std::collections::HashMap;

use offload_api::fault::Fault;
use offload_api::ids::Generation;
use offload_api::ring::entry::Cqe;
use tracing::{Level, Span, debug, debug_span, info_span};

use super::{Driver, DriverSession};
use crate::core::{Event, Reply};
use crate::io::{Buffer, IoId, SessionId};
use crate::store::definition::JobName;

/// Span of a session. Its fields are in every line about the session, INFO and above included.
pub(super) fn session(session: SessionId, uid: u32, job: &JobName) -> Span {
    info_span!("session", session = session.0, uid, %job)
}

/// Span of a call to commit.
pub(super) fn commit(session: &Span, generation: Generation) -> Span {
    let span = debug_span!(parent: session, "commit", generation = generation.0);
    debug!(parent: &span, "called");
    span
}

pub(super) fn commit_answered(span: &Span, reply: &Result<Reply, Fault>) {
    match reply {
        Ok(_) => debug!(parent: span, "durable"),
        Err(fault) => debug!(parent: span, %fault, "failed"),
    }
}

/// Spans of what is in flight; empty unless DEBUG is on.
#[derive(Debug, Default)]
pub(super) struct Spans {
    /// By session and ticket.
    tiles: HashMap<(SessionId, u64), Span>,
    operations: HashMap<IoId, Span>,
    /// The event being handled is a submission, so operations on slots are this tile's.
    in_submission: bool,
}

impl Spans {
    /// Forgets the tiles of a session that has ended.
    pub(super) fn forget(&mut self, session: SessionId) {
        self.tiles.retain(|(other, _), _| *other != session);
    }

    /// Remembers the span of an operation that the event being handled has caused.
    pub(super) fn queued(
        &mut self,
        io: IoId,
        buffer: &Buffer,
        sessions: &HashMap<SessionId, DriverSession>,
    ) {
        if !is_on() {
            return;
        }
        // A write that the core held back is started by an event of another tile.
        let span = match buffer {
            Buffer::Slot { session, .. } if !self.in_submission => {
                sessions.get(session).map(|session| session.span.clone())
            }
            Buffer::Slot { .. } | Buffer::Meta(_) | Buffer::None => None,
        };
        self.operations
            .insert(io, span.unwrap_or_else(Span::current));
    }

    /// Returns the span of an operation, to which lines about it belong.
    pub(super) fn operation(&self, io: IoId) -> Option<&Span> {
        self.operations.get(&io)
    }

    pub(super) fn completed(&mut self, session: SessionId, entry: &Cqe) {
        if let Some(span) = self.tiles.remove(&(session, entry.ticket)) {
            let Cqe {
                fault,
                device,
                offset,
                generation,
                ..
            } = *entry;
            debug!(parent: &span, fault, device, offset, generation, "completed");
        }
    }
}

impl Driver {
    /// Returns the span in which to handle `event`.
    pub(super) fn event_span(&mut self, event: &Event) -> Span {
        if !is_on() {
            return Span::none();
        }
        self.spans.in_submission = matches!(event, Event::Submission { .. });
        match event {
            Event::Submission { session, entry } => {
                let Some(found) = self.sessions.get(session) else {
                    return Span::none();
                };
                let (tile, ticket) = (entry.tile, entry.ticket);
                let span = debug_span!(parent: &found.span, "tile", tile, ticket);
                let (verb, slot, generation) = (entry.verb, entry.slot, entry.generation);
                debug!(parent: &span, verb, slot, generation, "submitted");
                self.spans.tiles.insert((*session, ticket), span.clone());
                span
            }
            Event::IoDone { io, result, .. } => {
                let span = self.spans.operations.remove(io).unwrap_or_else(Span::none);
                let (io, outcome, device_us) = (io.0, result.outcome, result.device_ns / 1000);
                debug!(parent: &span, io, ?outcome, device_us, "operation ended");
                span
            }
            Event::Call { call, .. } => {
                let span = self.calls.get(call).and_then(|waiting| waiting.span());
                span.cloned().unwrap_or_else(Span::none)
            }
            _ => Span::none(),
        }
    }
}

fn is_on() -> bool {
    tracing::enabled!(Level::DEBUG)
}
