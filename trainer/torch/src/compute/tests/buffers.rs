//! Compares blocks that share a few weight buffers, as in a run, with blocks that each have their own: the
//! bits must be equal.
//!
//! The error that this finds: something kept from forward to backward refers to a buffer, which holds another
//! block's weights by then. Norms and biases differ between blocks here, and a buffer is filled with NaN as
//! soon as it is released.

use super::forms::{SOME, forms};
use super::*;
use training_run::computation::ActivationCheckpointing;

/// More blocks than buffers.
const LAYERS: usize = 4;
const BUFFERS: usize = 2;

const KEEPS: [ActivationCheckpointing; 3] = [
    ActivationCheckpointing::Full,
    ActivationCheckpointing::Attention,
    ActivationCheckpointing::Matmuls,
];

/// Weights of all units; those of blocks are gathered into buffers in turn.
struct GatheredWeights {
    sources: Vec<Vec<u8>>,
    buffers: Vec<UnitWeights>,
    newest: usize,
}

impl GatheredWeights {
    fn new(case: &mut Case) -> Self {
        let sources = case.weights.iter_mut();
        Self {
            sources: sources.map(|unit| unit.bytes_mut().to_vec()).collect(),
            buffers: (0..BUFFERS)
                .map(|_| UnitWeights::of_kind(&case.engine.units()[1], case.kind).unwrap())
                .collect(),
            newest: 0,
        }
    }

    fn gather(&mut self, unit: usize) -> &UnitWeights {
        self.newest = (self.newest + 1) % BUFFERS;
        let buffer = &mut self.buffers[self.newest];
        buffer.bytes_mut().copy_from_slice(&self.sources[unit]);
        buffer
    }

    fn give_back(&mut self) {
        self.buffers[self.newest].give_back().unwrap();
    }
}

/// Returns the bits of a step over several micro-batches: losses, and every unit's gradients. A unit serves
/// all micro-batches in one turn.
fn step(case: &mut Case, micro_batches: usize, shared: bool) -> (Vec<u64>, Vec<Vec<u8>>) {
    let vocab = case.engine.config().vocab_size;
    let rows = MICRO_BATCH * SEQ_LEN;
    let tokens = |batch: usize, factor: i64| -> Vec<i64> {
        let numbers = (0..rows as i64).map(|i| (i * i + 3 + 7 * batch as i64) * factor);
        numbers.map(|number| number % vocab as i64).collect()
    };
    let batches: Vec<(Tokens, Tokens)> = (0..micro_batches)
        .map(|batch| {
            let inputs = Tokens::inputs(&tokens(batch, 1), MICRO_BATCH, SEQ_LEN, vocab).unwrap();
            let targets = Tokens::targets(&tokens(batch, 5), MICRO_BATCH, SEQ_LEN, vocab).unwrap();
            (inputs.numbered((batch * MICRO_BATCH) as u64), targets)
        })
        .collect();
    let mut gathered = shared.then(|| GatheredWeights::new(case));
    let (engine, head) = (&case.engine, case.head());
    let mut sinks: Vec<GradSink> = (0..=head).map(|unit| engine.new_grads(unit)).collect();
    let mut flow: Vec<Activation> = batches
        .iter()
        .map(|(inputs, _)| engine.embed_forward(&case.weights[0], inputs).unwrap())
        .collect();
    let mut kept = Vec::new();
    for unit in case.blocks() {
        let weights = match &mut gathered {
            Some(gathered) => gathered.gather(unit),
            None => &case.weights[unit],
        };
        let outputs = flow
            .iter()
            .map(|input| engine.block_forward(unit, weights, input).unwrap())
            .collect();
        kept.push(std::mem::replace(&mut flow, outputs));
        if let Some(gathered) = &mut gathered {
            gathered.give_back();
        }
    }
    let (embedding, rest) = sinks.split_at_mut(1);
    let mut losses = Vec::new();
    let backs = flow.iter().zip(&batches).map(|(input, (_, targets))| {
        let tied = case.tied().map(|weights| (weights, &mut embedding[0]));
        let scale = 1.0 / micro_batches as f64;
        let grads = &mut rest[head - 1];
        let weights = &case.weights[head];
        let (loss, grad) = engine
            .head_loss_backward(weights, tied, input, targets, scale, grads)
            .unwrap();
        losses.push(loss.value().unwrap().to_bits());
        grad
    });
    let mut flow: Vec<Activation> = backs.collect();
    for unit in case.blocks().rev() {
        let weights = match &mut gathered {
            Some(gathered) => gathered.gather(unit),
            None => &case.weights[unit],
        };
        let pairs = kept.pop().unwrap().into_iter().zip(&flow);
        let grads = &mut rest[unit - 1];
        flow = pairs
            .map(|(input, grad)| {
                engine
                    .block_backward(unit, weights, &input, grad, grads)
                    .unwrap()
            })
            .collect();
        if let Some(gathered) = &mut gathered {
            gathered.give_back();
        }
    }
    for ((inputs, _), grad) in batches.iter().zip(&flow) {
        engine
            .embed_backward(inputs, grad, &mut embedding[0])
            .unwrap();
    }
    (losses, sinks.iter_mut().map(finished).collect())
}

