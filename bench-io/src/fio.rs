//! Runs fio on the same drives in the same run. Its command is printed so that the result can be reproduced.

use std::ffi::OsString;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use rustix::process::Signal;
use serde::Serialize;

use crate::{child, shell, stop};

/// Interval of checks for the end of fio and for a stop.
const CHECK_INTERVAL: Duration = Duration::from_millis(20);

/// A fio program and its version.
#[derive(Clone, Debug)]
pub(crate) struct Fio {
    program: PathBuf,
    pub(crate) version: String,
}

#[derive(Clone, Debug)]
pub(crate) struct FioJob<'a> {
    /// fio's name of each access and the files it applies to, one job per file.
    pub(crate) streams: &'a [(&'static str, &'a [PathBuf])],
    pub(crate) bs: u32,
    pub(crate) iodepth: u32,
    pub(crate) size: u64,
    pub(crate) ramp: Duration,
    pub(crate) runtime: Duration,
}

/// Results of fio.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct FioFigures {
    pub(crate) command: String,
    pub(crate) read: FioWay,
    pub(crate) write: FioWay,
    /// Processor seconds per 10^9 bytes.
    pub(crate) cpu_s_per_gb: f64,
}

/// Results of one direction.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub(crate) struct FioWay {
    /// Rate of all files together.
    pub(crate) bytes_per_s: f64,
    /// Time from submission to completion, over all jobs.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) latency_ns: Option<FioLatency>,
}

/// Percentiles.
#[derive(Clone, Copy, Debug, Serialize)]
pub(crate) struct FioLatency {
    pub(crate) p50: u64,
    pub(crate) p99: u64,
    pub(crate) p999: u64,
    pub(crate) max: u64,
}

impl FioFigures {
    /// Rate of both directions.
    pub(crate) fn bytes_per_s(&self) -> f64 {
        self.read.bytes_per_s + self.write.bytes_per_s
    }
}

impl Fio {
    /// Finds the program `named`, or the one in PATH; `None` for the name `none` or if there is none.
    ///
    /// # Errors
    /// The named program does not run.
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

    /// Runs a job to its end.
    ///
    /// # Errors
    /// fio fails, or its output cannot be parsed.
    pub(crate) fn run(&self, job: &FioJob) -> Result<FioFigures> {
        let words = words(job);
        let child = child::command(&self.program)
            .args(&words)
            .arg("--output-format=json")
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .with_context(|| format!("starting {}", self.program.display()))?;
        let pid = rustix::process::Pid::from_child(&child);
        // The output exceeds a pipe's capacity.
        let reading = std::thread::spawn(move || child.wait_with_output());
        while !reading.is_finished() {
            if stop::check().is_err() {
                let _ = rustix::process::kill_process(pid, Signal::KILL);
                break;
            }
            std::thread::sleep(CHECK_INTERVAL);
        }
        let output = reading.join().expect("reading does not panic");
        stop::check()?;
        let output = output.with_context(|| format!("running {}", self.program.display()))?;
        let program = std::iter::once(self.program.as_os_str());
        let command = shell::command(program.chain(words.iter().map(OsString::as_os_str)));
        ensure!(
            output.status.success(),
            "{command}: {}",
            String::from_utf8_lossy(&output.stderr).trim()
        );
        figures(&String::from_utf8_lossy(&output.stdout), command)
    }
}

fn words(job: &FioJob) -> Vec<OsString> {
    let bytes = job.size / u64::from(job.bs) * u64::from(job.bs);
    let words = vec![
        "--ioengine=io_uring".to_owned(),
        "--direct=1".into(),
        "--fixedbufs=1".into(),
        "--registerfiles=1".into(),
        format!("--bs={}", job.bs),
        format!("--iodepth={}", job.iodepth),
        format!("--size={bytes}"),
        "--time_based=1".into(),
        format!("--ramp_time={}ms", job.ramp.as_millis()),
        format!("--runtime={}ms", job.runtime.as_millis()),
        "--overwrite=1".into(),
        "--fallocate=none".into(),
        "--thread=1".into(),
        "--lat_percentiles=1".into(),
        // Percentiles of several jobs do not add up; fio merges their histograms.
        "--group_reporting=1".into(),
    ];
    let mut words: Vec<OsString> = words.into_iter().map(OsString::from).collect();
    for (rw, files) in job.streams {
        for (index, file) in files.iter().enumerate() {
            words.push(format!("--name={rw}{index}").into());
            words.push(format!("--rw={rw}").into());
            words.push(one_file("--filename=", file));
        }
    }
    words
}

