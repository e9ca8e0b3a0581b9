//! Detects devices that have become much slower than measured, within ten seconds.
//!
//! Compares the time in which a device was busy with the time that its bytes would have taken at the measured rates. Operations in
//! flight count as done. Reads and writes run concurrently, so the direction that should take longer counts; a drive that cannot do both
//! at once takes twice as long, which is not slow yet. Many drives slow down one direction while the other runs at its full rate, so a
//! direction counts as slow only if the other is below its full rate.

use std::time::{Duration, Instant};

/// Interval of judgements.
pub const JUDGED_EVERY: Duration = Duration::from_secs(1);

/// Factor from which a device is slow: more than by sharing a bus, less than a tenth of the speed.
const SLOW: f64 = 5.0;

/// Factor below which a device has recovered.
const WELL: f64 = 2.5;

/// Busy time before a judgement: a drive may collect garbage for a second.
const SLOW_AFTER: Duration = Duration::from_secs(3);

/// Good seconds after which a device has recovered.
const WELL_AFTER: u32 = 3;

/// A second with less busy time is ignored.
const BUSY_LEAST: Duration = Duration::from_millis(100);

/// Smaller operations are ignored: they measure the latency, not the rate.
const OPERATION_BYTES_LEAST: u64 = 512 << 10;

#[derive(Clone, Copy, Debug, PartialEq)]
pub enum SlownessChange {
    /// The device has become slow.
    Slow {
        /// Rate while it was busy.
        bytes_per_s: f64,
        /// Time taken divided by the time expected.
        times: f64,
    },
    /// The device is as fast as measured again.
    Well,
}

#[derive(Clone, Copy, Debug, Default)]
struct Work {
    busy: Duration,
    /// Expected time of reads and writes at the measured rates.
    expected: [Duration; 2],
    bytes: u64,
    count: u64,
}

fn longer(expected: [Duration; 2]) -> Duration {
    expected[0].max(expected[1])
}

impl Work {
    fn add(&mut self, more: &Self) {
        self.busy += more.busy;
        for direction in [0, 1] {
            self.expected[direction] += more.expected[direction];
        }
        self.bytes += more.bytes;
        self.count += more.count;
    }
}

fn known(read_bytes_per_s: u64, write_bytes_per_s: u64) -> Option<[f64; 2]> {
    let known = read_bytes_per_s > 0 && write_bytes_per_s > 0;
    known.then_some([read_bytes_per_s as f64, write_bytes_per_s as f64])
}

/// Detector of one device.
#[derive(Clone, Debug)]
pub struct Slowness {
    /// Rates of reads and writes, if both are known.
    bytes_per_s: Option<[f64; 2]>,
    /// Reads and writes in flight, and their expected time.
    inflight_count: u32,
    inflight_expected: [Duration; 2],
    /// Flushes in flight; their time does not count, because other operations wait for them.
    flush_count: u32,
    seen: Instant,
    busy_total: Duration,
    second: Work,
    /// Bad time since the last good second.
    run: Work,
    good_seconds: u32,
    slow: bool,
}

impl Slowness {
    /// Makes a detector for a device with these rates; 0 if unknown.
    pub fn new(read_bytes_per_s: u64, write_bytes_per_s: u64, now: Instant) -> Self {
        Self {
            bytes_per_s: known(read_bytes_per_s, write_bytes_per_s),
            inflight_count: 0,
            inflight_expected: [Duration::ZERO; 2],
            flush_count: 0,
            seen: now,
            busy_total: Duration::ZERO,
            second: Work::default(),
            run: Work::default(),
            good_seconds: 0,
            slow: false,
        }
    }

    /// Whether the device is slow.
    pub fn is_slow(&self) -> bool {
        self.slow
    }

    /// Time with an operation in flight, without flushes.
    pub fn busy(&self) -> Duration {
        self.busy_total
    }

    /// Whether time counts now.
    pub fn is_busy(&self) -> bool {
        self.inflight_count > 0
    }

    /// Counts a read or write handed to the device.
    pub fn started(&mut self, write: bool, bytes: u64, now: Instant) {
        self.pass(now);
        self.inflight_count += 1;
        self.inflight_expected[usize::from(write)] += self.time_of(write, bytes);
    }

