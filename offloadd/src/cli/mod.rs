//! What each command does, from its arguments to its output.

pub(crate) mod format;
pub(crate) mod serve;
pub(crate) mod verify;

use std::path::PathBuf;

use offloadd::device::{Device, DeviceError};

/// Opens and locks all devices, in the order given.
fn open_all(paths: &[PathBuf]) -> Result<Vec<Device>, DeviceError> {
    paths.iter().map(|path| Device::open(path)).collect()
}

/// Bytes for people: "12.3 GiB".
fn binary(bytes: u64) -> String {
    let mut value = bytes as f64;
    for unit in ["bytes", "KiB", "MiB", "GiB"] {
        if value < 1024.0 {
            let digits = usize::from(unit != "bytes");
            return format!("{value:.digits$} {unit}");
        }
        value /= 1024.0;
    }
    format!("{value:.1} TiB")
}
