//! Chooses the settings that the configuration leaves open, in an order in which each choice has what it
//! depends on.

use offload_support::units::ApproxBytes;
use swapper::{ScratchSettings, Staging, StepRates, SwapperError, SwapperSettings};

use super::figures::Seconds;
use super::tiles::swapper_settings;
use super::{
    FigureSource, GpuHardware, Hardware, InputsIn, Plan, PlanError, Problem, ProblemKind,
    STAGING_LEAST,
};
use crate::computation::{
    ActivationCheckpointing, AttentionKernel, Checkpointing, can_keep, cudnn_refusal,
};
use crate::config::{
    ActivationsChoice, AttentionChoice, Fraction, GradientsChoice, OptimizerDevice,
    ResidentFraction, RunSettings, ShardChoice, Tier,
};
use training_state::plan::choose::{self, STAGING_BYTES_ASSUMED, Tiles};
use training_state::plan::node_copy::NoNodeCopy;

/// Fraction of GPU memory that choices leave unused, for fragmentation and the needs of kernels.
const GPU_MARGIN_SHARE: f64 = 0.1;

/// Fraction by which another place for the update must shorten the step, since it takes GPU time that is not
/// counted.
const UPDATE_GAIN_MIN: f64 = 0.02;

/// Fraction by which a smaller group of micro-batches must shorten the step, since each group waits for its first weights.
const GROUP_GAIN_MIN: f64 = 0.02;

/// Key of the ranks that divide 16-bit parameters.
const SHARD: &str = "offload.shard";

/// Key of the place of block inputs.
const ACTIVATIONS: &str = "offload.activations";

/// Keys of what [`Plan::choose_tiles_in_host`] chooses.
const HOST_CHOICES: [&str; 4] = [
    "offload.gradients",
    "offload.resident_fraction",
    "offload.commit_every",
    "offload.staging_bytes",
];

/// Key of the micro-batches that are processed together.
const GROUP: &str = "train.micro_batch_group";

/// Setting chosen by the plan.
#[derive(Clone, Debug, PartialEq, serde::Serialize)]
pub struct Choice {
    /// Path of the setting.
    pub key: &'static str,
    /// Value in the form of the configuration file.
    pub value: String,
    pub why: String,
}

impl Plan {
    /// Makes every choice. `staging` is the value of the configuration. Block inputs are sent to drives only if no plan fits
    /// without that: it wears the drives, and its only gain is memory.
    pub(super) fn chosen(
        mut self,
        settings: &RunSettings,
        staging: Staging,
    ) -> Result<Self, PlanError> {
        let without = self.clone().chosen_copy(settings, staging)?;
        let may_choose = settings.placement.has_store()
            && settings.offload.activations == ActivationsChoice::Auto;
        if !may_choose || without.fits(settings) {
            return Ok(without);
        }
        self.may_choose_drives = true;
        let drives = self.chosen_copy(settings, staging)?;
        Ok(match drives.has_store_room(settings) {
            true => drives,
            false => without,
        })
    }

    /// Makes every choice. With several nodes, each keeps a copy of the parameters if it has room for it and a step is not longer
    /// for it.
    fn chosen_copy(mut self, settings: &RunSettings, staging: Staging) -> Result<Self, PlanError> {
        let keeps = settings.offload.shard == ShardChoice::Auto
            && settings.placement.stage.divides_parameters()
            && self.ranks > self.local_ranks;
        let mut kept = self.clone();
        self.choose(settings, staging)?;
        if !keeps {
            return Ok(self);
        }
        kept.copy_bytes = kept.wanted_copy_bytes();
        kept.choose(settings, staging)?;
        let fits_gpu = |gpu: &GpuHardware| kept.gpu_bytes() <= gpu.memory_bytes;
        let why = if kept.host_bytes() > kept.most_host_bytes(settings) {
            NoNodeCopy::HostMemory {
                node_bytes: kept.node_copy_bytes(),
            }
            .to_string()
        } else if !kept.hardware.gpu.as_ref().is_none_or(fits_gpu) {
            "GPU memory has no room for a second group of ranks, which would gather a node's copy"
                .to_owned()
        } else if kept.bound.s > self.bound.s {
            format!(
                "a copy of all parameters on each node takes host memory from tiles, with which a step takes {} instead of {}",
                Seconds(self.bound.s),
                Seconds(kept.bound.s)
            )
        } else {
            return Ok(kept);
        };
        self.choose_no_copy(why);
        Ok(self)
    }

