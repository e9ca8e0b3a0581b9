//! Checks where devices are or will be: file system, free space, direct I/O.

use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use offload_support::paths::Word;
use offload_support::units::ApproxBytes;
use rustix::fs::OFlags;

use super::Roots;
use crate::device::{Device, DeviceError, IN_MEMORY, Risk};
use crate::findings::Finding;

/// Checks each place. `of_settings`: devices that were checked with the settings.
pub(super) fn examine(roots: &Roots, paths: &[PathBuf], of_settings: &[PathBuf]) -> Vec<Finding> {
    let mut findings = Vec::new();
    for place in paths {
        let what = format!("device {}", place.display());
        let (there, metadata) = match nearest(place) {
            Some(found) => found,
            None => {
                let fix = format!("mkdir -p {}", Word(place));
                findings.push(Finding::problem(
                    what,
                    "does not exist, nor does its directory",
                    fix,
                ));
                continue;
            }
        };
        if there != *place && !of_settings.contains(place) {
            findings.push(Finding::hint(
                what,
                format!(
                    "does not exist; checked {} instead, where the file would be created",
                    there.display()
                ),
                "mount its drive; nothing to do if `offloadd format` is to create the file",
            ));
        }
        if !metadata.file_type().is_block_device() {
            findings.push(file_system(roots, &there));
            findings.push(room(&there));
        }
        findings.push(direct(&there, &metadata));
        // Those of devices in the settings are among the findings about the settings.
        if !of_settings.contains(place)
            && let Ok(device) = Device::open_readonly(&there)
        {
            let risks = device.risks().into_iter();
            let what = format!("device {}", place.display());
            findings.extend(risks.map(|Risk { what: why, fix }| Finding::hint(&what, why, fix)));
        }
    }
    findings
}

/// Returns `place`, or its directory if it does not exist.
fn nearest(place: &Path) -> Option<(PathBuf, std::fs::Metadata)> {
    let look = |path: &Path| Some((path.to_owned(), std::fs::metadata(path).ok()?));
    look(place).or_else(|| look(place.parent()?))
}

/// Checks the file system that contains `there`, an absolute path.
fn file_system(roots: &Roots, there: &Path) -> Finding {
    let what = format!("file system of {}", there.display());
    let there = std::fs::canonicalize(there).unwrap_or_else(|_| there.to_owned());
    let mounts = roots.proc("self/mountinfo").unwrap_or_default();
    // `36 35 98:0 /root /mnt/nvme0 rw,noatime shared:1 - ext4 /dev/nvme0n1 rw`: the last mount over a point counts.
    let kind = mounts.lines().filter_map(|mount| {
        let (before, after) = mount.split_once(" - ")?;
        // A space in a path is written \040.
        let point = before.split(' ').nth(4)?.replace("\\040", " ");
        let kind = after.split(' ').next()?;
        there
            .starts_with(&point)
            .then(|| (point.len(), kind.to_owned()))
    });
    let kind = kind.max_by_key(|(length, _)| *length).map(|(_, kind)| kind);
    match kind.as_deref() {
        None => Finding::fine(what, "unknown"),
        Some(kind @ ("ext4" | "xfs")) => Finding::fine(what, kind),
        Some("tmpfs" | "ramfs") => Finding::problem(what, IN_MEMORY, "use a directory on a drive"),
        Some(kind @ ("btrfs" | "zfs" | "bcachefs")) => Finding::hint(
            what,
            format!(
                "{kind} is copy-on-write: overwriting is slower, and writes fail when the file system is full"
            ),
            "use ext4 or XFS, or the block device itself; on btrfs at least `chattr +C` on the empty directory",
        ),
        Some(kind @ ("nfs" | "nfs4" | "cifs" | "ceph" | "lustre")) => Finding::hint(
            what,
            format!(
                "{kind} is a network file system: failures of other machines and of the network stop training"
            ),
            "use a directory on a local drive",
        ),
        Some("overlay") => Finding::hint(
            what,
            "overlay belongs to the container and is deleted with it",
            "mount a directory of the drive into the container: --volume /mnt/nvme0:/mnt/nvme0",
        ),
        Some(kind) => Finding::fine(what, kind),
    }
}

