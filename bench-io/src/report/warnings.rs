//! Warnings about unreliable results, printed beside every figure.

use std::fs::File;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

use offload_support::units::ApproxRate;
use rustix::fs::SeekFrom;
use rustix::io::Errno;

use crate::drive::Drive;
use crate::figures::Figures;
use crate::job::Place;
use crate::machine;

/// Traffic of other processes, or traffic that reached no drive, above this fraction of our bytes causes a warning.
const STRANGE_SHARE: f64 = 0.05;

/// Below this fraction of idle time the processor is measured instead of the drive.
pub(crate) const IDLE_SHARE_MIN: f64 = 0.1;

/// Shorter measurements are unreliable: throttles and caches work in slices of a tenth of a second.
pub(crate) const SECONDS_MIN: f64 = 1.0;

/// Fewest operations for a meaningful p99.9.
const OPS_FOR_P999: u64 = 1000;

/// Warnings known before the measurement.
pub(crate) fn before() -> Vec<String> {
    let mut found = Vec::new();
    if cfg!(debug_assertions) {
        found.push("a debug build: use `cargo build --release`".into());
    }
    let cores = machine::cores() as f64;
    if let Some(load) = machine::load_average().filter(|load| *load > 0.5 * cores) {
        found.push(format!(
            "the machine is busy: {load:.1} processes run or wait on its {cores} cores"
        ));
    }
    found
}

/// Warnings about the drives under `paths`.
pub(crate) fn of_drives<'a>(paths: impl Iterator<Item = &'a Path>) -> Vec<String> {
    let mut found = Vec::new();
    for drive in paths.flat_map(Drive::below).filter(Drive::is_virtual) {
        let warning = format!(
            "{} is a virtual disk: other guests and the cache of its host affect the figures, which will vary",
            drive.name()
        );
        if !found.contains(&warning) {
            found.push(warning);
        }
    }
    found
}

/// Warns of directories or files in one file system, which is one drive or one set of drives.
pub(crate) fn of_one_drive(dirs: &[PathBuf]) -> Option<String> {
    let device = |path: &PathBuf| {
        let found = path.metadata().ok()?;
        // The special files of all block devices are in one file system.
        (!found.file_type().is_block_device()).then_some(found.dev())
    };
    let same = |(place, one): (usize, &PathBuf)| {
        let mut before = dirs[..place].iter();
        let other = before.find(|other| device(other).is_some() && device(other) == device(one))?;
        Some(format!(
            "{} and {} are in one file system, so they are not two drives",
            other.display(),
            one.display()
        ))
    };
    dirs.iter().enumerate().find_map(same)
}

/// Traffic that differs from our requests.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Interference {
    /// Moved for others.
    pub(crate) others_bytes_per_s: f64,
    /// Requested by us, and served by something else than the drives.
    pub(crate) elsewhere_bytes_per_s: f64,
}

/// Compares a measurement with the drives' counts. Operations in flight at its begin or end count as neither.
pub(crate) fn interference(figures: &Figures) -> Interference {
    let mut interference = Interference::default();
    let Some(drives) = &figures.drives else {
        return interference;
    };
    let counted = [drives.read_bytes_per_s, drives.write_bytes_per_s];
    for (way, counted) in [&figures.read, &figures.write].into_iter().zip(counted) {
        let (ours, underway) = way.as_ref().map_or((0.0, 0.0), |way| {
            // Little's law, over the measured time.
            let underway_bytes = way.bytes_per_s * way.latency_ns_mean / 1e9;
            (way.bytes_per_s, underway_bytes / figures.seconds)
        });
        interference.others_bytes_per_s += (counted - ours - underway).max(0.0);
        interference.elsewhere_bytes_per_s += (ours - counted - underway).max(0.0);
    }
    let ours: f64 = figures.ways().map(|(_, way)| way.bytes_per_s).sum();
    for rate in [
        &mut interference.others_bytes_per_s,
        &mut interference.elsewhere_bytes_per_s,
    ] {
        if *rate < STRANGE_SHARE * ours {
            *rate = 0.0;
        }
    }
    interference
}

/// Warnings from the figures of a job at `place`.
pub(crate) fn after_at(place: &Place, figures: &Figures) -> Vec<String> {
    let mut found = after(figures);
    // All traffic of a private daemon is this job's.
    if matches!(place, Place::Socket(_)) && interference(figures).others_bytes_per_s > 0.0 {
        found.push(
            "offloadd also served other jobs, or other processes used its drives: its CPU time and the CPU seconds per GB \
             include that work"
                .into(),
        );
    }
    found
}

/// Warnings from the figures of one measurement.
pub(crate) fn after(figures: &Figures) -> Vec<String> {
    let mut found = Vec::new();
    let Interference {
        others_bytes_per_s: others,
        elsewhere_bytes_per_s: elsewhere,
    } = interference(figures);
    if others > 0.0 {
        found.push(format!(
            "other processes moved {} on these drives at the same time",
            ApproxRate(others)
        ));
    }
    if elsewhere > 0.0 {
        found.push(format!(
            "{} did not reach the drives: a cache served them",
            ApproxRate(elsewhere)
        ));
    }
    if let Some(share) = figures.cpu.idle_share.filter(|_| is_busy(figures)) {
        found.push(format!(
            "only {:.0} % of the machine's CPU time was idle: the CPU may be the bottleneck",
            100.0 * share
        ));
    }
    if figures.seconds < SECONDS_MIN {
        found.push(format!(
            "{:.2} s is too short: use a longer runtime or a larger size",
            figures.seconds
        ));
    }
    let fewest = figures.ways().min_by_key(|(_, way)| way.ops);
    if let Some((word, way)) = fewest.filter(|(_, way)| way.ops < OPS_FOR_P999) {
        found.push(format!(
            "{} operations {word}: p99.9 is the slowest one or two of them",
            way.ops
        ));
    }
    found
}

