//! Where a run's tiles will be, and what updates them there.

use kernels::gpu::TileUpdater;
use swapper::{Opened, Optimizer, Swapper};

use super::super::TrainError;
use super::Prepared;
use crate::config::{Durability, UpdatePlace};
use crate::copies::{Copied, Copies};
use crate::home::{GpuHome, Home};
use crate::plan::Plan;
use crate::update::{CpuUpdate, Decay, GpuUpdate, Update};

/// Threads that stream tiles through the GPU: one's copy up, one's kernel and one's copy down at a time.
const GPU_UPDATERS: usize = 3;

/// Threads that hand tiles to the processor's pool, at most: while some wait for the last cores of their tiles, the others
/// have the next ones'. Where all state is in host memory the update is what a step waits for: on 16 cores, with tiles of
/// 200,000 elements, 2 took 0.40 s where 6 take 0.31. Where state comes from devices it is not, and their bytes want
/// cores and memory too.
const CPU_UPDATERS_MAX: usize = 6;
const CPU_UPDATERS_BESIDE_DEVICES: usize = 2;

impl Prepared {
    /// Takes the tiles' memory, opens their store. Updated tiles are offered to `copies`, where the host sees them.
    pub(super) fn open_home(
        &self,
        plan: &Plan,
        copies: &Copies,
    ) -> Result<(Home, Opened), TrainError> {
        let decay = Decay::new(&plan.units, &self.settings.optimizer.decay);
        if let Some(gpu) = self.gpu.as_ref().filter(|_| plan.lives_in_gpu) {
            let layout = plan.swapper.cut()?;
            let home = GpuHome::new(gpu, layout, plan.master, decay)?;
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
            return Ok((Home::Gpu(Box::new(home)), opened));
        }
        let opened = Swapper::open(plan.swapper.clone(), self.optimizers(plan, &decay, copies)?);
        let (swapper, opened) = match self.settings.offload.durability {
            Durability::Full => opened?,
            Durability::None => opened.map_err(TrainError::InPlace)?,
        };
        Ok((Home::Swapper(Box::new(swapper)), opened))
    }

    /// What updates tiles: the processor, the GPU, or both, each tile by who is free.
    fn optimizers(
        &self,
        plan: &Plan,
        decay: &Decay,
        copies: &Copies,
    ) -> Result<Vec<Box<dyn Optimizer<Update>>>, TrainError> {
        let mut optimizers: Vec<Box<dyn Optimizer<Update>>> = Vec::new();
        let gpu = self
            .gpu
            .as_ref()
            .filter(|_| plan.update != UpdatePlace::Cpu);
        if let Some(gpu) = gpu {
            for _ in 0..GPU_UPDATERS {
                let optimizer = GpuUpdate {
                    master: plan.master,
                    decay: decay.clone(),
                    updater: TileUpdater::new(gpu, plan.master, plan.swapper.tile_elems as usize)?,
                };
                let copies = copies.clone();
                optimizers.push(Box::new(Copied { optimizer, copies }));
            }
        }
        if gpu.is_none() || plan.update == UpdatePlace::Shared {
            let most = if plan.swapper.state_share < 1.0 {
                CPU_UPDATERS_BESIDE_DEVICES
            } else {
                CPU_UPDATERS_MAX
            };
            for _ in 0..self.settings.train.threads.clamp(1, most) {
                let optimizer = CpuUpdate {
                    master: plan.master,
                    decay: decay.clone(),
                };
                let copies = copies.clone();
                optimizers.push(Box::new(Copied { optimizer, copies }));
            }
        }
        Ok(optimizers)
    }
}
