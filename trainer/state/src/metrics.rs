//! `metrics.jsonl` in the run directory: one object for each step, in the order of steps, without duplicates.
//!
//! A line is written when its step's loss is known; the commit of that step may come later. After a crash the
//! file may be ahead of the weights, or end in an incomplete line: opening it for step k drops everything
//! after k. If the crash came between the commit of step k and its line, the line is written from the
//! committed blob: its loss, norm, rate and tokens are exact, its bytes are the plan's, and `step_s` and
//! `bound_s` lack the update.
//!
//! If a line cannot be written, for example on a full disk, it is left out and training continues. Lines are
//! not synced one by one, because that would stall the drive that tiles are written to: after a power loss
//! the file may lack lines, but the weights are complete.

use std::fs::{File, OpenOptions};
use std::io::{BufRead, BufReader, Read, Seek, SeekFrom, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Deserializer, Serialize};

use offload_support::paths::PRIVATE;

/// Bytes at the end of the file that are read to find its last line: many times the length of a line.
const TAIL_BYTES: u64 = 1 << 16;

/// One step's line.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct StepMetrics {
    pub step: u64,
    /// Mean loss over the step's tokens; NaN if only the calling program knows it. Written with all digits needed
    /// to restore its bits.
    #[serde(deserialize_with = "number_or_nan")]
    pub loss: f64,
    /// Global gradient norm before clipping.
    #[serde(deserialize_with = "number_or_nan")]
    pub grad_norm: f64,
    /// Loss scale, if one is used.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub loss_scale: Option<f64>,
    /// Whether the step changed no weight because its gradients were not finite.
    #[serde(skip_serializing_if = "std::ops::Not::not", default)]
    pub skipped: bool,
    pub lr: f64,
    /// Seconds since 1970 when the step's loss was known.
    #[serde(default)]
    pub unix_s: f64,
    /// Tokens of all steps so far.
    pub tokens: u64,
    /// Passes over the training data so far, if its length is known.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub epoch: Option<f64>,
    /// The store's newest committed generation when the step ended; 0: none, or no store.
    #[serde(skip_serializing_if = "is_zero", default)]
    pub generation: u64,
    /// Seconds from the step's start to its end.
    pub step_s: f64,
    /// Seconds of `step_s` in which forward and backward computed.
    #[serde(default)]
    pub forward_s: f64,
    #[serde(default)]
    pub backward_s: f64,
    /// Seconds of `step_s` in which Muon's matrices were made orthogonal, without the Python package's.
    #[serde(skip_serializing_if = "is_zero", default)]
    pub directions_s: f64,
    /// Seconds of `step_s` in which the trainer waited for tiles, updates and commits.
    #[serde(default)]
    pub waited_s: f64,
    /// Seconds of `step_s` in which computing waited for weights and sums of gradients of other ranks.
    #[serde(default)]
    pub exchange_s: f64,
    /// Seconds that the optimizer ran, in parallel to the others.
    #[serde(default)]
    pub update_s: f64,
    /// Bytes this step read from and wrote to devices, over all ranks.
    pub device_read_bytes: u64,
    pub device_written_bytes: u64,
    /// Bytes of these that are gradients.
    #[serde(default)]
    pub device_grad_read_bytes: u64,
    #[serde(default)]
    pub device_grad_written_bytes: u64,
    /// Bytes of weights that this rank gathered from all ranks, and of gradients that it reduced with them.
    #[serde(default)]
    pub gathered_bytes: u64,
    #[serde(default)]
    pub reduced_bytes: u64,
    /// Highest number of gradient bytes that this rank held at a time before they were reduced to its shard.
    #[serde(default)]
    pub grads_held_bytes: u64,
    /// Host memory of the run, over all ranks.
    pub host_bytes: u64,
    /// Bytes of weights that stay in this rank's GPU between their uses, with the Python package.
    #[serde(skip_serializing_if = "is_zero", default)]
    pub gpu_resident_bytes: u64,
    /// Joules that the GPUs took from the end of the step before to the end of this one, over all ranks (with the Python package, this
    /// rank's), and the processors of their machines, where they have counters that can be read.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub gpu_energy_j: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub cpu_energy_j: Option<f64>,
    /// Lower bound of the step's seconds, from its computing and its bytes at the devices' rates.
    pub bound_s: f64,
    /// Mean validation loss after this step, when it was evaluated.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub eval_loss: Option<f64>,
    /// What was evaluated: losses of other data do not compare with it.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub eval_data: Option<String>,
    /// Exponential of `eval_loss`.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub eval_perplexity: Option<f64>,
}

