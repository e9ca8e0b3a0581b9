//! Checks values against their ranges and against each other, and fills in what the run file leaves open.

use std::path::PathBuf;

use super::toml::{ConfigToml, ModelToml, OptimizerToml, SchedulerToml, ZeroToml};
use super::{
    Batch, DataSettings, Durability, LrSchedule, OffloadSettings, OptimizerSettings, Placement,
    RunSettings, Schedule, SettingsError, Share, Tier, TrainSettings, Warmup,
};
use crate::compute::Dtype;
use crate::data::VOCAB_SIZE;
use crate::model::LlamaConfig;

/// Tokens of a window beyond this are a typing error, not a model.
const SEQ_LEN_MAX: u64 = 1 << 20;
/// Windows of one step, for the same reason.
const BATCH_MAX: u64 = 1 << 20;
const THREADS_MAX: u64 = 1024;
const IODEPTH_MAX: u64 = 1024;
/// What several drives need to be busy with tiles of megabytes; the daemon may grant less.
const IODEPTH_DEFAULT: u64 = 32;

pub(super) fn resolve(
    config: ConfigToml,
    name: &str,
    mut notes: Vec<String>,
) -> Result<RunSettings, SettingsError> {
    let ConfigToml {
        bf16,
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
    at_least("train.steps", steps, 1)?;
    within("train.seq_len", seq_len, 1, SEQ_LEN_MAX)?;
    let batch = batch(&config, seq_len)?;
    let optimizer = resolve_optimizer(optimizer)?;
    let lr = resolve_scheduler(scheduler, optimizer.lr, steps, &mut notes)?;
    let placement = placement(
        zero_optimization,
        offload.resident_share,
        offload.socket.is_some(),
        &mut notes,
    )?;
    let model = resolve_model(model, seq_len)?;

    let gradient_clipping = config.gradient_clipping.unwrap_or(1.0);
    not_negative("gradient_clipping", gradient_clipping)?;
    let holdout_share = share("data.holdout_share", data.holdout_share.unwrap_or(0.0))?;
    let files = data.files.clone().unwrap_or_default();
    if files.is_empty() {
        return Err(SettingsError::Missing {
            key: "data.files",
            message: "name text files or folders of them",
        });
    }

    let stop_after = train.stop_after.unwrap_or(steps);
    within("train.stop_after", stop_after, 1, steps)?;
    let eval_every = train.eval_every.unwrap_or(0);
    if eval_every > 0 && holdout_share.get() == 0.0 {
        return Err(value(
            "train.eval_every",
            "evaluation needs a text of its own: set data.holdout_share, for example 0.05",
        ));
    }
    let eval_batches = train.eval_batches.unwrap_or(4);
    at_least("train.eval_batches", eval_batches, 1)?;
    let log_every = train.log_every.unwrap_or(10);
    at_least("train.log_every", log_every, 1)?;
    let cores = std::thread::available_parallelism().map_or(1, |cores| cores.get() as u64);
    let threads = train.threads.unwrap_or(cores);
    within("train.threads", threads, 1, THREADS_MAX)?;
    if placement.has_store() && train.save_every.is_some() {
        return Err(value(
            "train.save_every",
            "runs with a store commit instead: use offload.commit_every",
        ));
    }

    Ok(RunSettings {
        model,
        dtype: if bf16.enabled.unwrap_or(false) {
            Dtype::Bf16
        } else {
            Dtype::Fp32
        },
        batch,
        gradient_clipping,
        optimizer,
        lr,
        data: DataSettings {
            files,
            holdout_share,
        },
        train: TrainSettings {
            steps,
            stop_after,
            seed: train.seed.unwrap_or(0),
            eval_every,
            eval_batches,
            log_every,
            save_every: train.save_every.unwrap_or(0),
            run_folder: train
                .run_folder
                .clone()
                .unwrap_or_else(|| PathBuf::from("runs").join(name)),
            threads: threads as usize,
        },
        offload: resolve_offload(&config, &placement)?,
        placement,
        notes,
    })
}

/// `train_batch_size = train_micro_batch_size_per_gpu * gradient_accumulation_steps` for one process; any two give the third.
fn batch(config: &ConfigToml, seq_len: u64) -> Result<Batch, SettingsError> {
    let (train, micro, steps) = (
        config.train_batch_size,
        config.train_micro_batch_size_per_gpu,
        config.gradient_accumulation_steps,
    );
    for (key, number) in [
        ("train_batch_size", train),
        ("train_micro_batch_size_per_gpu", micro),
        ("gradient_accumulation_steps", steps),
    ] {
        within(key, number.unwrap_or(1), 1, BATCH_MAX)?;
    }
    let divided = |by: u64, what: &'static str| match train.unwrap_or(0) {
        train if train % by == 0 => Ok(train / by),
        train => Err(value(
            "train_batch_size",
            format!("{train} is not a multiple of {what} = {by}"),
        )),
    };
    let (micro, steps) = match (train, micro, steps) {
        (Some(train), Some(micro), Some(steps)) if train != micro * steps => {
            return Err(value(
                "train_batch_size",
                format!(
                    "{train} contradicts train_micro_batch_size_per_gpu * gradient_accumulation_steps = {micro} * {steps} = {}",
                    micro * steps
                ),
            ));
        }
        (_, Some(micro), Some(steps)) => (micro, steps),
        (Some(_), Some(micro), None) => (micro, divided(micro, "train_micro_batch_size_per_gpu")?),
        (Some(_), None, Some(steps)) => (divided(steps, "gradient_accumulation_steps")?, steps),
        (Some(train), None, None) => (train, 1),
        (None, Some(micro), None) => (micro, 1),
        (None, None, _) => {
            return Err(SettingsError::Missing {
                key: "train_micro_batch_size_per_gpu",
                message: "give it, or train_batch_size",
            });
        }
    };
    within("train_batch_size", micro * steps, 1, BATCH_MAX)?;
    Ok(Batch {
        micro_batch: micro as usize,
        micro_batches: steps as usize,
        seq_len: seq_len as usize,
    })
}

