//! `bench-io tune`: finds good settings for drives and prints them as a checked settings file.

use std::fmt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use clap::Args;
use kernels::adamw::{Master, state_tile_bytes};
use offload_client::IODEPTH_MIN;
use offload_support::units::ApproxRate;
use offloadd::api::IODEPTH_DEFAULT;
use offloadd::api::IODEPTH_MAX;
use offloadd::config::Config;
use serde::Serialize;

use crate::progress::Progress;
use crate::report;
use crate::report::{DeviceReport, Head, warnings};
use crate::scale::Load;
use crate::trial::Trial;
use crate::tune::{self, Tried, Tuned};
use crate::units::Bytes;

pub(crate) const EXAMPLES: &str = "Examples:
  bench-io tune --directory /mnt/nvme0 --directory /mnt/nvme1
  bench-io tune --directory /mnt/nvme0 --config offloadd.toml    # writes the settings to a file

Drives are measured directly, with the daemon's engines. `bench-io run` measures through a daemon, with `--target gpu` into a GPU's memory.";

/// Time limit of the whole search.
const TIME: Duration = Duration::from_secs(50);

/// Largest arena in the printed settings, if half of the memory here is more.
const ARENA_BYTES_MAX: u64 = 64 << 30;

/// The trainer's tiles are multiples of this.
const TILE_ELEMS_STEP: u64 = 4096;