impl StepMetrics {
    /// Returns a warning when a store that resumes at `step` lacks generations which were committed when this line was written: it is an
    /// older copy, or its newest record was discarded.
    pub fn of_newer_store(&self, step: u64, generation: u64, devices: &[String]) -> Option<String> {
        (generation < self.generation).then(|| {
            format!(
                "warning: metrics.jsonl has steps up to {}, when generation {} was committed, but the store on {} is at step {step}, \
                 generation {generation}: it is an older copy, or lost its newest generation. Training resumes from step {step}, and \
                 the lines after it are dropped. If that is not meant, stop it now and bring back the newer store with the run \
                 directory",
                self.step,
                self.generation,
                devices.join(", "),
            )
        })
    }
}

/// Parses a number; null, which JSON has for numbers that are not finite, becomes NaN.
fn number_or_nan<'de, D: Deserializer<'de>>(deserializer: D) -> Result<f64, D::Error> {
    Ok(Option::deserialize(deserializer)?.unwrap_or(f64::NAN))
}

/// `metrics.jsonl` could not be read or written.
#[derive(Debug, thiserror::Error)]
#[error("cannot {verb} {}: {source}", path.display())]
pub struct MetricsError {
    verb: &'static str,
    path: PathBuf,
    source: std::io::Error,
}

/// The open file, positioned after its last step.
pub struct MetricsFile {
    path: PathBuf,
    file: File,
    /// Bytes of complete lines.
    bytes: u64,
    failed: bool,
}

impl MetricsFile {
    /// The file's place in a run directory.
    pub fn path(run_dir: &Path) -> PathBuf {
        run_dir.join("metrics.jsonl")
    }

    /// Path of a file that was moved aside.
    pub fn old_path(run_dir: &Path) -> PathBuf {
        run_dir.join("metrics.jsonl.old")
    }

    /// Renames the file of a start that saved nothing. Replaces a file that was moved aside earlier. Returns
    /// the new path.
    ///
    /// # Errors
    /// The file cannot be renamed.
    pub fn set_aside(run_dir: &Path) -> Result<PathBuf, MetricsError> {
        let (path, old) = (Self::path(run_dir), Self::old_path(run_dir));
        std::fs::rename(&path, &old).map_err(|source| MetricsError {
            verb: "move aside",
            path,
            source,
        })?;
        Ok(old)
    }

    /// Step of the last complete line in a run directory; 0 if there is none.
    pub fn last_step(run_dir: &Path) -> u64 {
        File::open(Self::path(run_dir))
            .and_then(|file| kept(&file, u64::MAX))
            .map_or(0, |(_, last_step)| last_step)
    }

    /// Returns steps and losses of evaluations in a run directory, in the order of steps: those of `data`, or of what was evaluated last, after the last
    /// evaluation of other data.
    pub fn evaluations(run_dir: &Path, data: Option<&str>) -> Vec<(u64, f64)> {
        let Ok(file) = File::open(Self::path(run_dir)) else {
            return Vec::new();
        };
        let lines = BufReader::new(file).split(b'\n').map_while(Result::ok);
        let steps = lines.filter_map(|line| serde_json::from_slice::<StepMetrics>(&line).ok());
        let all = steps.filter(|metrics| metrics.eval_loss.is_some());
        let all: Vec<StepMetrics> = all.collect();
        // Lines that are older than this key do not say.
        let of = |metrics: &StepMetrics| metrics.eval_data.clone();
        let data = data.map(str::to_owned).or_else(|| of(all.last()?));
        let others = all
            .iter()
            .rposition(|line| of(line).is_some_and(|of| Some(of) != data));
        let comparable = &all[others.map_or(0, |last| last + 1)..];
        let losses = comparable.iter();
        losses
            .filter_map(|line| Some((line.step, line.eval_loss?)))
            .collect()
    }

    /// Last complete line in a run directory.
    pub fn last(run_dir: &Path) -> Option<StepMetrics> {
        let mut file = File::open(Self::path(run_dir)).ok()?;
        let bytes = file.metadata().ok()?.len();
        file.seek(SeekFrom::Start(bytes.saturating_sub(TAIL_BYTES)))
            .ok()?;
        let mut tail = Vec::new();
        file.take(TAIL_BYTES).read_to_end(&mut tail).ok()?;
        let whole = &tail[..tail.iter().rposition(|byte| *byte == b'\n')?];
        let lines = whole.rsplit(|byte| *byte == b'\n');
        lines
            .filter_map(|line| serde_json::from_slice(line).ok())
            .next()
    }

