//! Drives of a known speed on any Linux machine, as root: file systems on loop devices over memory, limited by the block cgroup.
//!
//! ```text
//!   /run/testdrives[-NAME]/ram/drive0     a file in tmpfs, every page written
//!      └── loop device, direct I/O, 4096-byte sectors ── ext4 ── /run/testdrives[-NAME]/drive0
//!   cgroup testdrives[-NAME]              blkio.throttle (v1) or io.max (v2): limits only the processes in it
//! ```
//!
//! How it is exact, and where not:
//! - The kernel charges a request on a raw loop device twice when it must be split (more than 128 segments, 1 MiB of 4 KiB
//!   pages), which halves the rate. Files on ext4 are exact at 512 KiB to 4 MiB, so each drive has an ext4 without a journal.
//! - The pace is kept in slices of 100 ms: rates over a second are right, latencies are not.
//! - A copying thread a device does the moving, some 5 GB/s both ways together: several devices, each at its share of the
//!   pace, can stand for one faster drive (`parts`).
//! - Memory is written before use: an untouched page costs seconds a GiB on machines that get their memory lazily.
//!
//! What `up` makes stands in a state file before it is there, so that `down` takes it away also after half of it failed or its
//! maker was killed. Which loop devices are a set's the kernel knows: those over files in its directory.

mod drives;
mod group;
mod own;

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use serde::{Deserialize, Serialize};

pub(crate) use drives::Drives;
pub(crate) use group::Group;
pub(crate) use own::{OwnDrives, destroy_orphaned, is_orphaned};

/// More loop devices than a machine usually has room for.
const DEVICES_MAX: u32 = 64;

/// Where all rate-limited drives of this machine are listed.
const RUN: &str = "/run";
const PREFIX: &str = "testdrives";

/// What to make.
#[derive(Clone, Debug)]
pub(crate) struct DrivesPlan {
    /// Several sets can exist side by side; the empty name is the usual one.
    pub(crate) name: String,
    pub(crate) count: u32,
    /// Of each drive.
    pub(crate) bytes: u64,
    pub(crate) limit: RateLimit,
    /// Loop devices, and so directories, of each drive.
    pub(crate) loop_devices: u32,
    /// One directory over all of them (btrfs), for programs that take a single path.
    pub(crate) raid0: bool,
}

/// Bytes a second of one drive, each way.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct RateLimit {
    #[serde(rename = "read_bps")]
    pub(crate) read: u64,
    #[serde(rename = "write_bps")]
    pub(crate) write: u64,
}

/// What was made so far. Other programs read it too: names stay.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct State {
    pub(crate) group: PathBuf,
    pub(crate) devices: Vec<PathBuf>,
    pub(crate) dirs: Vec<PathBuf>,
    /// Of each device.
    #[serde(flatten)]
    pub(crate) limit: RateLimit,
}

impl DrivesPlan {
    fn check(&self) -> Result<()> {
        let devices = self.count.checked_mul(self.loop_devices);
        ensure!(
            self.loop_devices >= 1
                && devices.is_some_and(|count| (1..=DEVICES_MAX).contains(&count)),
            "{} drives of {} loop devices each: 1 to {DEVICES_MAX} loop devices in all",
            self.count,
            self.loop_devices
        );
        // What mkfs.ext4 makes without complaint.
        let least = 16 << 20;
        ensure!(
            self.bytes / u64::from(self.loop_devices) >= least,
            "{} bytes a drive: at least 16 MiB for each of its {} loop devices",
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

/// The directory and the group of the set `name`.
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

/// The state in `dir`; nothing when there is none.
fn read_state(dir: &Path) -> Result<Option<State>> {
    let path = state_file(dir);
    let text = match std::fs::read(&path) {
        Ok(text) => text,
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(e) => return Err(e).with_context(|| format!("reading {}", path.display())),
    };
    let state = serde_json::from_slice(&text);
    Ok(Some(state.with_context(|| {
        format!("{}: written by something else", path.display())
    })?))
}

/// The names of all sets on this machine, the usual one as "".
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

/// What this machine or user lacks for rate-limited drives; nothing when they can be made.
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
    if Group::place("").is_none() {
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
        let said = read_state(dir.path()).unwrap_err().to_string();
        assert!(said.contains("state.json"), "{said}");
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
