//! The queue of the owner thread, as those see it who send.

use std::sync::mpsc::Sender;

use offload_client::Waker;

use crate::lease::Message;

/// Sending end of the owner's queue. The queue is bounded by the slots lent, of which each comes back once, and by those of
/// scratch tiles.
#[derive(Debug)]
pub(crate) struct Inbox<H> {
    sender: Sender<Message<H>>,
    waker: Option<Waker>,
}

impl<H> Clone for Inbox<H> {
    fn clone(&self) -> Self {
        Self {
            sender: self.sender.clone(),
            waker: self.waker.clone(),
        }
    }
}

/// The owner thread has ended.
#[derive(Debug)]
pub(crate) struct OwnerEnded;

impl<H> Inbox<H> {
    /// An inbox whose owner waits in `waker` too, if there is one.
    pub(crate) fn new(sender: Sender<Message<H>>, waker: Option<Waker>) -> Self {
        Self { sender, waker }
    }

    pub(crate) fn send(&self, message: Message<H>) -> Result<(), OwnerEnded> {
        self.sender.send(message).map_err(|_| OwnerEnded)?;
        if let Some(waker) = &self.waker {
            waker.wake();
        }
        Ok(())
    }
}