    /// Records why the plan keeps no copy of the parameters on each node.
    pub(crate) fn choose_no_copy(&mut self, why: String) {
        self.chose(SHARD, "all".to_owned(), why);
    }

    /// Returns why each node keeps no copy of the parameters; empty if it keeps one.
    pub(crate) fn why_no_copy(&self) -> &str {
        if self.copy_bytes > 0 {
            return "";
        }
        let choice = self.choices.iter().find(|choice| choice.key == SHARD);
        choice.map_or(SHARD, |choice| &choice.why)
    }

    /// Makes every choice for a node with or without a copy of the parameters: with all micro-batches together, and with smaller
    /// groups if a step is shorter with them. They are halved, so there are few plans to make.
    fn choose(&mut self, settings: &RunSettings, staging: Staging) -> Result<(), PlanError> {
        let start = self.clone();
        self.choose_in_group(settings, staging)?;
        let all = self.micro_batches;
        let is_open = settings.train.micro_batch_group.is_none() && all > 1;
        if !is_open || self.hardware.gpu.is_none() {
            return Ok(());
        }
        let ungrouped = self.clone();
        let mut size = all;
        while size > 1 {
            size = size.div_ceil(2);
            let mut smaller = start.clone();
            smaller.micro_batch_group = size;
            smaller.choose_in_group(settings, staging)?;
            if smaller.is_better(self, settings) {
                *self = smaller;
            }
        }
        let why = self.why_group(&ungrouped, settings);
        self.chose(GROUP, self.micro_batch_group.to_string(), why);
        Ok(())
    }

    /// Whether this group of micro-batches is better than the larger one of `other`: it fits and the other does not, or a step
    /// is shorter.
    pub(super) fn is_better(&self, other: &Self, settings: &RunSettings) -> bool {
        match (self.fits(settings), other.fits(settings)) {
            (true, false) => true,
            (false, true) => false,
            (true, true) => {
                self.judged_s(settings) < other.judged_s(settings) * (1.0 - GROUP_GAIN_MIN)
            }
            (false, false) => self.gpu_bytes() < other.gpu_bytes(),
        }
    }

    /// Whether the plan fits the memory that choices may use, and the store that the run has already.
    fn fits(&self, settings: &RunSettings) -> bool {
        self.fits_gpu()
            && self.host_bytes() <= self.most_host_bytes(settings)
            && self.has_store_room(settings)
    }

    /// Whether the plan fits the GPU memory that choices may use.
    fn fits_gpu(&self) -> bool {
        let gpu = self.hardware.gpu.as_ref();
        gpu.is_none_or(|gpu| self.gpu_bytes() <= most_of(gpu))
    }

    /// The bound of a step from the rates of kernels. A known rate of all operations does not show what is recomputed, and is taken for that of a step
    /// in which nothing is.
    pub(super) fn judged_s(&self, settings: &RunSettings) -> f64 {
        let train = &settings.train;
        let times = self.times_with(settings, train.deterministic, train.matmuls);
        let tflops = &self.hardware.tflops;
        let factor = match tflops.source {
            FigureSource::Assumed => 1.0,
            _ => self.operations.sum() / (tflops.value * 1e12) / self.least_s(settings),
        };
        let [forward_s, backward_s] = [times.forward_s, times.backward_s].map(|s| s * factor);
        let [forward_s, backward_s] = self.beside_updates(forward_s, backward_s);
        let rates = StepRates {
            forward_s,
            backward_s,
            ..self.rates
        };
        swapper::bound(self.swapper.schedule, &self.node_bytes, &rates).s
    }

