//! Samples the clock, the processor and the drives while jobs run, so that CPU time and the drives' traffic cover
//! the same seconds as the bytes.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crate::drive::Drive;
use crate::figures::Meanwhile;
use crate::load::Timing;
use crate::machine::{self, IdleTime};
use crate::progress::Progress;

/// Sources of the samples.
#[derive(Clone, Debug)]
pub(crate) struct SampleSources {
    /// `None` without a daemon.
    pub(crate) daemon_pid: Option<u32>,
    pub(crate) block_bytes: u32,
    /// All drives below the measured files.
    pub(crate) drives: Vec<Drive>,
}

impl SampleSources {
    fn now(&self) -> Moment {
        Moment {
            mine_s: machine::cpu_seconds(std::process::id()).unwrap_or(0.0),
            daemon_s: self.daemon_pid.and_then(machine::cpu_seconds),
            idle: IdleTime::now(),
            moved: moved(&self.drives),
        }
    }
}

/// Samples of one measurement.
pub(crate) struct Watch<'a> {
    watched: SampleSources,
    progress: &'a Progress,
    start: Instant,
    begin: Instant,
    end: Option<Instant>,
    at_begin: Option<Moment>,
    at_end: Option<Moment>,
    what: String,
    moved: Arc<[AtomicU64; 2]>,
}

/// Processor time and drive traffic up to a moment.
#[derive(Clone, Copy, Debug)]
struct Moment {
    mine_s: f64,
    daemon_s: Option<f64>,
    idle: Option<IdleTime>,
    moved: Option<[u64; 2]>,
}

impl<'a> Watch<'a> {
    pub(crate) fn new(
        watched: SampleSources,
        progress: &'a Progress,
        what: &str,
        start: Instant,
        timing: Timing,
        moved: Arc<[AtomicU64; 2]>,
    ) -> Self {
        let begin = start + timing.ramp;
        let once = timing.runtime.is_zero();
        let at_begin = once.then(|| watched.now());
        Self {
            watched,
            progress,
            start,
            begin,
            end: (!once).then(|| begin + timing.runtime),
            at_begin,
            at_end: None,
            what: what.to_owned(),
            moved,
        }
    }

    /// Sleeps until the next sample or progress update.
    pub(crate) fn sleep(&self) -> Duration {
        let next = match (self.at_begin, self.at_end, self.end) {
            (None, _, _) => Some(self.begin),
            (_, None, end) => end,
            _ => None,
        };
        let left = next.map(|next| next.saturating_duration_since(Instant::now()));
        left.unwrap_or(Duration::MAX)
            .min(Duration::from_millis(100))
    }

    pub(crate) fn sample(&mut self) {
        let now = Instant::now();
        if self.at_begin.is_none() && now >= self.begin {
            self.at_begin = Some(self.watched.now());
        }
        if self.at_end.is_none() && self.end.is_some_and(|end| now >= end) {
            self.at_end = Some(self.watched.now());
        }
        let bytes = |way: usize| {
            self.moved[way].load(Ordering::Relaxed) * u64::from(self.watched.block_bytes)
        };
        self.progress
            .show(&self.what, [bytes(0), bytes(1)], self.start, self.end);
    }

    pub(crate) fn used(&self) -> Meanwhile {
        let Some(first) = self.at_begin else {
            return Meanwhile::default();
        };
        let last = self.at_end.unwrap_or_else(|| self.watched.now());
        let share = |last: IdleTime, first| last.share_since(first);
        Meanwhile {
            bench_io_s: last.mine_s - first.mine_s,
            daemon_s: last
                .daemon_s
                .zip(first.daemon_s)
                .map(|(last, first)| last - first),
            idle_share: last
                .idle
                .zip(first.idle)
                .and_then(|(last, first)| share(last, first)),
            drives_bytes: last
                .moved
                .zip(first.moved)
                .map(|(last, first)| [0, 1].map(|way: usize| last[way].saturating_sub(first[way]))),
        }
    }
}

/// Bytes moved by all drives; `None` if one does not report it, or there is none.
fn moved(drives: &[Drive]) -> Option<[u64; 2]> {
    let mut all = (!drives.is_empty()).then_some([0; 2])?;
    for drive in drives {
        let one = drive.moved_bytes()?;
        all = [all[0] + one[0], all[1] + one[1]];
    }
    Some(all)
}
