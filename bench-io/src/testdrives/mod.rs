//! Drives of a known speed on any Linux machine, as root: file systems on loop devices over memory, limited by the block cgroup.
//!
//! ```text
//!   /run/testdrives[-NAME]/ram/drive0     a file in tmpfs, every page written
//!      └── loop device, direct I/O, 4096-byte sectors ── ext4 ── /run/testdrives[-NAME]/drive0
//!   cgroup testdrives[-NAME]              blkio.throttle (v1) or io.max (v2): limits only the processes in it
//! ```
//!
//! Accuracy:
//! - The kernel charges a request on a raw loop device twice when it must be split (more than 128 segments, 1 MiB of
//!   4 KiB pages), which halves the rate. Files on ext4 are exact at 512 KiB to 4 MiB, so each drive has an ext4 without
//!   a journal.
//! - Limits apply to slices of 100 ms: rates over a second are right, latencies are not.
//! - One thread per loop device copies the data, about 5 GB/s in both directions together. Several loop devices, each
//!   with its part of the limit, can stand for one faster drive (`loop_devices`).
//! - Memory is written before use: the first touch of a page costs seconds per GiB on machines that get memory lazily.
//!
//! A state file lists everything before it is created, so that `destroy` also works after a failed or killed `create`.
//! The loop devices of a set are those over files in its directory.

mod drives;
mod group;
mod own;

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use serde::{Deserialize, Serialize};

pub(crate) use drives::Drives;
pub(crate) use group::Group;
pub(crate) use own::{OwnDrives, destroy_orphaned, is_orphaned};

/// More loop devices than machines usually allow.
const DEVICES_MAX: u32 = 64;

/// Directory of all sets on this machine.
const RUN: &str = "/run";
const PREFIX: &str = "testdrives";

/// Plan of a set.
#[derive(Clone, Debug)]
pub(crate) struct DrivesPlan {
    /// Name of the set; the empty name is the default set.
    pub(crate) name: String,
    pub(crate) count: u32,
    /// Bytes of each drive.
    pub(crate) bytes: u64,
    pub(crate) limit: RateLimit,
    /// Loop devices, each with its directory, that make up one drive.
    pub(crate) loop_devices: u32,
    /// Joins all drives in one btrfs directory, for programs that take a single path.
    pub(crate) raid0: bool,
}

/// Limits of one drive, bytes a second.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct RateLimit {
    #[serde(rename = "read_bps")]
    pub(crate) read: u64,
    #[serde(rename = "write_bps")]
    pub(crate) write: u64,
}

/// Record of everything created so far. Other programs read it, so field names stay.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct State {
    pub(crate) group: PathBuf,
    pub(crate) devices: Vec<PathBuf>,
    pub(crate) dirs: Vec<PathBuf>,
    /// Limit of each device.
    #[serde(flatten)]
    pub(crate) limit: RateLimit,
}

impl DrivesPlan {
    fn check(&self) -> Result<()> {
        let devices = self.count.checked_mul(self.loop_devices);
        ensure!(
            self.loop_devices >= 1
                && devices.is_some_and(|count| (1..=DEVICES_MAX).contains(&count)),
            "{} drives of {} loop devices each: must be 1 to {DEVICES_MAX} loop devices in all",
            self.count,
            self.loop_devices
        );
        // The smallest size that mkfs.ext4 accepts without warnings.
        let least = 16 << 20;
        ensure!(
            self.bytes / u64::from(self.loop_devices) >= least,
            "{} bytes per drive: must be at least 16 MiB for each of its {} loop devices",
            self.bytes,
            self.loop_devices
        );
        check_name(&self.name)
    }
}

fn check_name(name: &str) -> Result<()> {
    let plain = |c: char| c.is_ascii_alphanumeric() || c == '-' || c == '_';
    ensure!(
        name.len() <= 32 && name.chars().all(plain),
        "--name {name}: at most 32 letters, digits, - and _"
    );
    Ok(())
}

