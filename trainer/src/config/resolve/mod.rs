//! Checks values against their ranges and against each other, and fills in what the run file leaves open.

mod batch;
mod data;
mod model;
mod optimizer;
mod placement;
mod precision;
mod reports;
mod schedule;

use std::path::PathBuf;

use swapper::{ENGINES, IODEPTH_DEFAULT, IODEPTH_MAX, IODEPTH_MIN};

use super::toml::{ByteCount, ConfigToml};
use super::{
    ActivationsChoice, DeviceChoice, Durability, GradientsChoice, KeepChoice, OffloadSettings,
    Placement, RunSettings, Schedule, SettingsError, Share, TrainSettings, UpdatePlace,
};

/// Tokens of a window beyond this are a typing error, not a model.
const SEQ_LEN_MAX: u64 = 1 << 20;
/// The newest, and the one before should it be damaged.
const SAVES_KEPT: u64 = 2;

const THREADS_MAX: u64 = 1024;
/// Slices of a feed-forward half beyond this take time and no memory worth it.
const TILING_MAX: u64 = 256;

pub(super) fn resolve(
    config: ConfigToml,
    name: &str,
    ranks: Option<u32>,
    mut notes: Vec<String>,
) -> Result<RunSettings, SettingsError> {
    let ConfigToml {
        optimizer,
        scheduler,
        zero_optimization,
        model,
        data,
        train,
        offload,
        ..
    } = &config;
    let steps = required(
        "train.steps",
        train.steps,
        "say how many optimizer steps the run has",
    )?;
    let seq_len = required(
        "train.seq_len",
        train.seq_len,
        "say how many tokens a window has",
    )?;
    within("train.seq_len", seq_len, 1, SEQ_LEN_MAX)?;
    let (batch, ranks) = batch::batch(&config, seq_len, ranks)?;
    let optimizer = optimizer::optimizer(optimizer)?;
    let lr = schedule::schedule(scheduler, optimizer.lr, steps, &mut notes)?;
    let (dtype, overflow) = precision::precision(&config)?;
    let placement = placement::placement(zero_optimization, offload, &mut notes)?;
    let model::Resolved {
        config: model,
        folder: model_folder,
        first_weights,
        dropout,
    } = model::model(model, seq_len, &mut notes)?;
    optimizer::note_unmatched(&optimizer.decay, &model, &mut notes);

    let gradient_clipping = config.gradient_clipping.unwrap_or(1.0);
    not_negative("gradient_clipping", gradient_clipping)?;
    let data = data::data(data, steps)?;

    let stop_after = train.stop_after.unwrap_or(steps);
    within("train.stop_after", stop_after, steps.min(1), steps)?;
    let eval_every = train.eval_every.unwrap_or(0);
    if eval_every > 0 && data.holdout_share.get() == 0.0 && data.eval_files.is_empty() {
        return Err(value(
            "train.eval_every",
            "evaluation needs a text of its own: set data.holdout_share, for example 0.05, or data.eval_files",
        ));
    }
    let eval_batches = train.eval_batches.unwrap_or(4);
    at_least("train.eval_batches", eval_batches, 1)?;
    at_least("steps_per_print", config.steps_per_print.unwrap_or(1), 1)?;
    let log_every = train.log_every.or(config.steps_per_print).unwrap_or(10);
    at_least("train.log_every", log_every, 1)?;
    let cores = std::thread::available_parallelism().map_or(1, |cores| cores.get() as u64);
    // All ranks are on this node and share its cores.
    let threads = (train.threads).unwrap_or((cores / u64::from(ranks)).max(1));
    within("train.threads", threads, 1, THREADS_MAX)?;
    let device = word(
        "train.device",
        train.device.as_deref(),
        &[
            ("auto", DeviceChoice::Auto),
            ("cpu", DeviceChoice::Cpu),
            ("gpu", DeviceChoice::Gpu),
        ],
    )?;
    let keep = word(
        "train.keep",
        train.keep.as_deref(),
        &[
            ("auto", KeepChoice::Auto),
            ("nothing", KeepChoice::Nothing),
            ("attention", KeepChoice::Attention),
            ("products", KeepChoice::Products),
        ],
    )?;
    let tiling = train.tiling.unwrap_or(1);
    let slices_max = TILING_MAX.min(model.intermediate_size as u64);
    within("train.tiling", tiling, 1, slices_max)?;
    // DeepSpeed's word for it, where ours is silent.
    let checkpointing = &config.activation_checkpointing;
    let asked = checkpointing.cpu_checkpointing.filter(|&asked| asked);
    let activations = word(
        "train.activations",
        (train.activations.as_deref()).or(asked.map(|_| "host")),
        &[
            ("auto", ActivationsChoice::Auto),
            ("device", ActivationsChoice::Device),
            ("host", ActivationsChoice::Host),
        ],
    )?;
    if activations == ActivationsChoice::Host && device == DeviceChoice::Cpu {
        notes.push(
            "train.activations = \"host\" has no effect: train.device is \"cpu\", where they are in host memory anyway".into(),
        );
    }
    let run_folder = (train.run_folder.clone()).unwrap_or_else(|| PathBuf::from("runs").join(name));
    Ok(RunSettings {
        reports: reports::reports(&config, &run_folder)?,
        model,
        model_folder,
        first_weights,
        dropout,
        dtype,
        overflow,
        batch,
        ranks,
        gradient_clipping,
        optimizer,
        lr,
        data,
        train: TrainSettings {
            steps,
            stop_after,
            seed: train.seed.unwrap_or(0),
            eval_every,
            eval_batches,
            log_every,
            save_every: train.save_every.unwrap_or(0),
            saves_kept: train.saves_kept.unwrap_or(SAVES_KEPT),
            run_folder,
            threads: threads as usize,
            device,
            keep,
            activations,
            tiling: tiling as usize,
        },
        offload: resolve_offload(&config, &placement, device)?,
        placement,
        notes,
    })
}

