//! `bench-io` without a command: one canonical workload, compared with the same engine without a daemon.

use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use clap::Args;
use offload_support::units::ApproxRate;
use offloadd::api::{BLOCK_BYTES, IODEPTH_MAX, TILE_BYTES_MAX};
use offloadd::engine::EngineChoice;
use serde::Serialize;

use crate::bench::Bench;
use crate::confirm;
use crate::job::{Access, Job, Place};
use crate::load::{StreamPlan, Timing};
use crate::prepared::Prepared;
use crate::progress::Progress;
use crate::report;
use crate::report::{About, DeviceReport, Figures, warnings};
use crate::rounds::rate_of;
use crate::units::Bytes;

#[derive(Args)]
pub(crate) struct CanonicalArgs {
    /// Directory on the drive to measure [default: the current one, after a question]
    #[arg(long = "directory", value_name = "DIR")]
    dir: Option<PathBuf>,
    /// Bytes to move in each direction
    #[arg(long, value_name = "BYTES", default_value = "1GiB")]
    size: Bytes,
    /// Bytes of a tile
    #[arg(long, value_name = "BYTES", default_value = "4MiB")]
    tile: Bytes,
    /// Operations in flight
    #[arg(long, default_value_t = 16)]
    iodepth: u32,
    /// I/O engine: auto, uring, aio or psync
    #[arg(long, default_value = "auto")]
    engine: String,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// Runs the workload and prints its report.
pub(crate) fn run(args: &CanonicalArgs) -> Result<()> {
    let choice = EngineChoice::from_name(&args.engine).with_context(|| {
        format!(
            "--engine {}: expected one of {:?}",
            args.engine,
            offloadd::api::ENGINES
        )
    })?;
    let (size, tile) = (args.size.0, args.tile.0);
    ensure!(
        tile.is_multiple_of(u64::from(BLOCK_BYTES))
            && tile <= u64::from(TILE_BYTES_MAX)
            && size >= tile,
        "--tile {}: must be a multiple of {BLOCK_BYTES} bytes, at most {} and at most --size",
        args.tile,
        Bytes(u64::from(TILE_BYTES_MAX))
    );
    ensure!(
        (1..=IODEPTH_MAX).contains(&args.iodepth),
        "--iodepth {}: must be 1 to {IODEPTH_MAX}",
        args.iodepth
    );
    let dir = match &args.dir {
        Some(dir) => dir.clone(),
        None => {
            confirm::current_directory(size.saturating_mul(5) / 2)?;
            PathBuf::from(".")
        }
    };
    let mut warnings = warnings::before();
    warnings.extend(warnings::of_drives(std::iter::once(&*dir)));
    let job = |place| Job {
        name: None,
        rw: Access::Write,
        read_percent: 50,
        bs: tile as u32,
        iodepth: args.iodepth,
        numjobs: 1,
        runtime: Duration::ZERO,
        ramp: Duration::ZERO,
        engine: choice,
        engine_word: args.engine.clone(),
        size: Some(size),
        direct: true,
        place,
        gpu: false,
    };
    let dirs = vec![dir.clone()];
    let progress = Progress::new();
    // One after the other, so that the second one uses the space of the first.
    let daemon = passes(&job(Place::Private(dirs.clone())), &progress)?;
    let engine_alone = passes(&job(Place::NewFiles(dirs)), &progress)?;
    drop(progress);
    warnings.extend(warnings::after_all(&[
        &daemon.write,
        &daemon.read,
        &engine_alone.write,
        &engine_alone.read,
    ]));
    let settings = Settings {
        tile_bytes: tile,
        tile_count: size / tile,
        iodepth: args.iodepth,
        ioengine: args.engine.clone(),
    };
    let devices = vec![DeviceReport::of(&dir)];
    let report = CanonicalReport {
        about: About::new(settings, devices, warnings),
        daemon,
        engine_alone,
    };
    report::print(&report, args.json)?;
    Ok(())
}

#[derive(Debug, Serialize)]
struct CanonicalReport {
    #[serde(flatten)]
    about: About<Settings>,
    daemon: Passes,
    /// The same bytes without daemon, shared rings and checksums.
    engine_alone: Passes,
}

#[derive(Debug, Serialize)]
struct Settings {
    tile_bytes: u64,
    tile_count: u64,
    iodepth: u32,
    ioengine: String,
}

/// One write and one read of all bytes.
#[derive(Debug, Serialize)]
struct Passes {
    /// Includes the flush; through the daemon, the commit.
    write: Figures,
    read: Figures,
}

impl Passes {
    fn ways(&self) -> [(&'static str, &Figures); 2] {
        [("write", &self.write), ("read", &self.read)]
    }
}

/// Writes and reads all bytes of `job`, over previously written data.
fn passes(job: &Job, progress: &Progress) -> Result<Passes> {
    let prepared = Prepared::new(job, progress)?;
    let bench = Bench::open(prepared.plan.clone())?;
    let streams = prepared.streams(job);
    if prepared.to_fill {
        bench.fill(&streams, progress)?;
    }
    let timing = Timing {
        ramp: Duration::ZERO,
        runtime: Duration::ZERO,
    };
    let pass = |reads: bool| -> Result<Figures> {
        let one_way = |plan: &StreamPlan| StreamPlan {
            reads,
            writes: !reads,
            ..plan.clone()
        };
        let streams: Vec<Vec<StreamPlan>> = streams
            .iter()
            .map(|job| job.iter().map(one_way).collect())
            .collect();
        let what = format!(
            "{}, {}",
            prepared.word,
            if reads { "reading" } else { "writing" }
        );
        let figures = bench.run(&streams, timing, progress, &what)?;
        Ok(figures)
    };
    Ok(Passes {
        write: pass(false)?,
        read: pass(true)?,
    })
}

impl fmt::Display for CanonicalReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let settings = &self.about.settings;
        for ((way, through), (_, bare)) in
            self.daemon.ways().into_iter().zip(self.engine_alone.ways())
        {
            let (through, bare) = (rate_of(through), rate_of(bare));
            writeln!(
                f,
                "{way:5}  {:>11}   {:3.0} % of the engine alone ({})",
                ApproxRate(through).to_string(),
                100.0 * through / bare,
                ApproxRate(bare)
            )?;
        }
        for (who, passes) in [
            ("through offloadd", &self.daemon),
            ("the engine alone", &self.engine_alone),
        ] {
            writeln!(f, "\n{who}, engine {}", passes.write.engine)?;
            for (_, figures) in passes.ways() {
                write!(f, "{figures}")?;
            }
        }
        writeln!(
            f,
            "\n{} tiles of {} bytes, iodepth {}, ioengine {}",
            settings.tile_count, settings.tile_bytes, settings.iodepth, settings.ioengine
        )?;
        write!(f, "{}", self.about)
    }
}
