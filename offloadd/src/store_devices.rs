//! A store's devices, found and opened: those that the settings list, and those that the store names besides.
//!
//! A device comes while the daemon runs, and its path belongs into the settings afterwards. Who is cut off before that, or
//! forgets it, has a store that opens with all its devices or not at all and a list that lacks one: then the store's own
//! catalog says where it is. In all else the settings have the word.

use std::path::{Path, PathBuf};

use crate::device::{Device, DeviceBlocks, DeviceError};
use crate::store::recover::{self, Unlisted};

/// Devices that were opened.
#[derive(Clone, Debug)]
pub struct StoreDevices {
    /// Those that the settings list, in their order, and the others behind them.
    pub devices: Vec<Device>,
    /// The others.
    pub unlisted: Vec<Unlisted>,
}

impl StoreDevices {
    /// Opens and locks all devices of the store that `listed` are of.
    ///
    /// # Errors
    /// [`DeviceError`] of one that is listed, or that is the store's and cannot be had. One that is not found where the
    /// catalog has it is left out, and recovery names it.
    pub fn open(listed: &[PathBuf]) -> Result<Self, DeviceError> {
        let opened: Result<_, _> = listed.iter().map(|path| Device::open(path)).collect();
        Self::with_others(opened?, Device::open)
    }

    /// The same with `listed` opened to look at, which the others are then too.
    ///
    /// # Errors
    /// As [`Self::open`].
    pub fn look(listed: Vec<Device>) -> Result<Self, DeviceError> {
        Self::with_others(listed, Device::look)
    }

    fn with_others(
        mut devices: Vec<Device>,
        open: impl Fn(&Path) -> Result<Device, DeviceError>,
    ) -> Result<Self, DeviceError> {
        let mut unlisted = Vec::new();
        // Again, as one that was found may have a newer catalog, from when the store's home moved to it.
        while let Ok(missing) = recover::unlisted(&mut DeviceBlocks(&devices)) {
            let count = devices.len();
            for one in missing {
                let path = Path::new(one.path());
                let is_here =
                    |device: &Device| one.is_at(&mut DeviceBlocks(std::slice::from_ref(device)), 0);
                // No lock is taken of a device that is not the store's.
                if !Device::look(path).is_ok_and(|device| is_here(&device)) {
                    continue;
                }
                let device = open(path)?;
                if is_here(&device) {
                    devices.push(device);
                    unlisted.push(one);
                }
            }
            if devices.len() == count {
                break;
            }
        }
        Ok(Self { devices, unlisted })
    }

    /// What to write into the settings so that they list all devices of the store, and no device that has left it; `None`:
    /// none is missing there.
    pub fn line_to_write(&self) -> Option<String> {
        let found = recover::look(&mut DeviceBlocks(&self.devices));
        let foreign_devices = found.map_or(Vec::new(), |(_, foreign_devices)| foreign_devices);
        let is_outside = |path: &str| {
            foreign_devices
                .iter()
                .any(|foreign_device| foreign_device.path == path)
        };
        let paths = self.devices.iter().map(Device::path);
        let paths: Vec<&str> = paths.filter(|path| !is_outside(path)).collect();
        (!self.unlisted.is_empty()).then(|| format!("devices = {paths:?}"))
    }
}
