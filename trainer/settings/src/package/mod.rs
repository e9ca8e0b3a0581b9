//! The settings of the Python package, from DeepSpeed's file or a dict.

mod choices;
mod placement;
#[cfg(test)]
mod tests;

use std::path::{Path, PathBuf};

use serde::Serialize;
use serde_json::Value;
use training_state::learning_rate::LrSchedule;
use training_state::overflow::OverflowPolicy;

use self::choices::Choices;
use self::placement::{Placement, placement};
use crate::error::SettingsError;
use crate::parse::{ParsedSettings, parse};
use crate::reader::{Reader, Remarks};
use crate::resolve::batch::{Batch, Sizes, batch};
use crate::resolve::optimizer::optimizer;
use crate::resolve::precision::{is_on, scaling};
use crate::resolve::reports::{Monitor, monitor_of};
use crate::resolve::schedule::schedule;
use crate::resolve::{Faults, at_least, not_negative, value, word};
use crate::toml::{Bf16Toml, PackageToml, SchedulerToml};
use crate::values::{MuonSettings, OptimizerKind, OptimizerSettings, Tier};
use crate::{deepspeed, files, json};

/// Checked settings of a script that the package trains.
#[derive(Clone, Debug, Serialize)]
pub struct PackageSettings {
    /// Where the optimizer state is, and the parameters with it unless they stay.
    pub device: Tier,
    /// Whether the parameters stay where the model has them, whole on each rank.
    pub parameters_stay: bool,
    /// Directories of device files, without duplicates.
    pub nvme: Vec<PathBuf>,
    /// `None` if left out: what applies then depends on who calls.
    pub gradient_clipping: Option<f64>,
    /// Ranks that have parts of one sequence.
    pub sequence_parallel_size: u32,
    /// Samples of a step over all ranks and of a rank's micro-batch, where the file says so, and micro-batches.
    pub train_batch_size: Option<u64>,
    pub micro_batch: Option<u64>,
    pub micro_batches: Option<u64>,
    pub steps_per_print: Option<u64>,
    pub wall_clock_breakdown: bool,
    /// Whether the loader that `initialize` makes leaves a smaller last batch out.
    pub dataloader_drop_last: bool,
    /// PyTorch's name of the type that the file switches on.
    pub precision: Option<&'static str>,
    /// What happens to a step that overflows.
    pub overflow: OverflowPolicy,
    pub use_node_local_storage: bool,
    pub tensorboard: Option<Monitor>,
    pub csv_monitor: Option<Monitor>,
    /// Whether gradients of 16-bit parameters lie in tiles as fp32.
    pub fp32_gradients: bool,
    /// The optimizer, where the file has one.
    pub optimizer: Option<Optimizer>,
    /// The schedule as written, where the file has one: [`schedule_of`] resolves it.
    pub scheduler: Option<SchedulerToml>,
    pub run_dir: Option<PathBuf>,
    pub units: Vec<String>,
    pub unit_bytes_max: u64,
    pub optimizer_step: &'static str,
    pub resident_fraction: f64,
    /// `None` chooses by the host's memory.
    pub gradients: Option<&'static str>,
    pub activations: &'static str,
    /// Space on drives for inputs of blocks; 0 where the file has none.
    pub activations_bytes: u64,
    /// Numbers of the factors in products of Linear layers.
    pub matmuls: &'static str,
    /// Chunks of tokens in which a block's MLP is computed.
    pub mlp_chunks: u64,
    /// Chunks of tokens in which the head and the loss are computed.
    pub loss_chunks: u64,
    /// `None` chooses by what the GPU has free.
    pub gpu_resident_fraction: Option<f64>,
    pub shard: &'static str,
    pub moments: &'static str,
    pub master: &'static str,
    pub commit_every: u64,
    /// 0 chooses by the size of the state.
    pub staging_bytes: u64,
    /// `None` chooses by where the model computes.
    pub optimizer_device: Option<&'static str>,
    pub update_threads: Option<u64>,
    pub socket: Option<PathBuf>,
    pub program: Option<PathBuf>,
    pub compute_device: Option<String>,
    /// Keys of DeepSpeed without effect.
    pub without_effect: Vec<String>,
    /// Lines for the person who wrote the settings.
    pub said: Vec<String>,
}

/// An optimizer's parameters.
#[derive(Clone, Debug, Serialize)]
pub struct Optimizer {
    #[serde(rename = "type")]
    pub kind: OptimizerKind,
    pub lr: f64,
    pub betas: [f64; 2],
    pub eps: f64,
    pub weight_decay: f64,
    /// `Some` for Muon.
    pub muon: Option<MuonSettings>,
}

