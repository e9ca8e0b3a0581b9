//! Runs one optimizer step in the order that `step_order.rs` defines as data.
//!
//! The micro-batches of a group are processed together: a unit is gathered once and serves all of them, so weights move
//! twice a group (forward and backward) for any number of micro-batches in it. Between forward and backward each
//! block's input is kept. Groups follow one another (`groups.rs`).

use std::ops::Range;
use std::sync::Arc;

use kernels::adamw::{Hyper, Master, Rounding};
use kernels::gpu::Gpu;
use kernels_torch::collective::TensorExchange;
use swapper::Scratch;
use test_hooks::kill_point::{Point, reach};

use super::TrainError;
use super::clock::Clock;
use super::groups::{GroupSums, Groups, Sinks};
use super::inputs::{BlockInputs, InputPlace};
use super::mover::{self, ExchangedBytes, Memory, Muon, Shards, StepDirections, Tiles, TilesIn};
use super::step_order::{self, EMBEDDING, PlannedTurn, Turn};
use super::watch::Watch;
use crate::compute::{Activation, ComputeError, Engine, LossHandle, Tokens};
use training_run::computation::Checkpointing;
use training_run::config::{Batch, RunSettings, Stage};
use training_run::data::IGNORED;
use training_run::data::{Data, Windows};
use training_state::learning_rate::{betas, learning_rate};
use training_state::trace::Trace;

/// Micro-batches that are evaluated in one pass over the weights.
const EVALUATION_BATCHES: u64 = 4;

/// Everything a step needs except the weights.
pub(super) struct Stepper {
    engine: Engine,
    batch: Batch,
    groups: Groups,
    /// Sums of gradients between groups; `None` if there is one group.
    sums: Option<GroupSums>,
    shards: Shards,
    /// The ranks that divide each sequence; `None` if this one has whole sequences.
    sequence: Option<Arc<TensorExchange>>,
    gpu: Option<Gpu>,
    muon: Option<Muon>,
    inputs: InputPlace,
    training: Arc<step_order::Pass>,
    evaluation: Arc<step_order::Pass>,
    /// First sample and micro-batches of the next step, which were read while gradients left.
    pub(super) next: Option<(u64, Vec<MicroBatch>)>,
}

/// Micro-batch in the form that the engine takes.
pub(super) struct MicroBatch {
    inputs: Tokens,
    targets: Tokens,
}

/// Results of a step's forward and backward passes. The gradients are in the backend and wait for the update.
pub(super) struct Gradients {
    /// Mean over the step's tokens that have a target.
    pub(super) loss: f64,
    /// Global norm before clipping, of the unscaled loss.
    pub(super) norm: f64,
    /// Computing time in seconds, without waiting for weights.
    pub(super) forward_s: f64,
    pub(super) backward_s: f64,
    /// Seconds in which computing waited for weights and sums of other ranks.
    pub(super) exchange_s: f64,
    /// Bytes exchanged with the other ranks.
    pub(super) exchanged: ExchangedBytes,
    /// Highest number of bytes of unit gradients held whole at the same time.
    pub(super) held_bytes: u64,
}

/// Numbers of tokens that have a target: on this rank, and on all ranks.
#[derive(Clone, Copy)]
struct TokenCounts {
    own: f64,
    all: f64,
    /// Factor on the loss in backward.
    scale: f64,
}

impl TokenCounts {
    /// Returns the weight of a micro-batch in the step. Each token with a target weighs the same in whichever
    /// micro-batch or rank it is. If all tokens have targets, the weight is exactly one divided by the number
    /// of micro-batches.
    fn share(self, batch: &MicroBatch) -> f64 {
        batch.targets.counted() as f64 / self.all.max(1.0)
    }
}

/// State of a forward or backward pass.
struct PassState {
    batches: Vec<MicroBatch>,
    groups: Groups,
    /// The micro-batches that are processed now.
    group: Range<usize>,
    counted: TokenCounts,
    /// Output of the newest unit for each micro-batch; in backward, the gradient of that unit's input.
    flow: Vec<Activation>,
    /// Inputs of the blocks whose backward has not run yet.
    block_inputs: Vec<BlockInputs>,
    /// Whether a backward pass follows.
    goes_back: bool,
    grads: Sinks,
    /// The loss of each micro-batch.
    losses: Vec<LossHandle>,
    forward: Clock,
    backward: Clock,
    /// Waiting for weights and sums of other ranks.
    exchange: Clock,
}

