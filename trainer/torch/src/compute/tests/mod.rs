//! Errors that these tests find: a wrong gradient (compared with finite differences in fp64, for every
//! parameter of every unit); a wrong block by block order (compared bit for bit with one graph over the whole
//! model); wrong handling of ignored targets, tied weights, sums over micro-batches and buffer positions.

mod buffers;
mod documents;
mod dropout;
mod explicit;
mod forms;
mod fp8;
mod gradients;
mod sink;
mod tiled;
mod whole_graph;

use tch::Kind;

use super::documents::Batch;
use super::{Activation, ComputeError, Engine, GradSink, GradSums, Tokens, UnitWeights, set_up};
use training_run::data::IGNORED;
use training_run::model::{Dropout, ModelConfig, init};

/// Model with weights and one micro-batch, small enough to try every parameter.
struct Case {
    engine: Engine,
    kind: Kind,
    weights: Vec<UnitWeights>,
    inputs: Tokens,
    targets: Tokens,
}

fn config(tied: bool) -> ModelConfig {
    ModelConfig {
        vocab_size: 11,
        hidden_size: 8,
        intermediate_size: 12,
        layers: 2,
        heads: 4,
        kv_heads: 2,
        head_dim: Some(4),
        rope_theta: 100.0,
        norm_eps: 1e-5,
        tied,
        initializer_range: 0.3,
        max_position_embeddings: 16,
        ..ModelConfig::default()
    }
}

const MICRO_BATCH: usize = 2;
const SEQ_LEN: usize = 5;

impl Case {
    fn new(tied: bool, kind: Kind) -> Self {
        Self::from_config(&config(tied), kind, MICRO_BATCH, SEQ_LEN)
    }

    fn from_config(config: &ModelConfig, kind: Kind, micro_batch: usize, seq_len: usize) -> Self {
        // One thread for all of these tests: the models are too small for two, and the setting is global to
        // the process.
        set_up(1).unwrap();
        let engine = Engine::of_kind(config, kind, seq_len).unwrap();
        let weights = (0..engine.units().len())
            .map(|unit| random_weights(&engine, unit, kind))
            .collect();
        let vocab = config.vocab_size as i64;
        let ids: Vec<i64> = (0..(micro_batch * seq_len) as i64)
            .map(|i| (i * i + 3) % vocab)
            .collect();
        let mut targets: Vec<i64> = ids.iter().map(|id| (id * 5 + 1) % vocab).collect();
        targets[1] = IGNORED;
        Case {
            inputs: Tokens::inputs(&ids, micro_batch, seq_len, config.vocab_size).unwrap(),
            targets: Tokens::targets(&targets, micro_batch, seq_len, config.vocab_size).unwrap(),
            engine,
            kind,
            weights,
        }
    }

    /// Enables dropout, as in training.
    fn leaving_out(mut self, dropout: Dropout) -> Self {
        self.engine = self.engine.leaving_out(dropout, 11);
        self.inputs = self.inputs.numbered(5);
        self
    }

    /// Computes as a GPU does.
    fn written_out(mut self) -> Self {
        self.engine = self.engine.written_out();
        self
    }

    fn blocks(&self) -> std::ops::Range<usize> {
        1..self.head()
    }

    fn head(&self) -> usize {
        self.engine.units().len() - 1
    }

    fn tied(&self) -> Option<&UnitWeights> {
        self.engine.config().tied.then(|| &self.weights[0])
    }

    /// Inputs of every unit except the embedding.
    fn forward(&self) -> Vec<Activation> {
        let mut inputs = vec![
            self.engine
                .embed_forward(&self.weights[0], &self.inputs)
                .unwrap(),
        ];
        for unit in self.blocks() {
            inputs.push(
                self.engine
                    .block_forward(unit, &self.weights[unit], inputs.last().unwrap())
                    .unwrap(),
            );
        }
        inputs
    }

    fn loss(&self) -> f64 {
        let inputs = self.forward();
        let head = &self.weights[self.head()];
        self.engine
            .head_loss(head, self.tied(), inputs.last().unwrap(), &self.targets)
            .and_then(|loss| loss.value())
            .unwrap()
    }

