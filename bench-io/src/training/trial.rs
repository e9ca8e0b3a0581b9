//! Runs the trainer on rate-limited drives and compares the measured step with the predicted one.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use serde::Serialize;
use serde_json::Value;

use super::{OtherMachine, PlannerInput, Subject};
use crate::child;
use crate::place::WorkDir;
use crate::progress::Progress;
use crate::report::DeviceReport;
use crate::rounds;
use crate::scale::Load;
use crate::testdrives::{DrivesPlan, OwnDrives, RateLimit};
use crate::trial::TrialFiles;

/// Steps that do not count: fresh weights, first extents and empty read-ahead.
const WARM_STEPS: usize = 3;

/// Size of a drive relative to its part of the tiles: unequal placement, records, file system metadata.
const DRIVE_SHARE: f64 = 1.2;
const DRIVE_SLACK_BYTES: u64 = 192 << 20;

/// Bytes of the files for measuring rates.
const TRIAL_FILE_BYTES: u64 = 32 << 20;

/// The trainer's program.
#[derive(Clone, Debug)]
pub(crate) struct Trainer {
    program: PathBuf,
}

impl Trainer {
    /// Finds the named trainer, or the one beside this program.
    ///
    /// # Errors
    /// There is none.
    pub(crate) fn find(named: Option<&Path>) -> Result<Self> {
        let beside = std::env::current_exe()
            .ok()
            .and_then(|exe| Some(exe.parent()?.join("trainer")));
        let program = named
            .map(Path::to_owned)
            .or(beside)
            .context("a directory of this program")?;
        ensure!(
            program.is_file(),
            "no trainer at {}: build it with `make build`, or name it with --trainer",
            program.display()
        );
        Ok(Self { program })
    }

    /// A command that ends with this process.
    fn command(&self) -> Command {
        child::command(&self.program)
    }
}

#[derive(Clone, Debug)]
pub(crate) struct TrialPlan {
    pub(crate) file: PathBuf,
    pub(crate) sets: Vec<String>,
    pub(crate) steps: usize,
    pub(crate) drives: u32,
    pub(crate) limit: RateLimit,
    pub(crate) loop_devices: u32,
    /// Time limit of the run.
    pub(crate) timeouts: Duration,
}

/// Medians of the steps after the first ones, and means of their bytes.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct StepMedians {
    pub(crate) step_s: f64,
    pub(crate) compute_s: f64,
    pub(crate) read_bytes: f64,
    pub(crate) written_bytes: f64,
    pub(crate) steps: usize,
}

/// Results of a run on its own drives.
pub(crate) struct OwnDrivesRun {
    /// Measured rates, and the run's compute.
    pub(crate) given: PlannerInput,
    /// The run, for a prediction from these. Planning opens the GPU and keeps some of its memory until this process ends: wait until
    /// all runs have ended.
    pub(crate) subject: Subject,
    pub(crate) drives: crate::trial::Trial,
    pub(crate) devices: Vec<DeviceReport>,
    pub(crate) trial: StepMedians,
}

