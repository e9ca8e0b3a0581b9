//! `bench-io verify`: checks that written data comes back, each block from its own position.

use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use clap::Args;
use serde::Serialize;

use crate::bench::Bench;
use crate::job::{Access, JobOptions};
use crate::load::{StreamPlan, Timing};
use crate::pattern::{Found, Pattern, WrongBlock, WrongBlocks};
use crate::prepared::Prepared;
use crate::progress::Progress;
use crate::report;
use crate::report::{DeviceReport, Figures, Head, SettingsReport, warnings};

pub(crate) const EXAMPLES: &str = "Examples:
  bench-io verify --directory /mnt/nvme0                             # through a daemon of its own
  bench-io verify --target device --directory /mnt/nvme0 --size 64g --bs 1m
  bench-io verify --filename /dev/nvme1n1 --overwrite                # a whole drive; what is on it is lost
  bench-io verify --filename F --overwrite --only write --pass 7     # then cut the power, and:
  bench-io verify --filename F --only read --pass 7

Exits with 1 if a block is wrong. Options of time, order and mixing have no effect: each pass moves all bytes once.";

#[derive(Args)]
pub(crate) struct VerifyArgs {
    /// Read the options below from this TOML file, as in `bench-io run`
    #[arg(value_name = "JOB.toml")]
    file: Option<PathBuf>,
    #[command(flatten)]
    words: JobOptions,
    /// How often everything is written and read, each time with other data
    #[arg(long, value_name = "N", default_value_t = 2, value_parser = clap::value_parser!(u64).range(1..=1000))]
    passes: u64,
    /// Only write, or only read what an earlier call wrote; needs --filename and --pass
    #[arg(long, value_enum, requires = "pass", requires = "filename")]
    only: Option<Only>,
    /// Number in the first pass's data [default: random]
    #[arg(long, value_name = "N")]
    pass: Option<u64>,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum Only {
    Read,
    Write,
}

#[derive(Debug, Serialize)]
struct VerifyReport {
    #[serde(flatten)]
    head: Head<VerifySettings>,
    /// Bytes checked in all passes.
    bytes: u64,
    /// Wrong blocks of all passes: a block that is wrong in two passes counts twice.
    wrong_blocks: u64,
    /// Wrong blocks that are in no range, because there were too many.
    unnamed_blocks: u64,
    wrong: Vec<WrongRange>,
    /// One report per pass. Generating and checking the data is part of its processor time.
    passes: Vec<PassReport>,
}

#[derive(Debug, Serialize)]
struct VerifySettings {
    target: &'static str,
    #[serde(flatten)]
    job: SettingsReport,
    passes: u64,
    /// Number of the first pass.
    pass: u64,
}

/// One pass over all bytes.
#[derive(Debug, Serialize)]
struct PassReport {
    pass: u64,
    write: Option<Figures>,
    check: Option<Figures>,
}

/// Adjacent blocks that are wrong in the same way in one pass.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
struct WrongRange {
    /// Number of the pass.
    pass: u64,
    bytes: u64,
    #[serde(flatten)]
    first: WrongBlock,
    file: String,
}

/// Writes, reads, and reports what is wrong.
///
/// # Errors
/// A block is wrong, or an operation failed.
pub(crate) fn run(args: VerifyArgs) -> Result<()> {
    let words = match &args.file {
        Some(path) => args.words.over(JobOptions::read(path)?),
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
        "direct = 0 would check the page cache instead of the drive"
    );
    let passes = if only.is_some() { 1 } else { args.passes };
    let first = match args.pass {
        Some(pass) => pass,
        None => random()?,
    };
    let mut warnings = warnings::before();
    let progress = Progress::new();
    let prepared = Prepared::new(&job, Some(Pattern { pass: first }), &progress)?;
    warnings.extend(prepared.left_out(&job)?);
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
    let devices = prepared.devices(&bench);
    warnings.extend(warnings::of_one_drive(&devices));
    warnings.extend(warnings::of_drives(devices.iter().map(PathBuf::as_path)));
    let devices = devices.iter().map(|path| DeviceReport::of(path)).collect();
    let mut found = AllWrong::default();
    let mut bytes = 0;
    let mut reports = Vec::new();
    for nth in 0..passes {
        let pass = first.wrapping_add(nth);
        bench.set_pattern(Pattern { pass });
        let mut report = PassReport {
            pass,
            write: None,
            check: None,
        };
        if only != Some(Only::Read) {
            let (figures, _) = bench.run(&one_way(false), timing, &progress, "writing")?;
            report.write = Some(figures);
        }
        if only != Some(Only::Write) {
            let (figures, wrong) = bench.run(&one_way(true), timing, &progress, "checking")?;
            bytes += figures.ways().map(|(_, way)| way.bytes).sum::<u64>();
            found.add(pass, wrong, &prepared.files);
            report.check = Some(figures);
        }
        reports.push(report);
    }
    drop(progress);
    for figures in reports
        .iter()
        .flat_map(|pass| [&pass.write, &pass.check])
        .flatten()
    {
        warnings.extend(warnings::after_at(&job.place, figures));
    }
    let settings = VerifySettings {
        target: prepared.word,
        job: SettingsReport::new(&job, &prepared),
        passes,
        pass: first,
    };
    let report = VerifyReport {
        head: Head::new(settings, devices, warnings),
        bytes,
        wrong_blocks: found.count,
        unnamed_blocks: found.count - found.named,
        wrong: found.ranges,
        passes: reports,
    };
    report::print(&report, args.json)?;
    if report.wrong_blocks > 0 {
        bail!("{} blocks of 4096 bytes are wrong", report.wrong_blocks);
    }
    Ok(())
}

fn random() -> Result<u64> {
    let mut bytes = [0; 8];
    rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty())
        .context("reading a random number")?;
    Ok(u64::from_le_bytes(bytes))
}