#[derive(Args)]
pub(crate) struct TuneArgs {
    /// Directory on a drive; give one for each drive
    #[arg(long = "directory", value_name = "DIR", required = true)]
    dirs: Vec<PathBuf>,
    /// Bytes used of each drive, twice
    #[arg(long, value_name = "BYTES", default_value = "256m")]
    size: Bytes,
    /// Seconds of each of about 20 trials
    #[arg(long, value_name = "SECONDS", default_value_t = 1.0)]
    runtime: f64,
    /// Write the daemon's settings to this file, which must not exist
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// Tries settings and prints the choice.
pub(crate) fn run(args: &TuneArgs) -> Result<()> {
    ensure!(
        args.size.0 >= 4 << 20,
        "--size {}: must be at least 4 MiB",
        args.size
    );
    ensure!(
        (0.1..=3.0).contains(&args.runtime),
        "--runtime {}: must be 0.1 to 3 seconds",
        args.runtime
    );
    if let Some(path) = &args.config {
        ensure!(
            !path.exists(),
            "--config {}: the file already exists",
            path.display()
        );
        let dir = std::path::absolute(path).with_context(|| path.display().to_string())?;
        ensure!(
            dir.parent().is_some_and(Path::is_dir),
            "--config {}: the directory does not exist; create it first",
            path.display()
        );
    }
    check_dirs(&args.dirs)?;
    let mut warnings = warnings::before();
    let progress = Progress::new();
    let size = args.size.0 / 4096 * 4096;
    let tuned = tune::tune(
        &args.dirs,
        size,
        Duration::from_secs_f64(args.runtime),
        TIME,
        &progress,
    )?;
    drop(progress);
    warnings.extend(warnings::of_one_drive(&args.dirs));
    warnings.extend(warnings::of_drives(args.dirs.iter().map(PathBuf::as_path)));
    warnings.extend(caveats(&tuned));
    let daemon_file = daemon_file(&args.dirs, &tuned)?;
    let stores = args.dirs.iter().map(|dir| store(dir));
    let stores = stores.collect::<Result<Vec<_>>>()?;
    let devices = args.dirs.iter().map(|dir| DeviceReport::of(dir));
    let settings = Settings {
        size,
        runtime_s: args.runtime,
    };
    let report = TuneReport {
        head: Head::new(settings, devices.collect(), warnings),
        run_file: run_file(args.dirs.len() as u32, &tuned),
        tuned,
        format_first: stores.into_iter().filter(|path| !path.exists()).collect(),
        daemon_file,
    };
    // Printing and writing the file may fail independently; do both.
    let outcome = report::print(&report, args.json);
    if let Some(path) = &args.config {
        std::fs::write(path, &report.daemon_file)
            .with_context(|| format!("writing {}", path.display()))?;
    }
    outcome
}

#[derive(Debug, Serialize)]
struct TuneReport {
    #[serde(flatten)]
    head: Head<Settings>,
    tuned: Tuned,
    /// Settings of the daemon, to copy.
    daemon_file: String,
    /// Settings of a run, to copy: what the daemon leaves to its clients.
    run_file: String,
    /// Devices of those settings that do not exist yet.
    format_first: Vec<PathBuf>,
}

#[derive(Debug, Serialize)]
struct Settings {
    /// Bytes of each file, unless the drive is too slow for it.
    size: u64,
    /// Seconds of each trial.
    runtime_s: f64,
}

/// Returns warnings about choices that the trials do not support well.
fn caveats(tuned: &Tuned) -> Vec<String> {
    let mut found = Vec::new();
    if !tuned.defaults.is_empty() {
        found.push(format!(
            "{} not measured: the settings contain the default",
            tuned.defaults.join(" and ")
        ));
    }
    let nothing = tuned
        .trials
        .iter()
        .filter(|tried| tried.trial.bytes_per_s().is_none());
    let nothing = nothing.count();
    if nothing > 0 {
        found.push(format!(
            "in {nothing} of {} trials one direction moved nothing, so they do not count; use a longer --runtime",
            tuned.trials.len()
        ));
    }
    let busy = tuned
        .trials
        .iter()
        .filter(|tried| warnings::is_busy(&tried.trial.figures));
    let busy = busy.count();
    if busy > 0 {
        found.push(format!(
            "in {busy} of {} trials the machine was less than {:.0} % idle: their figures may be limited by the processor",
            tuned.trials.len(),
            100.0 * warnings::IDLE_SHARE_MIN
        ));
    }
    let chosen = Load::ALL.into_iter().filter_map(|load| tuned.chosen(load));
    found.extend(chosen.flat_map(|trial| warnings::after(&trial.figures)));
    found
}

impl fmt::Display for TuneReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.head)?;
        let tuned = &self.tuned;
        writeln!(
            f,
            "direct, two files of {} bytes per drive, {} s per trial\n",
            tuned.file_bytes, self.head.settings.runtime_s
        )?;
        for reason in &tuned.without {
            writeln!(f, "not available: {reason}")?;
        }
        for what in &tuned.untried {
            writeln!(f, "not tried: {what}")?;
        }
        writeln!(
            f,
            "{:7} {:>8} {:>8} {:6} {:>12} {:>12} {:>9}  latency p50, p99, p99.9, max",
            "engine", "bs", "iodepth", "", "read", "write", "CPU s/GB"
        )?;
        for Tried { trial, .. } in &tuned.trials {
            let [read, write] = trial.rates();
            let latencies = trial.figures.ways().map(|(_, way)| way.latencies());
            writeln!(
                f,
                "{:7} {:>8} {:>8} {:6} {:>12} {:>12} {:>9.3}  {}",
                trial.engine,
                Bytes(u64::from(trial.bs)).to_string(),
                trial.iodepth,
                trial.load.word(),
                ApproxRate(read).to_string(),
                ApproxRate(write).to_string(),
                trial.figures.cpu.s_per_gb,
                latencies.collect::<Vec<_>>().join(" + ")
            )?;
        }
        write!(f, "\nSettings for the daemon (checked by its parser")?;
        if !self.format_first.is_empty() {
            write!(
                f,
                "; create their devices first: `offloadd format --config FILE --size SIZE`"
            )?;
        }
        writeln!(f, "):\n\n{}", self.daemon_file)?;
        writeln!(
            f,
            "Settings for the run file of a new run:\n\n{}",
            self.run_file
        )
    }
}

/// Refuses directories that the daemon could not use, before a minute is spent.
fn check_dirs(dirs: &[PathBuf]) -> Result<()> {
    let real = dirs.iter().map(|dir| {
        std::fs::canonicalize(dir).with_context(|| format!("--directory {}", dir.display()))
    });
    let devices = devices(&real.collect::<Result<Vec<_>>>()?)?;
    let text = format!(
        "socket = \"/run/offloadd/offloadd.sock\"\ndevices = {devices}\narena_bytes_max = \"1GiB\"\n"
    );
    Config::parse(&text, Path::new("of these directories")).context("--directory")?;
    Ok(())
}

