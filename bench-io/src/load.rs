//! Generates load: streams of operations that keep a target busy, and their results.
//!
//! ```text
//!   prepare | ramp (not counted) | measured .......... | what is in flight ends | flush
//!           ^ all jobs together  ^ begin               ^ end
//! ```
//!
//! A stream reads, writes, or mixes both over a range of blocks, in order or randomly, with its own depth. Only
//! operations that end between `begin` and `end` count, over that time, so neither the start nor the tail is measured.

use std::collections::HashSet;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Result, bail, ensure};
use hdrhistogram::Histogram;

use crate::shuffle;
use crate::stop;
use crate::targets::{Flight, Target, Way};

/// Time without an answer after which a device is considered lost.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(60);

/// Longest sleep, so that the end of the time is noticed.
const WAIT: Duration = Duration::from_millis(50);

/// Longest latency that the histogram distinguishes.
const LATENCY_NS_MAX: u64 = 100_000_000_000;

/// A stream of operations.
#[derive(Debug)]
pub(crate) struct Stream {
    device: u32,
    depth: u32,
    read_percent: u32,
    /// Blocks for reads and for writes; a stream in one direction has one of them.
    parts: [Option<Part>; 2],
    started: [u64; 2],
    inflight_count: u32,
}

/// A range of blocks, used repeatedly in one order.
#[derive(Debug)]
struct Part {
    first: u64,
    count: u64,
    /// Random order; otherwise sequential.
    random: bool,
    /// Blocks in flight, never more than the stream's depth.
    busy: HashSet<u64>,
    next: u64,
}

#[derive(Clone, Debug)]
pub(crate) struct StreamPlan {
    pub(crate) device: u32,
    /// First block and count.
    pub(crate) blocks: (u64, u64),
    pub(crate) reads: bool,
    pub(crate) writes: bool,
    /// Percentage of reads in a stream that does both.
    pub(crate) read_percent: u32,
    pub(crate) random: bool,
    pub(crate) depth: u32,
}

impl Stream {
    /// Creates the stream. With both directions it reads the first half of its blocks and writes the second, because
    /// two operations on one block would wait for each other.
    pub(crate) fn new(plan: &StreamPlan) -> Self {
        let (first, count) = plan.blocks;
        let part = |first, count| Some(Part::new(first, count, plan.random));
        let parts = match (plan.reads, plan.writes) {
            (true, true) => [
                part(first, count / 2),
                part(first + count / 2, count - count / 2),
            ],
            (true, false) => [part(first, count), None],
            _ => [None, part(first, count)],
        };
        Self {
            device: plan.device,
            depth: plan.depth,
            read_percent: plan.read_percent,
            parts,
            started: [0; 2],
            inflight_count: 0,
        }
    }

    /// Returns the next operation, unless its block is in flight. With `once` no block is used twice.
    fn next(&mut self, once: bool) -> Option<(Way, u64)> {
        let done = |part: &Option<Part>| match part {
            None => true,
            Some(part) => once && part.next >= part.count,
        };
        let way = match (done(&self.parts[0]), done(&self.parts[1])) {
            (true, true) => return None,
            (false, true) => Way::Read,
            (true, false) => Way::Write,
            (false, false) => {
                // Keeps the ratio of reads at every moment, deterministically.
                let all = self.started[0] + self.started[1];
                match self.started[0] * 100 <= all * u64::from(self.read_percent) {
                    true => Way::Read,
                    false => Way::Write,
                }
            }
        };
        let block = self.parts[way as usize].as_mut()?.next_block()?;
        self.started[way as usize] += 1;
        self.inflight_count += 1;
        Some((way, block))
    }

    fn ended(&mut self, flight: &Flight) {
        self.inflight_count -= 1;
        if let Some(part) = &mut self.parts[flight.way as usize] {
            part.busy.remove(&flight.block);
        }
    }
}

impl Part {
    fn new(first: u64, count: u64, random: bool) -> Self {
        Self {
            first,
            count,
            random,
            busy: HashSet::new(),
            next: 0,
        }
    }

    fn next_block(&mut self) -> Option<u64> {
        let place = self.next % self.count;
        let block = match self.random {
            true => shuffle::block(place, self.count),
            false => place,
        };
        let block = self.first + block;
        if !self.busy.insert(block) {
            return None;
        }
        self.next += 1;
        Some(block)
    }
}

