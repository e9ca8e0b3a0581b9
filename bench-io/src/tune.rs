//! Finds the best engine, block size and depth, one after the other: each stage keeps the choices before it.
//!
//! ```text
//!   engines alternately (4 MiB, 32) ─▶ block size ─▶ depth ─▶ read, write and both with what was chosen
//! ```
//!
//! The criterion is reading and writing at the same time, as in training. Among settings that are nearly as good the
//! smaller one wins: it needs less memory and has lower latency. Time is bounded: earlier trials show how long bytes in
//! flight take after the measured time, so each trial's duration is known before it starts.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::Result;
use offloadd::engine::EngineChoice;
use serde::Serialize;

use crate::progress::Progress;
use crate::rounds::median;
use crate::scale::Load;
use crate::trial::{Trial, TrialFiles};

/// Fraction of the best rate that counts as equally good.
const NEAR: f64 = 0.97;

const BLOCKS_BYTES: [u32; 4] = [1 << 20, 2 << 20, 4 << 20, 16 << 20];
const DEPTHS: [u32; 4] = [4, 8, 16, 32];

/// Trials per engine, alternating, because other load on the drives varies.
const TURNS: usize = 3;

/// Part of the available memory that buffers may take, so that no other program is swapped out.
const MEMORY_PART: u64 = 4;

/// Seconds for threads and rings, whatever the bytes.
const SWITCHING_S: f64 = 0.1;

/// Part of the time for making files.
const MAKING_PART: u32 = 5;

const FIRST_BLOCK_BYTES: u32 = 4 << 20;

/// The trials and the choice.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Tuned {
    pub(crate) engine: String,
    pub(crate) bs: u32,
    pub(crate) iodepth: u32,
    /// Bytes of each file: fewer than requested on a slow drive.
    pub(crate) file_bytes: u64,
    pub(crate) trials: Vec<Tried>,
    /// Engines that do not run here, with the reason.
    pub(crate) without: Vec<String>,
    /// Settings that were not tried, with the reason.
    pub(crate) untried: Vec<String>,
    /// Those of `engine`, `bs` and `iodepth` that no trial chose.
    pub(crate) defaults: Vec<&'static str>,
}

/// A trial and its stage.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Tried {
    pub(crate) stage: Stage,
    #[serde(flatten)]
    pub(crate) trial: Trial,
}

/// Stages of the search.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Stage {
    Engine,
    Bs,
    Iodepth,
    /// Measures the final choice.
    Chosen,
}

/// A trial's rate in both directions.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Reached {
    bytes_per_s: f64,
    /// Rate of one operation more or less in each direction: the uncertainty of a trial, large for few large
    /// operations.
    step_bytes_per_s: f64,
}

impl Tuned {
    /// The last trial of the chosen settings with this load.
    pub(crate) fn chosen(&self, load: Load) -> Option<&Trial> {
        let chosen = self.tries(&self.engine, (self.bs, self.iodepth), load);
        chosen.filter(|trial| trial.bytes_per_s().is_some()).last()
    }

    fn tries(&self, engine: &str, setting: (u32, u32), load: Load) -> impl Iterator<Item = &Trial> {
        let trials = self.trials.iter().map(|tried| &tried.trial);
        trials.filter(move |trial| {
            trial.engine == engine && (trial.bs, trial.iodepth) == setting && trial.load == load
        })
    }

    /// Records settings that are not tried, once.
    fn leave_out(&mut self, engine: &str, (bs, depth): (u32, u32), why: &str) {
        let trial_name = format!("{} KiB, iodepth {depth}: {why}", bs >> 10);
        let is_tried = self.tries(engine, (bs, depth), Load::Both).next().is_some();
        if !is_tried && !self.untried.contains(&trial_name) {
            self.untried.push(trial_name);
        }
    }
}

/// State of the search.
struct Trying<'a> {
    trial_files: TrialFiles,
    deadline: Instant,
    /// Largest seconds per byte in flight after the measured time so far.
    tail_s_per_byte: f64,
    /// Largest seconds per byte for making buffers so far.
    open_s_per_byte: f64,
    progress: &'a Progress,
    tuned: Tuned,
}