    /// Opens or creates the file and drops the steps beyond `step`, from which the run resumes. Also returns the file's last step,
    /// which is less than `step` if the run ended between a commit and its line.
    ///
    /// # Errors
    /// The file cannot be read or written.
    pub fn open(run_dir: &Path, step: u64) -> Result<(Self, u64), MetricsError> {
        let path = Self::path(run_dir);
        let failed = |verb| {
            let path = path.clone();
            move |source| MetricsError { verb, path, source }
        };
        let opened = OpenOptions::new()
            .create(true)
            .read(true)
            .append(true)
            .mode(PRIVATE)
            .open(&path);
        let file = opened.map_err(failed("open"))?;
        let (kept_bytes, last_step) = kept(&file, step).map_err(failed("read"))?;
        file.set_len(kept_bytes).map_err(failed("truncate"))?;
        let opened = Self {
            path,
            file,
            bytes: kept_bytes,
            failed: false,
        };
        Ok((opened, last_step))
    }

    /// Appends a step's line. A line that cannot be written is left out; the first failure is logged.
    pub fn write(&mut self, metrics: &StepMetrics) {
        let mut line = serde_json::to_vec(metrics).expect("metrics are plain data");
        line.push(b'\n');
        // In one write, so that a kill leaves a complete line or none.
        match self.file.write_all(&line) {
            Ok(()) => self.bytes += line.len() as u64,
            Err(source) => {
                // Removes a part of the line; if that fails too, the file ends in an incomplete line.
                let _ = self.file.set_len(self.bytes);
                if !std::mem::replace(&mut self.failed, true) {
                    let path = self.path.display();
                    let step = metrics.step;
                    tracing::warn!(
                        "cannot write {path}: {source}. Training continues; the file will lack the line of step {step} and perhaps of later ones"
                    );
                }
            }
        }
    }
}

fn is_zero<N: Default + PartialEq>(number: &N) -> bool {
    *number == N::default()
}

