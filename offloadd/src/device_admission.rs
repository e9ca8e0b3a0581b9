//! Makes a device ready to come to a store: its file, its lock, that nothing of anybody is on it, its rates.
//!
//! What was cut off can be run again: a file that holds nothing yet, and a device whose superblock names the store that does
//! not list it, are taken as they are.

use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

use crate::core::{DeviceState, NewDevice};
use crate::device::{Device, DeviceBlocks, DeviceError, FileOwner};
use crate::engine::EngineChoice;
use crate::measure::{MeasureError, measure};
use crate::metrics::MovedBeside;
use crate::store::format::{check_size, data_bytes};
use crate::store::sealed::{self, Unreadable};
use crate::store::superblock::{self, DeviceId, StoreId, Superblock};
use crate::store::{BLOCK, DATA_OFFSET, SUPERBLOCK_OFFSETS, StoreError};

/// The device cannot come.
#[derive(Debug, thiserror::Error)]
pub enum NewcomerError {
    /// The path does not say the same everywhere.
    #[error("{0}: name a device by its absolute path")]
    NotAbsolute(String),
    /// It cannot be opened or made.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// It holds something, or is too small.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// It cannot be measured.
    #[error(transparent)]
    Measure(#[from] MeasureError),
    /// The kernel gives no random bytes.
    #[error("random bytes for the device's id: {0}")]
    Random(rustix::io::Errno),
}

/// A device that is ready.
#[derive(Debug)]
pub struct AdmittedDevice {
    /// Open and locked.
    pub device: Device,
    /// What the core is told.
    pub new: NewDevice,
    /// As it was measured.
    pub moved: MovedBeside,
    /// The file was made for this.
    pub made: bool,
}

/// Opens or makes the device at `path` for store `id`. A file is made with `file_bytes`. Without `force` one that holds
/// something is refused. A file of ours is given to `owner`. Takes some seconds: it is measured.
///
/// # Errors
/// [`NewcomerError`]; a file that was made for this is gone again then.
pub fn prepare(
    path: &Path,
    file_bytes: Option<u64>,
    force: bool,
    id: StoreId,
    owner: Option<FileOwner>,
    engine: EngineChoice,
) -> Result<AdmittedDevice, NewcomerError> {
    if !path.is_absolute() {
        return Err(NewcomerError::NotAbsolute(path.display().to_string()));
    }
    let made = !path.exists();
    let ready = open(path, file_bytes, force, id, owner).and_then(|device| {
        let mut moved = MovedBeside::default();
        let rates = measure(&device, DATA_OFFSET, engine, &mut moved)?;
        let mut random = [0; 16];
        rustix::rand::getrandom(&mut random, rustix::rand::GetRandomFlags::empty())
            .map_err(NewcomerError::Random)?;
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

/// What is said of a path that leads to a device of the store.
pub fn known_as(path: &Path, device: &DeviceState) -> String {
    let (name, number) = (&device.path, device.status.number);
    let other = match path == Path::new(name) {
        true => String::new(),
        false => format!(": there it is called {name}"),
    };
    format!(
        "{} is device {number} of the store already{other}",
        path.display()
    )
}

/// Whether two paths lead to one device: by a link, or by another of a drive's names.
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
    owner: Option<FileOwner>,
) -> Result<Device, NewcomerError> {
    let raw = std::fs::metadata(path).is_ok_and(|found| found.file_type().is_block_device());
    if let Some(bytes) = file_bytes.filter(|_| !raw) {
        check_size(&path.display().to_string(), bytes)?;
    }
    if !path.exists() {
        let device = Device::create_for(path, file_bytes, false, owner, &mut |_, _| {})?;
        check_size(device.path(), device.bytes())?;
        return Ok(device);
    }
    let mut device = Device::open(path)?;
    if !force {
        check_blank(&device, id)?;
    }
    if file_bytes.is_some_and(|bytes| bytes != device.bytes()) {
        // It was cut off while it was made, or is to have another size. A block device is what it is. Its lock is given back.
        drop(device);
        device = Device::create(path, file_bytes, true)?;
    }
    check_size(device.path(), device.bytes())?;
    // Cut off before it was given.
    if let Some(owner) = owner {
        device.give_to(owner)?;
    }
    Ok(device)
}

/// Refuses what may be somebody's: of another store, of this one, or with anything at its beginning (a file system, a table
/// of partitions).
fn check_blank(device: &Device, id: StoreId) -> Result<(), NewcomerError> {
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
                // Whoever opened the store has all its devices open: this one is none of them.
                if !found.drained && found.store != id {
                    return Err(holds().into());
                }
                blank = false;
            }
            // What else may lie there is looked for below.
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
