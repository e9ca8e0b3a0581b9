//! Derives memory, bytes of a step, rates and bound from the present choices.

use swapper::{StepBytes, StepRates, SwapperError, SwapperSettings};

use super::memory::{GpuUse, InputsIn};
use super::muon::directions;
use super::operations::{self, Computing, Times};
use super::{
    BusBytes, ComputeMemory, FigureSource, Plan, PlannedDirections, SequenceExchange, TileSums,
};
use crate::computation::{
    ActivationCheckpointing, AttentionKernel, Checkpointing, LONG_DOCUMENT_TOKENS, Matmuls,
};
use crate::config::RunSettings;
use crate::model::UnitLayout;
use training_state::plan::updaters;

/// Multiple of elements that a rank keeps of a unit: a cache line of the smallest ones.
const COPIED_ELEMS_STEP: usize = 64;

/// Elements that each rank of a node with `local_ranks` keeps of a unit with `unit_elems`.
pub fn copied_elems(unit_elems: usize, local_ranks: u32) -> usize {
    let part = unit_elems.div_ceil(local_ranks as usize);
    part.next_multiple_of(COPIED_ELEMS_STEP)
}

impl Plan {
    /// Computes memory, bytes, rates and bound for the present settings.
    pub(super) fn refresh(&mut self, settings: &RunSettings) -> Result<(), SwapperError> {
        let step_bytes;
        (self.memory, step_bytes) = self.swapper.plan_with_bytes()?;
        self.step_bytes = self.with_gathers(step_bytes);
        self.node_bytes = match &self.swapper.node_ranks {
            None if self.swapper.ranks == 1 => self.step_bytes,
            // One process that owns all tiles has the same tiles as all processes together.
            None => {
                let alone = SwapperSettings {
                    rank: 0,
                    ranks: 1,
                    ..self.swapper.clone()
                };
                self.with_gathers(alone.step_bytes()?)
            }
            // The first rank owns the most.
            Some(local) => self.step_bytes.times(local.len() as f64),
        };
        // Every process has its own inputs, also where tiles are not divided.
        let input_bytes = self.moved_input_bytes() as f64;
        self.step_bytes.scratch_written_bytes = input_bytes;
        self.step_bytes.scratch_read_bytes = input_bytes;
        self.node_bytes.scratch_written_bytes = input_bytes * f64::from(self.local_ranks);
        self.node_bytes.scratch_read_bytes = input_bytes * f64::from(self.local_ranks);
        self.gpu_tiles = self.gpu_tile_sums();
        self.set_compute(settings);
        self.set_rates(settings);
        Ok(())
    }

    /// Bytes of block inputs that a step of one process writes to devices and reads back: all micro-batches' in whole tiles.
    fn moved_input_bytes(&self) -> u64 {
        let area = self.swapper.scratch;
        match self.inputs_in {
            InputsIn::Place | InputsIn::Host => 0,
            InputsIn::Drives => {
                let blocks = self.units.len() as u64 - 2;
                let tiles = area.tiles_of(self.input_bytes);
                let inputs = blocks * self.micro_batches as u64;
                inputs * u64::from(tiles) * u64::from(area.tile_bytes)
            }
        }
    }

    /// The `bytes` of a step that gathers parameters once in each pass, with the gathers of this plan.
    fn with_gathers(&self, mut bytes: StepBytes) -> StepBytes {
        bytes.backward_read_bytes *= 1.0 + self.further_gathers();
        if self.copy_bytes > 0 {
            bytes.backward_read_bytes = 0.0;
        }
        bytes
    }

    /// Groups of micro-batches in a step.
    pub fn groups(&self) -> usize {
        self.micro_batches.div_ceil(self.micro_batch_group)
    }

