//! Chooses which units' tiles stay in GPU memory while those of the others are in host memory or on drives.
//!
//! ```text
//!   GPU    | embedding |         | block 2 |         | block 4 | ... | head |     computed with and updated in place
//!   host               | block 1 |         | block 3 |         ...              gathered, scattered, updated by the swapper
//! ```
//!
//! With state on drives, the store has the tiles of all units. Those in GPU memory are read at the start and written by commits alone:
//!
//! ```text
//!   GPU    | embedding |         | block 2 |         | block 4 | ... | head |     a step reads and writes none of them
//!   drives | embedding | block 1 | block 2 | block 3 | block 4 | ... | head |     every commit has all
//! ```
//!
//! Units stay whole, and evenly spaced ones stay, so that the copies of one block have the time of the others.

use offload_support::units::ApproxBytes;
use swapper::{Backing, Staging, SwapperSettings, shard_of};

use super::choices::most_of;
use super::figures::Seconds;
use super::{Plan, PlanError, TileSums};
use crate::computation::ActivationCheckpointing;
use crate::config::{OptimizerDevice, ResidentFraction, RunSettings};
use crate::model::UnitLayout;

/// Key of this choice.
const KEY: &str = "offload.gpu_resident_fraction";

/// Factor by which a step may be longer with all tiles in GPU memory than with a part of them, because nothing waits for copies then.
const ALL_S_MAX: f64 = 1.001;

impl Plan {
    /// Whether all tiles are in the memory of the GPU that computes, and nowhere else: both devices are `none`, or without a store all fits there.
    /// Otherwise, or without a GPU, `none` means host memory.
    pub fn lives_in_gpu(&self) -> bool {
        self.in_gpu.iter().all(|&in_gpu| in_gpu) && !self.has_store()
    }

    /// Settings of the swapper. Without a store, the units whose tiles are in GPU memory are empty there.
    pub fn streamed(&self) -> SwapperSettings {
        match self.has_store() {
            true => self.with_external(),
            false => self.divided(false),
        }
    }

    /// Settings of the swapper, which has the tiles of all units in a store.
    fn with_external(&self) -> SwapperSettings {
        let mut all = self.swapper.clone();
        for (unit, &in_gpu) in all.units.iter_mut().zip(&self.in_gpu) {
            unit.external = in_gpu;
        }
        all
    }

    /// Settings that cut only the units whose tiles are in GPU memory into tiles.
    pub fn kept_in_gpu(&self) -> SwapperSettings {
        let mut kept = self.divided(true);
        kept.backing = Backing::Memory;
        for unit in &mut kept.units {
            unit.external = false;
        }
        kept
    }

    fn divided(&self, in_gpu: bool) -> SwapperSettings {
        let mut part = self.swapper.clone();
        for (unit, &there) in part.units.iter_mut().zip(&self.in_gpu) {
            if there != in_gpu {
                unit.elems = 0;
            }
        }
        part
    }

    /// Fraction of the parameters whose tiles are in GPU memory.
    pub(super) fn gpu_fraction(&self) -> f64 {
        let units = self.units.iter().zip(&self.in_gpu);
        let there = units.filter(|(_, in_gpu)| **in_gpu);
        let elems: usize = there.map(|(unit, _)| unit.elems).sum();
        elems as f64 / elems_of(&self.units)
    }

    /// Sums over the tiles in GPU memory.
    pub(super) fn gpu_tile_sums(&self) -> TileSums {
        if self.lives_in_gpu() {
            return self.tile_sums();
        }
        let units = 0..self.units.len();
        self.sums_of(units.filter(|&unit| self.in_gpu[unit]))
    }

    /// Tiles of each kind in GPU memory.
    fn gpu_ranges(&self) -> u64 {
        let units = 0..self.units.len();
        let in_gpu = units.filter(|&unit| self.in_gpu[unit]);
        in_gpu.map(|unit| self.ranges_of(unit)).sum()
    }

    /// Tiles of each kind that can stay in host memory: those that are not in GPU memory, of a run with a store.
    pub(super) fn ranges_on_host(&self) -> u64 {
        u64::from(self.memory.range_count) - self.gpu_ranges()
    }

    /// Bytes that commits write of tiles in GPU memory, of each step.
    pub(super) fn committed_from_gpu(&self) -> u64 {
        let bytes = self.gpu_tiles.param_bytes + self.gpu_tiles.state_bytes;
        match self.has_store() {
            true => (bytes.checked_div(self.swapper.commit_every)).unwrap_or(0),
            false => 0,
        }
    }

    /// Tiles of each kind that the first rank has of a unit, which has the most.
    pub(super) fn ranges_of(&self, unit: usize) -> u64 {
        let tile_elems = self.swapper.tile_elems;
        let own = shard_of(
            self.units[unit].elems as u64,
            tile_elems,
            0,
            self.swapper.ranks,
        );
        own.end.div_ceil(tile_elems)
    }

    fn unit_bytes(&self, unit: usize) -> u64 {
        self.sums_of([unit]).sum_bytes()
    }

