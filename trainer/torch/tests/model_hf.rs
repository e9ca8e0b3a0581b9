//! Compares models with Hugging Face's library. `fixtures/hf/make.py` saved a small random model of each
//! architecture and trained it for ten steps with torch's AdamW. Training from the same directory must give
//! the same losses and gradient norms in fp32. This finds any difference in a block: a norm, a bias, an
//! angle, which heads share a key, the size of a window, the layout of a tensor in its file.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use kernels::adamw::{Hyper, Master, Rounding, Tile, state_tile_bytes, step_range};
use safetensors::SafeTensors;
use serde_json::Value;
use trainer_torch::compute::{Activation, Engine, GradSink, Tokens, UnitWeights, set_up};
use training_run::data::IGNORED;
use training_run::data::order;
use training_run::model::{Dtype, HfModel, UnitLayout, names};

/// Largest relative difference of a loss or a gradient norm.
const TOLERANCE: f64 = 2e-5;

fn dir() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/fixtures/hf")
}

/// A model in training without the trainer around it.
struct Training {
    engine: Engine,
    tied: bool,
    weights: Vec<UnitWeights>,
    /// Two moments for each unit.
    states: Vec<UnitWeights>,
    sinks: Vec<GradSink>,
    run: Value,
    text: Vec<u8>,
}

impl Training {
    fn new(name: &str, run: &Value) -> Self {
        set_up(1).unwrap();
        let dir = dir();
        let json = std::fs::read_to_string(dir.join(name).join("config.json")).unwrap();
        let model = HfModel::from_json(&json).unwrap();
        assert_eq!(model.notes, [""; 0], "every key of {name} is known");
        let config = model.config;
        let seq_len = run["seq_len"].as_u64().unwrap() as usize;
        let engine = Engine::new(&config, Dtype::Fp32, seq_len).unwrap();
        let bytes = std::fs::read(dir.join(name).join("model.safetensors")).unwrap();
        let file = SafeTensors::deserialize(&bytes).unwrap();
        let places = names::param_locations(&config);
        let units = engine.units().iter().zip(&places);
        let weights = units.map(|(unit, places)| read(unit, places, &file));
        let states = engine.units().iter().enumerate().map(|(number, unit)| {
            let elems = state_tile_bytes(Master::Fp32.into(), unit.elems) / size_of::<f32>();
            engine.new_padded_weights(number, elems).unwrap()
        });
        Training {
            weights: weights.collect(),
            states: states.collect(),
            sinks: (0..engine.units().len())
                .map(|unit| engine.new_grads(unit))
                .collect(),
            tied: config.tied,
            run: run.clone(),
            text: std::fs::read(dir.join("../text.txt")).unwrap(),
            engine,
        }
    }

    fn number(&self, key: &str) -> f64 {
        self.run[key].as_f64().unwrap()
    }

    /// Rows of step number `step`, from 0; each is one token longer than a sequence.
    fn rows(&self, step: u64) -> Vec<Vec<i64>> {
        let (seq_len, batch) = (self.number("seq_len") as u64, self.number("batch") as u64);
        let count = (self.text.len() as u64 - 1) / seq_len;
        let samples = step * batch..(step + 1) * batch;
        let row = |sample: u64| {
            let seed = self.number("seed") as u64;
            let window = order::permuted(seed, sample / count, count, sample % count);
            let tokens = self.text[(window * seq_len) as usize..].iter();
            let tokens = tokens.take(seq_len as usize + 1);
            tokens.map(|&byte| i64::from(byte)).collect()
        };
        samples.map(row).collect()
    }

    /// Runs step number `step`, from 0, in `micro_batches`. Returns the loss and the gradient norm.
    fn step(&mut self, step: u64, micro_batches: usize) -> (f64, f64) {
        let rows = self.rows(step);
        let share = 1.0 / micro_batches as f64;
        let parts = rows.chunks(rows.len() / micro_batches);
        let loss = parts
            .map(|rows| share * self.micro_batch(rows, share))
            .sum();
        let mut grads: Vec<UnitWeights> = Vec::new();
        for (unit, sink) in self.sinks.iter_mut().enumerate() {
            let mut flat = self.engine.new_weights(unit).unwrap();
            sink.finish(flat.bytes_mut()).unwrap();
            grads.push(flat);
        }
        let squares = grads.iter_mut().map(|flat| -> f64 {
            let numbers = flat.bytes_mut().chunks_exact(4);
            let numbers = numbers.map(|b| f64::from(f32::from_ne_bytes(b.try_into().unwrap())));
            numbers.map(|g| g * g).sum()
        });
        let norm = squares.sum::<f64>().sqrt();
        let clip = (self.number("gradient_clipping") / (norm + 1e-6)).min(1.0);
        for (unit, flat) in grads.iter_mut().enumerate() {
            self.update(unit, step, flat.bytes_mut(), clip);
        }
        (loss, norm)
    }

