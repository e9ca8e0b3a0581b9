//! PCIe links of devices, as the kernel describes them in `/sys`.

use std::fmt;
use std::path::Path;

use crate::units::ApproxRate;

/// Where the kernel lists PCI devices by their addresses, such as `0000:41:00.0`.
pub const DEVICES: &str = "/sys/bus/pci/devices";

/// Slowest lanes of a GPU that trains, in 10^9 transfers a second: PCIe 3. Virtual machines show links of emulated ports, which are
/// slower and no real limit.
const GPU_GT_PER_S_MIN: f64 = 8.0;

/// AMD's number among vendors: its cards have a switch of their own, whose ports inside the card are wider than the slot.
const AMD: &str = "0x1002";

/// A PCIe link: lanes, and transfers a second of each in units of 10^9.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Link {
    /// Number of lanes.
    pub lanes: u32,
    /// 10^9 transfers a second of each lane.
    pub gt_per_s: f64,
}

impl Link {
    /// Reads the `current` or `max` link of the PCI device whose directory this is; `None` if it has none, as in many virtual machines.
    pub fn read(device: &Path, which: &str) -> Option<Self> {
        let text = |name| {
            let text = std::fs::read_to_string(device.join(format!("{which}_link_{name}")));
            text.ok().map(|text| text.trim().to_owned())
        };
        // "16.0 GT/s PCIe"
        let speed = text("speed")?;
        Some(Self {
            lanes: text("width")?.parse().ok().filter(|lanes| *lanes > 0)?,
            gt_per_s: speed.split(' ').next()?.parse().ok()?,
        })
    }

    /// Returns the link that the GPU in this directory has while it is busy: an idle one lowers its speed, never its lanes. The port
    /// that it is in, whose directory is the one around, may be slower. `None` if the kernel does not say.
    pub fn of_busy_gpu(device: &Path) -> Option<Self> {
        let lanes = Self::read(device, "current")?.lanes;
        let most = Self::read(device, "max")?;
        let mut found = Self {
            lanes,
            gt_per_s: most.gt_per_s,
        };
        // The entry is a link into the tree of ports, from the card's own to that of the slot.
        for port in device.canonicalize().ok()?.ancestors().skip(1) {
            let Some(of_port) = Self::read(port, "max") else {
                break;
            };
            found.gt_per_s = found.gt_per_s.min(of_port.gt_per_s);
            let vendor = std::fs::read_to_string(port.join("vendor")).unwrap_or_default();
            if vendor.trim() != AMD {
                break;
            }
            // The one that is in the slot has the lanes of the slot.
            found.lanes =
                Self::read(port, "current").map_or(found.lanes, |now| now.lanes.min(found.lanes));
        }
        (found.gt_per_s >= GPU_GT_PER_S_MIN).then_some(found)
    }

    /// Bytes a second in each direction. A byte is 10 bits up to PCIe 2, and from PCIe 3 on 128 of 130 bits are data.
    pub fn bytes_per_s(self) -> f64 {
        let data = match self.gt_per_s {
            slow if slow <= 5.0 => 8.0 / 10.0,
            _ => 128.0 / 130.0,
        };
        f64::from(self.lanes) * self.gt_per_s * 1e9 * data / 8.0
    }
}

impl fmt::Display for Link {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let rate = ApproxRate(self.bytes_per_s());
        write!(f, "x{} at {} GT/s, {rate}", self.lanes, self.gt_per_s)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A GPU in a port, each with its files.
    fn machine(
        gpu: &[(&str, &str)],
        port: &[(&str, &str)],
    ) -> (tempfile::TempDir, std::path::PathBuf) {
        let dir = tempfile::tempdir().unwrap();
        let (tree, list) = (dir.path().join("port/gpu"), dir.path().join("devices"));
        std::fs::create_dir_all(&tree).unwrap();
        std::fs::create_dir(&list).unwrap();
        for (at, files) in [(tree.as_path(), gpu), (tree.parent().unwrap(), port)] {
            for (name, text) in files {
                std::fs::write(at.join(name), format!("{text}\n")).unwrap();
            }
        }
        let entry = list.join("0000:41:00.0");
        std::os::unix::fs::symlink(&tree, &entry).unwrap();
        (dir, entry)
    }

    fn files<'a>(
        now: (&'a str, &'a str),
        most: (&'a str, &'a str),
    ) -> [(&'static str, &'a str); 4] {
        [
            ("current_link_width", now.0),
            ("current_link_speed", now.1),
            ("max_link_width", most.0),
            ("max_link_speed", most.1),
        ]
    }

    #[test]
    fn a_card_with_a_switch_of_its_own_has_the_lanes_of_its_slot() {
        let (gen5, gen4) = ("32.0 GT/s PCIe", "16.0 GT/s PCIe");
        let dir = tempfile::tempdir().unwrap();
        let slot = dir.path().join("slot");
        let gpu = slot.join("outer/inner/gpu");
        std::fs::create_dir_all(&gpu).unwrap();
        let inside = files(("16", gen5), ("16", gen5));
        let in_slot = files(("4", gen4), ("16", gen5));
        let of_slot = files(("4", gen4), ("16", gen4));
        for (at, files, vendor) in [
            (&gpu, inside, AMD),
            (&slot.join("outer/inner"), inside, AMD),
            (&slot.join("outer"), in_slot, AMD),
            (&slot, of_slot, "0x1022"),
        ] {
            for (name, text) in files.into_iter().chain([("vendor", vendor)]) {
                std::fs::write(at.join(name), format!("{text}\n")).unwrap();
            }
        }
        let link = Link::of_busy_gpu(&gpu).unwrap();
        assert_eq!((link.lanes, link.gt_per_s), (4, 16.0));
    }

    #[test]
    fn a_busy_gpu_has_its_lanes_and_the_slower_speed_of_itself_and_its_port() {
        let (gen5, gen4, gen1) = ("32.0 GT/s PCIe", "16.0 GT/s PCIe", "2.5 GT/s PCIe");
        let idle = files(("16", gen1), ("16", gen5));
        let few = files(("8", gen4), ("16", gen4));
        let port = |speed| [("max_link_width", "16"), ("max_link_speed", speed)];
        for (gpu, port, expected) in [
            (&idle[..], &port(gen5)[..], Some((16, 32.0))),
            (&idle, &port(gen4), Some((16, 16.0))),
            (&few, &port(gen5), Some((8, 16.0))),
            // A bridge without a link of its own.
            (&idle, &[], Some((16, 32.0))),
            // An emulated port, and a device that says nothing.
            (&idle, &port(gen1), None),
            (&files(("0", "Unknown"), ("16", gen5)), &port(gen5), None),
            (&[], &[], None),
        ] {
            let (_dir, entry) = machine(gpu, port);
            let found = Link::of_busy_gpu(&entry);
            let found = found.map(|link| (link.lanes, link.gt_per_s));
            assert_eq!(found, expected, "{gpu:?} in {port:?}");
        }
    }
}
