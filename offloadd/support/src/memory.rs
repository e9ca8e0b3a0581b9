//! Finds how much memory is available, by the machine and by the control groups of this process (service, container), whichever is less.
//!
//! Callers ask before they touch memory: beyond the limit the kernel would kill a process, perhaps the training.

use std::path::{Path, PathBuf};

/// Returns the bytes that can be touched without swapping or killing; `None` if the kernel does not say.
pub fn available_bytes() -> Option<u64> {
    let machine = machine_field("MemAvailable")?;
    let groups = groups().filter_map(|group| group.available_bytes());
    Some(groups.fold(machine, u64::min))
}

/// Returns the bytes of memory in all.
pub fn total_bytes() -> Option<u64> {
    let machine = machine_field("MemTotal")?;
    let groups = groups().filter_map(|group| group.max_bytes());
    Some(groups.fold(machine, u64::min))
}

fn machine_field(name: &str) -> Option<u64> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    let kib = field(&text, &format!("{name}:"))?;
    Some(kib * 1024)
}

/// A limit of a control group.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GroupLimit {
    /// Path of the group from the root of all groups.
    pub group: PathBuf,
    /// Name of the limit's file: "memory.max" (beyond it processes are killed), "memory.high" (beyond it they are slowed down),
    /// or the names of version 1.
    pub name: &'static str,
    /// The limit in bytes.
    pub bytes: u64,
}

/// Returns the limits of this process's control group and of the groups above it. `proc` and `cgroup` are the mount points.
pub fn group_limits(proc: &Path, cgroup: &Path) -> Vec<GroupLimit> {
    let limit = |group: &Group, name: &'static str| {
        let below = group.dir.strip_prefix(&group.root).unwrap_or(&group.dir);
        Some(GroupLimit {
            group: Path::new("/").join(below),
            name,
            bytes: read_number(&group.dir.join(name))?,
        })
    };
    groups_below(proc, cgroup)
        .flat_map(|group| group.version.limits().map(|name| limit(&group, name)))
        .flatten()
        .filter(|limit| limit.bytes < NO_LIMIT)
        .collect()
}

/// Version 1 writes a number near 2^63 for no limit.
const NO_LIMIT: u64 = 1 << 62;

/// Version of a control group, which names its files.
#[derive(Clone, Copy, Debug)]
enum Version {
    One,
    Two,
}

impl Version {
    /// Names of the limits: beyond the first processes are killed, beyond the second slowed down (version 1: reclaimed from
    /// first).
    fn limits(self) -> [&'static str; 2] {
        match self {
            Self::One => ["memory.limit_in_bytes", "memory.soft_limit_in_bytes"],
            Self::Two => ["memory.max", "memory.high"],
        }
    }
}

/// A control group that accounts for this process's memory.
#[derive(Clone, Debug)]
struct Group {
    version: Version,
    dir: PathBuf,
    /// Mount point of groups of this version.
    root: PathBuf,
}

impl Group {
    fn max_bytes(&self) -> Option<u64> {
        read_number(&self.dir.join(self.version.limits()[0]))
    }

    fn available_bytes(&self) -> Option<u64> {
        // For version 1, the numbers that include the groups below.
        let (used, cached) = match self.version {
            Version::One => ("memory.usage_in_bytes", "total_inactive_file"),
            Version::Two => ("memory.current", "inactive_file"),
        };
        let (max, used) = (self.max_bytes()?, read_number(&self.dir.join(used))?);
        // Cached files are dropped before anything is killed.
        let statistics = std::fs::read_to_string(self.dir.join("memory.stat")).ok()?;
        let cached = field(&statistics, cached).unwrap_or(0);
        Some(max.saturating_add(cached).saturating_sub(used))
    }
}

fn groups() -> impl Iterator<Item = Group> {
    groups_below(Path::new("/proc"), Path::new("/sys/fs/cgroup"))
}

/// Returns the control groups of this process and those above them, of both versions (a machine may have both).
fn groups_below(proc: &Path, cgroup: &Path) -> impl Iterator<Item = Group> {
    let ours = std::fs::read_to_string(proc.join("self/cgroup")).unwrap_or_default();
    let two = unified_group(&ours).map(|group| (Version::Two, cgroup.to_owned(), group.to_owned()));
    let one =
        memory_group(&ours).map(|group| (Version::One, cgroup.join("memory"), group.to_owned()));
    (two.into_iter().chain(one)).flat_map(|(version, root, group)| {
        // In a container the path is the machine's, while the mount shows only the container's own group as its root.
        let mut next = Some(root.join(group));
        std::iter::from_fn(move || {
            let dir = next.take()?;
            next = dir
                .parent()
                .filter(|parent| parent.starts_with(&root))
                .map(Path::to_owned);
            Some(Group {
                version,
                dir,
                root: root.clone(),
            })
        })
    })
}

