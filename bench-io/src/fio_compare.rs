//! The same job by fio, alternating with ours, to show what the daemon adds on the same drive at the same time.

use std::fmt;
use std::path::PathBuf;

use anyhow::{Context, Result, bail, ensure};
use offload_support::units::ApproxRate;
use serde::Serialize;

use crate::fio::{Fio, FioFigures, FioJob};
use crate::job::{Job, Place};
use crate::place::{WorkDir, write_file};
use crate::prepared::{Prepared, depth_of_file};
use crate::progress::Progress;
use crate::report::Figures;
use crate::rounds::median;
use crate::units::Micros;

/// fio and the files it uses.
pub(crate) struct FioCompare {
    fio: Fio,
    files: Vec<PathBuf>,
    /// Directories of files made for fio.
    _dirs: Vec<WorkDir>,
}

/// Our figures beside fio's, one per round.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct ComparisonReport {
    pub(crate) fio_version: String,
    pub(crate) fio_command: String,
    pub(crate) rows: Vec<Row>,
}

/// One figure of all rounds, in order.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Row {
    /// "read" or "write".
    pub(crate) way: &'static str,
    pub(crate) figure: Figure,
    pub(crate) ours: Vec<f64>,
    pub(crate) fio: Vec<f64>,
}

/// Kind of a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Figure {
    BytesPerS,
    LatencyNsP50,
    LatencyNsP99,
}

impl FioCompare {
    /// Checks whether fio can do `job`.
    ///
    /// # Errors
    /// There is no fio; the job has no runtime; or its drives belong to a running daemon.
    pub(crate) fn can(job: &Job, fio: Option<Fio>) -> Result<Fio> {
        let fio = fio.context("rounds: fio was not found; name it with --fio")?;
        ensure!(
            !job.runtime.is_zero(),
            "rounds: fio needs a time limit; set one, such as --runtime 5"
        );
        if let Place::Socket(socket) = &job.place {
            bail!(
                "rounds: fio cannot use the devices of the daemon at {}; name their directories with --directory",
                socket.display()
            );
        }
        Ok(fio)
    }

    /// Makes files for `fio`, unless the job has files that it may use.
    ///
    /// # Errors
    /// Not enough space.
    pub(crate) fn new(
        job: &Job,
        prepared: &Prepared,
        fio: Fio,
        progress: &Progress,
    ) -> Result<Self> {
        let (mut files, mut dirs) = (prepared.files.clone(), Vec::new());
        if let Place::Private(parents) = &job.place {
            progress.say("making files for fio");
            for parent in parents {
                let dir = WorkDir::make(parent)?;
                let path = dir.path().join("fio");
                write_file(&path, prepared.size)?;
                files.push(path);
                dirs.push(dir);
            }
        }
        Ok(Self {
            fio,
            files,
            _dirs: dirs,
        })
    }

    /// Runs fio's turn.
    ///
    /// # Errors
    /// fio fails.
    pub(crate) fn turn(&self, job: &Job, size: u64) -> Result<FioFigures> {
        self.fio.run(&FioJob {
            streams: &[(job.rw.word(), &self.files)],
            read_percent: (job.rw.reads() && job.rw.writes()).then_some(job.read_percent),
            jobs: job.numjobs,
            bs: job.bs,
            iodepth: depth_of_file(job, self.files.len()),
            size,
            direct: job.direct,
            ramp: job.ramp,
            runtime: job.runtime,
        })
    }

    /// Compares all rounds.
    pub(crate) fn report(&self, rounds: &[(Figures, FioFigures)]) -> ComparisonReport {
        let mut rows = Vec::new();
        for way in ["read", "write"] {
            for figure in [
                Figure::BytesPerS,
                Figure::LatencyNsP50,
                Figure::LatencyNsP99,
            ] {
                let both = rounds.iter().filter_map(|(ours, fio)| {
                    let (ours, fio) = match way {
                        "read" => (ours.read.as_ref()?, &fio.read),
                        _ => (ours.write.as_ref()?, &fio.write),
                    };
                    Some(match figure {
                        Figure::BytesPerS => (ours.bytes_per_s, fio.bytes_per_s),
                        Figure::LatencyNsP50 => {
                            (ours.latency_ns_p50 as f64, fio.latency_ns?.p50 as f64)
                        }
                        Figure::LatencyNsP99 => {
                            (ours.latency_ns_p99 as f64, fio.latency_ns?.p99 as f64)
                        }
                    })
                });
                let (ours, fio): (Vec<f64>, Vec<f64>) = both.unzip();
                if !ours.is_empty() {
                    rows.push(Row {
                        way,
                        figure,
                        ours,
                        fio,
                    });
                }
            }
        }
        let command = rounds.last().map(|(_, fio)| fio.command.clone());
        ComparisonReport {
            fio_version: self.fio.version.clone(),
            fio_command: command.unwrap_or_default(),
            rows,
        }
    }
}

impl fmt::Display for ComparisonReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let rounds = self.rows.first().map_or(0, |row| row.ours.len());
        writeln!(
            f,
            "{rounds} rounds alternating with {}: medians, the least and the most",
            self.fio_version
        )?;
        for row in &self.rows {
            let text = |value: f64| match row.figure {
                Figure::BytesPerS => ApproxRate(value).to_string(),
                Figure::LatencyNsP50 | Figure::LatencyNsP99 => Micros(value as u64).to_string(),
            };
            let of = |values: &[f64]| {
                let (middle, range) = median(values.to_vec(), |value| *value).ok_or(fmt::Error)?;
                let words = [middle, range.min, range.max].map(text);
                Ok((
                    middle,
                    format!("{} ({} to {})", words[0], words[1], words[2]),
                ))
            };
            let ((ours, our_words), (fio, fio_words)) = (of(&row.ours)?, of(&row.fio)?);
            let name = match row.figure {
                Figure::BytesPerS => "",
                Figure::LatencyNsP50 => " p50",
                Figure::LatencyNsP99 => " p99",
            };
            let name = format!("{}{name}", row.way);
            let beside = match row.figure {
                Figure::BytesPerS => format!("{:.1} % of fio", 100.0 * ours / fio),
                _ => format!("{:+.1} us", (ours - fio) / 1e3),
            };
            writeln!(f, "{name:9}  {our_words}; fio {fio_words}; {beside}")?;
        }
        writeln!(f, "`{}`", self.fio_command)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn medians_and_ranges_are_told_beside_each_other() {
        let report = ComparisonReport {
            fio_version: "fio-3".into(),
            fio_command: "fio --x".into(),
            rows: vec![
                Row {
                    way: "read",
                    figure: Figure::BytesPerS,
                    ours: vec![1e9, 3e9, 2e9],
                    fio: vec![4e9, 4e9, 5e9],
                },
                Row {
                    way: "read",
                    figure: Figure::LatencyNsP99,
                    ours: vec![100_000.0, 120_000.0, 110_000.0],
                    fio: vec![90_000.0, 95_000.0, 100_000.0],
                },
            ],
        };
        let printed = report.to_string();
        for part in [
            "3 rounds alternating with fio-3",
            "2.00 GB/s (1.00 GB/s to 3.00 GB/s); fio 4.00 GB/s (4.00 GB/s to 5.00 GB/s); 50.0 % of fio",
            "110.0 us (100.0 us to 120.0 us); fio 95.0 us",
            "+15.0 us",
            "`fio --x`",
        ] {
            assert!(printed.contains(part), "{part}: {printed}");
        }
    }
}