    /// Loss and every unit's flat gradient, computed block by block.
    fn loss_and_grads(&self, loss_scale: f64) -> (f64, Vec<Vec<u8>>) {
        let mut inputs = self.forward();
        let mut sinks: Vec<GradSink> = (0..self.weights.len())
            .map(|unit| self.engine.new_grads(unit))
            .collect();
        let (embedding, rest) = sinks.split_at_mut(1);
        let tied = self.tied().map(|weights| (weights, &mut embedding[0]));
        let head = self.head();
        let input = inputs.pop().unwrap();
        let (loss, mut grad) = self
            .engine
            .head_loss_backward(
                &self.weights[head],
                tied,
                &input,
                &self.targets,
                loss_scale,
                &mut rest[head - 1],
            )
            .unwrap();
        for unit in self.blocks().rev() {
            let input = inputs.pop().unwrap();
            grad = self
                .engine
                .block_backward(
                    unit,
                    &self.weights[unit],
                    &input,
                    &grad,
                    &mut rest[unit - 1],
                )
                .unwrap();
        }
        self.engine
            .embed_backward(&self.inputs, &grad, &mut embedding[0])
            .unwrap();
        let loss = loss.value().unwrap();
        (loss, sinks.iter_mut().map(finished).collect())
    }
}

fn finished(sink: &mut GradSink) -> Vec<u8> {
    let mut bytes = aligned(sink.size_bytes());
    sink.finish(&mut bytes).unwrap();
    bytes
}

/// Aligned bytes that are not zero, so that a missing write is noticed.
fn aligned(bytes: usize) -> Vec<u8> {
    let memory = vec![0xA5u8; bytes];
    assert_eq!(
        memory.as_ptr() as usize % 8,
        0,
        "the allocator aligns to words"
    );
    memory
}

/// Random weights of a unit; norms and biases differ from one and zero, and between units.
fn random_weights(engine: &Engine, unit: usize, kind: Kind) -> UnitWeights {
    let layout = &engine.units()[unit];
    let mut values = vec![0f32; layout.elems];
    init::fill(
        layout,
        unit,
        7,
        engine.config().initializer_range,
        0..layout.elems,
        &mut values,
    );
    for param in layout.params.iter().filter(|param| !param.decay) {
        for (i, value) in values[param.range_elems()].iter_mut().enumerate() {
            *value += 0.25 * (((i + 5 * unit) % 16) as f32 - 3.0) / 4.0;
        }
    }
    let mut weights = UnitWeights::of_kind(layout, kind).unwrap();
    let width = kind.elt_size_in_bytes();
    for (place, value) in weights.bytes_mut().chunks_exact_mut(width).zip(&values) {
        match kind {
            Kind::Double => place.copy_from_slice(&f64::from(*value).to_ne_bytes()),
            Kind::Float => place.copy_from_slice(&value.to_ne_bytes()),
            Kind::BFloat16 => place.copy_from_slice(&half::bf16::from_f32(*value).to_ne_bytes()),
            other => panic!("no weights of kind {other:?}"),
        }
    }
    weights
}

fn f64s(bytes: &[u8]) -> Vec<f64> {
    bytes
        .chunks_exact(8)
        .map(|b| f64::from_ne_bytes(b.try_into().unwrap()))
        .collect()
}

#[test]
fn tokens_that_do_not_fit_are_refused() {
    assert!(matches!(
        Tokens::inputs(&[1, 2, 3], 2, 2, 8),
        Err(ComputeError::TokenCount { count: 3, .. })
    ));
    assert!(matches!(
        Tokens::inputs(&[], 0, 2, 8),
        Err(ComputeError::TokenCount { count: 0, .. })
    ));
    for (ids, at) in [
        ([1, 8], 1),
        ([-1, 0], 0),
        ([IGNORED, 0], 0),
        ([0, i64::MAX], 1),
    ] {
        match Tokens::inputs(&ids, 1, 2, 8) {
            Err(ComputeError::TokenOutside { position, .. }) => assert_eq!(position, at),
            _ => panic!("{ids:?} was accepted"),
        }
    }
    assert_eq!(
        Tokens::targets(&[IGNORED, 7], 1, 2, 8).unwrap().counted(),
        1
    );
    assert!(matches!(
        Tokens::targets(&[0, -99], 1, 2, 8),
        Err(ComputeError::TokenOutside { position: 1, .. })
    ));
    let case = Case::new(false, Kind::Float);
    let long = Tokens::inputs(&[0; SEQ_LEN + 1], 1, SEQ_LEN + 1, 11).unwrap();
    assert!(matches!(
        case.engine.embed_forward(&case.weights[0], &long),
        Err(ComputeError::SequenceTooLong { seq_len: 6, max: 5 })
    ));
}