    /// Says why this group of micro-batches was chosen; `ungrouped` is the plan with all of them.
    fn why_group(&self, ungrouped: &Self, settings: &RunSettings) -> String {
        if self.groups() == 1 {
            return "all together read each block's parameters once; with smaller groups a step is not shorter".to_owned();
        }
        let mut why = format!(
            "in {} groups a step takes {} from the rates of kernels, and {} with all {} micro-batches together, because",
            self.groups(),
            Seconds(self.judged_s(settings)),
            Seconds(ungrouped.judged_s(settings)),
            self.micro_batches
        );
        why += match (self.inputs_in, ungrouped.inputs_in) {
            (InputsIn::Place, InputsIn::Host | InputsIn::Drives) => " block inputs stay on the GPU",
            (InputsIn::Host, InputsIn::Drives) => " block inputs stay in host memory",
            _ if self.checkpointing != ungrouped.checkpointing => " less is recomputed",
            _ => " activations take less memory",
        };
        let read_bytes = self.node_bytes.read_bytes() - ungrouped.node_bytes.read_bytes();
        let up_bytes = self.bus.up_bytes.saturating_sub(ungrouped.bus.up_bytes);
        for (bytes, what) in [
            (up_bytes, "cross the bus"),
            (read_bytes as u64, "are read from drives"),
        ] {
            if bytes > 0 {
                why += &format!("; {} more {what}", ApproxBytes(bytes));
            }
        }
        why
    }

    /// Makes every choice but the size of a group of micro-batches.
    fn choose_in_group(
        &mut self,
        settings: &RunSettings,
        staging: Staging,
    ) -> Result<(), PlanError> {
        self.choose_attention(settings);
        self.refresh(settings)?;
        self.choose_update(settings);
        self.choose_activations(settings)?;
        self.choose_tiles_in_host(settings, staging)?;
        self.refresh(settings)?;
        self.choose_update_and_kept(settings);
        if settings.placement.has_store() {
            // What is kept need not be computed again: the shorter step needs more staging.
            self.choose_tiles_in_host(settings, staging)?;
            self.refresh(settings)?;
        }
        self.choose_gpu_units(settings, staging)
    }

    /// Chooses what stays in host memory and what passes through it, and the interval of commits. A second call chooses all of that again.
    pub(super) fn choose_tiles_in_host(
        &mut self,
        settings: &RunSettings,
        staging: Staging,
    ) -> Result<(), PlanError> {
        let start = swapper_settings(settings, &self.units, &self.formats);
        self.swapper = SwapperSettings {
            param_fraction: start.param_fraction,
            state_fraction: start.state_fraction,
            grad_fraction: start.grad_fraction,
            commit_every: start.commit_every,
            staging: STAGING_LEAST,
            ..self.swapper.clone()
        };
        for key in HOST_CHOICES {
            self.choices.retain(|choice| choice.key != key);
        }
        self.refresh(settings)?;
        self.choose_gradients(settings)?;
        self.choose_residents(settings)?;
        self.choose_commits(settings)?;
        match settings.offload.staging_bytes {
            Some(_) => self.swapper.staging = staging,
            None => self.choose_staging(settings)?,
        }
        Ok(())
    }

    /// Host memory that choices may give to this process: its part of the node's memory.
    fn most_host_bytes(&self, settings: &RunSettings) -> u64 {
        let free = self
            .hardware
            .host_memory_bytes
            .map_or(u64::MAX, choose::without_host_margin);
        let budget = settings.offload.host_memory_bytes.unwrap_or(u64::MAX);
        // The first rank takes the most.
        free.min(budget) / u64::from(self.local_ranks)
    }

    /// Host memory of this process for choices still to be made: all without everything already counted except staging.
    fn left_bytes(&self, settings: &RunSettings) -> u64 {
        let taken = self.host_bytes() - self.memory.staging_bytes();
        self.most_host_bytes(settings).saturating_sub(taken)
    }

    /// Chooses the place of the update for what blocks keep now.
    pub(super) fn choose_update(&mut self, settings: &RunSettings) {
        self.choose_update_with(settings, |plan| plan.set_compute(settings));
    }

    /// Chooses the place of the update, and what blocks keep beside it. What a place gains depends on what is computed again, and what is kept on the GPU
    /// memory that an update there takes.
    fn choose_update_and_kept(&mut self, settings: &RunSettings) {
        self.choose_update_with(settings, |plan| plan.choose_checkpointing(settings));
    }

