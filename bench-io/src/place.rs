//! Directories and stores of one measurement, removed with it.

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result};
use offload_client::private::{OwnDir, PrivateDaemon, PrivateSettings};
use offload_support::retry::retry;

use crate::random_data;

/// Space in a store's file besides two extents per tile: records and catalog.
const STORE_SLACK_BYTES: u64 = 64 << 20;

/// Size of a store's file. Tiles are placed by measured rates, so a device may get more than an equal part.
pub(crate) const fn store_file_bytes(tile_bytes: u64) -> u64 {
    2 * tile_bytes + tile_bytes / 2 + STORE_SLACK_BYTES
}

/// Space in the arena besides the slots: gaps between pieces.
const ARENA_SLACK_BYTES: u64 = 64 << 20;

/// Pauses while a process that has ended releases its files: its io_uring is gone about 0.1 s later, under load up to
/// seconds.
pub(crate) fn release_waits() -> impl Iterator<Item = Duration> {
    std::iter::repeat_n(Duration::from_millis(20), 500)
}

/// A directory of this run. Removed with it, or, if this run is killed, by the next one on the same drive.
#[derive(Debug)]
pub(crate) struct WorkDir(OwnDir);

impl WorkDir {
    /// Makes a directory in `parent`, which must exist.
    pub(crate) fn make(parent: &Path) -> Result<Self> {
        let made = OwnDir::new(parent, ".bench-io-").with_context(|| {
            format!(
                "creating a directory in {}; name a writable directory on the drive",
                parent.display()
            )
        })?;
        Ok(Self(made))
    }

    pub(crate) fn path(&self) -> &Path {
        self.0.path()
    }
}

/// Writes real data: space that is only reserved reads at the speed of memory.
pub(crate) fn write_file(path: &Path, bytes: u64) -> Result<()> {
    use std::io::Write;
    let wrote = || -> std::io::Result<()> {
        let mut file = std::fs::File::create_new(path)?;
        let mut piece = vec![0; 8 << 20];
        random_data::fill(&mut piece, 1);
        let mut left = bytes;
        while left > 0 && crate::stop::check().is_ok() {
            let now = left.min(piece.len() as u64) as usize;
            file.write_all(&piece[..now])?;
            left -= now as u64;
        }
        file.sync_all()
    };
    wrote().with_context(|| format!("writing {bytes} bytes to {}", path.display()))?;
    crate::stop::check()
}

/// A private daemon with a device in each of several directories.
#[derive(Debug)]
pub(crate) struct OwnDaemon {
    /// `None` while it is being stopped.
    daemon: Option<PrivateDaemon>,
    devices: Vec<PathBuf>,
    _dirs: Vec<WorkDir>,
}

impl OwnDaemon {
    /// Formats a store and starts a daemon: each device has space for `tile_bytes` of tiles, twice, and the arena for
    /// `slot_bytes` of slots; `iodepth` is the largest that a session may request.
    ///
    /// # Errors
    /// Not enough space, or the daemon's program is missing.
    pub(crate) fn start(
        parents: &[PathBuf],
        tile_bytes: u64,
        slot_bytes: u64,
        iodepth: u32,
        engine: &str,
    ) -> Result<Self> {
        let dirs = parents
            .iter()
            .map(|parent| WorkDir::make(parent))
            .collect::<Result<Vec<_>>>()?;
        let devices: Vec<PathBuf> = dirs.iter().map(|dir| dir.path().join("tiles")).collect();
        let file_bytes = store_file_bytes(tile_bytes);
        let daemon = PrivateDaemon::start(PrivateSettings {
            program: None,
            dir: dirs[0].path().to_owned(),
            devices: devices
                .iter()
                .map(|path| (path.clone(), file_bytes))
                .collect(),
            arena_bytes_max: slot_bytes + ARENA_SLACK_BYTES,
            iodepth_max: iodepth,
            engine: engine.to_owned(),
        })?;
        Ok(Self {
            daemon: Some(daemon),
            devices,
            _dirs: dirs,
        })
    }

    pub(crate) fn socket(&self) -> &Path {
        let daemon = self.daemon.as_ref().expect("taken in drop only");
        daemon.socket()
    }

    /// Device files of the daemon, in the order of the directories.
    pub(crate) fn devices(&self) -> &[PathBuf] {
        &self.devices
    }
}

/// Waits until the kernel has released the daemon's files, so that the next measurement does not find the drive full.
impl Drop for OwnDaemon {
    fn drop(&mut self) {
        drop(self.daemon.take());
        for device in &self.devices {
            let Ok(file) = std::fs::File::open(device) else {
                continue;
            };
            // A file that stays busy affects only the next measurement.
            let _ = retry(release_waits(), || file.try_lock());
        }
    }
}
