//! Simulates a power cut of a real daemon (`OFFLOADD_FAULT=cut@17`), in test builds only: records what devices were given since
//! their last flush.
//!
//! ```text
//!   a write begins ── what lies there now is kept ──▶ until a flush has ended that began after the write had
//!   the power goes ── any of the sectors kept get their old bytes back ──▶ the process is killed
//! ```
//!
//! Operations that the kernel still has in flight then may reach the device or not. They were not flushed, so a drive may do
//! either.

use std::collections::HashMap;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock};

use offload_api::ids::DeviceIndex;
use test_hooks::injected_fault::{Instead, injected_fault};

use super::{Io, IoDone};
use crate::io::{AlignedBytes, IoId, IoOp};
use test_hooks::random::{SECTOR_BYTES, SimRandom};

/// State of the process: a daemon started by a test has one engine.
#[derive(Default)]
struct PowerCutSim {
    devices: Vec<Arc<File>>,
    /// Writes that no flush covers, in order.
    kept: Vec<ReplacedBytes>,
    /// Operations that the engine was given.
    under_way: HashMap<IoId, UnderWay>,
    /// Number of starts and ends so far.
    moment: u64,
}

/// A write, with the bytes it replaced.
struct ReplacedBytes {
    file: Arc<File>,
    offset: u64,
    old: AlignedBytes,
    began: u64,
    ended: Option<u64>,
}

enum UnderWay {
    Write { began: u64 },
    Flush { file: Arc<File>, began: u64 },
}

/// `None` unless a test cuts the power.
fn power_cut_sim() -> Option<MutexGuard<'static, PowerCutSim>> {
    static WANTED: OnceLock<Option<Mutex<PowerCutSim>>> = OnceLock::new();
    let wanted = WANTED.get_or_init(|| {
        injected_fault()
            .is_some_and(|injected_fault| injected_fault.instead == Instead::Cut)
            .then(Mutex::default)
    });
    let locked = wanted.as_ref()?.lock();
    Some(locked.unwrap_or_else(|e| e.into_inner()))
}

/// Sets the devices of the engine.
pub(crate) fn devices(files: &[Arc<File>]) {
    if let Some(mut power_cut_sim) = power_cut_sim() {
        power_cut_sim.devices = files.to_vec();
    }
}

/// Records an operation that the engine is given.
pub(crate) fn begins(io: &Io) {
    let Some(mut power_cut_sim) = power_cut_sim() else {
        return;
    };
    let DeviceIndex(device) = io.device;
    let file = power_cut_sim.devices[device as usize].clone();
    let under_way = match io.op {
        IoOp::Read => return,
        IoOp::Write => UnderWay::Write {
            began: power_cut_sim.keep(&file, io.offset, io.bytes as usize),
        },
        IoOp::Flush => {
            let began = power_cut_sim.next();
            UnderWay::Flush { file, began }
        }
    };
    power_cut_sim.under_way.insert(io.id, under_way);
}

/// Records an operation that the engine returns.
pub(crate) fn has_ended(done: &IoDone) {
    let Some(mut power_cut_sim) = power_cut_sim() else {
        return;
    };
    match power_cut_sim.under_way.remove(&done.id) {
        Some(UnderWay::Write { began }) => power_cut_sim.end(began),
        Some(UnderWay::Flush { file, began }) if done.outcome.is_ok() => {
            power_cut_sim.flush(&file, began);
        }
        _ => {}
    }
}

/// Records a synchronous write before it is made.
pub(crate) fn writes(file: &Arc<File>, offset: u64, bytes: usize) {
    if let Some(mut power_cut_sim) = power_cut_sim() {
        let began = power_cut_sim.keep(file, offset, bytes);
        // The operation ends before the next flush of this device.
        power_cut_sim.end(began);
    }
}

/// Records that a synchronous flush has ended.
pub(crate) fn flushed(file: &Arc<File>) {
    if let Some(mut power_cut_sim) = power_cut_sim() {
        let began = power_cut_sim.next();
        power_cut_sim.flush(file, began);
    }
}

/// Cuts the power: each device loses none, half, nearly all or all of its unflushed sectors.
pub(crate) fn cut(seed: u64) {
    let Some(mut power_cut_sim) = power_cut_sim() else {
        return;
    };
    let mut random = SimRandom::new(seed);
    let kept_in_16: Vec<_> = (power_cut_sim.devices.iter())
        .map(|file| (file.clone(), [0, 1, 8, 15, 16][random.below(5)]))
        .collect();
    // Newest first: a sector gets back the bytes from before the oldest lost write.
    for ReplacedBytes {
        file, offset, old, ..
    } in power_cut_sim.kept.drain(..).rev()
    {
        let share = kept_in_16.iter().find(|(of, _)| Arc::ptr_eq(of, &file));
        let share = share.map_or(8, |(_, share)| *share);
        let mut bytes = read(&file, offset, old.len());
        let sectors = bytes.as_mut_slice().chunks_mut(SECTOR_BYTES);
        for (sector, old) in sectors.zip(old.as_slice().chunks(SECTOR_BYTES)) {
            if random.below(16) >= share {
                sector.copy_from_slice(old);
            }
        }
        file.write_all_at(bytes.as_slice(), offset)
            .expect("a test's device can be written");
    }
}

fn read(file: &File, offset: u64, bytes: usize) -> AlignedBytes {
    let mut into = AlignedBytes::zeroed(bytes);
    file.read_exact_at(into.as_mut_slice(), offset)
        .expect("a test's device can be read");
    into
}

impl PowerCutSim {
    fn next(&mut self) -> u64 {
        self.moment += 1;
        self.moment
    }

    fn keep(&mut self, file: &Arc<File>, offset: u64, bytes: usize) -> u64 {
        let began = self.next();
        self.kept.push(ReplacedBytes {
            file: file.clone(),
            offset,
            old: read(file, offset, bytes),
            began,
            ended: None,
        });
        began
    }

    /// Records the end of the write that began then.
    fn end(&mut self, began: u64) {
        let ended = self.next();
        let mut kept = self.kept.iter_mut();
        if let Some(kept) = kept.find(|kept| kept.began == began) {
            kept.ended = Some(ended);
        }
    }

    /// Records the end of a flush that began then.
    fn flush(&mut self, file: &Arc<File>, began: u64) {
        self.kept.retain(|kept| {
            let covered = kept.ended.is_some_and(|ended| ended < began);
            !(covered && Arc::ptr_eq(&kept.file, file))
        });
    }
}
