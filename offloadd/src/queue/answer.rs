//! Latency of one direction of a device: the time it takes to answer, in addition to the time that the bytes need.
//!
//! The bytes that a device moves in that time must be in flight, or it idles; more in flight only makes others wait. The
//! latency is measured, because a network drive or a failing one takes five times as long as a good one. One piece at a time is
//! followed. The time it took beyond its bytes at the device's rate is the latency plus a wait behind other pieces, so the
//! shortest of two spans counts. If enough is in flight, the wait of each piece shrinks until only the latency is left; if not,
//! the drive idles between pieces and shows its latency.

use crate::io::IoId;

/// Latency before any measurement, and the least one: a drive whose channels work in parallel seems to answer at once.
const ANSWER_NS_MIN: u64 = 100_000;

/// Shorter pieces may overtake others in the drive, so their times tell nothing.
const BYTES_MIN: u32 = 32 << 10;

#[derive(Debug)]
pub(super) struct AnswerTime {
    bytes_per_s: u64,
    /// The followed piece and its bytes.
    followed: Option<(IoId, u32)>,
    /// Shortest time of this span and of the one before.
    least_ns: [Option<u64>; 2],
}

impl AnswerTime {
    pub(super) fn new(bytes_per_s: u64) -> Self {
        Self {
            bytes_per_s,
            followed: None,
            least_ns: [None; 2],
        }
    }

    /// Records that a piece is handed over.
    pub(super) fn handed_over(&mut self, piece: IoId, bytes: u32) {
        if self.followed.is_none() && bytes >= BYTES_MIN {
            self.followed = Some((piece, bytes));
        }
    }

    /// Records that a piece has ended, after `took_ns` or with a failure.
    pub(super) fn ended(&mut self, piece: IoId, took_ns: Option<u64>) {
        let Some((_, bytes)) = self.followed.take_if(|(of, _)| *of == piece) else {
            return;
        };
        if let Some(took_ns) = took_ns {
            let ns = u128::from(bytes) * 1_000_000_000 / u128::from(self.bytes_per_s);
            let answer_ns = took_ns.saturating_sub(ns as u64);
            let least = self.least_ns[0].get_or_insert(answer_ns);
            *least = answer_ns.min(*least);
        }
    }

    /// Starts the next span.
    pub(super) fn go_on(&mut self) {
        self.least_ns = [None, self.least_ns[0].or(self.least_ns[1])];
    }

    /// Returns the bytes that the device moves in its latency, beside another job with `other_bytes` in flight: part of the
    /// measured time may be a wait behind those, and they keep the device busy too.
    pub(super) fn bytes_beside(&self, other_bytes: u64) -> u64 {
        let bytes_in = |ns: u64| u128::from(self.bytes_per_s) * u128::from(ns) / 1_000_000_000;
        let least_ns = self.least_ns.into_iter().flatten().min();
        let seen = bytes_in(least_ns.unwrap_or(0)) as u64;
        seen.saturating_sub(other_bytes.saturating_mul(2))
            .max(bytes_in(ANSWER_NS_MIN) as u64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_shortest_of_two_spans_counts_and_small_or_failed_pieces_do_not() {
        let mut answer = AnswerTime::new(1_000_000_000);
        let see = |answer: &mut AnswerTime, bytes, took_ns| {
            answer.handed_over(IoId(1), bytes);
            // Another piece, which is not followed.
            answer.ended(IoId(2), Some(0));
            answer.ended(IoId(1), took_ns);
            answer.bytes_beside(0)
        };
        assert_eq!(answer.bytes_beside(0), 100_000, "nothing was seen");
        assert_eq!(see(&mut answer, 1_000_000, Some(1_500_000)), 500_000);
        assert_eq!(see(&mut answer, 1_000_000, Some(1_700_000)), 500_000);
        assert_eq!(see(&mut answer, 1_000_000, None), 500_000);
        assert_eq!(see(&mut answer, 4096, Some(1_200_000)), 500_000);
        answer.go_on();
        assert_eq!(see(&mut answer, 1_000_000, Some(1_700_000)), 500_000);
        answer.go_on();
        assert_eq!(answer.bytes_beside(0), 700_000, "it has become slower");
        assert_eq!(answer.bytes_beside(100_000), 500_000);
        assert_eq!(see(&mut answer, 1_000_000, Some(900_000)), 100_000);
    }
}
