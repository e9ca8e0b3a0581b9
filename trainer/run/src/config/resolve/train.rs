//! Resolves the table `train`.

use std::path::PathBuf;

use offload_support::units::parse_time;

use super::{Faults, at_least, value, within, word};
use crate::computation::{ActivationCheckpointing, Matmuls};
use crate::config::toml::{self, ConfigToml, Steps, TrainToml};
use crate::config::{
    AttentionChoice, DataSettings, DeviceChoice, Interval, SettingsError, TrainSettings,
};
use crate::model::ModelConfig;

/// The newest checkpoint, and the one before in case the newest is damaged.
const CHECKPOINTS_KEPT: u64 = 2;

const THREADS_MAX: u64 = 1024;

/// More chunks of an MLP than this cost time and hardly save memory.
const MLP_CHUNKS_MAX: u64 = 256;

/// Resolves the table `train`, except for the length of sequences.
pub(super) fn train(
    config: &ConfigToml,
    name: &str,
    steps: u64,
    ranks: u32,
    data: Option<&DataSettings>,
    faults: &mut Faults,
) -> Option<TrainSettings> {
    let train = &config.train;
    let matmuls = faults.collect(word(
        "train.matmuls",
        train.matmuls.as_deref(),
        &[("dtype", Matmuls::InDtype), ("fp8", Matmuls::Fp8)],
    ));
    let stop_after = train.stop_after.unwrap_or(steps);
    if config.train.steps.is_some() || config.train.epochs.is_some() {
        faults.collect(within("train.stop_after", stop_after, steps.min(1), steps));
    }
    let eval_every = eval_every(train, data, faults);
    let checkpoint_every = checkpoint_every(train, faults);
    let eval_batches = train.eval_batches;
    let steps_per_print = config.steps_per_print.map(Steps::number);
    faults.collect(at_least("train.eval_batches", eval_batches.unwrap_or(1), 1));
    faults.collect(at_least("steps_per_print", steps_per_print.unwrap_or(1), 1));
    let log_every = train.log_every.or(steps_per_print).unwrap_or(10);
    if train.log_every.is_some() {
        faults.collect(at_least("train.log_every", log_every, 1));
    }
    let cores = std::thread::available_parallelism().map_or(1, |cores| cores.get() as u64);
    // All ranks are on this node and divide its cores.
    let threads = (train.threads).unwrap_or((cores / u64::from(ranks)).max(1));
    faults.collect(within("train.threads", threads, 1, THREADS_MAX));
    let device = faults.collect(word(
        "train.device",
        train.device.as_deref(),
        &[
            ("auto", DeviceChoice::Auto),
            ("cpu", DeviceChoice::Cpu),
            ("gpu", DeviceChoice::Gpu),
        ],
    ));
    let activation_checkpointing = faults.collect(word(
        "train.activation_checkpointing",
        train.activation_checkpointing.as_deref(),
        &[
            ("auto", None),
            ("full", Some(ActivationCheckpointing::Full)),
            ("attention", Some(ActivationCheckpointing::Attention)),
            ("matmuls", Some(ActivationCheckpointing::Matmuls)),
        ],
    ));
    let attention = faults.collect(word(
        "train.attention",
        train.attention.as_deref(),
        &[
            ("auto", AttentionChoice::Auto),
            ("cudnn", AttentionChoice::Cudnn),
            ("torch", AttentionChoice::Torch),
        ],
    ));
    let run_dir = (train.run_dir.clone()).unwrap_or_else(|| PathBuf::from("runs").join(name));
    Some(TrainSettings {
        epochs: train.epochs,
        steps,
        stop_after,
        seed: train.seed.unwrap_or(0),
        eval_every,
        eval_batches,
        early_stopping_patience: train.early_stopping_patience.unwrap_or(0),
        checkpoint_best: train.checkpoint_best.unwrap_or(false),
        export_to: train.export_to.clone(),
        log_every,
        checkpoint_every,
        checkpoints_kept: train.checkpoints_kept.unwrap_or(CHECKPOINTS_KEPT),
        checkpoint_dir: train.checkpoint_dir.clone(),
        checkpoints_on_each_node: train.checkpoints_on_each_node.unwrap_or(false),
        run_dir,
        threads: threads as usize,
        device: device?,
        activation_checkpointing: activation_checkpointing?,
        attention: attention?,
        deterministic: train.deterministic.unwrap_or(true),
        matmuls: matmuls?,
        mlp_chunks: train.mlp_chunks.unwrap_or(1) as usize,
        micro_batch_group: micro_batch_group(train, faults),
    })
}

/// Resolves the interval between evaluations, with what needs them and what they need.
fn eval_every(train: &TrainToml, data: Option<&DataSettings>, faults: &mut Faults) -> Interval {
    let eval_every = match train.eval_every {
        None | Some(toml::Interval::Steps(0)) => Interval::Never,
        Some(toml::Interval::Steps(steps)) => Interval::Steps(steps),
        Some(toml::Interval::Epoch(_)) => Interval::Epoch,
    };
    if eval_every == Interval::Never {
        for (key, given) in [
            (
                "train.early_stopping_patience",
                train.early_stopping_patience.is_some_and(|count| count > 0),
            ),
            ("train.checkpoint_best", train.checkpoint_best == Some(true)),
        ] {
            if given {
                faults.0.push(value(
                    key,
                    "needs evaluations: set train.eval_every, for example \"epoch\"",
                ));
            }
        }
    }
    if eval_every != Interval::Never
        && data
            .is_some_and(|data| data.validation_fraction.get() == 0.0 && data.eval_files.is_empty())
    {
        faults.0.push(value(
            "train.eval_every",
            "evaluation needs its own text: set data.validation_fraction, for example 0.05, or data.eval_files",
        ));
    }
    eval_every
}

/// Resolves the number of micro-batches that are processed together; `None` if the plan chooses.
fn micro_batch_group(train: &TrainToml, faults: &mut Faults) -> Option<usize> {
    let size = train.micro_batch_group?;
    faults.collect(at_least("train.micro_batch_group", size, 1))?;
    Some(size as usize)
}

/// Resolves the interval between checkpoints.
fn checkpoint_every(train: &TrainToml, faults: &mut Faults) -> Interval {
    match &train.checkpoint_every {
        None | Some(toml::CheckpointInterval::Steps(0)) => Interval::Never,
        Some(toml::CheckpointInterval::Steps(steps)) => Interval::Steps(*steps),
        Some(toml::CheckpointInterval::Text(text)) if text == "epoch" => Interval::Epoch,
        Some(toml::CheckpointInterval::Text(text)) => {
            let seconds = match parse_time(text) {
                Ok(time) if time.as_secs() > 0 => Ok(time.as_secs()),
                Ok(_) => Err(format!("\"{text}\": must be at least a second")),
                Err(error) => Err(format!("{error}, a whole number of steps, or \"epoch\"")),
            };
            let seconds = seconds.map_err(|why| value("train.checkpoint_every", why));
            faults
                .collect(seconds)
                .map_or(Interval::Never, Interval::Seconds)
        }
    }
}

/// Checks the number of chunks of an MLP, which cannot be more than its features.
pub(super) fn check_mlp_chunks(chunks: usize, model: &ModelConfig) -> Result<(), SettingsError> {
    let most = MLP_CHUNKS_MAX.min(model.intermediate_size as u64);
    within("train.mlp_chunks", chunks as u64, 1, most)
}
