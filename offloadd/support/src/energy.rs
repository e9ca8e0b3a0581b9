//! Energy that a GPU and the machine's processors have taken, by their own counters: NVIDIA's through NVML, processors' through RAPL.

use std::fs;
use std::path::{Path, PathBuf};

use nvml_wrapper::Device;

use crate::nvidia::nvml;

/// Where the kernel lists what counts energy. Since 2020 only root may read the counters.
const POWERCAP: &str = "/sys/class/powercap";

/// Reads the counters of one GPU, and of the processors.
#[derive(Debug, Default)]
pub struct EnergyMeter {
    gpu: Option<(Device<'static>, u64)>,
    /// `None` if one of them cannot be read.
    processors: Option<Vec<Package>>,
}

/// Joules since the last reading; `None` where there is no counter, or it cannot be read.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Joules {
    /// Of the GPU, with its memory.
    pub gpu: Option<f64>,
    /// Of the processors, in most machines without their memory.
    pub processors: Option<f64>,
}

/// A processor's counter, which begins again at 0 after `range_uj`.
#[derive(Debug)]
struct Package {
    counter: PathBuf,
    range_uj: u64,
    last_uj: u64,
}

impl EnergyMeter {
    /// Finds the counter of the GPU with the address `pci`, such as `0000:41:00.0`, and those of the processors if `with_processors`: one
    /// process of a machine should count these.
    pub fn new(pci: Option<&str>, with_processors: bool) -> Self {
        let gpu = || {
            let gpu = nvml()?.device_by_pci_bus_id(pci?).ok()?;
            let now = gpu.total_energy_consumption().ok()?;
            Some((gpu, now))
        };
        Self {
            gpu: gpu(),
            processors: with_processors
                .then(|| packages(Path::new(POWERCAP)))
                .flatten(),
        }
    }

    /// Joules since the last call, at first since [`EnergyMeter::new`]. A GPU counts about every 100 ms.
    pub fn joules_since_last(&mut self) -> Joules {
        let gpu = self.gpu.as_mut().and_then(|(gpu, last)| {
            let now = gpu.total_energy_consumption().ok()?;
            // It begins again with the driver.
            let millijoules = now.checked_sub(std::mem::replace(last, now))?;
            Some(millijoules as f64 / 1e3)
        });
        let parts = self.processors.as_mut().and_then(|packages| {
            let parts = packages.iter_mut().map(Package::joules_since_last);
            parts.collect::<Option<Vec<f64>>>()
        });
        Joules {
            gpu,
            processors: parts.map(|all| all.iter().sum()),
        }
    }
}

/// The counters of whole processors, whose names begin with "package" (AMD's too), beside those of their parts and of all of a laptop.
/// `None` if there are none, or one cannot be read.
fn packages(powercap: &Path) -> Option<Vec<Package>> {
    let is_whole = |dir: &Path| {
        let name = fs::read_to_string(dir.join("name"));
        name.is_ok_and(|name| name.starts_with("package"))
    };
    let dirs = fs::read_dir(powercap).ok()?.flatten();
    let whole = dirs.map(|entry| entry.path()).filter(|dir| is_whole(dir));
    let packages: Vec<Package> = whole
        .map(|dir| Package::open(&dir))
        .collect::<Option<_>>()?;
    (!packages.is_empty()).then_some(packages)
}

fn number(path: &Path) -> Option<u64> {
    fs::read_to_string(path).ok()?.trim().parse().ok()
}

impl Package {
    fn open(dir: &Path) -> Option<Self> {
        let counter = dir.join("energy_uj");
        Some(Self {
            last_uj: number(&counter)?,
            range_uj: number(&dir.join("max_energy_range_uj"))?,
            counter,
        })
    }

    fn joules_since_last(&mut self) -> Option<f64> {
        let now = number(&self.counter)?;
        let last = std::mem::replace(&mut self.last_uj, now);
        let microjoules = match now.checked_sub(last) {
            Some(since) => since,
            None => now + self.range_uj.saturating_sub(last),
        };
        Some(microjoules as f64 / 1e6)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn processors_are_counted_once_and_across_the_end_of_their_counters() {
        let dir = tempfile::tempdir().unwrap();
        let set = |zone: &str, name: &str, joules: u64| {
            let of = dir.path().join(zone);
            fs::create_dir_all(&of).unwrap();
            fs::write(of.join("name"), format!("{name}\n")).unwrap();
            fs::write(of.join("energy_uj"), format!("{}\n", joules * 1_000_000)).unwrap();
            fs::write(of.join("max_energy_range_uj"), "262143000000\n").unwrap();
        };
        fs::create_dir_all(dir.path().join("intel-rapl")).unwrap();
        for (zone, name, joules) in [
            ("intel-rapl:0", "package-0", 100),
            ("intel-rapl:1", "package-1", 262_140),
            ("intel-rapl:0:0", "dram", 60),
            ("intel-rapl:2", "psys", 400),
        ] {
            set(zone, name, joules);
        }
        let mut meter = EnergyMeter {
            gpu: None,
            processors: packages(dir.path()),
        };
        assert_eq!(meter.processors.as_ref().unwrap().len(), 2);
        assert_eq!(meter.joules_since_last().processors, Some(0.0));
        set("intel-rapl:0", "package-0", 130);
        set("intel-rapl:1", "package-1", 5);
        set("intel-rapl:0:0", "dram", 90);
        set("intel-rapl:2", "psys", 500);
        let found = meter.joules_since_last();
        assert_eq!((found.gpu, found.processors), (None, Some(30.0 + 8.0)));
        // A counter that cannot be read any more is not a machine that takes no energy.
        fs::remove_file(dir.path().join("intel-rapl:1/energy_uj")).unwrap();
        assert_eq!(meter.joules_since_last().processors, None);
        assert!(packages(dir.path()).is_none());
    }

    #[test]
    fn a_machine_without_counters_has_no_figures() {
        let mut meter = EnergyMeter {
            gpu: None,
            processors: packages(Path::new("/nonexistent")),
        };
        assert_eq!(meter.joules_since_last(), Joules::default());
        assert_eq!(
            EnergyMeter::new(Some("ffff:ff:1f.7"), false).joules_since_last(),
            Joules::default()
        );
    }
}
