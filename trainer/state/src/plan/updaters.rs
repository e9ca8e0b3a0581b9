//! Which processor updates tiles, and with how many threads.

use serde::{Deserialize, Serialize};

/// Where the optimizer runs. The choice does not change results, so a resumed run may change it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum OptimizerDevice {
    /// Chosen by the plan.
    Auto,
    /// The processor, on state in host memory.
    Cpu,
    /// The GPU. State in host memory or on devices is streamed through it.
    Gpu,
    /// Both; each updates a part of the tiles.
    Shared,
}

impl OptimizerDevice {
    /// Each with its name in a configuration; the default is first.
    pub const NAMES: [(&str, Self); 4] = [
        ("auto", Self::Auto),
        ("cpu", Self::Cpu),
        ("gpu", Self::Gpu),
        ("shared", Self::Shared),
    ];

    /// Name of the value in a configuration.
    pub fn name(self) -> &'static str {
        let named = Self::NAMES.iter().find(|(_, device)| *device == self);
        named.expect("each has a name").0
    }
}

/// Optimizer threads of `trainer` when state comes from devices; each updates a tile of its own. One thread keeps up with
/// drives that write 8 GB/s. With more than three, copying competes for cores and memory bandwidth: on 16
/// cores with four drives of 6.2 GB/s read and 3.2 GB/s write, a step took 1.43 to 1.45 s with 3 threads,
/// 1.38 to 1.55 s with 4 and 1.55 s with 6. With half of the state in host memory it took 0.74 s with 3 and
/// 0.83 s with 6.
const CPU_UPDATERS_BESIDE_DEVICES: usize = 3;

/// Most threads that update while the model computes on the same cores.
const CPU_UPDATERS_BESIDE_COMPUTING: usize = 4;

/// Cores of a rank with a GPU that do not update: for PyTorch's thread and the mover's.
const CORES_BESIDE_A_GPU: usize = 2;

/// Returns the number of optimizer threads of `trainer`. State in host memory is not limited by a device, so when more
/// than half of the state is there, the number grows with that fraction up to `threads`.
pub fn cpu_updaters(threads: usize, state_fraction: f64) -> usize {
    let pace = 0.5 / (1.0 - state_fraction);
    let wanted = CPU_UPDATERS_BESIDE_DEVICES as f64 * pace.max(1.0);
    threads.min(wanted.ceil() as usize).max(1)
}

/// Returns the number of optimizer threads of a script's rank that has `cores`. Drives do not change it, unlike [`cpu_updaters`]:
/// how many threads copy fastest beside those of PyTorch has not been measured.
pub fn script_cpu_updaters(cores: usize, computes_on_gpu: bool) -> usize {
    let threads = match computes_on_gpu {
        true => cores.saturating_sub(CORES_BESIDE_A_GPU),
        false => (cores / 2).min(CPU_UPDATERS_BESIDE_COMPUTING),
    };
    threads.max(1)
}

/// Returns where a script's tiles are updated. `trainer` compares the bounds of steps; those of a script lack the time of its computing.
pub fn script_optimizer_device(
    wanted: OptimizerDevice,
    has_gpu: bool,
    on_drives: bool,
) -> OptimizerDevice {
    match wanted {
        // Drives bring tiles no faster than the processor updates them.
        OptimizerDevice::Auto if !has_gpu || on_drives => OptimizerDevice::Cpu,
        OptimizerDevice::Auto => OptimizerDevice::Shared,
        given => given,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn updaters_grow_with_what_stays_in_host_memory_up_to_the_threads() {
        let of_sixteen = [0.0, 0.5, 0.75, 0.875, 1.0].map(|share| cpu_updaters(16, share));
        assert_eq!(of_sixteen, [3, 3, 6, 12, 16]);
        assert_eq!([0.0, 1.0].map(|share| cpu_updaters(2, share)), [2, 2]);
        assert_eq!(cpu_updaters(1, 0.5), 1);
    }

    #[test]
    fn a_script_leaves_cores_to_what_it_computes() {
        let on_cpu = [1, 2, 4, 8, 64].map(|cores| script_cpu_updaters(cores, false));
        assert_eq!(on_cpu, [1, 1, 2, 4, 4]);
        let on_gpu = [1, 2, 4, 16].map(|cores| script_cpu_updaters(cores, true));
        assert_eq!(on_gpu, [1, 1, 2, 14]);
    }

    #[test]
    fn a_script_updates_where_it_computes_unless_drives_are_the_bound() {
        use OptimizerDevice::{Auto, Cpu, Gpu, Shared};
        for (wanted, has_gpu, on_drives, device) in [
            (Auto, false, false, Cpu),
            (Auto, true, false, Shared),
            (Auto, true, true, Cpu),
            (Gpu, true, true, Gpu),
            (Shared, true, true, Shared),
            (Cpu, true, false, Cpu),
        ] {
            assert_eq!(script_optimizer_device(wanted, has_gpu, on_drives), device);
        }
        for (name, device) in OptimizerDevice::NAMES {
            let read: OptimizerDevice = serde_json::from_value(name.into()).unwrap();
            assert_eq!((device.name(), read), (name, device));
        }
    }
}
