//! What can cost a device that works its data later, or let other users read it: named by `check-config` and `format` and at each start.

use std::os::unix::fs::MetadataExt;
use std::path::Path;

use offload_support::file_systems;
use offload_support::paths::Word;
use rustix::fs::IFlags;

use super::error::OTHERS_COULD;
use super::{Device, is_sparse};

/// Describes a file on a file system in memory.
pub const IN_MEMORY: &str = "stores its files in memory: they do not survive a reboot";

/// A risk of a device that can be served all the same.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Risk {
    /// Property and its consequence.
    pub what: String,
    /// Command or advice that removes the risk.
    pub fix: String,
}

impl Device {
    /// Returns everything that is wrong with a device that can be served. Block devices have no risks that are known here.
    pub fn risks(&self) -> Vec<Risk> {
        let Ok(found) = self.file.metadata() else {
            return Vec::new();
        };
        if !found.is_file() {
            return Vec::new();
        }
        let open = self.mode_for_others().map(|(why, fix)| Risk {
            what: format!("{why}, {OTHERS_COULD}"),
            fix,
        });
        // A file system that compresses reports this of every file.
        let holes = is_sparse(&found).then(|| Risk {
            what: "has holes, so writes fail when the file system is full".into(),
            fix: format!(
                "fallocate --length {} {}",
                self.bytes,
                Word(Path::new(&self.path))
            ),
        });
        let file_system = rustix::fs::fstatfs(&*self.file);
        let in_place = || {
            let flags = rustix::fs::ioctl_getflags(&*self.file);
            flags.is_ok_and(|flags| flags.contains(IFlags::NOCOW))
        };
        let file_system = file_system
            .ok()
            .and_then(|of| of_file_system(of.f_type as u64, in_place));
        [open, holes, file_system].into_iter().flatten().collect()
    }

    /// Returns the mode of a file that users other than its owner may access, and the command that changes it.
    pub(super) fn mode_for_others(&self) -> Option<(String, String)> {
        let found = self.file.metadata().ok()?;
        let mode = found.mode() & 0o777;
        (found.is_file() && mode & 0o077 != 0).then(|| {
            (
                format!("it has mode {mode:04o}"),
                format!("chmod 600 {}", Word(Path::new(&self.path))),
            )
        })
    }
}

/// Returns the risk of a file system, known by the magic number of `statfs`. `in_place`: whether the file is overwritten in place even
/// where others are not.
fn of_file_system(magic: u64, in_place: impl Fn() -> bool) -> Option<Risk> {
    if let Some(name) = file_systems::in_memory(magic) {
        return Some(Risk {
            what: format!("{name} {IN_MEMORY}"),
            fix: "use a directory on a drive".into(),
        });
    }
    let name = match magic & 0xffff_ffff {
        0x9123_683e => "btrfs",
        0x2fc1_2fc1 => "zfs",
        0xca45_1a4e => "bcachefs",
        _ => return None,
    };
    (!in_place()).then(|| Risk {
        what: format!(
            "{name} never overwrites in place, so the file's space is not reserved: writes fail when the file system is full, and with \
             them training"
        ),
        fix: "use ext4 or XFS, or the block device itself; on btrfs at least `chattr +C` on the empty directory; then format again"
            .into(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn file_systems_that_lose_files_or_copy_what_is_overwritten_are_known_and_others_are_not_accused()
     {
        let said = |magic, in_place| of_file_system(magic, || in_place).map(|risk| risk.what);
        for (magic, name) in [
            (0x9123_683e, "btrfs"),
            (0x2fc1_2fc1, "zfs"),
            (0xca45_1a4e, "bcachefs"),
            // The magic number sign-extended from 32 bits.
            (0x9123_683e_u32 as i32 as u64, "btrfs"),
        ] {
            let what = said(magic, false).unwrap();
            assert!(what.starts_with(name) && what.contains("the file's space is not reserved"));
            assert_eq!(said(magic, true), None);
        }
        for (magic, name) in [(0x0102_1994, "tmpfs"), (0x8584_58f6, "ramfs")] {
            assert!(
                said(magic, true)
                    .unwrap()
                    .starts_with(&format!("{name} stores its files in memory"))
            );
        }
        // ext4, XFS, NFS.
        for magic in [0xef53, 0x5846_5342, 0x6969] {
            assert_eq!(said(magic, false), None);
        }
    }
}
