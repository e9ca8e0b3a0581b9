//! Measures a device of a store that no daemon serves again, and stores the new rates.
//!
//! ```text
//!   begin:  catalog of a new incarnation ──▶ free space of the device may be overwritten and read
//!   finish: superblock ──▶ catalog: devices that lack tiles by the new rates are filling
//! ```
//!
//! Each structure is written one copy after the other, so a power cut leaves the old rates or the new ones. With the new rates and
//! the old catalog, new jobs are placed by the new rates, and tiles of existing jobs move when the device is calibrated again. The
//! next daemon moves the tiles.

use offload_api::ids::DeviceIndex;

use crate::blocks::{BlockError, Blocks};
use crate::device::{Device, DeviceBlocks};
use crate::engine::EngineChoice;
use crate::measure::{MeasureError, measure};
use crate::metrics::MovedBeside;
use crate::store::catalog::Phase;
use crate::store::format::MeasuredArea;
use crate::store::placement::rate;
use crate::store::recover::{self, RecoveredStore};
use crate::store::superblock::MeasuredRates;
use crate::store::superblock::Superblock;
use crate::store::{BLOCK, SUPERBLOCK_OFFSETS, StoreError};

/// Reason why a device cannot be calibrated.
#[derive(Debug, thiserror::Error)]
pub enum CalibrateError {
    /// The store cannot be read or written.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// A device failed a write.
    #[error(transparent)]
    Device(#[from] BlockError),
    /// The measurement failed.
    #[error(transparent)]
    Measure(#[from] MeasureError),
    /// The path leads to no device of the store.
    #[error("the store has no device {path}; it has {known}")]
    Unknown {
        /// Path as given.
        path: String,
        /// Paths of the store's devices.
        known: String,
    },
    /// The device will leave the store.
    #[error("{0} is being drained, so nothing is placed on it whatever its rates are")]
    Draining(String),
    /// The device is full, or its free space is in small pieces.
    #[error(
        "measuring {path} overwrites free space, at least {} bytes in one piece, and its largest free piece has {largest_bytes}: delete a job (`offloadd job delete`) or let tiles move away first",
        MeasuredArea::BYTES_MIN
    )]
    NoSpace {
        /// Path of the device.
        path: String,
        /// Bytes of its largest free piece.
        largest_bytes: u64,
    },
}

/// Rates of a device before and after.
#[derive(Clone, Copy, Debug)]
pub struct Calibration {
    /// Rates stored before.
    pub before: MeasuredRates,
    /// Rates stored now.
    pub now: MeasuredRates,
}

/// Measures the device at `path` of the store on `devices` and stores its rates.
///
/// # Errors
/// [`CalibrateError`]. The rates are the old ones or, if a write failed, perhaps the new ones; the command can be repeated.
pub fn calibrate(
    devices: &[Device],
    path: &str,
    engine: EngineChoice,
) -> Result<Calibration, CalibrateError> {
    let blocks = &mut DeviceBlocks(devices);
    let mut store = recover::open(blocks)?;
    let (device, area) = begin(blocks, &mut store, path)?;
    let position = store[device].position;
    let now = measure(
        &devices[position],
        area,
        engine,
        &mut MovedBeside::default(),
    )?;
    finish(blocks, &store, device, &now)?;
    let before = store[device].superblock.rates();
    Ok(Calibration { before, now })
}

/// Chooses free space of the device at `path` that a measurement may overwrite. Sessions that a daemon handed over may keep tiles
/// there, so they can no longer be adopted.
///
/// # Errors
/// [`CalibrateError`]; nothing may be overwritten then.
pub fn begin(
    blocks: &mut impl Blocks,
    store: &mut RecoveredStore,
    path: &str,
) -> Result<(DeviceIndex, MeasuredArea), CalibrateError> {
    let found = store.devices.iter().position(|device| device.path == path);
    let Some(device) = found.map(|index| DeviceIndex(index as u32)) else {
        let known: Vec<&str> = store.devices.iter().map(|d| d.path.as_str()).collect();
        return Err(CalibrateError::Unknown {
            path: path.to_owned(),
            known: known.join(", "),
        });
    };
    if store[device].phase == Some(Phase::Draining) {
        return Err(CalibrateError::Draining(path.to_owned()));
    }
    let (offset, largest_bytes) = store.space.largest_free(device).unwrap_or((0, 0));
    if largest_bytes < MeasuredArea::BYTES_MIN {
        return Err(CalibrateError::NoSpace {
            path: path.to_owned(),
            largest_bytes,
        });
    }
    let catalog = store.catalog.of_next_incarnation();
    catalog.write(blocks, store[store.metadata_device].position)?;
    store.catalog = catalog;
    let bytes = largest_bytes.min(MeasuredArea::BYTES_MAX) / BLOCK * BLOCK;
    Ok((device, MeasuredArea { offset, bytes }))
}

/// Stores the rates of a device, and which devices lack tiles by them.
///
/// # Errors
/// A device failed a write or a flush; the store may have the old rates or the new ones.
pub fn finish(
    blocks: &mut impl Blocks,
    store: &RecoveredStore,
    device: DeviceIndex,
    rates: &MeasuredRates,
) -> Result<(), BlockError> {
    let position = store[device].position;
    let superblock = Superblock {
        read_bytes_per_s: rates.read_bytes_per_s,
        write_bytes_per_s: rates.write_bytes_per_s,
        ..store[device].superblock
    };
    let copy = superblock.encode();
    for offset in SUPERBLOCK_OFFSETS {
        blocks.write(position, offset, &copy)?;
        blocks.flush(position)?;
    }
    let lacking = lacking_with(store, device, rates);
    let mut catalog = store.catalog.clone();
    catalog.sequence += 1;
    for (index, known) in store.devices.iter().enumerate() {
        let number = known.superblock.number;
        let entry = catalog.devices.iter_mut().find(|e| e.number == number);
        if let Some(entry) = entry.filter(|entry| entry.phase != Phase::Draining) {
            entry.phase = match lacking.contains(&DeviceIndex(index as u32)) {
                true => Phase::Filling,
                false => Phase::Settled,
            };
        }
    }
    catalog.write(blocks, store[store.metadata_device].position)
}

/// Returns the devices that hold fewer tiles than their rates say, by at least the smallest tile, if `device` has these rates.
fn lacking_with(
    store: &RecoveredStore,
    device: DeviceIndex,
    rates: &MeasuredRates,
) -> Vec<DeviceIndex> {
    let mut current = vec![0; store.devices.len()];
    let mut least_bytes = u64::MAX;
    for job in &store.jobs {
        let definition = &job.table.definition;
        for (tile, extents) in definition.tiles().iter().zip(&job.table.extents) {
            let bytes = u64::from(tile.tile_bytes);
            least_bytes = least_bytes.min(bytes);
            for extent in &extents[..definition.extents(tile)] {
                current[extent.device.0 as usize] += bytes;
            }
        }
    }
    let mut space = store.space.clone();
    let rate = rate(rates.read_bytes_per_s, rates.write_bytes_per_s);
    space.set_rate(device, rate);
    space.lacking(&current, least_bytes)
}
