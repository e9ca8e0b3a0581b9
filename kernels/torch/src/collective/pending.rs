//! An operation in progress, with the memory it works on.

use std::sync::Arc;

use super::link::{Link, StartedOperation};
use super::sum::sum_ranks;
use crate::HostBuffer;
use kernels::reduce::GradType;
use training_ranks::CollectiveError;

/// An operation in progress. It owns its buffer; [`Pending::wait`] returns it.
///
/// Dropping it waits too. After a failure the buffer is leaked, since it may still be in use.
#[must_use = "the buffer comes back by wait()"]
pub struct Pending {
    link: Option<Arc<Link>>,
    started: Option<StartedOperation>,
    memory: Option<Memory>,
}

/// Memory of an operation, and what remains to be done with it at the end.
pub(super) enum Memory {
    /// The buffer receives the result.
    Whole(HostBuffer),
    /// `scratch` receives every rank's part for this rank; their sum goes to this rank's place in `buffer`.
    Parts {
        buffer: HostBuffer,
        scratch: HostBuffer,
        /// Bytes of the buffer in use.
        bytes: usize,
        grad_type: GradType,
    },
    /// `received` receives every rank's part for this rank.
    Received {
        /// Sent until then, so it is kept.
        _sent: HostBuffer,
        received: HostBuffer,
    },
}

impl Pending {
    /// An operation of a single process, which has nothing to do.
    pub(super) fn done(buffer: HostBuffer) -> Pending {
        Pending {
            link: None,
            started: None,
            memory: Some(Memory::Whole(buffer)),
        }
    }

    pub(super) fn started(link: Arc<Link>, started: StartedOperation, memory: Memory) -> Pending {
        Pending {
            link: Some(link),
            started: Some(started),
            memory: Some(memory),
        }
    }

    /// Waits for the end and returns the buffer with the result.
    ///
    /// # Errors
    /// The rank that is dead or does not come, by number; otherwise Gloo's error. The buffer is lost.
    pub fn wait(mut self) -> Result<HostBuffer, CollectiveError> {
        self.end()?;
        let memory = self.memory.take().expect("waited for once");
        let Some(link) = &self.link else {
            let Memory::Whole(buffer) = memory else {
                unreachable!("one process has nothing to sum")
            };
            return Ok(buffer);
        };
        Ok(match memory {
            Memory::Whole(buffer) => buffer,
            Memory::Received { received, .. } => received,
            Memory::Parts {
                mut buffer,
                mut scratch,
                bytes,
                grad_type,
            } => {
                let shard_bytes = bytes / link.world.ranks as usize;
                let own = link.world.rank as usize * shard_bytes;
                sum_ranks(
                    grad_type,
                    &scratch.bytes_mut()[..bytes],
                    &mut buffer.bytes_mut()[own..own + shard_bytes],
                );
                link.give_scratch(scratch);
                buffer
            }
        })
    }

    fn end(&mut self) -> Result<(), CollectiveError> {
        let (Some(link), Some(started)) = (&self.link, self.started.take()) else {
            return Ok(());
        };
        let ended = link.wait(&started);
        if ended.is_err() {
            // Never freed: it may be written or read until the process ends.
            std::mem::forget(self.memory.take());
        }
        ended
    }
}

impl Drop for Pending {
    fn drop(&mut self) {
        // The next operation returns this error again.
        let _ = self.end();
    }
}