/// The model's own checks name Hugging Face's keys; they all lie in `[model]`.
fn resolve_model(model: &ModelToml, seq_len: u64) -> Result<LlamaConfig, SettingsError> {
    let mut given = serde_json::to_value(model).expect("the settings are plain data");
    let keys = given.as_object_mut().expect("a table");
    keys.retain(|_, value| !value.is_null());
    if keys.is_empty() {
        return Err(SettingsError::Missing {
            key: "model",
            message: "describe the model with Hugging Face's keys",
        });
    }
    if let (Some(heads), None) = (
        keys.get("num_attention_heads").cloned(),
        keys.get("num_key_value_heads"),
    ) {
        keys.insert("num_key_value_heads".into(), heads);
    }
    keys.entry("vocab_size").or_insert(VOCAB_SIZE.into());
    keys.entry("max_position_embeddings")
        .or_insert(seq_len.max(2048).into());
    let model: LlamaConfig =
        serde_json::from_value(given).map_err(|error| value("model", error.to_string()))?;
    model
        .validate()
        .map_err(|error| value("model", error.to_string()))?;
    if (model.vocab_size as u64) < VOCAB_SIZE {
        return Err(value(
            "model.vocab_size",
            format!(
                "{}: bytes are tokens, at least {VOCAB_SIZE}",
                model.vocab_size
            ),
        ));
    }
    if seq_len > model.max_position_embeddings as u64 {
        let most = model.max_position_embeddings;
        return Err(value(
            "train.seq_len",
            format!("{seq_len} is beyond model.max_position_embeddings = {most}"),
        ));
    }
    Ok(model)
}

fn resolve_optimizer(optimizer: &OptimizerToml) -> Result<OptimizerSettings, SettingsError> {
    let params = &optimizer.params;
    let weight_decay = params.weight_decay.unwrap_or(0.0);
    let kind = optimizer.kind.as_deref().unwrap_or("AdamW");
    match kind.to_ascii_lowercase().as_str() {
        "adamw" => {}
        // DeepSpeed's Adam decouples the decay unless told otherwise.
        "adam" if params.adam_w_mode.unwrap_or(true) || weight_decay == 0.0 => {}
        "adam" => {
            return Err(value(
                "optimizer.params.adam_w_mode",
                "weight decay inside the gradient (adam_w_mode = false) is not supported: use AdamW or weight_decay = 0",
            ));
        }
        _ => {
            return Err(value(
                "optimizer.type",
                format!("\"{kind}\" is not supported: use \"AdamW\" or \"Adam\""),
            ));
        }
    }
    let settings = OptimizerSettings {
        lr: params.lr.unwrap_or(1e-3),
        betas: params.betas.unwrap_or([0.9, 0.999]),
        eps: params.eps.unwrap_or(1e-8),
        weight_decay,
    };
    not_negative("optimizer.params.lr", settings.lr)?;
    not_negative("optimizer.params.weight_decay", settings.weight_decay)?;
    if settings.betas.iter().any(|beta| !(0.0..1.0).contains(beta)) {
        return Err(value(
            "optimizer.params.betas",
            "each must be at least 0 and less than 1",
        ));
    }
    if !(settings.eps.is_finite() && settings.eps > 0.0) {
        return Err(value("optimizer.params.eps", "must be more than 0"));
    }
    Ok(settings)
}

