//! Finds and opens the devices of a store: those that the settings list, and others that the store's catalog lists.
//!
//! A device that was added while the daemon ran must be added to the settings afterwards. Until that is done, the catalog says
//! where it is, because a store opens only with all its devices. In all else the settings take precedence.

use std::path::{Path, PathBuf};

use crate::device::{Device, DeviceBlocks, DeviceError};
use crate::store::recover::{self, UnlistedDevice};

/// Opened devices.
#[derive(Clone, Debug)]
pub struct StoreDevices {
    /// Devices that the settings list, in their order, then the others.
    pub devices: Vec<Device>,
    /// The others.
    pub unlisted: Vec<UnlistedDevice>,
}

impl StoreDevices {
    /// Opens and locks all devices of the store of which `listed` are some.
    ///
    /// # Errors
    /// [`DeviceError`] of a device that is listed, or that belongs to the store and cannot be opened. A device that is not at
    /// the catalog's path is left out, and recovery names it.
    pub fn open(listed: &[PathBuf]) -> Result<Self, DeviceError> {
        let opened: Result<_, _> = listed.iter().map(|path| Device::open(path)).collect();
        Self::with_others(opened?, Device::open)
    }

    /// Like [`Self::open`], read-only: `listed` were opened so, and the others are.
    ///
    /// # Errors
    /// Same as [`Self::open`].
    pub fn open_readonly(listed: Vec<Device>) -> Result<Self, DeviceError> {
        Self::with_others(listed, Device::open_readonly)
    }

    fn with_others(
        mut devices: Vec<Device>,
        open: impl Fn(&Path) -> Result<Device, DeviceError>,
    ) -> Result<Self, DeviceError> {
        let mut unlisted = Vec::new();
        // In a loop, because a device found may have a newer catalog, from after the metadata device changed.
        while let Ok(missing) = recover::unlisted(&mut DeviceBlocks(&devices)) {
            let count = devices.len();
            for one in missing {
                let path = Path::new(one.path());
                let is_here =
                    |device: &Device| one.is_at(&mut DeviceBlocks(std::slice::from_ref(device)), 0);
                // A device that is not the store's is not locked.
                if !Device::open_readonly(path).is_ok_and(|device| is_here(&device)) {
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

    /// Returns the line to write into the settings so that they list all devices of the store and none that has left it; `None`
    /// if they already do.
    pub fn line_to_write(&self) -> Option<String> {
        let found = recover::identify(&mut DeviceBlocks(&self.devices));
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