/// Every form of block computed in each way: with autograd, with autograd and dropout, and with an explicit
/// backward if no window hides anything.
fn cases(kind: Kind) -> Vec<(String, Box<dyn Fn() -> Case>)> {
    let base = ModelConfig {
        layers: LAYERS,
        ..config(true)
    };
    let mut cases: Vec<(String, Box<dyn Fn() -> Case>)> = Vec::new();
    let mut add = |name: String, case: Box<dyn Fn() -> Case>| cases.push((name, case));
    for (name, config) in forms(&base).into_iter().chain([("llama", base)]) {
        let of = move |config: &ModelConfig| Case::from_config(config, kind, MICRO_BATCH, SEQ_LEN);
        let whole = ModelConfig {
            sliding_window: None,
            pad_token_id: None,
            ..config.clone()
        };
        let left_out = config.clone();
        add(
            format!("{name}, {kind:?}, by autograd"),
            Box::new(move || of(&config)),
        );
        add(
            format!("{name}, {kind:?}, dropout"),
            Box::new(move || of(&left_out).leaving_out(SOME)),
        );
        add(
            format!("{name}, {kind:?}, explicit"),
            Box::new(move || of(&whole).written_out()),
        );
    }
    cases
}

#[test]
fn blocks_with_shared_buffers_give_the_bits_of_blocks_with_their_own() {
    for (name, case) in [Kind::Float, Kind::BFloat16].into_iter().flat_map(cases) {
        for (tiles, micro_batches) in [(1, 2), (3, 2)] {
            let tiled = |keep| {
                let mut case = case();
                case.engine = case.engine.in_tiles(tiles).with_checkpointing(keep);
                case
            };
            let (losses, grads) = step(
                &mut tiled(ActivationCheckpointing::Full),
                micro_batches,
                false,
            );
            // An MLP in chunks is always recomputed.
            let keeps = if tiles > 1 { &KEEPS[2..] } else { &KEEPS };
            for &keep in keeps {
                let what = format!("{name}, {keep:?}, {tiles} tiles, {micro_batches} batches");
                println!("{what}");
                let found = step(&mut tiled(keep), micro_batches, true);
                assert_eq!(losses, found.0, "{what}");
                assert!(grads == found.1, "{what}: gradients");
            }
        }
    }
}

#[test]
fn kept_values_share_no_memory_with_a_units_weights() {
    for (name, case) in [Kind::Float, Kind::BFloat16].into_iter().flat_map(cases) {
        for keep in KEEPS {
            let mut case = case();
            case.engine = case.engine.with_checkpointing(keep);
            // The input of every block, and everything that the block kept with it.
            let kept = case.forward();
            assert_eq!(kept.len(), LAYERS + 1);
            for (unit, weights) in case.weights.iter().enumerate() {
                assert!(!weights.is_shared(), "{name}, {keep:?}: unit {unit}");
            }
            let bytes: usize = kept.iter().map(Activation::size_bytes).sum();
            drop(kept);
            (case.engine).set_checkpointing(ActivationCheckpointing::Full.into());
            let inputs = case.forward();
            let least: usize = inputs.iter().map(Activation::size_bytes).sum();
            let keeps = keep != ActivationCheckpointing::Full && name.ends_with("explicit");
            let written_out = keeps && !name.starts_with("gpt2");
            assert_eq!(bytes > least, written_out, "{name}, {keep:?}");
        }
    }
}

#[test]
fn released_weights_are_nan() {
    let mut case = Case::new(false, Kind::BFloat16);
    let inputs = case.forward();
    case.weights[1].give_back().unwrap();
    let output = case.engine.block_forward(1, &case.weights[1], &inputs[0]);
    let nans = output.unwrap().tensor.isnan().all();
    assert!(bool::try_from(nans).unwrap());
}

#[test]
#[should_panic(expected = "the weights of a unit are released")]
fn weights_with_references_cannot_be_released() {
    let mut case = Case::new(false, Kind::Float);
    let layout = &case.engine.units()[1];
    let _kept = case.weights[1].param(&layout.params[0], false).unwrap();
    case.weights[1].give_back().unwrap();
}