/// Builds the option for one file: an unescaped colon would begin another file's name.
fn one_file(option: &str, file: &Path) -> OsString {
    let bytes = file.as_os_str().as_bytes().iter();
    let escaped = bytes.flat_map(|byte| match byte {
        b':' => &b"\\:"[..],
        other => std::slice::from_ref(other),
    });
    OsString::from_vec(option.bytes().chain(escaped.copied()).collect())
}

fn figures(json: &str, command: String) -> Result<FioFigures> {
    // fio may print warnings before its JSON.
    let start = json.find('{').context("fio printed no JSON")?;
    let found: serde_json::Value =
        serde_json::from_str(&json[start..]).context("parsing the output of fio")?;
    let jobs = found["jobs"]
        .as_array()
        .context("the output of fio has no jobs")?;
    let mut figures = FioFigures {
        command,
        read: FioWay::default(),
        write: FioWay::default(),
        cpu_s_per_gb: 0.0,
    };
    let (mut cpu_s, mut bytes) = (0.0, 0.0);
    for job in jobs {
        let number = |value: &serde_json::Value| value.as_f64().unwrap_or(0.0);
        for (way, name) in [(&mut figures.read, "read"), (&mut figures.write, "write")] {
            way.bytes_per_s += number(&job[name]["bw_bytes"]);
            bytes += number(&job[name]["io_bytes"]);
            if jobs.len() == 1 {
                way.latency_ns = latency(&job[name]["lat_ns"]);
            }
        }
        // Percent of the job's time.
        let percent = number(&job["usr_cpu"]) + number(&job["sys_cpu"]);
        cpu_s += percent / 100.0 * number(&job["job_runtime"]) / 1000.0;
    }
    if bytes > 0.0 {
        figures.cpu_s_per_gb = cpu_s / (bytes / 1e9);
    }
    Ok(figures)
}

/// `None` if nothing was moved.
fn latency(json: &serde_json::Value) -> Option<FioLatency> {
    let at = |percent: &str| json["percentile"][percent].as_u64();
    Some(FioLatency {
        p50: at("50.000000")?,
        p99: at("99.000000")?,
        p999: at("99.900000")?,
        max: json["max"].as_u64()?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn jobs_are_added_and_what_is_no_answer_is_refused() {
        let json = r#"fio: note
            {"jobs": [
              {"read": {"bw_bytes": 5, "io_bytes": 500000000}, "write": {"bw_bytes": 0}, "usr_cpu": 1.5, "sys_cpu": 8.5, "job_runtime": 2000},
              {"read": {"bw_bytes": 6, "io_bytes": 500000000}, "write": {"bw_bytes": 3}, "usr_cpu": 0, "sys_cpu": 0, "job_runtime": 2000}
            ]}"#;
        let found = figures(json, "fio".into()).unwrap();
        assert_eq!(
            (found.read.bytes_per_s, found.write.bytes_per_s),
            (11.0, 3.0)
        );
        assert!(found.read.latency_ns.is_none(), "of two groups");
        assert!((found.cpu_s_per_gb - 0.2).abs() < 1e-9, "{found:?}");
        assert!(figures("no", String::new()).is_err());
        assert!(figures("{", String::new()).is_err());
    }

    #[test]
    fn jobs_in_one_group_have_percentiles_where_they_moved_bytes() {
        let json = r#"{"jobs": [{
            "read": {"bw_bytes": 5, "lat_ns": {"max": 400, "percentile": {"50.000000": 100, "99.000000": 200, "99.900000": 300}}},
            "write": {"bw_bytes": 0, "lat_ns": {"min": 0}}
        }]}"#;
        let found = figures(json, "fio".into()).unwrap();
        let latency = found.read.latency_ns.unwrap();
        let all = [latency.p50, latency.p99, latency.p999, latency.max];
        assert_eq!(all, [100, 200, 300, 400]);
        assert!(found.write.latency_ns.is_none());
    }

    #[test]
    fn each_file_has_a_job_and_its_colons_are_escaped() {
        let file = ["/x", "/dev/disk/by-path/a:b"].map(PathBuf::from);
        let job = FioJob {
            streams: &[("read", &file)],
            bs: 4096,
            iodepth: 8,
            size: 40_961,
            ramp: Duration::ZERO,
            runtime: Duration::from_secs(1),
        };
        let words = shell::command(words(&job));
        for word in [
            "--size=40960",
            "--rw=read --filename=/x",
            "--name=read1 --rw=read '--filename=/dev/disk/by-path/a\\:b'",
        ] {
            assert!(words.contains(word), "{word}: {words}");
        }
    }

    #[test]
    fn a_fio_that_was_named_must_be_there() {
        assert!(Fio::find(Some(Path::new("/no/such/fio"))).is_err());
        assert!(Fio::find(Some(Path::new("none"))).unwrap().is_none());
    }
}
