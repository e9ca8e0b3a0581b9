//! When a result means little, and why: said beside every figure, never left for the reader to find out.

use std::fs::File;
use std::path::Path;

use rustix::fs::SeekFrom;
use rustix::io::Errno;

use crate::machine;
use crate::report::Figures;

/// Below this share of idle time the processor is measured, not the drive.
pub(crate) const IDLE_SHARE_MIN: f64 = 0.1;

/// Shorter says little: throttles and caches work in slices of a tenth of a second.
const SECONDS_MIN: f64 = 1.0;

/// For a p99.9 that is more than one operation.
const OPS_FOR_P999: u64 = 1000;

/// What is known before the measurement begins.
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

/// What the figures themselves say.
pub(crate) fn after(figures: &Figures) -> Vec<String> {
    let mut found = Vec::new();
    if let Some(share) = figures.cpu.idle_share.filter(|_| is_busy(figures)) {
        found.push(format!(
            "only {:.0} % of the machine's processor time was idle: this measures the processor",
            100.0 * share
        ));
    }
    if figures.seconds < SECONDS_MIN {
        found.push(format!(
            "{:.2} s are too short; say --runtime 5",
            figures.seconds
        ));
    }
    for (word, way) in figures.ways() {
        if way.ops < OPS_FOR_P999 {
            found.push(format!(
                "{} operations {word}: p99.9 is the slowest one or two of them",
                way.ops
            ));
        }
    }
    found
}

/// Whether the processor was the wall.
pub(crate) fn is_busy(figures: &Figures) -> bool {
    let share = figures.cpu.idle_share;
    share.is_some_and(|share| share < IDLE_SHARE_MIN)
}

/// Reading through the page cache.
pub(crate) fn page_cache() -> String {
    "direct = 0: through the page cache, so this is the speed of memory".into()
}

/// Whether parts of what is read were never written: such parts come from no drive and read at 20 to 50 GB/s.
pub(crate) fn never_written(path: &Path, bytes: u64) -> Option<String> {
    let file = File::open(path).ok()?;
    if !file.metadata().ok()?.is_file() {
        // Block devices do not tell.
        return None;
    }
    // File systems call preallocated extents that were never written holes, which is what is asked for here.
    let hole = match rustix::fs::seek(&file, SeekFrom::Hole(0)) {
        Ok(hole) => hole,
        Err(Errno::NXIO) => 0,
        Err(_) => return None,
    };
    (hole < bytes).then(|| {
        format!(
            "{}: not written from byte {hole} on, so reads there come from no drive; write it first",
            path.display()
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    #[test]
    fn a_file_with_a_hole_is_named_and_a_written_one_is_not() {
        let mut file = tempfile::NamedTempFile::new().unwrap();
        file.write_all(&[1; 1 << 20]).unwrap();
        file.as_file().sync_all().unwrap();
        assert_eq!(never_written(file.path(), 1 << 20), None);
        file.as_file().set_len(2 << 20).unwrap();
        let said = never_written(file.path(), 2 << 20).unwrap();
        assert!(said.contains("not written from byte 1048576 on"), "{said}");
    }
}