    /// Counts its end.
    pub fn ended(&mut self, write: bool, bytes: u64, now: Instant) {
        self.pass(now);
        let expected = self.time_of(write, bytes);
        self.inflight_count -= 1;
        let inflight = &mut self.inflight_expected[usize::from(write)];
        *inflight = inflight.saturating_sub(expected);
        self.second.expected[usize::from(write)] += expected;
        self.second.bytes += bytes;
        self.second.count += 1;
    }

    /// Counts a flush handed to the device.
    pub fn flush_started(&mut self, now: Instant) {
        self.pass(now);
        self.flush_count += 1;
    }

    /// Counts the end of a flush.
    pub fn flush_ended(&mut self, now: Instant) {
        self.pass(now);
        self.flush_count -= 1;
    }

    /// Judges the device. Call every [`JUDGED_EVERY`] while it is busy.
    pub fn judge(&mut self, now: Instant) -> Option<SlownessChange> {
        self.pass(now);
        let second = std::mem::take(&mut self.second);
        if self.bytes_per_s.is_none() || second.busy < BUSY_LEAST {
            return None;
        }
        if second.count > 0 && second.bytes / second.count < OPERATION_BYTES_LEAST {
            return None;
        }
        if second.busy < longer(second.expected).mul_f64(WELL) {
            self.run = Work::default();
            self.good_seconds += 1;
            let well = self.slow && self.good_seconds >= WELL_AFTER;
            self.slow &= !well;
            return well.then_some(SlownessChange::Well);
        }
        self.good_seconds = 0;
        self.run.add(&second);
        // Operations in flight may all end at once, in time.
        let expected = [0, 1]
            .map(|direction| self.run.expected[direction] + self.inflight_expected[direction]);
        let times = self.run.busy.as_secs_f64() / longer(expected).as_secs_f64().max(1e-9);
        if self.slow || self.run.busy < SLOW_AFTER || times < SLOW {
            return None;
        }
        self.slow = true;
        Some(SlownessChange::Slow {
            bytes_per_s: self.run.bytes as f64 / self.run.busy.as_secs_f64(),
            times,
        })
    }

    fn pass(&mut self, now: Instant) {
        let passed = now.saturating_duration_since(self.seen);
        self.seen = now;
        if self.inflight_count > 0 && self.flush_count == 0 {
            self.second.busy += passed;
            self.busy_total += passed;
        }
    }

