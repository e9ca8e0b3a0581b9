//! Device rates and computing speed that an earlier start of a run measured. They are kept in the run
//! directory, so that a plan needs neither daemon nor GPU.

use std::fs::{self, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use offload_support::paths::PRIVATE;

/// Size limit of the file.
const FILE_BYTES_MAX: u64 = 1 << 16;

/// Figures of the machine that ran the run; `None` if not measured.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct MeasuredRates {
    /// Read rate of all devices of the store together, in bytes per second.
    pub read_bytes_per_s: Option<f64>,
    /// Write rate of all devices of the store together, in bytes per second.
    pub write_bytes_per_s: Option<f64>,
    /// Rate of forward and backward in one process, in 10^12 operations per second, 6 for each parameter and
    /// token.
    pub tflops: Option<f64>,
    /// Whether `tflops` was measured on a GPU.
    pub on_gpu: bool,
    /// Write rate of a checkpoint of all processes in bytes per second, from its step to its last flush.
    pub checkpoint_bytes_per_s: Option<f64>,
}

impl MeasuredRates {
    /// Reads the figures of the run in `run_dir`; `None` if there are none.
    pub fn read(run_dir: &Path) -> Option<Self> {
        let path = measured_path(run_dir);
        let metadata = fs::metadata(&path).ok()?;
        if !metadata.is_file() || metadata.len() > FILE_BYTES_MAX {
            return None;
        }
        let measured: Self = serde_json::from_slice(&fs::read(&path).ok()?).ok()?;
        let positive =
            |figure: Option<f64>| figure.filter(|figure| figure.is_finite() && *figure > 0.0);
        Some(Self {
            read_bytes_per_s: positive(measured.read_bytes_per_s),
            write_bytes_per_s: positive(measured.write_bytes_per_s),
            tflops: positive(measured.tflops),
            on_gpu: measured.on_gpu,
            checkpoint_bytes_per_s: positive(measured.checkpoint_bytes_per_s),
        })
    }

    /// Writes the figures into `run_dir` atomically. They are not synced: if a power loss destroys them, they
    /// are measured again.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn write(&self, run_dir: &Path) -> io::Result<()> {
        let path = measured_path(run_dir);
        let new = path.with_extension("json.new");
        let text = serde_json::to_vec_pretty(self).expect("figures are plain data");
        let mut options = OpenOptions::new();
        options
            .write(true)
            .create(true)
            .truncate(true)
            .mode(PRIVATE);
        options.open(&new)?.write_all(&text)?;
        fs::rename(&new, &path)
    }

    /// Computing speed, if it was measured on a GPU (`on_gpu`) or on the processor.
    pub fn tflops_on(&self, on_gpu: bool) -> Option<f64> {
        self.tflops.filter(|_| self.on_gpu == on_gpu)
    }
}

/// Path of the file in a run directory.
pub fn measured_path(run_dir: &Path) -> PathBuf {
    run_dir.join("measured.json")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_are_restored_and_invalid_ones_ignored() {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(MeasuredRates::read(dir.path()), None);
        let measured = MeasuredRates {
            read_bytes_per_s: Some(6.2e9),
            write_bytes_per_s: None,
            tflops: Some(0.25),
            on_gpu: false,
            checkpoint_bytes_per_s: Some(1e9),
        };
        measured.write(dir.path()).unwrap();
        assert_eq!(MeasuredRates::read(dir.path()), Some(measured));
        assert_eq!(
            (measured.tflops_on(false), measured.tflops_on(true)),
            (Some(0.25), None)
        );
        fs::write(
            measured_path(dir.path()),
            r#"{"tflops": -1, "read_bytes_per_s": 5}"#,
        )
        .unwrap();
        let read = MeasuredRates::read(dir.path()).unwrap();
        assert_eq!((read.tflops, read.read_bytes_per_s), (None, Some(5.0)));
        for nonsense in ["", "{", "3", r#"{"tflops": "fast"}"#] {
            fs::write(measured_path(dir.path()), nonsense).unwrap();
            assert_eq!(MeasuredRates::read(dir.path()), None, "{nonsense}");
        }
    }
}