    /// Chooses the place of the update; `adapt` chooses what depends on it.
    fn choose_update_with(&mut self, settings: &RunSettings, adapt: impl Fn(&mut Self)) {
        let wanted = settings.offload.optimizer_device;
        let in_gpu_memory = self.lives_in_gpu();
        let mut lacks_room = false;
        self.optimizer_device = match (self.hardware.gpu.is_some(), wanted) {
            // An impossible combination is reported later as a problem.
            (false, _) => OptimizerDevice::Cpu,
            (true, _) if in_gpu_memory => OptimizerDevice::Gpu,
            (true, OptimizerDevice::Auto) => {
                let mut best = (OptimizerDevice::Cpu, f64::INFINITY);
                for place in [
                    OptimizerDevice::Cpu,
                    OptimizerDevice::Gpu,
                    OptimizerDevice::Shared,
                ] {
                    self.optimizer_device = place;
                    adapt(self);
                    self.set_rates(settings);
                    let has_room = place == OptimizerDevice::Cpu || self.fits_gpu();
                    lacks_room |= !has_room;
                    if has_room && self.bound.s < best.1 * (1.0 - UPDATE_GAIN_MIN) {
                        best = (place, self.bound.s);
                    }
                }
                best.0
            }
            (true, place) => place,
        };
        adapt(self);
        self.set_rates(settings);
        if wanted == OptimizerDevice::Auto {
            let why = match (
                self.hardware.gpu.is_some(),
                in_gpu_memory,
                self.optimizer_device,
            ) {
                (false, ..) => "there is no GPU",
                (_, true, _) => "the state lives in GPU memory",
                (.., OptimizerDevice::Cpu) if lacks_room => {
                    "GPU memory has no room for an update there"
                }
                (.., OptimizerDevice::Cpu) => {
                    "a step would take as long with the GPU updating, alone or beside the CPU"
                }
                (.., OptimizerDevice::Gpu) => "a step is shorter than with the CPU updating",
                _ => "a step is shorter than with the CPU or the GPU updating alone",
            };
            self.chose(
                "offload.optimizer_device",
                self.optimizer_device.name().to_owned(),
                why,
            );
        }
    }

    /// Keeps block inputs where the block computes if they fit there with the lowest level of activation checkpointing, otherwise
    /// in host memory, and on devices if they fit nowhere else and no other plan fits.
    pub(super) fn choose_activations(&mut self, settings: &RunSettings) -> Result<(), PlanError> {
        self.checkpointing = given_checkpointing(settings).into();
        let wanted = settings.offload.activations;
        let gpu = self.hardware.gpu.clone();
        let host = match gpu {
            Some(_) => InputsIn::Host,
            None => InputsIn::Place,
        };
        self.keep_inputs_in(
            settings,
            match wanted {
                ActivationsChoice::Auto | ActivationsChoice::Gpu => InputsIn::Place,
                ActivationsChoice::Cpu => host,
                ActivationsChoice::Nvme => InputsIn::Drives,
            },
        )?;
        if wanted != ActivationsChoice::Auto {
            return Ok(());
        }
        if gpu.is_some_and(|gpu| self.gpu_bytes() > most_of(&gpu)) {
            self.keep_inputs_in(settings, InputsIn::Host)?;
            let why = "GPU memory has no room for the block inputs";
            self.chose(ACTIVATIONS, "cpu".to_owned(), why);
        }
        // What is chosen later can be on devices, too.
        let later_bytes = match settings.offload.gradients {
            GradientsChoice::Auto => self.host_grad_bytes(),
            GradientsChoice::Cpu | GradientsChoice::Nvme => 0,
        };
        let is_in_host_memory = self.inputs_in == host;
        let has_no_room = self.host_bytes() - later_bytes > self.most_host_bytes(settings);
        let has_drives =
            self.may_choose_drives && settings.placement.has_store() && self.input_area().is_ok();
        if is_in_host_memory && has_no_room && has_drives {
            self.keep_inputs_in(settings, InputsIn::Drives)?;
            let why = match self.hardware.gpu {
                Some(_) => "neither GPU memory nor host memory has room for the block inputs",
                None => "host memory has no room for the block inputs",
            };
            self.chose(ACTIVATIONS, "nvme".to_owned(), why);
        }
        Ok(())
    }

    /// The area on devices for block inputs of all micro-batches that are processed together.
    fn input_area(&self) -> Result<ScratchSettings, SwapperError> {
        let inputs = (self.units.len() - 2) * self.micro_batch_group;
        ScratchSettings::for_tensors(&vec![self.input_bytes; inputs])
    }