/// Tries settings for `runtime` each, and ends within `limit`.
///
/// # Errors
/// No engine runs here, or an operation fails.
pub(crate) fn tune(
    dirs: &[PathBuf],
    size: u64,
    runtime: Duration,
    limit: Duration,
    progress: &Progress,
) -> Result<Tuned> {
    let deadline = Instant::now() + limit;
    let (trial_files, tail_s_per_byte) =
        TrialFiles::make_within(dirs, size, runtime, limit / MAKING_PART, progress)?;
    let file_bytes = trial_files.file_bytes();
    let mut trying = Trying {
        trial_files,
        deadline,
        tail_s_per_byte,
        open_s_per_byte: 0.0,
        progress,
        tuned: Tuned {
            engine: String::new(),
            bs: FIRST_BLOCK_BYTES,
            iodepth: 0,
            file_bytes,
            trials: Vec::new(),
            without: Vec::new(),
            untried: Vec::new(),
            defaults: Vec::new(),
        },
    };
    trying.tuned.iodepth = trying.first_depth();
    trying.engines()?;
    let depth = trying.tuned.iodepth;
    match trying.stage(Stage::Bs, &BLOCKS_BYTES.map(|bs| (bs, depth)))? {
        Some((bs, _)) => trying.tuned.bs = bs,
        None => trying.tuned.defaults.push("bs"),
    }
    let bs = trying.tuned.bs;
    match trying.stage(Stage::Iodepth, &DEPTHS.map(|depth| (bs, depth)))? {
        Some((_, depth)) => trying.tuned.iodepth = depth,
        None => trying.tuned.defaults.push("iodepth"),
    }
    trying.last()?;
    Ok(trying.tuned)
}

