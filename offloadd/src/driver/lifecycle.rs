//! Sessions between `MakeArena` and `DropArena`: memory that was made, processes that ended, memory that is freed.

use std::time::{Duration, Instant};

use offload_api::fault::Fault;
use rustix::event::epoll;

use super::Driver;
use super::session::SessionState;
use super::session_memory::SessionMemory;
use crate::core::{Event, Peer};
use crate::io::SessionId;

/// How long a new session waits for its process to fetch the descriptors.
pub(super) const ATTACH_WAIT: Duration = Duration::from_secs(10);

impl Driver {
    pub(super) fn made(&mut self, id: SessionId, made: Result<Box<SessionMemory>, Fault>) {
        let session = self.sessions.get_mut(&id).expect("kept while it is made");
        let result = match (made, &session.state) {
            (Ok(made), SessionState::Dropped) => {
                let uid = session.peer.uid;
                self.keeper.free(uid, self.keeper.ends(made));
                self.remove(id);
                return;
            }
            (Err(_), SessionState::Dropped) => {
                self.remove(id);
                return;
            }
            (Ok(made), _) => {
                self.engine.register(&made.arena);
                session.state = SessionState::Offered {
                    made,
                    deadline: Instant::now() + ATTACH_WAIT,
                };
                Ok(())
            }
            (Err(fault), _) => {
                self.remove(id);
                Err(fault)
            }
        };
        self.events.push_back(Event::ArenaMade {
            session: id,
            result,
        });
    }

    /// Logs the end of a session, if its process has the descriptors or could fetch them.
    fn log_end(&self, id: SessionId, why: &str) {
        if let Some(session) = self.sessions.get(&id)
            && let SessionState::Attached { .. } | SessionState::Offered { .. } = session.state
        {
            let Peer { uid, pid } = session.peer;
            tracing::info!(parent: &session.span, uid, pid, why, "session ends");
        }
    }

    /// Ends a session whose process ended or broke the protocol. Its memory stays until its I/O has ended.
    pub(super) fn gone(&mut self, id: SessionId, why: &str) {
        let Some(session) = self.sessions.get(&id) else {
            return;
        };
        if !matches!(
            session.state,
            SessionState::Attached { .. } | SessionState::Offered { .. }
        ) {
            return;
        }
        self.log_end(id, why);
        self.detach(id);
        self.events.push_back(Event::PeerGone { session: id });
    }

    /// Closes the life line and stops watching the process. The memory stays.
    pub(super) fn detach(&mut self, id: SessionId) {
        let Some(session) = self.sessions.get_mut(&id) else {
            return;
        };
        session.state = match std::mem::replace(&mut session.state, SessionState::Dropped) {
            SessionState::Attached {
                made,
                life_line,
                process,
            } => {
                // The process has copies of the descriptors, so closing ours does not remove them from epoll.
                let _ = epoll::delete(&self.epoll, &made.submission_doorbell);
                let _ = epoll::delete(&self.epoll, &life_line);
                if let Some(process) = process {
                    let _ = epoll::delete(&self.epoll, &process);
                }
                SessionState::Gone { made }
            }
            SessionState::Offered { made, .. } => SessionState::Gone { made },
            other => other,
        };
    }

    pub(super) fn drop_arena(&mut self, id: SessionId) {
        self.log_end(id, "its process closed it");
        self.detach(id);
        // Missing if the session was inherited and its memory could not be adopted.
        let Some(session) = self.sessions.get_mut(&id) else {
            return;
        };
        match std::mem::replace(&mut session.state, SessionState::Dropped) {
            // Its memory is being made: `made` will see that it was dropped.
            SessionState::Making | SessionState::Dropped => {}
            SessionState::Offered { made, .. }
            | SessionState::Attached { made, .. }
            | SessionState::Gone { made } => {
                let uid = session.peer.uid;
                self.engine.forget(made.arena.id());
                self.ending.push((uid, self.keeper.ends(made)));
                self.remove(id);
            }
        }
    }

    /// Frees memory that the kernel no longer uses.
    pub(super) fn free_ended(&mut self) {
        let engine = &self.engine;
        let free = (self.ending).extract_if(.., |(_, ending)| engine.is_forgotten(ending.arena()));
        for (uid, ending) in free {
            self.keeper.free(uid, ending);
        }
    }

    fn remove(&mut self, id: SessionId) {
        let session = self.sessions.remove(&id).expect("a session");
        tracing::debug!(parent: &session.span, "ended");
        self.spans.forget(id);
        self.ledger.session_ends(session.job);
    }
}