    /// Gathers of all parameters after the first group. Each later group gathers the blocks twice if no buffer holds them.
    fn further_gathers(&self) -> f64 {
        if !self.stage.divides_parameters() {
            return 0.0;
        }
        let blocks = &self.units[1..self.units.len() - 1];
        let elems = |units: &[UnitLayout]| units.iter().map(|unit| unit.elems as f64).sum::<f64>();
        2.0 * (self.groups() - 1) as f64 * elems(blocks) / elems(&self.units)
    }

    /// Divides the time of a step's forward and backward at the end of the first group's forward: deferred updates run
    /// beside what comes before.
    pub fn beside_updates(&self, forward_s: f64, backward_s: f64) -> [f64; 2] {
        let first_s = forward_s / self.groups() as f64;
        [first_s, forward_s - first_s + backward_s]
    }

    /// Time of forward in all groups.
    pub(super) fn forward_s(&self) -> f64 {
        self.rates.forward_s * self.groups() as f64
    }

    /// Time of forward and backward.
    pub fn compute_s(&self) -> f64 {
        self.rates.forward_s + self.rates.backward_s
    }

    /// Host memory of this process for its part of a copy of all parameters that the ranks of the node keep together.
    pub(super) fn wanted_copy_bytes(&self) -> u64 {
        let parts = self.units.iter();
        let parts = parts.map(|unit| copied_elems(unit.elems, self.local_ranks));
        (parts.sum::<usize>() * self.formats.master().param_bytes()) as u64
    }

    pub(super) fn set_compute(&mut self, settings: &RunSettings) {
        let gpu = self.hardware.gpu.as_ref().map(|_| GpuUse {
            lives: self.lives_in_gpu(),
            checkpointing: self.checkpointing,
            attention: self.attention,
            optimizer_device: self.optimizer_device,
            format: self.formats.largest(),
            tile_elems: self.swapper.tile_elems,
            groups: u64::from(self.ranks > 1)
                + u64::from(self.sequence_ranks > 1)
                + u64::from(self.copy_bytes > 0 && self.local_ranks > 1),
        });
        let group = (self.micro_batch_group, self.inputs_in);
        self.compute = ComputeMemory::new(settings, &self.units, group, gpu);
    }

