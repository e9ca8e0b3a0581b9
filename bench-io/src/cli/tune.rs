//! `bench-io tune`: the settings these drives like, as a file for the daemon that was seen to load.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use clap::Args;
use offloadd::api::IODEPTH_MAX;
use offloadd::config::Config;

use crate::machine::Machine;
use crate::progress::Progress;
use crate::report::{REPORT_VERSION, warnings};
use crate::scale::Load;
use crate::tune::{self, Tuned};
use crate::words::{Bytes, SpeedText};

/// Shown below the options.
pub(crate) const EXAMPLES: &str = "Examples:
  bench-io tune --folder /mnt/nvme0 --folder /mnt/nvme1
  bench-io tune --folder /mnt/nvme0 --config offloadd.toml    # leaves the settings in a file";

/// All of it ends before this.
const TIME: Duration = Duration::from_secs(50);

/// Host memory the printed settings give out, where half of what is here is more: the person who pastes them decides.
const ARENA_BYTES_MAX: u64 = 64 << 30;

/// Finds settings.
#[derive(Args)]
pub(crate) struct TuneArgs {
    /// A folder on a drive; one for each drive
    #[arg(long = "folder", value_name = "FOLDER", required = true)]
    folders: Vec<PathBuf>,
    /// Bytes used of each drive, twice
    #[arg(long, value_name = "BYTES", default_value = "256m")]
    size: Bytes,
    /// Seconds of each of some 14 trials
    #[arg(long, value_name = "SECONDS", default_value_t = 1.0)]
    runtime: f64,
    /// Leave the settings in this file, which must not exist
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// One JSON object instead of lines to read
    #[arg(long)]
    json: bool,
}

/// Tries, and prints what was chosen.
///
/// # Errors
/// Nothing could be tried.
pub(crate) fn run(args: &TuneArgs) -> Result<()> {
    ensure!(
        args.size.0 >= 4 << 20,
        "--size {}: at least 4 MiB",
        args.size
    );
    ensure!(
        (0.1..=3.0).contains(&args.runtime),
        "--runtime {}: seconds, 0.1 to 3",
        args.runtime
    );
    if let Some(path) = &args.config {
        ensure!(
            !path.exists(),
            "--config {}: it exists already",
            path.display()
        );
    }
    let mut warnings = warnings::before();
    let progress = Progress::new();
    let size = args.size.0 / 4096 * 4096;
    let tuned = tune::tune(
        &args.folders,
        size,
        Duration::from_secs_f64(args.runtime),
        Instant::now() + TIME,
        &progress,
    )?;
    drop(progress);
    if tuned.cut_short {
        warnings.push(format!(
            "after {} s not everything was tried: use a smaller --size or --runtime",
            TIME.as_secs()
        ));
    }
    let settings = settings(&args.folders, &tuned)?;
    if let Some(path) = &args.config {
        std::fs::write(path, &settings).with_context(|| format!("writing {}", path.display()))?;
    }
    let machine = Machine::here();
    if args.json {
        let report = serde_json::json!({
            "version": REPORT_VERSION, "machine": machine, "tuned": tuned, "settings": settings, "warnings": warnings,
        });
        println!("{report}");
        return Ok(());
    }
    for warning in &warnings {
        println!("warning: {warning}");
    }
    println!("{machine}\n");
    for reason in &tuned.without {
        println!("not here: {reason}");
    }
    println!(
        "{:7} {:>8} {:>8} {:6} {:>12} {:>12} {:>12}",
        "engine", "bs", "iodepth", "", "read", "write", "CPU s/GB"
    );
    for trial in &tuned.trials {
        println!(
            "{:7} {:>8} {:>8} {:6} {:>12} {:>12} {:>12.3}",
            trial.engine,
            Bytes(u64::from(trial.bs)).to_string(),
            trial.iodepth,
            trial.load.word(),
            SpeedText(trial.read_bytes_per_s).to_string(),
            SpeedText(trial.write_bytes_per_s).to_string(),
            trial.cpu_s_per_gb
        );
    }
    println!("\nFor the daemon (checked: it loads):\n\n{settings}");
    Ok(())
}

/// A whole file for the daemon, checked by the daemon's own reader.
fn settings(folders: &[PathBuf], tuned: &Tuned) -> Result<String> {
    let devices = folders
        .iter()
        .map(|folder| {
            let folder =
                std::path::absolute(folder).with_context(|| folder.display().to_string())?;
            let device = folder.join("offloadd.tiles");
            let text = device.to_str().context("a folder's name is not UTF-8")?;
            Ok(toml::Value::from(text).to_string())
        })
        .collect::<Result<Vec<_>>>()?;
    let memory = offloadd::memory::total_bytes().unwrap_or(ARENA_BYTES_MAX);
    let arena = (memory / 2).min(ARENA_BYTES_MAX) >> 30;
    // Both ways on every drive.
    let iodepth = (tuned.iodepth * 2 * folders.len() as u32).clamp(1, IODEPTH_MAX);
    let reached = |load: Load| {
        let last = tuned.trials.iter().rev().find(|trial| trial.load == load);
        last.map_or(0.0, |trial| trial.bytes_per_s())
    };
    let text = format!(
        "# bench-io tune: {} read, {} written, {} both at once, in tiles of {}\n\
         socket = \"/run/offloadd/offloadd.sock\"\n\
         devices = [{}]\n\
         arena_bytes_max = \"{}GiB\"\n\
         engine = \"{}\"\n\
         iodepth_max = {iodepth}\n",
        SpeedText(reached(Load::Read)),
        SpeedText(reached(Load::Write)),
        SpeedText(reached(Load::Both)),
        Bytes(u64::from(tuned.bs)),
        devices.join(", "),
        arena.max(1),
        tuned.engine,
    );
    Config::parse(&text, Path::new("the settings found"))
        .context("the daemon would refuse them")?;
    Ok(text)
}
