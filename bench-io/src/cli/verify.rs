//! `bench-io verify`: whether what was written comes back, each block from its own place.

use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use clap::Args;
use serde::Serialize;

use crate::bench::Bench;
use crate::job::{Access, JobWords};
use crate::load::{StreamPlan, Timing};
use crate::pattern::{Found, Pattern, WrongBlock, WrongBlocks};
use crate::prepared::Prepared;
use crate::progress::Progress;

/// Shown below the options.
pub(crate) const EXAMPLES: &str = "Examples:
  bench-io verify --directory /mnt/nvme0                             # through a daemon of its own
  bench-io verify --target device --directory /mnt/nvme0 --size 64g --bs 1m
  bench-io verify --filename /dev/nvme1n1 --overwrite                # a whole drive; what is on it is lost
  bench-io verify --filename F --overwrite --only write --pass 7     # then cut the power, and:
  bench-io verify --filename F --only read --pass 7
Ends with 1 if anything is wrong. Words about time, order and mixing have no effect: everything is moved once a pass.";

/// Checks drives.
#[derive(Args)]
pub(crate) struct VerifyArgs {
    /// A file with the keys below, as of `bench-io run`
    #[arg(value_name = "JOB.toml")]
    file: Option<PathBuf>,
    #[command(flatten)]
    words: JobWords,
    /// How often everything is written and read; each time with other bytes
    #[arg(long, value_name = "N", default_value_t = 2, value_parser = clap::value_parser!(u64).range(1..=1000))]
    passes: u64,
    /// Only write, or only read what an earlier call wrote: with --filename and --pass
    #[arg(long, value_enum, requires = "pass", requires = "filename")]
    only: Option<Only>,
    /// The number that the first pass's bytes carry; otherwise chosen by chance
    #[arg(long, value_name = "N")]
    pass: Option<u64>,
    /// One JSON object instead of lines to read
    #[arg(long)]
    json: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum Only {
    Read,
    Write,
}

/// What came of it.
#[derive(Debug, Serialize)]
struct VerifyReport {
    bytes: u64,
    passes: u64,
    /// Of the first.
    pass: u64,
    wrong_blocks: u64,
    /// Of these, not in the ranges: there were too many.
    unnamed_blocks: u64,
    wrong: Vec<WrongRange>,
}

/// Neighbouring blocks that are wrong in the same way.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
struct WrongRange {
    bytes: u64,
    #[serde(flatten)]
    first: WrongBlock,
    file: String,
}

/// Writes, reads, and names what is wrong.
///
/// # Errors
/// Something is wrong, or an operation failed.
pub(crate) fn run(args: VerifyArgs) -> Result<()> {
    let words = match &args.file {
        Some(path) => args.words.over(JobWords::read(path)?),
        None => args.words,
    };
    let only = args.only;
    let rw = match only {
        Some(Only::Read) => Access::Read,
        _ => Access::Write,
    };
    let job = words.once(rw).check()?;
    ensure!(
        job.direct,
        "direct = 0: the page cache would be checked, not the drive"
    );
    let passes = if only.is_some() { 1 } else { args.passes };
    let first = match args.pass {
        Some(pass) => pass,
        None => random()?,
    };
    let progress = Progress::new();
    let prepared = Prepared::new(&job, Some(Pattern { pass: first }), &progress)?;
    let mut bench = Bench::open(prepared.plan.clone())?;
    let timing = Timing {
        ramp: Duration::ZERO,
        runtime: Duration::ZERO,
    };
    let streams = prepared.streams(&job);
    let one_way = |reads: bool| -> Vec<Vec<StreamPlan>> {
        let plan = |plan: &StreamPlan| StreamPlan {
            reads,
            writes: !reads,
            random: false,
            ..plan.clone()
        };
        streams
            .iter()
            .map(|job| job.iter().map(plan).collect())
            .collect()
    };
    let mut wrong = WrongBlocks::default();
    let mut bytes = 0;
    for nth in 0..passes {
        bench.set_pattern(Pattern {
            pass: first.wrapping_add(nth),
        });
        if only != Some(Only::Read) {
            bench.run(&one_way(false), timing, &progress, "writing")?;
        }
        if only != Some(Only::Write) {
            let (figures, found) = bench.run(&one_way(true), timing, &progress, "checking")?;
            bytes += figures.ways().map(|(_, way)| way.bytes).sum::<u64>();
            wrong.add(found);
        }
    }
    drop(progress);
    let files: Vec<String> = prepared
        .files
        .iter()
        .map(|path| path.display().to_string())
        .collect();
    let report = VerifyReport {
        bytes,
        passes,
        pass: first,
        wrong_blocks: wrong.count,
        unnamed_blocks: wrong.count - wrong.kept.len() as u64,
        wrong: ranges(wrong.kept, &files),
    };
    match args.json {
        true => println!("{}", serde_json::to_string(&report)?),
        false => print!("{report}"),
    }
    if report.wrong_blocks > 0 {
        bail!("{} blocks of 4096 bytes are wrong", report.wrong_blocks);
    }
    Ok(())
}

fn random() -> Result<u64> {
    let mut bytes = [0; 8];
    rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty())
        .context("a number by chance")?;
    Ok(u64::from_le_bytes(bytes))
}