/// Creates drives, measures them, trains on them, destroys them.
///
/// # Errors
/// No drives, or a run that fails or is refused.
pub(crate) fn run(
    plan: &TrialPlan,
    trainer: &Trainer,
    progress: &Progress,
) -> Result<OwnDrivesRun> {
    let count = f64::from(plan.drives);
    let as_set = PlannerInput {
        read_bytes_per_s: plan.limit.read as f64 * count,
        write_bytes_per_s: plan.limit.write as f64 * count,
        tflops: None,
        // A GPU makes the drives no larger, and this process would keep some of its memory, which the trainer would lack.
        machine: OtherMachine {
            gpu_memory: Some(0),
            ..OtherMachine::default()
        },
    };
    // The plan does not need existing directories.
    let dirs: Vec<PathBuf> = (0..plan.drives * plan.loop_devices)
        .map(|index| format!("/drive{index}").into())
        .collect();
    let run_dir = WorkDir::make(&std::env::temp_dir())?;
    let planned = subject(plan, &dirs, run_dir.path()).plan(&as_set)?;
    ensure!(
        planned.written_bytes > 0.0,
        "{}: the run keeps no state on drives",
        plan.file.display()
    );
    progress.say("making rate-limited drives");
    let device_bytes = planned.device_bytes as f64 / count * DRIVE_SHARE;
    let drives = OwnDrives::create(&DrivesPlan {
        name: format!("training-{}", std::process::id()),
        count: plan.drives,
        bytes: device_bytes as u64
            + u64::from(plan.loop_devices) * (2 * TRIAL_FILE_BYTES + DRIVE_SLACK_BYTES),
        limit: plan.limit,
        loop_devices: plan.loop_devices,
        raid0: false,
    })?;
    let _inside = drives.enter()?;
    let dirs = drives.state().dirs.clone();
    let devices = dirs.iter().map(|dir| DeviceReport::describe(dir));
    let devices = devices.collect();
    let measured = measured(&dirs, progress)?;
    let subject = subject(plan, &dirs, run_dir.path());
    let trial = train(plan, trainer, &subject, run_dir.path(), progress)?;
    // The compute time comes from the run; the rest is predicted.
    let flops = 6.0 * planned.parameters * planned.tokens / trial.compute_s.max(1e-9);
    let given = PlannerInput::measured(&measured, Some(flops / 1e12));
    Ok(OwnDrivesRun {
        given,
        subject,
        drives: measured,
        devices,
        trial,
    })
}

/// Measures both directions at once, as in a step.
fn measured(dirs: &[PathBuf], progress: &Progress) -> Result<crate::trial::Trial> {
    let trial_files = TrialFiles::make(dirs, TRIAL_FILE_BYTES, Duration::from_secs(1), progress)?;
    trial_files.try_one("auto", 1 << 20, 16, Load::Both, progress)
}

fn subject(plan: &TrialPlan, dirs: &[PathBuf], run_dir: &Path) -> Subject {
    let paths: Vec<String> = dirs
        .iter()
        .map(|dir| toml::Value::from(dir.display().to_string()).to_string())
        .collect();
    let paths = paths.join(", ");
    let place = |what: &str| {
        format!("zero_optimization.offload_{what}={{device = \"nvme\", nvme_path = [{paths}]}}")
    };
    let mut sets = vec![place("param"), place("optimizer")];
    sets.push(format!("train.steps={}", plan.steps));
    sets.push(format!(
        "train.run_dir={}",
        toml::Value::from(run_dir.join("run").display().to_string())
    ));
    // The person's settings take precedence.
    sets.extend(plan.sets.iter().cloned());
    Subject::Run {
        file: plan.file.clone(),
        sets,
    }
}

fn train(
    plan: &TrialPlan,
    trainer: &Trainer,
    subject: &Subject,
    run_dir: &Path,
    progress: &Progress,
) -> Result<StepMedians> {
    let Subject::Run { file, sets } = subject else {
        bail!("a run has a file");
    };
    let log = run_dir.join("log");
    let output = std::fs::File::create(&log).context("creating a file for the trainer's output")?;
    let mut command = trainer.command();
    command.arg("train").arg(file).arg("--fresh");
    for set in sets {
        command.args(["--set", set]);
    }
    let mut child = command
        .stdin(Stdio::null())
        .stdout(output.try_clone()?)
        .stderr(output)
        .spawn()
        .context("starting the trainer")?;
    let deadline = Instant::now() + plan.timeouts;
    let status = loop {
        if let Some(status) = child.try_wait()? {
            break status;
        }
        let stopped = crate::stop::check();
        if stopped.is_err() || Instant::now() > deadline {
            // The trainer's private daemon ends with the trainer.
            let _ = child.kill();
            let _ = child.wait();
            stopped?;
            bail!("the trainer did not end in {} s", plan.timeouts.as_secs());
        }
        progress.say(&format!(
            "{} drives: training {} steps",
            plan.drives, plan.steps
        ));
        std::thread::sleep(Duration::from_millis(50));
    };
    let metrics = run_dir.join("run").join("metrics.jsonl");
    if !status.success() {
        let log_text = std::fs::read_to_string(&log).unwrap_or_default();
        let last: Vec<&str> = log_text.lines().rev().take(15).collect();
        let last: Vec<&str> = last.into_iter().rev().collect();
        bail!("the trainer failed ({status}):\n{}", last.join("\n"));
    }
    let text = std::fs::read_to_string(&metrics)
        .with_context(|| format!("reading {}", metrics.display()))?;
    trial(&text)
}

