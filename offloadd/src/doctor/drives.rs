//! Checks the drives below the devices (link, cache, scheduler, NUMA node) and the file systems between.
//!
//! A partition, LVM volume, encrypted device or RAID is followed down to its drives, as far as the kernel tells.

use std::collections::{BTreeMap, BTreeSet};
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use rustix::fs::OFlags;

use super::{Roots, chosen, line};
use crate::device::{Device, DeviceError};
use crate::findings::Finding;

/// Limit of stacked devices; deeper is a loop.
const DEPTH_MAX: usize = 8;

/// Checks each place, and each drive below them once.
pub(super) fn examine(roots: &Roots, places: &[PathBuf]) -> Vec<Finding> {
    let mut findings = Vec::new();
    let mut beneath: BTreeMap<PathBuf, Vec<&Path>> = BTreeMap::new();
    for place in places {
        let what = format!("device {}", place.display());
        let (there, metadata) = match nearest(place) {
            Some(found) => found,
            None => {
                let fix = format!("mkdir -p {}", place.display());
                findings.push(Finding::problem(
                    what,
                    "does not exist, nor does its directory",
                    fix,
                ));
                continue;
            }
        };
        if there != *place {
            findings.push(Finding::hint(
                what,
                format!(
                    "does not exist; checked {} instead, where the file would be created",
                    there.display()
                ),
                format!(
                    "mount its drive at {}; nothing to do if `offloadd format` is to create the file",
                    place.display()
                ),
            ));
        }
        let raw = metadata.file_type().is_block_device();
        if !raw {
            findings.push(file_system(roots, &there));
            findings.push(room(&there));
        }
        findings.push(direct(&there, &metadata));
        let number = if raw { metadata.rdev() } else { metadata.dev() };
        for drive in drives_of(roots, number) {
            beneath.entry(drive).or_default().push(place);
        }
    }
    for (drive, places) in &beneath {
        findings.extend(one_drive(drive));
        if places.len() > 1 {
            let names: Vec<_> = places
                .iter()
                .map(|place| place.display().to_string())
                .collect();
            findings.push(Finding::hint(
                name_of(drive),
                format!(
                    "{} are on this drive and share its bandwidth",
                    names.join(" and ")
                ),
                "put one device on each drive",
            ));
        }
    }
    findings.extend(nodes(beneath.keys()));
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
        Some("tmpfs" | "ramfs") => Finding::problem(
            what,
            "stores its files in memory: they do not survive a reboot",
            "use a directory on a drive",
        ),
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
    let message = format!("{} GiB free", free_bytes >> 30);
    match Device::open_readonly(there) {
        Ok(device) if device.has_holes() => Finding::hint(
            what,
            format!("{message}; the device has holes, so writes fail when the file system is full"),
            format!("fallocate --length {} {}", device.bytes(), there.display()),
        ),
        _ => Finding::fine(what, message),
    }
}

