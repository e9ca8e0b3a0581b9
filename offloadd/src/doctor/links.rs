//! Checks how GPUs and NVMe drives are connected: PCIe links, GPU drivers, the drives' schedulers.

use std::path::Path;

use offload_support::pcie::Link;

use super::{Roots, chosen, line};
use crate::findings::Finding;

/// Begins the PCI class of NVMe drives.
const NVME: &str = "0x0108";

/// Begin the PCI classes of GPUs: with and without a display, and AMD's accelerators.
const GPUS: [&str; 3] = ["0x0300", "0x0302", "0x1200"];

/// Vendors of GPUs, with the kernel module of each.
const VENDORS: [(&str, &str); 2] = [("0x10de", "nvidia"), ("0x1002", "amdgpu")];

/// Checks the links of all GPUs and NVMe drives, the GPUs' drivers and the drives' schedulers.
pub(super) fn examine(roots: &Roots) -> Vec<Finding> {
    let mut findings = drivers(roots);
    for device in entries(&roots.sys.join("bus/pci/devices")) {
        let path = roots.sys.join("bus/pci/devices").join(&device);
        let text = |name| line(&path.join(name)).unwrap_or_default();
        let (class, vendor) = (text("class"), text("vendor"));
        if class.starts_with(NVME) {
            findings.extend(link(&format!("NVMe drive {device}"), &path, true));
        } else if GPUS.iter().any(|gpu| class.starts_with(gpu))
            && VENDORS.iter().any(|(id, _)| *id == vendor)
        {
            // An idle GPU lowers its speed, never its width.
            findings.extend(link(&format!("GPU {device}"), &path, false));
        }
    }
    findings.extend(schedulers(roots));
    findings
}

/// Versions of the GPU drivers that are loaded.
fn drivers(roots: &Roots) -> Vec<Finding> {
    let loaded = VENDORS.iter().filter_map(|(_, module)| {
        let directory = roots.sys.join("module").join(module);
        let version = line(&directory.join("version"));
        let version = version.unwrap_or_else(|| "of the kernel".into());
        directory
            .is_dir()
            .then(|| Finding::fine(format!("GPU driver {module}"), version))
    });
    loaded.collect()
}

/// Compares a device's link with the best that it can have.
fn link(what: &str, device: &Path, compares_speed: bool) -> Option<Finding> {
    let (now, most) = (Link::read(device, "current")?, Link::read(device, "max")?);
    let what = format!("PCIe link of {what}");
    let is_slower = compares_speed && now.gt_per_s < most.gt_per_s;
    Some(match now.lanes < most.lanes || is_slower {
        false if compares_speed => Finding::fine(what, now.to_string()),
        false => Finding::fine(what, format!("{most} when it is busy")),
        true => Finding::hint(
            what,
            format!("{now}, of {most}"),
            "another slot, or the firmware's settings for this one; `sudo lspci -vv` shows it as LnkSta and LnkCap",
        ),
    })
}

/// Checks that requests to NVMe drives are not sorted or delayed.
fn schedulers(roots: &Roots) -> Vec<Finding> {
    let blocks = entries(&roots.sys.join("block"));
    let drives = blocks.into_iter().filter(|name| name.starts_with("nvme"));
    let found = drives.filter_map(|drive| {
        let words = roots.sys(&format!("block/{drive}/queue/scheduler"))?;
        let scheduler = chosen(&words).unwrap_or(&words).to_owned();
        (scheduler != "none").then(|| {
            Finding::hint(
                format!("scheduler of {drive}"),
                format!("{scheduler} costs processor time and delays requests"),
                format!("echo none | sudo tee /sys/block/{drive}/queue/scheduler"),
            )
        })
    });
    found.collect()
}

