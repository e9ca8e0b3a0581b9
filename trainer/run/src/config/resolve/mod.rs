//! Checks values against their ranges and against each other, and fills in defaults.

mod data;
mod model;
mod offload;
mod optimizer;
mod placement;
mod precision;
mod sequence;
mod train;

use training_settings::resolve::batch::{self, Sizes};
use training_settings::resolve::{
    Faults, at_least, bytes, fraction, not_negative, required, value, within, word,
};
use training_settings::resolve::{optimizer as any_optimizer, reports, schedule};

use super::toml::{ConfigToml, TrainToml};
use super::{
    Batch, LrSchedule, Reader, Remarks, RunSettings, SettingsError, TrainSettings, WrittenFor,
};
use model::ResolvedModel;

/// Longest sequence; a larger value is taken for a typing error.
const SEQ_LEN_MAX: u64 = 1 << 20;

/// Settings before they were resolved, to resolve them again when the number of steps is known.
#[derive(Clone, Debug)]
pub(super) struct UnresolvedSettings {
    pub(super) config: ConfigToml,
    name: String,
    written_for: WrittenFor,
    said: Remarks,
}

impl UnresolvedSettings {
    /// Resolves the settings of a run of `steps` steps, whatever its length was.
    pub(super) fn with_steps(&self, steps: u64, ranks: u32) -> Result<RunSettings, SettingsError> {
        let mut config = self.config.clone();
        config.train.epochs = None;
        config.train.steps = Some(steps);
        let said = self.said.clone();
        resolve(config, &self.name, Some(ranks), self.written_for, said)
            .map_err(|faults| SettingsError::all(faults).expect_err("there is at least one error"))
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
    mut said: Remarks,
) -> Result<RunSettings, Vec<SettingsError>> {
    let faults = &mut Faults::default();
    let unresolved = Box::new(UnresolvedSettings {
        config: config.clone(),
        name: name.to_owned(),
        written_for,
        said: said.clone(),
    });
    let (steps, seq_len) = steps_and_seq_len(&config.train, faults);
    // Checks that depend on an invalid number use 1 in its place.
    let (steps_or_one, seq_len_or_one) = (steps.unwrap_or(1), seq_len.unwrap_or(1));
    let batch = faults.collect(batch(&config, seq_len_or_one, ranks));
    let all_ranks = batch.map_or(1, |(_, ranks)| ranks);
    let (table, bf16) = (&config.optimizer, &config.bf16);
    let optimizer = any_optimizer::optimizer(table, bf16, Reader::Trainer, &mut said, faults);
    let lr = optimizer.as_ref().map_or(0.0, |optimizer| optimizer.lr);
    // A run without steps has a schedule too, although nothing uses it.
    let lr = faults.collect(lr_schedule(
        &config,
        lr,
        steps_or_one.max(1),
        written_for,
        &mut said,
    ));
    let (zero, offload) = (&config.zero_optimization, &config.offload);
    let placement = placement::placement(zero, offload, &mut said.notes);
    let placement = faults.collect(placement);
    let model = faults.collect(model::model(&config.model, seq_len_or_one, &mut said));
    let precision = faults.collect(precision::precision(&config, model.as_ref(), &mut said));
    if let Some(optimizer) = &optimizer {
        let model = model.as_ref().map(|model| &model.config);
        let dtype = precision.as_ref().map(|(dtype, _)| *dtype);
        optimizer::check(optimizer, model, dtype, &mut said.notes, faults);
    }
    let gradient_clipping = config.gradient_clipping.unwrap_or(1.0);
    faults.collect(not_negative("gradient_clipping", gradient_clipping));
    let data = faults.collect(data::data(&config.data, steps_or_one));
    let train = train::train(
        &config,
        name,
        steps_or_one,
        all_ranks,
        data.as_ref(),
        faults,
    );
    check_with(&model, &batch, (seq_len, ranks), &train, faults);
    let device = train.as_ref().map(|train| train.device);
    let offload = offload::offload(&config, placement.as_ref(), device, &mut said.notes, faults);
    let reports = train.as_ref().and_then(|train| {
        faults.collect(reports::reports(
            config.wall_clock_breakdown,
            &config.tensorboard,
            &config.csv_monitor,
            &train.run_dir,
        ))
    });
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
        local_ranks: ranks,
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
        unresolved,
    })
}

