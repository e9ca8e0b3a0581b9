//! DeepSpeed's batch arithmetic.

use super::{value, within};
use crate::error::SettingsError;

/// Largest number of samples in a step; a larger value is taken for a typing error.
const BATCH_MAX: u64 = 1 << 20;

/// The three sizes as written.
#[derive(Clone, Copy, Debug, Default)]
pub struct Sizes {
    pub train: Option<u64>,
    pub micro: Option<u64>,
    pub accumulated: Option<u64>,
}

/// Samples of a rank's micro-batch, micro-batches of a step, and ranks that train different sequences.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Batch {
    pub micro_batch: u64,
    pub micro_batches: u64,
    pub ranks: u64,
}

/// `train_batch_size = train_micro_batch_size_per_gpu * gradient_accumulation_steps * ranks`; two of the
/// three keys determine the third. If `ranks` is unknown (the run is only examined), all three keys determine
/// it. `None` if no number of samples is given. `sequence_ranks` processes that divide each sequence among themselves count
/// as one rank.
pub fn batch(
    given: Sizes,
    ranks: Option<u32>,
    sequence_ranks: u32,
) -> Result<Option<Batch>, SettingsError> {
    let times = |ranks| times(ranks, sequence_ranks);
    let (train, micro, steps) = (given.train, given.micro, given.accumulated);
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
        (None, None, _) => return Ok(None),
    };
    within("train_batch_size", micro * steps * ranks, 1, BATCH_MAX)?;
    Ok(Some(Batch {
        micro_batch: micro,
        micro_batches: steps,
        ranks,
    }))
}

/// Factor for several ranks in an error message.
fn times(ranks: u64, sequence_ranks: u32) -> String {
    match (ranks, sequence_ranks) {
        (1, _) => String::new(),
        (ranks, 1) => format!(" * {ranks} ranks"),
        (groups, _) => format!(" * {groups} groups of {sequence_ranks} ranks"),
    }
}
