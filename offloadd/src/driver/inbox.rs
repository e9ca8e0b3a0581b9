//! The owner thread's inbox: a bounded queue, and an eventfd that wakes the thread.

use std::fs::File;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender, TrySendError, sync_channel};

use offload_api::fault::{Fault, FaultKind};
use offload_api::ids::DeviceIndex;
use rustix::event::{EventfdFlags, eventfd};
use tokio::sync::oneshot;

use super::session_memory::SessionMemory;
use crate::core::{
    Call, CommittedTiles, Core, NewDevice, Peer, Reply, TileDamage, TilePosition, Viewer,
};
use crate::io::SessionId;
use crate::metrics::{MovedBeside, Snapshot};
use crate::quota::{Limits, Quotas};
use crate::store::content::JobContent;
use crate::store::definition::JobName;
use crate::store::superblock::Superblock;

/// Limit of waiting messages. The owner thread handles one in microseconds.
const WAITING_MAX: usize = 1024;

pub(super) type SnapshotAnswer = oneshot::Sender<Result<Arc<Snapshot>, Fault>>;

/// Changed settings that a running daemon can apply.
#[derive(Clone, Debug)]
pub struct SettingsChange {
    /// Limits; those of sessions and operations are at most the values at the start.
    pub limits: Limits,
    /// Quotas of users and jobs.
    pub quotas: Quotas,
}

/// Questions about the core's state, each with where its answer goes. Each takes microseconds.
#[derive(Debug)]
pub(super) enum Question {
    /// Why the store is read-only, if it is.
    ReadOnly(oneshot::Sender<Option<Fault>>),
    /// Jobs in the store.
    Contents(Viewer, oneshot::Sender<Vec<JobContent>>),
    /// Some of a job's committed tiles.
    CommittedTiles(TilePosition, oneshot::Sender<Option<CommittedTiles>>),
    /// Superblock of a device.
    Superblock(DeviceIndex, oneshot::Sender<Superblock>),
}

impl Question {
    pub(super) fn answer(self, core: &Core) {
        // An answer is refused only if the caller has gone.
        match self {
            Self::ReadOnly(answer) => drop(answer.send(core.read_only().cloned())),
            Self::Contents(viewer, answer) => drop(answer.send(core.contents(viewer))),
            Self::CommittedTiles(at, answer) => drop(answer.send(core.committed_tiles(&at))),
            Self::Superblock(device, answer) => drop(answer.send(core.superblock_of(device))),
        }
    }
}

#[derive(Debug)]
pub(super) enum Message {
    /// A checked call.
    Call {
        peer: Peer,
        request: Call,
        answer: oneshot::Sender<Result<Reply, Fault>>,
    },
    /// Adds a device to the store.
    AddDevice {
        peer: Peer,
        file: Arc<File>,
        device: NewDevice,
        /// Bytes moved while it was measured.
        moved: MovedBeside,
        answer: oneshot::Sender<Result<Reply, Fault>>,
    },
    /// Bytes were read or written without the queue.
    MovedBeside {
        device: DeviceIndex,
        moved: MovedBeside,
    },
    /// Asks for metrics.
    Snapshot {
        viewer: Viewer,
        answer: SnapshotAnswer,
    },
    /// The keeper made a session's memory, or failed.
    Made {
        session: SessionId,
        made: Result<Box<SessionMemory>, Fault>,
    },
    /// Asks about the core's state.
    Ask(Question),
    /// A scrub or a process found a damaged tile.
    Damaged {
        by_process: bool,
        uid: u32,
        job: JobName,
        damage: TileDamage,
    },
    /// The administrator changed the settings.
    Change(SettingsChange),
    /// Answered after the turn in which it was read.
    Turn(oneshot::Sender<()>),
    /// Stops in order.
    Stop,
    /// Stops in order and hands the sessions over to the next daemon.
    HandOver,
}

/// Sends messages to the owner thread. Cheap to clone.
#[derive(Clone, Debug)]
pub struct DriverHandle {
    queue: SyncSender<Message>,
    wake: Arc<OwnedFd>,
}

impl DriverHandle {
    /// Sends a call and returns the receiver of its answer.
    ///
    /// # Errors
    /// [`FaultKind::TooMany`] if the queue is full, [`FaultKind::Stopping`] if the owner thread has ended.
    pub fn call(
        &self,
        peer: Peer,
        request: Call,
    ) -> Result<oneshot::Receiver<Result<Reply, Fault>>, Fault> {
        let (answer, receiver) = oneshot::channel();
        let message = Message::Call {
            peer,
            request,
            answer,
        };
        self.try_send(message)?;
        Ok(receiver)
    }

    /// Adds a device to the store; `moved` was counted while it was measured.
    ///
    /// # Errors
    /// Same as [`Self::call`].
    pub fn add_device(
        &self,
        peer: Peer,
        file: Arc<File>,
        device: NewDevice,
        moved: MovedBeside,
    ) -> Result<oneshot::Receiver<Result<Reply, Fault>>, Fault> {
        let (answer, receiver) = oneshot::channel();
        self.try_send(Message::AddDevice {
            peer,
            file,
            device,
            moved,
            answer,
        })?;
        Ok(receiver)
    }

    /// Asks for the metrics that `viewer` may see.
    ///
    /// # Errors
    /// Same as [`Self::call`].
    pub fn snapshot(
        &self,
        viewer: Viewer,
    ) -> Result<oneshot::Receiver<Result<Arc<Snapshot>, Fault>>, Fault> {
        let (answer, receiver) = oneshot::channel();
        self.try_send(Message::Snapshot { viewer, answer })?;
        Ok(receiver)
    }