/// Checks what depends on the model, as far as all of it is known.
fn check_with(
    model: &Option<ResolvedModel>,
    batch: &Option<(Batch, u32)>,
    (seq_len, ranks): (Option<u64>, Option<u32>),
    train: &Option<TrainSettings>,
    faults: &mut Faults,
) {
    let Some(model) = model else { return };
    if let (Some((batch, _)), Some(_)) = (batch, seq_len) {
        faults.collect(sequence::check(batch, ranks, model));
    }
    if let Some(train) = train {
        faults.collect(train::check_mlp_chunks(train.mlp_chunks, &model.config));
    }
}

/// The schedule of a run of `steps` steps with the optimizer's learning rate `lr`.
fn lr_schedule(
    config: &ConfigToml,
    lr: f64,
    steps: u64,
    written_for: WrittenFor,
    said: &mut Remarks,
) -> Result<LrSchedule, SettingsError> {
    if config.scheduler.kind.is_some() {
        return schedule::schedule(&config.scheduler, lr, Some(steps), &mut said.notes);
    }
    let is_left_out = any_optimizer::is_left_out(&config.optimizer);
    Ok(schedule::left_out(
        is_left_out,
        lr,
        steps,
        written_for,
        said,
    ))
}

/// The batch of one rank, and the number of ranks.
fn batch(
    config: &ConfigToml,
    seq_len: u64,
    ranks: Option<u32>,
) -> Result<(Batch, u32), SettingsError> {
    let given = Sizes {
        train: config.train_batch_size,
        micro: config.train_micro_batch_size_per_gpu,
        accumulated: config.gradient_accumulation_steps,
    };
    let sequence_ranks = sequence::ranks(config, ranks)?;
    let groups = ranks.map(|ranks| ranks / sequence_ranks);
    let Some(found) = batch::batch(given, groups, sequence_ranks)? else {
        return Err(SettingsError::Missing {
            key: "train_micro_batch_size_per_gpu",
            message: "set it, or train_batch_size",
        });
    };
    let batch = Batch {
        micro_batch: found.micro_batch as usize,
        micro_batches: found.micro_batches as usize,
        seq_len: seq_len as usize,
        sequence_ranks,
    };
    Ok((batch, found.ranks as u32 * sequence_ranks))
}

/// Value of `train.steps` before [`RunSettings::set_windows`](super::RunSettings::set_windows) in a run whose length is set in epochs.
const STEPS_UNKNOWN: u64 = u64::MAX;

/// Resolves the two numbers that every run file contains. The number of steps of a run whose length is set in
/// epochs is not known yet.
fn steps_and_seq_len(train: &TrainToml, faults: &mut Faults) -> (Option<u64>, Option<u64>) {
    let steps = match (train.steps, train.epochs) {
        (Some(_), Some(_)) => Err(value(
            "train.epochs",
            "contradicts train.steps: leave one of them out",
        )),
        (None, Some(epochs)) if epochs.is_finite() && epochs > 0.0 => Ok(STEPS_UNKNOWN),
        (None, Some(epochs)) => Err(value(
            "train.epochs",
            format!("{epochs}: must be more than 0"),
        )),
        (steps, None) => required(
            "train.steps",
            steps,
            "set the number of optimizer steps, or train.epochs",
        ),
    };
    let steps = faults.collect(steps);
    let seq_len = required(
        "train.seq_len",
        train.seq_len,
        "set the number of tokens in a sequence",
    );
    let seq_len = faults.collect(seq_len.and_then(|seq_len| {
        within("train.seq_len", seq_len, 1, SEQ_LEN_MAX)?;
        Ok(seq_len)
    }));
    (steps, seq_len)
}