    pub(super) fn set_rates(&mut self, settings: &RunSettings) {
        let hardware = &self.hardware;
        let ranks = self.swapper.local().len() as f64;
        // The processes of a node share its cores. State that is not divided is updated by all of them.
        let copies = f64::from(self.local_ranks) / f64::from(self.swapper.ranks);
        self.exchange = SequenceExchange::new(settings, self.checkpointing);
        let times = self.times(settings);
        let params = self.params_count as f64 * (1.0 - self.gpu_fraction());
        let cpu_s = params * copies / hardware.update_params_per_s.value;
        let (mut update_s, mut bus_s) = (cpu_s, 0.0);
        // Block inputs of all groups, and the node's copy as often as it is used.
        let away_bytes = (self.compute.away_bytes + self.compute.on_drives_bytes)
            * self.micro_batches as u64
            / self.micro_batch_group as u64;
        let further = self.further_gathers();
        let again_bytes = |bytes: u64| (bytes as f64 * further) as u64;
        if self.lives_in_gpu() {
            // No tile crosses the bus, and an update in the GPU's own memory takes some milliseconds.
            update_s = 0.0;
            self.bus = BusBytes::new(&TileSums::default(), 0, 0.0, away_bytes)
                .with_copy(self.copy_bytes)
                .with_gathers(again_bytes(self.copy_bytes));
            if let Some(gpu) = &hardware.gpu {
                bus_s = self.bus.s(gpu.bus_bytes_per_s.value);
            }
        } else if let Some(gpu) = &hardware.gpu {
            let bus_bytes_per_s = gpu.bus_bytes_per_s.value;
            let tiles = self.tile_sums().without(&self.gpu_tiles);
            let streamed_s = tiles.streamed_s(bus_bytes_per_s);
            let threads = (hardware.cores as usize / self.local_ranks as usize).max(1);
            let (both_s, share) =
                updaters::update_s(self.optimizer_device, threads, cpu_s, streamed_s);
            let again_bytes = match self.copy_bytes {
                0 => again_bytes(tiles.param_bytes),
                copy_bytes => again_bytes(copy_bytes),
            };
            self.bus = BusBytes::new(&tiles, self.gathers(), share, away_bytes)
                .with_copy(self.copy_bytes)
                .with_gathers(again_bytes)
                .with_copy(self.direction_bytes(settings))
                .with_commits(self.committed_from_gpu());
            bus_s = self.bus.s(bus_bytes_per_s);
            update_s = both_s;
        }
        let network_bytes = self.network_bytes_of() + self.exchanged_network_bytes();
        let [beside_updates_s, after_s] = self.beside_updates(times.forward_s, times.backward_s);
        let tflops = match self.hardware.tflops.source {
            FigureSource::Assumed => self.operations.sum() / times.sum() / 1e12,
            _ => self.hardware.tflops.value,
        };
        let directions = PlannedDirections::new(settings, &self.units, tflops);
        self.directions = directions;
        let network_bytes = network_bytes
            + directions.map_or(0, |directions| {
                let elsewhere = u64::from(self.ranks - self.local_ranks);
                elsewhere * directions.gathered_bytes / u64::from(self.ranks)
            });
        self.rates = StepRates {
            read_bytes_per_s: hardware.read_bytes_per_s.value,
            write_bytes_per_s: hardware.write_bytes_per_s.value,
            staging_bytes: (self.memory.staging_bytes() as f64 * ranks)
                + (self.memory.scratch_slot_bytes() * u64::from(self.local_ranks)) as f64,
            forward_s: beside_updates_s,
            // Directions wait for the norm of all gradients.
            backward_s: after_s + directions.map_or(0.0, |directions| directions.s),
            update_s,
            bus_s,
            network_s: network_bytes as f64 / hardware.network_bytes_per_s.value,
        };
        self.network_bytes = network_bytes;
        self.attention_s = times.attention_s;
        self.fp8_note = self.fp8_note(settings);
        if self.hardware.tflops.source == FigureSource::Assumed {
            self.hardware.tflops.value = self.operations.sum() / times.sum() / 1e12;
        }
        self.bound = swapper::bound(self.swapper.schedule, &self.node_bytes, &self.rates);
    }

    /// Time of forward and backward: estimated from the rates of kernels, or at the known rate of all operations.
    fn times(&self, settings: &RunSettings) -> Times {
        let train = &settings.train;
        let estimated = self.times_with(settings, train.deterministic, train.matmuls);
        let tflops = &self.hardware.tflops;
        match tflops.source {
            FigureSource::Assumed => estimated,
            FigureSource::Given | FigureSource::Measured | FigureSource::Described => {
                estimated.scaled_to(self.operations.sum() / (tflops.value * 1e12))
            }
        }
    }

    /// What products in 8 bits change, from the rates of kernels.
    fn fp8_note(&self, settings: &RunSettings) -> Option<String> {
        let train = &settings.train;
        let time = |matmuls| {
            self.times_with(settings, train.deterministic, matmuls)
                .sum()
        };
        if train.matmuls != Matmuls::Fp8 {
            return None;
        }
        let change = time(Matmuls::Fp8) / time(Matmuls::InDtype) - 1.0;
        let change = match change {
            ..0.0 => format!("{:.0} % less", -100.0 * change),
            // The matrices are too small for their conversion.
            _ => format!("{:.0} % more", 100.0 * change),
        };
        Some(format!(
            "products of blocks in 8 bits: computing takes about {change} time, and their factors are rounded to 3 or 2 bits of mantissa"
        ))
    }

