//! The owner thread's handle: how messages reach it, how it starts and how it ends.

use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;

use crate::SwapperError;
use crate::backing::Arena;
use crate::driver::Driver;
use crate::inbox::Inbox;
use crate::layout::Layout;
use crate::lease::{Message, Reply};
use crate::nodes::Confirmer;
use crate::optimizer::Optimizer;
use crate::scratch::Scratch;
use crate::settings::{Backing, OpenReport, SwapperSettings};
use crate::worker;

/// The owner's queue, its answers, and the caller's own tiles if there are any.
pub(crate) type Ends<H> = (Inbox<H>, Receiver<Reply>, Option<Scratch>);

/// The owner thread's handle. Dropping it ends the thread without ending the session in order, like a crash.
#[derive(Debug)]
pub(crate) struct Owner<H> {
    inbox: Inbox<H>,
    thread: Option<JoinHandle<Result<(), SwapperError>>>,
}

impl<H: Clone + Send + 'static> Owner<H> {
    pub(crate) fn start(
        settings: &SwapperSettings,
        layout: Arc<Layout>,
        arena: Arena,
        opened: &OpenReport,
        start: Option<u64>,
        optimizers: Vec<Box<dyn Optimizer<H>>>,
    ) -> (Self, Ends<H>) {
        let (sender, messages) = channel();
        let (replies, from_owner) = channel();
        let (jobs, from_driver) = channel();
        let waker = match &arena {
            Arena::Memory(_) => None,
            Arena::Session(session) => Some(session.waker()),
        };
        let inbox = Inbox::new(sender, waker);
        let from_driver = Arc::new(Mutex::new(from_driver));
        let workers: Vec<JoinHandle<()>> = optimizers
            .into_iter()
            .zip(0..)
            .map(|(optimizer, number)| {
                let (layout, inbox, jobs) = (layout.clone(), inbox.clone(), from_driver.clone());
                std::thread::spawn(move || worker::run(number, &layout, optimizer, &jobs, &inbox))
            })
            .collect();
        let workers_count = workers.len();
        let confirmer = match (&settings.backing, start) {
            (Backing::Store(store), Some(start)) => store.nodes.clone().map(|nodes| {
                let inbox = inbox.clone();
                let answer = move |found| inbox.send(Message::Confirmable(found)).is_ok();
                Confirmer::start(nodes, start, answer)
            }),
            _ => None,
        };
        let driver = Driver::new(
            settings,
            layout,
            arena,
            opened,
            replies,
            jobs,
            workers_count,
        )
        .with_confirmer(confirmer);
        let scratch = driver.scratch().map(|area| {
            let inbox = inbox.clone();
            // An owner that has ended has told the caller.
            Scratch::new(area, move |operation| {
                let _ = inbox.send(Message::Scratch(operation));
            })
        });
        let thread = std::thread::spawn(move || {
            // The driver's end closes the job queue, which ends the workers. Their panics came as messages.
            let result = driver.run(&messages);
            for worker in workers {
                let _ = worker.join();
            }
            result
        });
        let owner = Self {
            inbox: inbox.clone(),
            thread: Some(thread),
        };
        (owner, (inbox, from_owner, scratch))
    }
}

impl<H> Owner<H> {
    /// Closes the session and ends the thread.
    pub(crate) fn close(&mut self) -> Result<(), SwapperError> {
        self.end(Message::Close { in_order: true })
    }

    fn end(&mut self, message: Message<H>) -> Result<(), SwapperError> {
        let Some(thread) = self.thread.take() else {
            return Ok(());
        };
        // A failed owner has ended and reported why.
        let _ = self.inbox.send(message);
        thread.join().unwrap_or(Err(SwapperError::Stopped))
    }
}

impl<H> Drop for Owner<H> {
    fn drop(&mut self) {
        if let Err(error) = self.end(Message::Close { in_order: false }) {
            tracing::debug!(%error, "the swapper's owner thread has failed");
        }
    }
}
