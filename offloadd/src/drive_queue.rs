//! Reads from sysfs which drive a file is on, and the settings of the drive's queue.

use std::fs::File;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::PathBuf;

/// Returns the major and minor number of the block device, or of the one under the file's file system.
pub(crate) fn device_number(file: &File) -> Option<(u32, u32)> {
    let metadata = file.metadata().ok()?;
    let number = match metadata.file_type().is_block_device() {
        true => metadata.rdev(),
        false => metadata.dev(),
    };
    Some((rustix::fs::major(number), rustix::fs::minor(number)))
}

/// Returns a setting of the drive's queue, such as `max_sectors_kb`; `None` without a block device.
pub(crate) fn queue_number(file: &File, name: &str) -> Option<u64> {
    let (major, minor) = device_number(file)?;
    let device = PathBuf::from(format!("/sys/dev/block/{major}:{minor}"));
    // A partition's queue is that of its disk.
    let places = [device.join("queue"), device.join("../queue")];
    let text = places
        .iter()
        .find_map(|queue| std::fs::read_to_string(queue.join(name)).ok())?;
    text.trim().parse().ok()
}
