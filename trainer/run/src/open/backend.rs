//! Opens a run's tiles and chooses the optimizers that update them.

use kernels::adamw::Hyper;
use kernels::gpu::TileUpdater;
use swapper::{OpenReport, Optimizer, Swapper};

use super::PreparedRun;
use super::RunError;
use crate::config::{OptimizerDevice, OptimizerSettings};
use crate::model::UnitLayout;
use crate::plan::Plan;
use training_state::backend::{BesideGpu, Both, GpuBackend, TileBackend};
use training_state::checkpoint_tap::{CheckpointTap, TappedOptimizer};
use training_state::plan::updaters::cpu_updaters;
use training_state::update::{
    ByGroup, CpuUpdate, GPU_UPDATERS, GpuUpdate, ParamGroup, ParamGroups,
};

/// Returns the learning rate and weight decay of each parameter.
pub fn param_groups(units: &[UnitLayout], optimizer: &OptimizerSettings) -> ParamGroups {
    ParamGroups::new(units.iter().map(|unit| {
        let params = unit.params.iter().map(|param| {
            let own = optimizer.group_of(&param.name);
            let decay = match own.and_then(|group| group.weight_decay) {
                Some(decay) => decay,
                None if optimizer.decay.includes(&param.name, param.decay) => {
                    optimizer.weight_decay
                }
                None => 0.0,
            };
            let lr = own.and_then(|group| group.lr);
            let muon = optimizer.muon.as_ref();
            let by_direction = muon.is_some() && param.member.is_block_matrix();
            let usual = muon.filter(|_| !by_direction);
            let lr = lr.or(usual.map(|muon| muon.adam_lr));
            let lr_factor = lr.map_or(1.0, |lr| {
                if lr == optimizer.lr {
                    1.0
                } else {
                    lr / optimizer.lr
                }
            });
            // The rate of a matrix is adjusted to its size, and its decay keeps the rate before that.
            let adjusted = muon.filter(|_| by_direction).map_or(1.0, |muon| {
                muon.adjust_lr_fn.factor(param.shape[0], param.shape[1])
            });
            let group = ParamGroup {
                lr_factor: (lr_factor * adjusted) as f32,
                weight_decay: (decay / adjusted) as f32,
                by_direction,
            };
            (param.range_elems().start as u64, group)
        });
        (unit.elems as u64, params)
    }))
}

impl PreparedRun {
    /// Allocates the tiles or opens their store. Tiles that are updated on the host are offered to
    /// `checkpoint_tap`.
    pub(super) fn open_backend(
        &self,
        plan: &Plan,
        checkpoint_tap: &CheckpointTap,
    ) -> Result<(TileBackend, OpenReport), RunError> {
        let groups = param_groups(&plan.units, &self.settings.optimizer);
        let in_gpu = |gpu, groups| {
            let layout = plan.kept_in_gpu().cut()?;
            let backend = GpuBackend::new(gpu, layout, plan.formats.clone(), groups)?;
            Ok::<_, RunError>(Box::new(backend))
        };
        let gpu = self.gpu.as_ref();
        if let Some(gpu) = gpu.filter(|_| plan.lives_in_gpu()) {
            let backend = in_gpu(gpu, groups)?;
            let opened = OpenReport {
                resumed: None,
                resumed_own: None,
                generation: 0,
                memory: plan.memory.clone(),
                arena: None,
                iodepth: 0,
                engine: "GPU memory".into(),
                devices: Vec::new(),
                notes: Vec::new(),
            };
            return Ok((TileBackend::Gpu(backend, ()), opened));
        }
        let both = gpu.filter(|_| plan.in_gpu.contains(&true));
        let backend = both.map(|gpu| in_gpu(gpu, groups.clone())).transpose()?;
        let opened = Swapper::open(
            plan.streamed(),
            self.optimizers(plan, groups, checkpoint_tap, backend.as_deref())?,
        );
        let (swapper, opened) = opened.map_err(|error| {
            if error.is_of_an_unclean_job() {
                RunError::InPlace(error)
            } else {
                error.into()
            }
        })?;
        let swapper = Box::new(swapper);
        let backend = match backend {
            None => TileBackend::Swapper(swapper, ()),
            Some(backend) => TileBackend::Both(Both { swapper, backend }, (), ()),
        };
        Ok((backend, opened))
    }

