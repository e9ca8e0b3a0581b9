//! Wear of each device: bytes written before and in this incarnation of the daemon, compared with the rated endurance.
//!
//! Counts the store's writes only, not other files on the drive or a drive's internal rewrites.

use std::collections::BTreeMap;

use offload_api::ids::DeviceIndex;

use super::JobDeviceWear;
use crate::blocks::Blocks;
use crate::config::Config;
use crate::io::AlignedBytes;
use crate::store::recover::RecoveredStore;
use crate::store::superblock::StoreId;
use crate::store::wear::{Wear, totals};

/// Fraction of the rated endurance at which a warning is logged.
const WARN_SHARE: f64 = 0.8;

/// Wear of all devices; part of the ledger.
#[derive(Debug)]
pub struct Endurance {
    store: StoreId,
    ratings: Ratings,
    devices: Vec<DeviceEndurance>,
    /// By `job_id`: bytes that jobs wrote earlier to devices that have left.
    left: BTreeMap<u64, u64>,
}

/// Rated endurance of drives from the settings. By path, because a device may be added while the daemon runs.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Ratings {
    /// Listed devices and their ratings.
    pub listed: BTreeMap<String, Option<u64>>,
    /// Rating of other devices, if one number is set for all.
    pub others: Option<u64>,
}

impl Ratings {
    /// Ratings of the settings.
    pub fn of_settings(config: &Config) -> Self {
        let paths = config.devices.iter().map(|path| path.display().to_string());
        Self {
            listed: paths.zip(config.rated_bytes.iter().copied()).collect(),
            others: config.rated_bytes_others,
        }
    }

    /// Rated endurance of the device at `path`, if set.
    pub fn rated_bytes(&self, path: &str) -> Option<u64> {
        *self.listed.get(path).unwrap_or(&self.others)
    }
}

/// Wear of a device when the daemon starts or the device is added.
#[derive(Clone, Debug, Default)]
pub struct WearCount {
    /// Path in the settings.
    pub path: String,
    /// Number in the store.
    pub number: u32,
    /// Wear stored on the device.
    pub before: Wear,
}

impl WearCount {
    /// Reads the wear of each device, in the store's order.
    pub fn read(blocks: &mut impl Blocks, store: &RecoveredStore) -> Vec<Self> {
        let counts = store.devices.iter().map(|device| {
            let number = device.superblock.number;
            Self {
                path: device.path.clone(),
                number,
                before: Wear::read(blocks, device.position, store.id, number),
            }
        });
        counts.collect()
    }
}

#[derive(Debug)]
struct DeviceEndurance {
    worn: WearCount,
    rated_bytes: Option<u64>,
    /// Newest sequence number, and the bytes written when it was stored.
    sequence: u64,
    kept_bytes: u64,
    /// Write of the counters in flight.
    keeping: Option<Keeping>,
    /// Whether a device has left since the last write: only the jobs' totals still include the bytes written to it.
    totals_wanted: bool,
    warned: bool,
}

/// Write of a device's counters in flight.
#[derive(Debug)]
struct Keeping {
    written_bytes: u64,
    /// Bytes of the write itself.
    blocks_bytes: u64,
}

/// Bytes written by a job.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct JobWritten {
    /// ID of the job or device.
    pub job_id: u64,
    /// In this incarnation, to the device whose counters are written.
    pub here_bytes: u64,
    /// In all incarnations, to all devices.
    pub ever_bytes: u64,
}

/// Counters to write to a device.
#[derive(Debug)]
pub struct ToKeep {
    /// ID of the job or device.
    pub device: DeviceIndex,
    /// Offset on the device.
    pub offset: u64,
    /// Encoded counters.
    pub blocks: AlignedBytes,
}

impl Endurance {
    /// `devices` are in the store's order.
    pub fn new(store: StoreId, ratings: Ratings, devices: Vec<WearCount>) -> Self {
        let wears = devices.iter().map(|worn| &worn.before);
        let here = |job_id: &u64| {
            let bytes = wears.clone().filter_map(|wear| wear.jobs.get(job_id));
            bytes.fold(0, |sum: u64, bytes| sum.saturating_add(*bytes))
        };
        let left = totals(wears.clone()).into_iter();
        let left = left.map(|(job_id, total)| (job_id, total.saturating_sub(here(&job_id))));
        let mut endurance = Self {
            store,
            ratings,
            left: left.filter(|(_, bytes)| *bytes > 0).collect(),
            devices: Vec::new(),
        };
        devices.into_iter().for_each(|worn| endurance.add(worn));
        endurance
    }

    /// Adds a device.
    pub fn add(&mut self, worn: WearCount) {
        self.devices.push(DeviceEndurance {
            sequence: worn.before.sequence,
            kept_bytes: worn.before.written_bytes,
            keeping: None,
            totals_wanted: false,
            rated_bytes: self.ratings.rated_bytes(&worn.path),
            worn,
            warned: false,
        });
    }