impl Trying<'_> {
    /// Whether drives move the bytes in flight within about a trial's time; otherwise few operations would end in it.
    fn is_seen(&self, bs: u32, depth: u32) -> bool {
        self.tail(bs, depth) <= 2 * self.trial_files.trial_time()
    }

    /// The largest depth that a trial can measure.
    fn first_depth(&self) -> u32 {
        let fits = |depth: &&u32| self.is_seen(FIRST_BLOCK_BYTES, **depth);
        *DEPTHS.iter().rev().find(fits).unwrap_or(&DEPTHS[0])
    }

    /// Time of the bytes in flight after a trial.
    fn tail(&self, bs: u32, depth: u32) -> Duration {
        seconds(
            self.tail_s_per_byte,
            self.trial_files.inflight_bytes(bs, depth),
        )
    }

    /// Duration of a whole trial.
    fn expected(&self, bs: u32, depth: u32) -> Duration {
        let opening = seconds(
            self.open_s_per_byte,
            self.trial_files.buffer_bytes(bs, depth),
        );
        opening + self.trial_files.trial_time() + self.tail(bs, depth)
    }

    /// Runs a trial and updates the estimates. `None` if a direction moved nothing.
    fn try_one(
        &mut self,
        stage: Stage,
        engine: &str,
        (bs, depth): (u32, u32),
        load: Load,
    ) -> Result<Option<Reached>> {
        let trial_files = &self.trial_files;
        let trial = trial_files.try_one(engine, bs, depth, load, self.progress)?;
        let over_s = (trial.run_s - trial_files.trial_time().as_secs_f64() - SWITCHING_S).max(0.0);
        let tail = over_s / trial_files.inflight_bytes(bs, depth) as f64;
        let open =
            (trial.open_s - SWITCHING_S).max(0.0) / trial_files.buffer_bytes(bs, depth) as f64;
        self.tail_s_per_byte = self.tail_s_per_byte.max(tail);
        self.open_s_per_byte = self.open_s_per_byte.max(open);
        let reached = trial.bytes_per_s().map(|bytes_per_s| Reached {
            bytes_per_s,
            step_bytes_per_s: 2.0 * f64::from(bs) / trial.figures.seconds,
        });
        self.tuned.trials.push(Tried { stage, trial });
        Ok(reached)
    }

    /// Tries the engines alternately, as often as half of the time allows and at least once, and chooses by the median.
    fn engines(&mut self) -> Result<()> {
        let (bs, depth) = (self.tuned.bs, self.tuned.iodepth);
        let half = Instant::now() + self.deadline.saturating_duration_since(Instant::now()) / 2;
        let names = EngineChoice::AUTO.map(EngineChoice::name);
        let mut rates: Vec<(&str, Vec<Reached>)> = names.map(|name| (name, Vec::new())).to_vec();
        for turn in 0..TURNS {
            let needed = self.expected(bs, depth) * rates.len() as u32;
            if turn > 0 && Instant::now() + needed > half {
                let left = TURNS - turn;
                self.tuned.untried.push(format!(
                    "{left} of {TURNS} turns of each engine: no time left"
                ));
                break;
            }
            let mut runs = Vec::new();
            for (name, mut found) in rates {
                match self.try_one(Stage::Engine, name, (bs, depth), Load::Both) {
                    Ok(rate) => {
                        found.extend(rate);
                        runs.push((name, found));
                    }
                    Err(error) => {
                        crate::stop::check()?;
                        self.tuned.without.push(format!("{error:#}"));
                    }
                }
            }
            rates = runs;
        }
        let Some((preferred, _)) = rates.first() else {
            anyhow::bail!("no engine runs here: {}", self.tuned.without.join("; "));
        };
        let medians = rates.iter().filter_map(|(name, found)| {
            let (middle, _) = median(found.clone(), |one| one.bytes_per_s)?;
            Some((*name, middle))
        });
        // Engines are listed in order of preference.
        match smallest_near_best(&medians.collect::<Vec<_>>()) {
            Some(name) => name.clone_into(&mut self.tuned.engine),
            None => {
                (*preferred).clone_into(&mut self.tuned.engine);
                self.tuned.defaults.push("engine");
            }
        }
        Ok(())
    }

    /// Tries each (block size, depth), smallest first, and chooses the smallest that is nearly as good as the best.
    fn stage(&mut self, stage: Stage, settings: &[(u32, u32)]) -> Result<Option<(u32, u32)>> {
        let memory = offload_support::memory::available_bytes().unwrap_or(u64::MAX);
        let engine = self.tuned.engine.clone();
        let mut found = Vec::new();
        for &(bs, depth) in settings {
            // Three trials of the choice follow at the end.
            let last = 3 * self.expected(self.tuned.bs, self.tuned.iodepth);
            let buffer_bytes = self.trial_files.buffer_bytes(bs, depth);
            let why_not = if u64::from(bs) > self.trial_files.file_bytes() {
                Some("files are smaller")
            } else if buffer_bytes > memory / MEMORY_PART {
                Some("too much of the memory")
            } else if !self.is_seen(bs, depth) {
                Some("the drives need longer than a trial for the bytes in flight")
            } else if Instant::now() + self.expected(bs, depth) + last > self.deadline {
                Some("no time left")
            } else {
                None
            };
            if let Some(why) = why_not {
                self.tuned.leave_out(&engine, (bs, depth), why);
                continue;
            }
            match self.try_one(stage, &engine, (bs, depth), Load::Both) {
                Ok(rate) => found.extend(rate.map(|rate| ((bs, depth), rate))),
                Err(error) => {
                    crate::stop::check()?;
                    let why = format!("{error:#}");
                    self.tuned.leave_out(&engine, (bs, depth), &why);
                }
            }
        }
        Ok(smallest_near_best(&found))
    }

    /// Measures the choice in each direction.
    fn last(&mut self) -> Result<()> {
        let (engine, bs, depth) = (self.tuned.engine.clone(), self.tuned.bs, self.tuned.iodepth);
        for load in Load::ALL {
            if Instant::now() + self.expected(bs, depth) > self.deadline {
                if self.tuned.chosen(load).is_none() {
                    let load = load.word();
                    let left_out = format!("the choice, {load}: no time left");
                    self.tuned.untried.push(left_out);
                }
                continue;
            }
            self.try_one(Stage::Chosen, &engine, (bs, depth), load)?;
        }
        Ok(())
    }
}