impl PassState {
    fn new(
        batches: Vec<MicroBatch>,
        groups: Groups,
        counted: TokenCounts,
        units: usize,
        gpu: Option<&Gpu>,
    ) -> Self {
        Self {
            batches,
            groups,
            group: groups.first(),
            counted,
            flow: Vec::new(),
            block_inputs: Vec::with_capacity(units),
            goes_back: true,
            grads: Sinks::new(units),
            losses: Vec::new(),
            forward: Clock::new(gpu),
            backward: Clock::new(gpu),
            exchange: Clock::new(gpu),
        }
    }

    /// Describes `turn` for a person; `head` is the last unit.
    fn words(&self, turn: Turn, head: usize) -> String {
        let words = turn.words(head);
        match self.groups.count() {
            1 => words,
            _ => format!(
                "micro-batches {} to {} of {}: {words}",
                self.group.start + 1,
                self.group.end,
                self.batches.len()
            ),
        }
    }

    /// Memory for sums of gradients until the next group; `None` in the last group.
    fn kept<'a>(&self, sums: &'a Option<GroupSums>) -> Option<&'a GroupSums> {
        let sums = || sums.as_ref().expect("a step of several groups has it");
        (!self.groups.ends_with(&self.group)).then(sums)
    }
}

impl Stepper {
    /// Makes the stepper and the memory to compute in. Micro-batches are processed in groups of `group_size`.
    ///
    /// # Errors
    /// Out of memory.
    pub(super) fn new(
        engine: Engine,
        gpu: Option<Gpu>,
        (batch, group_size, inputs): (Batch, usize, InputPlace),
        (master, muon): (Master, Option<Muon>),
        tiles_in: TilesIn,
        stage: Stage,
        shards: Shards,
    ) -> Result<(Self, Memory), TrainError> {
        // A single rank on the processor gathers by copying memory, so starting early gains nothing.
        let ahead = gpu.is_some() || shards.count() > 1;
        let units = engine.units().len();
        let buffers = step_order::block_buffers(units, ahead, stage);
        let gpu_of = gpu.as_ref();
        let memory = Memory::new(&engine, gpu_of, master, stage, buffers, tiles_in, &shards)?;
        let groups = Groups::new(batch.micro_batches, group_size);
        let sums = (groups.count() > 1).then(|| GroupSums::new(&engine));
        let copies = shards.keeps_copies();
        let training = step_order::Pass::training(units, ahead, stage, groups.count(), copies);
        let stepper = Self {
            gpu,
            groups,
            sums: sums.transpose()?,
            inputs,
            training: Arc::new(match &muon {
                Some(_) => training.with_directions(units - 1),
                None => training,
            }),
            muon,
            evaluation: Arc::new(step_order::Pass::evaluation(units, ahead)),
            next: None,
            sequence: None,
            shards,
            engine,
            batch,
        };
        Ok((stepper, memory))
    }

    /// The GPU that computes.
    pub(super) fn gpu(&self) -> Option<&Gpu> {
        self.gpu.as_ref()
    }

    /// Gives the storage of block inputs the run's `scratch` tiles, if it keeps them on devices.
    ///
    /// # Errors
    /// The GPU fails; the system has no thread left.
    pub(super) fn attach_scratch(&mut self, scratch: Option<Scratch>) -> Result<(), TrainError> {
        self.inputs.attach(scratch, self.gpu.as_ref())
    }

    /// Divides each sequence among the ranks of `sequence`.
    pub(super) fn in_sequence(self, sequence: Option<Arc<TensorExchange>>) -> Self {
        Self {
            engine: self.engine.in_sequence(sequence.clone()),
            sequence,
            ..self
        }
    }

