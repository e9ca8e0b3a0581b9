//! Turns by bytes: of those who wait, whoever has had least for its share is next.
//!
//! Who comes back after it had nothing to do begins where those are who waited all the while: it has saved nothing up, and
//! owes what it had before it went. So each gets its part of what is moved as long as it wants that, and what it does not
//! want is the others'.

use std::collections::BTreeMap;

use crate::core::SHARE_MAX;

/// Bytes of a share of 1, in parts that leave no remainder worth a word for the largest one.
const PARTS_A_BYTE: u128 = 1 << 20;

/// Who has had how much, of one kind.
#[derive(Debug)]
pub(super) struct Fair<K> {
    had: BTreeMap<K, Had>,
    /// What whoever was served last had had before.
    now: u128,
}

#[derive(Clone, Copy, Debug)]
struct Had {
    parts: u128,
    share: u32,
}

impl<K> Default for Fair<K> {
    fn default() -> Self {
        Self {
            had: BTreeMap::new(),
            now: 0,
        }
    }
}

impl<K: Copy + Ord> Fair<K> {
    /// It waits for something; from now on with this share.
    pub(super) fn came(&mut self, key: K, share: u32, waited: bool) {
        assert!((1..=SHARE_MAX).contains(&share), "a share of {share}");
        let now = self.now;
        let had = self.had.entry(key).or_insert(Had { parts: now, share });
        had.share = share;
        if !waited {
            had.parts = had.parts.max(now);
        }
    }

    /// Whose turn it is of those who wait; the first of several who had as little.
    pub(super) fn next(&self, waiting: impl Iterator<Item = K>) -> Option<K> {
        waiting.min_by_key(|key| self.had[key].parts)
    }

    /// It was its turn, and it took `bytes`.
    pub(super) fn took(&mut self, key: K, bytes: u32) {
        let had = self.had.get_mut(&key).expect("it came");
        self.now = self.now.max(had.parts);
        had.parts += u128::from(bytes) * PARTS_A_BYTE / u128::from(had.share);
    }

    /// Forgets those who do not wait and owe nothing. Where nobody waits nobody is owed anything.
    pub(super) fn forget(&mut self, waits: impl Fn(K) -> bool) {
        if !self.had.keys().any(|key| waits(*key)) {
            self.now = 0;
            return self.had.clear();
        }
        let now = self.now;
        self.had.retain(|key, had| had.parts > now || waits(*key));
    }

    #[cfg(test)]
    pub(super) fn known_count(&self) -> usize {
        self.had.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What each of those who want `wants` bytes again and again got when `bytes` were moved in pieces of that length.
    fn served(bytes: u64, wants: &[(u32, u32)]) -> Vec<u64> {
        let mut fair = Fair::default();
        for (key, (share, _)) in wants.iter().enumerate() {
            fair.came(key, *share, false);
        }
        let mut got = vec![0; wants.len()];
        while got.iter().sum::<u64>() < bytes {
            let next = fair.next(0..wants.len()).unwrap();
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
            [(SHARE_MAX, 4096), (SHARE_MAX / 3, 65_536)],
        ] {
            let got = served(1 << 30, &wants);
            let ratio = got[0] as f64 / got[1] as f64;
            assert!((2.95..3.05).contains(&ratio), "{wants:?}: {ratio}");
        }
    }

    #[test]
    fn who_comes_back_has_saved_nothing_up_and_owes_what_it_had() {
        let mut fair = Fair::default();
        fair.came(0, 100, false);
        fair.came(1, 100, false);
        for _ in 0..100 {
            fair.took(0, 4096);
        }
        // It waited all the while.
        assert_eq!(fair.next([0, 1].into_iter()), Some(1));
        // Or it went and comes again: one piece, and they are even.
        fair.came(1, 100, false);
        assert_eq!(fair.next([0, 1].into_iter()), Some(1));
        fair.took(1, 4096);
        assert_eq!(fair.next([0, 1].into_iter()), Some(0));
        // Having had much and coming back at once is no way to begin anew.
        fair.took(0, 1 << 20);
        fair.forget(|key| key == 1);
        fair.came(0, 100, false);
        assert_eq!(fair.next([0, 1].into_iter()), Some(1));
    }

    #[test]
    fn who_owes_nothing_and_does_not_wait_is_forgotten() {
        let mut fair = Fair::default();
        fair.came(0, 100, false);
        for key in 1..1000 {
            fair.came(key, 100, false);
            for _ in 0..2 {
                let next = fair.next([0, key].into_iter()).unwrap();
                fair.took(next, 4096);
            }
            fair.forget(|key| key == 0);
            assert!(fair.known_count() <= 3, "{fair:?}");
        }
        fair.forget(|_| false);
        assert_eq!(fair.known_count(), 0);
    }
}
