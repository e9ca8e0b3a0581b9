//! Weighted turns by bytes: of the competitors that wait, the one that was served least for its weight is next.
//!
//! A competitor that returns after a pause starts level with those who kept waiting: a pause saves nothing up, and bytes served before still count.
//! Each therefore gets its share while it has operations, and the others get the rest.
//!
//! Only direct competitors are compared: the users of a drive, the jobs of one user, or the sessions of one job. Counts of
//! other groups grow at other speeds.

use std::collections::BTreeMap;

/// Parts of a byte at weight 1, fine enough that rounding does not matter at the largest weight.
const PARTS_A_BYTE: u128 = 1 << 23;

/// Service that each competitor of a group received.
#[derive(Debug)]
pub(super) struct Fair<K> {
    had: BTreeMap<K, ServiceCount>,
    /// Count of the competitor served last, before it was served.
    now: u128,
    /// Number of entries of `had` that wait.
    waiting_count: usize,
}

#[derive(Clone, Copy, Debug)]
struct ServiceCount {
    parts: u128,
    weight: u32,
    /// Number of its waiting operations.
    waiting_count: usize,
}

impl<K> Default for Fair<K> {
    fn default() -> Self {
        Self {
            had: BTreeMap::new(),
            now: 0,
            waiting_count: 0,
        }
    }
}

impl<K: Copy + Ord> Fair<K> {
    /// Adds a waiting operation of `key`, with its weight from now on. Bytes that it was served ahead of others are recounted
    /// with the new weight, so that a changed weight has effect at once.
    pub(super) fn came(&mut self, key: K, weight: u32) {
        assert!(weight > 0, "a weight of nothing");
        let now = self.now;
        let had = self.had.entry(key).or_insert(ServiceCount {
            parts: now,
            weight,
            waiting_count: 0,
        });
        if had.weight != weight {
            let ahead = had.parts.saturating_sub(now);
            // Bytes of a u64, times weights of a u32, in parts of 2^23: they fit.
            let ahead_now = ahead * u128::from(had.weight) / u128::from(weight);
            had.parts = had.parts - ahead + ahead_now;
            had.weight = weight;
        }
        if had.waiting_count == 0 {
            had.parts = had.parts.max(now);
            self.waiting_count += 1;
        }
        had.waiting_count += 1;
    }

    /// Removes a waiting operation of `key`. Entries that do not wait and were not served ahead are forgotten; when nobody
    /// waits, all are.
    pub(super) fn went(&mut self, key: K) {
        let had = self.had.get_mut(&key).expect("it came");
        had.waiting_count -= 1;
        if had.waiting_count > 0 {
            return;
        }
        self.waiting_count -= 1;
        if self.waiting_count == 0 {
            self.now = 0;
            return self.had.clear();
        }
        let now = self.now;
        self.had
            .retain(|_, had| had.parts > now || had.waiting_count > 0);
    }

    /// Whether anybody waits.
    pub(super) fn waits(&self) -> bool {
        self.waiting_count > 0
    }

    /// Returns whose turn it is; the first of several that were served equally.
    pub(super) fn next(&self) -> Option<K> {
        let (key, _) = self.waiting().min_by_key(|(_, had)| had.parts)?;
        Some(*key)
    }

    /// Returns the least weight of those who wait, among keys that are `of` interest.
    pub(super) fn least_weight(&self, of: impl Fn(K) -> bool) -> Option<u32> {
        let meant = self.waiting().filter(|(key, _)| of(**key));
        meant.map(|(_, had)| had.weight).min()
    }

    fn waiting(&self) -> impl Iterator<Item = (&K, &ServiceCount)> {
        self.had.iter().filter(|(_, had)| had.waiting_count > 0)
    }

    /// Records that `key` had its turn and took `bytes`.
    pub(super) fn took(&mut self, key: K, bytes: u32) {
        let had = self.had.get_mut(&key).expect("it came");
        self.now = self.now.max(had.parts);
        had.parts += u128::from(bytes) * PARTS_A_BYTE / u128::from(had.weight);
    }

    /// Returns the weight of `key`, if it is known.
    pub(super) fn weight(&self, key: K) -> Option<u32> {
        self.had.get(&key).map(|had| had.weight)
    }

