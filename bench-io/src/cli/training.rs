//! `bench-io training`: options and output files.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use clap::Args;

use crate::progress::Progress;
use crate::report;
use crate::report::{About, DeviceReport, warnings};
use crate::scale::Load;
use crate::testdrives::RateLimit;
use crate::training::{
    self, DeepSpeedStep, OtherMachine, PlannerInput, Subject, Trainer, TrainingReport, TrainingRow,
    TrainingSettings, TrialPlan,
};
use crate::trial::TrialFiles;
use crate::units::Rate;

pub(crate) const EXAMPLES: &str = "Examples:
  bench-io training --model configs/models/Llama-2-7B.json --tflops 400 --read 6.2GB/s --write 3.2GB/s
  bench-io training --model config.json --host-memory 512GiB --cores 32 --gpu-memory 80GiB   # for another machine
  bench-io training RUN.toml --directory /mnt/nvme0 --directory /mnt/nvme1       # with what these drives do
  bench-io training --run RUN.toml --read 620MB/s --write 320MB/s --out target/training
                                # as root: trains on 1 to 4 rate-limited drives and prints predicted beside measured

Predictions are those of `trainer plan`.";

#[derive(Args)]
pub(crate) struct TrainingArgs {
    /// Predict a step of this run file; its state must be on drives
    #[arg(value_name = "RUN.toml", required_unless_present_any = ["model", "run"], conflicts_with_all = ["model", "run"])]
    file: Option<PathBuf>,
    /// Predict a step of this model (config.json or its directory) with all state on drives
    #[arg(long, value_name = "config.json", conflicts_with = "run")]
    model: Option<PathBuf>,
    /// Train this run file on rate-limited drives and compare; needs root
    #[arg(long, value_name = "RUN.toml")]
    run: Option<PathBuf>,
    /// Read rate of one drive
    #[arg(
        long,
        value_name = "RATE",
        default_value = "6.2GB/s",
        conflicts_with = "dirs"
    )]
    read: Rate,
    /// Write rate of one drive
    #[arg(
        long,
        value_name = "RATE",
        default_value = "3.2GB/s",
        conflicts_with = "dirs"
    )]
    write: Rate,
    /// Measure the rates in these directories, one for each drive
    #[arg(long = "directory", value_name = "DIR", conflicts_with = "run")]
    dirs: Vec<PathBuf>,
    /// Numbers of drives, separated by commas [default: 1,2,3,4; with --directory 1 to all]
    #[arg(long, value_name = "N", value_delimiter = ',')]
    drives: Vec<u32>,
    /// Compute of one process in TFLOPS [default: taken from the plan]
    #[arg(long, value_name = "N", conflicts_with = "run")]
    tflops: Option<f64>,
    #[command(flatten)]
    machine: OtherMachine,
    /// With --model: tokens of a sequence
    #[arg(long, value_name = "N", default_value_t = 2048, conflicts_with_all = ["file", "run"])]
    seq_len: u64,
    /// With --model: sequences of a micro-batch
    #[arg(long, value_name = "N", default_value_t = 8, conflicts_with_all = ["file", "run"], value_parser = clap::value_parser!(u64).range(1..=1 << 20))]
    micro_batch: u64,
    /// Micro-batches of a step [default: 1, or the run file's gradient_accumulation_steps]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=1 << 20))]
    accumulation: Option<u64>,
    /// Override a setting of the run file
    #[arg(long = "set", value_name = "KEY=VALUE", conflicts_with = "model")]
    sets: Vec<String>,
    /// With --run: steps of each run; the first three do not count
    #[arg(long, value_name = "N", default_value_t = 8, conflicts_with_all = ["file", "model"], value_parser = clap::value_parser!(u64).range(5..=1000))]
    steps: u64,
    /// With --run: loop devices that make up each rate-limited drive
    #[arg(long, value_name = "N", default_value_t = 1, conflicts_with_all = ["file", "model"], value_parser = clap::value_parser!(u32).range(1..=64))]
    loop_devices: u32,
    /// With --run: time limit of one run in seconds
    #[arg(long, value_name = "SECONDS", default_value_t = 600, conflicts_with_all = ["file", "model"])]
    timeout: u64,
    /// With --run: path of the trainer [default: beside this program]
    #[arg(long, value_name = "PROGRAM", conflicts_with_all = ["file", "model"])]
    trainer: Option<PathBuf>,
    /// Write training.json to this directory; trainer/bench/io/draw.py draws it
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// Predicts or trains, prints the report and writes the files.
pub(crate) fn run(args: &TrainingArgs) -> Result<()> {
    if let Some(tflops) = args.tflops {
        ensure!(
            tflops > 0.0 && tflops < 1e6,
            "--tflops {tflops}: must be more than 0"
        );
    }
    let counts = counts(args)?;
    let run = match &args.run {
        Some(file) => Some((file, Trainer::find(args.trainer.as_deref())?)),
        None => None,
    };
    // Fails before minutes are spent on measuring.
    if let Some(out) = &args.out {
        std::fs::create_dir_all(out).with_context(|| format!("creating {}", out.display()))?;
    }
    let measures = args.run.is_some() || !args.dirs.is_empty();
    let mut warnings = match measures {
        true => warnings::before(),
        false => Vec::new(),
    };
    let dirs = args.dirs.iter().map(PathBuf::as_path);
    warnings.extend(warnings::of_one_drive(&args.dirs));
    warnings.extend(warnings::of_drives(dirs));
    let progress = Progress::new();
    let devices = args.dirs.iter().map(|dir| DeviceReport::describe(dir));
    let mut devices: Vec<DeviceReport> = devices.collect();
    let rows = match &run {
        Some(run) => measured(args, run, &counts, &mut devices, &progress)?,
        None => counts
            .iter()
            .map(|drives| {
                crate::stop::check()?;
                predicted(args, *drives, &progress)
            })
            .collect::<Result<_>>()?,
    };
    drop(progress);
    for row in &rows {
        if let Some(trial) = &row.drives_measured {
            let found = warnings::after(&trial.figures);
            let drives = row.drives;
            warnings.extend(
                found
                    .iter()
                    .map(|warning| format!("the rates of {drives}: {warning}")),
            );
        }
    }
    let rates = match (&args.run, args.dirs.is_empty()) {
        (Some(_), _) => format!(
            "rate-limited drives of {} read and {} written, measured both at once",
            args.read, args.write
        ),
        (None, false) => "measured, both at once".into(),
        (None, true) => format!(
            "given: {} read and {} written per drive, both at once",
            args.read, args.write
        ),
    };
    let report = TrainingReport {
        about: About::new(settings(args), devices, warnings),
        rates,
        rows,
    };
    // Printing and writing files may fail independently on a full drive; do both.
    let outcome = report::print(&report, args.json);
    if let Some(out) = &args.out {
        report::leave(out, "training", report.description(), &report)?;
    }
    outcome
}