/// Wrong blocks of all passes.
#[derive(Debug, Default)]
struct AllWrong {
    ranges: Vec<WrongRange>,
    count: u64,
    /// Wrong blocks that are in a range.
    named: u64,
}

impl AllWrong {
    /// Merges adjacent blocks into ranges, each pass on its own because drives may fail differently. The number of
    /// ranges is bounded over all passes.
    fn add(&mut self, pass: u64, mut wrong: WrongBlocks, files: &[PathBuf]) {
        self.count += wrong.count;
        let room = WrongBlocks::KEPT_MAX - self.named as usize;
        wrong.kept.sort_by_key(|block| (block.device, block.offset));
        wrong.kept.truncate(room);
        self.named += wrong.kept.len() as u64;
        for block in wrong.kept {
            match self.ranges.last_mut() {
                Some(last) if last.pass == pass && goes_on(last, &block) => last.bytes += 4096,
                _ => self.ranges.push(WrongRange {
                    pass,
                    bytes: 4096,
                    file: match files.get(block.device as usize) {
                        Some(path) => path.display().to_string(),
                        None => format!("the tiles of job {}", block.device),
                    },
                    first: block,
                }),
            }
        }
    }
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
        // The position of the damage within the blocks does not matter.
        (Found::Damage { .. }, Found::Damage { .. }) => true,
        (a, b) => a == b,
    };
    block.device == range.first.device && block.offset == next && same
}

impl fmt::Display for VerifyReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.head)?;
        let settings = &self.head.settings;
        writeln!(f, "target={} {}", settings.target, settings.job)?;
        // The last pass stands for all.
        if let Some(last) = self.passes.last() {
            let ways = [("writing", &last.write), ("checking", &last.check)];
            for (what, figures) in ways
                .into_iter()
                .filter_map(|(what, way)| Some((what, way.as_ref()?)))
            {
                write!(
                    f,
                    "pass {}, {what}, {:.2} s, engine {}\n{figures}",
                    last.pass, figures.seconds, figures.engine
                )?;
            }
        }
        for range in &self.wrong {
            writeln!(
                f,
                "pass {}: {}: {} bytes {}",
                range.pass, range.file, range.bytes, range.first
            )?;
        }
        if self.unnamed_blocks > 0 {
            writeln!(f, "and {} blocks more", self.unnamed_blocks)?;
        }
        let how = match (self.bytes, self.wrong_blocks) {
            (0, _) => "nothing was read",
            (_, 0) => "all as written",
            _ => "see above",
        };
        writeln!(
            f,
            "{} bytes checked in {} passes, the first is {}: {how}",
            self.bytes, settings.passes, settings.pass
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
        let wrong = || {
            WrongBlocks::from(vec![
                block(8192, Found::Zeros),
                block(4096, Found::Zeros),
                block(16384, Found::Zeros),
                block(20480, other(0)),
                block(24576, other(4096)),
                block(28672, other(4096)),
            ])
        };
        let mut found = AllWrong::default();
        found.add(7, wrong(), &["f".into()]);
        found.add(8, wrong(), &[]);
        assert_eq!((found.count, found.named), (12, 12));
        let (first, second) = found.ranges.split_at(4);
        assert!(
            first
                .iter()
                .all(|range| range.pass == 7 && range.file == "f")
        );
        let of_jobs = |range: &WrongRange| range.pass == 8 && range.file == "the tiles of job 0";
        assert!(second.iter().all(of_jobs), "{second:?}");
        for found in [first, second] {
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
}
