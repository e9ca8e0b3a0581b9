//! Checks values against their ranges and against each other, and fills in defaults.

mod batch;
mod data;
mod model;
mod optimizer;
mod placement;
mod precision;
mod reports;
mod schedule;

use std::path::PathBuf;

use swapper::{
    ENGINES, IODEPTH_DEFAULT, IODEPTH_MAX, IODEPTH_MIN, TILE_ELEMS_MAX, TILE_ELEMS_STEP,
};

use crate::compute::ActivationCheckpointing;

use super::toml::{ByteCount, ConfigToml};
use super::{
    ActivationsChoice, DataSettings, DeviceChoice, Durability, Fraction, GradientsChoice,
    OffloadSettings, OptimizerDevice, OptimizerStep, Placement, RunSettings, Said, SettingsError,
    TrainSettings, WrittenFor,
};

/// Longest sequence; a larger value is taken for a typing error.
const SEQ_LEN_MAX: u64 = 1 << 20;
/// The newest checkpoint, and the one before in case the newest is damaged.
const CHECKPOINTS_KEPT: u64 = 2;

const THREADS_MAX: u64 = 1024;
/// More chunks of an MLP than this cost time and hardly save memory.
const MLP_CHUNKS_MAX: u64 = 256;

/// Errors in the settings, collected to be reported together.
#[derive(Default)]
pub(super) struct Faults(Vec<SettingsError>);

impl Faults {
    /// Returns the value in `result`, or records the error and returns `None`.
    fn take<T>(&mut self, result: Result<T, SettingsError>) -> Option<T> {
        result.map_err(|fault| self.0.push(fault)).ok()
    }
}

/// Resolves a run.
///
/// # Errors
/// All errors found; of values that depend on each other only the first.
pub(super) fn resolve(
    config: ConfigToml,
    name: &str,
    ranks: Option<u32>,
    written_for: WrittenFor,
    mut said: Said,
) -> Result<RunSettings, Vec<SettingsError>> {
    let faults = &mut Faults::default();
    let train = &config.train;
    let steps = required(
        "train.steps",
        train.steps,
        "set the number of optimizer steps",
    );
    let steps = faults.take(steps);
    let seq_len = required(
        "train.seq_len",
        train.seq_len,
        "set the number of tokens in a sequence",
    );
    let seq_len = faults.take(seq_len.and_then(|seq_len| {
        within("train.seq_len", seq_len, 1, SEQ_LEN_MAX)?;
        Ok(seq_len)
    }));
    // Checks that depend on an invalid number use 1 in its place.
    let (steps_or_one, seq_len_or_one) = (steps.unwrap_or(1), seq_len.unwrap_or(1));
    let batch = faults.take(batch::batch(&config, seq_len_or_one, ranks));
    let optimizer = optimizer::optimizer(&config.optimizer, &mut said, faults);
    let lr = optimizer.as_ref().map_or(0.0, |optimizer| optimizer.lr);
    let lr = faults.take(schedule::schedule(
        &config,
        lr,
        // A run without steps has a schedule too, although nothing uses it.
        steps_or_one.max(1),
        written_for,
        &mut said,
    ));
    let placement = faults.take(placement::placement(
        &config.zero_optimization,
        &config.offload,
        &mut said.notes,
    ));
    let model = faults.take(model::model(&config.model, seq_len_or_one, &mut said.notes));
    let precision = faults.take(precision::precision(&config, model.as_ref(), &mut said));
    if let (Some(optimizer), Some(model)) = (&optimizer, &model) {
        optimizer::note_unmatched(&optimizer.decay, &model.config, &mut said.notes);
    }
    let gradient_clipping = config.gradient_clipping.unwrap_or(1.0);
    faults.take(not_negative("gradient_clipping", gradient_clipping));
    let data = faults.take(data::data(&config.data, steps_or_one));
    let all_ranks = batch.map_or(1, |(_, ranks)| ranks);
    let train = resolve_train(
        &config,
        name,
        steps_or_one,
        all_ranks,
        data.as_ref(),
        faults,
    );
    if let (Some(model), Some(train)) = (&model, &train) {
        let chunks_max = MLP_CHUNKS_MAX.min(model.config.intermediate_size as u64);
        faults.take(within(
            "train.mlp_chunks",
            train.mlp_chunks as u64,
            1,
            chunks_max,
        ));
    }
    let device = train.as_ref().map(|train| train.device);
    let offload = resolve_offload(&config, placement.as_ref(), device, &mut said.notes, faults);
    let reports = train
        .as_ref()
        .and_then(|train| faults.take(reports::reports(&config, &train.run_dir)));
    let found = (
        steps, seq_len, batch, optimizer, lr, placement, model, precision, data,
    );
    let (
        Some(_),
        Some(_),
        Some((batch, ranks)),
        Some(optimizer),
        Some(lr),
        Some(placement),
        Some(model),
        Some((dtype, overflow)),
        Some(data),
    ) = found
    else {
        return Err(std::mem::take(&mut faults.0));
    };
    let (Some(train), Some(offload), Some(reports), true) =
        (train, offload, reports, faults.0.is_empty())
    else {
        return Err(std::mem::take(&mut faults.0));
    };
    Ok(RunSettings {
        reports,
        model: model.config,
        model_dir: model.dir,
        first_weights: model.first_weights,
        dropout: model.dropout,
        dtype,
        overflow,
        batch,
        ranks,
        gradient_clipping,
        gradient_clipping_is_default: config.gradient_clipping.is_none(),
        optimizer,
        lr,
        data,
        train,
        offload,
        placement,
        warnings: said.warnings,
        notes: said.notes,
    })
}

