//! When what was written is to be kept on the devices, so that the next life of the daemon knows how far they are worn.

use std::time::{Duration, Instant};

use offload_api::ids::DeviceIndex;

use super::Ledger;
use crate::core::JobState;
use crate::metrics::endurance::{JobWritten, ToKeep};

/// How often wear is kept while something is written: what a killed daemon forgets.
pub(super) const WEAR_KEPT_EVERY: Duration = Duration::from_secs(60);

/// And not more than this of a device, however fast it is: a ten-thousandth of what a drive of a terabyte is rated for.
pub(super) const WEAR_KEPT_BYTES: u64 = 64 << 30;

impl Ledger {
    /// When [`Self::keep_wear`] is wanted next; `None` while nothing new was written.
    pub fn keep_wear_at(&self) -> Option<Instant> {
        let devices = 0..self.devices.len();
        devices.filter_map(|index| self.wear_due(index)).min()
    }

    /// The same of one device. Never while its wear is on its way: one that hangs keeps no other from it.
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
        // Since it was tried, not since it was kept: one that fails is not asked without end.
        Some(match now_bytes - device.wear_kept_bytes {
            WEAR_KEPT_BYTES.. => device.wear_kept,
            _ => device.wear_kept + WEAR_KEPT_EVERY,
        })
    }

    /// What is to be written to the devices so that their wear is known later, of those for which it is time or of all.
    /// `jobs`: all of the store. [`Self::wear_kept`] follows for each.
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

    /// A device's wear was written to it, or not all of it. Whether it was.
    pub fn wear_kept(&mut self, device: DeviceIndex, moved_bytes: Option<u64>) -> bool {
        self.endurance.kept(device.0 as usize, moved_bytes)
    }

    /// Whether a device's wear is on its way to it.
    pub fn is_keeping_wear(&self, device: DeviceIndex) -> bool {
        self.endurance.is_keeping(device.0 as usize)
    }
}
