//! Operations an engine has in flight, each with its memory, which the kernel may write to until the operation ends.
//!
//! The kernel knows an operation by its place in this table. Only [`Inflight::end`] frees an entry.

use std::time::Instant;

use super::{Io, IoDone};

/// How often an operation is repeated that the kernel answered with EAGAIN or EINTR.
const RETRIES_MAX: u32 = 16;

#[derive(Debug, Default)]
pub(super) struct Inflight {
    entries: Vec<Option<InflightOperation>>,
    free: Vec<usize>,
}

#[derive(Debug)]
struct InflightOperation {
    io: Io,
    since: Instant,
    retries: u32,
}

impl Inflight {
    /// Takes an operation. Returns its place, valid until it ends.
    pub(super) fn add(&mut self, io: Io) -> usize {
        let place = self.free.pop().unwrap_or_else(|| {
            self.entries.push(None);
            self.entries.len() - 1
        });
        self.entries[place] = Some(InflightOperation {
            io,
            since: Instant::now(),
            retries: 0,
        });
        place
    }

    /// The operation at a taken place.
    pub(super) fn io(&mut self, place: usize) -> &mut Io {
        &mut self.entries[place].as_mut().expect("a taken place").io
    }

    /// Whether to repeat the operation after the kernel's answer `result`. Counts the repetition.
    pub(super) fn retry(&mut self, place: usize, result: i64) -> bool {
        let entry = self.entries[place].as_mut().expect("a taken place");
        let put_back = [-i64::from(libc::EAGAIN), -i64::from(libc::EINTR)].contains(&result);
        let retry = put_back && entry.retries < RETRIES_MAX;
        entry.retries += u32::from(retry);
        retry
    }

    /// Ends an operation with the kernel's answer: bytes moved, or a negative errno.
    pub(super) fn end(&mut self, place: usize, result: i64) -> IoDone {
        let InflightOperation { io, since, retries } =
            self.entries[place].take().expect("a taken place");
        self.free.push(place);
        IoDone {
            id: io.id,
            // Bytes moved and errnos both fit 32 bits.
            outcome: match result {
                moved @ 0.. => Ok(moved as u32),
                errno => Err(-errno as i32),
            },
            device_ns: since.elapsed().as_nanos() as u64,
            retried_count: retries,
            memory: io.memory,
        }
    }

    /// Operations in flight.
    pub(super) fn count(&self) -> usize {
        self.entries.len() - self.free.len()
    }

    /// Leaks the memory of all operations, because the kernel may still write to it.
    pub(super) fn leak(&mut self) {
        std::mem::forget(std::mem::take(&mut self.entries));
        self.free.clear();
    }
}
