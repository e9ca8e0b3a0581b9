//! When to write the wear counters to the devices, so that the next incarnation of the daemon knows them.

use std::time::{Duration, Instant};

use offload_api::ids::DeviceIndex;

use super::Ledger;
use crate::core::JobState;
use crate::metrics::endurance::{JobWritten, ToKeep};

/// Interval of writing wear counters; a killed daemon forgets the bytes since.
pub(super) const WEAR_KEPT_EVERY: Duration = Duration::from_secs(60);

/// Bytes written to a device after which its counters are written early: a ten-thousandth of the rated endurance of a 1 TB drive.
pub(super) const WEAR_KEPT_BYTES: u64 = 64 << 30;

impl Ledger {
    /// When to call [`Self::keep_wear`] next; `None` if nothing was written since.
    pub fn keep_wear_at(&self) -> Option<Instant> {
        let devices = 0..self.devices.len();
        devices.filter_map(|index| self.wear_due(index)).min()
    }

    /// When a device's counters are due; `None` while a write of them is in flight, so that a device that hangs does not delay others.
    fn wear_due(&self, index: usize) -> Option<Instant> {
        let device = &self.devices[index];
        let now_bytes = device.counts.written.bytes;
        let is_behind = self.endurance.behind_bytes(index, now_bytes) > 0;
        let wants_totals = self.endurance.wants_totals(index);
        if !device.of_store || !(is_behind || wants_totals) || self.endurance.is_keeping(index) {
            return None;
        }
        if wants_totals {
            return Some(device.wear_kept);
        }
        // Since the last attempt, so that a failing device is not written all the time.
        Some(match now_bytes - device.wear_kept_bytes {
            WEAR_KEPT_BYTES.. => device.wear_kept,
            _ => device.wear_kept + WEAR_KEPT_EVERY,
        })
    }

    /// Returns the counters to write, of the devices that are due or of all. `jobs` are all of the store. Call [`Self::wear_kept`] for
    /// each.
    pub fn keep_wear(&mut self, jobs: &[JobState], now: Instant, at_once: bool) -> Vec<ToKeep> {
        let mut to_keep = Vec::new();
        for index in 0..self.devices.len() {
            let due = self.wear_due(index);
            if !due.is_some_and(|at| at_once || at <= now) {
                continue;
            }
            let now_bytes = self.devices[index].counts.written.bytes;
            self.devices[index].wear_kept = now;
            self.devices[index].wear_kept_bytes = now_bytes;
            let written = jobs.iter().filter_map(|state| {
                let now_bytes = (self.counted(state)).map_or(&[][..], |job| &job.written_bytes);
                let job_id = state.job_id?;
                Some(JobWritten {
                    job_id,
                    here_bytes: now_bytes.get(index).copied().unwrap_or(0),
                    ever_bytes: self.endurance.job_bytes(job_id, now_bytes),
                })
            });
            let written: Vec<_> = written.collect();
            to_keep.push(self.endurance.keep(index, now_bytes, &written));
        }
        to_keep
    }

    /// Ends a write of a device's counters. Returns whether it was complete.
    pub fn wear_kept(&mut self, device: DeviceIndex, moved_bytes: Option<u64>) -> bool {
        self.endurance.kept(device.0 as usize, moved_bytes)
    }

    /// Whether a write of the device's counters is in flight.
    pub fn is_keeping_wear(&self, device: DeviceIndex) -> bool {
        self.endurance.is_keeping(device.0 as usize)
    }
}
