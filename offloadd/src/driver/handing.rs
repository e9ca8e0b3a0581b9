//! Sessions that outlive the daemon: taken up at the start, given away at the end.

use std::os::fd::{AsFd, OwnedFd};

use offload_api::ids::Epoch;
use offload_api::ring::Reached;

use super::keeper::Made;
use super::session::{Session, State};
use super::{Driver, DriverError, system};
use crate::arena::LockPolicy;
use crate::blocks::BlockError;
use crate::core::{Adopted, Core, Event};
use crate::device::{Device, DeviceBlocks};
use crate::handover::{Claim, Descriptors, HandedOver};

/// A session of the daemon before, with its descriptors.
#[derive(Debug)]
pub struct TakenUp {
    /// As the core has it.
    pub adopted: Adopted,
    /// What both sides have.
    pub descriptors: Descriptors,
    /// How far its rings were.
    pub reached: Reached,
}

/// What the daemon before left to this one.
#[derive(Debug)]
pub struct LeftToUs {
    /// Spent when nothing can fail any more.
    pub claim: Claim,
    /// Those that go on.
    pub sessions: Vec<TakenUp>,
}

/// Writes what tells this life from the one before.
///
/// # Errors
/// The home did not take it.
pub fn begin_life(core: &mut Core, devices: &[Device]) -> Result<(), BlockError> {
    let (position, catalog) = core.first_catalog();
    catalog.write(&mut DeviceBlocks(devices), position)?;
    core.begin_life(catalog);
    Ok(())
}

impl Driver {
    /// Takes up all that is left to this daemon, if nobody else has.
    pub(super) fn take_up_all(&mut self, left: LeftToUs, epoch: Epoch, policy: LockPolicy) {
        let LeftToUs { claim, sessions } = left;
        let ours = claim.spend();
        if !ours {
            tracing::error!("another daemon took up the sessions of the one before: they end here");
        }
        for session in sessions {
            if ours {
                self.take_up(session, epoch, policy);
            } else {
                let session = session.adopted.session;
                self.events.push_back(Event::PeerGone { session });
            }
        }
    }

    /// Serves a session as if it had just attached. Its process may have gone meanwhile: its life line says so at once.
    fn take_up(&mut self, taken: TakenUp, epoch: Epoch, policy: LockPolicy) {
        let TakenUp {
            adopted,
            descriptors,
            reached,
        } = taken;
        let id = adopted.session;
        let made = Made::adopt(
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
                tracing::warn!(job = %adopted.job, %fault, "a session is not taken up");
                self.events.push_back(Event::PeerGone { session: id });
                return;
            }
        };
        self.engine.register(&made.arena);
        self.keeper.adopted(&made);
        let session = Session {
            token: adopted.token,
            peer: adopted.peer,
            job: (self.ledger).session_begins(adopted.peer.uid, &adopted.job),
            state: State::Making,
            unrung: false,
        };
        self.sessions.insert(id, session);
        self.begin(id, Box::new(made), life_line, process);
    }

    /// What goes to the next daemon, after the last operation has ended.
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
            let State::Attached {
                made,
                life_line,
                process,
            } = &session.state
            else {
                unreachable!("at rest all sessions that the core has live are attached");
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
            .map_err(system("a number for the hand-over"))
    }
}

fn copies(
    made: &Made,
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