fn trial(metrics: &str) -> Result<StepMedians> {
    let lines = metrics
        .lines()
        .map(serde_json::from_str)
        .collect::<Result<Vec<Value>, _>>();
    let lines = lines.context("the run's metrics")?;
    let steady = lines.get(WARM_STEPS..).unwrap_or_default();
    ensure!(
        steady.len() >= 2,
        "{} steps: the first {WARM_STEPS} do not count, and at least two more are needed",
        lines.len()
    );
    let values = |key: &str| {
        let values = steady.iter().map(|line| line[key].as_f64());
        values
            .collect::<Option<Vec<f64>>>()
            .with_context(|| format!("the run's metrics have no `{key}`"))
    };
    // Take the compute time of the same step: on a busy machine another step's compute may take longer than the median step.
    let computing = values("forward_s")?.into_iter().zip(values("backward_s")?);
    let steps = values("step_s")?.into_iter().zip(computing).collect();
    let ((step_s, (forward_s, backward_s)), _) =
        rounds::median(steps, |(step_s, _)| *step_s).context("two steps")?;
    // Writes behind a step may be counted with the next one, so bytes are averaged, while times use the median.
    let mean =
        |key: &str| -> Result<f64> { Ok(values(key)?.iter().sum::<f64>() / steady.len() as f64) };
    Ok(StepMedians {
        step_s,
        compute_s: forward_s + backward_s,
        read_bytes: mean("device_read_bytes")?,
        written_bytes: mean("device_written_bytes")?,
        steps: steady.len(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_steps_do_not_count() {
        let line = |step_s: f64| {
            format!(
                r#"{{"step_s": {step_s}, "forward_s": 0.1, "backward_s": 0.2, "device_read_bytes": 14, "device_written_bytes": 12}}"#
            )
        };
        let lines: Vec<String> = [9.0, 9.0, 9.0, 1.0, 2.0, 1.5]
            .into_iter()
            .map(line)
            .collect();
        let found = trial(&lines.join("\n")).unwrap();
        assert_eq!(
            (found.step_s, found.steps, found.written_bytes),
            (1.5, 3, 12.0)
        );
        assert!((found.compute_s - 0.3).abs() < 1e-9);
        // The median of an even number of steps is the lower one, as in every report.
        let even = trial(&lines[..5].join("\n")).unwrap();
        assert_eq!(even.step_s, 1.0);
        // Compute of the same step, however long other steps took.
        let step = |step_s: f64, computing_s: f64| {
            line(step_s).replace("0.2", &(computing_s - 0.1).to_string())
        };
        let busy =
            [9.0, 9.0, 9.0, 3.0, 1.0, 2.0].map(|s| step(s, if s == 2.0 { 1.5 } else { 2.5 }));
        let busy = trial(&busy.join("\n")).unwrap();
        assert_eq!(busy.step_s, 2.0);
        assert!((busy.compute_s - 1.5).abs() < 1e-9, "{}", busy.compute_s);
        assert!(trial(&lines[..4].join("\n")).is_err());
        assert!(trial("{}\n{}\n{}\n{}\n{}").is_err());
    }
}
