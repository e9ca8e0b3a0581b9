//! How other threads reach the owner thread: a bounded queue and an eventfd that wakes it.

use std::fs::File;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender, TrySendError, sync_channel};

use offload_api::fault::{Fault, FaultKind};
use offload_api::ids::DeviceIndex;
use rustix::event::{EventfdFlags, eventfd};
use tokio::sync::oneshot;

use super::keeper::Made;
use crate::core::{Call, Core, Damage, NewDevice, Peer, Reply, Viewer};
use crate::io::SessionId;
use crate::metrics::{MovedBeside, Ratings, Snapshot};
use crate::quota::{Limits, Quotas};
use crate::store::definition::JobName;

/// Messages that wait for the owner thread. It takes microseconds for each, so this is generous.
const WAITING_MAX: usize = 1024;

/// Where a look's answer goes.
pub(super) type LookAnswer = oneshot::Sender<Result<Arc<Snapshot>, Fault>>;

/// What a running daemon takes up of changed settings.
#[derive(Clone, Debug)]
pub struct Change {
    /// Of sessions and operations not more than it started with.
    pub limits: Limits,
    /// Of each user and job.
    pub quotas: Quotas,
    /// Of the drives.
    pub ratings: Ratings,
}

/// What somebody wants to know of the core, and its own way to the answer.
pub(super) struct Question(pub(super) Box<dyn FnOnce(&Core) + Send>);

impl std::fmt::Debug for Question {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Question")
    }
}

/// What the owner thread is told.
#[derive(Debug)]
pub(super) enum Message {
    /// A checked call and where its answer goes.
    Call {
        peer: Peer,
        request: Call,
        answer: oneshot::Sender<Result<Reply, Fault>>,
    },
    /// A device that is to come to the store.
    AddDevice {
        peer: Peer,
        file: Arc<File>,
        device: NewDevice,
        /// As it was measured.
        moved: MovedBeside,
        answer: oneshot::Sender<Result<Reply, Fault>>,
    },
    /// Somebody reads or writes a device beside the queue.
    MovedBeside {
        device: DeviceIndex,
        moved: MovedBeside,
    },
    /// Somebody is to measure a device.
    File {
        device: DeviceIndex,
        answer: oneshot::Sender<Option<Arc<File>>>,
    },
    /// What goes on.
    Look { viewer: Viewer, answer: LookAnswer },
    /// The keeper made a session's memory, or could not.
    Made {
        session: SessionId,
        made: Result<Box<Made>, Fault>,
    },
    /// Somebody wants to know something of the core.
    Ask(Question),
    /// A scrub found a damaged tile.
    Damaged {
        uid: u32,
        job: JobName,
        damage: Damage,
    },
    /// A process reported a damaged tile, and the server found it damaged too.
    Reported {
        uid: u32,
        job: JobName,
        damage: Damage,
    },
    /// The administrator changed the settings.
    Change(Change),
    /// Answered after the turn in which it was read.
    Turn(oneshot::Sender<()>),
    /// End in order.
    Stop,
    /// The same, but sessions go on in the next daemon.
    HandOver,
}

/// The way to the owner thread. Cheap to clone.
#[derive(Clone, Debug)]
pub struct DriverHandle {
    queue: SyncSender<Message>,
    wake: Arc<OwnedFd>,
}