/// When to measure.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Timing {
    pub(crate) ramp: Duration,
    /// Zero runs once over all blocks.
    pub(crate) runtime: Duration,
}

/// Results of one direction.
#[derive(Clone, Debug)]
pub(crate) struct Tally {
    pub(crate) ops: u64,
    pub(crate) latency_ns: Histogram<u64>,
}

impl Tally {
    fn new() -> Self {
        let latency_ns = Histogram::new_with_bounds(1, LATENCY_NS_MAX, 3);
        Self {
            ops: 0,
            latency_ns: latency_ns.expect("fixed bounds"),
        }
    }
}

/// Results of a job.
#[derive(Clone, Debug)]
pub(crate) struct Outcome {
    pub(crate) ways: [Tally; 2],
    /// Between `begin` and `end`, or until the last flush if the load ran once over all blocks.
    pub(crate) seconds: f64,
}

impl Outcome {
    pub(crate) fn new() -> Self {
        Self {
            ways: [Tally::new(), Tally::new()],
            seconds: 0.0,
        }
    }

    /// Adds a job that ran at the same time.
    pub(crate) fn add(&mut self, other: &Self) {
        for (mine, theirs) in self.ways.iter_mut().zip(&other.ways) {
            mine.ops += theirs.ops;
            // Both histograms have the same bounds.
            let _ = mine.latency_ns.add(&theirs.latency_ns);
        }
        self.seconds = self.seconds.max(other.seconds);
    }
}

/// Runs `streams` on `target` from `start`. `moved` counts operations for the progress display; `failed` is set by a
/// parallel job.
///
/// # Errors
/// An operation fails, none ends for a minute, or a parallel job failed.
pub(crate) fn run(
    target: &mut dyn Target,
    streams: &mut [Stream],
    start: Instant,
    timing: Timing,
    moved: &[AtomicU64; 2],
    failed: &AtomicBool,
) -> Result<Outcome> {
    let once = timing.runtime.is_zero();
    let begin = start + timing.ramp;
    let end = begin + timing.runtime;
    let mut outcome = Outcome::new();
    let mut ended = Vec::new();
    let mut last_end = Instant::now();
    loop {
        let over = !once && Instant::now() >= end;
        if !over {
            submit(target, streams, once)?;
        }
        if streams.iter().all(|stream| stream.inflight_count == 0) {
            break;
        }
        target.wait(WAIT, &mut ended)?;
        stop::check()?;
        ensure!(!failed.load(Ordering::Relaxed), "another job failed");
        let now = Instant::now();
        if ended.is_empty() && now - last_end > ANSWER_TIMEOUT {
            bail!("no operation ended for {} s", ANSWER_TIMEOUT.as_secs());
        }
        if !ended.is_empty() {
            last_end = now;
        }
        for flight in ended.drain(..) {
            streams[flight.stream].ended(&flight);
            moved[flight.way as usize].fetch_add(1, Ordering::Relaxed);
            if once || (begin..end).contains(&now) {
                let tally = &mut outcome.ways[flight.way as usize];
                tally.ops += 1;
                let latency_ns = (now - flight.since).as_nanos() as u64;
                tally.latency_ns.saturating_record(latency_ns.max(1));
            }
        }
    }
    target.flush()?;
    outcome.seconds = match once {
        true => start.elapsed().as_secs_f64(),
        false => timing.runtime.as_secs_f64(),
    };
    let ops: u64 = outcome.ways.iter().map(|tally| tally.ops).sum();
    ensure!(
        ops > 0,
        "no operation ended within the measured time; use a longer runtime or a smaller bs"
    );
    Ok(outcome)
}

