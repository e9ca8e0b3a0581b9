//! Packs documents into windows.
//!
//! ```text
//!   concatenate   documents one after another; window w is elements w*seq_len ..= w*seq_len + seq_len. No token is lost, and a
//!                 window may contain parts of several documents
//!   documents     whole documents in windows of seq_len + 1 elements, each in the first window with room; the rest is padding
//!                 that does not count. A document longer than a window is divided
//! ```
//!
//! With `data.shuffle = false` documents keep their order: only one window is open, and the first document
//! that does not fit closes it.
//!
//! A window in which no token counts would only cost time, and a step of such windows would move the weights without a reason
//! (weight decay, momentum). Such windows are left out.
//!
//! The inputs of a window are all its elements except the last, the targets all except the first. The first
//! element of a document is marked. It does not count with "documents", and wherever attention does not cross
//! documents, because nothing of its document precedes it.

use super::DataError;
use super::cache::TokenFileWriter;
use super::findings::{Finding, FindingKind};
use super::read::DocumentPosition;
use super::tokenize::{BEGINS, NOT_COUNTED};
use crate::config::Packing;

/// Windows kept open for documents that fit. More would waste less padding and need more memory.
const OPEN_MAX: usize = 256;
const OPEN_BYTES_MAX: usize = 64 << 20;

/// Distance between the starts of windows, in elements.
pub(super) fn stride(packing: Packing, seq_len: usize) -> u64 {
    match packing {
        Packing::Concatenate => seq_len as u64,
        Packing::Documents => seq_len as u64 + 1,
    }
}

/// Number of whole windows in `elems` elements.
pub(super) fn windows(packing: Packing, seq_len: usize, elems: u64) -> u64 {
    match packing {
        Packing::Concatenate => elems.saturating_sub(1) / seq_len as u64,
        Packing::Documents => elems / stride(packing, seq_len),
    }
}

/// Returns whether an element counts in the loss.
fn counts(elements: &[u32]) -> bool {
    elements.iter().any(|element| element & NOT_COUNTED == 0)
}

/// Order of documents.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Order {
    /// That of the files.
    Files,
    Any,
}

/// Packs documents in the order in which they arrive.
pub(super) struct Packer<'w, 'f> {
    writer: &'w mut TokenFileWriter<'f>,
    packing: Packing,
    window_elems: usize,
    padding: u32,
    /// Open windows for training and for validation.
    open: [Vec<Vec<u32>>; 2],
    /// `None` keeps documents in order.
    open_max: Option<usize>,
    /// Elements of the current document that are not in a window yet; only used for whole documents.
    part: Vec<u32>,
    held_out: bool,
    /// Marks of a document's first element.
    first_marks: u32,
    /// Whether no element of the current document has come yet.
    begins: bool,
    /// Elements of "concatenate" that fill no window yet, for training and for validation; `None` if all windows count.
    blocks: Option<[WindowRest; 2]>,
    /// Where the current document comes from.
    source: String,
}

/// Elements of a window besides its first one, which the window before has too.
#[derive(Default)]
struct WindowRest {
    elements: Vec<u32>,
    /// Whether the first element of all windows was written.
    is_begun: bool,
    /// Whether the window before was left out, so that what follows has nothing before it.
    is_after_gap: bool,
}

impl<'w, 'f> Packer<'w, 'f> {
    pub(super) fn new(
        writer: &'w mut TokenFileWriter<'f>,
        packing: Packing,
        seq_len: usize,
        padding: u32,
        order: Order,
        cross_document_attention: bool,
        some_count: bool,
    ) -> Self {
        let window_elems = seq_len + 1;
        let open_max = (OPEN_BYTES_MAX / (4 * window_elems)).clamp(8, OPEN_MAX);
        Self {
            writer,
            packing,
            window_elems,
            padding,
            open: [Vec::new(), Vec::new()],
            open_max: (order == Order::Any).then_some(open_max),
            part: Vec::new(),
            held_out: false,
            first_marks: match (packing, cross_document_attention) {
                (Packing::Concatenate, true) => BEGINS,
                _ => BEGINS | NOT_COUNTED,
            },
            begins: false,
            blocks: (some_count && packing == Packing::Concatenate).then(Default::default),
            source: String::new(),
        }
    }

