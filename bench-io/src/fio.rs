//! fio in the same run, on the same drives: what people trust, with its command printed so that they can repeat it.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use serde::Serialize;

/// Where fio is, and its version.
#[derive(Clone, Debug)]
pub(crate) struct Fio {
    program: PathBuf,
    pub(crate) version: String,
}

/// What fio is to do: on each file one job of its own, reading or writing.
#[derive(Clone, Debug)]
pub(crate) struct FioJob<'a> {
    pub(crate) read: &'a [PathBuf],
    pub(crate) write: &'a [PathBuf],
    pub(crate) bs: u32,
    pub(crate) iodepth: u32,
    pub(crate) size: u64,
    pub(crate) ramp: Duration,
    pub(crate) runtime: Duration,
}

/// What it found.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct FioFigures {
    pub(crate) command: String,
    /// Of all files together.
    pub(crate) read_bytes_per_s: f64,
    pub(crate) write_bytes_per_s: f64,
    /// Processor seconds for 10^9 bytes.
    pub(crate) cpu_s_per_gb: f64,
}

impl FioFigures {
    /// Both ways.
    pub(crate) fn bytes_per_s(&self) -> f64 {
        self.read_bytes_per_s + self.write_bytes_per_s
    }
}

impl Fio {
    /// The program `named`, or the one in PATH; nothing with the name `none` or where there is none.
    ///
    /// # Errors
    /// The named one does not run.
    pub(crate) fn find(named: Option<&Path>) -> Result<Option<Self>> {
        if named == Some(Path::new("none")) {
            return Ok(None);
        }
        let program = named.unwrap_or(Path::new("fio"));
        match Command::new(program).arg("--version").output() {
            Ok(output) if output.status.success() => Ok(Some(Self {
                program: program.to_owned(),
                version: String::from_utf8_lossy(&output.stdout).trim().to_owned(),
            })),
            Ok(output) => bail!("{} --version: {}", program.display(), output.status),
            Err(error) if named.is_some() => {
                Err(error).with_context(|| format!("--fio {}", program.display()))
            }
            Err(_) => Ok(None),
        }
    }

    /// Runs it to its end.
    ///
    /// # Errors
    /// It fails, or says what nobody understands.
    pub(crate) fn run(&self, job: &FioJob) -> Result<FioFigures> {
        let words = words(job);
        let output = Command::new(&self.program)
            .args(&words)
            .arg("--output-format=json")
            .output()
            .with_context(|| format!("starting {}", self.program.display()))?;
        let command = format!("{} {}", self.program.display(), words.join(" "));
        ensure!(
            output.status.success(),
            "{command}: {}",
            String::from_utf8_lossy(&output.stderr).trim()
        );
        figures(&String::from_utf8_lossy(&output.stdout), command)
    }
}

fn words(job: &FioJob) -> Vec<String> {
    let mut words = vec![
        "--ioengine=io_uring".to_owned(),
        "--direct=1".into(),
        "--fixedbufs=1".into(),
        "--registerfiles=1".into(),
        format!("--bs={}", job.bs),
        format!("--iodepth={}", job.iodepth),
        format!("--size={}", job.size),
        "--time_based=1".into(),
        format!("--ramp_time={}ms", job.ramp.as_millis()),
        format!("--runtime={}ms", job.runtime.as_millis()),
        "--overwrite=1".into(),
        "--fallocate=none".into(),
        "--thread=1".into(),
    ];
    for (rw, files) in [("read", job.read), ("write", job.write)] {
        for (index, file) in files.iter().enumerate() {
            words.push(format!("--name={rw}{index}"));
            words.push(format!("--rw={rw}"));
            words.push(format!("--filename={}", file.display()));
        }
    }
    words
}

fn figures(said: &str, command: String) -> Result<FioFigures> {
    // It may complain before its JSON.
    let start = said.find('{').context("fio printed no JSON")?;
    let found: serde_json::Value =
        serde_json::from_str(&said[start..]).context("what fio printed")?;
    let jobs = found["jobs"].as_array().context("fio's jobs")?;
    let mut figures = FioFigures {
        command,
        read_bytes_per_s: 0.0,
        write_bytes_per_s: 0.0,
        cpu_s_per_gb: 0.0,
    };
    let (mut cpu_s, mut bytes) = (0.0, 0.0);
    for job in jobs {
        let number = |value: &serde_json::Value| value.as_f64().unwrap_or(0.0);
        figures.read_bytes_per_s += number(&job["read"]["bw_bytes"]);
        figures.write_bytes_per_s += number(&job["write"]["bw_bytes"]);
        bytes += number(&job["read"]["io_bytes"]) + number(&job["write"]["io_bytes"]);
        // Percent of the job's time.
        let percent = number(&job["usr_cpu"]) + number(&job["sys_cpu"]);
        cpu_s += percent / 100.0 * number(&job["job_runtime"]) / 1000.0;
    }
    if bytes > 0.0 {
        figures.cpu_s_per_gb = cpu_s / (bytes / 1e9);
    }
    Ok(figures)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn jobs_are_added_and_what_is_no_answer_is_refused() {
        let said = r#"fio: note
            {"jobs": [
              {"read": {"bw_bytes": 5, "io_bytes": 500000000}, "write": {"bw_bytes": 0}, "usr_cpu": 1.5, "sys_cpu": 8.5, "job_runtime": 2000},
              {"read": {"bw_bytes": 6, "io_bytes": 500000000}, "write": {"bw_bytes": 3}, "usr_cpu": 0, "sys_cpu": 0, "job_runtime": 2000}
            ]}"#;
        let found = figures(said, "fio".into()).unwrap();
        assert_eq!(
            (found.read_bytes_per_s, found.write_bytes_per_s),
            (11.0, 3.0)
        );
        assert!((found.cpu_s_per_gb - 0.2).abs() < 1e-9, "{found:?}");
        assert!(figures("no", String::new()).is_err());
        assert!(figures("{", String::new()).is_err());
    }

    #[test]
    fn a_fio_that_was_named_must_be_there() {
        assert!(Fio::find(Some(Path::new("/no/such/fio"))).is_err());
        assert!(Fio::find(Some(Path::new("none"))).unwrap().is_none());
    }
}
