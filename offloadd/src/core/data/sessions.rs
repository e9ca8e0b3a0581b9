//! The table of sessions, with their tokens and the host memory that they have.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use offload_api::fault::{Fault, FaultKind};
use offload_api::ids::{Rank, SessionToken, SlotIndex};

use super::JobKey;
use super::session::{Session, Stage};
use crate::core::{CallId, Peer};
use crate::io::SessionId;

/// Sessions, in the order in which they were opened.
#[derive(Default)]
pub(in crate::core) struct SessionTable {
    sessions: BTreeMap<SessionId, Session>,
    tokens: HashMap<SessionToken, SessionId>,
    arena_bytes: u64,
}

impl SessionTable {
    pub(in crate::core) fn len(&self) -> usize {
        self.sessions.len()
    }

    /// Bytes of host memory of all sessions.
    pub(in crate::core) fn arena_bytes(&self) -> u64 {
        self.arena_bytes
    }

    pub(super) fn get(&self, id: SessionId) -> Option<&Session> {
        self.sessions.get(&id)
    }

    pub(super) fn get_mut(&mut self, id: SessionId) -> Option<&mut Session> {
        self.sessions.get_mut(&id)
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &Session> {
        self.sessions.values()
    }

    /// Returns the ranks of a job whose sessions have ended and wait for their last operations.
    pub(in crate::core) fn ending(&self, key: &JobKey) -> BTreeSet<Rank> {
        let ending = self
            .iter()
            .filter(|session| session.key == *key && session.is_ending());
        ending.map(|session| session.rank).collect()
    }

    pub(super) fn has_token(&self, token: &SessionToken) -> bool {
        self.tokens.contains_key(token)
    }

    /// Returns the live session of a token, if it belongs to this peer.
    pub(in crate::core) fn live(
        &self,
        peer: Peer,
        token: SessionToken,
    ) -> Result<SessionId, Fault> {
        let found = self.tokens.get(&token).copied().filter(|id| {
            let session = &self.sessions[id];
            session.uid == peer.uid && session.stage == Stage::Live
        });
        found.ok_or_else(|| {
            Fault::new(
                FaultKind::NotFound,
                "no session has this token: the session has ended, or belongs to another daemon",
            )
        })
    }

    /// Handles that the session's process has fetched the descriptors.
    pub(in crate::core) fn on_attached(&mut self, id: SessionId) {
        if let Some(session) = self.get_mut(id) {
            session.claimed = true;
        }
    }

    pub(super) fn insert(&mut self, session: Session) {
        self.arena_bytes += session.geometry.arena_bytes();
        self.tokens.insert(session.token, session.id);
        self.sessions.insert(session.id, session);
    }

    /// Ends a session, unless it has ended: nobody finds it by its token any more. Returns whether it has ended only now.
    pub(super) fn end(&mut self, id: SessionId, close: Option<CallId>) -> bool {
        let Some(session) = self.sessions.get_mut(&id) else {
            return false;
        };
        session.stage = match session.stage {
            Stage::Making { open } => Stage::EndingUnmade { open },
            Stage::Live => Stage::Ending { close },
            Stage::Ending { .. } | Stage::EndingUnmade { .. } => return false,
        };
        self.tokens.remove(&session.token);
        true
    }

    /// Removes a session whose arena is dropped.
    pub(super) fn remove(&mut self, id: SessionId) -> Session {
        let session = self.sessions.remove(&id).expect("a session");
        self.tokens.remove(&session.token);
        self.arena_bytes -= session.geometry.arena_bytes();
        session
    }

    /// Ends the use of a slot.
    pub(super) fn free_slot(&mut self, id: SessionId, slot: SlotIndex) {
        if let Some(session) = self.sessions.get_mut(&id) {
            session.free_slot(slot);
        }
    }
}
