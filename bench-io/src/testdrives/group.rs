//! The control group whose processes are rate-limited: version 2 (`io.max`) if available, else version 1 (`blkio.throttle`).

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

use super::{RateLimit, full_name};

const VERSION2: &str = "/sys/fs/cgroup";
const VERSION1: &str = "/sys/fs/cgroup/blkio";

/// The directory of a control group.
#[derive(Clone, Debug)]
pub(crate) struct Group {
    dir: PathBuf,
}

impl Group {
    /// The group of the set `name`, existing or not; `None` if the kernel has no such controller.
    pub(crate) fn of_set(name: &str) -> Option<Self> {
        let controllers = fs::read_to_string(Path::new(VERSION2).join("cgroup.controllers"));
        let parent = if controllers.is_ok_and(|all| all.split_whitespace().any(|one| one == "io")) {
            VERSION2
        } else if Path::new(VERSION1).join("cgroup.procs").exists() {
            VERSION1
        } else {
            return None;
        };
        Some(Self {
            dir: Path::new(parent).join(full_name(name)),
        })
    }

    /// The group in a recorded directory.
    pub(super) fn at(dir: &Path) -> Self {
        Self {
            dir: dir.to_owned(),
        }
    }

    pub(super) fn dir(&self) -> &Path {
        &self.dir
    }

    fn is_version2(&self) -> bool {
        self.dir.parent() == Some(Path::new(VERSION2))
    }

    pub(super) fn make(&self) -> Result<()> {
        if self.is_version2() {
            write(&Path::new(VERSION2).join("cgroup.subtree_control"), "+io")?;
        }
        match fs::create_dir(&self.dir) {
            Err(e) if e.kind() != io::ErrorKind::AlreadyExists => {
                Err(e).with_context(|| format!("creating {}", self.dir.display()))
            }
            _ => Ok(()),
        }
    }

    /// Limits what `device` (such as /dev/loop0) may move a second; `None` lifts the limit.
    pub(super) fn set(&self, device: &Path, limit: Option<RateLimit>) -> Result<()> {
        let name = device.file_name().context("a device has a name")?;
        let numbers = Path::new("/sys/block").join(name).join("dev");
        let numbers = fs::read_to_string(&numbers)
            .with_context(|| format!("reading {}", numbers.display()))?;
        let numbers = numbers.trim();
        if self.is_version2() {
            let number =
                |rate: Option<u64>| rate.map_or_else(|| "max".into(), |rate| rate.to_string());
            let (read, write_) = (
                number(limit.map(|l| l.read)),
                number(limit.map(|l| l.write)),
            );
            return write(
                &self.dir.join("io.max"),
                &format!("{numbers} rbps={read} wbps={write_}"),
            );
        }
        // 0 means no limit.
        let RateLimit {
            read,
            write: written,
        } = limit.unwrap_or(RateLimit { read: 0, write: 0 });
        let file = |way: &str| self.dir.join(format!("blkio.throttle.{way}_bps_device"));
        write(&file("read"), &format!("{numbers} {read}"))?;
        write(&file("write"), &format!("{numbers} {written}"))
    }

    /// Moves this process, and every process it will start, into the group.
    pub(crate) fn enter(&self) -> Result<GroupMembership> {
        let controller = if self.is_version2() { "" } else { "blkio" };
        let before = fs::read_to_string("/proc/self/cgroup")
            .ok()
            .and_then(|text| {
                text.lines().find_map(|line| {
                    let mut parts = line.splitn(3, ':').skip(1);
                    let controllers = parts.next()?;
                    let path = parts.next()?.trim_start_matches('/').to_owned();
                    controllers
                        .split(',')
                        .any(|one| one == controller)
                        .then_some(path)
                })
            });
        let parent = self.dir.parent().context("a group lies in a hierarchy")?;
        write(
            &self.dir.join("cgroup.procs"),
            &std::process::id().to_string(),
        )?;
        Ok(GroupMembership {
            before: parent.join(before.unwrap_or_default()),
        })
    }

    /// Removes the group unless it contains processes.
    pub(super) fn remove(&self) -> Result<(), String> {
        match fs::remove_dir(&self.dir) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => {
                let inside = fs::read_to_string(self.dir.join("cgroup.procs")).unwrap_or_default();
                let inside: Vec<&str> = inside.split_whitespace().collect();
                Err(format!(
                    "{}: {e}; processes in it: {}",
                    self.dir.display(),
                    inside.join(" ")
                ))
            }
            _ => Ok(()),
        }
    }
}

/// Keeps this process in the group; dropping it moves the process back.
#[derive(Debug)]
pub(crate) struct GroupMembership {
    before: PathBuf,
}

impl GroupMembership {
    /// Keeps the process in the group, for a process that becomes another program.
    pub(crate) fn stay(self) {
        std::mem::forget(self);
    }
}

impl Drop for GroupMembership {
    fn drop(&mut self) {
        // On failure the group cannot be removed, and that attempt reports why.
        let _ = write(
            &self.before.join("cgroup.procs"),
            &std::process::id().to_string(),
        );
    }
}

/// Writes a control file in one call, as the kernel requires.
fn write(path: &Path, text: &str) -> Result<()> {
    fs::write(path, text).with_context(|| format!("writing \"{text}\" to {}", path.display()))
}