impl From<OptimizerSettings> for Optimizer {
    fn from(settings: OptimizerSettings) -> Self {
        Self {
            kind: settings.kind,
            lr: settings.lr,
            betas: settings.betas,
            eps: settings.eps,
            weight_decay: settings.weight_decay,
            muon: settings.muon,
        }
    }
}

/// Parses a file's text as DeepSpeed does. `path` is for messages.
///
/// # Errors
/// The text is not JSON, or not an object.
pub fn parse_text(text: &str, path: &Path) -> Result<Value, SettingsError> {
    let syntax = |message: String| SettingsError::Syntax {
        path: path.into(),
        format: "JSON",
        message,
    };
    let tree = json::parse(text).map_err(syntax)?;
    match tree.is_object() {
        true => Ok(tree),
        false => Err(syntax(
            "expected a JSON object, such as {\"train_batch_size\": 8}".into(),
        )),
    }
}

/// Reads the JSON file at `path`.
///
/// # Errors
/// The file cannot be read, or is not a JSON object.
pub fn read_json(path: &Path) -> Result<Value, SettingsError> {
    parse_text(
        &files::read_text(path, "the DeepSpeed configuration")?,
        path,
    )
}

/// Checks `tree`, whose keys are told about as those of `name`, for a run of `ranks` processes.
///
/// # Errors
/// All errors found, each with the key's path and what to do.
pub fn check(mut tree: Value, name: &str, ranks: u32) -> Result<PackageSettings, SettingsError> {
    let mut said = Remarks::default();
    let ignored = deepspeed::simplify(&mut tree, Reader::Package);
    deepspeed::note_ignored(&ignored, name, Reader::Package, &mut said);
    let has_optimizer = is_filled(&tree, "optimizer");
    let fraction = tree.pointer("/offloadd/resident_fraction");
    let is_auto = fraction.and_then(Value::as_str) == Some("auto");
    let ParsedSettings {
        config,
        mut faults,
        without_effect,
    } = parse::<PackageToml>(tree, Reader::Package, &mut said);
    if is_auto {
        // Elsewhere "auto" means the default, and this default is 0; in the trainer's file it means as much as fits.
        faults.push(value(
            "offloadd.resident_fraction",
            "\"auto\": the package does not choose it: give a number from 0 to 1, or leave it out for 0",
        ));
    }
    let lines = said.warnings.iter().map(|text| format!("warning: {text}"));
    let said = lines.chain(said.notes.iter().cloned()).collect();
    match resolve(&config, has_optimizer, ranks) {
        Ok(settings) => SettingsError::all(faults).map(|()| PackageSettings {
            without_effect,
            said,
            ..settings
        }),
        Err(more) => Err(SettingsError::with_more(faults, more)),
    }
}

fn is_filled(tree: &Value, key: &str) -> bool {
    tree.get(key)
        .and_then(Value::as_object)
        .is_some_and(|table| !table.is_empty())
}

/// Resolves the schedule of a script's optimizer whose learning rate is `lr`.
///
/// # Errors
/// The schedule is unknown, or its parameters contradict each other.
pub fn schedule_of(scheduler: &SchedulerToml, lr: f64) -> Result<LrSchedule, SettingsError> {
    schedule(scheduler, lr, None, &mut Vec::new())
}