    /// Runs forward and backward over this rank's samples of the step that begins with `first_sample`. Every
    /// unit's gradients, of the loss times `scale`, are summed over the ranks and scattered. Calls `begins` before
    /// each part with words for it.
    pub(super) fn forward_backward(
        &mut self,
        tiles: &mut Tiles,
        data: &Data,
        (first_sample, scale): (u64, f64),
        trace: &Trace,
        begins: &mut dyn FnMut(&str),
    ) -> Result<Gradients, TrainError> {
        // Ranks take the step's samples in order, as one rank would take them in more micro-batches. Those that divide each sequence take
        // the same samples.
        let sequence_ranks = self.batch.sequence_ranks;
        let group = u64::from(self.shards.rank() / sequence_ranks);
        let groups = self.shards.count() as u64 / u64::from(sequence_ranks);
        let own_sample = first_sample + group * self.batch.samples();
        let batches = match self.next.take() {
            Some((first, batches)) if first == own_sample => batches,
            _ => self.micro_batches(data, own_sample)?,
        };
        let head = self.engine.units().len() - 1;
        let own = counted(&batches);
        let all = if data.masked() {
            let mut all = [own];
            self.shards.sum(&mut all)?;
            all[0]
        } else {
            own * self.shards.count() as f64
        };
        let counted = TokenCounts { own, all, scale };
        let mut pass = PassState::new(batches, self.groups, counted, head + 1, self.gpu.as_ref());
        self.inputs.begin(pass.group.len());
        let gpu = self.gpu.clone();
        let mut watch = Watch::new(trace, gpu.as_ref());
        tiles.begin_step(self.training.program())?;
        // Discards the counts of an evaluation's gathers.
        self.shards.take_exchanged();
        let mut held_bytes = 0;
        let training = self.training.clone();
        for planned in training.around_norm().0 {
            begins(&pass.words(planned.turn, head));
            self.planned(planned, tiles, &mut pass, &mut watch, trace)?;
            held_bytes = held_bytes.max(pass.grads.held_bytes());
            if planned.turn == Turn::Reduce(EMBEDDING) {
                // Nothing is left to compute, so the GPU and the network would wait for the next step's tokens later. That step
                // reads them again and reports the error if they cannot be read.
                let next = own_sample + self.batch.samples() * groups;
                let batches = self.micro_batches(data, next);
                self.next = batches.ok().map(|batches| (next, batches));
            }
        }
        begins("norm of the gradients");
        // Read last because this waits for the GPU; nothing before it does.
        let squares = mover::sum_squares(tiles)?;
        self.engine.check()?;
        // This rank's part of the step's mean loss, weighted by its tokens.
        let loss = match own {
            0.0 => 0.0,
            own => mean(&pass)? / (all / own),
        };
        let (norm, loss) = self.shards.norm_and_loss(squares, loss)?;
        watch.end()?;
        mover::add_spans_to(tiles, trace)?;
        Ok(Gradients {
            loss,
            norm: norm / scale,
            forward_s: pass.forward.seconds()?,
            backward_s: pass.backward.seconds()?,
            exchange_s: pass.exchange.seconds()?,
            exchanged: self.shards.take_exchanged(),
            held_bytes,
        })
    }

    /// Replaces the gradients of matrices by directions, with Muon, and begins to update their blocks. The step must then be finished with the same
    /// `hyper`. Returns the seconds in which the matrices were made orthogonal.
    pub(super) fn orthogonalize(
        &mut self,
        tiles: &mut Tiles,
        hyper: &Hyper,
        trace: &Trace,
    ) -> Result<f64, TrainError> {
        let Some(muon) = &self.muon else {
            return Ok(0.0);
        };
        let mut directions = StepDirections::new(muon, hyper.grad_scale, self.gpu.as_ref());
        let mut watch = Watch::new(trace, self.gpu.as_ref());
        let (_, turns) = self.training.around_norm();
        mover::settle_updates(tiles, &step_order::program(turns))?;
        for (number, planned) in turns.iter().enumerate() {
            let Turn::Orthogonalize(unit) = planned.turn else {
                unreachable!("no other turn is after the norm");
            };
            watch.record(planned.turn, || {
                mover::orthogonalize(tiles, &self.engine, unit, &mut directions, trace)
            })?;
            let rest = step_order::program(&turns[number + 1..]);
            mover::update_revised(tiles, unit, hyper, &rest)?;
            reach(Point::Revised);
        }
        self.engine.check()?;
        watch.end()?;
        mover::add_spans_to(tiles, trace)?;
        directions.seconds()
    }