fn resolve_offload(
    config: &ConfigToml,
    placement: &Placement,
    device: DeviceChoice,
) -> Result<OffloadSettings, SettingsError> {
    let offload = &config.offload;
    let update = word(
        "offload.update",
        offload.update.as_deref(),
        &[
            ("auto", UpdatePlace::Auto),
            ("cpu", UpdatePlace::Cpu),
            ("gpu", UpdatePlace::Gpu),
            ("shared", UpdatePlace::Shared),
        ],
    )?;
    if device == DeviceChoice::Cpu && matches!(update, UpdatePlace::Gpu | UpdatePlace::Shared) {
        return Err(value(
            "offload.update",
            "needs a GPU, and train.device is \"cpu\": leave one of them out",
        ));
    }
    let schedule = word(
        "offload.schedule",
        offload.schedule.as_deref(),
        &[
            ("deferred", Schedule::Deferred),
            ("at_once", Schedule::AtOnce),
        ],
    )?;
    let gradients = word(
        "offload.gradients",
        offload.gradients.as_deref(),
        &[
            ("auto", GradientsChoice::Auto),
            ("cpu", GradientsChoice::Cpu),
            ("nvme", GradientsChoice::Nvme),
        ],
    )?;
    if gradients == GradientsChoice::Nvme && !placement.has_store() {
        return Err(value(
            "offload.gradients",
            "\"nvme\", and nothing else of this run lives on nvme: set zero_optimization.offload_optimizer.device = \"nvme\", or leave it out",
        ));
    }
    let durability = word(
        "offload.durability",
        offload.durability.as_deref(),
        &[("full", Durability::Full), ("none", Durability::None)],
    )?;
    let engines = ENGINES.map(|engine| (engine, engine));
    let engine = word("offload.engine", offload.engine.as_deref(), &engines)?;
    if offload.engine.is_some() && offload.socket.is_some() {
        return Err(value(
            "offload.engine",
            "belongs to the settings of the daemon behind offload.socket: leave it out",
        ));
    }
    if !placement.has_store() {
        for (key, given) in [
            ("offload.engine", offload.engine.is_some()),
            ("offload.durability", offload.durability.is_some()),
            ("offload.commit_every", offload.commit_every.is_some()),
        ] {
            if given {
                return Err(value(
                    key,
                    "nothing lives on nvme in this run: leave it out, or set a device to \"nvme\"",
                ));
            }
        }
    }
    let tile_elems = offload.tile_elems;
    if let Some(elems) = tile_elems
        && (elems == 0 || elems % 4096 != 0 || elems > 1 << 28)
    {
        return Err(value(
            "offload.tile_elems",
            format!(
                "{elems}: must be a multiple of 4096, at most {}",
                1u64 << 28
            ),
        ));
    }
    let staging_bytes = bytes("offload.staging_bytes", offload.staging_bytes.as_ref())?;
    let host_memory_bytes = bytes("offload.host_memory", offload.host_memory.as_ref())?;
    let iodepth = iodepth(config)?;
    Ok(OffloadSettings {
        socket: offload.socket.clone(),
        schedule,
        commit_every: offload.commit_every,
        host_memory_bytes,
        update,
        gradients,
        tile_elems,
        staging_bytes,
        iodepth: iodepth as u32,
        durability,
        engine: engine.to_owned(),
    })
}

/// Ours, or DeepSpeed's `queue_depth` from one of the two places where people have it.
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

/// One of `words`, the first one when nothing is given.
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
        let (last, others) = names.split_last().expect("a word has alternatives");
        value(
            key,
            format!("\"{given}\": use {} or {last}", others.join(", ")),
        )
    })
}

/// A number of bytes that is not 0, if there is one.
fn bytes(key: &'static str, count: Option<&ByteCount>) -> Result<Option<u64>, SettingsError> {
    let Some(count) = count else { return Ok(None) };
    match count.bytes() {
        Some(bytes) if bytes > 0 => Ok(Some(bytes)),
        _ => Err(value(
            key,
            "expected a number of bytes, as 67108864 or \"64MiB\"",
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

fn share(key: &'static str, number: f64) -> Result<Share, SettingsError> {
    Share::new(number).ok_or_else(|| value(key, format!("{number}: must be 0 to 1")))
}

fn value(key: &'static str, message: impl Into<String>) -> SettingsError {
    SettingsError::Value {
        key,
        message: message.into(),
    }
}