fn resolve_scheduler(
    scheduler: &SchedulerToml,
    lr: f64,
    steps: u64,
    notes: &mut Vec<String>,
) -> Result<LrSchedule, SettingsError> {
    let params = &scheduler.params;
    let Some(kind) = scheduler.kind.as_deref() else {
        return Ok(LrSchedule::Constant { lr });
    };
    let logarithmic = match params.warmup_type.as_deref() {
        None | Some("log") => true,
        Some("linear") => false,
        Some(other) => {
            return Err(value(
                "scheduler.params.warmup_type",
                format!("\"{other}\": use \"log\" or \"linear\""),
            ));
        }
    };
    let warmup_steps = params.warmup_num_steps.unwrap_or(1000);
    let total_steps = params.total_num_steps.unwrap_or(steps);
    if total_steps != steps {
        notes.push(format!(
            "scheduler.params.total_num_steps is {total_steps}, the run has {steps} steps"
        ));
    }
    let decays = kind != "WarmupLR";
    if decays && warmup_steps >= total_steps {
        return Err(value(
            "scheduler.params.warmup_num_steps",
            format!(
                "{warmup_steps} leaves no step of {total_steps} (total_num_steps) to go down: make it smaller"
            ),
        ));
    }
    for (key, number) in [
        ("scheduler.params.warmup_min_lr", params.warmup_min_lr),
        ("scheduler.params.warmup_max_lr", params.warmup_max_lr),
    ] {
        not_negative(key, number.unwrap_or(0.0))?;
    }
    let warmup = match kind {
        "WarmupLR" | "WarmupDecayLR" => Warmup {
            min_lr: params.warmup_min_lr.unwrap_or(0.0),
            max_lr: params.warmup_max_lr.unwrap_or(lr),
            steps: warmup_steps,
            logarithmic,
        },
        "WarmupCosineLR" => {
            if params.warmup_min_lr.is_some() || params.warmup_max_lr.is_some() {
                return Err(value(
                    "scheduler.params",
                    "WarmupCosineLR scales optimizer.params.lr: it has warmup_min_ratio and cos_min_ratio, no warmup_min_lr or warmup_max_lr",
                ));
            }
            let ratio = share(
                "scheduler.params.warmup_min_ratio",
                params.warmup_min_ratio.unwrap_or(0.0),
            )?;
            Warmup {
                min_lr: lr * ratio.get(),
                max_lr: lr,
                steps: warmup_steps,
                logarithmic,
            }
        }
        _ => {
            return Err(value(
                "scheduler.type",
                format!(
                    "\"{kind}\" is not supported: use WarmupLR, WarmupDecayLR or WarmupCosineLR"
                ),
            ));
        }
    };
    Ok(match kind {
        "WarmupLR" => LrSchedule::Warmup(warmup),
        "WarmupDecayLR" => LrSchedule::WarmupDecay {
            warmup,
            total_steps,
        },
        _ => {
            let min_ratio = share(
                "scheduler.params.cos_min_ratio",
                params.cos_min_ratio.unwrap_or(1e-4),
            )?
            .get();
            LrSchedule::WarmupCosine {
                warmup,
                total_steps,
                min_ratio,
            }
        }
    })
}