    /// Returns the mean loss over the validation data, or over its first `most` micro-batches. No operation may be
    /// pending. Calls `begins` before each part with words for it.
    pub(super) fn evaluate(
        &mut self,
        tiles: &mut Tiles,
        data: &Data,
        most: Option<u64>,
        begins: &mut dyn FnMut(&str),
    ) -> Result<f64, TrainError> {
        let rows = self.batch.micro_batch;
        let all = data.holdout_windows().div_ceil(rows as u64);
        let count = most.map_or(all, |most| most.min(all));
        let (mut loss, mut counted) = (0.0, 0.0);
        let mut first = 0;
        // Weights move once for all micro-batches of a pass; each takes memory for its activations.
        while first < count {
            let batches = (first..count.min(first + EVALUATION_BATCHES))
                .map(|batch| self.held_out(data, batch * rows as u64))
                .collect::<Result<Vec<_>, _>>()?;
            let last = first + batches.len() as u64;
            let words = format!(
                "validation, micro-batches {} to {last} of {count}",
                first + 1
            );
            first = last;
            let (mean, own) = self.evaluate_batches(tiles, batches, &words, begins)?;
            loss += mean * own;
            counted += own;
        }
        Ok(loss / f64::max(counted, 1.0))
    }

    /// Makes a micro-batch of the validation windows from `first` on. Rows after the last window do not count.
    fn held_out(&self, data: &Data, first: u64) -> Result<MicroBatch, TrainError> {
        let rows = self.batch.micro_batch;
        let mut windows = data.holdout(first, rows)?;
        let left = (data.holdout_windows() - first).min(rows as u64) as usize;
        windows.targets[left * self.batch.seq_len..].fill(IGNORED);
        self.tokens(&windows, None)
    }

    /// Returns the mean loss over `batches`, and the number of tokens that it is over. `words` describe them.
    fn evaluate_batches(
        &mut self,
        tiles: &mut Tiles,
        batches: Vec<MicroBatch>,
        words: &str,
        begins: &mut dyn FnMut(&str),
    ) -> Result<(f64, f64), TrainError> {
        let head = self.engine.units().len() - 1;
        // All ranks evaluate the same batches.
        let own = counted(&batches);
        let counted = TokenCounts {
            own,
            all: own,
            scale: 1.0,
        };
        let groups = Groups::new(batches.len(), batches.len());
        let mut pass = PassState::new(batches, groups, counted, head + 1, self.gpu.as_ref());
        tiles.begin_step(self.evaluation.program())?;
        pass.goes_back = false;
        let keep = (self.engine).set_checkpointing(Checkpointing::default());
        let trace = Trace::off();
        let mut watch = Watch::new(&trace, self.gpu.clone().as_ref());
        let done = (self.evaluation.clone().step_order().iter()).try_for_each(|planned| {
            begins(&format!("{words}: {}", planned.turn.words(head)));
            self.planned(planned, tiles, &mut pass, &mut watch, &trace)
        });
        self.engine.set_checkpointing(keep);
        done?;
        let loss = mean(&pass)?;
        self.shards.check()?;
        self.engine.check()?;
        let Some(sequence) = &self.sequence else {
            return Ok((loss, own));
        };
        // Of the tokens of all ranks that divide the sequences.
        let mut sums = [loss * own, own];
        sequence.sum(&mut sums)?;
        let [sum, counted] = sums;
        Ok((sum / counted.max(1.0), counted))
    }

    /// Runs one turn of a pass with the weights it needs.
    fn planned(
        &mut self,
        planned: &PlannedTurn,
        tiles: &mut Tiles,
        pass: &mut PassState,
        watch: &mut Watch,
        trace: &Trace,
    ) -> Result<(), TrainError> {
        for &unit in &planned.uses {
            (pass.exchange).time(|| mover::ready(tiles, unit, trace))?;
        }
        watch.record(planned.turn, || self.turn(planned.turn, tiles, pass, trace))?;
        let mut units = planned.gives_back.iter();
        units.try_for_each(|&unit| mover::give_back(tiles, unit))
    }

