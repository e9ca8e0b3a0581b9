//! The daemon reads a tile that a process reports as damaged before the report counts.
//!
//! These reads bypass the queue, so they are bounded for each user: one at a time, [`REPORTS_MAX`] that wait, and a pause after
//! each report that was wrong.

use std::collections::HashMap;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use offload_api::checksum::ChecksumDigest;
use offload_api::fault::{Fault, FaultKind};
use tokio::sync::Mutex;

use super::scrub::is_another;
use crate::core::{Damage, Reported};
use crate::device::Device;
use crate::driver::DriverHandle;
use crate::io::AlignedBytes;
use crate::metrics::MovedBeside;

/// Bytes of one read, so that reads of others come between.
const PIECE_BYTES: u64 = 1 << 20;

/// Reports of one user that are checked or wait for it. A session of the client makes as many in all.
const REPORTS_MAX: usize = 16;

/// How long a user's next report waits after one that was wrong: as long as the log waits for its next line about that user.
const PAUSE: Duration = Duration::from_secs(1);

/// Reports that are being checked, by user.
#[derive(Clone, Debug, Default)]
pub(super) struct Reports(Arc<std::sync::Mutex<HashMap<u32, Arc<Mutex<()>>>>>);

impl Reports {
    /// Reads the tile, and counts its damage if the device returns other bytes. Continues when the caller has gone.
    ///
    /// # Errors
    /// [`FaultKind::TooMany`] for the user's reports, or a fault of [`DriverHandle::call`].
    pub(super) async fn check(
        &self,
        owner: DriverHandle,
        reported: Reported,
        damage: Damage,
    ) -> Result<(), Fault> {
        let turns = self.enter(reported.uid)?;
        let checking = tokio::spawn(async move {
            let turn = turns.lock_owned().await;
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
                tracing::warn!(
                    uid,
                    "tile {} of job {job} on device {path} at byte {} was reported as damaged, but the device returns it as it \
                     was written: its bytes changed on the way to the process, not on the device",
                    damage.tile,
                    damage.offset,
                );
                tokio::spawn(async move {
                    tokio::time::sleep(PAUSE).await;
                    drop(turn);
                });
                return Ok(());
            }
            let found = found.unwrap_or(0);
            owner.reported(uid, job, Damage { found, ..damage })
        });
        checking.await.expect("checking does not panic")
    }

    /// Returns the lock that orders the checks of `uid`. Each clone of it counts as one report.
    fn enter(&self, uid: u32) -> Result<Arc<Mutex<()>>, Fault> {
        let mut turns = self.0.lock().unwrap_or_else(|e| e.into_inner());
        turns.retain(|_, turns| Arc::strong_count(turns) > 1);
        let turns = turns.entry(uid).or_default();
        if Arc::strong_count(turns) > REPORTS_MAX {
            let what = format!("{REPORTS_MAX} reports of damage by this user are being checked");
            return Err(Fault::new(FaultKind::TooMany, what));
        }
        Ok(turns.clone())
    }
}

/// Returns the checksum of the tile's bytes on its device, or the error of the read. Returns `None` if another device has that
/// path now.
fn read(reported: &Reported, damage: &Damage) -> Option<std::io::Result<u32>> {
    let device = Device::open_readonly(Path::new(&reported.path)).ok()?;
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_users_reports_are_checked_one_at_a_time_and_keep_no_other_user_waiting() {
        let reports = Reports::default();
        let of_one: Vec<_> = (0..REPORTS_MAX)
            .map(|_| reports.enter(1).unwrap())
            .collect();
        let turn = of_one[0].clone().try_lock_owned().unwrap();
        assert!(of_one[1].try_lock().is_err(), "one at a time");
        let fault = reports.enter(1).unwrap_err();
        assert_eq!(fault.kind, FaultKind::TooMany);
        let of_other = reports.enter(2).unwrap();
        assert!(of_other.try_lock().is_ok());
        drop((of_one, of_other));
        assert!(
            reports.enter(1).unwrap().try_lock().is_err(),
            "a check outlives its caller"
        );
        drop(turn);
        assert!(reports.enter(1).unwrap().try_lock().is_ok());
        assert_eq!(reports.0.lock().unwrap().len(), 1, "nothing is kept");
    }
}
