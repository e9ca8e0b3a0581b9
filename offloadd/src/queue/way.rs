//! One way of one device: who waits, in which order, and how much is in flight.

use std::collections::VecDeque;

use offload_api::ring::entry::Urgency;

use crate::arena::ArenaId;

/// Of so many pieces, one is of what is moved ahead of its use while something else is wanted: an eighth of the device,
/// enough to go on, little enough to be hardly felt.
pub const TURNS: u32 = 8;

/// Pieces of one way in flight, however small: more do not make a drive faster.
pub const INFLIGHT_COUNT_MAX: usize = 256;

/// Whose operation it is: a session's, or the daemon's own.
pub(super) type Owner = Option<ArenaId>;

/// Who waits, of one class: each owner's operations in their order, the owners in turn, a piece each. A session that floods
/// makes another wait for one piece of its own before each of the other's, however much it has queued.
#[derive(Debug, Default)]
struct Turns(VecDeque<(Owner, VecDeque<usize>)>);

impl Turns {
    fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    fn count(&self) -> usize {
        self.0.iter().map(|(_, places)| places.len()).sum()
    }

    fn push(&mut self, place: usize, owner: Owner) {
        match self.0.iter_mut().find(|(other, _)| *other == owner) {
            Some((_, places)) => places.push_back(place),
            None => self.0.push_back((owner, VecDeque::from([place]))),
        }
    }

    fn front(&self) -> Option<usize> {
        self.0.front().map(|(_, places)| places[0])
    }

    /// The first's piece was taken, the `last` one of its operation or not: the next owner's turn.
    fn taken(&mut self, last: bool) {
        let (owner, mut places) = self.0.pop_front().expect("one waits");
        if last {
            places.pop_front();
        }
        if !places.is_empty() {
            self.0.push_back((owner, places));
        }
    }

    fn remove(&mut self, place: usize) {
        for (_, places) in &mut self.0 {
            places.retain(|&other| other != place);
        }
        self.0.retain(|(_, places)| !places.is_empty());
    }
}

#[derive(Debug)]
pub(super) struct Way {
    window_bytes: u64,
    inflight_bytes: u64,
    inflight_count: usize,
    wanted: Turns,
    ahead: Turns,
    /// Wanted pieces in a row that went before others.
    passed: u32,
}

impl Way {
    pub(super) fn new(window_bytes: u64) -> Self {
        Self {
            window_bytes,
            inflight_bytes: 0,
            inflight_count: 0,
            wanted: Turns::default(),
            ahead: Turns::default(),
            passed: 0,
        }
    }

    pub(super) fn push(&mut self, place: usize, urgency: Urgency, owner: Owner) {
        self.waiting(urgency).push(place, owner);
    }

    /// One operation waits, and nothing is in flight.
    pub(super) fn has_one_alone(&self) -> bool {
        self.inflight_count == 0 && self.wanted.count() + self.ahead.count() == 1
    }

    /// Whose piece is next.
    pub(super) fn next(&self) -> Option<(usize, Urgency)> {
        let wanted = self.wanted.front().map(|place| (place, Urgency::Wanted));
        let ahead = self.ahead.front().map(|place| (place, Urgency::Ahead));
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
        self.waiting(urgency).taken(last);
    }

    /// A piece has ended.
    pub(super) fn take_back(&mut self, bytes: u32) {
        self.inflight_bytes -= u64::from(bytes);
        self.inflight_count -= 1;
    }

    /// Whoever is at `place` waits no more.
    pub(super) fn remove(&mut self, place: usize, urgency: Urgency) {
        self.waiting(urgency).remove(place);
    }

    fn waiting(&mut self, urgency: Urgency) -> &mut Turns {
        match urgency {
            Urgency::Wanted => &mut self.wanted,
            Urgency::Ahead => &mut self.ahead,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The order in which operations of (owner, pieces) that all wait are handed over, piece by piece.
    fn order(waiting: &[(Owner, u32)]) -> Vec<usize> {
        let mut way = Way::new(u64::MAX);
        let mut left: Vec<u32> = waiting.iter().map(|(_, pieces)| *pieces).collect();
        for (place, (owner, _)) in waiting.iter().enumerate() {
            way.push(place, Urgency::Wanted, *owner);
        }
        let mut order = Vec::new();
        while let Some((place, urgency)) = way.next() {
            left[place] -= 1;
            way.hand_over(urgency, 1, left[place] == 0);
            order.push(place);
        }
        order
    }

    #[test]
    fn a_session_that_floods_makes_another_wait_for_one_piece_before_each_of_its_own() {
        let [flood, other] = [ArenaId::of_test(1), ArenaId::of_test(2)].map(Some);
        let mut waiting = vec![(flood, 4); 100];
        waiting.push((other, 4));
        let order = order(&waiting);
        assert_eq!(order.len(), 404);
        let last = order.iter().rposition(|&place| place == 100).unwrap();
        assert_eq!(last, 7, "eight pieces, four of them its own");
    }

    #[test]
    fn one_owners_operations_stay_in_their_order_and_nothing_is_lost() {
        let [one, two] = [ArenaId::of_test(1), ArenaId::of_test(2)].map(Some);
        assert_eq!(order(&[(one, 2), (one, 1), (one, 1)]), [0, 0, 1, 2]);
        assert_eq!(
            order(&[(one, 2), (two, 1), (None, 1), (one, 1)]),
            [0, 1, 2, 0, 3]
        );
        let mut way = Way::new(u64::MAX);
        way.push(0, Urgency::Ahead, one);
        way.push(1, Urgency::Ahead, two);
        way.remove(0, Urgency::Ahead);
        assert_eq!(way.next(), Some((1, Urgency::Ahead)));
        way.remove(1, Urgency::Ahead);
        assert_eq!(way.next(), None);
    }
}