    /// Runs one turn of a pass.
    fn turn(
        &mut self,
        turn: Turn,
        tiles: &mut Tiles,
        pass: &mut PassState,
        trace: &Trace,
    ) -> Result<(), TrainError> {
        let Self {
            engine,
            inputs,
            sums,
            ..
        } = self;
        let kept = pass.kept(sums);
        let PassState {
            batches,
            group,
            flow,
            block_inputs,
            grads,
            ..
        } = pass;
        let batches = &batches[group.clone()];
        let head = engine.units().len() - 1;
        match turn {
            Turn::Gather(unit) => mover::gather(tiles, engine, unit, trace)?,
            Turn::GatherCopy(unit) => mover::gather_copy(tiles, unit, trace)?,
            Turn::Forward(EMBEDDING) => {
                let weights = mover::weights(tiles, EMBEDDING);
                *flow = pass.forward.time(|| {
                    each(batches, |batch| {
                        engine.embed_forward(weights, &batch.inputs)
                    })
                })?;
            }
            Turn::Forward(block) => {
                let weights = mover::weights(tiles, block);
                let outputs = pass
                    .forward
                    .time(|| each(flow, |input| engine.block_forward(block, weights, input)))?;
                reach(Point::Forward);
                let used = std::mem::replace(flow, outputs);
                if pass.goes_back {
                    block_inputs.push(inputs.keep(block_inputs.len(), used)?);
                }
            }
            Turn::Head if !pass.goes_back => {
                let tied = engine.config().tied;
                let tied = tied.then(|| mover::weights(tiles, EMBEDDING));
                let weights = mover::weights(tiles, head);
                for (batch, input) in batches.iter().zip(&*flow) {
                    let loss = engine.head_loss(weights, tied, input, &batch.targets)?;
                    pass.losses.push(loss);
                }
            }
            Turn::Head => {
                inputs.expect(block_inputs.len())?;
                head_turn(engine, tiles, pass, kept)?;
            }
            Turn::Backward(EMBEDDING) => {
                let empty = || mover::sink(tiles, engine, EMBEDDING);
                let mut embedding_grads = grads.take_or(EMBEDDING, empty)?;
                pass.backward.time(|| {
                    let mut pairs = batches.iter().zip(&*flow);
                    pairs.try_for_each(|(batch, grad)| {
                        engine.embed_backward(&batch.inputs, grad, &mut embedding_grads)
                    })?;
                    if kept.is_none()
                        && let Some(of_head) = grads.complete_tied()
                    {
                        embedding_grads.add_sums(of_head)?;
                    }
                    grads.put(EMBEDDING, embedding_grads, kept)
                })?;
            }
            Turn::Backward(block) => {
                let used = block_inputs.pop().expect("one for each block");
                let mut block_grads = grads.take_or(block, || mover::sink(tiles, engine, block))?;
                let weights = mover::weights(tiles, block);
                let mut input_grads = Vec::with_capacity(used.len());
                for (input, grad) in used.into_iter().zip(&*flow) {
                    // Waiting for it is not computing.
                    let (input, sink) = (inputs.fetch(input)?, &mut block_grads);
                    let backward = || engine.block_backward(block, weights, &input, grad, sink);
                    input_grads.push(pass.backward.time(backward)?);
                }
                *flow = input_grads;
                pass.backward.time(|| grads.put(block, block_grads, kept))?;
                reach(Point::Backward);
            }
            Turn::NextGroup => {
                flow.clear();
                *group = pass.groups.after(group);
                inputs.begin(group.len());
            }
            Turn::Orthogonalize(_) => unreachable!("comes after the norm"),
            Turn::Reduce(unit) => mover::reduce(tiles, unit, grads.complete(unit), trace)?,
            Turn::Scatter(unit) => {
                (pass.exchange).time(|| mover::summed(tiles, unit, trace))?;
                mover::scatter(tiles, unit, trace)?;
            }
        }
        Ok(())
    }

    fn micro_batches(&self, data: &Data, first_sample: u64) -> Result<Vec<MicroBatch>, TrainError> {
        let rows = self.batch.micro_batch;
        let firsts =
            (0..self.batch.micro_batches).map(|batch| first_sample + (batch * rows) as u64);
        firsts
            .map(|first| self.tokens(&data.samples(first, rows)?, Some(first)))
            .collect()
    }

    /// Makes a micro-batch of windows, or of this rank's part of each; in training it carries the number of its first sample.
    fn tokens(
        &self,
        windows: &Windows,
        first_sample: Option<u64>,
    ) -> Result<MicroBatch, TrainError> {
        let (rows, seq_len) = (self.batch.micro_batch, self.batch.seq_len);
        let vocab_size = self.engine.config().vocab_size;
        let own_len = self.batch.own_seq_len();
        let first_token = self.sequence.as_ref().map_or(0, |ranks| ranks.rank()) * own_len;
        let own = |ids: &[i64]| -> Vec<i64> {
            let parts = ids.chunks_exact(seq_len);
            let parts = parts.map(|row| &row[first_token..first_token + own_len]);
            parts.flatten().copied().collect()
        };
        let inputs = Tokens::inputs(&own(&windows.inputs), rows, own_len, vocab_size)?
            .part_of(seq_len, first_token)
            .in_documents(&windows.documents)?;
        let inputs = match first_sample {
            Some(first) => inputs.numbered(first),
            None => inputs,
        };
        let targets = Tokens::targets(&own(&windows.targets), rows, own_len, vocab_size)?;
        Ok(MicroBatch {
            inputs: self.engine.take_tokens(inputs)?,
            targets: self.engine.take_tokens(targets)?,
        })
    }
}

