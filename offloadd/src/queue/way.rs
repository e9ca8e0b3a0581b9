//! One way of one device: who waits, in which order, and how much is in flight.

use std::collections::VecDeque;

use offload_api::ring::entry::Urgency;

/// Of so many pieces, one is of what is moved ahead of its use while something else is wanted: an eighth of the device,
/// enough to go on, little enough to be hardly felt.
pub const TURNS: u32 = 8;

/// Pieces of one way in flight, however small: more do not make a drive faster.
pub const INFLIGHT_COUNT_MAX: usize = 256;

#[derive(Debug)]
pub(super) struct Way {
    window_bytes: u64,
    inflight_bytes: u64,
    inflight_count: usize,
    wanted: VecDeque<usize>,
    ahead: VecDeque<usize>,
    /// Wanted pieces in a row that went before others.
    passed: u32,
}

impl Way {
    pub(super) fn new(window_bytes: u64) -> Self {
        Self {
            window_bytes,
            inflight_bytes: 0,
            inflight_count: 0,
            wanted: VecDeque::new(),
            ahead: VecDeque::new(),
            passed: 0,
        }
    }

    pub(super) fn push(&mut self, place: usize, urgency: Urgency) {
        self.waiting(urgency).push_back(place);
    }

    /// Whose piece is next.
    pub(super) fn next(&self) -> Option<(usize, Urgency)> {
        let wanted = self.wanted.front().map(|&place| (place, Urgency::Wanted));
        let ahead = self.ahead.front().map(|&place| (place, Urgency::Ahead));
        if self.passed + 1 >= TURNS {
            ahead.or(wanted)
        } else {
            wanted.or(ahead)
        }
    }

    /// Whether a piece of `bytes` may be handed over. One always may.
    pub(super) fn has_room(&self, bytes: u32) -> bool {
        self.inflight_count == 0
            || self.inflight_count < INFLIGHT_COUNT_MAX
                && self.inflight_bytes + u64::from(bytes) <= self.window_bytes
    }

    /// A piece of the first of `urgency` is handed over; it was the `last` one of its operation, or not.
    pub(super) fn hand_over(&mut self, urgency: Urgency, bytes: u32, last: bool) {
        self.inflight_bytes += u64::from(bytes);
        self.inflight_count += 1;
        self.passed = match urgency {
            Urgency::Wanted if !self.ahead.is_empty() => self.passed + 1,
            _ => 0,
        };
        if last {
            self.waiting(urgency).pop_front();
        }
    }

    /// A piece has ended.
    pub(super) fn take_back(&mut self, bytes: u32) {
        self.inflight_bytes -= u64::from(bytes);
        self.inflight_count -= 1;
    }

    /// Whoever is at `place` waits no more.
    pub(super) fn remove(&mut self, place: usize, urgency: Urgency) {
        self.waiting(urgency).retain(|&other| other != place);
    }

    fn waiting(&mut self, urgency: Urgency) -> &mut VecDeque<usize> {
        match urgency {
            Urgency::Wanted => &mut self.wanted,
            Urgency::Ahead => &mut self.ahead,
        }
    }
}