    /// Makes the optimizers: on the CPU, on the GPU, or on both, where each tile goes to the one that
    /// is idle. They also copy tiles of `in_gpu` for commits.
    fn optimizers(
        &self,
        plan: &Plan,
        groups: ParamGroups,
        checkpoint_tap: &CheckpointTap,
        in_gpu: Option<&GpuBackend>,
    ) -> Result<Vec<Box<dyn Optimizer<Hyper>>>, RunError> {
        let mut optimizers: Vec<Box<dyn Optimizer<Hyper>>> = Vec::new();
        let formats = plan.formats.clone();
        let format = formats.largest();
        let scalars = ByGroup { formats, groups };
        let gpu = self
            .gpu
            .as_ref()
            .filter(|_| plan.optimizer_device != OptimizerDevice::Cpu);
        if let Some(gpu) = gpu {
            let elems = plan.swapper.tile_elems as usize;
            let bytes = TileUpdater::device_bytes(format, format.master.grad_type(), elems);
            for _ in 0..GPU_UPDATERS {
                let optimizer = GpuUpdate {
                    scalars: scalars.clone(),
                    updater: TileUpdater::new(gpu, bytes)?,
                };
                let checkpoint_tap = checkpoint_tap.clone();
                optimizers.push(Box::new(BesideGpu {
                    optimizer: TappedOptimizer {
                        optimizer,
                        checkpoint_tap,
                    },
                    reader: in_gpu.map(GpuBackend::reader).transpose()?,
                }));
            }
        }
        if gpu.is_none() || plan.optimizer_device == OptimizerDevice::Shared {
            let threads = self.settings.train.threads;
            let count = cpu_updaters(threads, plan.swapper.state_fraction, plan.optimizer_device);
            for _ in 0..count {
                let optimizer = CpuUpdate(scalars.clone());
                let checkpoint_tap = checkpoint_tap.clone();
                optimizers.push(Box::new(BesideGpu {
                    optimizer: TappedOptimizer {
                        optimizer,
                        checkpoint_tap,
                    },
                    reader: in_gpu.map(GpuBackend::reader).transpose()?,
                }));
            }
        }
        Ok(optimizers)
    }
}

#[cfg(test)]
mod tests {
    use kernels::adamw::{Rounding, UpdateRule};
    use swapper::TileRange;

    use super::*;
    use crate::config::{Decaying, MasterType, MomentsType, OptimizerKind};
    use crate::model::{Architecture, ModelConfig, ParamRole, unit_layouts};

    const HYPER: Hyper = Hyper {
        lr: 1.0,
        beta1: 0.9,
        beta2: 0.999,
        eps: 1e-8,
        weight_decay: 0.0,
        step: 1,
        grad_scale: 1.0,
        rounding: Rounding::ZERO,
    };

    #[test]
    fn parameters_decay_as_the_settings_group_them() {
        let units = unit_layouts(&ModelConfig {
            architecture: Architecture::Gpt2,
            biases: Architecture::Gpt2.form().biases,
            vocab_size: 32,
            hidden_size: 64,
            intermediate_size: 64,
            layers: 1,
            heads: 1,
            kv_heads: 1,
            tied: true,
            ..ModelConfig::default()
        });
        let decaying = |rule: &Decaying| {
            let optimizer = OptimizerSettings {
                lr: 1.0,
                betas: [0.9, 0.999],
                eps: 1e-8,
                weight_decay: 0.5,
                decay: rule.clone(),
                groups: Vec::new(),
                moments: MomentsType::Fp32,
                master: MasterType::Fp32,
                muon: None,
                kind: OptimizerKind::AdamW,
            };
            let groups = param_groups(&units, &optimizer);
            let params = units.iter().enumerate().flat_map(|(number, unit)| {
                let range = TileRange {
                    unit: number,
                    elems: 0..unit.elems as u64,
                };
                let parts = groups.parts(&range, UpdateRule::AdamW, &HYPER);
                let own = unit.params.iter().filter(move |param| {
                    let mut decaying = parts.iter().filter(|part| part.hyper.weight_decay > 0.0);
                    decaying.any(|part| part.elems.contains(&param.offset_elems))
                });
                own.map(|param| param.member).collect::<Vec<_>>()
            });
            params.collect::<Vec<_>>()
        };
        let all: Vec<ParamRole> = units
            .iter()
            .flat_map(|unit| unit.params.iter().map(|param| param.member))
            .collect();
        assert_eq!(decaying(&Decaying::All), all);
        use ParamRole::{Down, Embedding, Key, Out, Positions, Query, Up, Value};
        let matrices = [Embedding, Positions, Query, Key, Value, Out, Up, Down];
        assert_eq!(decaying(&Decaying::Matrices), matrices);
        let but = |patterns: &[&str]| {
            Decaying::AllBut(patterns.iter().map(|text| (*text).to_owned()).collect())
        };
        assert_eq!(decaying(&but(&["bias", "ln_"])), matrices);
        assert_eq!(
            decaying(&but(&["bias", "ln_", "wpe", "c_attn"])),
            [Embedding, Out, Up, Down]
        );
        assert_eq!(decaying(&but(&[])), all);
    }
}