    /// Computes the loss and adds gradients to the sinks.
    fn micro_batch(&mut self, rows: &[Vec<i64>], share: f64) -> f64 {
        let (seq_len, vocab_size) = (rows[0].len() - 1, self.engine.config().vocab_size);
        let ids = |from: usize| -> Vec<i64> {
            let parts = rows.iter().map(|row| &row[from..from + seq_len]);
            parts.flatten().copied().collect()
        };
        let inputs = Tokens::inputs(&ids(0), rows.len(), seq_len, vocab_size).unwrap();
        let targets = Tokens::targets(&ids(1), rows.len(), seq_len, vocab_size).unwrap();
        self.forward_backward(&inputs, &targets, share)
    }

    fn forward_backward(&mut self, inputs: &Tokens, targets: &Tokens, share: f64) -> f64 {
        let (engine, weights) = (&self.engine, &self.weights);
        let head = weights.len() - 1;
        let mut kept: Vec<Activation> = vec![engine.embed_forward(&weights[0], inputs).unwrap()];
        for (unit, block) in weights.iter().enumerate().take(head).skip(1) {
            let input = kept.last().unwrap();
            kept.push(engine.block_forward(unit, block, input).unwrap());
        }
        let (embedding, rest) = self.sinks.split_at_mut(1);
        let tied = self.tied.then(|| (&weights[0], &mut embedding[0]));
        let last = kept.pop().unwrap();
        let head_grads = &mut rest[head - 1];
        let (loss, mut grad) = engine
            .head_loss_backward(&weights[head], tied, &last, targets, share, head_grads)
            .unwrap();
        for unit in (1..head).rev() {
            let input = kept.pop().unwrap();
            let block_grads = &mut rest[unit - 1];
            grad = engine
                .block_backward(unit, &weights[unit], &input, &grad, block_grads)
                .unwrap();
        }
        engine
            .embed_backward(inputs, &grad, &mut embedding[0])
            .unwrap();
        loss.value().unwrap()
    }

    fn update(&mut self, unit: usize, step: u64, grad: &[u8], clip: f64) {
        let hyper = Hyper {
            lr: self.number("lr") as f32,
            beta1: self.number("beta1") as f32,
            beta2: self.number("beta2") as f32,
            eps: self.number("eps") as f32,
            weight_decay: self.number("weight_decay") as f32,
            step: step + 1,
            grad_scale: clip as f32,
            rounding: Rounding::ZERO,
        };
        let layout = &self.engine.units()[unit];
        let (weights, state) = (self.weights[unit].bytes_mut(), &mut self.states[unit]);
        for param in &layout.params {
            let hyper = match param.decay {
                true => hyper,
                false => Hyper {
                    weight_decay: 0.0,
                    ..hyper
                },
            };
            let (state, range) = (state.bytes_mut(), param.range_elems());
            let tile = Tile {
                format: Master::Fp32.into(),
                param: &mut *weights,
                state,
                grad,
                elems: layout.elems,
            };
            step_range(&hyper, tile, Master::Fp32.grad_type(), range);
        }
    }
}

/// Reads a unit's weights from a file's tensors.
fn read(unit: &UnitLayout, places: &[names::ParamLocation], file: &SafeTensors) -> UnitWeights {
    let mut weights = UnitWeights::new(unit, Dtype::Fp32).unwrap();
    for (param, place) in unit.params.iter().zip(places) {
        let tensor = file.tensor(&place.name).unwrap();
        assert_eq!(
            tensor.shape(),
            place.stored_shape(&param.shape),
            "{}",
            place.name
        );
        for elem in 0..param.elems() {
            let from = place.stored_elem(&param.shape, elem) * 4;
            let to = (param.offset_elems + elem) * 4;
            weights.bytes_mut()[to..to + 4].copy_from_slice(&tensor.data()[from..from + 4]);
        }
    }
    weights
}

/// Trains the model of `name` like the fixture's script.
fn ten_steps_match_the_library(name: &str) {
    let text = std::fs::read_to_string(dir().join("losses.json")).unwrap();
    let fixture: Value = serde_json::from_str(&text).unwrap();
    for (how, micro_batches) in [("immediate", 1), ("accumulated", 2)] {
        let expected = &fixture[name][how];
        let mut training = Training::new(name, &fixture["run"]);
        for step in 0..10 {
            let (loss, norm) = training.step(step as u64, micro_batches);
            for (what, ours, list) in [("loss", loss, "losses"), ("norm", norm, "grad_norms")] {
                let theirs = expected[list][step].as_f64().unwrap();
                let apart = (ours / theirs - 1.0).abs();
                assert!(
                    apart < TOLERANCE,
                    "{name} {how}, {what} of step {}: {ours}, the library has {theirs}: they differ by {apart:.1e}",
                    step + 1
                );
            }
        }
    }
}

