//! How long one way of a device takes to answer, beside the time in which it moves the bytes.
//!
//! What a device moves in that time must be in flight, or it stands idle; more only makes others wait. A drive on a network or
//! one that has become slow takes five times as long as a good one, so it is watched: one piece at a time is followed, and what
//! it took longer than its bytes need at the device's rate is the answer, or a wait behind others; so of two spans the shortest
//! counts. Where as much is in flight as that says, each wait is shorter than the last by the piece itself, so that it
//! comes down to the answer; where less is, the drive is idle between two and says what it needs.

use crate::io::IoId;

/// Where nothing was seen, and at least: a drive whose channels work side by side seems to answer at once.
const ANSWER_NS_MIN: u64 = 100_000;

/// Shorter pieces may overtake others in the drive, and tell nothing.
const BYTES_MIN: u32 = 32 << 10;

#[derive(Debug)]
pub(super) struct Answer {
    bytes_per_s: u64,
    /// The piece that is followed, and its bytes.
    followed: Option<(IoId, u32)>,
    /// The shortest of this span, and of the one before.
    least_ns: [Option<u64>; 2],
}

impl Answer {
    pub(super) fn new(bytes_per_s: u64) -> Self {
        Self {
            bytes_per_s,
            followed: None,
            least_ns: [None; 2],
        }
    }

    /// A piece is handed over.
    pub(super) fn handed_over(&mut self, piece: IoId, bytes: u32) {
        if self.followed.is_none() && bytes >= BYTES_MIN {
            self.followed = Some((piece, bytes));
        }
    }

    /// It has ended after so long, or failed.
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

    /// The next span begins.
    pub(super) fn go_on(&mut self) {
        self.least_ns = [None, self.least_ns[0].or(self.least_ns[1])];
    }

    /// What the device moves until it answers, where another has as much as `other_bytes` under way: what was seen may be a
    /// wait behind those, and they keep the device busy as well.
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
        let mut answer = Answer::new(1_000_000_000);
        let see = |answer: &mut Answer, bytes, took_ns| {
            answer.handed_over(IoId(1), bytes);
            // Another one tells nothing.
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
