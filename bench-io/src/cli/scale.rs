//! `bench-io scale`: what it takes, and the files it leaves.

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use clap::Args;
use offloadd::api::{BLOCK_BYTES, TILE_BYTES_MAX};

use crate::console;
use crate::fio::Fio;
use crate::place::store_file_bytes;
use crate::progress::Progress;
use crate::scale::{self, ScalePlan, ScaleReport, page, picture};
use crate::testdrives::{DrivesPlan, OwnDrives, Pace};
use crate::units::{Bytes, Rate};

/// Shown below the options.
pub(crate) const EXAMPLES: &str = "Examples:
  bench-io scale --directory .                                              # this machine's disk, three rounds in turns with fio
  bench-io scale --directory /mnt/nvme0 --directory /mnt/nvme1 --out target/scale
  bench-io scale --paced 4 --read 620M --write 320M                      # as root, on any machine with 8 GiB to spare
  bench-io scale --paced 4 --read 6.2G --write 3.2G --parts 2 --size 2g --bs 1m,4m,16m
  bench-io scale --paced 4 --last-half --drives 4                        # unequal drives: the sum is the limit
  bench-io scale --paced 2 --read 60M --write 30M --size 32m --runtime 1 --within 5     # as a test: fails when it is off";

/// Of a drive: its file system's own blocks, the daemon's log.
const DRIVE_SLACK_BYTES: u64 = 64 << 20;

/// Measures 1 to N drives.
#[derive(Args)]
pub(crate) struct ScaleArgs {
    /// A directory on a drive; one for each drive
    #[arg(
        long = "directory",
        value_name = "DIR",
        required_unless_present = "paced",
        conflicts_with = "paced"
    )]
    dirs: Vec<PathBuf>,
    /// Make N rate-limited drives for this and take them away again; needs root
    #[arg(long, value_name = "N")]
    testdrives: Option<u32>,
    /// Of each rate-limited drive, bytes a second
    #[arg(
        long,
        value_name = "RATE",
        default_value = "620M",
        conflicts_with = "directories"
    )]
    read: Rate,
    /// Of each rate-limited drive, bytes a second
    #[arg(
        long,
        value_name = "RATE",
        default_value = "320M",
        conflicts_with = "directories"
    )]
    write: Rate,
    /// Loop devices of each rate-limited drive; above some 4 GB/s one is not enough
    #[arg(
        long,
        value_name = "N",
        default_value_t = 1,
        conflicts_with = "directories"
    )]
    parts: u32,
    /// The last rate-limited drive is half as fast as the others
    #[arg(long)]
    last_half: bool,
    /// How many drives at a time, with commas between [default: 1 to all]
    #[arg(long, value_name = "N", value_delimiter = ',')]
    drives: Vec<usize>,
    /// Bytes of one operation, a tile; several with commas between
    #[arg(
        long,
        value_name = "BYTES",
        default_value = "4m",
        value_delimiter = ','
    )]
    bs: Vec<Bytes>,
    /// Operations in flight of each file and direction; through the daemon at most 1024 in all, and one a tile
    /// [default: fio's 32; through the daemon 8 MiB of them a drive, two at least, so that tiles stay in the processor's cache]
    #[arg(long, value_name = "N")]
    iodepth: Option<u32>,
    /// Bytes used of each drive; it needs five times that
    #[arg(long, value_name = "BYTES", default_value = "256m")]
    size: Bytes,
    /// Seconds of each measurement
    #[arg(long, value_name = "SECONDS", default_value_t = 3.0)]
    runtime: f64,
    /// How often all is measured, in turns, for a median [default: 3, of rate-limited drives 1]
    #[arg(long, value_name = "N")]
    rounds: Option<usize>,
    /// auto, uring, aio, psync, polled or sqpoll: the daemon's engine
    #[arg(long, value_name = "NAME", default_value = "auto")]
    ioengine: String,
    /// The program, when it is not in PATH; or "none"
    #[arg(long, value_name = "PROGRAM")]
    fio: Option<PathBuf>,
    /// Fail when a row is further than this from the pace that was set
    #[arg(long, value_name = "PERCENT")]
    within: Option<f64>,
    /// Leave scale.json, scale.svg and scale.html in this directory
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
    /// One JSON object instead of a table
    #[arg(long)]
    json: bool,
}

/// Measures, prints, and leaves files.
///
/// # Errors
/// Settings that cannot be, something failed, or a row is off with `--within`.
pub(crate) fn run(args: ScaleArgs) -> Result<()> {
    check(&args)?;
    let fio = Fio::find(args.fio.as_deref())?;
    if let Some(out) = &args.out {
        std::fs::create_dir_all(out).with_context(|| format!("making {}", out.display()))?;
    }
    let progress = Progress::new();
    let report = match args.testdrives {
        Some(count) => on_paced(&args, count, fio.as_ref(), &progress)?,
        None => scale::measure(
            &plan(&args, args.dirs.clone(), 1),
            None,
            fio.as_ref(),
            &progress,
        )?,
    };
    drop(progress);
    // A full drive takes only one of both.
    let said = console::report(&report, args.json);
    if let Some(out) = &args.out {
        leave(out, &report)?;
    }
    said?;
    let outside = args.within.map(|percent| report.outside(percent / 100.0));
    if let Some(outside) = outside.filter(|outside| !outside.is_empty()) {
        bail!("not within what was asked: {}", outside.join("; "));
    }
    Ok(())
}