    /// Asks why the store is read-only; the answer is `None` if it is not.
    ///
    /// # Errors
    /// Same as [`Self::call`].
    pub(crate) fn read_only(&self) -> Result<oneshot::Receiver<Option<Fault>>, Fault> {
        self.ask(Question::ReadOnly)
    }

    /// Asks for the jobs in the store that `viewer` may see.
    ///
    /// # Errors
    /// Same as [`Self::call`].
    pub(crate) fn contents(
        &self,
        viewer: Viewer,
    ) -> Result<oneshot::Receiver<Vec<JobContent>>, Fault> {
        self.ask(|answer| Question::Contents(viewer, answer))
    }

    /// Asks for some of a job's committed tiles, from `at` on; the answer is `None` if there is no such job.
    ///
    /// # Errors
    /// Same as [`Self::call`].
    pub(crate) fn committed_tiles(
        &self,
        at: TilePosition,
    ) -> Result<oneshot::Receiver<Option<CommittedTiles>>, Fault> {
        self.ask(|answer| Question::CommittedTiles(at, answer))
    }

    /// Asks for the superblock of a device.
    ///
    /// # Errors
    /// Same as [`Self::call`].
    pub(crate) fn superblock_of(
        &self,
        device: DeviceIndex,
    ) -> Result<oneshot::Receiver<Superblock>, Fault> {
        self.ask(|answer| Question::Superblock(device, answer))
    }

    fn ask<R>(
        &self,
        question: impl FnOnce(oneshot::Sender<R>) -> Question,
    ) -> Result<oneshot::Receiver<R>, Fault> {
        let (answer, receiver) = oneshot::channel();
        self.try_send(Message::Ask(question(answer)))?;
        Ok(receiver)
    }

    /// Counts bytes that were moved without the queue. May block.
    pub(crate) fn moved_beside(&self, device: DeviceIndex, moved: MovedBeside) {
        self.send(Message::MovedBeside { device, moved });
    }

    /// Reports a damaged tile that a scrub found, or that a process says it read.
    ///
    /// # Errors
    /// Same as [`Self::call`].
    pub(crate) fn damaged(
        &self,
        by_process: bool,
        uid: u32,
        job: JobName,
        damage: TileDamage,
    ) -> Result<(), Fault> {
        self.try_send(Message::Damaged {
            by_process,
            uid,
            job,
            damage,
        })
    }

    /// Applies changed settings.
    ///
    /// # Errors
    /// Same as [`Self::call`].
    pub fn change(&self, change: SettingsChange) -> Result<(), Fault> {
        self.try_send(Message::Change(change))
    }

    /// Answered after one turn of the owner thread, as a sign that it is not stuck.
    ///
    /// # Errors
    /// Same as [`Self::call`].
    pub fn turn(&self) -> Result<oneshot::Receiver<()>, Fault> {
        let (answer, receiver) = oneshot::channel();
        self.try_send(Message::Turn(answer))?;
        Ok(receiver)
    }

    fn try_send(&self, message: Message) -> Result<(), Fault> {
        match self.queue.try_send(message) {
            Ok(()) => {
                self.ring();
                Ok(())
            }
            Err(TrySendError::Full(_)) => Err(Fault::new(
                FaultKind::TooMany,
                format!("{WAITING_MAX} calls already wait; retry in a second"),
            )),
            Err(TrySendError::Disconnected(_)) => Err(stopping()),
        }
    }

    /// Asks the owner thread to stop in order. May be repeated.
    pub fn stop(&self) {
        self.send(Message::Stop);
    }

    /// Asks the owner thread to stop in order and to hand its sessions over to the next daemon. May be repeated.
    pub fn hand_over_and_stop(&self) {
        self.send(Message::HandOver);
    }

    /// Sends a message; blocks while the queue is full.
    pub(super) fn send(&self, message: Message) {
        // Fails only if the owner thread has ended; then nobody needs the message.
        let _ = self.queue.send(message);
        self.ring();
    }

    fn ring(&self) {
        // Fails only with 2^64 - 2 unread wake-ups.
        let _ = rustix::io::write(&*self.wake, &1u64.to_ne_bytes());
    }
}

/// Receiving end.
#[derive(Debug)]
pub(super) struct Inbox {
    queue: Receiver<Message>,
    wake: Arc<OwnedFd>,
}

impl Inbox {
    pub(super) fn new() -> std::io::Result<(Self, DriverHandle)> {
        let (sender, queue) = sync_channel(WAITING_MAX);
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        let wake = Arc::new(eventfd(0, flags)?);
        let handle = DriverHandle {
            queue: sender,
            wake: wake.clone(),
        };
        Ok((Self { queue, wake }, handle))
    }

    /// Readable when a message waits.
    pub(super) fn wake(&self) -> impl AsFd + '_ {
        &*self.wake
    }

    /// Resets the eventfd. Call before [`Self::next_message`], so that later messages wake the thread again.
    pub(super) fn drain(&self) {
        let _ = rustix::io::read(&*self.wake, &mut [0u8; 8]);
    }

    /// Wakes the thread again, because messages are left.
    pub(super) fn ring(&self) {
        let _ = rustix::io::write(&*self.wake, &1u64.to_ne_bytes());
    }

    /// Takes the oldest message.
    pub(super) fn next_message(&self) -> Option<Message> {
        self.queue.try_recv().ok()
    }
}

/// Answer to calls while the daemon stops.
pub(super) fn stopping() -> Fault {
    Fault::new(
        FaultKind::Stopping,
        "offloadd is stopping; everything committed is safe; start again when it is back",
    )
}
