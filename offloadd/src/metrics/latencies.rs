//! Histogram of durations with fixed buckets: eight per power of two, from a microsecond to half a minute.
//!
//! The buckets are fixed, so that memory is known and histograms can be subtracted. A percentile is the upper bound of its bucket:
//! never too small, and at most an eighth too large.

use std::time::Duration;

/// Logarithm of the first bucket's upper bound in nanoseconds (1 µs).
const FIRST_OCTAVE: u32 = 10;

/// Logarithm of the last bucket's lower bound in nanoseconds (34 s).
const LAST_OCTAVE: u32 = 35;

/// Logarithm of the buckets per power of two.
const SUB_BITS: u32 = 3;

/// Number of buckets.
const BUCKETS: usize = 2 + ((LAST_OCTAVE - FIRST_OCTAVE) << SUB_BITS) as usize;

/// Counts by duration.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Latencies {
    buckets: [u64; BUCKETS],
    sum_ns: u64,
}

impl Default for Latencies {
    fn default() -> Self {
        Self {
            buckets: [0; BUCKETS],
            sum_ns: 0,
        }
    }
}

impl Latencies {
    /// Adds a duration.
    pub fn record(&mut self, ns: u64) {
        self.buckets[bucket_of(ns)] += 1;
        self.sum_ns = self.sum_ns.saturating_add(ns);
    }

    /// Number of durations.
    pub fn count(&self) -> u64 {
        self.buckets.iter().sum()
    }

    /// Sum of the durations.
    pub fn sum_ns(&self) -> u64 {
        self.sum_ns
    }

    /// Returns a quantile, from 0 to 1; `None` without durations. Durations beyond the last bound count as that bound.
    pub fn quantile(&self, quantile: f64) -> Option<Duration> {
        let rank = ((self.count() as f64 * quantile).ceil() as u64).max(1);
        let mut seen = 0;
        let found = self.buckets.iter().position(|count| {
            seen += count;
            seen >= rank
        })?;
        Some(Duration::from_nanos(bound_ns(found.min(BUCKETS - 2))))
    }

    /// Returns the durations added since `earlier`, a copy of the same histogram.
    pub fn since(&self, earlier: &Self) -> Self {
        let mut later = self.clone();
        for (count, before) in later.buckets.iter_mut().zip(earlier.buckets) {
            *count = count.saturating_sub(before);
        }
        later.sum_ns = later.sum_ns.saturating_sub(earlier.sum_ns);
        later
    }

    /// Adds another histogram.
    pub fn add(&mut self, other: &Self) {
        for (count, more) in self.buckets.iter_mut().zip(other.buckets) {
            *count += more;
        }
        self.sum_ns = self.sum_ns.saturating_add(other.sum_ns);
    }

    /// Buckets for Prometheus: the bound of each power of two in seconds, and the count since the previous bound.
    pub fn octaves(&self) -> Vec<(f64, u64)> {
        let (inner, beyond) = self.buckets.split_at(BUCKETS - 1);
        let mut octaves = vec![(seconds(bound_ns(0)), inner[0])];
        for (index, counts) in inner[1..].chunks(1 << SUB_BITS).enumerate() {
            let last = (index + 1) << SUB_BITS;
            octaves.push((seconds(bound_ns(last)), counts.iter().sum()));
        }
        octaves.push((f64::INFINITY, beyond[0]));
        octaves
    }

    /// Packs for a message: the index of the first non-empty bucket, and the counts up to the last non-empty one.
    pub fn pack(&self) -> (u32, Vec<u64>) {
        let filled = |count: &u64| *count > 0;
        let Some(first) = self.buckets.iter().position(filled) else {
            return (0, Vec::new());
        };
        let last = self
            .buckets
            .iter()
            .rposition(filled)
            .expect("a bucket is filled");
        (first as u32, self.buckets[first..=last].to_vec())
    }

    /// Reverses [`Self::pack`]; `None` if the input is not valid.
    pub fn unpack(first: u32, counts: &[u64], sum_ns: u64) -> Option<Self> {
        let first = first as usize;
        let mut unpacked = Self {
            sum_ns,
            ..Self::default()
        };
        let end = first.checked_add(counts.len())?;
        unpacked
            .buckets
            .get_mut(first..end)?
            .copy_from_slice(counts);
        Some(unpacked)
    }
}

fn seconds(ns: u64) -> f64 {
    ns as f64 / 1e9
}

