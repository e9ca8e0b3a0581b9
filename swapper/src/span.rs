//! Records what a run did and when, for a timeline. Spans are collected only while a caller asks for them.
//!
//! A span is handed out with the first step that is finished after the span ended. The bytes of its reads and writes are
//! therefore counted in that step's [`crate::StepIo`].

use std::ops::Range;
use std::time::Instant;

use crate::layout::Kind;

/// Most spans kept until they are taken: a step of 100 G parameters moves about 300,000 tiles.
pub const SPANS_MAX: usize = 1 << 19;

/// Kind of a span.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum SpanKind {
    /// A tile came from a device.
    Read,
    /// A tile went to a device.
    Write,
    /// A tile was updated.
    Update,
    /// A generation was made durable.
    Commit,
    /// The trainer took a unit's parameters, waits included.
    Gather,
    /// The trainer brought a unit's gradients, waits included.
    Scatter,
    /// The trainer waited for a tile, an update or a commit.
    Wait,
}

/// One operation with its start and end.
#[derive(Clone, Debug, PartialEq)]
pub struct Span {
    /// Kind of the operation.
    pub kind: SpanKind,
    /// Index of the unit, if the operation concerns one.
    pub unit: Option<usize>,
    /// Kind of the tile, if the operation concerns one.
    pub tile: Option<Kind>,
    /// Elements of the tile, counted from the unit's first; empty otherwise.
    pub elems: Range<u64>,
    /// Bytes moved between host memory and devices.
    pub bytes: u64,
    /// Index of the optimizer that ran.
    pub worker: u32,
    /// When it began.
    pub start: Instant,
    /// When it ended.
    pub end: Instant,
}

impl Span {
    /// A span from `start` to now, without unit or tile.
    pub(crate) fn since(kind: SpanKind, start: Instant) -> Self {
        Self {
            kind,
            unit: None,
            tile: None,
            elems: 0..0,
            bytes: 0,
            worker: 0,
            start,
            end: Instant::now(),
        }
    }
}

/// Collected spans.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Spans {
    /// Spans in the order in which they ended, by thread.
    pub list: Vec<Span>,
    /// Spans dropped because the list was full, see [`SPANS_MAX`].
    pub dropped_count: u64,
}

impl Spans {
    pub(crate) fn push(&mut self, span: Span) {
        if self.list.len() < SPANS_MAX {
            self.list.push(span);
        } else {
            self.dropped_count += 1;
        }
    }

    pub(crate) fn append(&mut self, other: Self) {
        self.dropped_count += other.dropped_count;
        for span in other.list {
            self.push(span);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_more_spans_are_kept_than_there_is_room_for() {
        let span = Span::since(SpanKind::Wait, Instant::now());
        let mut spans = Spans::default();
        for _ in 0..SPANS_MAX - 1 {
            spans.push(span.clone());
        }
        let more = Spans {
            list: vec![span; 3],
            dropped_count: 4,
        };
        spans.append(more);
        assert_eq!((spans.list.len(), spans.dropped_count), (SPANS_MAX, 6));
    }
}