/// Returns the bytes of the leading complete lines of steps up to `step`, and the last of these steps.
fn kept(file: &File, step: u64) -> std::io::Result<(u64, u64)> {
    let mut reader = BufReader::new(file);
    let (mut bytes, mut last_step) = (0, 0);
    let mut line = Vec::new();
    loop {
        line.clear();
        let length = reader.read_until(b'\n', &mut line)?;
        let metrics = serde_json::from_slice::<StepMetrics>(&line);
        match metrics {
            Ok(metrics)
                if line.ends_with(b"\n") && (last_step + 1..=step).contains(&metrics.step) =>
            {
                bytes += length as u64;
                last_step = metrics.step;
            }
            _ => return Ok((bytes, last_step)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line(step: u64) -> StepMetrics {
        StepMetrics {
            step,
            loss: 1.0 / step as f64,
            grad_norm: 0.1,
            loss_scale: None,
            skipped: false,
            lr: 1e-3,
            unix_s: 1.7e9,
            tokens: step * 8,
            epoch: None,
            generation: 0,
            step_s: 0.5,
            forward_s: 0.1,
            backward_s: 0.2,
            waited_s: 0.2,
            directions_s: 0.0,
            exchange_s: 0.1,
            update_s: 0.3,
            device_read_bytes: 1,
            device_written_bytes: 2,
            device_grad_read_bytes: 0,
            device_grad_written_bytes: 0,
            gathered_bytes: 0,
            reduced_bytes: 0,
            grads_held_bytes: 0,
            host_bytes: 3,
            gpu_resident_bytes: 0,
            gpu_energy_j: None,
            cpu_energy_j: None,
            bound_s: 0.25,
            eval_loss: None,
            eval_data: None,
            eval_perplexity: None,
        }
    }

    fn steps(dir: &Path) -> Vec<u64> {
        let text = std::fs::read_to_string(MetricsFile::path(dir)).unwrap();
        text.lines()
            .map(|line| serde_json::from_str::<StepMetrics>(line).unwrap().step)
            .collect()
    }

    #[test]
    fn evaluations_of_other_data_do_not_count() {
        let dir = tempfile::tempdir().unwrap();
        let (mut file, _) = MetricsFile::open(dir.path(), 0).unwrap();
        // The first line is older than the key.
        for (step, data) in [(1, None), (2, Some("a")), (3, Some("b")), (4, Some("b"))] {
            file.write(&StepMetrics {
                eval_loss: Some(step as f64),
                eval_data: data.map(str::to_owned),
                ..line(step)
            });
        }
        let of = |data| {
            let found = MetricsFile::evaluations(dir.path(), data);
            found.iter().map(|(step, _)| *step).collect::<Vec<_>>()
        };
        assert_eq!(of(None), [3, 4]);
        assert_eq!(of(Some("b")), [3, 4]);
        assert_eq!(of(Some("c")), [0; 0]);
        MetricsFile::open(dir.path(), 2).unwrap();
        assert_eq!(of(Some("a")), [1, 2]);
    }

    #[test]
    fn opening_for_a_step_drops_later_lines() {
        let dir = tempfile::tempdir().unwrap();
        let (mut file, _) = MetricsFile::open(dir.path(), 0).unwrap();
        for step in 1..=5 {
            file.write(&line(step));
        }
        let (mut file, last_step) = MetricsFile::open(dir.path(), 3).unwrap();
        assert_eq!(last_step, 3);
        assert_eq!(steps(dir.path()), [1, 2, 3]);
        file.write(&line(4));
        assert_eq!(steps(dir.path()), [1, 2, 3, 4]);
        assert_eq!(MetricsFile::last_step(dir.path()), 4);
        assert_eq!(MetricsFile::last(dir.path()), Some(line(4)));
        assert_eq!(MetricsFile::evaluations(dir.path(), None), []);
        file.write(&StepMetrics {
            eval_loss: Some(2.5),
            ..line(5)
        });
        assert_eq!(MetricsFile::evaluations(dir.path(), None), [(5, 2.5)]);
        MetricsFile::open(dir.path(), 0).unwrap();
        assert_eq!(steps(dir.path()), [0; 0]);
    }

    #[test]
    fn an_incomplete_last_line_is_dropped_and_a_missing_one_detected() {
        let dir = tempfile::tempdir().unwrap();
        let (mut file, _) = MetricsFile::open(dir.path(), 0).unwrap();
        file.write(&line(1));
        file.file.write_all(b"{\"step\":2,\"lo").unwrap();
        let (mut file, last_step) = MetricsFile::open(dir.path(), 2).unwrap();
        assert_eq!(last_step, 1);
        file.write(&line(2));
        assert_eq!(steps(dir.path()), [1, 2]);
    }

    #[test]
    fn a_skipped_step_without_a_loss_is_a_step() {
        let dir = tempfile::tempdir().unwrap();
        let (mut file, _) = MetricsFile::open(dir.path(), 0).unwrap();
        let overflow = StepMetrics {
            loss: f64::NAN,
            grad_norm: f64::INFINITY,
            skipped: true,
            loss_scale: Some(65536.0),
            ..line(1)
        };
        file.write(&overflow);
        file.write(&line(2));
        assert_eq!(steps(dir.path()), [1, 2]);
        assert_eq!(MetricsFile::last_step(dir.path()), 2);
    }

    #[test]
    fn a_line_that_cannot_be_written_is_left_out() {
        let dir = tempfile::tempdir().unwrap();
        let (mut file, _) = MetricsFile::open(dir.path(), 0).unwrap();
        file.write(&line(1));
        // /dev/full fails like a full disk.
        let full = OpenOptions::new().write(true).open("/dev/full").unwrap();
        let whole = std::mem::replace(&mut file.file, full);
        file.write(&line(2));
        file.write(&line(3));
        assert!(file.failed, "the failure was logged");
        file.file = whole;
        file.write(&line(4));
        assert_eq!(steps(dir.path()), [1, 4]);
        assert_eq!(MetricsFile::last_step(dir.path()), 4);
    }

    #[test]
    fn a_loss_keeps_its_bits() {
        let mut metrics = line(3);
        metrics.loss = f64::from_bits(0x3FD5_5555_5555_5557);
        let text = serde_json::to_string(&metrics).unwrap();
        let back: StepMetrics = serde_json::from_str(&text).unwrap();
        assert_eq!(back.loss.to_bits(), metrics.loss.to_bits());
        assert!(!text.contains("eval_loss"));
    }
}