#[test]
fn a_later_token_changes_nothing_before_it() {
    let mut case = Case::new(false, Kind::Double);
    let before = case.forward().pop().unwrap().tensor;
    let mut ids = Vec::<i64>::try_from(case.inputs.ids.view([-1])).unwrap();
    ids[SEQ_LEN - 2] = (ids[SEQ_LEN - 2] + 1) % 11; // the last but one of the first sequence
    case.inputs = Tokens::inputs(&ids, MICRO_BATCH, SEQ_LEN, 11).unwrap();
    let after = case.forward().pop().unwrap().tensor;
    let same = |batch: i64, position: i64| {
        before
            .get(batch)
            .get(position)
            .equal(&after.get(batch).get(position))
    };
    for position in 0..SEQ_LEN as i64 {
        assert_eq!(
            same(0, position),
            position < SEQ_LEN as i64 - 2,
            "position {position}"
        );
        assert!(same(1, position), "the other sequence is not affected");
    }
}

#[test]
fn uniform_predictions_have_the_logarithm_of_the_vocabulary_size_as_loss() {
    let mut case = Case::new(false, Kind::Float);
    let head = case.head();
    let projection = case.engine.units()[head].params[1].range_elems();
    case.weights[head].bytes_mut()[projection.start * 4..projection.end * 4].fill(0);
    assert!((case.loss() - 11f64.ln()).abs() < 1e-6);
}

#[test]
fn the_loss_in_slices_equals_the_loss_at_once() {
    let whole = Case::new(false, Kind::Float);
    let (loss, grads) = whole.loss_and_grads(1.0);
    for logits_elems_max in [1, 11 * 3, 11 * 10 - 1] {
        let mut sliced = Case::new(false, Kind::Float);
        sliced.engine = sliced.engine.with_logits_elems_max(logits_elems_max);
        assert!((sliced.loss() - loss).abs() < 1e-6);
        let (sliced_loss, sliced_grads) = sliced.loss_and_grads(1.0);
        assert!((sliced_loss - loss).abs() < 1e-6);
        for (a, b) in grads
            .iter()
            .flatten()
            .collect::<Vec<_>>()
            .chunks(4)
            .zip(sliced_grads.iter().flatten().collect::<Vec<_>>().chunks(4))
        {
            let number = |b: &[&u8]| f32::from_ne_bytes([*b[0], *b[1], *b[2], *b[3]]);
            assert!((number(a) - number(b)).abs() < 1e-6);
        }
    }
}

#[test]
fn the_loss_is_the_mean_over_counted_targets() {
    let mut case = Case::new(false, Kind::Double);
    let rows = MICRO_BATCH * SEQ_LEN;
    let all: Vec<i64> = (0..rows as i64).map(|i| i % 11).collect();
    let mut loss_of = |counts: &dyn Fn(usize) -> bool| {
        let chosen: Vec<i64> = all
            .iter()
            .enumerate()
            .map(|(i, &id)| if counts(i) { id } else { IGNORED })
            .collect();
        case.targets = Tokens::targets(&chosen, MICRO_BATCH, SEQ_LEN, 11).unwrap();
        case.loss()
    };
    let sum: f64 = (0..rows).map(|row| loss_of(&|i| i == row)).sum();
    assert!((loss_of(&|_| true) - sum / rows as f64).abs() < 1e-12);
    let three: f64 = (0..3).map(|row| loss_of(&|i| i == row)).sum();
    assert!((loss_of(&|i| i < 3) - three / 3.0).abs() < 1e-12);
}

#[test]
fn a_batch_without_targets_has_no_loss_and_no_gradient() {
    let mut case = Case::new(true, Kind::Float);
    case.targets =
        Tokens::targets(&[IGNORED; MICRO_BATCH * SEQ_LEN], MICRO_BATCH, SEQ_LEN, 11).unwrap();
    let (loss, grads) = case.loss_and_grads(1.0);
    assert_eq!(loss, 0.0);
    assert!(
        grads.iter().flatten().all(|&byte| byte & 0x7F == 0),
        "zeros of either sign"
    );
}