fn room(there: &Path) -> Finding {
    let what = format!("space at {}", there.display());
    let Ok(space) = rustix::fs::statvfs(there) else {
        return Finding::fine(what, "unknown");
    };
    let free_bytes = space.f_bavail * space.f_frsize;
    let message = format!("{} free", ApproxBytes(free_bytes));
    Finding::fine(what, message)
}

/// Tries direct I/O; in a directory, with an unnamed temporary file.
fn direct(there: &Path, metadata: &std::fs::Metadata) -> Finding {
    let what = format!("direct I/O at {}", there.display());
    let uid = rustix::process::geteuid().as_raw();
    let owned = format!("chown {uid} {}", Word(there));
    let other = "use ext4 or XFS on the drive".to_owned();
    if !metadata.is_dir() {
        return match Device::open_readonly(there) {
            Ok(_) => Finding::fine(what, "works"),
            Err(error @ DeviceError::NotWritable { .. }) => {
                Finding::problem(what, error.to_string(), owned)
            }
            Err(error) => Finding::problem(what, error.to_string(), other),
        };
    }
    let opened = std::fs::OpenOptions::new()
        .read(true)
        .write(true)
        .custom_flags((OFlags::TMPFILE | OFlags::DIRECT).bits() as i32)
        .open(there);
    match opened {
        Ok(_) => Finding::fine(what, "works"),
        Err(error) if error.kind() == std::io::ErrorKind::PermissionDenied => {
            Finding::problem(what, format!("uid {uid} may not create files here"), owned)
        }
        Err(error) => Finding::problem(what, error.to_string(), other),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::tests::Machine;
    use crate::findings::Severity::{Fine, Hint, Problem};

    #[test]
    fn the_file_system_is_that_of_the_nearest_mount() {
        let dir = tempfile::tempdir().unwrap();
        let place = std::fs::canonicalize(dir.path()).unwrap();
        let judge = |kind: &str| {
            let mounts = format!(
                "1 0 8:1 / / rw - ext4 /dev/sda rw\n2 1 8:2 / {} rw shared:1 - {kind} /dev/x rw\n3 1 8:3 / {}x rw - xfs x rw\n",
                place.display(),
                place.display()
            );
            let machine = Machine::new(&[("proc/self/mountinfo", &mounts)], &[]);
            file_system(&machine.roots, &place).severity
        };
        assert_eq!(judge("tmpfs"), Problem);
        assert_eq!(judge("btrfs"), Hint);
        assert_eq!(judge("nfs4"), Hint);
        assert_eq!(judge("overlay"), Hint);
        assert_eq!(judge("xfs"), Fine);
    }

    #[test]
    fn a_place_that_is_nowhere_is_a_problem() {
        let roots = Roots::default();
        let found = examine(&roots, &["/no/such/directory/device".into()], &[]);
        assert_eq!(found[0].severity, Problem);
        let absent = |found: &[Finding]| {
            let hints = found.iter().filter(|one| one.severity == Hint);
            (hints.filter(|one| one.message.starts_with("does not exist; checked"))).count()
        };
        let dir = tempfile::tempdir().unwrap();
        let here = examine(&roots, &[dir.path().to_owned()], &[]);
        assert_eq!(absent(&here), 0, "{here:?}");
        let places = ["a", "b"].map(|name| dir.path().join(name));
        let found = examine(&roots, &places, &[]);
        assert_eq!(absent(&found), 2, "missing devices are reported: {found:?}");
        let once = examine(&roots, &places, &places);
        assert_eq!(
            absent(&once),
            0,
            "the check of the settings reports them: {once:?}"
        );
        assert!(
            std::fs::read_dir(dir.path()).unwrap().next().is_none(),
            "no file remains"
        );
    }
}
