//! The drives below a path, as Linux describes them: model, scheduler, and bytes moved for all processes.

use std::fs;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

/// Unit of /proc/diskstats, whatever the drive's block size.
const SECTOR_BYTES: u64 = 512;

/// Most levels of devices on devices, such as partitions on mirrors on encrypted volumes.
const DEPTH_MAX: usize = 8;

/// Parts of model names of disks made by a hypervisor or a cloud.
const VIRTUAL_MODELS: [&str; 5] = ["qemu", "virtual", "vbox", "elastic block", "persistentdisk"];

/// A whole drive: its directory in sysfs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Drive(PathBuf);

impl Drive {
    /// Drives below a file, directory or block device; empty for memory, the network and unknown devices.
    pub(crate) fn below(path: &Path) -> Vec<Self> {
        let Ok(found) = fs::metadata(path) else {
            return Vec::new();
        };
        let number = match found.file_type().is_block_device() {
            true => found.rdev(),
            false => found.dev(),
        };
        let sys = Path::new("/sys");
        let drives = drives_of(sys, number);
        if !drives.is_empty() {
            return drives;
        }
        // Some file systems have their own device number; their mount source has the drive's.
        let source = mount(number).and_then(|(_, source)| fs::metadata(source).ok());
        match source {
            Some(source) if source.file_type().is_block_device() => drives_of(sys, source.rdev()),
            _ => Vec::new(),
        }
    }

    /// Whether a hypervisor made it: it is shared, and cached elsewhere.
    pub(crate) fn is_virtual(&self) -> bool {
        let path = self.0.to_string_lossy();
        let model = self.model().unwrap_or_default().to_ascii_lowercase();
        ["/virtio", "/vbd-", "/vmbus"]
            .iter()
            .any(|bus| path.contains(bus))
            || VIRTUAL_MODELS.iter().any(|word| model.contains(word))
    }

    /// The kernel's name.
    pub(crate) fn name(&self) -> String {
        let name = self.0.file_name().unwrap_or_default();
        name.to_string_lossy().into_owned()
    }

    /// Bytes read and written so far, by all processes.
    pub(crate) fn moved_bytes(&self) -> Option<[u64; 2]> {
        let text = self.line("stat")?;
        let mut words = text.split_whitespace();
        let read = words.nth(2)?.parse::<u64>().ok()?;
        let written = words.nth(3)?.parse::<u64>().ok()?;
        Some([read * SECTOR_BYTES, written * SECTOR_BYTES])
    }

    fn model(&self) -> Option<String> {
        self.line("device/model")
            .or_else(|| self.line("loop/backing_file"))
    }

    fn line(&self, name: &str) -> Option<String> {
        let text = fs::read_to_string(self.0.join(name)).ok()?;
        let text = text.trim();
        (!text.is_empty()).then(|| text.to_owned())
    }
}

/// `nvme0n1 (Samsung SSD 990 PRO), scheduler none, cache write back`
impl std::fmt::Display for Drive {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}", self.name())?;
        match (self.model(), self.is_virtual()) {
            (Some(model), _) => write!(f, " ({model})")?,
            (None, true) => write!(f, " (virtual)")?,
            (None, false) => {}
        }
        if let Some(schedulers) = self.line("queue/scheduler") {
            // "none [mq-deadline] kyber", or the only scheduler.
            let chosen = schedulers
                .split_once('[')
                .and_then(|(_, rest)| rest.split_once(']'));
            write!(
                f,
                ", scheduler {}",
                chosen.map_or(schedulers.as_str(), |(one, _)| one)
            )?;
        }
        if let Some(cache) = self.line("queue/write_cache") {
            write!(f, ", cache {cache}")?;
        }
        Ok(())
    }
}

/// Finds the first path that names the same file, directory or block device as an earlier one.
pub(crate) fn named_twice(paths: &[PathBuf]) -> Option<(&Path, &Path)> {
    let which = |path: &Path| {
        let found = fs::metadata(path).ok()?;
        Some(match found.file_type().is_block_device() {
            true => (found.rdev(), 0),
            false => (found.dev(), found.ino()),
        })
    };
    paths.iter().enumerate().find_map(|(place, path)| {
        let this = which(path)?;
        let mut before = paths[..place].iter();
        let other = before.find(|other| which(other) == Some(this))?;
        Some((&**path, &**other))
    })
}

/// Describes what is below a file or block device: its file system, and the drives with their settings.
pub(crate) fn under(path: &Path) -> String {
    let Ok(found) = fs::metadata(path) else {
        return "unknown".into();
    };
    let drives: Vec<String> = Drive::below(path).iter().map(Drive::to_string).collect();
    let drives = match drives.is_empty() {
        true => String::new(),
        false => format!(": {}", drives.join(" + ")),
    };
    if found.file_type().is_block_device() {
        return format!("block device{drives}");
    }
    match mount(found.dev()) {
        Some((kind, source)) => format!("{kind} on {source}{drives}"),
        None => format!("a file system{drives}"),
    }
}