    /// Sets the number of an added device.
    pub fn number(&mut self, device: usize, number: u32) {
        self.devices[device].worn.number = number;
    }

    /// Bytes ever written to a device, of which `now_bytes` in this incarnation.
    pub fn written_bytes(&self, device: usize, now_bytes: u64) -> u64 {
        self.devices[device].worn.before.written_bytes + now_bytes
    }

    /// Rated endurance, if set.
    pub fn rated_bytes(&self, device: usize) -> Option<u64> {
        self.devices[device].rated_bytes
    }

    /// Applies changed ratings; a device may be warned about again.
    pub fn rate(&mut self, ratings: Ratings) {
        for device in &mut self.devices {
            let rated_bytes = ratings.rated_bytes(&device.worn.path);
            if device.rated_bytes != rated_bytes {
                device.rated_bytes = rated_bytes;
                device.warned = false;
            }
        }
        self.ratings = ratings;
    }

    /// Bytes ever written by a job to a device, of which `now_bytes` in this incarnation.
    pub fn job_bytes_on(&self, job_id: u64, device: usize, now_bytes: u64) -> JobDeviceWear {
        let worn = &self.devices[device].worn;
        let before = worn.before.jobs.get(&job_id).unwrap_or(&0);
        JobDeviceWear {
            number: worn.number,
            bytes: before + now_bytes,
        }
    }

    /// Bytes ever written by a job, of which `now_bytes` in this incarnation to each device.
    pub fn job_bytes(&self, job_id: u64, now_bytes: &[u64]) -> u64 {
        let before = self.devices.iter().map(|d| d.worn.before.jobs.get(&job_id));
        let left = self.left.get(&job_id).unwrap_or(&0);
        before.flatten().sum::<u64>() + left + now_bytes.iter().sum::<u64>()
    }

    /// Notes that a device has left: the jobs' totals, which include its bytes, must soon be written to the others.
    pub fn one_left(&mut self) {
        for device in &mut self.devices {
            device.totals_wanted = true;
        }
    }

    /// Whether the jobs' totals must be written to a device although no tiles were written to it.
    pub fn wants_totals(&self, device: usize) -> bool {
        self.devices[device].totals_wanted
    }

    /// Bytes written to a device since its counters were stored; a killed daemon forgets them.
    pub fn behind_bytes(&self, device: usize, now_bytes: u64) -> u64 {
        self.written_bytes(device, now_bytes) - self.devices[device].kept_bytes
    }

    /// Encodes the device's current counters. `jobs` are those of the store.
    pub fn keep(&mut self, index: usize, now_bytes: u64, jobs: &[JobWritten]) -> ToKeep {
        let written_bytes = self.written_bytes(index, now_bytes);
        let device = &mut self.devices[index];
        let number = device.worn.number;
        let before = &device.worn.before.jobs;
        let here = jobs.iter().map(|job| {
            let before = before.get(&job.job_id).unwrap_or(&0);
            (job.job_id, before + job.here_bytes)
        });
        let ever = jobs.iter().map(|job| (job.job_id, job.ever_bytes));
        let wear = Wear {
            sequence: device.sequence + 1,
            written_bytes,
            jobs: here.filter(|(_, bytes)| *bytes > 0).collect(),
            totals: ever.filter(|(_, bytes)| *bytes > 0).collect(),
        };
        // Since the last attempt, so that a failing device is not written all the time.
        device.totals_wanted = false;
        let (offset, blocks) = wear.encode(self.store, number);
        let before = device.keeping.replace(Keeping {
            written_bytes,
            blocks_bytes: blocks.len() as u64,
        });
        assert!(before.is_none(), "one write at a time per device");
        ToKeep {
            device: DeviceIndex(index as u32),
            offset,
            blocks,
        }
    }

    /// Whether a write of the device's counters is in flight.
    pub fn is_keeping(&self, device: usize) -> bool {
        self.devices[device].keeping.is_some()
    }

    /// Ends the write, of which `moved_bytes` were written. After an incomplete one, the next goes to the same place, because the copy at
    /// the other place is intact.
    pub fn kept(&mut self, device: usize, moved_bytes: Option<u64>) -> bool {
        let device = &mut self.devices[device];
        let keeping = device.keeping.take().expect("a write was in flight");
        let whole = moved_bytes == Some(keeping.blocks_bytes);
        if whole {
            device.sequence += 1;
            device.kept_bytes = keeping.written_bytes;
        }
        whole
    }