/// Computes documents packed into sequences, and compares with the library, which computes each alone.
fn packed_documents_match_the_library(name: &str) {
    let text = std::fs::read_to_string(dir().join("losses.json")).unwrap();
    let fixture: Value = serde_json::from_str(&text).unwrap();
    let expected = &fixture[name]["documents"];
    let mut training = Training::new(name, &fixture["run"]);
    let lengths = fixture["run"]["documents"].as_array().unwrap().iter();
    let lengths: Vec<usize> = lengths.map(|n| n.as_u64().unwrap() as usize).collect();
    let count: usize = lengths.iter().sum();
    let mut targets: Vec<i64> = (training.text[1..=count].iter())
        .map(|&byte| i64::from(byte))
        .collect();
    let mut starts = Vec::new();
    let mut start = 0;
    for length in lengths {
        starts.push(start);
        start += length;
        targets[start - 1] = IGNORED;
    }
    let ids: Vec<i64> = (training.text[..count].iter())
        .map(|&byte| i64::from(byte))
        .collect();
    let seq_len = training.number("seq_len") as usize;
    let vocab_size = training.engine.config().vocab_size;
    let inputs = Tokens::inputs(&ids, count / seq_len, seq_len, vocab_size).unwrap();
    let inputs = inputs.in_documents(&starts).unwrap();
    let targets = Tokens::targets(&targets, count / seq_len, seq_len, vocab_size).unwrap();
    let loss = training.forward_backward(&inputs, &targets, 1.0);
    let near = |what: &str, ours: f64, theirs: f64, scale: f64| {
        let apart = (ours - theirs).abs() / scale;
        assert!(
            apart < 1e-5,
            "{name}, {what}: {ours}, the library has {theirs}: they differ by {apart:.1e}"
        );
    };
    let theirs = expected["loss"].as_f64().unwrap();
    near("loss", loss, theirs, theirs);
    // Norm of a gradient and its product with cos(i). A tensor of the file may hold several parameters.
    let mut found: BTreeMap<String, [f64; 2]> = BTreeMap::new();
    let places = names::param_locations(training.engine.config());
    let units = training.engine.units().iter().zip(&places);
    for ((unit, places), sink) in units.zip(&mut training.sinks) {
        let mut flat = UnitWeights::new(unit, Dtype::Fp32).unwrap();
        sink.finish(flat.bytes_mut()).unwrap();
        for (param, place) in unit.params.iter().zip(places) {
            let sums = found.entry(place.name.clone()).or_default();
            for elem in 0..param.elems() {
                let at = (param.offset_elems + elem) * 4;
                let grad = flat.bytes_mut()[at..at + 4].try_into().unwrap();
                let grad = f64::from(f32::from_ne_bytes(grad));
                sums[0] += grad * grad;
                sums[1] += grad * (place.stored_elem(&param.shape, elem) as f64).cos();
            }
        }
    }
    let theirs = expected["grads"].as_object().unwrap();
    assert_eq!(found.len(), theirs.len());
    for (name, [squares, product]) in found {
        let [norm, cos] = [0, 1].map(|at| theirs[&name][at].as_f64().unwrap());
        near(&name, squares.sqrt(), norm, norm);
        near(&name, product, cos, norm);
    }
}

#[test]
fn packed_documents_of_every_family_match_the_library() {
    for name in [
        "gpt2",
        "llama",
        "llama3",
        "llama_yarn",
        "mistral",
        "qwen2",
        "qwen3",
    ] {
        packed_documents_match_the_library(name);
    }
}

#[test]
fn gpt2_matches_the_library() {
    ten_steps_match_the_library("gpt2");
}

#[test]
fn llama_matches_the_library() {
    ten_steps_match_the_library("llama");
}

#[test]
fn llama_with_scaled_positions_and_biases_matches_the_library() {
    ten_steps_match_the_library("llama3");
    ten_steps_match_the_library("llama_yarn");
}

#[test]
fn mistral_with_a_window_shorter_than_the_sequence_matches_the_library() {
    ten_steps_match_the_library("mistral");
}

#[test]
fn qwen2_with_a_window_in_its_last_layer_matches_the_library() {
    ten_steps_match_the_library("qwen2");
}

#[test]
fn qwen3_matches_the_library() {
    ten_steps_match_the_library("qwen3");
}