    /// Keeps the tiles of some units in GPU memory: as large a part of the parameters as is asked for, or the part with which a step
    /// is the shortest.
    pub(super) fn choose_gpu_units(
        &mut self,
        settings: &RunSettings,
        staging: Staging,
    ) -> Result<(), PlanError> {
        let Some(gpu) = self.hardware.gpu.clone().filter(|_| !self.lives_in_gpu()) else {
            return Ok(());
        };
        let wanted = match settings.placement.gpu_resident_fraction {
            ResidentFraction::Auto => None,
            ResidentFraction::Fixed(fraction) => Some(fraction.get()),
        };
        if let Some(fraction) = wanted {
            if fraction == 0.0 {
                return Ok(());
            }
            let elems = |unit: usize| self.units[unit].elems as f64;
            let most = fraction * elems_of(&self.units);
            // The nearest number of blocks; rounding must not lose the last one.
            let in_gpu = fill(self.units.len(), most + elems(1) / 2.0, elems);
            self.keep_in_gpu(settings, staging, in_gpu)?;
            self.fit_beside_tiles(settings)?;
            return Ok(());
        }
        let host = self.clone();
        let levels = match settings.train.activation_checkpointing {
            Some(given) => vec![given],
            None => vec![
                ActivationCheckpointing::Matmuls,
                ActivationCheckpointing::Attention,
                ActivationCheckpointing::Full,
            ],
        };
        for level in levels {
            let mut part = host.clone();
            part.checkpointing = level.into();
            part.set_compute(settings);
            let left_bytes = most_of(&gpu).saturating_sub(part.gpu_bytes());
            let bytes = |unit: usize| part.unit_bytes(unit) as f64;
            let in_gpu = fill(part.units.len(), left_bytes as f64, bytes);
            // Without a store, all of them are another place.
            let has_all = !in_gpu.contains(&false) && !part.has_store();
            if has_all || !in_gpu.contains(&true) {
                continue;
            }
            part.keep_in_gpu(settings, staging, in_gpu)?;
            if part.is_better(self, settings) {
                *self = part;
            }
        }
        let updates_elsewhere = matches!(
            settings.offload.optimizer_device,
            OptimizerDevice::Cpu | OptimizerDevice::Shared
        );
        if !updates_elsewhere && !self.has_store() {
            let mut all = host.clone();
            all.keep_in_gpu(settings, staging, vec![true; all.units.len()])?;
            all.fit_beside_tiles(settings)?;
            let fits = all.gpu_bytes() <= most_of(&gpu);
            if fits && all.judged_s(settings) <= self.judged_s(settings) * ALL_S_MAX {
                *self = all;
            }
        }
        self.say_gpu_units(settings, &host);
        Ok(())
    }

    /// Keeps the tiles of these units in GPU memory.
    fn keep_in_gpu(
        &mut self,
        settings: &RunSettings,
        staging: Staging,
        in_gpu: Vec<bool>,
    ) -> Result<(), PlanError> {
        self.in_gpu = in_gpu;
        if self.has_store() {
            // The other tiles have the host memory to themselves.
            self.swapper = self.with_external();
            self.choose_tiles_in_host(settings, staging)?;
        }
        self.refresh(settings)?;
        self.choose_update(settings);
        Ok(())
    }

    /// Chooses again what blocks keep, in the memory that tiles leave.
    fn fit_beside_tiles(&mut self, settings: &RunSettings) -> Result<(), PlanError> {
        self.choose_activations(settings)?;
        self.choose_checkpointing(settings);
        self.set_rates(settings);
        Ok(())
    }

    fn say_gpu_units(&mut self, settings: &RunSettings, host: &Self) {
        let (mine_s, host_s) = (self.judged_s(settings), host.judged_s(settings));
        let why = if !self.in_gpu.contains(&true) {
            "a step is not shorter with a part of the tiles in GPU memory".to_owned()
        } else if self.lives_in_gpu() {
            "GPU memory has room for everything, and no tile crosses the bus".to_owned()
        } else {
            let others = match self.has_store() {
                true => "with none of them there",
                false => "with all tiles in host memory",
            };
            format!(
                "{} of tiles fit in GPU memory; a step takes {} from the rates of kernels, and {} {others}",
                ApproxBytes(self.gpu_tiles.sum_bytes()),
                Seconds(mine_s),
                Seconds(host_s)
            )
        };
        self.chose(KEY, format!("{:.2}", self.gpu_fraction()), why);
    }
}

fn elems_of(units: &[UnitLayout]) -> f64 {
    units.iter().map(|unit| unit.elems as f64).sum()
}

/// Chooses units whose `size` is at most `most` together: embedding and head, whose copies nothing hides, then as many evenly spaced
/// blocks as there is room for. If both ends have no room, blocks alone.
fn fill(units: usize, most: f64, size: impl Fn(usize) -> f64) -> Vec<bool> {
    let blocks = units - 2;
    let ends = size(0) + size(units - 1);
    let (has_ends, left) = match ends <= most {
        true => (true, most - ends),
        false => (false, most),
    };
    let count = ((left / size(1)) as usize).min(blocks);
    let mut in_gpu = vec![has_ends; units];
    for block in 0..blocks {
        in_gpu[block + 1] = (block + 1) * count / blocks > block * count / blocks;
    }
    in_gpu
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ends_stay_first_and_then_blocks_evenly() {
        let kept = |most: f64| {
            let in_gpu = fill(10, most, |unit| if unit % 9 == 0 { 2.0 } else { 1.0 });
            let numbers = 0..10;
            numbers.filter(|&unit| in_gpu[unit]).collect::<Vec<usize>>()
        };
        assert_eq!(kept(0.5), Vec::<usize>::new());
        assert_eq!(kept(3.0), [3, 6, 8]);
        assert_eq!(kept(4.0), [0, 9]);
        assert_eq!(kept(8.9), [0, 2, 4, 6, 8, 9]);
        assert_eq!(kept(11.0), [0, 2, 3, 4, 5, 6, 7, 8, 9]);
        assert_eq!(kept(100.0), [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]);
    }
}