/// Index of a duration's bucket, whose upper bound is inclusive.
fn bucket_of(ns: u64) -> usize {
    let below = ns.saturating_sub(1);
    let octave = below.checked_ilog2().unwrap_or(0);
    if octave < FIRST_OCTAVE {
        return 0;
    }
    if octave >= LAST_OCTAVE {
        return BUCKETS - 1;
    }
    let sub = (below >> (octave - SUB_BITS)) as usize & ((1 << SUB_BITS) - 1);
    1 + (((octave - FIRST_OCTAVE) as usize) << SUB_BITS) + sub
}

/// Upper bound of a bucket; the last one has none.
fn bound_ns(bucket: usize) -> u64 {
    let Some(inner) = bucket.checked_sub(1) else {
        return 1 << FIRST_OCTAVE;
    };
    let octave = FIRST_OCTAVE + (inner >> SUB_BITS) as u32;
    let sub = (inner & ((1 << SUB_BITS) - 1)) as u64;
    ((1 << SUB_BITS) + sub + 1) << (octave - SUB_BITS)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_duration_lies_between_the_bounds_of_its_bucket() {
        let around = (0..64).flat_map(|bit| {
            let power = 1u64 << bit;
            [power - 1, power, power + 1, power + power / 3]
        });
        for ns in around {
            let bucket = bucket_of(ns);
            if bucket < BUCKETS - 1 {
                assert!(ns <= bound_ns(bucket), "{ns} in {bucket}");
            }
            if bucket > 0 {
                assert!(ns > bound_ns(bucket - 1), "{ns} in {bucket}");
            }
        }
        assert_eq!(bound_ns(BUCKETS - 2), 1 << LAST_OCTAVE);
    }

    #[test]
    fn percentiles_are_never_too_small_and_at_most_an_eighth_too_large() {
        let mut latencies = Latencies::default();
        assert_eq!(latencies.quantile(0.5), None);
        for us in 1..=1000 {
            latencies.record(us * 1000);
        }
        for (share, true_us) in [(0.5, 500.0), (0.99, 990.0), (1.0, 1000.0)] {
            let us = latencies.quantile(share).unwrap().as_secs_f64() * 1e6;
            assert!(
                (true_us..true_us * 1.125).contains(&us),
                "{share}: {us} for {true_us}"
            );
        }
        assert_eq!(latencies.count(), 1000);
        assert_eq!(latencies.sum_ns(), 500_500_000);
        latencies.record(u64::MAX);
        assert_eq!(
            latencies.quantile(1.0),
            Some(Duration::from_nanos(1 << LAST_OCTAVE))
        );
    }

    #[test]
    fn a_difference_holds_what_came_in_between() {
        let mut latencies = Latencies::default();
        latencies.record(5_000);
        let earlier = latencies.clone();
        latencies.record(70_000_000);
        latencies.record(70_000_000);
        let between = latencies.since(&earlier);
        assert_eq!((between.count(), between.sum_ns()), (2, 140_000_000));
        assert!(between.quantile(0.01).unwrap() >= Duration::from_millis(70));
        let mut both = earlier;
        both.add(&between);
        assert_eq!(both, latencies);
    }

    #[test]
    fn packing_keeps_everything_and_nonsense_does_not_unpack() {
        let mut latencies = Latencies::default();
        assert_eq!(latencies.pack(), (0, vec![]));
        for ns in [0, 900, 40_000, 3_000_000_000, u64::MAX / 2] {
            latencies.record(ns);
            let (first, counts) = latencies.pack();
            let unpacked = Latencies::unpack(first, &counts, latencies.sum_ns());
            assert_eq!(unpacked.as_ref(), Some(&latencies));
        }
        assert_eq!(Latencies::unpack(BUCKETS as u32, &[1], 0), None);
        assert_eq!(Latencies::unpack(u32::MAX, &[1], 0), None);
        assert_eq!(Latencies::unpack(0, &[0; BUCKETS + 1], 0), None);
    }

    #[test]
    fn octaves_lose_no_count() {
        let mut latencies = Latencies::default();
        for bit in 0..64 {
            latencies.record(1 << bit);
        }
        let octaves = latencies.octaves();
        assert_eq!(octaves.iter().map(|(_, count)| count).sum::<u64>(), 64);
        assert!(octaves.windows(2).all(|pair| pair[0].0 < pair[1].0));
        // Powers of two are bounds themselves: eleven of them up to the first.
        assert_eq!(octaves[0], (1.024e-6, 11));
        assert!(octaves[1..octaves.len() - 1].iter().all(|o| o.1 == 1));
    }
}