/// Given rates of `drives` drives.
fn given(args: &TrainingArgs, drives: u32) -> PlannerInput {
    PlannerInput {
        read_bytes_per_s: args.read.0 as f64 * f64::from(drives),
        write_bytes_per_s: args.write.0 as f64 * f64::from(drives),
        tflops: args.tflops,
        machine: args.machine,
    }
}

fn subject(args: &TrainingArgs) -> Result<Subject> {
    Ok(match (&args.model, &args.file) {
        (Some(config), _) => Subject::Model {
            config: config.clone(),
            seq_len: args.seq_len,
            micro_batch: args.micro_batch,
            accumulation: args.accumulation.unwrap_or(1),
        },
        (None, Some(file)) => Subject::Run {
            file: file.clone(),
            sets: sets(args),
        },
        (None, None) => anyhow::bail!("name a run file or a model"),
    })
}

fn settings(args: &TrainingArgs) -> TrainingSettings {
    let mut subject = [&args.file, &args.model, &args.run].into_iter().flatten();
    let of_model = args.model.is_some();
    TrainingSettings {
        subject: subject
            .next()
            .map_or_else(String::new, |path| path.display().to_string()),
        sets: args.sets.clone(),
        seq_len: of_model.then_some(args.seq_len),
        micro_batch: of_model.then_some(args.micro_batch),
        accumulation: args.accumulation,
        tflops: args.tflops,
        machine: args.machine,
        steps: args.run.is_some().then_some(args.steps),
    }
}