/// Sorted, and neighbours in one.
fn ranges(mut wrong: Vec<WrongBlock>, files: &[String]) -> Vec<WrongRange> {
    wrong.sort_by_key(|block| (block.device, block.offset));
    let mut ranges: Vec<WrongRange> = Vec::new();
    for block in wrong {
        match ranges.last_mut() {
            Some(last) if goes_on(last, &block) => last.bytes += 4096,
            _ => ranges.push(WrongRange {
                bytes: 4096,
                file: files
                    .get(block.device as usize)
                    .map_or_else(|| "the job's tiles".into(), String::clone),
                first: block,
            }),
        }
    }
    ranges
}

fn goes_on(range: &WrongRange, block: &WrongBlock) -> bool {
    let next = range.first.offset + range.bytes;
    let same = match (&range.first.found, &block.found) {
        (
            Found::OtherPlace {
                device: a,
                offset: from,
            },
            Found::OtherPlace { device: b, offset },
        ) => a == b && *offset == from + range.bytes,
        // Where in each block does not matter then.
        (Found::Damage { .. }, Found::Damage { .. }) => true,
        (a, b) => a == b,
    };
    block.device == range.first.device && block.offset == next && same
}

impl fmt::Display for VerifyReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for range in &self.wrong {
            writeln!(f, "{}: {} bytes {}", range.file, range.bytes, range.first)?;
        }
        if self.unnamed_blocks > 0 {
            writeln!(f, "and {} blocks more", self.unnamed_blocks)?;
        }
        let how = if self.wrong_blocks == 0 {
            "all as written"
        } else {
            "see above"
        };
        writeln!(
            f,
            "{} bytes checked in {} passes ({}): {how}",
            self.bytes, self.passes, self.pass
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn neighbours_that_are_wrong_alike_are_one_line() {
        let block = |offset, found| WrongBlock {
            device: 0,
            offset,
            found,
        };
        let other = |offset| Found::OtherPlace { device: 1, offset };
        let found = ranges(
            vec![
                block(8192, Found::Zeros),
                block(4096, Found::Zeros),
                block(16384, Found::Zeros),
                block(20480, other(0)),
                block(24576, other(4096)),
                block(28672, other(4096)),
            ],
            &["f".into()],
        );
        let shape: Vec<(u64, u64)> = found
            .iter()
            .map(|range| (range.first.offset, range.bytes))
            .collect();
        assert_eq!(
            shape,
            [(4096, 8192), (16384, 4096), (20480, 8192), (28672, 4096)]
        );
    }
}