/// Name of the directory and the group of the set `name`.
fn full_name(name: &str) -> String {
    match name {
        "" => PREFIX.into(),
        name => format!("{PREFIX}-{name}"),
    }
}

fn dir_of(name: &str) -> PathBuf {
    Path::new(RUN).join(full_name(name))
}

fn state_file(dir: &Path) -> PathBuf {
    dir.join("state.json")
}

/// Reads the state in `dir`; `None` if there is none.
fn read_state(dir: &Path) -> Result<Option<State>> {
    let path = state_file(dir);
    let text = match std::fs::read(&path) {
        Ok(text) => text,
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(e) => return Err(e).with_context(|| format!("reading {}", path.display())),
    };
    let state = serde_json::from_slice(&text);
    Ok(Some(state.with_context(|| {
        format!("{}: not a state file of this program", path.display())
    })?))
}

/// Names of all sets on this machine; the default set is "".
pub(crate) fn names() -> Vec<String> {
    let entries = std::fs::read_dir(RUN).into_iter().flatten().flatten();
    let mut names: Vec<String> = entries
        .filter(|entry| state_file(&entry.path()).exists())
        .filter_map(|entry| {
            let name = entry.file_name().into_string().ok()?;
            let rest = name.strip_prefix(PREFIX)?;
            match rest {
                "" => Some(String::new()),
                rest => Some(rest.strip_prefix('-')?.to_owned()),
            }
        })
        .collect();
    names.sort();
    names
}

/// Names what this machine or user lacks for rate-limited drives; `None` if nothing.
pub(crate) fn missing(raid0: bool) -> Option<String> {
    if !rustix::process::geteuid().is_root() {
        return Some("root".into());
    }
    let path = std::env::var_os("PATH").unwrap_or_default();
    let absent = |tool: &str| !std::env::split_paths(&path).any(|dir| dir.join(tool).is_file());
    let maker = if raid0 { "mkfs.btrfs" } else { "mkfs.ext4" };
    if let Some(tool) = ["losetup", "mount", "umount", maker]
        .into_iter()
        .find(|tool| absent(tool))
    {
        return Some(format!("the program {tool}"));
    }
    if !Path::new("/dev/loop-control").exists() {
        return Some("loop devices (/dev/loop-control)".into());
    }
    if Group::of_set("").is_none() {
        return Some("the block cgroup (io.max of cgroup v2, or blkio.throttle of v1)".into());
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_state_of_before_is_read_and_nonsense_is_named() {
        let dir = tempfile::tempdir().unwrap();
        assert!(read_state(dir.path()).unwrap().is_none());
        let text = r#"{"group": "/g", "devices": ["/dev/loop3"], "dirs": ["/f"], "read_bps": 5, "write_bps": 4}"#;
        std::fs::write(state_file(dir.path()), text).unwrap();
        let state = read_state(dir.path()).unwrap().unwrap();
        assert_eq!(state.limit, RateLimit { read: 5, write: 4 });
        assert_eq!(state.devices, [PathBuf::from("/dev/loop3")]);
        std::fs::write(state_file(dir.path()), "{").unwrap();
        let message = read_state(dir.path()).unwrap_err().to_string();
        assert!(message.contains("state.json"), "{message}");
    }

    #[test]
    fn plans_that_cannot_be_are_refused() {
        let good = DrivesPlan {
            name: "x".into(),
            count: 2,
            bytes: 1 << 30,
            limit: RateLimit { read: 1, write: 1 },
            loop_devices: 2,
            raid0: false,
        };
        assert!(good.check().is_ok());
        for wrong in [
            DrivesPlan {
                count: 0,
                ..good.clone()
            },
            DrivesPlan {
                loop_devices: 0,
                ..good.clone()
            },
            DrivesPlan {
                count: u32::MAX,
                ..good.clone()
            },
            DrivesPlan {
                bytes: 1 << 20,
                ..good.clone()
            },
            DrivesPlan {
                name: "../x".into(),
                ..good.clone()
            },
        ] {
            assert!(wrong.check().is_err(), "{wrong:?}");
        }
    }
}
