//! Chooses the CPUs for the threads that move bytes: near the devices, on machines with several NUMA nodes.
//!
//! One thread hands over all operations, and interrupts, arenas and the engines' threads follow it, so one node is chosen for
//! all: that of the devices, if all that tell a node tell the same. Otherwise any CPU is as good.

use std::fs::File;
use std::path::Path;
use std::sync::Arc;

use rustix::thread::{CpuSet, sched_setaffinity};

use crate::drive_queue::device_number;

/// Directory in which the kernel describes devices and nodes.
const SYS: &str = "/sys";

/// Moves the calling thread, and those it starts, near `devices`. Returns what was done and why; `None` on a machine with one
/// node.
pub fn stay_near(devices: &[Arc<File>]) -> Option<String> {
    let numbers: Vec<_> = devices
        .iter()
        .filter_map(|file| device_number(file))
        .collect();
    let Choice { cpus, why } = choose(Path::new(SYS), &numbers)?;
    if cpus.is_empty() {
        return Some(why);
    }
    let mut set = CpuSet::new();
    for cpu in cpus.into_iter().filter(|&cpu| cpu < CpuSet::MAX_CPU) {
        set.set(cpu);
    }
    match sched_setaffinity(None, &set) {
        Ok(()) => Some(why),
        // For example a container with other CPUs.
        Err(error) => Some(format!("on any CPU: cannot run {why}: {error}")),
    }
}

#[derive(Debug, PartialEq, Eq)]
struct Choice {
    /// Empty for any CPU.
    cpus: Vec<usize>,
    why: String,
}

/// Chooses for block devices with these numbers, as described by the tree at `sys`.
fn choose(sys: &Path, numbers: &[(u32, u32)]) -> Option<Choice> {
    let of_node =
        |node: u32, name: &str| sys.join(format!("devices/system/node/node{node}/{name}"));
    let nodes = parse_list(&std::fs::read_to_string(sys.join("devices/system/node/online")).ok()?)?;
    if nodes.len() < 2 {
        return None;
    }
    let mut found: Vec<u32> = numbers
        .iter()
        .filter_map(|number| node_of(sys, *number))
        .collect();
    found.sort_unstable();
    found.dedup();
    let any = |why: &str| {
        Some(Choice {
            cpus: Vec::new(),
            why: format!("on any CPU: {why}"),
        })
    };
    let node = match found[..] {
        [] => return any("no device reports its NUMA node"),
        [node] => node,
        _ => return any("the devices are on several NUMA nodes"),
    };
    let cpus = std::fs::read_to_string(of_node(node, "cpulist")).ok();
    match cpus.and_then(|text| parse_list(&text)) {
        Some(cpus) if !cpus.is_empty() => Some(Choice {
            cpus,
            why: format!("on the CPUs of NUMA node {node}, where the devices are"),
        }),
        _ => any("the devices' NUMA node has no CPUs"),
    }
}

/// Returns the node of the controller under a drive; drives composed of others tell none.
fn node_of(sys: &Path, (major, minor): (u32, u32)) -> Option<u32> {
    let link = sys.join(format!("dev/block/{major}:{minor}"));
    let device = std::fs::canonicalize(link).ok()?;
    let text = device
        .ancestors()
        .take_while(|dir| dir.starts_with(sys))
        .find_map(|dir| std::fs::read_to_string(dir.join("numa_node")).ok())?;
    // The kernel writes -1 when the firmware tells no node.
    text.trim().parse().ok()
}

/// Parses `0-3,8,10-11`; at most [`CpuSet::MAX_CPU`] numbers.
fn parse_list(text: &str) -> Option<Vec<usize>> {
    let mut numbers = Vec::new();
    for range in text.trim().split(',').filter(|range| !range.is_empty()) {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        let (first, last) = (first.parse().ok()?, last.parse::<usize>().ok()?);
        if last >= CpuSet::MAX_CPU {
            return None;
        }
        numbers.extend(first..=last);
    }
    Some(numbers)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    /// Makes a tree with two nodes, and a drive 259:i with each of these nodes, placed below PCI devices as NVMe drives are.
    fn machine(drives: &[&str]) -> tempfile::TempDir {
        let sys = tempfile::tempdir().unwrap();
        let put = |path: &str, text: &str| {
            let path = sys.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        };
        put("devices/system/node/online", "0-1\n");
        put("devices/system/node/node0/cpulist", "0-1,4-5\n");
        put("devices/system/node/node1/cpulist", "2-3,6-7\n");
        fs::create_dir_all(sys.path().join("dev/block")).unwrap();
        for (index, node) in drives.iter().enumerate() {
            let pci = format!("devices/pci0/slot{index}");
            put(&format!("{pci}/numa_node"), node);
            put(&format!("{pci}/nvme/nvme{index}/nvme{index}n1/size"), "1\n");
            let target = format!("../../{pci}/nvme/nvme{index}/nvme{index}n1");
            let link = sys.path().join(format!("dev/block/259:{index}"));
            std::os::unix::fs::symlink(target, link).unwrap();
        }
        sys
    }

    fn chosen(drives: &[&str]) -> Choice {
        let sys = machine(drives);
        let numbers: Vec<_> = (0..drives.len() as u32).map(|minor| (259, minor)).collect();
        choose(&fs::canonicalize(sys.path()).unwrap(), &numbers).unwrap()
    }

    #[test]
    fn threads_go_where_all_devices_are_and_nowhere_else() {
        let near = chosen(&["1\n", "1\n"]);
        assert_eq!(near.cpus, [2, 3, 6, 7]);
        assert!(near.why.contains("NUMA node 1"), "{}", near.why);
        for (drives, why) in [
            (&["0\n", "1\n"][..], "several"),
            (&["-1\n"], "reports"),
            (&[], "reports"),
        ] {
            let any = chosen(drives);
            assert_eq!(any.cpus, [0; 0]);
            assert!(any.why.contains(why), "{}", any.why);
        }
        // Drives that report no node follow those that do.
        assert_eq!(chosen(&["-1\n", "0\n"]).cpus, [0, 1, 4, 5]);
    }

    #[test]
    fn one_node_needs_no_choice_and_nonsense_makes_none() {
        let sys = machine(&["0\n"]);
        fs::write(sys.path().join("devices/system/node/online"), "0\n").unwrap();
        assert_eq!(choose(sys.path(), &[(259, 0)]), None);
        assert_eq!(choose(Path::new("/nowhere"), &[(259, 0)]), None);
        assert_eq!(parse_list("0-2,5\n"), Some(vec![0, 1, 2, 5]));
        for text in ["x", "1-", "-1", "0-99999999999"] {
            assert_eq!(parse_list(text), None, "{text}");
        }
        assert_eq!(parse_list("3-1"), Some(Vec::new()));
    }

    #[test]
    fn a_thread_stays_where_it_was_put() {
        let before = rustix::thread::sched_getaffinity(None).unwrap();
        // On any machine the call succeeds, and if nodes were chosen, the thread may still run.
        let outcome = stay_near(&[Arc::new(tempfile::tempfile().unwrap())]);
        assert!(outcome.is_none_or(|why| why.starts_with("on ")));
        assert!(rustix::thread::sched_getaffinity(None).unwrap().count() >= 1);
        sched_setaffinity(None, &before).unwrap();
    }
}