    /// Keeps block inputs in `place`.
    fn keep_inputs_in(&mut self, settings: &RunSettings, place: InputsIn) -> Result<(), PlanError> {
        self.choices.retain(|choice| choice.key != ACTIVATIONS);
        self.inputs_in = place;
        self.swapper.scratch = match place {
            InputsIn::Place | InputsIn::Host => ScratchSettings::default(),
            InputsIn::Drives => {
                let area = self.input_area();
                area.map_err(|error| {
                    PlanError::Refused(Problem::new(
                        ProblemKind::Settings,
                        format!("{ACTIVATIONS} is \"nvme\", but the drives cannot hold so large block inputs: {error}"),
                        format!("lower {GROUP}, train_micro_batch_size_per_gpu or train.seq_len"),
                    ))
                })?
            }
        };
        Ok(self.refresh(settings)?)
    }

    /// Takes cuDNN's attention where it can be used. If it was asked for elsewhere, that is reported later as a problem.
    fn choose_attention(&mut self, settings: &RunSettings) {
        self.attention = AttentionKernel::Torch;
        if self.hardware.gpu.is_none() {
            return;
        }
        let refusal = why_no_cudnn(settings, &self.hardware);
        let wanted = settings.train.attention;
        if refusal.is_none() && wanted != AttentionChoice::Torch {
            self.attention = AttentionKernel::Cudnn;
        }
        if wanted == AttentionChoice::Auto {
            let why = match refusal {
                None => "it is the fastest here".to_owned(),
                Some(why) => format!("cuDNN's attention cannot be used: {why}"),
            };
            let name = attention_kernel_name(self.attention);
            self.chose("train.attention", name.to_owned(), why);
        }
    }

    /// Keeps as much as fits: keeping everything saves a fifth of the computing time.
    pub(super) fn choose_checkpointing(&mut self, settings: &RunSettings) {
        self.checkpointing = given_checkpointing(settings).into();
        let Some(gpu) = self.hardware.gpu.clone() else {
            // The processor always recomputes.
            self.checkpointing = Checkpointing::default();
            return;
        };
        let written_out = self.mlp_chunks == 1 && can_keep(&settings.model, &settings.dropout);
        if !written_out {
            self.checkpointing = Checkpointing::default();
            self.set_compute(settings);
            self.chose(
                "train.activation_checkpointing",
                checkpointing_name(self.checkpointing.level).to_owned(),
                "blocks of this form, or with the MLP in chunks, have no explicit backward and are always recomputed",
            );
            return;
        }
        self.set_compute(settings);
        if settings.train.activation_checkpointing.is_some() {
            return;
        }
        let most_bytes = most_of(&gpu);
        for level in [
            ActivationCheckpointing::Matmuls,
            ActivationCheckpointing::Attention,
            ActivationCheckpointing::Full,
        ] {
            self.checkpointing = level.into();
            self.set_compute(settings);
            if self.gpu_bytes() <= most_bytes {
                break;
            }
        }
        self.keep_more_of_blocks(settings, most_bytes);
        let mut why = "it keeps the most for which GPU memory has room, so that less is recomputed"
            .to_owned();
        let Checkpointing { level, more_blocks } = self.checkpointing;
        if more_blocks > 0 {
            let (more, blocks) = (checkpointing_name(level.more()), self.units.len() - 2);
            why += &format!(", and {more_blocks} of {blocks} blocks keep what \"{more}\" does");
        } else if level == ActivationCheckpointing::Full {
            why = "GPU memory has no room to keep what would not be recomputed then".to_owned();
        }
        self.chose(
            "train.activation_checkpointing",
            checkpointing_name(level).to_owned(),
            why,
        );
    }

    /// Lets as many blocks as GPU memory has room for keep one level more than the others.
    fn keep_more_of_blocks(&mut self, settings: &RunSettings, most_bytes: u64) {
        let left_bytes = most_bytes.saturating_sub(self.gpu_bytes());
        let at_least = self.checkpointing;
        let kept_bytes = |plan: &Self| plan.compute.kept_bytes;
        let without_bytes = kept_bytes(self);
        self.checkpointing.more_blocks = 1;
        self.set_compute(settings);
        let more_bytes = kept_bytes(self) - without_bytes;
        self.checkpointing = Checkpointing {
            // At the last level, a block keeps no more.
            more_blocks: left_bytes.checked_div(more_bytes).unwrap_or(0) as usize,
            ..at_least
        };
        self.set_compute(settings);
    }

