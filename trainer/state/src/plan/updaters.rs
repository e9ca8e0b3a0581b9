//! Which processor updates tiles, with how many threads, and how fast.

use kernels::adamw::Master;
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

/// Cores of a rank with a GPU that do not update: for PyTorch's thread, the mover's and the swapper's, and for those that stream tiles
/// through the GPU, which mostly sleep. On 16 cores, bf16 masters and moments were updated in 0.27 s by 16 threads beside those of the GPU
/// and in 0.24 s by 13; fp32 ones, for which host memory is the limit, in 0.23 s by either (`trainer/bench/MEASUREMENTS.md`).
const CORES_BESIDE_A_GPU: usize = 3;

/// Returns the number of optimizer threads of `trainer`, where `device` is not the GPU alone. State in host memory is not limited by a
/// drive, so when more than half of the state is there, the number grows with that fraction, up to `threads` or those that a GPU leaves.
pub fn cpu_updaters(threads: usize, state_fraction: f64, device: OptimizerDevice) -> usize {
    let most = match device {
        OptimizerDevice::Shared => threads.saturating_sub(CORES_BESIDE_A_GPU),
        _ => threads,
    };
    let pace = 0.5 / (1.0 - state_fraction);
    let wanted = CPU_UPDATERS_BESIDE_DEVICES as f64 * pace.max(1.0);
    most.min(wanted.ceil() as usize).max(1)
}

/// Parameters that one core updates in a second, if none were measured: 16 together reached 5.0 to 5.6 G (split bf16 master, AVX-512), and
/// 4.0 G with masters in bf16, which are rounded stochastically.
pub fn core_params_per_s(master: Master) -> f64 {
    match master {
        Master::SplitBf16 | Master::Fp32 | Master::Fp16WholeMaster => 0.35e9,
        Master::Bf16 => 0.25e9,
    }
}

/// Fraction of the sum of their rates that CPU and GPU reach together: both move bytes of the same host memory. On 16 cores with an H200
/// they reached 5.9 of 6.9 G parameters a second with fp32 masters and moments, and 6.2 of 6.9 in bf16.
const SHARED_RATE: f64 = 0.88;

/// Seconds of an update and the GPU's fraction of it, from the seconds that all `threads` of the CPU, or the GPU, would need for all of it.
pub fn update_s(device: OptimizerDevice, threads: usize, cpu_s: f64, gpu_s: f64) -> (f64, f64) {
    match device {
        OptimizerDevice::Gpu => (gpu_s, 1.0),
        OptimizerDevice::Cpu | OptimizerDevice::Auto => (cpu_s, 0.0),
        OptimizerDevice::Shared => {
            let updating = cpu_updaters(threads, 1.0, device) as f64;
            shared_update_s(threads as f64 / updating * cpu_s, gpu_s)
        }
    }
}

/// Seconds of an update by CPU and GPU, which finish at the same time, and the GPU's fraction of it, from the seconds that each would need for all of it.
fn shared_update_s(cpu_s: f64, gpu_s: f64) -> (f64, f64) {
    let [cpu_rate, gpu_rate] = [1.0 / cpu_s, 1.0 / gpu_s];
    let rate = cpu_rate + gpu_rate;
    (1.0 / (SHARED_RATE * rate), gpu_rate / rate)
}

/// Seconds of an update by a script's rank: by `threads`, by a GPU if `has_gpu`, or by both. `core_s` and `gpu_s` are those that one core, or the GPU,
/// would need for all of it.
pub fn script_update_s(threads: usize, has_gpu: bool, core_s: f64, gpu_s: f64) -> f64 {
    let cpu_s = core_s / threads as f64;
    match (threads, has_gpu) {
        (0, _) => gpu_s,
        (_, false) => cpu_s,
        (_, true) => shared_update_s(cpu_s, gpu_s).0,
    }
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

    use OptimizerDevice::{Auto, Cpu, Gpu, Shared};

    #[test]
    fn both_sides_together_are_faster_than_either_and_slower_than_their_sum() {
        // Measured: 1.345 G parameters with bf16 masters and moments, on 16 cores and by an H200.
        let (cpu_s, gpu_s) = (0.339, 0.363);
        assert_eq!(update_s(Cpu, 16, cpu_s, gpu_s), (cpu_s, 0.0));
        assert_eq!(update_s(Gpu, 16, cpu_s, gpu_s), (gpu_s, 1.0));
        let (both_s, share) = update_s(Shared, 16, cpu_s, gpu_s);
        assert!((0.207..0.224).contains(&both_s), "{both_s}");
        assert!((0.5..0.6).contains(&share), "{share}");
    }

    #[test]
    fn a_script_updates_as_fast_as_what_it_has() {
        let (core_s, gpu_s) = (2.0, 0.5);
        let found = [(4, false), (0, true), (4, true)];
        let found =
            found.map(|(threads, has_gpu)| script_update_s(threads, has_gpu, core_s, gpu_s));
        assert_eq!(found, [0.5, 0.5, 0.25 / SHARED_RATE]);
    }

    #[test]
    fn updaters_grow_with_what_stays_in_host_memory_up_to_the_threads() {
        let of_sixteen = [0.0, 0.5, 0.75, 0.875, 1.0].map(|share| cpu_updaters(16, share, Cpu));
        assert_eq!(of_sixteen, [3, 3, 6, 12, 16]);
        assert_eq!([0.0, 1.0].map(|share| cpu_updaters(2, share, Cpu)), [2, 2]);
        assert_eq!(cpu_updaters(1, 0.5, Cpu), 1);
        let beside_a_gpu = [(16, 0.0), (16, 1.0), (4, 1.0), (2, 1.0)];
        let beside_a_gpu =
            beside_a_gpu.map(|(threads, share)| cpu_updaters(threads, share, Shared));
        assert_eq!(beside_a_gpu, [3, 13, 1, 1]);
    }

    #[test]
    fn a_script_leaves_cores_to_what_it_computes() {
        let on_cpu = [1, 2, 4, 8, 64].map(|cores| script_cpu_updaters(cores, false));
        assert_eq!(on_cpu, [1, 1, 2, 4, 4]);
        let on_gpu = [1, 2, 4, 16].map(|cores| script_cpu_updaters(cores, true));
        assert_eq!(on_gpu, [1, 1, 1, 13]);
    }

    #[test]
    fn a_script_updates_where_it_computes_unless_drives_are_the_bound() {
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
