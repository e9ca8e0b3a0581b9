//! DeepSpeed's batch arithmetic for one process.

use super::{value, within};
use crate::config::toml::ConfigToml;
use crate::config::{Batch, SettingsError};

/// Windows of one step: more is a typing error.
const BATCH_MAX: u64 = 1 << 20;

/// `train_batch_size = train_micro_batch_size_per_gpu * gradient_accumulation_steps` for one process; any two give the third.
pub(super) fn batch(config: &ConfigToml, seq_len: u64) -> Result<Batch, SettingsError> {
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