/// Returns the group of cgroup 2 from `/proc/self/cgroup`: the line `0::/path`.
fn unified_group(text: &str) -> Option<&str> {
    text.lines().find_map(|line| line.strip_prefix("0::/"))
}

/// Returns the group of cgroup 1, which has one line for each set of controllers: `9:cpuset,memory:/path`.
fn memory_group(text: &str) -> Option<&str> {
    text.lines().find_map(|line| {
        let (controllers, path) = line.split_once(':')?.1.split_once(":/")?;
        controllers
            .split(',')
            .any(|name| name == "memory")
            .then_some(path)
    })
}

/// Reads a number; `None` for "max", which means no limit.
fn read_number(file: &Path) -> Option<u64> {
    std::fs::read_to_string(file).ok()?.trim().parse().ok()
}

/// Returns the number after `name` at the start of a line.
fn field(text: &str, name: &str) -> Option<u64> {
    text.lines().find_map(|line| {
        let mut words = line.split_whitespace();
        (words.next() == Some(name)).then(|| words.next()?.parse().ok())?
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernels_files_are_read() {
        let meminfo = "MemTotal:       24625636 kB\nMemFree:  1 kB\nMemAvailable:   16000 kB\n";
        assert_eq!(field(meminfo, "MemAvailable:"), Some(16000));
        assert_eq!(field(meminfo, "Mem"), None);
        let statistics = "anon 5\ninactive_file 4096\nactive_file 7\n";
        assert_eq!(field(statistics, "inactive_file"), Some(4096));
        let group = "12:memory:/old\n0::/system.slice/offloadd.service\n";
        assert_eq!(unified_group(group), Some("system.slice/offloadd.service"));
        assert_eq!(unified_group("0::/\n"), Some(""));
        assert_eq!(unified_group("1:name=systemd:/\n"), None);
        assert_eq!(memory_group(group), Some("old"));
        assert_eq!(memory_group("3:cpu,memory:/a:b/c\n0::/x\n"), Some("a:b/c"));
        assert_eq!(memory_group("1:name=memory:/\n0::/\n"), None);
    }

    #[test]
    fn limits_of_control_groups_of_version_1_count() {
        let place = tempfile::tempdir().unwrap();
        let (proc, cgroup) = (place.path().join("proc"), place.path().join("cgroup"));
        let write = |dir: &Path, name: &str, text: &str| {
            std::fs::create_dir_all(dir).unwrap();
            std::fs::write(dir.join(name), text).unwrap();
        };
        write(
            &proc.join("self"),
            "cgroup",
            "4:memory:/box/ours\n1:cpu:/box\n0::/\n",
        );
        let memory = cgroup.join("memory");
        let (outer, ours) = (memory.join("box"), memory.join("box/ours"));
        write(&memory, "memory.limit_in_bytes", "9223372036854771712\n");
        write(&outer, "memory.limit_in_bytes", "1073741824\n");
        write(&outer, "memory.usage_in_bytes", "1000000000\n");
        write(
            &outer,
            "memory.stat",
            "inactive_file 1\ntotal_inactive_file 4096\n",
        );
        write(&ours, "memory.limit_in_bytes", "2147483648\n");
        let groups = || groups_below(&proc, &cgroup);
        let most = groups().filter_map(|group| group.max_bytes()).min();
        assert_eq!(most, Some(1 << 30));
        let available = groups().filter_map(|group| group.available_bytes()).min();
        assert_eq!(available, Some((1 << 30) + 4096 - 1_000_000_000));
        let told: Vec<_> = (group_limits(&proc, &cgroup).into_iter())
            .map(|limit| (limit.group, limit.bytes))
            .collect();
        let expected = [("/box/ours", 2 << 30), ("/box", 1 << 30)];
        assert_eq!(told, expected.map(|(group, bytes)| (group.into(), bytes)));
        // In a container only the container's own group is there.
        std::fs::remove_dir_all(&outer).unwrap();
        write(&memory, "memory.limit_in_bytes", "4096\n");
        let most = groups().filter_map(|group| group.max_bytes()).min();
        assert_eq!(most, Some(4096));
    }

    #[test]
    fn there_is_memory_and_not_more_than_there_is() {
        let available = available_bytes().expect("the kernel says");
        let total = total_bytes().expect("the kernel says");
        assert!(
            0 < available && available <= total,
            "{available} of {total}"
        );
    }
}
