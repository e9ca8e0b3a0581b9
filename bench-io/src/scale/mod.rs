//! Whether the rates of drives add up: 1 to N drives, reading, writing and both at once, through the daemon and by fio.
//!
//! ```text
//!   for n in 1..=N:  a store on n drives ─ fill ─▶ read, write, both     beside fio, and one synchronous thread
//!   then:            the same on all N without rate limits: the maximum of this machine
//! ```
//!
//! "Both" reads and writes with separate streams and depths, so that neither waits for the other; fio does the same
//! with a job per direction and drive. The single thread is a negative control: if it scales, the result means nothing.
//! Drives without a rate limit are measured in several rounds, because other load on them varies.

mod caveats;
mod control;
mod measure;
mod store;
mod table;

use std::path::PathBuf;
use std::time::Duration;

use serde::Serialize;

use crate::figures::Figures;
use crate::fio::FioFigures;
use crate::report::About;
use crate::rounds::{Range, rate_of};
use crate::testdrives::RateLimit;

pub(crate) use measure::measure;

/// Direction of a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Load {
    Read,
    Write,
    Both,
}

impl Load {
    pub(crate) const ALL: [Self; 3] = [Self::Read, Self::Write, Self::Both];

    pub(crate) fn word(self) -> &'static str {
        match self {
            Self::Read => "read",
            Self::Write => "write",
            Self::Both => "both",
        }
    }

    pub(crate) fn reads(self) -> bool {
        self != Self::Write
    }

    pub(crate) fn writes(self) -> bool {
        self != Self::Read
    }
}

#[derive(Clone, Debug)]
pub(crate) struct ScalePlan {
    /// Directories to use, one or more per drive.
    pub(crate) dirs: Vec<PathBuf>,
    /// Directories that make up one drive.
    pub(crate) dirs_per_drive: usize,
    /// Numbers of drives to measure; empty means 1 to all.
    pub(crate) drives: Vec<usize>,
    /// Limits the last drive to half the rate of the others.
    pub(crate) slow_last: bool,
    pub(crate) blocks_bytes: Vec<u32>,
    /// Operations in flight per directory and direction. `None` uses fio's default, and through the daemon what drives
    /// need.
    pub(crate) iodepth: Option<u32>,
    pub(crate) size: u64,
    pub(crate) ramp: Duration,
    pub(crate) runtime: Duration,
    pub(crate) engine: String,
    /// Repetitions of every measurement.
    pub(crate) rounds: usize,
}

/// Bytes in flight through the daemon per drive and direction: 1.4 ms of a drive of 6.2 GB/s. Throughput depends on
/// whether the slots fit in the last-level cache: 4 drives of 6.2 and 3.2 GB/s kept their rates in both directions on
/// each of three 16-core Xeons (300 MiB of cache); with twice as much they reached 91 to 96 % on the busiest one, and
/// with 16 times as much 69 to 85 % on all (2026-11-22).
const OWN_INFLIGHT_BYTES: u64 = 8 << 20;

/// One operation is in flight when another one ends.
const OWN_DEPTH_MIN: u64 = 2;

/// fio's default depth per file.
const FIO_DEPTH: u32 = 32;

impl ScalePlan {
    /// fio's operations in flight per file and direction.
    fn fio_depth(&self) -> u32 {
        self.iodepth.unwrap_or(FIO_DEPTH)
    }

    /// Operations of `bs` bytes in flight through the daemon in one direction, over `dirs` directories.
    fn own_depth(&self, bs: u32, dirs: usize) -> u64 {
        let drives = (dirs / self.dirs_per_drive) as u64;
        match self.iodepth {
            Some(depth) => u64::from(depth) * dirs as u64,
            // With less than one per directory some would be idle.
            None => {
                let of_drive = (OWN_INFLIGHT_BYTES / u64::from(bs)).max(OWN_DEPTH_MIN);
                (of_drive * drives).max(dirs as u64)
            }
        }
    }
}