    pub(super) fn writer(&mut self) -> &mut TokenFileWriter<'f> {
        self.writer
    }

    /// Begins a document from `place`; `held_out` reserves it for validation.
    pub(super) fn begin(&mut self, held_out: bool, place: &DocumentPosition) {
        self.source = place.to_string();
        self.writer.document();
        self.held_out = held_out;
        self.begins = true;
    }

    /// Adds elements to the current document.
    pub(super) fn add(&mut self, elements: &[u32]) -> Result<(), DataError> {
        if self.packing == Packing::Concatenate {
            let first = match elements.first() {
                Some(first) if std::mem::take(&mut self.begins) => first | self.first_marks,
                Some(first) => *first,
                None => return Ok(()),
            };
            self.write(self.held_out, &[first])?;
            return self.write(self.held_out, &elements[1..]);
        }
        let mut rest = elements;
        while !rest.is_empty() {
            let room = self.window_elems - self.part.len();
            let (taken, left) = rest.split_at(room.min(rest.len()));
            self.part.extend_from_slice(taken);
            rest = left;
            if self.part.len() == self.window_elems && !rest.is_empty() {
                let last = *self.part.last().expect("it is full");
                if std::mem::take(&mut self.begins) {
                    self.writer.divided();
                }
                self.pack_part()?;
                // The next window starts with this one's last target.
                self.part.push(last);
            }
        }
        Ok(())
    }

    /// Ends the current document.
    pub(super) fn end(&mut self) -> Result<(), DataError> {
        self.pack_part()
    }

    /// Writes the windows that are still open.
    pub(super) fn finish(mut self) -> Result<(), DataError> {
        for held_out in [false, true] {
            for window in std::mem::take(&mut self.open[usize::from(held_out)]) {
                self.close(held_out, window)?;
            }
            // What fills no window is dropped by whoever reads windows.
            if let Some(blocks) = &mut self.blocks {
                let rest = std::mem::take(&mut blocks[usize::from(held_out)].elements);
                self.put(held_out, &rest)?;
            }
        }
        Ok(())
    }

    /// Adds the current part to the first window with room.
    fn pack_part(&mut self) -> Result<(), DataError> {
        let mut part = std::mem::take(&mut self.part);
        // A single element predicts nothing.
        if part.len() < 2 {
            return Ok(());
        }
        part[0] |= self.first_marks;
        let held_out = self.held_out;
        let open = &mut self.open[usize::from(held_out)];
        let room = |window: &Vec<u32>| window.len() + part.len() <= self.window_elems;
        let at = match open.iter().position(room) {
            Some(at) => {
                open[at].extend_from_slice(&part);
                at
            }
            None => {
                // The window before is complete, because documents keep their order.
                if self.open_max.is_none()
                    && let Some(before) = open.pop()
                {
                    self.close(held_out, before)?;
                }
                let open = &mut self.open[usize::from(held_out)];
                open.push(part);
                open.len() - 1
            }
        };
        let open = &mut self.open[usize::from(held_out)];
        if open[at].len() + 2 > self.window_elems {
            let full = open.remove(at);
            return self.close(held_out, full);
        }
        if self.open_max.is_some_and(|open_max| open.len() > open_max) {
            // The new window is the last one.
            let others = 0..open.len() - 1;
            let fullest = others.max_by_key(|&at| (open[at].len(), usize::MAX - at));
            let fullest = open.remove(fullest.expect("at least one may wait"));
            return self.close(held_out, fullest);
        }
        Ok(())
    }

    fn close(&mut self, held_out: bool, mut window: Vec<u32>) -> Result<(), DataError> {
        if !counts(&window[1..]) {
            self.leave_out();
            return Ok(());
        }
        let filled = window.len();
        self.writer.padding(self.window_elems - filled);
        window.resize(self.window_elems, self.padding | NOT_COUNTED);
        // Padding is a document of its own.
        if let Some(first) = window.get_mut(filled) {
            *first |= BEGINS;
        }
        self.write(held_out, &window)
    }

    /// Notes that a window is left out.
    fn leave_out(&mut self) {
        let finding = Finding::new(FindingKind::Windows, true, String::new());
        let place = format!("up to {}", self.source);
        self.writer.findings().add(finding, &place);
    }

    fn write(&mut self, held_out: bool, elements: &[u32]) -> Result<(), DataError> {
        let Some(blocks) = &mut self.blocks else {
            return self.put(held_out, elements);
        };
        let mut block = std::mem::take(&mut blocks[usize::from(held_out)]);
        for &element in elements {
            if !std::mem::replace(&mut block.is_begun, true) {
                self.put(held_out, &[element])?;
                continue;
            }
            let is_first = block.is_after_gap && block.elements.is_empty();
            let marks = if is_first { BEGINS | NOT_COUNTED } else { 0 };
            block.elements.push(element | marks);
            if block.elements.len() + 1 < self.window_elems {
                continue;
            }
            block.is_after_gap = !counts(&block.elements);
            match block.is_after_gap {
                true => self.leave_out(),
                false => self.put(held_out, &block.elements)?,
            }
            block.elements.clear();
        }
        if let Some(blocks) = &mut self.blocks {
            blocks[usize::from(held_out)] = block;
        }
        Ok(())
    }

    fn put(&mut self, held_out: bool, elements: &[u32]) -> Result<(), DataError> {
        if held_out {
            self.writer.hold(elements)
        } else {
            self.writer.train(elements)
        }
    }
}
