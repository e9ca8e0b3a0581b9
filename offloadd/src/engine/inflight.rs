//! The operations an engine has taken and not given back, each with its memory, which the kernel may write to until then.
//!
//! An operation is known to the kernel by its place in this table. Nothing here is freed but by [`Inflight::end`].

use std::time::Instant;

use super::{Io, IoDone};

/// An operation the kernel put back (EAGAIN, EINTR) is tried again so often.
const RETRIES_MAX: u32 = 16;

/// The table.
#[derive(Debug, Default)]
pub(super) struct Inflight {
    entries: Vec<Option<Entry>>,
    free: Vec<usize>,
}

#[derive(Debug)]
struct Entry {
    io: Io,
    since: Instant,
    retries: u32,
}

impl Inflight {
    /// Takes an operation. Its place, until it ends.
    pub(super) fn add(&mut self, io: Io) -> usize {
        let place = self.free.pop().unwrap_or_else(|| {
            self.entries.push(None);
            self.entries.len() - 1
        });
        self.entries[place] = Some(Entry {
            io,
            since: Instant::now(),
            retries: 0,
        });
        place
    }

    /// The operation at a place that is taken.
    pub(super) fn io(&mut self, place: usize) -> &mut Io {
        &mut self.entries[place].as_mut().expect("a taken place").io
    }

    /// Whether what the kernel answered means to try again, and there is a try left; it is counted then.
    pub(super) fn again(&mut self, place: usize, result: i64) -> bool {
        let entry = self.entries[place].as_mut().expect("a taken place");
        let put_back = [-i64::from(libc::EAGAIN), -i64::from(libc::EINTR)].contains(&result);
        let again = put_back && entry.retries < RETRIES_MAX;
        entry.retries += u32::from(again);
        again
    }

    /// Gives an operation back with the kernel's answer: bytes moved, or an errno below zero.
    pub(super) fn end(&mut self, place: usize, result: i64) -> IoDone {
        let Entry { io, since, retries } = self.entries[place].take().expect("a taken place");
        self.free.push(place);
        IoDone {
            id: io.id,
            // Neither more than asked nor an errno is longer than 32 bits.
            outcome: match result {
                moved @ 0.. => Ok(moved as u32),
                errno => Err(-errno as i32),
            },
            device_ns: since.elapsed().as_nanos() as u64,
            retried_count: retries,
            memory: io.memory,
        }
    }

    /// Taken and not given back.
    pub(super) fn count(&self) -> usize {
        self.entries.len() - self.free.len()
    }

    /// Never gives the memory back: the kernel may still write to it.
    pub(super) fn leak(&mut self) {
        std::mem::forget(std::mem::take(&mut self.entries));
        self.free.clear();
    }
}