fn placement(
    zero: &ZeroToml,
    resident_share: Option<f64>,
    has_socket: bool,
    notes: &mut Vec<String>,
) -> Result<Placement, SettingsError> {
    const PARAM: &str = "zero_optimization.offload_param.device";
    const OPTIMIZER: &str = "zero_optimization.offload_optimizer.device";
    let param = tier(PARAM, zero.offload_param.device.as_deref())?;
    let optimizer = tier(OPTIMIZER, zero.offload_optimizer.device.as_deref())?;
    let has_store = param == Tier::Nvme || optimizer == Tier::Nvme;
    // Left out, it is the one stage there is. DeepSpeed's default of 0 would contradict every offload below.
    let stage = zero.stage.unwrap_or(3);
    if stage > 3 {
        return Err(value(
            "zero_optimization.stage",
            format!("{stage}: there are stages 0 to 3"),
        ));
    }
    if stage < 3 && (has_store || param != Tier::None) {
        return Err(value(
            "zero_optimization.stage",
            format!(
                "{stage} cannot keep parameters in host memory or anything on nvme: set stage = 3, or devices none and cpu"
            ),
        ));
    }
    if stage < 3 {
        notes.push(format!(
            "zero_optimization.stage {stage}: one process shards nothing, it runs as stage 3 does"
        ));
    }
    if param == Tier::Nvme && optimizer == Tier::None {
        return Err(value(
            OPTIMIZER,
            "\"none\" beside parameters on nvme: the optimizer's state is five times as large, set it to \"nvme\" or \"cpu\"",
        ));
    }
    let mut nvme_paths = Vec::new();
    for (key, device, path) in [
        (
            "zero_optimization.offload_param.nvme_path",
            param,
            &zero.offload_param.nvme_path,
        ),
        (
            "zero_optimization.offload_optimizer.nvme_path",
            optimizer,
            &zero.offload_optimizer.nvme_path,
        ),
    ] {
        match (device, path) {
            (Tier::Nvme, Some(paths)) => {
                let paths = paths.list();
                if paths.is_empty() || paths.iter().any(|path| path.as_os_str().is_empty()) {
                    return Err(value(key, "names no folder"));
                }
                for path in paths {
                    if !nvme_paths.contains(&path) {
                        nvme_paths.push(path);
                    }
                }
            }
            (Tier::Nvme, None) if !has_socket => {
                return Err(SettingsError::Missing {
                    key,
                    message: "device is \"nvme\": name a folder on the drive, or the socket of a running offloadd in offload.socket",
                });
            }
            (Tier::None | Tier::Cpu, Some(_)) => notes.push(format!(
                "{key} has no effect: device is \"{}\"",
                device.word()
            )),
            _ => {}
        }
    }
    if has_socket && !has_store {
        return Err(value(
            "offload.socket",
            "nothing lives on nvme in this run: leave the socket out, or set a device to \"nvme\"",
        ));
    }
    if resident_share.is_some() && !has_store {
        return Err(value(
            "offload.resident_share",
            "everything is in host memory already: leave it out, or set a device to \"nvme\"",
        ));
    }
    let share = share("offload.resident_share", resident_share.unwrap_or(0.0))?;
    let of = |tier| {
        if tier == Tier::Nvme {
            share
        } else {
            Share::ALL
        }
    };
    Ok(Placement {
        param,
        optimizer,
        nvme_paths,
        param_share: of(param),
        state_share: of(optimizer),
    })
}

fn tier(key: &'static str, word: Option<&str>) -> Result<Tier, SettingsError> {
    match word.unwrap_or("none") {
        "none" => Ok(Tier::None),
        "cpu" => Ok(Tier::Cpu),
        "nvme" => Ok(Tier::Nvme),
        other => Err(value(
            key,
            format!("\"{other}\": use \"none\", \"cpu\" or \"nvme\""),
        )),
    }
}

fn resolve_offload(
    config: &ConfigToml,
    placement: &Placement,
) -> Result<OffloadSettings, SettingsError> {
    let offload = &config.offload;
    let schedule = match offload.schedule.as_deref() {
        None | Some("deferred") => Schedule::Deferred,
        Some("at_once") => Schedule::AtOnce,
        Some(other) => {
            return Err(value(
                "offload.schedule",
                format!("\"{other}\": use \"deferred\" or \"at_once\""),
            ));
        }
    };
    let durability = match offload.durability.as_deref() {
        None | Some("full") => Durability::Full,
        Some("none") => Durability::None,
        Some(other) => {
            return Err(value(
                "offload.durability",
                format!("\"{other}\": use \"full\" or \"none\""),
            ));
        }
    };
    let engine = offload.engine.clone().unwrap_or_else(|| "auto".into());
    if !["auto", "uring", "psync"].contains(&engine.as_str()) {
        return Err(value(
            "offload.engine",
            format!("\"{engine}\": use \"auto\", \"uring\" or \"psync\""),
        ));
    }
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
    let staging_bytes = match &offload.staging_bytes {
        None => None,
        Some(count) => Some(count.bytes().filter(|bytes| *bytes > 0).ok_or_else(|| {
            value(
                "offload.staging_bytes",
                "expected a number of bytes, as 67108864 or \"64MiB\"",
            )
        })?),
    };
    let iodepth = offload.iodepth.unwrap_or(IODEPTH_DEFAULT);
    within("offload.iodepth", iodepth, 1, IODEPTH_MAX)?;
    Ok(OffloadSettings {
        socket: offload.socket.clone(),
        schedule,
        commit_every: offload.commit_every.unwrap_or(1),
        tile_elems,
        staging_bytes,
        iodepth: iodepth as u32,
        durability,
        engine,
    })
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