fn resolve_train(
    config: &ConfigToml,
    name: &str,
    steps: u64,
    ranks: u32,
    data: Option<&DataSettings>,
    faults: &mut Faults,
) -> Option<TrainSettings> {
    let train = &config.train;
    let stop_after = train.stop_after.unwrap_or(steps);
    if config.train.steps.is_some() {
        faults.take(within("train.stop_after", stop_after, steps.min(1), steps));
    }
    let eval_every = train.eval_every.unwrap_or(0);
    if eval_every > 0
        && data
            .is_some_and(|data| data.validation_fraction.get() == 0.0 && data.eval_files.is_empty())
    {
        faults.0.push(value(
            "train.eval_every",
            "evaluation needs its own text: set data.validation_fraction, for example 0.05, or data.eval_files",
        ));
    }
    let eval_batches = train.eval_batches.unwrap_or(4);
    faults.take(at_least("train.eval_batches", eval_batches, 1));
    faults.take(at_least(
        "steps_per_print",
        config.steps_per_print.unwrap_or(1),
        1,
    ));
    let log_every = train.log_every.or(config.steps_per_print).unwrap_or(10);
    if train.log_every.is_some() {
        faults.take(at_least("train.log_every", log_every, 1));
    }
    let cores = std::thread::available_parallelism().map_or(1, |cores| cores.get() as u64);
    // All ranks are on this node and divide its cores.
    let threads = (train.threads).unwrap_or((cores / u64::from(ranks)).max(1));
    faults.take(within("train.threads", threads, 1, THREADS_MAX));
    let device = faults.take(word(
        "train.device",
        train.device.as_deref(),
        &[
            ("auto", DeviceChoice::Auto),
            ("cpu", DeviceChoice::Cpu),
            ("gpu", DeviceChoice::Gpu),
        ],
    ));
    let activation_checkpointing = faults.take(word(
        "train.activation_checkpointing",
        train.activation_checkpointing.as_deref(),
        &[
            ("auto", None),
            ("full", Some(ActivationCheckpointing::Full)),
            ("attention", Some(ActivationCheckpointing::Attention)),
            ("matmuls", Some(ActivationCheckpointing::Matmuls)),
        ],
    ));
    let mlp_chunks = train.mlp_chunks.unwrap_or(1);
    let run_dir = (train.run_dir.clone()).unwrap_or_else(|| PathBuf::from("runs").join(name));
    Some(TrainSettings {
        steps,
        stop_after,
        seed: train.seed.unwrap_or(0),
        eval_every,
        eval_batches,
        log_every,
        checkpoint_every: train.checkpoint_every.unwrap_or(0),
        checkpoints_kept: train.checkpoints_kept.unwrap_or(CHECKPOINTS_KEPT),
        run_dir,
        threads: threads as usize,
        device: device?,
        activation_checkpointing: activation_checkpointing?,
        mlp_chunks: mlp_chunks as usize,
    })
}