fn resolve(
    config: &PackageToml,
    has_optimizer: bool,
    ranks: u32,
) -> Result<PackageSettings, Vec<SettingsError>> {
    let faults = &mut Faults::default();
    let own = &config.offloadd;
    let placement = faults.collect(placement(&config.zero_optimization, own, ranks));
    if let Some(clipping) = config.gradient_clipping {
        faults.collect(not_negative("gradient_clipping", clipping));
    }
    let batch = faults.collect(batch_of(config, ranks));
    let precision = faults.collect(precision(config));
    let optimizer = match has_optimizer {
        true => {
            let found = optimizer(
                &config.optimizer,
                &Bf16Toml::default(),
                Reader::Package,
                &mut Remarks::default(),
                faults,
            );
            found.map(Optimizer::from)
        }
        false => None,
    };
    let scheduler = config.scheduler.kind.is_some().then_some(&config.scheduler);
    if let Some(scheduler) = scheduler {
        let lr = optimizer.as_ref().map_or(0.0, |optimizer| optimizer.lr);
        faults.collect(schedule_of(scheduler, lr));
    }
    let tensorboard = faults.collect(monitor_of(&config.tensorboard, "tensorboard.job_name"));
    let csv_monitor = faults.collect(monitor_of(&config.csv_monitor, "csv_monitor.job_name"));
    let fp32_gradients = faults.collect(fp32_gradients(config));
    let steps_per_print = config.steps_per_print.map(|steps| steps.number());
    faults.collect(at_least("steps_per_print", steps_per_print.unwrap_or(1), 1));
    let choices = Choices::new(config, faults);
    let (
        Some(Placement {
            device,
            parameters_stay,
            nvme,
        }),
        Some((sequence_parallel_size, batch)),
        Some((precision, overflow)),
        Some(choices),
        true,
    ) = (placement, batch, precision, choices, faults.0.is_empty())
    else {
        return Err(std::mem::take(&mut faults.0));
    };
    Ok(PackageSettings {
        device,
        parameters_stay,
        nvme,
        gradient_clipping: config.gradient_clipping,
        sequence_parallel_size,
        train_batch_size: batch.map(|batch| {
            batch.micro_batch * batch.micro_batches * u64::from(ranks / sequence_parallel_size)
        }),
        micro_batch: batch.map(|batch| batch.micro_batch),
        micro_batches: batch.map_or(config.gradient_accumulation_steps, |batch| {
            Some(batch.micro_batches)
        }),
        steps_per_print,
        wall_clock_breakdown: config.wall_clock_breakdown.unwrap_or(false),
        dataloader_drop_last: config.dataloader_drop_last.unwrap_or(false),
        precision,
        overflow,
        use_node_local_storage: config.checkpoint.use_node_local_storage.unwrap_or(false),
        tensorboard: tensorboard.flatten(),
        csv_monitor: csv_monitor.flatten(),
        fp32_gradients: fp32_gradients.unwrap_or(true),
        optimizer,
        scheduler: scheduler.cloned(),
        run_dir: own.run_dir.clone(),
        units: own.units.clone().unwrap_or_default(),
        unit_bytes_max: choices.unit_bytes_max,
        optimizer_step: choices.optimizer_step,
        resident_fraction: choices.resident_fraction,
        gradients: choices.gradients,
        activations: choices.activations,
        activations_bytes: choices.activations_bytes,
        matmuls: choices.matmuls,
        mlp_chunks: own.mlp_chunks.unwrap_or(1),
        loss_chunks: own.loss_chunks.unwrap_or(1),
        gpu_resident_fraction: choices.gpu_resident_fraction,
        shard: choices.shard,
        moments: choices.moments,
        master: choices.master,
        commit_every: own.commit_every.unwrap_or(1),
        staging_bytes: choices.staging_bytes,
        optimizer_device: choices.optimizer_device,
        update_threads: own.update_threads,
        socket: own.socket.clone(),
        program: own.program.clone(),
        compute_device: own.compute_device.clone(),
        without_effect: Vec::new(),
        said: Vec::new(),
    })
}

/// Ranks that have parts of one sequence, which divide the number of ranks, and the sizes of the batch, for which they count once.
fn batch_of(config: &PackageToml, ranks: u32) -> Result<(u32, Option<Batch>), SettingsError> {
    let size = config.sequence_parallel_size.unwrap_or(1);
    let sequence_ranks = match u32::try_from(size) {
        Ok(size) if size > 0 && ranks.is_multiple_of(size) => size,
        _ => {
            return Err(value(
                "sequence_parallel_size",
                format!("{size}: it must be at least 1 and divide the number of ranks ({ranks})"),
            ));
        }
    };
    let sizes = Sizes {
        train: config.train_batch_size,
        micro: config.train_micro_batch_size_per_gpu,
        accumulated: config.gradient_accumulation_steps,
    };
    let groups = ranks / sequence_ranks;
    Ok((sequence_ranks, batch(sizes, Some(groups), sequence_ranks)?))
}

/// PyTorch's name of the type that is switched on, and what happens to a step that overflows.
fn precision(
    config: &PackageToml,
) -> Result<(Option<&'static str>, OverflowPolicy), SettingsError> {
    Ok(match is_on(&config.bf16, &config.fp16)? {
        (_, true) => (Some("float16"), scaling(&config.fp16)?),
        (bf16, _) => {
            let skips = bf16 && config.bf16.check_grad_overflow == Some(true);
            let policy = match skips {
                true => OverflowPolicy::Skips,
                false => OverflowPolicy::Stops,
            };
            (bf16.then_some("bfloat16"), policy)
        }
    })
}

/// `data_types.grad_accum_dtype`; without it, fp32 unless a step is known to have one backward pass.
fn fp32_gradients(config: &PackageToml) -> Result<bool, SettingsError> {
    match config.data_types.grad_accum_dtype.as_deref() {
        None => Ok(config.gradient_accumulation_steps != Some(1)),
        given => word(
            "data_types.grad_accum_dtype",
            given,
            &[("fp32", true), ("bf16", false), ("fp16", false)],
        ),
    }
}