    fn time_of(&self, write: bool, bytes: u64) -> Duration {
        match self.bytes_per_s {
            Some(rates) => Duration::from_secs_f64(bytes as f64 / rates[usize::from(write)]),
            None => Duration::ZERO,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    /// A device measured at 620/320 MB/s that moves 4 MiB tiles, some at a time, at `share` of that.
    struct Drive {
        slowness: Slowness,
        start: Instant,
        now: Instant,
        judged: Instant,
    }

    impl Drive {
        fn new() -> Self {
            let start = Instant::now();
            Self {
                slowness: Slowness::new(620_000_000, 320_000_000, start),
                start,
                now: start,
                judged: start,
            }
        }

        /// Runs until something changes or `seconds` are over. Returns the change and its time in seconds after the start.
        fn run(
            &mut self,
            share: f64,
            seconds: f64,
            bytes: u64,
            depth: u32,
        ) -> Option<(SlownessChange, f64)> {
            let end = self.now + Duration::from_secs_f64(seconds);
            let time = Duration::from_secs_f64(bytes as f64 / 620e6 / share);
            for _ in 0..depth {
                self.slowness.started(false, bytes, self.now);
            }
            let mut found = None;
            while self.now < end && found.is_none() {
                let ends = self.now + time;
                while self.judged + JUDGED_EVERY <= ends && found.is_none() {
                    self.judged += JUDGED_EVERY;
                    let change = self.slowness.judge(self.judged);
                    found = change.map(|c| (c, (self.judged - self.start).as_secs_f64()));
                }
                self.now = ends;
                self.slowness.ended(false, bytes, self.now);
                self.slowness.started(false, bytes, self.now);
            }
            for _ in 0..depth {
                self.slowness.ended(false, bytes, self.now);
            }
            found
        }
    }

    #[test]
    fn a_drive_ten_times_slower_is_named_within_ten_seconds_at_any_depth() {
        for (bytes, depth) in [(MIB, 1), (4 * MIB, 8), (4 * MIB, 64), (16 * MIB, 32)] {
            let mut drive = Drive::new();
            assert_eq!(drive.run(1.0, 30.0, bytes, depth), None);
            let before = (drive.now - drive.start).as_secs_f64();
            let (change, at) = drive.run(0.1, 30.0, bytes, depth).expect("it is named");
            assert!(at - before <= 10.0, "{bytes} x {depth}: {} s", at - before);
            let SlownessChange::Slow { bytes_per_s, times } = change else {
                panic!("{change:?}")
            };
            assert!((50e6..130e6).contains(&bytes_per_s), "{bytes_per_s}");
            assert!(times >= SLOW);
            assert!(drive.slowness.is_slow());
            let (change, _) = drive
                .run(1.0, 30.0, bytes, depth)
                .expect("it is well again");
            assert_eq!(change, SlownessChange::Well);
        }
    }

    #[test]
    fn a_drive_at_half_its_speed_and_one_that_is_asked_for_little_are_not_named() {
        let mut drive = Drive::new();
        assert_eq!(drive.run(0.5, 60.0, 4 * MIB, 8), None);
        let mut idle = Drive::new();
        for _ in 0..600 {
            assert_eq!(idle.run(1.0, 0.001, MIB, 1), None);
            idle.now += Duration::from_millis(100);
        }
    }

    /// Reads and writes at the same time, at these fractions of the measured rates. Returns the first change within `seconds`.
    fn both_ways(shares: [f64; 2], seconds: f64) -> Option<(SlownessChange, f64)> {
        let start = Instant::now();
        let mut slowness = Slowness::new(620_000_000, 320_000_000, start);
        let times = [620e6 * shares[0], 320e6 * shares[1]]
            .map(|rate| Duration::from_secs_f64(4.0 * MIB as f64 / rate));
        let mut ends = times.map(|time| start + time);
        for direction in [false, true] {
            (0..2).for_each(|_| slowness.started(direction, 4 * MIB, start));
        }
        let mut judged = start + JUDGED_EVERY;
        while judged < start + Duration::from_secs_f64(seconds) {
            let direction = usize::from(ends[1] < ends[0]);
            let now = ends[direction];
            while judged <= now {
                if let Some(change) = slowness.judge(judged) {
                    return Some((change, (judged - start).as_secs_f64()));
                }
                judged += JUDGED_EVERY;
            }
            slowness.ended(direction == 1, 4 * MIB, now);
            slowness.started(direction == 1, 4 * MIB, now);
            ends[direction] += times[direction];
        }
        None
    }

    #[test]
    fn reads_and_writes_at_once_make_nobody_look_faster_nor_a_drive_that_does_one_at_a_time_slow() {
        let (change, at) = both_ways([0.1, 0.1], 30.0).expect("it is named");
        assert!(at <= 10.0, "{at} s");
        assert!(
            matches!(change, SlownessChange::Slow { times, .. } if times > 8.0),
            "{change:?}"
        );
        for shares in [[1.0, 1.0], [0.5, 0.5], [0.9, 0.25]] {
            assert_eq!(both_ways(shares, 30.0), None, "{shares:?}");
        }
    }

    #[test]
    fn a_drive_that_answers_nothing_is_named() {
        let mut drive = Drive::new();
        let start = drive.now;
        drive.slowness.started(true, 4 * MIB, start);
        let named = (1..=10).find(|second| {
            let now = start + JUDGED_EVERY * *second;
            matches!(drive.slowness.judge(now), Some(SlownessChange::Slow { bytes_per_s, .. }) if bytes_per_s == 0.0)
        });
        assert_eq!(named, Some(3));
    }

    #[test]
    fn time_in_flushes_and_small_operations_name_nobody() {
        let start = Instant::now();
        let mut slowness = Slowness::new(620_000_000, 320_000_000, start);
        slowness.started(true, 4 * MIB, start);
        slowness.flush_started(start);
        for second in 1..=20 {
            assert_eq!(slowness.judge(start + JUDGED_EVERY * second), None);
        }
        slowness.flush_ended(start + JUDGED_EVERY * 20);
        slowness.ended(true, 4 * MIB, start + JUDGED_EVERY * 20);
        let mut small = Drive::new();
        assert_eq!(small.run(0.01, 60.0, 4096, 1), None);
    }

    #[test]
    fn nothing_is_said_about_a_drive_nobody_measured() {
        let start = Instant::now();
        let mut slowness = Slowness::new(0, 320_000_000, start);
        slowness.started(false, 4 * MIB, start);
        for second in 1..=20 {
            assert_eq!(slowness.judge(start + JUDGED_EVERY * second), None);
        }
        assert_eq!(slowness.busy(), Duration::from_secs(20));
    }
}