/// The daemon's devices in `dirs`, as its settings file names them.
fn devices(dirs: &[PathBuf]) -> Result<String> {
    let texts = dirs.iter().map(|dir| {
        let device = store(dir)?;
        let text = device
            .to_str()
            .with_context(|| format!("--directory {}: its name is not UTF-8", dir.display()))?;
        Ok(toml::Value::from(text).to_string())
    });
    Ok(format!(
        "[{}]",
        texts.collect::<Result<Vec<_>>>()?.join(", ")
    ))
}

/// The daemon's device in `dir`.
fn store(dir: &Path) -> Result<PathBuf> {
    let dir = std::path::absolute(dir).with_context(|| dir.display().to_string())?;
    Ok(dir.join("offloadd.tiles"))
}

/// The daemon's settings, checked by the daemon's own parser.
fn daemon_file(dirs: &[PathBuf], tuned: &Tuned) -> Result<String> {
    let devices = devices(dirs)?;
    let memory = offload_support::memory::total_bytes().unwrap_or(ARENA_BYTES_MAX);
    let arena = (memory / 2).min(ARENA_BYTES_MAX) >> 30;
    // Both directions on every drive. The default that sessions ask for must be granted in any case.
    let drives = dirs.len() as u32;
    let iodepth = inflight(drives, tuned).clamp(IODEPTH_DEFAULT, IODEPTH_MAX);
    let reached = |load: Load| {
        let rate = tuned.chosen(load).and_then(Trial::bytes_per_s);
        rate.map_or_else(|| "not tried".into(), |rate| ApproxRate(rate).to_string())
    };
    let defaults = not_measured(tuned, &["engine", "bs", "iodepth"]);
    let text = format!(
        "# bench-io tune: {} read, {} written, {} both at once, in tiles of {}\n{defaults}\
         socket = \"/run/offloadd/offloadd.sock\"\n\
         devices = {devices}\n\
         arena_bytes_max = \"{}GiB\"\n\
         engine = \"{}\"\n\
         iodepth_max = {iodepth}\n",
        reached(Load::Read),
        reached(Load::Write),
        reached(Load::Both),
        Bytes(u64::from(tuned.bs)),
        arena.max(1),
        tuned.engine,
    );
    Config::parse(&text, Path::new("the settings found"))
        .context("the daemon would refuse these settings")?;
    Ok(text)
}

/// Operations in flight in both directions on all drives.
fn inflight(drives: u32, tuned: &Tuned) -> u32 {
    tuned.iodepth.saturating_mul(2 * drives)
}

/// Returns a comment that lists those of `words` that no trial chose.
fn not_measured(tuned: &Tuned, words: &[&str]) -> String {
    let defaults: Vec<&str> = (tuned.defaults.iter().copied())
        .filter(|default| words.contains(default))
        .collect();
    match defaults.is_empty() {
        true => String::new(),
        false => format!("# not measured: {}\n", defaults.join(", ")),
    }
}

/// Settings with which a run asks for this block size and depth.
fn run_file(drives: u32, tuned: &Tuned) -> String {
    let elems = tile_elems(tuned.bs);
    format!(
        "{}[offload]\n\
         tile_elems = {elems}   # {} of state in bf16 with its residual: most of the bytes moved\n\
         iodepth = {}\n",
        not_measured(tuned, &["bs", "iodepth"]),
        Bytes(state_bytes(elems)),
        inflight(drives, tuned).clamp(IODEPTH_MIN, IODEPTH_MAX)
    )
}

fn state_bytes(elems: u64) -> u64 {
    state_tile_bytes(Master::SplitBf16, elems as usize) as u64
}

/// Most elements whose state is at most `bs` bytes.
fn tile_elems(bs: u32) -> u64 {
    let steps = u64::from(bs) / state_bytes(TILE_ELEMS_STEP);
    steps.max(1) * TILE_ELEMS_STEP
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tile_of_state_is_as_large_as_what_was_chosen() {
        for bs in [1 << 20, 2 << 20, 4 << 20, 16 << 20] {
            let elems = tile_elems(bs);
            assert!(elems.is_multiple_of(TILE_ELEMS_STEP), "{elems}");
            let bytes = state_bytes(elems);
            assert!(bytes <= u64::from(bs), "{bs}: {bytes}");
            assert!(
                bytes + state_bytes(TILE_ELEMS_STEP) > u64::from(bs),
                "{bs}: {bytes}"
            );
        }
    }
}