impl DriverHandle {
    /// Hands a call over; its answer comes later.
    ///
    /// # Errors
    /// [`FaultKind::TooMany`] when the owner thread is that far behind, [`FaultKind::Stopping`] when it has ended.
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
        self.hand_over(message)?;
        Ok(receiver)
    }

    /// Brings a device to the store; `moved` as it was measured.
    ///
    /// # Errors
    /// As [`Self::call`].
    pub fn add_device(
        &self,
        peer: Peer,
        file: Arc<File>,
        device: NewDevice,
        moved: MovedBeside,
    ) -> Result<oneshot::Receiver<Result<Reply, Fault>>, Fault> {
        let (answer, receiver) = oneshot::channel();
        self.hand_over(Message::AddDevice {
            peer,
            file,
            device,
            moved,
            answer,
        })?;
        Ok(receiver)
    }

    /// A device as it is opened here, under the store's lock; `None`: it has left the store.
    ///
    /// # Errors
    /// As [`Self::call`].
    pub(crate) fn file(
        &self,
        device: DeviceIndex,
    ) -> Result<oneshot::Receiver<Option<Arc<File>>>, Fault> {
        let (answer, receiver) = oneshot::channel();
        self.hand_over(Message::File { device, answer })?;
        Ok(receiver)
    }

    /// What goes on, as far as `viewer` may see it.
    ///
    /// # Errors
    /// As [`Self::call`].
    pub fn look(
        &self,
        viewer: Viewer,
    ) -> Result<oneshot::Receiver<Result<Arc<Snapshot>, Fault>>, Fault> {
        let (answer, receiver) = oneshot::channel();
        self.hand_over(Message::Look { viewer, answer })?;
        Ok(receiver)
    }

    /// Asks the core something that is answered in microseconds.
    ///
    /// # Errors
    /// As [`Self::call`].
    pub(crate) fn ask<R: Send + 'static>(
        &self,
        question: impl FnOnce(&Core) -> R + Send + 'static,
    ) -> Result<oneshot::Receiver<R>, Fault> {
        let (answer, receiver) = oneshot::channel();
        let question = Question(Box::new(move |core| {
            // An error means that nobody wants to know any more.
            let _ = answer.send(question(core));
        }));
        self.hand_over(Message::Ask(question))?;
        Ok(receiver)
    }

    /// Counts what passed the queue by. Waits for room: for threads that may block.
    pub(crate) fn moved_beside(&self, device: DeviceIndex, moved: MovedBeside) {
        self.send(Message::MovedBeside { device, moved });
    }

    /// A tile is not what was committed.
    ///
    /// # Errors
    /// As [`Self::call`].
    pub(crate) fn damaged(&self, uid: u32, job: JobName, damage: Damage) -> Result<(), Fault> {
        self.hand_over(Message::Damaged { uid, job, damage })
    }

    /// A process's report of a damaged tile was confirmed. It counts if the tile still has that version and its damage was not
    /// counted before.
    ///
    /// # Errors
    /// As [`Self::call`].
    pub(crate) fn reported(&self, uid: u32, job: JobName, damage: Damage) -> Result<(), Fault> {
        self.hand_over(Message::Reported { uid, job, damage })
    }

    /// Takes changed settings up.
    ///
    /// # Errors
    /// As [`Self::call`].
    pub fn change(&self, change: Change) -> Result<(), Fault> {
        self.hand_over(Message::Change(change))
    }

    /// Answered when the owner thread has gone once through all it has to do: it is not stuck.
    ///
    /// # Errors
    /// As [`Self::call`].
    pub fn turn(&self) -> Result<oneshot::Receiver<()>, Fault> {
        let (answer, receiver) = oneshot::channel();
        self.hand_over(Message::Turn(answer))?;
        Ok(receiver)
    }

    fn hand_over(&self, message: Message) -> Result<(), Fault> {
        match self.queue.try_send(message) {
            Ok(()) => {
                self.ring();
                Ok(())
            }
            Err(TrySendError::Full(_)) => Err(Fault::new(
                FaultKind::TooMany,
                format!("{WAITING_MAX} calls wait already: try again in a second"),
            )),
            Err(TrySendError::Disconnected(_)) => Err(stopping()),
        }
    }

    /// Asks the owner thread to end in order. Safe to repeat.
    pub fn stop(&self) {
        self.send(Message::Stop);
    }

    /// Asks the owner thread to end in order and to leave its sessions to the next daemon. Safe to repeat.
    pub fn stop_for_the_next(&self) {
        self.send(Message::HandOver);
    }

    /// Waits for room; for our own threads only.
    pub(super) fn send(&self, message: Message) {
        // An error means that the owner thread has ended: nobody needs the message.
        let _ = self.queue.send(message);
        self.ring();
    }

    fn ring(&self) {
        // Fails only at 2^64 - 2 unread wake-ups: then it is awake.
        let _ = rustix::io::write(&*self.wake, &1u64.to_ne_bytes());
    }
}

/// The owner thread's end.
#[derive(Debug)]
pub(super) struct Inbox {
    queue: Receiver<Message>,
    wake: Arc<OwnedFd>,
}

impl Inbox {
    /// Both ends.
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

    /// Readable when something waits.
    pub(super) fn wake(&self) -> impl AsFd + '_ {
        &*self.wake
    }

    /// Call before taking: what comes afterwards wakes again.
    pub(super) fn drain(&self) {
        let _ = rustix::io::read(&*self.wake, &mut [0u8; 8]);
    }

    /// More may be there than was taken.
    pub(super) fn ring(&self) {
        let _ = rustix::io::write(&*self.wake, &1u64.to_ne_bytes());
    }

    /// The oldest message.
    pub(super) fn take(&self) -> Option<Message> {
        self.queue.try_recv().ok()
    }
}

/// What a call gets while the daemon ends, whether or not another one will go on.
pub(super) fn stopping() -> Fault {
    Fault::new(
        FaultKind::Stopping,
        "offloadd is stopping: what was committed is safe; start again when it is back",
    )
}