/// Names in a directory, in order; none if it does not exist.
fn entries(path: &Path) -> Vec<String> {
    let names = std::fs::read_dir(path).into_iter().flatten().flatten();
    let mut names: Vec<String> = names
        .filter_map(|entry| entry.file_name().into_string().ok())
        .collect();
    names.sort();
    names
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::tests::Machine;
    use crate::findings::Severity::{self, Fine, Hint};

    /// Files of a PCI device with its link now and at most.
    fn device(
        address: &str,
        (class, vendor): (&str, &str),
        now: (&str, &str),
        most: (&str, &str),
    ) -> Vec<(String, String)> {
        let files = [
            ("class", class),
            ("vendor", vendor),
            ("current_link_width", now.0),
            ("current_link_speed", now.1),
            ("max_link_width", most.0),
            ("max_link_speed", most.1),
        ];
        let path = |name| format!("sys/bus/pci/devices/{address}/{name}");
        files.map(|(name, text)| (path(name), text.into())).into()
    }

    fn found(files: &[(String, String)]) -> Vec<(Severity, String)> {
        let files: Vec<_> = (files.iter())
            .map(|(path, text)| (path.as_str(), text.as_str()))
            .collect();
        let findings = examine(&Machine::new(&files, &[]).roots);
        let short = |it: &Finding| (it.severity, format!("{}: {}", it.subject, it.message));
        findings.iter().map(short).collect()
    }

    #[test]
    fn a_link_below_its_best_is_a_hint_but_not_the_speed_of_an_idle_gpu() {
        const DRIVE: (&str, &str) = ("0x010802", "0x144d");
        const GPU: (&str, &str) = ("0x030200", "0x10de");
        const ACCELERATOR: (&str, &str) = ("0x120000", "0x1002");
        let (x4, x16) = (("4", "16.0 GT/s PCIe"), ("16", "32.0 GT/s PCIe"));
        for (kind, now, most, severity, words) in [
            (
                DRIVE,
                x4,
                x4,
                Fine,
                "NVMe drive 0: x4 at 16 GT/s, 7.88 GB/s",
            ),
            (
                DRIVE,
                ("4", "8.0 GT/s PCIe"),
                x4,
                Hint,
                "x4 at 8 GT/s, 3.94 GB/s, of x4 at 16 GT/s, 7.88 GB/s",
            ),
            (DRIVE, ("2", "16.0 GT/s PCIe"), x4, Hint, "x2 at 16 GT/s"),
            (
                DRIVE,
                ("1", "5.0 GT/s PCIe"),
                x4,
                Hint,
                "x1 at 5 GT/s, 500.0 MB/s",
            ),
            (
                GPU,
                ("16", "2.5 GT/s PCIe"),
                x16,
                Fine,
                "GPU 0: x16 at 32 GT/s, 63.02 GB/s when it is busy",
            ),
            (
                GPU,
                ("8", "32.0 GT/s PCIe"),
                x16,
                Hint,
                "GPU 0: x8 at 32 GT/s",
            ),
            (
                ACCELERATOR,
                ("8", "32.0 GT/s PCIe"),
                x16,
                Hint,
                "GPU 0: x8 at 32 GT/s",
            ),
        ] {
            let findings = found(&device("0", kind, now, most));
            assert_eq!(findings.len(), 1, "{findings:?}");
            assert_eq!(findings[0].0, severity, "{findings:?}");
            assert!(findings[0].1.contains(words), "{findings:?}");
        }
    }

    #[test]
    fn other_devices_and_links_that_say_nothing_are_left_out() {
        let x1 = ("1", "2.5 GT/s PCIe");
        for (kind, now) in [
            // A network adapter, another vendor's display, a drive in a virtual machine.
            (("0x020000", "0x8086"), x1),
            (("0x030000", "0x8086"), x1),
            (("0x010802", "0x1b36"), ("0", "Unknown")),
        ] {
            assert_eq!(found(&device("0", kind, now, ("16", "32.0 GT/s PCIe"))), []);
        }
    }

    #[test]
    fn schedulers_of_drives_and_drivers_of_gpus_are_named() {
        let files = [
            ("sys/block/nvme0n1/queue/scheduler", "[none] mq-deadline"),
            ("sys/block/nvme1n1/queue/scheduler", "none [mq-deadline]"),
            ("sys/block/sda/queue/scheduler", "[mq-deadline] none"),
            ("sys/module/nvidia/version", "580.95.05"),
        ];
        let files = files.map(|(path, text)| (path.into(), text.into()));
        assert_eq!(
            found(&files),
            [
                (Fine, "GPU driver nvidia: 580.95.05".to_owned()),
                (
                    Hint,
                    "scheduler of nvme1n1: mq-deadline costs processor time and delays requests"
                        .to_owned()
                ),
            ]
        );
    }
}