    /// Returns the fraction of the rated endurance that a device has reached, once it exceeds the limit for a warning.
    pub fn newly_worn(&mut self, index: usize, now_bytes: u64) -> Option<f64> {
        let written_bytes = self.written_bytes(index, now_bytes);
        let device = &mut self.devices[index];
        let share = written_bytes as f64 / device.rated_bytes? as f64;
        let warn = share >= WARN_SHARE && !device.warned;
        device.warned |= warn;
        warn.then_some(share)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const STORE: StoreId = StoreId([7; 16]);

    #[test]
    fn stored_counters_continue_from_earlier_ones() {
        let before = Wear {
            sequence: 4,
            written_bytes: 1000,
            jobs: [(1, 400), (2, 600)].into(),
            // 100 of them on a device that is not here any more.
            totals: [(1, 400), (2, 700)].into(),
        };
        let job = |job_id, here_bytes, ever_bytes| JobWritten {
            job_id,
            here_bytes,
            ever_bytes,
        };
        let worn = WearCount {
            number: 0,
            before,
            path: "/a".into(),
        };
        let mut endurance = Endurance::new(STORE, Ratings::default(), vec![worn]);
        assert_eq!(endurance.behind_bytes(0, 0), 0);
        assert_eq!(endurance.behind_bytes(0, 50), 50);
        assert_eq!(
            [1, 2, 3].map(|id| endurance.job_bytes(id, &[50])),
            [450, 750, 50]
        );
        // Job 1 was dropped, job 3 is new, job 4 wrote nothing.
        let kept = endurance.keep(0, 50, &[job(2, 30, 730), job(3, 20, 20), job(4, 0, 0)]);
        let again = Wear::decode(&kept.blocks, STORE, 0).unwrap();
        assert_eq!((again.sequence, again.written_bytes), (5, 1050));
        assert_eq!(again.jobs, [(2, 630), (3, 20)].into());
        assert_eq!(again.totals, [(2, 730), (3, 20)].into());
        assert_eq!(endurance.behind_bytes(0, 50), 50, "it has not ended");
        assert!(endurance.kept(0, Some(kept.blocks.len() as u64)));
        assert_eq!(endurance.behind_bytes(0, 50), 0);
        // The bytes of this incarnation are not counted twice when the counters are stored again.
        let kept = endurance.keep(0, 60, &[job(2, 40, 740), job(3, 20, 20)]);
        let again = Wear::decode(&kept.blocks, STORE, 0).unwrap();
        assert_eq!((again.sequence, again.written_bytes), (6, 1060));
        assert_eq!(again.jobs, [(2, 640), (3, 20)].into());
        // A failed write leaves the intact copy where it is.
        for moved_bytes in [None, Some(512)] {
            assert!(!endurance.kept(0, moved_bytes));
            assert_eq!(endurance.behind_bytes(0, 60), 10);
            let retried = endurance.keep(0, 60, &[]);
            assert_eq!(retried.offset, kept.offset);
        }
    }

    #[test]
    fn a_warning_comes_once_at_four_fifths_of_the_rating() {
        let worn = |path: &str| WearCount {
            path: path.into(),
            ..WearCount::default()
        };
        let ratings = |a, b| Ratings {
            listed: [("/a".into(), a), ("/b".into(), b)].into(),
            others: None,
        };
        let rated = ratings(Some(1000), None);
        let mut endurance = Endurance::new(STORE, rated, vec![worn("/a"), worn("/b")]);
        assert_eq!(endurance.newly_worn(0, 799), None);
        assert_eq!(endurance.newly_worn(0, 800), Some(0.8));
        assert_eq!(endurance.newly_worn(0, 900), None);
        assert_eq!(
            endurance.newly_worn(1, u64::MAX / 2),
            None,
            "nobody rated it"
        );
        // A changed rating warns again; an unchanged one does not.
        endurance.rate(ratings(Some(2000), Some(1000)));
        assert_eq!(endurance.newly_worn(0, 1000), None);
        assert_eq!(endurance.newly_worn(1, 900), Some(0.9));
        endurance.rate(ratings(Some(2000), Some(1000)));
        assert_eq!(endurance.newly_worn(1, 950), None);
    }

    #[test]
    fn a_device_that_comes_is_rated_by_its_path_at_once_and_at_a_reload() {
        let came = |path: &str| WearCount {
            path: path.into(),
            ..WearCount::default()
        };
        let mut endurance = Endurance::new(STORE, Ratings::default(), vec![came("/a")]);
        endurance.rate(Ratings {
            listed: [("/a".into(), Some(1)), ("/late".into(), Some(2))].into(),
            others: None,
        });
        endurance.add(came("/late"));
        endurance.add(came("/unlisted"));
        let rated = |endurance: &Endurance| [0, 1, 2].map(|device| endurance.rated_bytes(device));
        assert_eq!(rated(&endurance), [Some(1), Some(2), None]);
        endurance.rate(Ratings {
            listed: [("/late".into(), Some(7))].into(),
            others: Some(9),
        });
        assert_eq!(rated(&endurance), [Some(9), Some(7), Some(9)]);
    }
}