/// Capped at an hour, which is longer than any limit.
fn seconds(s_per_byte: f64, bytes: u64) -> Duration {
    Duration::from_secs_f64((s_per_byte * bytes as f64).min(3600.0))
}

fn smallest_near_best<T: Copy>(found: &[(T, Reached)]) -> Option<T> {
    let rates = found.iter().map(|(_, reached)| reached.bytes_per_s);
    let best = rates.fold(0.0, f64::max);
    let is_near = |reached: &Reached| reached.bytes_per_s + reached.step_bytes_per_s >= NEAR * best;
    let near = found.iter().find(|(_, reached)| is_near(reached));
    near.map(|(setting, _)| *setting)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::{CpuReport, Figures, WayReport};

    fn chosen(rates: &[f64], step: f64) -> Option<usize> {
        let reached = |rate: &f64| Reached {
            bytes_per_s: *rate,
            step_bytes_per_s: step,
        };
        let found: Vec<_> = rates.iter().map(reached).enumerate().collect();
        smallest_near_best(&found)
    }

    fn tried(stage: Stage, engine: &str, bs: u32, bytes_per_s: f64) -> Tried {
        let way = (bytes_per_s > 0.0).then_some(WayReport {
            bytes: 1,
            ops: 1,
            bytes_per_s,
            ops_per_s: 1.0,
            latency_ns_mean: 1.0,
            latency_ns_p50: 1,
            latency_ns_p99: 1,
            latency_ns_p999: 1,
            latency_ns_max: 1,
        });
        let figures = Figures {
            seconds: 1.0,
            read: way.clone(),
            write: way,
            cpu: CpuReport {
                bench_io_s: 0.0,
                daemon_s: None,
                s_per_gb: 0.0,
                idle_share: None,
            },
            drives: None,
            engine: engine.to_owned(),
        };
        let trial = Trial {
            engine: engine.to_owned(),
            bs,
            iodepth: 4,
            load: Load::Both,
            figures,
            open_s: 0.0,
            run_s: 1.0,
        };
        Tried { stage, trial }
    }

    #[test]
    fn a_trial_of_what_was_chosen_counts_whatever_it_was_for() {
        let mut tuned = Tuned {
            engine: "uring".into(),
            bs: 1 << 20,
            iodepth: 4,
            file_bytes: 1,
            trials: vec![
                tried(Stage::Engine, "uring", 1 << 20, 5.0),
                tried(Stage::Bs, "uring", 1 << 20, 6.0),
                tried(Stage::Bs, "uring", 2 << 20, 7.0),
                tried(Stage::Engine, "aio", 1 << 20, 8.0),
                tried(Stage::Chosen, "uring", 1 << 20, 0.0),
            ],
            without: Vec::new(),
            untried: Vec::new(),
            defaults: Vec::new(),
        };
        let rate = |load| tuned.chosen(load).and_then(Trial::bytes_per_s);
        assert_eq!((rate(Load::Both), rate(Load::Read)), (Some(12.0), None));
        for _ in 0..2 {
            tuned.leave_out("uring", (1 << 20, 4), "no time left");
            tuned.leave_out("uring", (4 << 20, 4), "no time left");
        }
        assert_eq!(tuned.untried, ["4096 KiB, iodepth 4: no time left"]);
    }

    #[test]
    fn of_settings_that_are_nearly_as_good_the_smaller_one_is_taken() {
        assert_eq!(chosen(&[50.0, 99.0, 100.0], 0.0), Some(1));
        assert_eq!(chosen(&[50.0, 90.0, 100.0], 0.0), Some(2));
        assert_eq!(chosen(&[], 0.0), None);
    }

    #[test]
    fn one_operation_more_within_the_time_chooses_nothing() {
        // On a slow drive: four operations of 4 MiB, or five.
        assert_eq!(chosen(&[33.6, 33.6, 37.8], 8.4), Some(0));
        assert_eq!(chosen(&[33.6, 33.6, 67.2], 8.4), Some(2));
    }
}