/// Whether the processor was the bottleneck.
pub(crate) fn is_busy(figures: &Figures) -> bool {
    let share = figures.cpu.idle_share;
    share.is_some_and(|share| share < IDLE_SHARE_MIN)
}

pub(crate) fn page_cache() -> String {
    "direct = 0: through the page cache, so this is the speed of memory".into()
}

/// Warns of unwritten parts of a file: no drive serves them, so they read at 20 to 50 GB/s.
pub(crate) fn never_written(path: &Path, bytes: u64) -> Option<String> {
    let file = File::open(path).ok()?;
    if !file.metadata().ok()?.is_file() {
        // Block devices do not report holes.
        return None;
    }
    // File systems report preallocated, unwritten extents as holes.
    let hole = match rustix::fs::seek(&file, SeekFrom::Hole(0)) {
        Ok(hole) => hole,
        Err(Errno::NXIO) => 0,
        Err(_) => return None,
    };
    (hole < bytes).then(|| {
        format!(
            "{}: not written from byte {hole} on, so reads there do not reach the drive; write it first",
            path.display()
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    #[test]
    fn what_others_moved_and_what_a_cache_answered_is_told_from_what_is_underway() {
        let way = |bytes_per_s: f64| crate::figures::WayReport {
            bytes: 0,
            ops: 0,
            bytes_per_s,
            ops_per_s: 0.0,
            latency_ns_min: 0,
            latency_ns_mean: 100e6,
            latency_ns_stdev: 0.0,
            latency_ns_p50: 0,
            latency_ns_p99: 0,
            latency_ns_p999: 0,
            latency_ns_max: 0,
        };
        let figures = |read: f64, counted: [f64; 2]| Figures {
            seconds: 1.0,
            read: Some(way(read)),
            write: None,
            cpu: crate::figures::CpuReport {
                bench_io_s: 0.0,
                daemon_s: None,
                s_per_gb: 0.0,
                idle_share: None,
            },
            drives: Some(crate::figures::DrivesReport {
                read_bytes_per_s: counted[0],
                write_bytes_per_s: counted[1],
            }),
            engine: String::new(),
        };
        // Up to a tenth of a second's bytes may be in flight at each end.
        assert_eq!(
            interference(&figures(1e9, [1.09e9, 0.0])),
            Interference::default()
        );
        assert_eq!(
            interference(&figures(1e9, [0.91e9, 0.01e9])),
            Interference::default()
        );
        let others = interference(&figures(1e9, [1.3e9, 0.1e9]));
        assert!(
            (others.others_bytes_per_s - 0.3e9).abs() < 1.0,
            "{others:?}"
        );
        assert_eq!(others.elsewhere_bytes_per_s, 0.0);
        let (shared, own) = (Place::Socket("/x".into()), Place::Private(Vec::new()));
        for (place, counted, is_theirs) in [
            (&shared, 1.3e9, true),
            (&shared, 1.0e9, false),
            (&own, 1.3e9, false),
        ] {
            let warning = after_at(place, &figures(1e9, [counted, 0.0])).join("; ");
            assert_eq!(
                warning.contains("include that work"),
                is_theirs,
                "{warning}"
            );
        }
        let busy = after(&figures(1e9, [1.5e9, 0.0])).join("; ");
        assert!(
            busy.contains("other processes moved 400.0 MB/s on these drives at the same time"),
            "{busy}"
        );
        let cached = after(&figures(1e9, [0.2e9, 0.0])).join("; ");
        assert!(
            cached.contains("700.0 MB/s did not reach the drives"),
            "{cached}"
        );
    }

    #[test]
    fn a_file_with_a_hole_is_named_and_a_written_one_is_not() {
        let mut file = tempfile::NamedTempFile::new().unwrap();
        file.write_all(&[1; 1 << 20]).unwrap();
        file.as_file().sync_all().unwrap();
        assert_eq!(never_written(file.path(), 1 << 20), None);
        file.as_file().set_len(2 << 20).unwrap();
        let warning = never_written(file.path(), 2 << 20).unwrap();
        assert!(
            warning.contains("not written from byte 1048576 on"),
            "{warning}"
        );
    }

    #[test]
    fn two_directories_of_one_file_system_are_no_two_drives() {
        let dirs = [tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap()];
        let [one, other] = dirs.each_ref().map(|dir| dir.path().to_owned());
        assert_eq!(of_one_drive(std::slice::from_ref(&one)), None);
        assert_eq!(of_one_drive(&[one.clone(), "/proc".into()]), None);
        let warning = of_one_drive(&[one.clone(), "/proc".into(), other.clone()]).unwrap();
        for dir in [one, other] {
            assert!(warning.contains(dir.to_str().unwrap()), "{warning}");
        }
    }
}