fn counts(args: &TrainingArgs) -> Result<Vec<u32>> {
    let all = match args.dirs.len() {
        0 => 4,
        count => count as u32,
    };
    if args.drives.is_empty() {
        return Ok((1..=all).collect());
    }
    let most = if args.dirs.is_empty() { 64 } else { all };
    let wrong = args
        .drives
        .iter()
        .find(|count| !(1..=most).contains(*count));
    ensure!(
        wrong.is_none(),
        "--drives {}: must be 1 to {most}",
        wrong.unwrap_or(&0)
    );
    Ok(args.drives.clone())
}

/// Settings that override the run file.
fn sets(args: &TrainingArgs) -> Vec<String> {
    let accumulation = args
        .accumulation
        .map(|count| format!("gradient_accumulation_steps={count}"));
    args.sets.iter().cloned().chain(accumulation).collect()
}

fn predicted(args: &TrainingArgs, drives: u32, progress: &Progress) -> Result<TrainingRow> {
    let subject = subject(args)?;
    let mut measured = None;
    let given = if args.dirs.is_empty() {
        given(args, drives)
    } else {
        let trial_files = TrialFiles::make(
            &args.dirs[..drives as usize],
            256 << 20,
            Duration::from_secs(1),
            progress,
        )?;
        let trial = trial_files.try_one("auto", 4 << 20, 32, Load::Both, progress)?;
        PlannerInput {
            machine: args.machine,
            ..PlannerInput::measured(measured.insert(trial), args.tflops)
        }
    };
    let ours = subject.plan(&given)?;
    ensure!(
        ours.written_bytes > 0.0,
        "the run keeps no state on drives: set zero_optimization.offload_param and \
         offload_optimizer to \"nvme\" with --set"
    );
    Ok(TrainingRow {
        drives_measured: measured,
        ..row(drives, given, ours)
    })
}

/// Runs the trainer on each of these numbers of drives, and then predicts all of these steps.
fn measured(
    args: &TrainingArgs,
    (file, trainer): &(&PathBuf, Trainer),
    counts: &[u32],
    devices: &mut Vec<DeviceReport>,
    progress: &Progress,
) -> Result<Vec<TrainingRow>> {
    let mut runs = Vec::new();
    for &drives in counts {
        crate::stop::check()?;
        let plan = TrialPlan {
            file: (*file).clone(),
            sets: sets(args),
            steps: args.steps as usize,
            drives,
            limit: RateLimit {
                read: args.read.0,
                write: args.write.0,
            },
            loop_devices: args.loop_devices,
            timeouts: Duration::from_secs(args.timeout),
        };
        let ran = training::run(&plan, trainer, progress)?;
        // Each run has its own drives; those of the largest run are reported.
        if ran.devices.len() > devices.len() {
            devices.clone_from(&ran.devices);
        }
        runs.push((drives, ran));
    }
    let rows = runs.into_iter().map(|(drives, ran)| {
        let planned = ran.subject.plan(&ran.given)?;
        Ok(TrainingRow {
            drives_measured: Some(ran.drives),
            measured: Some(ran.trial),
            ..row(drives, ran.given, planned)
        })
    });
    rows.collect()
}

fn row(drives: u32, given: PlannerInput, ours: training::PlannedStep) -> TrainingRow {
    TrainingRow {
        drives,
        read_bytes_per_s: given.read_bytes_per_s,
        write_bytes_per_s: given.write_bytes_per_s,
        deepspeed: DeepSpeedStep::new(
            ours.parameters,
            ours.micro_batches,
            ours.compute_s,
            given.read_bytes_per_s,
            given.write_bytes_per_s,
        ),
        ours,
        drives_measured: None,
        measured: None,
    }
}