    /// Keeps gradients in host memory if all fit. Otherwise keeps as many as leave room for staging, or as
    /// take half of the remaining memory.
    fn choose_gradients(&mut self, settings: &RunSettings) -> Result<(), PlanError> {
        if !settings.placement.has_store() || settings.offload.gradients != GradientsChoice::Auto {
            return Ok(());
        }
        let all_bytes = self.memory.grad_bytes();
        let least = self.memory.staging_bytes();
        self.swapper.grad_fraction = Fraction::NONE.get();
        self.refresh(settings)?;
        let left_bytes = self.left_bytes(settings);
        if all_bytes + least <= left_bytes {
            self.swapper.grad_fraction = Fraction::ALL.get();
            return Ok(self.refresh(settings)?);
        }
        let staging_bytes = match settings.offload.staging_bytes {
            Some(bytes) => bytes,
            None => self.staging_wanted(settings).min(left_bytes / 2),
        };
        let grads = Tiles {
            count: self.ranges_on_host(),
            slot_bytes: self.memory.grad_slot_bytes,
        };
        let [stay, _] =
            choose::resident_counts([grads, Tiles::default()], left_bytes, staging_bytes);
        self.swapper.grad_fraction = stay as f64 / grads.count.max(1) as f64;
        self.refresh(settings)?;
        let value = match stay {
            0 => "nvme".to_owned(),
            _ => format!(
                "nvme for {:.2} of the gradients",
                1.0 - self.swapper.grad_fraction
            ),
        };
        self.chose(
            "offload.gradients",
            value,
            "host memory has no room for all of them; each costs two more bytes read and two more written in a step",
        );
        Ok(())
    }

    fn choose_residents(&mut self, settings: &RunSettings) -> Result<(), PlanError> {
        if !settings.placement.has_store()
            || settings.placement.resident_fraction != ResidentFraction::Auto
        {
            return Ok(());
        }
        let left_bytes = self.left_bytes(settings);
        let staging_bytes = match settings.offload.staging_bytes {
            Some(bytes) => bytes,
            None => self.staging_wanted(settings),
        };
        let ranges = self.ranges_on_host();
        let tiles = |tier: Tier, slot_bytes: u64| match tier {
            Tier::Nvme => Tiles {
                count: ranges,
                slot_bytes,
            },
            Tier::None | Tier::Cpu => Tiles::default(),
        };
        let placement = &settings.placement;
        let kinds = [
            tiles(placement.param, self.memory.param_slot_bytes),
            tiles(placement.optimizer, self.memory.state_slot_bytes),
        ];
        let [params, states] = choose::resident_counts(kinds, left_bytes, staging_bytes);
        let fraction = |tier: Tier, count: u64| match tier {
            Tier::Nvme => count as f64 / ranges.max(1) as f64,
            Tier::None | Tier::Cpu => Fraction::ALL.get(),
        };
        self.swapper.param_fraction = fraction(placement.param, params);
        self.swapper.state_fraction = fraction(placement.optimizer, states);
        self.refresh(settings)?;
        let value = format!(
            "{:.2} of the parameters, {:.2} of the state",
            self.swapper.param_fraction, self.swapper.state_fraction
        );
        self.chose(
            "offload.resident_fraction",
            value,
            "the most for which host memory has room; parameters first, because they are read twice in a step",
        );
        Ok(())
    }

    fn choose_commits(&mut self, settings: &RunSettings) -> Result<(), PlanError> {
        if settings.offload.commit_every.is_some() || !settings.placement.has_store() {
            return Ok(());
        }
        self.swapper.commit_every = 0;
        self.refresh(settings)?;
        let ranks = self.swapper.local().len() as u64;
        let in_gpu_bytes = self.gpu_tiles.param_bytes + self.gpu_tiles.state_bytes;
        let resident_bytes = (self.memory.resident_bytes() + in_gpu_bytes) * ranks;
        let every = choose::commit_every(
            self.swapper.schedule,
            &self.node_bytes,
            resident_bytes,
            &self.rates,
        );
        self.swapper.commit_every = every;
        self.refresh(settings)?;
        let why = if resident_bytes == 0 {
            "every tile is written in every step in any case"
        } else {
            "the fewest steps for which the extra writes of resident tiles stay below 5 % of a step"
        };
        self.chose("offload.commit_every", every.to_string(), why);
        Ok(())
    }

