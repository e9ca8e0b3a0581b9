//! Sessions that outlive the daemon: adopted at the start, handed over at the end.

use std::os::fd::{AsFd, OwnedFd};
use std::time::Duration;

use offload_api::ids::Epoch;
use offload_api::ring::RingPositions;

use super::session::{DriverSession, SessionState};
use super::session_memory::SessionMemory;
use super::{Driver, DriverError, system, trace};
use crate::arena::LockPolicy;
use crate::blocks::BlockError;
use crate::core::{AdoptedSession, Core, Event};
use crate::device::{Device, DeviceBlocks};
use crate::handover::{Claim, Descriptors, HandedOver};
use crate::retry;

/// A session of the previous daemon, with its descriptors.
#[derive(Debug)]
pub struct InheritedSession {
    /// The session as the core has adopted it.
    pub adopted: AdoptedSession,
    /// Descriptors that both sides share.
    pub descriptors: Descriptors,
    /// Positions in its rings.
    pub reached: RingPositions,
}

/// Sessions that the previous daemon handed over.
#[derive(Debug)]
pub struct InheritedSessions {
    /// Right to adopt the sessions, used up once nothing can fail any more.
    pub claim: Claim,
    /// Sessions to adopt.
    pub sessions: Vec<InheritedSession>,
}

/// Writes a catalog that tells this incarnation from the previous one.
///
/// # Errors
/// If the metadata device fails the write.
fn begin_writable(core: &mut Core, devices: &[Device]) -> Result<(), BlockError> {
    let (position, catalog) = core.first_catalog();
    catalog.write(&mut DeviceBlocks(devices), position)?;
    core.begin_incarnation(catalog);
    Ok(())
}

impl Driver {
    /// Begins an incarnation, or makes the store read-only if the devices take no writes. With sessions to `adopt` it fails
    /// instead: they need a store that can be written, and the next start may have one.
    pub(super) fn begin_incarnation(
        &mut self,
        opened: &[Device],
        unwritable: Option<BlockError>,
        adopt: bool,
    ) -> Result<(), DriverError> {
        let begun = match unwritable {
            None => {
                let waits: &[Duration] = if adopt { &[] } else { &retry::WAITS };
                retry::retry(waits.iter().copied(), || {
                    begin_writable(&mut self.core, opened)
                })
            }
            Some(error) => Err(error),
        };
        if let Err(error) = begun {
            if adopt {
                return Err(error.into());
            }
            self.core.begin_reading(&error);
            let why = self.core.read_only().expect("just begun");
            tracing::error!("{}", why.message);
        }
        Ok(())
    }

    /// Adopts the inherited sessions, unless another daemon has.
    pub(super) fn adopt_all(
        &mut self,
        inherited: InheritedSessions,
        epoch: Epoch,
        policy: LockPolicy,
    ) {
        let InheritedSessions { claim, sessions } = inherited;
        let ours = claim.spend();
        if !ours {
            tracing::error!(
                "another daemon has adopted the sessions of the previous one; they end here"
            );
        }
        for session in sessions {
            if ours {
                self.adopt(session, epoch, policy);
            } else {
                let session = session.adopted.session;
                self.events.push_back(Event::PeerGone { session });
            }
        }
    }

    /// Serves a session as if it had just attached. If its process has ended in the meantime, its life line reports that at once.
    fn adopt(&mut self, inherited: InheritedSession, epoch: Epoch, policy: LockPolicy) {
        let InheritedSession {
            adopted,
            descriptors,
            reached,
        } = inherited;
        let id = adopted.session;
        let made = SessionMemory::adopt(
            descriptors,
            &adopted.geometry,
            adopted.ring_entries,
            reached,
            epoch,
            policy,
        );
        let (made, life_line, process) = match made {
            Ok(made) => made,
            Err(fault) => {
                tracing::warn!(session = id.0, job = %adopted.job, %fault, "cannot adopt a session; it ends");
                self.events.push_back(Event::PeerGone { session: id });
                return;
            }
        };
        self.engine.register(&made.arena);
        self.keeper.adopted(&made);
        let session = DriverSession {
            span: trace::session(id, adopted.peer.uid, &adopted.job),
            token: adopted.token,
            peer: adopted.peer,
            job: (self.ledger).session_begins(adopted.peer.uid, &adopted.job),
            state: SessionState::Making,
            unrung: false,
        };
        self.sessions.insert(id, session);
        self.begin(id, Box::new(made), life_line, process);
    }

    /// Returns the state and descriptors for the next daemon. Call after the last operation has ended.
    pub(super) fn give(&mut self) -> Result<Option<HandedOver>, DriverError> {
        if !self.handing {
            return Ok(None);
        }
        self.keeper.leave();
        for session in self.sessions.values_mut() {
            session.ring();
        }
        let mut state = self.core.hand_over();
        let mut descriptors = Vec::with_capacity(state.sessions.len());
        for message in &mut state.sessions {
            let found = self.sessions.iter().find(|(id, _)| id.0 == message.number);
            let Some((_, session)) = found else {
                unreachable!("the core's sessions are the driver's");
            };
            let SessionState::Attached {
                made,
                life_line,
                process,
            } = &session.state
            else {
                unreachable!("at rest all sessions of the core are attached");
            };
            let reached = made.rings.reached();
            message.submission_head = reached.submission_head;
            message.completion_tail = reached.completion_tail;
            let copies = copies(made, life_line, process.as_ref());
            descriptors.push(copies.map_err(system("copying a session's descriptors"))?);
        }
        let handed = HandedOver::new(state, descriptors);
        handed
            .map(Some)
            .map_err(system("creating the claim of the hand-over"))
    }
}

fn copies(
    made: &SessionMemory,
    life_line: &OwnedFd,
    process: Option<&OwnedFd>,
) -> std::io::Result<Descriptors> {
    let copy = |fd: &dyn AsFd| fd.as_fd().try_clone_to_owned();
    Ok(Descriptors {
        arena: copy(&*made.arena)?,
        ring: copy(&made.ring_fd)?,
        submission_doorbell: copy(&made.submission_doorbell)?,
        completion_doorbell: copy(&made.completion_doorbell)?,
        completion_reader: copy(&made.completion_reader)?,
        life_line: copy(life_line)?,
        process: process.map(|process| copy(process)).transpose()?,
    })
}