/// Tries direct I/O; in a directory, with an unnamed temporary file.
fn direct(there: &Path, metadata: &std::fs::Metadata) -> Finding {
    let what = format!("direct I/O at {}", there.display());
    let uid = rustix::process::geteuid().as_raw();
    let owned = format!("chown {uid} {}", there.display());
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

/// Returns the sysfs directories of the whole drives below a device number.
fn drives_of(roots: &Roots, number: u64) -> Vec<PathBuf> {
    let (major, minor) = (rustix::fs::major(number), rustix::fs::minor(number));
    let link = roots.sys.join(format!("dev/block/{major}:{minor}"));
    let mut found = BTreeSet::new();
    if let Ok(device) = std::fs::canonicalize(link) {
        descend(&device, DEPTH_MAX, &mut found);
    }
    found.into_iter().collect()
}

fn descend(device: &Path, depth: usize, found: &mut BTreeSet<PathBuf>) {
    if depth == 0 {
        return;
    }
    // The directory of a partition is inside that of its disk.
    if device.join("partition").exists()
        && let Some(disk) = device.parent()
    {
        return descend(disk, depth - 1, found);
    }
    let beneath: Vec<_> = std::fs::read_dir(device.join("slaves"))
        .map(|entries| {
            entries
                .flatten()
                .filter_map(|entry| std::fs::canonicalize(entry.path()).ok())
                .collect()
        })
        .unwrap_or_default();
    if beneath.is_empty() {
        found.insert(device.to_owned());
    }
    for one in beneath {
        descend(&one, depth - 1, found);
    }
}

fn name_of(drive: &Path) -> String {
    let name = drive.file_name().unwrap_or_default().to_string_lossy();
    format!("drive {name}")
}

fn one_drive(drive: &Path) -> Vec<Finding> {
    let mut findings = Vec::new();
    let what = name_of(drive);
    let name = drive
        .file_name()
        .unwrap_or_default()
        .to_string_lossy()
        .into_owned();
    let queue = |file: &str| line(&drive.join("queue").join(file));
    // Virtual disks always report that they are rotational.
    if queue("rotational").as_deref() == Some("1") && !name.contains("vd") {
        findings.push(Finding::hint(
            what.clone(),
            "is a rotational drive, with at most a few hundred MB/s",
            "use an NVMe drive",
        ));
    }
    match queue("write_cache").as_deref() {
        Some("write back") => findings.push(Finding::fine(
            what.clone(),
            "has a volatile write cache, so each commit waits for a flush",
        )),
        Some("write through") => findings.push(Finding::fine(
            what.clone(),
            "has no volatile write cache according to the kernel, so flushes are free",
        )),
        _ => {}
    }
    let scheduler = queue("scheduler");
    if let Some(one @ ("bfq" | "kyber" | "mq-deadline")) = scheduler.as_deref().and_then(chosen)
        && name.starts_with("nvme")
    {
        findings.push(Finding::hint(
            what.clone(),
            format!("uses the scheduler {one}, which costs processor time without benefit"),
            format!("echo none > /sys/block/{name}/queue/scheduler"),
        ));
    }
    findings.extend(controller(drive, &what));
    findings
}

/// Checks an NVMe drive's controller and its PCIe link.
fn controller(drive: &Path, what: &str) -> Vec<Finding> {
    let mut findings = Vec::new();
    // `device` of the namespace is the controller; `device` of the controller is the PCI function.
    let controller = drive.join("device");
    if let Some(state) = line(&controller.join("state"))
        && state != "live"
        // The state of a SCSI disk that works.
        && state != "running"
    {
        findings.push(Finding::problem(
            what,
            format!("its controller is in state {state}"),
            "check `dmesg | grep nvme`; reseat or replace the drive",
        ));
    }
    let port = controller.join("device");
    let link = |file: &str| line(&port.join(file));
    let widths = [link("current_link_width"), link("max_link_width")];
    let speeds = [link("current_link_speed"), link("max_link_speed")];
    let number = |text: &str| text.split(' ').next()?.parse::<f64>().ok();
    for (words, [now, best]) in [("lanes", &widths), ("speed per lane", &speeds)] {
        let (Some(now), Some(best)) = (now, best) else {
            continue;
        };
        let (Some(has), Some(can)) = (number(now), number(best)) else {
            continue;
        };
        if has < can {
            findings.push(Finding::hint(
                what,
                format!("its PCIe link runs at {now} of {best} ({words}), which reduces its bandwidth in proportion"),
                "use another slot, or change the slot's firmware settings (shared lanes, PCIe generation); LnkSta in `lspci -vv` shows \
                 the link",
            ));
        }
    }
    if let ([Some(width), _], [Some(speed), _]) = (&widths, &speeds)
        && number(width).is_some()
        && number(speed).is_some()
        && findings.is_empty()
    {
        findings.push(Finding::fine(
            what,
            format!("PCIe link of {width} lanes at {speed}"),
        ));
    }
    findings
}

/// Checks that all drives are at one NUMA node, because one thread submits all I/O.
fn nodes<'a>(drives: impl Iterator<Item = &'a PathBuf>) -> Option<Finding> {
    let mut nodes: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for drive in drives {
        let node = drive
            .ancestors()
            .take(8)
            .find_map(|dir| line(&dir.join("numa_node")))?;
        nodes.entry(node).or_default().push(name_of(drive));
    }
    if nodes.len() < 2 {
        return None;
    }
    let by_node: Vec<_> = (nodes.iter())
        .map(|(node, drives)| format!("{} at node {node}", drives.join(", ")))
        .collect();
    Some(Finding::hint(
        "NUMA",
        format!(
            "the drives are at several NUMA nodes ({}), so some data crosses between processors",
            by_node.join("; ")
        ),
        "use one store and one daemon per node",
    ))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::tests::Machine;
    use crate::findings::Severity::{Fine, Hint, Problem};

    const NVME: &str = "sys/devices/pci0000:00/0000:01:00.0/nvme/nvme0/nvme0n1";
    const PORT: &str = "sys/devices/pci0000:00/0000:01:00.0";

    /// Describes a machine whose device 259:1 is a partition of an NVMe drive, with `more` files.
    fn machine(more: &[(&str, &str)]) -> Machine {
        let partition = format!("{NVME}/nvme0n1p1/partition");
        let files: Vec<_> = [(&partition[..], "1")]
            .into_iter()
            .chain(more.iter().copied())
            .collect();
        Machine::new(
            &files,
            &[
                ("sys/dev/block/259:1", &format!("{NVME}/nvme0n1p1")),
                (
                    &format!("{NVME}/device"),
                    "sys/devices/pci0000:00/0000:01:00.0/nvme/nvme0",
                ),
                (
                    "sys/devices/pci0000:00/0000:01:00.0/nvme/nvme0/device",
                    PORT,
                ),
            ],
        )
    }

    fn found(more: &[(&str, &str)]) -> Vec<Finding> {
        let machine = machine(more);
        let drives = drives_of(&machine.roots, rustix::fs::makedev(259, 1));
        assert_eq!(drives.len(), 1, "{drives:?}");
        assert!(drives[0].ends_with("nvme0n1"), "{drives:?}");
        one_drive(&drives[0])
    }

    #[test]
    fn a_link_with_fewer_lanes_or_less_speed_than_it_could_is_a_hint() {
        let link = |width, speed| {
            let port = |name: &str| format!("{PORT}/{name}");
            let files = [
                (port("current_link_width"), width),
                (port("max_link_width"), "4"),
                (port("current_link_speed"), speed),
                (port("max_link_speed"), "16.0 GT/s PCIe"),
            ];
            found(&files.each_ref().map(|(path, text)| (&path[..], *text)))
        };
        let whole = link("4", "16.0 GT/s PCIe");
        assert_eq!(whole.len(), 1);
        assert_eq!(whole[0].severity, Fine);
        assert!(
            whole[0].message.contains("4 lanes at 16.0 GT/s"),
            "{whole:?}"
        );
        let narrow = link("2", "16.0 GT/s PCIe");
        assert!(
            narrow.len() == 1 && narrow[0].severity == Hint,
            "{narrow:?}"
        );
        assert!(narrow[0].message.contains("2 of 4 (lanes)"), "{narrow:?}");
        assert_eq!(link("2", "8.0 GT/s PCIe").len(), 2, "both are reported");
        assert!(
            link("", "Unknown").is_empty(),
            "an unknown speed is not reported"
        );
    }

    #[test]
    fn a_dead_controller_is_a_problem_and_a_scheduler_a_hint() {
        let state = "sys/devices/pci0000:00/0000:01:00.0/nvme/nvme0/state";
        let dead = found(&[(state, "dead")]);
        assert!(dead.len() == 1 && dead[0].severity == Problem, "{dead:?}");
        assert!(found(&[(state, "live")]).is_empty());
        let scheduler = format!("{NVME}/queue/scheduler");
        let wrong = found(&[(&scheduler, "none [mq-deadline] bfq")]);
        assert_eq!(
            wrong[0].fix.as_deref(),
            Some("echo none > /sys/block/nvme0n1/queue/scheduler")
        );
        assert!(found(&[(&scheduler, "[none] mq-deadline")]).is_empty());
        let cache = format!("{NVME}/queue/write_cache");
        assert!(
            found(&[(&cache, "write back")])[0]
                .message
                .contains("volatile")
        );
        let spins = format!("{NVME}/queue/rotational");
        assert_eq!(found(&[(&spins, "1")])[0].severity, Hint);
        assert!(found(&[(&spins, "0")]).is_empty());
    }

    #[test]
    fn a_raid_is_followed_to_its_drives_and_a_loop_ends() {
        let md = "sys/devices/virtual/block/md0";
        let (one, two) = ("sys/devices/a/nvme0n1", "sys/devices/b/nvme1n1");
        let files = [
            (&format!("{md}/size")[..], "1"),
            (&format!("{one}/numa_node")[..], "0"),
            (&format!("{two}/numa_node")[..], "1"),
        ];
        let links = [
            ("sys/dev/block/9:0", md),
            (&format!("{md}/slaves/nvme0n1")[..], one),
            (&format!("{md}/slaves/nvme1n1")[..], two),
        ];
        let machine = Machine::new(&files, &links);
        let drives = drives_of(&machine.roots, rustix::fs::makedev(9, 0));
        assert_eq!(drives.len(), 2, "{drives:?}");
        let far = nodes(drives.iter()).expect("two nodes");
        assert!(far.message.contains("drive nvme1n1 at node 1"), "{far:?}");
        assert_eq!(nodes(drives[..1].iter()), None);
        let circle = Machine::new(
            &files,
            &[("sys/dev/block/9:0", md), (&format!("{md}/slaves/md0"), md)],
        );
        assert!(drives_of(&circle.roots, rustix::fs::makedev(9, 0)).is_empty());
        assert!(drives_of(&circle.roots, rustix::fs::makedev(8, 0)).is_empty());
    }

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
    fn a_place_that_is_nowhere_is_a_problem_and_two_on_one_drive_are_a_hint() {
        let roots = Roots::default();
        let found = examine(&roots, &["/no/such/directory/device".into()]);
        assert_eq!(found[0].severity, Problem);
        let absent = |found: &[Finding]| {
            let hints = found.iter().filter(|one| one.severity == Hint);
            (hints.filter(|one| one.message.starts_with("does not exist; checked"))).count()
        };
        let dir = tempfile::tempdir().unwrap();
        let here = examine(&roots, &[dir.path().to_owned()]);
        assert_eq!(absent(&here), 0, "{here:?}");
        let places = ["a", "b"].map(|name| dir.path().join(name));
        let number = std::fs::metadata(dir.path()).unwrap().dev();
        let found = examine(&roots, &places);
        assert_eq!(absent(&found), 2, "missing devices are reported: {found:?}");
        let shared = found
            .iter()
            .any(|one| one.message.contains("share its bandwidth"));
        assert_eq!(shared, !drives_of(&roots, number).is_empty());
        assert!(
            std::fs::read_dir(dir.path()).unwrap().next().is_none(),
            "no file remains"
        );
    }
}
