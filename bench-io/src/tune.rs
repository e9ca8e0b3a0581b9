//! Which engine, block size and depth the drives like, found one after the other: each stage keeps what the one before it chose.
//!
//! ```text
//!   engine (4 MiB, 32) ─▶ block size ─▶ depth ─▶ read, write and both with what was chosen
//! ```
//!
//! What counts is reading and writing at the same time, as training does. Of settings that are nearly as good the smaller one
//! is taken: it needs less memory, and waits less.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::Result;
use offloadd::engine::EngineChoice;
use serde::Serialize;

use crate::bed::{Bed, Trial};
use crate::progress::Progress;
use crate::scale::Load;

/// So near to the best is as good.
const NEAR: f64 = 0.97;

const BLOCKS_BYTES: [u32; 4] = [1 << 20, 2 << 20, 4 << 20, 16 << 20];
const DEPTHS: [u32; 4] = [4, 8, 16, 32];

/// Buffers take at most this part of the memory that is to be had: a trial must not push others out.
const MEMORY_PART: u64 = 4;

const FIRST_BLOCK_BYTES: u32 = 4 << 20;
const FIRST_DEPTH: u32 = 32;

/// What was tried, and what was chosen.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Tuned {
    pub(crate) engine: String,
    pub(crate) bs: u32,
    pub(crate) iodepth: u32,
    pub(crate) trials: Vec<Trial>,
    /// Engines that do not run here, and why.
    pub(crate) without: Vec<String>,
    /// Whether the time was over before everything was tried.
    pub(crate) cut_short: bool,
}

/// Tries each for `runtime`, and until `deadline` at the latest.
///
/// # Errors
/// No engine runs here, or an operation fails.
pub(crate) fn tune(
    folders: &[PathBuf],
    size: u64,
    runtime: Duration,
    deadline: Instant,
    progress: &Progress,
) -> Result<Tuned> {
    let bed = Bed::make(folders, size, runtime, progress)?;
    let mut tuned = Tuned {
        engine: String::new(),
        bs: FIRST_BLOCK_BYTES,
        iodepth: FIRST_DEPTH,
        trials: Vec::new(),
        without: Vec::new(),
        cut_short: false,
    };
    let mut best = 0.0;
    for name in EngineChoice::AUTO.map(EngineChoice::name) {
        match bed.try_one(name, FIRST_BLOCK_BYTES, FIRST_DEPTH, Load::Both, progress) {
            Ok(trial) => {
                // The first named is the one to prefer.
                if trial.bytes_per_s() * NEAR > best {
                    best = trial.bytes_per_s();
                    name.clone_into(&mut tuned.engine);
                }
                tuned.trials.push(trial);
            }
            Err(error) => {
                crate::stop::check()?;
                tuned.without.push(format!("{error:#}"));
            }
        }
    }
    if tuned.engine.is_empty() {
        anyhow::bail!("no engine runs here: {}", tuned.without.join("; "));
    }
    let engine = tuned.engine.clone();
    let blocks = BLOCKS_BYTES.map(|bs| (bs, FIRST_DEPTH));
    (tuned.bs, _) = stage(&bed, &mut tuned, &engine, &blocks, deadline, progress)?
        .unwrap_or((FIRST_BLOCK_BYTES, 0));
    let depths = DEPTHS.map(|depth| (tuned.bs, depth));
    (_, tuned.iodepth) =
        stage(&bed, &mut tuned, &engine, &depths, deadline, progress)?.unwrap_or((0, FIRST_DEPTH));
    for load in Load::ALL {
        let trial = bed.try_one(&engine, tuned.bs, tuned.iodepth, load, progress)?;
        tuned.trials.push(trial);
    }
    Ok(tuned)
}

/// Tries each (block size, depth), smallest first; the smallest that is nearly as good as the best.
fn stage(
    bed: &Bed,
    tuned: &mut Tuned,
    engine: &str,
    settings: &[(u32, u32)],
    deadline: Instant,
    progress: &Progress,
) -> Result<Option<(u32, u32)>> {
    let memory = offloadd::memory::available_bytes().unwrap_or(u64::MAX);
    let mut found = Vec::new();
    for &(bs, depth) in settings {
        if u64::from(bs) > bed.file_bytes() || bed.buffer_bytes(bs, depth) > memory / MEMORY_PART {
            continue;
        }
        // Three more are needed at the end.
        if Instant::now() + 5 * bed.trial_time() > deadline {
            tuned.cut_short = true;
            break;
        }
        let trial = bed.try_one(engine, bs, depth, Load::Both, progress)?;
        found.push(((bs, depth), trial.bytes_per_s()));
        tuned.trials.push(trial);
    }
    Ok(smallest_near_best(&found))
}

fn smallest_near_best<T: Copy>(found: &[(T, f64)]) -> Option<T> {
    let best = found.iter().map(|(_, rate)| *rate).fold(0.0, f64::max);
    let near = found.iter().find(|(_, rate)| *rate >= NEAR * best);
    near.map(|(setting, _)| *setting)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn of_settings_that_are_nearly_as_good_the_smaller_one_is_taken() {
        assert_eq!(
            smallest_near_best(&[(1, 50.0), (2, 99.0), (3, 100.0)]),
            Some(2)
        );
        assert_eq!(
            smallest_near_best(&[(1, 50.0), (2, 90.0), (3, 100.0)]),
            Some(3)
        );
        assert_eq!(smallest_near_best::<u32>(&[]), None);
    }
}