    /// Changes a weight for future bytes only.
    pub(super) fn weigh(&mut self, key: K, weight: u32) {
        self.had.get_mut(&key).expect("it came").weight = weight;
    }

    #[cfg(test)]
    pub(super) fn known_count(&self) -> usize {
        self.had.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::quota::WEIGHT_MAX;

    /// Returns the bytes that each competitor got, when each always wants more in pieces of its length `wants`, after `bytes` were moved.
    fn served(bytes: u64, wants: &[(u32, u32)]) -> Vec<u64> {
        let mut fair = Fair::default();
        for (key, (weight, _)) in wants.iter().enumerate() {
            fair.came(key, *weight);
        }
        let mut got = vec![0; wants.len()];
        while got.iter().sum::<u64>() < bytes {
            let next = fair.next().unwrap();
            fair.took(next, wants[next].1);
            got[next] += u64::from(wants[next].1);
        }
        got
    }

    #[test]
    fn each_gets_its_part_whatever_the_length_of_its_pieces() {
        for wants in [
            [(300, 1 << 20), (100, 1 << 20)],
            [(300, 4096), (100, 1 << 20)],
            [(300, 1 << 20), (100, 4096)],
            [(8 * WEIGHT_MAX, 4096), (8 * WEIGHT_MAX / 3, 65_536)],
        ] {
            let got = served(1 << 30, &wants);
            let ratio = got[0] as f64 / got[1] as f64;
            assert!((2.95..3.05).contains(&ratio), "{wants:?}: {ratio}");
        }
    }

    #[test]
    fn who_comes_back_has_saved_nothing_up_and_owes_what_it_had() {
        let mut fair = Fair::default();
        fair.came(0, 100);
        fair.came(1, 100);
        for _ in 0..100 {
            fair.took(0, 4096);
        }
        // It waited the whole time.
        assert_eq!(fair.next(), Some(1));
        // It leaves and returns: after one piece, both are even.
        fair.went(1);
        fair.came(1, 100);
        assert_eq!(fair.next(), Some(1));
        fair.took(1, 4096);
        assert_eq!(fair.next(), Some(0));
        // A competitor that was served much and returns at once does not start from zero.
        fair.took(0, 1 << 20);
        fair.went(0);
        fair.came(0, 100);
        assert_eq!(fair.next(), Some(1));
    }

    #[test]
    fn a_changed_weight_counts_for_what_was_had_ahead_of_others_too() {
        // A competitor with weight 1 beside one with 100, and the same with the weights exchanged.
        for (before, after) in [(1, 10_000), (10_000, 1), (1, 100), (300, 100)] {
            let mut fair = Fair::default();
            fair.came(0, before);
            fair.came(1, 100);
            fair.took(0, 1 << 20);
            // The weight also changes while the competitor has no operations.
            fair.went(0);
            fair.came(0, after);
            let mut others = 0u64;
            while fair.next() == Some(1) {
                fair.took(1, 4096);
                others += 4096;
            }
            let due = (1u64 << 20) * 100 / u64::from(after);
            assert!(
                (due..=due + 4096).contains(&others),
                "{before} to {after}: {others}, {due} due"
            );
        }
        // Changing a weight back and forth gains nothing.
        let mut fair = Fair::default();
        fair.came(0, 100);
        fair.came(1, 100);
        fair.took(0, 1 << 20);
        for _ in 0..1000 {
            fair.came(0, 300);
            fair.came(0, 100);
        }
        fair.took(1, (1 << 20) - 1);
        assert_eq!(fair.next(), Some(1));
    }

    #[test]
    fn who_owes_nothing_and_does_not_wait_is_forgotten() {
        let mut fair = Fair::default();
        fair.came(0, 100);
        for key in 1..1000 {
            fair.came(key, 100);
            for _ in 0..2 {
                let next = fair.next().unwrap();
                fair.took(next, 4096);
            }
            fair.went(key);
            assert!(fair.known_count() <= 3, "{fair:?}");
        }
        fair.went(0);
        assert_eq!(fair.known_count(), 0);
        assert_eq!(fair.next(), None);
    }
}
