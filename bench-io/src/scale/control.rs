//! The negative control: one synchronous thread, round robin over the drives. It must not scale.

use std::fs::OpenOptions;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use offloadd::io::AlignedBytes;
use rustix::fs::OFlags;

use crate::targets::Way;

/// Measures the rate in one direction over `files` of `file_bytes` each, past the page cache. Bytes a second.
pub(super) fn run(
    files: &[PathBuf],
    way: Way,
    block_bytes: u32,
    file_bytes: u64,
    runtime: Duration,
) -> Result<f64> {
    let opened = files
        .iter()
        .map(|path| {
            OpenOptions::new()
                .read(true)
                .write(way == Way::Write)
                .custom_flags(OFlags::DIRECT.bits() as i32)
                .open(path)
                .with_context(|| format!("opening {}", path.display()))
        })
        .collect::<Result<Vec<_>>>()?;
    let mut bytes = AlignedBytes::zeroed(block_bytes as usize);
    let blocks = file_bytes / u64::from(block_bytes);
    let (mut turn, since) = (0_u64, Instant::now());
    while since.elapsed() < runtime {
        let index = (turn % files.len() as u64) as usize;
        let offset = turn / files.len() as u64 % blocks * u64::from(block_bytes);
        let moved = match way {
            Way::Read => opened[index].read_at(bytes.as_mut_slice(), offset),
            Way::Write => opened[index].write_at(bytes.as_slice(), offset),
        };
        let tried = || format!("{} at {offset} of {}", way.word(), files[index].display());
        let moved = moved.with_context(tried)?;
        ensure!(
            moved == bytes.len(),
            "{}: only {moved} bytes moved",
            tried()
        );
        turn += 1;
        crate::stop::check()?;
    }
    Ok(turn as f64 * f64::from(block_bytes) / since.elapsed().as_secs_f64())
}
