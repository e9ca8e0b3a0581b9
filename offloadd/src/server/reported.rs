//! A tile that a process calls damaged is read by the daemon before it counts.

use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::atomic::{AtomicU32, Ordering};

use offload_api::checksum::ChecksumDigest;
use offload_api::fault::Fault;
use tokio::sync::Mutex;

use super::scrub::is_another;
use crate::core::{Damage, Reported};
use crate::device::Device;
use crate::driver::DriverHandle;
use crate::io::AlignedBytes;
use crate::metrics::MovedBeside;

/// Read at a time, so that others' reads come between.
const PIECE_BYTES: u64 = 1 << 20;

/// Reports that were not true and are told in the log.
const TOLD_MAX: u32 = 16;

/// One is looked at at a time.
static LOOKING: Mutex<()> = Mutex::const_new(());

static TOLD: AtomicU32 = AtomicU32::new(0);

/// Reads the tile, and has it counted if it is damaged on the device. Goes on when the caller has gone.
pub(super) async fn look(
    owner: DriverHandle,
    reported: Reported,
    damage: Damage,
) -> Result<(), Fault> {
    let looking = tokio::spawn(async move {
        let _one = LOOKING.lock().await;
        let Reported {
            uid,
            job,
            path,
            tile_bytes,
            ..
        } = reported.clone();
        let read = tokio::task::spawn_blocking(move || read(&reported, &damage));
        let Some(found) = read.await.expect("reading does not panic") else {
            return Ok(());
        };
        if found.is_ok() {
            let moved = MovedBeside {
                read_bytes: tile_bytes,
                written_bytes: 0,
            };
            let owner = owner.clone();
            tokio::task::spawn_blocking(move || owner.moved_beside(damage.device, moved));
        }
        if found.as_ref().is_ok_and(|found| *found == damage.expected) {
            if TOLD.fetch_add(1, Ordering::Relaxed) < TOLD_MAX {
                tracing::warn!(
                    "tile {} of job {job} of uid {uid} on device {path} at byte {} was reported as damaged and is as it was \
                     written: its bytes changed on the way to the process, not on the device",
                    damage.tile,
                    damage.offset,
                );
            }
            return Ok(());
        }
        let of = job.clone();
        let still = owner.ask(move |core| core.still_lies(uid, &of, &damage))?;
        match still.await {
            Ok(true) => {
                let found = found.unwrap_or(0);
                owner.damaged(uid, job, Damage { found, ..damage })
            }
            // Written anew meanwhile; or the daemon ends.
            Ok(false) | Err(_) => Ok(()),
        }
    });
    looking.await.expect("looking does not panic")
}

/// The tile's checksum as its device gives it; an error: it does not. `None`: another device lies there.
fn read(reported: &Reported, damage: &Damage) -> Option<std::io::Result<u32>> {
    let device = Device::look(Path::new(&reported.path)).ok()?;
    if is_another(&device, &reported.superblock) {
        return None;
    }
    let mut sum = ChecksumDigest::new();
    let mut at = 0;
    while at < reported.tile_bytes {
        let bytes = PIECE_BYTES.min(reported.tile_bytes - at);
        let mut piece = AlignedBytes::zeroed(bytes as usize);
        let read = (device.file()).read_exact_at(piece.as_mut_slice(), damage.offset + at);
        if let Err(error) = read {
            return Some(Err(error));
        }
        sum.add(piece.as_slice());
        at += bytes;
    }
    Some(Ok(sum.sum()))
}
