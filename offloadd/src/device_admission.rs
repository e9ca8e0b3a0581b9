//! Prepares a device for being added to a store: creates and locks its file, checks that it is unused, and measures its rates.
//!
//! An interrupted add can be repeated: an empty file, and a device whose superblock names the store although the store does not list
//! it, are accepted.

use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

use crate::core::{DeviceState, NewDevice};
use crate::device::{Device, DeviceBlocks, DeviceError};
use crate::engine::EngineChoice;
use crate::measure::{MeasureError, measure_blank};
use crate::metrics::MovedBeside;
use crate::store::format::{check_size, data_bytes};
use crate::store::sealed::{self, Unreadable};
use crate::store::superblock::{self, DeviceId, StoreId, Superblock};
use crate::store::{BLOCK, SUPERBLOCK_OFFSETS, StoreError};

/// Reason why a device cannot be added.
#[derive(Debug, thiserror::Error)]
pub enum AdmissionError {
    /// The path is relative.
    #[error("{0}: give the absolute path of the device")]
    NotAbsolute(String),
    /// The device cannot be opened or created.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// The device is in use, or too small.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// The device cannot be measured.
    #[error(transparent)]
    Measure(#[from] MeasureError),
    /// The kernel returned no random bytes.
    #[error("drawing random bytes for the device's ID: {0}")]
    Random(rustix::io::Errno),
}

/// A prepared device.
#[derive(Debug)]
pub struct AdmittedDevice {
    /// The device, open and locked.
    pub device: Device,
    /// Description for the core.
    pub new: NewDevice,
    /// Bytes moved while it was measured.
    pub moved: MovedBeside,
    /// Whether the file was created for this.
    pub made: bool,
}

/// Opens or creates the device at `path` for store `id`, and measures it, which takes seconds. A new file has `file_bytes`.
/// Without `force`, a device that contains data is refused.
///
/// # Errors
/// [`AdmissionError`]; a file that was created for this is removed again.
pub fn prepare(
    path: &Path,
    file_bytes: Option<u64>,
    force: bool,
    id: StoreId,
    engine: EngineChoice,
) -> Result<AdmittedDevice, AdmissionError> {
    if !path.is_absolute() {
        return Err(AdmissionError::NotAbsolute(path.display().to_string()));
    }
    let made = !path.exists();
    let ready = open(path, file_bytes, force, id).and_then(|device| {
        let mut moved = MovedBeside::default();
        let rates = measure_blank(&device, engine, &mut moved)?;
        let mut random = [0; 16];
        rustix::rand::getrandom(&mut random, rustix::rand::GetRandomFlags::empty())
            .map_err(AdmissionError::Random)?;
        let now = SystemTime::now().duration_since(UNIX_EPOCH);
        let new = NewDevice {
            path: device.path().to_owned(),
            id: DeviceId(random),
            data_bytes: data_bytes(device.bytes()),
            rates,
            created_unix_s: now.map_or(0, |time| time.as_secs()),
            rebalance_bytes_per_s_max: None,
        };
        Ok(AdmittedDevice {
            device,
            new,
            moved,
            made,
        })
    });
    if ready.is_err() && made {
        let _ = std::fs::remove_file(path);
    }
    ready
}

/// Whether `path` leads to this device of a store.
pub fn is_known(path: &Path, device: &DeviceState) -> bool {
    let name = Path::new(&device.path);
    path == name || is_same(path, name)
}

/// Formats the message about a path that leads to a device of the store.
pub fn known_as(path: &Path, device: &DeviceState) -> String {
    let (name, number) = (&device.path, device.status.number);
    let other = match path == Path::new(name) {
        true => String::new(),
        false => format!(", under the name {name}"),
    };
    format!(
        "{} is already device {number} of the store{other}",
        path.display()
    )
}

/// Whether two paths lead to the same device, by a link or another name of the drive.
fn is_same(path: &Path, other: &Path) -> bool {
    let number = |path: &Path| {
        let found = std::fs::metadata(path).ok()?;
        Some(match found.file_type().is_block_device() {
            true => (true, found.rdev(), 0),
            false => (false, found.dev(), found.ino()),
        })
    };
    number(path).is_some_and(|one| number(other) == Some(one))
}

fn open(
    path: &Path,
    file_bytes: Option<u64>,
    force: bool,
    id: StoreId,
) -> Result<Device, AdmissionError> {
    let raw = std::fs::metadata(path).is_ok_and(|found| found.file_type().is_block_device());
    if let Some(bytes) = file_bytes.filter(|_| !raw) {
        check_size(&path.display().to_string(), bytes)?;
    }
    if !path.exists() {
        let device = Device::create(path, file_bytes, false)?;
        check_size(device.path(), device.bytes())?;
        return Ok(device);
    }
    let mut device = Device::open(path)?;
    if !force {
        check_blank(&device, id)?;
    }
    if file_bytes.is_some_and(|bytes| bytes != device.bytes()) {
        // Interrupted while it was created, or another size is wanted. Never a block device. Releases its lock.
        drop(device);
        device = Device::create(path, file_bytes, true)?;
    }
    check_size(device.path(), device.bytes())?;
    Ok(device)
}

/// Refuses a device that may be in use: part of a store, or with data at its start, such as a file system or a partition table.
fn check_blank(device: &Device, id: StoreId) -> Result<(), AdmissionError> {
    let holds = || StoreError::HoldsStore {
        path: device.path().to_owned(),
    };
    let mut blocks = DeviceBlocks(std::slice::from_ref(device));
    let mut blank = true;
    for offset in SUPERBLOCK_OFFSETS {
        if offset + BLOCK > device.bytes() {
            continue;
        }
        match sealed::read(&mut blocks, 0, offset, BLOCK, superblock::MAGIC) {
            Ok(block) => {
                let found = Superblock::decode(&block).map_err(|_| holds())?;
                // The store has all its devices open, so this is not one of them.
                if !found.drained && found.store != id {
                    return Err(holds().into());
                }
                blank = false;
            }
            // Other data is checked below.
            Err(Unreadable::Blank | Unreadable::Foreign) => {}
            Err(Unreadable::Device(error)) => return Err(StoreError::from(error).into()),
            Err(Unreadable::OtherVersion(_) | Unreadable::Torn { .. } | Unreadable::Damaged(_)) => {
                return Err(holds().into());
            }
        }
    }
    if blank {
        device.check_blank()?;
    }
    Ok(())
}