fn resolve_offload(
    config: &ConfigToml,
    placement: Option<&Placement>,
    device: Option<DeviceChoice>,
    notes: &mut Vec<String>,
    faults: &mut Faults,
) -> Option<OffloadSettings> {
    let offload = &config.offload;
    let optimizer_device = faults.take(word(
        "offload.optimizer_device",
        offload.optimizer_device.as_deref(),
        &[
            ("auto", OptimizerDevice::Auto),
            ("cpu", OptimizerDevice::Cpu),
            ("gpu", OptimizerDevice::Gpu),
            ("shared", OptimizerDevice::Shared),
        ],
    ));
    if device == Some(DeviceChoice::Cpu)
        && matches!(
            optimizer_device,
            Some(OptimizerDevice::Gpu | OptimizerDevice::Shared)
        )
    {
        faults.0.push(value(
            "offload.optimizer_device",
            "needs a GPU, and train.device is \"cpu\": leave one of them out",
        ));
    }
    let optimizer_step = faults.take(word(
        "offload.optimizer_step",
        offload.optimizer_step.as_deref(),
        &[
            ("deferred", OptimizerStep::Deferred),
            ("immediate", OptimizerStep::Immediate),
        ],
    ));
    // DeepSpeed's key applies if this program's own key is absent.
    let asked = config.activation_checkpointing.cpu_checkpointing == Some(true);
    let activations = faults.take(word(
        "offload.activations",
        (offload.activations.as_deref()).or(asked.then_some("cpu")),
        &[
            ("auto", ActivationsChoice::Auto),
            ("gpu", ActivationsChoice::Gpu),
            ("cpu", ActivationsChoice::Cpu),
        ],
    ));
    if activations == Some(ActivationsChoice::Cpu) && device == Some(DeviceChoice::Cpu) {
        notes.push(
            "offload.activations = \"cpu\" has no effect: train.device is \"cpu\", so they are in host memory anyway".into(),
        );
    }
    let gradients = faults.take(word(
        "offload.gradients",
        offload.gradients.as_deref(),
        &[
            ("auto", GradientsChoice::Auto),
            ("cpu", GradientsChoice::Cpu),
            ("nvme", GradientsChoice::Nvme),
        ],
    ));
    let has_no_store = placement.is_some_and(|placement| !placement.has_store());
    if gradients == Some(GradientsChoice::Nvme) && has_no_store {
        faults.0.push(value(
            "offload.gradients",
            "\"nvme\" needs a device, but this run keeps nothing else on nvme: set zero_optimization.offload_optimizer.device = \"nvme\", or leave it out",
        ));
    }
    let durability = faults.take(word(
        "offload.durability",
        offload.durability.as_deref(),
        &[("full", Durability::Full), ("none", Durability::None)],
    ));
    let engines = ENGINES.map(|engine| (engine, engine));
    let engine = faults.take(word("offload.engine", offload.engine.as_deref(), &engines));
    if offload.engine.is_some() && offload.socket.is_some() {
        faults.0.push(value(
            "offload.engine",
            "is a setting of the daemon behind offload.socket: leave it out",
        ));
    }
    if has_no_store {
        for (key, given) in [
            ("offload.engine", offload.engine.is_some()),
            ("offload.durability", offload.durability.is_some()),
            ("offload.commit_every", offload.commit_every.is_some()),
        ] {
            if given {
                faults.0.push(value(
                    key,
                    "this run keeps nothing on nvme: leave it out, or set a device to \"nvme\"",
                ));
            }
        }
    }
    let tile_elems = offload.tile_elems;
    if let Some(elems) = tile_elems
        && (elems == 0 || elems % TILE_ELEMS_STEP != 0 || elems > TILE_ELEMS_MAX)
    {
        faults.0.push(value(
            "offload.tile_elems",
            format!("{elems}: must be a multiple of {TILE_ELEMS_STEP}, at most {TILE_ELEMS_MAX}"),
        ));
    }
    let staging_bytes = faults.take(bytes(
        "offload.staging_bytes",
        offload.staging_bytes.as_ref(),
    ));
    let host_memory_bytes = faults.take(bytes(
        "offload.host_memory_bytes",
        offload.host_memory_bytes.as_ref(),
    ));
    let iodepth = faults.take(iodepth(config));
    Some(OffloadSettings {
        socket: offload.socket.clone(),
        optimizer_step: optimizer_step?,
        commit_every: offload.commit_every,
        host_memory_bytes: host_memory_bytes?,
        optimizer_device: optimizer_device?,
        activations: activations?,
        gradients: gradients?,
        tile_elems,
        staging_bytes: staging_bytes?,
        iodepth: iodepth? as u32,
        durability: durability?,
        engine: engine?.to_owned(),
    })
}

