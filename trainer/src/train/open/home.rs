//! Where a run's tiles will be, and what updates them there.

use kernels::adamw::Hyper;
use kernels::gpu::TileUpdater;
use swapper::{Opened, Optimizer, Swapper};

use super::super::TrainError;
use super::Prepared;
use crate::backend::{GpuBackend, TileBackend};
use crate::checkpoint_tap::{CheckpointTap, Copied};
use crate::config::{Durability, OptimizerDevice};
use crate::plan::Plan;
use crate::update::{CpuUpdate, Decay, GpuUpdate};

/// Threads that stream tiles through the GPU: one's copy up, one's kernel and one's copy down at a time.
const GPU_UPDATERS: usize = 3;

/// Threads that update on the processor while state comes from devices, each a tile of its own. One keeps up with drives that
/// write 8 GB/s; with more than these the copying of bytes waits for cores and memory: on 16 cores with four drives of 6.2 and
/// 3.2 GB/s a step took 1.43 to 1.45 s with 3, 1.38 to 1.55 with 4, 1.55 with 6; with half of the state in host memory 0.74 s
/// with 3, 0.83 with 6.
const CPU_UPDATERS_BESIDE_DEVICES: usize = 3;

/// Threads that update on the processor. What lives in host memory comes at no device's pace: when that is more than half, the
/// more it is, the more of them, up to all.
fn cpu_updaters(threads: usize, state_share: f64) -> usize {
    let pace = 0.5 / (1.0 - state_share);
    let wanted = CPU_UPDATERS_BESIDE_DEVICES as f64 * pace.max(1.0);
    threads.min(wanted.ceil() as usize).max(1)
}

impl Prepared {
    /// Takes the tiles' memory, opens their store. Updated tiles are offered to `checkpoint_tap`, where the host sees them.
    pub(super) fn open_home(
        &self,
        plan: &Plan,
        checkpoint_tap: &CheckpointTap,
    ) -> Result<(TileBackend, Opened), TrainError> {
        let decay = Decay::new(&plan.units, &self.settings.optimizer.decay);
        if let Some(gpu) = self.gpu.as_ref().filter(|_| plan.lives_in_gpu) {
            let layout = plan.swapper.cut()?;
            let backend = GpuBackend::new(gpu, layout, plan.master, decay)?;
            let opened = Opened {
                resumed: None,
                generation: 0,
                memory: plan.memory.clone(),
                arena: None,
                iodepth: 0,
                engine: "GPU memory".into(),
                devices: Vec::new(),
                notes: Vec::new(),
            };
            return Ok((TileBackend::Gpu(Box::new(backend)), opened));
        }
        let opened = Swapper::open(
            plan.swapper.clone(),
            self.optimizers(plan, &decay, checkpoint_tap)?,
        );
        let (swapper, opened) = match self.settings.offload.durability {
            Durability::Full => opened?,
            Durability::None => opened.map_err(TrainError::InPlace)?,
        };
        Ok((TileBackend::Swapper(Box::new(swapper)), opened))
    }

    /// What updates tiles: the processor, the GPU, or both, each tile by who is free.
    fn optimizers(
        &self,
        plan: &Plan,
        decay: &Decay,
        checkpoint_tap: &CheckpointTap,
    ) -> Result<Vec<Box<dyn Optimizer<Hyper>>>, TrainError> {
        let mut optimizers: Vec<Box<dyn Optimizer<Hyper>>> = Vec::new();
        let gpu = self
            .gpu
            .as_ref()
            .filter(|_| plan.optimizer_device != OptimizerDevice::Cpu);
        if let Some(gpu) = gpu {
            for _ in 0..GPU_UPDATERS {
                let optimizer = GpuUpdate {
                    master: plan.master,
                    decay: decay.clone(),
                    updater: TileUpdater::new(gpu, plan.master, plan.swapper.tile_elems as usize)?,
                };
                let checkpoint_tap = checkpoint_tap.clone();
                optimizers.push(Box::new(Copied {
                    optimizer,
                    checkpoint_tap,
                }));
            }
        }
        if gpu.is_none() || plan.optimizer_device == OptimizerDevice::Shared {
            let threads = self.settings.train.threads;
            for _ in 0..cpu_updaters(threads, plan.swapper.state_share) {
                let optimizer = CpuUpdate {
                    master: plan.master,
                    decay: decay.clone(),
                };
                let checkpoint_tap = checkpoint_tap.clone();
                optimizers.push(Box::new(Copied {
                    optimizer,
                    checkpoint_tap,
                }));
            }
        }
        Ok(optimizers)
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
}