    fn staging_wanted(&self, settings: &RunSettings) -> u64 {
        let ranks = self.swapper.local().len() as u32;
        let memory = &self.memory;
        let round_bytes = 2 * memory.param_slot_bytes + memory.state_slot_bytes;
        let iodepth = settings.offload.iodepth;
        let node =
            choose::staging_bytes(&self.node_bytes, &self.rates, iodepth * ranks, round_bytes);
        let assumed = !self.hardware.rates_known()
            || self.hardware.tflops.source == FigureSource::Assumed
            || self.swapper.schedule == swapper::Schedule::Immediate;
        let ranks = u64::from(ranks);
        let wanted = node / ranks;
        if assumed {
            wanted.max(STAGING_BYTES_ASSUMED / ranks)
        } else {
            wanted
        }
    }

    fn choose_staging(&mut self, settings: &RunSettings) -> Result<(), PlanError> {
        if !settings.placement.has_store() {
            return Ok(());
        }
        let wanted = self.staging_wanted(settings);
        let least = self.memory.staging_bytes();
        if least == 0 {
            return Ok(());
        }
        let bytes = wanted.min(self.left_bytes(settings)).max(least);
        self.swapper.staging = Staging::Bytes(bytes);
        let why = if bytes < wanted {
            "the rest of host memory; the step would be shorter with more"
        } else {
            "more would not shorten the step: something else then limits it"
        };
        // A small model uses less.
        let used = self.swapper.plan()?.staging_bytes();
        self.chose("offload.staging_bytes", used.to_string(), why);
        Ok(())
    }

    pub(super) fn chose(&mut self, key: &'static str, value: String, why: impl Into<String>) {
        self.choices.retain(|choice| choice.key != key);
        self.choices.push(Choice {
            key,
            value,
            why: why.into(),
        });
    }
}

/// Returns the configured number of micro-batches that are processed together, or all.
pub(super) fn given_group(settings: &RunSettings) -> usize {
    let all = settings.batch.micro_batches;
    settings
        .train
        .micro_batch_group
        .map_or(all, |size| size.min(all))
}

/// Returns the configured value, or the lowest.
fn given_checkpointing(settings: &RunSettings) -> ActivationCheckpointing {
    match settings.train.activation_checkpointing {
        None | Some(ActivationCheckpointing::Full) => ActivationCheckpointing::Full,
        Some(ActivationCheckpointing::Attention) => ActivationCheckpointing::Attention,
        Some(ActivationCheckpointing::Matmuls) => ActivationCheckpointing::Matmuls,
    }
}

/// Part of a GPU's memory that choices may use.
pub(super) fn most_of(gpu: &GpuHardware) -> u64 {
    (gpu.memory_bytes as f64 * (1.0 - GPU_MARGIN_SHARE)) as u64
}

/// Returns why a run cannot use cuDNN's attention; `None` if it can.
pub(super) fn why_no_cudnn(settings: &RunSettings, hardware: &Hardware) -> Option<String> {
    let Some(gpu) = &hardware.gpu else {
        return Some("there is no GPU".to_owned());
    };
    let (model, train) = (&settings.model, &settings.train);
    cudnn_refusal(model, &settings.dropout, settings.dtype, train.mlp_chunks)
        .or_else(|| gpu.no_cudnn.clone())
}

/// Name of the value in the configuration file.
pub fn attention_kernel_name(kernel: AttentionKernel) -> &'static str {
    match kernel {
        AttentionKernel::Cudnn => "cudnn",
        AttentionKernel::Torch => "torch",
    }
}

/// Name of the value in the configuration file.
pub fn checkpointing_name(checkpointing: ActivationCheckpointing) -> &'static str {
    match checkpointing {
        ActivationCheckpointing::Full => "full",
        ActivationCheckpointing::Attention => "attention",
        ActivationCheckpointing::Matmuls => "matmuls",
    }
}
