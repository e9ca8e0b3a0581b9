//! Documents into windows.
//!
//! ```text
//!   concatenate   documents one after another, window w is elements w*seq_len ..= w*seq_len + seq_len: nothing is lost, and a
//!                 window may hold parts of several documents
//!   documents     whole documents into windows of seq_len + 1 elements, each into the first with room; the rest is padding that
//!                 does not count. A document longer than a window is cut into several
//! ```
//!
//! Documents that are to keep their order (`data.shuffle = false`) wait in one window, which the first without room there closes.
//!
//! A window's inputs are all its elements but the last, its targets all but the first. In "documents" the first element of a
//! document does not count: nothing of its document comes before it. In both, attention reaches back over documents that stand
//! before in the same window, as it does in most training.

use super::DataError;
use super::cache::Writer;
use super::tokenize::NOT_COUNTED;
use crate::config::Packing;

/// Windows that wait for documents that fit: more would fill them better and hold more memory.
const OPEN_MAX: usize = 256;
const OPEN_BYTES_MAX: usize = 64 << 20;

/// Where windows begin, as a multiple of elements.
pub(super) fn stride(packing: Packing, seq_len: usize) -> u64 {
    match packing {
        Packing::Concatenate => seq_len as u64,
        Packing::Documents => seq_len as u64 + 1,
    }
}

/// Whole windows in `elems` elements.
pub(super) fn windows(packing: Packing, seq_len: usize, elems: u64) -> u64 {
    match packing {
        Packing::Concatenate => elems.saturating_sub(1) / seq_len as u64,
        Packing::Documents => elems / stride(packing, seq_len),
    }
}

/// Packs documents as they come.
pub(super) struct Packer<'w, 'f> {
    writer: &'w mut Writer<'f>,
    packing: Packing,
    window_elems: usize,
    padding: u32,
    /// Of training and of what is held out.
    open: [Vec<Vec<u32>>; 2],
    open_max: usize,
    /// What of the document at hand is in no window yet; only for whole documents.
    part: Vec<u32>,
    held: bool,
}

impl<'w, 'f> Packer<'w, 'f> {
    pub(super) fn new(
        writer: &'w mut Writer<'f>,
        packing: Packing,
        seq_len: usize,
        padding: u32,
        any_order: bool,
    ) -> Self {
        let window_elems = seq_len + 1;
        let open_max = (OPEN_BYTES_MAX / (4 * window_elems)).clamp(8, OPEN_MAX);
        Self {
            writer,
            packing,
            window_elems,
            padding,
            open: [Vec::new(), Vec::new()],
            open_max: if any_order { open_max } else { 1 },
            part: Vec::new(),
            held: false,
        }
    }

    /// A document begins; it may be held out.
    pub(super) fn begin(&mut self, held: bool) {
        self.writer.document();
        self.held = held;
    }

    /// More of the document.
    pub(super) fn add(&mut self, elements: &[u32]) -> Result<(), DataError> {
        if self.packing == Packing::Concatenate {
            return self.write(self.held, elements);
        }
        let mut rest = elements;
        while !rest.is_empty() {
            let room = self.window_elems - self.part.len();
            let (taken, left) = rest.split_at(room.min(rest.len()));
            self.part.extend_from_slice(taken);
            rest = left;
            if self.part.len() == self.window_elems && !rest.is_empty() {
                let last = *self.part.last().expect("it is full");
                self.place()?;
                // The next window goes on where this one's last target was.
                self.part.push(last);
            }
        }
        Ok(())
    }

    /// The document ends.
    pub(super) fn end(&mut self) -> Result<(), DataError> {
        self.place()
    }

    /// Writes the windows that still wait.
    pub(super) fn finish(mut self) -> Result<(), DataError> {
        for held in [false, true] {
            for window in std::mem::take(&mut self.open[usize::from(held)]) {
                self.close(held, window)?;
            }
        }
        Ok(())
    }

    /// Puts the part at hand into the first window that has room.
    fn place(&mut self) -> Result<(), DataError> {
        let mut part = std::mem::take(&mut self.part);
        // One element alone predicts nothing.
        if part.len() < 2 {
            return Ok(());
        }
        part[0] |= NOT_COUNTED;
        let held = self.held;
        let open = &mut self.open[usize::from(held)];
        let room = |window: &Vec<u32>| window.len() + part.len() <= self.window_elems;
        let at = match open.iter().position(room) {
            Some(at) => {
                open[at].extend_from_slice(&part);
                at
            }
            None => {
                open.push(part);
                open.len() - 1
            }
        };
        if open[at].len() + 2 > self.window_elems {
            let full = open.remove(at);
            return self.close(held, full);
        }
        if open.len() > self.open_max {
            // The new one is the last: where one may wait, it is the other.
            let others = 0..open.len() - 1;
            let fullest = others.max_by_key(|&at| (open[at].len(), usize::MAX - at));
            let fullest = open.remove(fullest.expect("at least one may wait"));
            return self.close(held, fullest);
        }
        Ok(())
    }

    fn close(&mut self, held: bool, mut window: Vec<u32>) -> Result<(), DataError> {
        window.resize(self.window_elems, self.padding | NOT_COUNTED);
        self.write(held, &window)
    }

    fn write(&mut self, held: bool, elements: &[u32]) -> Result<(), DataError> {
        if held {
            self.writer.hold(elements)
        } else {
            self.writer.train(elements)
        }
    }
}