    /// Kernels that compute most of the attention: torch's if documents are short.
    pub(super) fn attention_used(&self, settings: &RunSettings) -> AttentionKernel {
        let length = operations::usual_length(settings, &self.documents);
        match self.documents.is_empty() || length >= LONG_DOCUMENT_TOKENS as f64 {
            true => self.attention,
            false => AttentionKernel::Torch,
        }
    }

    /// The same with other settings, from the rates of kernels.
    pub(super) fn times_with(
        &self,
        settings: &RunSettings,
        deterministic: bool,
        matmuls: Matmuls,
    ) -> Times {
        self.times_of(settings, self.checkpointing, deterministic, matmuls)
    }

    /// Time of forward and backward from the rates of kernels if nothing were computed again.
    pub(super) fn least_s(&self, settings: &RunSettings) -> f64 {
        let kept = ActivationCheckpointing::Matmuls.into();
        let train = &settings.train;
        let times = self.times_of(settings, kept, train.deterministic, train.matmuls);
        times.sum()
    }

    fn times_of(
        &self,
        settings: &RunSettings,
        checkpointing: Checkpointing,
        deterministic: bool,
        matmuls: Matmuls,
    ) -> Times {
        let how = Computing {
            checkpointing,
            attention: self.attention_used(settings),
            deterministic,
            matmuls,
            products_tflops: self.hardware.products_tflops,
        };
        let gpu = self.hardware.gpu.as_ref();
        let model = (&self.units[..], self.params_count);
        let times = operations::times(settings, model, &self.documents, gpu, how);
        let exchange = self.exchange;
        Times {
            forward_s: times.forward_s + self.exchange_s(exchange.forward_bytes),
            backward_s: times.backward_s + self.exchange_s(exchange.backward_bytes),
            ..times
        }
    }

    /// Gathers of a unit's tiles over all ranks in a step: in forward, and in stage 3 again in backward unless the node
    /// keeps a copy.
    fn gathers(&self) -> u64 {
        let again = self.stage.divides_parameters() && self.copy_bytes == 0;
        1 + u64::from(again)
    }

    /// Bytes of matrices that go to the GPU to be made orthogonal, and come back as directions.
    fn direction_bytes(&self, settings: &RunSettings) -> u64 {
        let own = (1.0 - self.gpu_fraction()) / f64::from(self.swapper.ranks);
        let elem_bytes = self.formats.master().param_bytes();
        directions(settings, &self.units).map_or(0, |all| all.bus_bytes(own, elem_bytes))
    }

    /// Bytes that a node sends to others in a step. Each shard of parameters reaches every other node once for each gather, and
    /// each shard of gradients crosses once on its way to its sum.
    fn network_bytes_of(&self) -> u64 {
        let own = self.tile_sums();
        if !self.stage.divides_state() {
            // Every process holds all gradients and needs all sums: they are reduced, then gathered.
            let nodes = u64::from(self.nodes());
            return 2 * own.grad_bytes * (nodes - 1) / nodes;
        }
        let elsewhere = u64::from(self.ranks - self.local_ranks);
        let again_bytes = match self.copy_bytes {
            0 => (own.param_bytes as f64 * self.further_gathers()) as u64,
            _ => 0,
        };
        elsewhere * (self.gathers() * own.param_bytes + again_bytes + own.grad_bytes)
    }

    /// Sums over this process's tiles, wherever they are.
    pub(super) fn tile_sums(&self) -> TileSums {
        self.sums_of(0..self.units.len())
    }

    /// Sums over the tiles of `units`.
    pub(super) fn sums_of(&self, units: impl IntoIterator<Item = usize>) -> TileSums {
        let memory = &self.memory;
        let mut sums = TileSums::default();
        for unit in units {
            let count = self.ranges_of(unit);
            sums.param_bytes += count * memory.param_slot_bytes;
            sums.state_bytes += self.state_bytes[unit];
            sums.grad_bytes += count * memory.grad_slot_bytes;
        }
        sums
    }
}