fn check(args: &ScaleArgs) -> Result<()> {
    for bs in &args.bs {
        ensure!(
            bs.0.is_multiple_of(u64::from(BLOCK_BYTES)) && bs.0 <= u64::from(TILE_BYTES_MAX),
            "--bs {}: a multiple of {BLOCK_BYTES} bytes, at most {}",
            bs.0,
            Bytes(u64::from(TILE_BYTES_MAX))
        );
        ensure!(
            args.size.0 >= 2 * bs.0,
            "--size {}: at least two operations of {}",
            args.size,
            bs
        );
    }
    let all = args
        .testdrives
        .map_or(args.dirs.len(), |count| count as usize);
    if let Some(wrong) = args.drives.iter().find(|count| !(1..=all).contains(*count)) {
        bail!("--drives {wrong}: there are {all}");
    }
    if let Some(iodepth) = args.iodepth {
        ensure!(
            (1..=1024).contains(&iodepth),
            "--iodepth {iodepth}: 1 to 1024"
        );
    }
    ensure!(
        (0.1..=3600.0).contains(&args.runtime),
        "--runtime {}: seconds, 0.1 to 3600",
        args.runtime
    );
    ensure!(
        args.rounds.is_none_or(|rounds| (1..=100).contains(&rounds)),
        "--rounds: 1 to 100"
    );
    ensure!(
        args.within
            .is_none_or(|percent| (0.0..=100.0).contains(&percent)),
        "--within: percent, 0 to 100"
    );
    ensure!(
        args.within.is_none() || args.testdrives.is_some(),
        "--within: only with --paced, as other drives have no pace that was set"
    );
    ensure!(
        !args.last_half || args.testdrives.is_some_and(|count| count >= 2),
        "--last-half: only with --paced 2 or more"
    );
    ensure!(
        args.parts >= 1,
        "--parts 0: at least one loop device a drive"
    );
    Ok(())
}

fn plan(args: &ScaleArgs, dirs: Vec<PathBuf>, parts: u32) -> ScalePlan {
    // The picture's lines go from few to many.
    let mut drives = args.drives.clone();
    drives.sort_unstable();
    drives.dedup();
    ScalePlan {
        dirs,
        parts: parts as usize,
        blocks_bytes: args.bs.iter().map(|bs| bs.0 as u32).collect(),
        iodepth: args.iodepth,
        drives,
        last_half: args.last_half,
        size: part_bytes(args),
        ramp: Duration::from_secs_f64((args.runtime / 4.0).min(0.5)),
        runtime: Duration::from_secs_f64(args.runtime),
        engine: args.ioengine.clone(),
        rounds: args.rounds.unwrap_or(match args.testdrives {
            Some(_) => 1,
            None => 3,
        }),
    }
}

/// Of each directory.
fn part_bytes(args: &ScaleArgs) -> u64 {
    let parts = match args.testdrives {
        Some(_) => u64::from(args.parts),
        None => 1,
    };
    args.size.0 / parts / 4096 * 4096
}

fn on_paced(
    args: &ScaleArgs,
    count: u32,
    fio: Option<&Fio>,
    progress: &Progress,
) -> Result<ScaleReport> {
    progress.say("making rate-limited drives");
    let pace = Pace {
        read: args.read.0,
        write: args.write.0,
    };
    let drives = OwnDrives::up(&DrivesPlan {
        name: format!("scale-{}", std::process::id()),
        count,
        // Beside the store, a file to read and one to write.
        bytes: u64::from(args.parts)
            * (store_file_bytes(part_bytes(args)) + 2 * part_bytes(args) + DRIVE_SLACK_BYTES),
        pace,
        parts: args.parts,
        raid0: false,
    })?;
    // The daemon and fio are started in the group, and so are paced.
    let _inside = drives.enter()?;
    let plan = plan(args, drives.state().dirs.clone(), args.parts);
    scale::measure(&plan, Some((&drives, pace)), fio, progress)
}

fn leave(out: &Path, report: &ScaleReport) -> Result<()> {
    for (name, text) in [
        ("scale.json", serde_json::to_string_pretty(report)?),
        ("scale.svg", picture::svg(report)),
        ("scale.html", page::html(report)),
    ] {
        let path = out.join(name);
        std::fs::write(&path, text).with_context(|| format!("writing {}", path.display()))?;
    }
    Ok(())
}
