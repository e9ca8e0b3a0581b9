//! How much jobs ask of one way of a device, and how near others may come to one that asks for little.
//!
//! What is in the kernel cannot be overtaken: whoever reads one small tile after the other waits each time for all that a
//! flood has in flight, however the turns go, and whoever has little under way gets less than its part. So beside a job that
//! asks for less, another one's pieces go only while there is not more in flight than the device moves in the time it takes to
//! answer, and a quarter of what the other asks for; beside the smallest a drive is then busy some three quarters of the time.
//! Without such a neighbour everybody has the whole window.
//!
//! Of a job counts the most it had waiting and in flight within the last one or two spans of bytes that were handed over:
//! who reads one tile after the other has nothing there half of the time.

use std::collections::BTreeMap;

use super::owner::{Job, User};

/// A drive answers within about so long. What it moves in this time keeps it busy.
const ANSWER_US: u64 = 100;

/// A span is so many windows of 10 ms.
const SPAN_WINDOWS: u64 = 10;

/// The shortest pieces beside a job that asks for little.
const NEAR_PIECE_BYTES_MIN: u32 = 32 << 10;

/// Of so many pieces the nearer window consists.
const NEAR_PIECES: u64 = 8;

/// Jobs of one way.
#[derive(Debug)]
pub(super) struct Neighbours {
    window_bytes: u64,
    jobs: BTreeMap<Job, Asks>,
    /// Handed over in this span.
    span_bytes: u64,
}

#[derive(Debug, Default)]
struct Asks {
    /// Waiting and in flight.
    now_bytes: u64,
    inflight_bytes: u64,
    /// The most of this span, and of the one before.
    most_bytes: [u64; 2],
}

impl Asks {
    fn most(&self) -> u64 {
        self.most_bytes[0].max(self.most_bytes[1])
    }
}

impl Neighbours {
    pub(super) fn new(window_bytes: u64) -> Self {
        Self {
            window_bytes,
            jobs: BTreeMap::new(),
            span_bytes: 0,
        }
    }

    pub(super) fn asks(&mut self, job: Job, bytes: u32) {
        let asks = self.jobs.entry(job).or_default();
        asks.now_bytes += u64::from(bytes);
        asks.most_bytes[0] = asks.most_bytes[0].max(asks.now_bytes);
    }

    /// So much that was handed over has ended.
    pub(super) fn ended(&mut self, job: Job, bytes: u32) {
        self.gave_up(job, bytes);
        let asks = self.jobs.get_mut(&job).expect("it asked");
        asks.inflight_bytes -= u64::from(bytes);
    }

    /// So much that was not handed over will not be.
    pub(super) fn gave_up(&mut self, job: Job, bytes: u32) {
        let asks = self.jobs.get_mut(&job).expect("it asked");
        asks.now_bytes -= u64::from(bytes);
    }

    pub(super) fn handed_over(&mut self, job: Job, bytes: u32) {
        let asks = self.jobs.get_mut(&job).expect("it asked");
        asks.inflight_bytes += u64::from(bytes);
        self.span_bytes += u64::from(bytes);
        if self.span_bytes < SPAN_WINDOWS * self.window_bytes {
            return;
        }
        self.span_bytes = 0;
        for asks in self.jobs.values_mut() {
            asks.most_bytes = [asks.now_bytes, asks.most_bytes[0]];
        }
        self.jobs.retain(|_, asks| asks.most() > 0);
    }

    /// What may be in flight with the next piece of `job`, all together: what the one beside whom it goes has there itself is
    /// no reason to leave the drive idle.
    pub(super) fn window_bytes(&self, job: Job) -> u64 {
        match self.near(job) {
            Some((least, near)) => (near + self.jobs[&least].inflight_bytes).min(self.window_bytes),
            None => self.window_bytes,
        }
    }

    /// How long a piece of `job` may be.
    pub(super) fn piece_bytes_max(&self, job: Job) -> u32 {
        let Some((_, near)) = self.near(job) else {
            return u32::MAX;
        };
        let block = u64::from(offload_api::BLOCK_BYTES);
        let bytes = near / NEAR_PIECES / block * block;
        bytes.clamp(NEAR_PIECE_BYTES_MIN.into(), u32::MAX.into()) as u32
    }

    /// Who asks for least, if `job` asks for more, and the window of others beside it; nothing where it does not matter.
    fn near(&self, job: Job) -> Option<(Job, u64)> {
        let own = self.jobs.get(&job)?.most();
        // The daemon's own short writes are few, and wait as well.
        let others = (self.jobs.iter())
            .filter(|(other, _)| **other != job && matches!(other.0, User::Uid(_)));
        let asks_least = others.map(|(other, asks)| (asks.most(), *other)).min();
        let (least_bytes, least) = asks_least?;
        // The longer it takes anyway, the less a short wait matters to it.
        let near = self.answer_bytes() + least_bytes / 4;
        (least_bytes < own && near < self.window_bytes).then_some((least, near))
    }

    /// What the device moves until it answers: a hundredth of a window of 10 ms.
    fn answer_bytes(&self) -> u64 {
        self.window_bytes * ANSWER_US / 10_000
    }
}