/// Type and mount source of the file system with this device number.
fn mount(number: u64) -> Option<(String, String)> {
    let numbers = numbers(number);
    let mounts = fs::read_to_string("/proc/self/mountinfo").ok()?;
    mounts.lines().find_map(|line| {
        let (mount, system) = line.split_once(" - ")?;
        (mount.split(' ').nth(2)? == numbers).then_some(())?;
        let mut words = system.split(' ');
        Some((words.next()?.to_owned(), words.next()?.to_owned()))
    })
}

fn numbers(number: u64) -> String {
    format!(
        "{}:{}",
        rustix::fs::major(number),
        rustix::fs::minor(number)
    )
}

fn drives_of(sys: &Path, number: u64) -> Vec<Drive> {
    let mut found = Vec::new();
    let link = sys.join("dev/block").join(numbers(number));
    if let Ok(device) = fs::canonicalize(link) {
        descend(&device, DEPTH_MAX, &mut found);
    }
    found
}

fn descend(device: &Path, depth: usize, found: &mut Vec<Drive>) {
    if depth == 0 {
        return;
    }
    // A partition's directory is within its disk's.
    if device.join("partition").exists()
        && let Some(disk) = device.parent()
    {
        return descend(disk, depth - 1, found);
    }
    let entries = fs::read_dir(device.join("slaves")).into_iter().flatten();
    let mut beneath: Vec<PathBuf> = entries
        .flatten()
        .filter_map(|entry| fs::canonicalize(entry.path()).ok())
        .collect();
    beneath.sort();
    let drive = Drive(device.to_owned());
    if beneath.is_empty() && !found.contains(&drive) {
        found.push(drive);
    }
    for one in beneath {
        descend(&one, depth - 1, found);
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    /// A mirror of two NVMe partitions and a virtual disk, as in sysfs.
    fn machine() -> tempfile::TempDir {
        let sys = tempfile::tempdir().unwrap();
        let put = |path: &str, text: &str| {
            let path = sys.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        };
        for (drive, read) in [("nvme0n1", 10), ("nvme1n1", 30)] {
            let dir = format!("devices/pci0000:00/{drive}");
            put(&format!("{dir}/device/model"), "Some SSD 2TB   \n");
            put(&format!("{dir}/queue/scheduler"), "[none] mq-deadline \n");
            put(&format!("{dir}/queue/write_cache"), "write through\n");
            put(
                &format!("{dir}/stat"),
                &format!("  5 6 {read} 7 8 9 20 10 0 11 12\n"),
            );
            put(&format!("{dir}/{drive}p1/partition"), "1\n");
            let beneath = sys.path().join("devices/virtual/md0/slaves");
            fs::create_dir_all(&beneath).unwrap();
            symlink(
                sys.path().join(format!("{dir}/{drive}p1")),
                beneath.join(drive),
            )
            .unwrap();
        }
        put(
            "devices/pci0000:00/virtio1/block/vda/queue/scheduler",
            "none\n",
        );
        let numbers = sys.path().join("dev/block");
        fs::create_dir_all(&numbers).unwrap();
        symlink(sys.path().join("devices/virtual/md0"), numbers.join("9:0")).unwrap();
        let vda = sys.path().join("devices/pci0000:00/virtio1/block/vda");
        symlink(vda, numbers.join("254:0")).unwrap();
        sys
    }

    #[test]
    fn the_drives_under_partitions_and_mirrors_are_found_and_described() {
        let sys = machine();
        let found = drives_of(sys.path(), rustix::fs::makedev(9, 0));
        assert_eq!(found.len(), 2, "{found:?}");
        let line = found[0].to_string();
        assert_eq!(
            line,
            "nvme0n1 (Some SSD 2TB), scheduler none, cache write through"
        );
        assert_eq!(found[1].moved_bytes(), Some([30 * 512, 20 * 512]));
        assert!(!found[0].is_virtual());
    }

    #[test]
    fn a_disk_that_a_hypervisor_made_says_so() {
        let sys = machine();
        let found = drives_of(sys.path(), rustix::fs::makedev(254, 0));
        assert!(found[0].is_virtual());
        assert_eq!(found[0].to_string(), "vda (virtual), scheduler none");
        assert_eq!(found[0].moved_bytes(), None);
        assert_eq!(drives_of(sys.path(), rustix::fs::makedev(7, 3)), []);
    }

    #[test]
    fn a_path_by_another_name_is_the_same_path() {
        let dir = tempfile::tempdir().unwrap();
        let [one, link, other] = ["one", "link", "other"].map(|name| dir.path().join(name));
        fs::write(&one, "").unwrap();
        fs::write(&other, "").unwrap();
        symlink(&one, &link).unwrap();
        assert_eq!(
            named_twice(&[one.clone(), other.clone(), "/no/such".into()]),
            None
        );
        let all = [one.clone(), other, link.clone()];
        assert_eq!(named_twice(&all), Some((&*link, &*one)));
        assert!(named_twice(&["/no/such".into(), "/no/such".into()]).is_none());
    }

    #[test]
    fn what_lies_under_a_directory_is_named() {
        let line = under(Path::new("/proc"));
        assert!(line.starts_with("proc on "), "{line}");
        assert_eq!(Drive::below(Path::new("/proc")), []);
        assert_eq!(under(Path::new("/no/such/path")), "unknown");
    }
}