/// Queue depth from `offload.iodepth`, or DeepSpeed's `queue_depth` in either of its two usual places.
fn iodepth(config: &ConfigToml) -> Result<u64, SettingsError> {
    let mut found: Option<(&'static str, u64)> = None;
    for (key, given) in [
        ("offload.iodepth", config.offload.iodepth),
        ("aio.queue_depth", config.aio.queue_depth),
        (
            "zero_optimization.aio.queue_depth",
            config.zero_optimization.aio.queue_depth,
        ),
    ] {
        let Some(depth) = given else { continue };
        within(key, depth, IODEPTH_MIN.into(), IODEPTH_MAX.into())?;
        match found {
            Some((other, first)) if first != depth => {
                return Err(value(
                    key,
                    format!("{depth} contradicts {other} = {first}: leave one of them out"),
                ));
            }
            _ => found = Some((key, depth)),
        }
    }
    Ok(found.map_or(IODEPTH_DEFAULT.into(), |(_, depth)| depth))
}

/// Finds the choice called `given` in `words`; the first one if nothing is given.
fn word<T: Clone>(
    key: &'static str,
    given: Option<&str>,
    words: &[(&str, T)],
) -> Result<T, SettingsError> {
    let given = given.unwrap_or(words[0].0);
    let found = words.iter().find(|(word, _)| *word == given);
    found.map(|(_, meaning)| meaning.clone()).ok_or_else(|| {
        let names: Vec<String> = words
            .iter()
            .map(|(word, _)| format!("\"{word}\""))
            .collect();
        let (last, others) = names.split_last().expect("there are several choices");
        value(
            key,
            format!("\"{given}\": use {} or {last}", others.join(", ")),
        )
    })
}

/// Parses a number of bytes that must not be 0.
fn bytes(key: &'static str, count: Option<&ByteCount>) -> Result<Option<u64>, SettingsError> {
    let Some(count) = count else { return Ok(None) };
    match count.bytes() {
        Some(bytes) if bytes > 0 => Ok(Some(bytes)),
        _ => Err(value(
            key,
            "expected a number of bytes, for example 67108864 or \"64MiB\"",
        )),
    }
}

fn required(
    key: &'static str,
    number: Option<u64>,
    message: &'static str,
) -> Result<u64, SettingsError> {
    number.ok_or(SettingsError::Missing { key, message })
}

fn at_least(key: &'static str, number: u64, least: u64) -> Result<(), SettingsError> {
    if number >= least {
        Ok(())
    } else {
        Err(value(key, format!("{number}: must be at least {least}")))
    }
}

fn within(key: &'static str, number: u64, least: u64, most: u64) -> Result<(), SettingsError> {
    if (least..=most).contains(&number) {
        Ok(())
    } else {
        Err(value(key, format!("{number}: must be {least} to {most}")))
    }
}

fn not_negative(key: &'static str, number: f64) -> Result<(), SettingsError> {
    if number.is_finite() && number >= 0.0 {
        Ok(())
    } else {
        Err(value(key, format!("{number}: must not be negative")))
    }
}

fn fraction(key: &'static str, number: f64) -> Result<Fraction, SettingsError> {
    Fraction::new(number).ok_or_else(|| value(key, format!("{number}: must be 0 to 1")))
}

fn value(key: &'static str, message: impl Into<String>) -> SettingsError {
    SettingsError::Value {
        key,
        message: message.into(),
    }
}
