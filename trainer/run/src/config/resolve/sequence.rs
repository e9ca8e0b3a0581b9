//! Resolves `train.sequence_parallel`: ranks that divide each sequence among themselves.

use offload_support::units::CountOf;

use super::model::ResolvedModel;
use super::{value, within};
use crate::config::toml::ConfigToml;
use crate::config::{Batch, SettingsError};
use crate::model::ModelConfig;

const KEY: &str = "train.sequence_parallel";

/// Most ranks of one sequence; a larger value is taken for a typing error.
const RANKS_MAX: u64 = 4096;

/// The number in its own key, or in DeepSpeed's.
fn sequence_parallel(config: &ConfigToml) -> Option<u64> {
    (config.train.sequence_parallel).or(config.sequence_parallel_size)
}

/// Returns the ranks that divide each sequence, of which all `ranks` are a multiple if their number is known.
pub(super) fn ranks(config: &ConfigToml, ranks: Option<u32>) -> Result<u32, SettingsError> {
    let count = sequence_parallel(config).unwrap_or(1);
    within(KEY, count, 1, RANKS_MAX)?;
    match ranks {
        Some(ranks) if !u64::from(ranks).is_multiple_of(count) => Err(value(
            KEY,
            format!(
                "{count}: the run has {}, which is no multiple of it: start a multiple of {count} (`trainer launch --nproc {count}`), or leave it out",
                CountOf(ranks, "rank")
            ),
        )),
        _ => Ok(count as u32),
    }
}

/// Checks that the ranks of a sequence can divide it and the model's heads. `ranks` is the number of all ranks, if it is known.
pub(super) fn check(
    batch: &Batch,
    ranks: Option<u32>,
    resolved: &ResolvedModel,
) -> Result<(), SettingsError> {
    let (model, dropout) = (&resolved.config, &resolved.dropout);
    let count = batch.sequence_ranks as usize;
    if count == 1 {
        return Ok(());
    }
    let seq_len = batch.seq_len;
    let Some(why) = refusal(count, seq_len, model) else {
        return match dropout.is_none() {
            true => Ok(()),
            false => Err(value(
                KEY,
                format!(
                    "{count}: dropout is decided for whole sequences: set the model's dropout probabilities to 0 (attention_dropout; for GPT-2 also embd_pdrop and resid_pdrop), or leave the setting out"
                ),
            )),
        };
    };
    let all: Vec<usize> = (2..=model.heads)
        .filter(|count| refusal(*count, seq_len, model).is_none())
        .collect();
    let of_ranks =
        |count: &&usize| ranks.is_none_or(|ranks| (ranks as usize).is_multiple_of(**count));
    let here: Vec<&usize> = all.iter().filter(of_ranks).collect();
    let list = |counts: &[&usize]| {
        let counts: Vec<String> = counts.iter().map(ToString::to_string).collect();
        counts.join(", ")
    };
    let advice = match (here.as_slice(), all.as_slice()) {
        ([], []) => "no number of ranks can divide it: leave the setting out".to_owned(),
        ([], all) => format!(
            "these numbers can, with a multiple of as many ranks (`trainer launch --nproc N`): {}",
            list(&all.iter().collect::<Vec<_>>())
        ),
        (here, _) => format!("these numbers can: {}", list(here)),
    };
    Err(value(KEY, format!("{count}: {why}; {advice}")))
}

/// Returns why `count` ranks cannot divide a sequence; `None` if they can.
fn refusal(count: usize, seq_len: usize, model: &ModelConfig) -> Option<String> {
    let (heads, kv_heads) = (model.heads, model.kv_heads);
    if !seq_len.is_multiple_of(count) {
        return Some(format!(
            "each rank has the same number of tokens, and train.seq_len = {seq_len} is no multiple of {count}"
        ));
    }
    if !heads.is_multiple_of(count) {
        return Some(format!(
            "each rank computes attention for the same number of heads, and model.num_attention_heads = {heads} is no multiple of {count}"
        ));
    }
    // With more ranks than heads of keys and values, several ranks have the same one.
    let share = kv_heads.is_multiple_of(count) || count.is_multiple_of(kv_heads);
    (!share).then(|| {
        format!(
            "each rank computes attention for the same number of key heads, or several ranks for one, and model.num_key_value_heads = {kv_heads} is neither a multiple nor a divisor of {count}"
        )
    })
}