/// Settings in a report.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct ScaleSettings {
    /// Bytes used of each drive.
    pub(crate) size: u64,
    /// fio's depth per file; the rows contain the daemon's.
    pub(crate) fio_iodepth: u32,
    pub(crate) ioengine: String,
    /// Seconds of each measurement.
    pub(crate) runtime_s: f64,
    pub(crate) rounds: usize,
}

/// Ranges of the rounds, bytes a second.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Rounds {
    pub(crate) daemon: Range,
    pub(crate) fio: Option<Range>,
}

/// One measurement; of several rounds the median.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Row {
    pub(crate) drives: usize,
    pub(crate) load: Load,
    pub(crate) bs: u32,
    /// Operations in flight through the daemon.
    pub(crate) iodepth: u32,
    /// Whether the drives' rate limits were lifted, to find the machine's own maximum.
    pub(crate) unlimited: bool,
    /// Read and write limits of all drives together, if the drives are rate-limited.
    pub(crate) limit_bytes_per_s: Option<[f64; 2]>,
    pub(crate) daemon: Figures,
    pub(crate) fio: Option<FioFigures>,
    /// One synchronous thread, round robin over the drives.
    pub(crate) one_thread_bytes_per_s: Option<f64>,
    /// `None` for a single round.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) rounds: Option<Rounds>,
}

impl Row {
    pub(crate) fn daemon_bytes_per_s(&self) -> f64 {
        rate_of(&self.daemon)
    }

    pub(crate) fn fio_bytes_per_s(&self) -> Option<f64> {
        Some(self.fio.as_ref()?.bytes_per_s())
    }

    /// Limit in the row's directions.
    pub(crate) fn limit(&self) -> Option<f64> {
        let [read, write] = self.limit_bytes_per_s?;
        Some(match self.load {
            Load::Read => read,
            Load::Write => write,
            Load::Both => read + write,
        })
    }
}

#[derive(Clone, Debug, Serialize)]
pub(crate) struct ScaleReport {
    /// The report's devices are those below each directory.
    #[serde(flatten)]
    pub(crate) about: About<ScaleSettings>,
    /// Rate limit of one drive.
    pub(crate) limit: Option<RateLimit>,
    pub(crate) fio_version: Option<String>,
    pub(crate) rows: Vec<Row>,
}

impl ScaleReport {
    /// Describes the rows that deviate from their limit by more than `share`, one line each.
    pub(crate) fn outside(&self, share: f64) -> Vec<String> {
        let rows = self.rows.iter().filter(|row| !row.unlimited);
        rows.filter_map(|row| {
            let off = row.daemon_bytes_per_s() / row.limit()? - 1.0;
            (off.abs() > share).then(|| {
                format!(
                    "{} drives, {}, bs {}: {:+.1} % from the limit",
                    row.drives,
                    row.load.word(),
                    row.bs,
                    100.0 * off
                )
            })
        })
        .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn as_much_is_in_flight_as_drives_need_or_as_was_asked_for() {
        let plan = |iodepth, dirs_per_drive| ScalePlan {
            dirs: Vec::new(),
            dirs_per_drive,
            drives: Vec::new(),
            slow_last: false,
            blocks_bytes: Vec::new(),
            iodepth,
            size: 1 << 30,
            ramp: Duration::ZERO,
            runtime: Duration::ZERO,
            engine: String::new(),
            rounds: 1,
        };
        let depths = |plan: ScalePlan, dirs| [1, 4, 16].map(|mib| plan.own_depth(mib << 20, dirs));
        // 8 MiB per drive, and at least two operations.
        assert_eq!(depths(plan(None, 1), 4), [32, 8, 8]);
        // A drive of four loop devices is one drive; each loop device has at least one operation.
        assert_eq!(depths(plan(None, 4), 16), [32, 16, 16]);
        assert_eq!(plan(None, 4).fio_depth(), 32);
        assert_eq!(depths(plan(Some(3), 4), 16), [48; 3]);
        assert_eq!(plan(Some(3), 4).fio_depth(), 3);
    }
}