fn submit(target: &mut dyn Target, streams: &mut [Stream], once: bool) -> Result<()> {
    for (index, stream) in streams.iter_mut().enumerate() {
        while stream.inflight_count < stream.depth
            && let Some((way, block)) = stream.next(once)
        {
            target.start(Flight {
                way,
                device: stream.device,
                block,
                stream: index,
                since: Instant::now(),
            })?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Ends operations in order, two at a time, and records them.
    #[derive(Default)]
    struct Fake {
        waiting: Vec<Flight>,
        seen: Vec<(Way, u64)>,
        most: usize,
        flushes: u32,
    }

    impl Target for Fake {
        fn start(&mut self, flight: Flight) -> Result<()> {
            let same = |other: &Flight| other.block == flight.block && other.way == flight.way;
            assert!(!self.waiting.iter().any(same), "{flight:?} twice at a time");
            self.waiting.push(flight);
            self.seen.push((flight.way, flight.block));
            self.most = self.most.max(self.waiting.len());
            Ok(())
        }

        fn wait(&mut self, _: Duration, ended: &mut Vec<Flight>) -> Result<()> {
            let count = self.waiting.len().min(2);
            ended.extend(self.waiting.drain(..count));
            Ok(())
        }

        fn flush(&mut self) -> Result<()> {
            self.flushes += 1;
            Ok(())
        }
    }

    fn plan(reads: bool, writes: bool, random: bool) -> StreamPlan {
        StreamPlan {
            device: 0,
            blocks: (10, 40),
            reads,
            writes,
            read_percent: 75,
            random,
            depth: 8,
        }
    }

    fn once(plan: &StreamPlan) -> (Fake, Outcome) {
        load(plan, Duration::ZERO)
    }

    fn load(plan: &StreamPlan, runtime: Duration) -> (Fake, Outcome) {
        let mut fake = Fake::default();
        let timing = Timing {
            ramp: Duration::ZERO,
            runtime,
        };
        let moved = [AtomicU64::new(0), AtomicU64::new(0)];
        let mut streams = [Stream::new(plan)];
        let outcome = run(
            &mut fake,
            &mut streams,
            Instant::now(),
            timing,
            &moved,
            &AtomicBool::new(false),
        )
        .unwrap();
        (fake, outcome)
    }

    #[test]
    fn once_over_moves_every_block_once_in_or_out_of_order() {
        for random in [false, true] {
            let (fake, outcome) = once(&plan(true, false, random));
            assert_eq!((fake.most, fake.flushes), (8, 1));
            assert_eq!(outcome.ways.map(|tally| tally.ops), [40, 0]);
            let order: Vec<u64> = fake.seen.iter().map(|(_, block)| *block).collect();
            let mut sorted = order.clone();
            sorted.sort_unstable();
            assert_eq!(sorted, (10..50).collect::<Vec<_>>());
            assert_eq!(order == sorted, !random);
        }
    }

    #[test]
    fn a_mix_keeps_its_shares_and_its_halves() {
        let (fake, outcome) = once(&plan(true, true, false));
        assert_eq!(outcome.ways.map(|tally| tally.ops), [20, 20]);
        let reads = fake.seen.iter().filter(|(way, _)| *way == Way::Read);
        assert!(reads.clone().all(|(_, block)| (10..30).contains(block)));
        // Until the reads are exhausted, three of four operations read.
        let early = fake.seen[..24].iter().filter(|(way, _)| *way == Way::Read);
        assert_eq!(early.count(), 18);
    }

    #[test]
    fn a_stream_over_many_blocks_keeps_only_what_is_in_flight() {
        for random in [false, true] {
            let mut stream = Stream::new(&StreamPlan {
                blocks: (5, 1 << 50),
                ..plan(true, false, random)
            });
            let mut flown = Vec::new();
            for _ in 0..1000 {
                let (way, block) = stream.next(false).unwrap();
                flown.push(block);
                assert_eq!(stream.parts[0].as_ref().unwrap().busy.len(), 1);
                stream.ended(&Flight {
                    way,
                    device: 0,
                    block,
                    stream: 0,
                    since: Instant::now(),
                });
            }
            assert!(flown.iter().all(|block| (5..5 + (1 << 50)).contains(block)));
            assert_eq!(flown.is_sorted(), !random);
        }
    }

    #[test]
    fn a_load_with_more_depth_than_blocks_waits_for_them() {
        let narrow = StreamPlan {
            blocks: (0, 3),
            ..plan(false, true, true)
        };
        let (fake, _) = load(&narrow, Duration::from_millis(200));
        assert_eq!(fake.most, 3);
        assert!(fake.seen.len() > 3);
    }

    #[test]
    fn a_job_beside_one_that_failed_ends() {
        let mut fake = Fake::default();
        let timing = Timing {
            ramp: Duration::ZERO,
            runtime: Duration::from_secs(3600),
        };
        let moved = [AtomicU64::new(0), AtomicU64::new(0)];
        let mut streams = [Stream::new(&plan(true, false, false))];
        let failed = AtomicBool::new(true);
        let start = Instant::now();
        let ended = run(&mut fake, &mut streams, start, timing, &moved, &failed);
        assert!(ended.unwrap_err().to_string().contains("another job"));
    }
}
