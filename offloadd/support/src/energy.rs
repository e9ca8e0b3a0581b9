//! Energy that a GPU and the machine's processors have taken, by their own counters: NVIDIA's through NVML, processors' through RAPL.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use nvml_wrapper::{Device, Nvml};

/// Where the kernel lists what counts energy. Since 2020 only root may read the counters.
const POWERCAP: &str = "/sys/class/powercap";

/// Reads the counters of one GPU, and of the processors.
#[derive(Debug, Default)]
pub struct EnergyMeter {
    gpu: Option<(Device<'static>, u64)>,
    processors: Vec<Package>,
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
            processors: match with_processors {
                true => packages(Path::new(POWERCAP)),
                false => Vec::new(),
            },
        }
    }

    /// Joules since the last call, at first since [`EnergyMeter::new`]. A GPU counts about every 100 ms.
    pub fn joules_since_last(&mut self) -> Joules {
        let gpu = self.gpu.as_mut().and_then(|(gpu, last)| {
            let now = gpu.total_energy_consumption().ok()?;
            // It begins again with the driver.
            let millijoules = now.saturating_sub(std::mem::replace(last, now));
            Some(millijoules as f64 / 1e3)
        });
        let parts: Option<Vec<f64>> = self
            .processors
            .iter_mut()
            .map(Package::joules_since_last)
            .collect();
        Joules {
            gpu,
            processors: parts
                .filter(|all| !all.is_empty())
                .map(|all| all.iter().sum()),
        }
    }
}

/// NVIDIA's library, opened once; `None` without its driver.
fn nvml() -> Option<&'static Nvml> {
    static NVML: OnceLock<Option<Nvml>> = OnceLock::new();
    NVML.get_or_init(|| {
        // The name that drivers install; the library's default is the one of the development package.
        let library = Path::new("libnvidia-ml.so.1").as_os_str();
        Nvml::builder().lib_path(library).init().ok()
    })
    .as_ref()
}

/// The counters of whole processors, `intel-rapl:0` and so on (AMD's have the same name), that this process may read.
fn packages(powercap: &Path) -> Vec<Package> {
    let Ok(entries) = fs::read_dir(powercap) else {
        return Vec::new();
    };
    let whole = entries.flatten().filter(|entry| {
        let name = entry.file_name();
        let number = name
            .to_str()
            .and_then(|name| name.strip_prefix("intel-rapl:"));
        // Parts of a processor are "intel-rapl:0:1".
        number.is_some_and(|number| number.parse::<u32>().is_ok())
    });
    whole
        .filter_map(|entry| Package::open(&entry.path()))
        .collect()
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
        let set = |name: &str, joules: u64| {
            let of = dir.path().join(name);
            fs::create_dir_all(&of).unwrap();
            fs::write(of.join("energy_uj"), format!("{}\n", joules * 1_000_000)).unwrap();
            fs::write(of.join("max_energy_range_uj"), "262143000000\n").unwrap();
        };
        for (name, joules) in [
            ("intel-rapl", 7),
            ("intel-rapl:0", 100),
            ("intel-rapl:1", 262_140),
            ("intel-rapl:0:0", 60),
        ] {
            set(name, joules);
        }
        let mut meter = EnergyMeter {
            gpu: None,
            processors: packages(dir.path()),
        };
        assert_eq!(meter.processors.len(), 2);
        assert_eq!(meter.joules_since_last().processors, Some(0.0));
        set("intel-rapl:0", 130);
        set("intel-rapl:1", 5);
        set("intel-rapl:0:0", 90);
        let found = meter.joules_since_last();
        assert_eq!((found.gpu, found.processors), (None, Some(30.0 + 8.0)));
        // A counter that cannot be read any more is not a machine that takes no energy.
        fs::remove_file(dir.path().join("intel-rapl:1/energy_uj")).unwrap();
        assert_eq!(meter.joules_since_last().processors, None);
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
