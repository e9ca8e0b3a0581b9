//! DeepSpeed's batch arithmetic.

use super::{value, within};
use crate::config::toml::ConfigToml;
use crate::config::{Batch, SettingsError};

/// Largest number of samples in a step; a larger value is taken for a typing error.
const BATCH_MAX: u64 = 1 << 20;

/// `train_batch_size = train_micro_batch_size_per_gpu * gradient_accumulation_steps * ranks`; two of the
/// three keys determine the third. If `ranks` is unknown (the run is only examined), all three keys determine
/// it.
pub(super) fn batch(
    config: &ConfigToml,
    seq_len: u64,
    ranks: Option<u32>,
) -> Result<(Batch, u32), SettingsError> {
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
    let ranks = match (ranks, train, micro, steps) {
        (Some(ranks), ..) => u64::from(ranks),
        (None, Some(train), Some(micro), Some(steps)) if train % (micro * steps) == 0 => {
            train / (micro * steps)
        }
        (None, ..) => 1,
    };
    let divided = |by: u64, what: &'static str| match train.unwrap_or(0) {
        train if train % (by * ranks) == 0 => Ok(train / (by * ranks)),
        train => Err(value(
            "train_batch_size",
            format!("{train} is not a multiple of {what} = {by}{}", times(ranks)),
        )),
    };
    let (micro, steps) = match (train, micro, steps) {
        (Some(train), Some(micro), Some(steps)) if train != micro * steps * ranks => {
            return Err(value(
                "train_batch_size",
                format!(
                    "{train} contradicts train_micro_batch_size_per_gpu * gradient_accumulation_steps{0} = {micro} * {steps}{0} = {1}",
                    times(ranks),
                    micro * steps * ranks
                ),
            ));
        }
        (_, Some(micro), Some(steps)) => (micro, steps),
        (Some(_), Some(micro), None) => (micro, divided(micro, "train_micro_batch_size_per_gpu")?),
        (Some(_), None, Some(steps)) => (divided(steps, "gradient_accumulation_steps")?, steps),
        (Some(_), None, None) => (divided(1, "one sample for each rank")?, 1),
        (None, Some(micro), None) => (micro, 1),
        (None, None, _) => {
            return Err(SettingsError::Missing {
                key: "train_micro_batch_size_per_gpu",
                message: "set it, or train_batch_size",
            });
        }
    };
    within("train_batch_size", micro * steps * ranks, 1, BATCH_MAX)?;
    let batch = Batch {
        micro_batch: micro as usize,
        micro_batches: steps as usize,
        seq_len: seq_len as usize,
    };
    Ok((batch, ranks as u32))
}

/// Factor for several ranks in an error message.
fn times(ranks: u64) -> String {
    match ranks {
        1 => String::new(),
        ranks => format!(" * {ranks} ranks"),
    }
}
