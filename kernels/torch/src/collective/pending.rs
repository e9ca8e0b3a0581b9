//! An operation under way, with the memory it works on.

use std::sync::Arc;

use super::CollectiveError;
use super::link::{Link, Started};
use super::sum::sum_ranks;
use crate::HostBuffer;
use kernels::reduce::GradType;

/// An operation under way. It owns the buffer that it works on; [`Pending::wait`] gives it back.
///
/// Dropped without a wait it waits all the same. When it fails the buffer is leaked, since it may be touched still.
#[must_use = "the buffer comes back by wait()"]
pub struct Pending {
    link: Option<Arc<Link>>,
    started: Option<Started>,
    memory: Option<Memory>,
}

/// What an operation works on, and what is to be done with it at the end.
pub(super) enum Memory {
    /// The buffer has the result.
    Whole(HostBuffer),
    /// Every rank's part for this rank is in `scratch`; their sum goes to this rank's place in `buffer`.
    Parts {
        buffer: HostBuffer,
        scratch: HostBuffer,
        /// Of the buffer, in use.
        bytes: usize,
        grad_type: GradType,
    },
}

impl Pending {
    /// Of a run of one process, where nothing is to be done.
    pub(super) fn done(buffer: HostBuffer) -> Pending {
        Pending {
            link: None,
            started: None,
            memory: Some(Memory::Whole(buffer)),
        }
    }

    pub(super) fn started(link: Arc<Link>, started: Started, memory: Memory) -> Pending {
        Pending {
            link: Some(link),
            started: Some(started),
            memory: Some(memory),
        }
    }

    /// Waits until it is done; the buffer, with the result in it.
    ///
    /// # Errors
    /// The rank that is gone or does not come, by its number; what Gloo says otherwise. The buffer is lost.
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
            // Never given back: it may be written to or read from until the process ends.
            std::mem::forget(self.memory.take());
        }
        ended
    }
}

impl Drop for Pending {
    fn drop(&mut self) {
        // An error here is not lost: the next operation returns it.
        let _ = self.end();
    }
}