/// Hyperparameters of update number `step`. `norm` is the norm of the gradients, which are multiplied by
/// `scale`.
pub(super) fn hyper(settings: &RunSettings, step: u64, norm: f64, scale: f64) -> Hyper {
    let optimizer = &settings.optimizer;
    let [beta1, beta2] = betas(&settings.lr, step).unwrap_or(optimizer.betas);
    Hyper {
        lr: learning_rate(&settings.lr, step) as f32,
        beta1: beta1 as f32,
        beta2: beta2 as f32,
        eps: optimizer.eps as f32,
        // Each group of parameters has its own.
        weight_decay: 0.0,
        step,
        grad_scale: (clip_factor(settings.gradient_clipping, norm) / scale) as f32,
        // Tiles add their unit and first element.
        rounding: Rounding {
            seed: settings.train.seed,
            ..Rounding::ZERO
        },
    }
}

/// Returns the factor that limits the global norm `norm` to `clipping` (0: no limit).
fn clip_factor(clipping: f64, norm: f64) -> f64 {
    if clipping == 0.0 {
        1.0
    } else {
        (clipping / (norm + 1e-6)).min(1.0)
    }
}

/// Computes the loss and the gradients that flow into the last block; each micro-batch is weighted by its
/// part of the step.
fn head_turn(
    engine: &Engine,
    tiles: &Tiles,
    pass: &mut PassState,
    kept: Option<&GroupSums>,
) -> Result<(), TrainError> {
    let unit = engine.units().len() - 1;
    let sinks = &mut pass.grads;
    let mut head_grads = sinks.take_or(unit, || mover::sink(tiles, engine, unit))?;
    let mut tied_grads = sinks.take_tied(engine);
    let (batches, counted) = (&pass.batches[pass.group.clone()], pass.counted);
    let inputs = std::mem::take(&mut pass.flow);
    let losses = &mut pass.losses;
    pass.flow = pass.backward.time(|| {
        let head = mover::weights(tiles, unit);
        let mut grads = Vec::with_capacity(batches.len());
        for (batch, input) in batches.iter().zip(inputs) {
            let tied = tied_grads.as_mut();
            let tied = tied.map(|grads| (mover::weights(tiles, EMBEDDING), grads));
            let share = counted.share(batch) * counted.scale;
            let targets = &batch.targets;
            let (loss, grad) =
                engine.head_loss_backward(head, tied, &input, targets, share, &mut head_grads)?;
            losses.push(loss);
            grads.push(grad);
        }
        sinks.put(unit, head_grads, kept)?;
        // Added to the embedding's own gradients when both are complete.
        sinks.put_tied(tied_grads, kept)?;
        Ok::<_, ComputeError>(grads)
    })?;
    Ok(())
}

/// Calls `f` for each item in order, up to the first error.
fn each<T, R>(
    items: &[T],
    f: impl FnMut(&T) -> Result<R, ComputeError>,
) -> Result<Vec<R>, ComputeError> {
    items.iter().map(f).collect()
}

fn counted(batches: &[MicroBatch]) -> f64 {
    let counted = batches.iter().map(|batch| batch.targets.counted());
    counted.sum::<usize>() as f64
}

/// Mean loss over this rank's tokens that have a target; 0 if there are none.
fn mean(pass: &PassState) -> Result<f64, ComputeError> {
    let own = pass.counted.own;
    let counted = TokenCounts {
        all: own,
        ..pass.counted
    };
    let mut losses = pass.losses.iter().zip(&pass.batches);
    losses.try_fold(0.0, |sum, (loss, batch)| {
        Ok(sum + loss.value()? * counted.share(batch))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gradients_are_clipped_to_the_norm_and_never_enlarged() {
        assert_eq!(clip_factor(1.0, 0.5), 1.0);
        assert!((clip_factor(1.0, 4.0) - 0.25).abs() < 1e-6);
        assert_eq!(clip_factor(0.0, 1e9), 1.0);
        assert_eq!(clip_factor(1.0, 0.0), 1.0);
    }
}
