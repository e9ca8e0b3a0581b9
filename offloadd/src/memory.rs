//! How much memory there is: of the machine, and of the control group (service, container) we run in, whichever is less.
//!
//! Asked before memory is touched: beyond it, the kernel would choose a process to kill, and it might be the training.

use std::path::{Path, PathBuf};

/// What could be touched now without swapping or killing; `None` where the kernel does not say.
pub fn available_bytes() -> Option<u64> {
    let machine = of_machine("MemAvailable")?;
    let groups = groups().filter_map(|folder| {
        let max = read_number(&folder.join("memory.max"))?;
        let used = read_number(&folder.join("memory.current"))?;
        // Cached files go before anything is killed.
        let statistics = std::fs::read_to_string(folder.join("memory.stat")).ok()?;
        let cached = field(&statistics, "inactive_file").unwrap_or(0);
        Some((max + cached).saturating_sub(used))
    });
    Some(groups.fold(machine, u64::min))
}

/// What there is in all.
pub fn total_bytes() -> Option<u64> {
    let machine = of_machine("MemTotal")?;
    let groups = groups().filter_map(|folder| read_number(&folder.join("memory.max")));
    Some(groups.fold(machine, u64::min))
}

fn of_machine(name: &str) -> Option<u64> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    let kib = field(&text, &format!("{name}:"))?;
    Some(kib * 1024)
}

/// A limit of a control group.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GroupLimit {
    /// From the root of all groups.
    pub group: PathBuf,
    /// "memory.max", beyond which is killed, or "memory.high", beyond which is slowed down.
    pub name: &'static str,
    /// The limit.
    pub bytes: u64,
}

/// The limits of our control group and of those above it. `proc` and `cgroup` are where these are mounted.
pub fn group_limits(proc: &Path, cgroup: &Path) -> Vec<GroupLimit> {
    let limit = |folder: &Path, name| {
        let below = folder.strip_prefix(cgroup).unwrap_or(folder);
        Some(GroupLimit {
            group: Path::new("/").join(below),
            name,
            bytes: read_number(&folder.join(name))?,
        })
    };
    groups_below(proc, cgroup)
        .flat_map(|folder| ["memory.max", "memory.high"].map(|name| limit(&folder, name)))
        .flatten()
        .collect()
}

fn groups() -> impl Iterator<Item = PathBuf> {
    groups_below(Path::new("/proc"), Path::new("/sys/fs/cgroup"))
}

/// Our control group and those above it; a limit of any of them counts. None without cgroup 2.
fn groups_below(proc: &Path, root: &Path) -> impl Iterator<Item = PathBuf> {
    let ours = std::fs::read_to_string(proc.join("self/cgroup")).unwrap_or_default();
    let root = root.to_owned();
    let path = unified_group(&ours).map(|group| root.join(group));
    let mut next = path;
    std::iter::from_fn(move || {
        let folder = next.take()?;
        next = folder
            .parent()
            .filter(|parent| parent.starts_with(&root))
            .map(Path::to_owned);
        Some(folder)
    })
}

/// Of `/proc/self/cgroup`: the line of cgroup 2 is `0::/path`.
fn unified_group(text: &str) -> Option<&str> {
    text.lines().find_map(|line| line.strip_prefix("0::/"))
}

/// `None` for "max", which is no limit.
fn read_number(file: &Path) -> Option<u64> {
    std::fs::read_to_string(file).ok()?.trim().parse().ok()
}

/// The number behind `name` at the start of a line.
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
