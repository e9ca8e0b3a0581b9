//! Turns by bytes: of those who wait, whoever has had least for its share is next.
//!
//! Who comes back after it had nothing to do begins where those are who waited all the while: it has saved nothing up, and
//! owes what it had before it went. So each gets its part of what is moved as long as it wants that, and what it does not
//! want is the others'.
//!
//! Only those are compared who take turns with each other: the users of a drive, the jobs of one user, the sessions of one
//! job. What others have had rises at another speed, and who began there would wait without end.

use std::collections::BTreeMap;

/// Bytes of a weight of 1, in parts that leave no remainder worth a word for the largest one.
const PARTS_A_BYTE: u128 = 1 << 23;

/// Who has had how much, of those who take turns with each other.
#[derive(Debug)]
pub(super) struct Fair<K> {
    had: BTreeMap<K, Had>,
    /// What whoever was served last had had before.
    now: u128,
    /// Of `had`, those who wait.
    waiting_count: usize,
}

#[derive(Clone, Copy, Debug)]
struct Had {
    parts: u128,
    weight: u32,
    /// Its operations that wait.
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
    /// It waits for one operation more; from now on with this weight. What it has had ahead of others are as many bytes as
    /// before: they count by the new weight, so that a changed share is felt at once.
    pub(super) fn came(&mut self, key: K, weight: u32) {
        assert!(weight > 0, "a weight of nothing");
        let now = self.now;
        let had = self.had.entry(key).or_insert(Had {
            parts: now,
            weight,
            waiting_count: 0,
        });
        if had.weight != weight {
            let ahead = had.parts.saturating_sub(now);
            // Bytes of a u64, by weights of a u32, in parts of 2^23: there is room.
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

    /// It waits for one operation less. Those who do not wait and owe nothing are forgotten; where nobody waits nobody is
    /// owed anything.
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

    /// Whose turn it is; the first of several who had as little.
    pub(super) fn next(&self) -> Option<K> {
        let (key, _) = self.waiting().min_by_key(|(_, had)| had.parts)?;
        Some(*key)
    }

    /// The least weight of those who wait, as far as they are `of` those meant.
    pub(super) fn least_weight(&self, of: impl Fn(K) -> bool) -> Option<u32> {
        let meant = self.waiting().filter(|(key, _)| of(**key));
        meant.map(|(_, had)| had.weight).min()
    }

    fn waiting(&self) -> impl Iterator<Item = (&K, &Had)> {
        self.had.iter().filter(|(_, had)| had.waiting_count > 0)
    }

    /// It was its turn, and it took `bytes`.
    pub(super) fn took(&mut self, key: K, bytes: u32) {
        let had = self.had.get_mut(&key).expect("it came");
        self.now = self.now.max(had.parts);
        had.parts += u128::from(bytes) * PARTS_A_BYTE / u128::from(had.weight);
    }

    /// What it weighs, if it waits or owes something.
    pub(super) fn weight(&self, key: K) -> Option<u32> {
        self.had.get(&key).map(|had| had.weight)
    }

    /// What it takes from now on counts by this weight; what it has had stays as it was counted.
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
    use crate::quota::SHARE_MAX;

    /// What each of those who want `wants` bytes again and again got when `bytes` were moved in pieces of that length.
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
            [(8 * SHARE_MAX, 4096), (8 * SHARE_MAX / 3, 65_536)],
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
        // It waited all the while.
        assert_eq!(fair.next(), Some(1));
        // Or it went and comes again: one piece, and they are even.
        fair.went(1);
        fair.came(1, 100);
        assert_eq!(fair.next(), Some(1));
        fair.took(1, 4096);
        assert_eq!(fair.next(), Some(0));
        // Having had much and coming back at once is no way to begin anew.
        fair.took(0, 1 << 20);
        fair.went(0);
        fair.came(0, 100);
        assert_eq!(fair.next(), Some(1));
    }

    #[test]
    fn a_changed_weight_counts_for_what_was_had_ahead_of_others_too() {
        // Of one whose weight is 1 beside 100, and of the same with each other's.
        for (before, after) in [(1, 10_000), (10_000, 1), (1, 100), (300, 100)] {
            let mut fair = Fair::default();
            fair.came(0, before);
            fair.came(1, 100);
            fair.took(0, 1 << 20);
            // Also while it waits for nothing.
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
        // Changed to and fro nothing is won.
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
