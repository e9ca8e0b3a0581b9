//! Compares the first training step with a loop in plain PyTorch, `fixtures/llama_losses.py`, from the same
//! weights and tokens: loss and gradient norm must agree. This finds errors in formulas that the model's own
//! gradients do not show (a norm's epsilon, the rotary angles, which heads share a key).

use std::path::Path;

use serde_json::Value;
use trainer_torch::compute::{Engine, GradSink, Tokens, UnitWeights, set_up};
use training_run::model::{Dtype, ModelConfig, init};

struct Fixture {
    config: ModelConfig,
    seed: u64,
    seq_len: usize,
    /// Token rows of the first step, one token longer than `seq_len`.
    rows: Vec<Vec<i64>>,
    loss: f64,
    grad_norm: f64,
}

fn fixture(tied: bool) -> Fixture {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/fixtures");
    let json: Value =
        serde_json::from_str(&std::fs::read_to_string(dir.join("llama_losses.json")).unwrap())
            .unwrap();
    let text = std::fs::read(dir.join("text.txt")).unwrap();
    let result = if tied { &json["tied"] } else { &json };
    let seq_len = json["run"]["seq_len"].as_u64().unwrap() as usize;
    let windows = result["windows"][0].as_array().unwrap();
    let row = |window: &Value| {
        let start = window.as_u64().unwrap() as usize * seq_len;
        text[start..=start + seq_len]
            .iter()
            .map(|&byte| i64::from(byte))
            .collect()
    };
    let config: ModelConfig = serde_json::from_value(json["config"].clone()).unwrap();
    Fixture {
        config: ModelConfig { tied, ..config },
        seed: json["run"]["seed"].as_u64().unwrap(),
        seq_len,
        rows: windows.iter().map(row).collect(),
        loss: result["losses"][0].as_f64().unwrap(),
        grad_norm: result["grad_norms"][0].as_f64().unwrap(),
    }
}

/// Loss and global gradient norm of the first step, computed in micro-batches of `rows_each` rows.
fn first_step(fixture: &Fixture, dtype: Dtype, rows_each: usize) -> (f64, f64) {
    set_up(2).unwrap();
    let engine = Engine::new(&fixture.config, dtype, fixture.seq_len).unwrap();
    let weights: Vec<UnitWeights> = (0..engine.units().len())
        .map(|unit| fresh(fixture, &engine, unit, dtype))
        .collect();
    let mut sinks: Vec<GradSink> = (0..weights.len())
        .map(|unit| engine.new_grads(unit))
        .collect();
    let micro_batches: Vec<&[Vec<i64>]> = fixture.rows.chunks(rows_each).collect();
    let share = 1.0 / micro_batches.len() as f64;
    let loss = micro_batches
        .iter()
        .map(|rows| share * micro_batch(&engine, fixture, &weights, &mut sinks, rows, share));
    let loss = loss.sum();
    let squares: f64 = sinks
        .iter_mut()
        .map(|sink| {
            let mut bytes = vec![0u8; sink.size_bytes()];
            sink.finish(&mut bytes).unwrap();
            numbers(&bytes, dtype)
                .iter()
                .map(|&g| f64::from(g).powi(2))
                .sum::<f64>()
        })
        .sum();
    (loss, squares.sqrt())
}

fn micro_batch(
    engine: &Engine,
    fixture: &Fixture,
    weights: &[UnitWeights],
    sinks: &mut [GradSink],
    rows: &[Vec<i64>],
    share: f64,
) -> f64 {
    let seq_len = fixture.seq_len;
    let ids = |from: usize| -> Vec<i64> {
        rows.iter()
            .flat_map(|row| row[from..from + seq_len].to_vec())
            .collect()
    };
    let vocab_size = fixture.config.vocab_size;
    let inputs = Tokens::inputs(&ids(0), rows.len(), seq_len, vocab_size).unwrap();
    let targets = Tokens::targets(&ids(1), rows.len(), seq_len, vocab_size).unwrap();
    let head = weights.len() - 1;
    let mut kept = vec![engine.embed_forward(&weights[0], &inputs).unwrap()];
    for (unit, block) in weights.iter().enumerate().take(head).skip(1) {
        let input = kept.last().unwrap();
        kept.push(engine.block_forward(unit, block, input).unwrap());
    }
    let (embedding, rest) = sinks.split_at_mut(1);
    let tied = fixture
        .config
        .tied
        .then(|| (&weights[0], &mut embedding[0]));
    let last = kept.pop().unwrap();
    let (loss, mut grad) = engine
        .head_loss_backward(
            &weights[head],
            tied,
            &last,
            &targets,
            share,
            &mut rest[head - 1],
        )
        .unwrap();
    for unit in (1..head).rev() {
        let input = kept.pop().unwrap();
        grad = engine
            .block_backward(unit, &weights[unit], &input, &grad, &mut rest[unit - 1])
            .unwrap();
    }
    engine
        .embed_backward(&inputs, &grad, &mut embedding[0])
        .unwrap();
    loss.value().unwrap()
}

fn fresh(fixture: &Fixture, engine: &Engine, unit: usize, dtype: Dtype) -> UnitWeights {
    let layout = &engine.units()[unit];
    let mut values = vec![0f32; layout.elems];
    init::fill(
        layout,
        unit,
        fixture.seed,
        fixture.config.initializer_range,
        0..layout.elems,
        &mut values,
    );
    let mut weights = UnitWeights::new(layout, dtype).unwrap();
    for (place, value) in weights
        .bytes_mut()
        .chunks_exact_mut(dtype.elem_bytes())
        .zip(values)
    {
        match dtype {
            Dtype::Fp32 => place.copy_from_slice(&value.to_ne_bytes()),
            Dtype::Bf16 => place.copy_from_slice(&half::bf16::from_f32(value).to_ne_bytes()),
            Dtype::Fp16 => place.copy_from_slice(&half::f16::from_f32(value).to_ne_bytes()),
        }
    }
    weights
}

fn numbers(bytes: &[u8], dtype: Dtype) -> Vec<f32> {
    match dtype {
        Dtype::Fp32 => bytes
            .chunks_exact(4)
            .map(|b| f32::from_ne_bytes(b.try_into().unwrap()))
            .collect(),
        Dtype::Bf16 => bytes
            .chunks_exact(2)
            .map(|b| half::bf16::from_ne_bytes(b.try_into().unwrap()).to_f32())
            .collect(),
        Dtype::Fp16 => bytes
            .chunks_exact(2)
            .map(|b| half::f16::from_ne_bytes(b.try_into().unwrap()).to_f32())
            .collect(),
    }
}

fn assert_close(what: &str, ours: f64, pytorch: f64, tolerance: f64) {
    let error = (ours / pytorch - 1.0).abs();
    assert!(
        error < tolerance,
        "{what}: {ours} here, {pytorch} in PyTorch, they differ by {error:.1e}"
    );
}

#[test]
fn the_first_step_in_fp32_matches_pytorch() {
    for tied in [false, true] {
        let fixture = fixture(tied);
        let (loss, norm) = first_step(&fixture, Dtype::Fp32, 4);
        assert_close("loss", loss, fixture.loss, 1e-5);
        assert_close("gradient norm", norm, fixture.grad_norm, 1e-5);
    }
}

#[test]
fn micro_batches_add_up_to_the_batch() {
    for tied in [false, true] {
        let fixture = fixture(tied);
        for rows_each in [1, 2] {
            let (loss, norm) = first_step(&fixture, Dtype::Fp32, rows_each);
            assert_close("loss", loss, fixture.loss, 1e-5);
            assert_close("gradient norm", norm, fixture.grad_norm, 1e-5);
        }
    }
}

#[test]
fn the_first_step_in_bf16_is_close_to_pytorch() {
    for tied in [false, true] {
        let fixture = fixture(tied);
        let (loss, norm) = first_step(&fixture, Dtype::Bf16, 2);
        assert_close("loss", loss, fixture.loss, 1e-3);
        assert_close("gradient norm", norm, fixture.grad_norm, 1e-2);
    }
}

#[test]
fn the_first_step_in_fp16_is_closer_than_in_bf16() {
    for tied in [false, true] {
        let fixture = fixture(tied);
        let (loss, norm) = first_step(&fixture, Dtype::Fp16, 2);
        assert_close("loss", loss, fixture.loss, 1e-4);
        assert_close("gradient norm", norm, fixture.grad_norm, 2e-3);
    }
}

#[test]
fn two_threads_give_the_same_bits_each_time() {
    let fixture = fixture(false);
    for dtype in [Dtype::Fp32, Dtype::Bf16, Dtype::Fp16] {
        let bits = || {
            let (loss, norm) = first_step(&fixture, dtype, 2);
            (loss.to_bits(), norm.to_bits())
        };
        let first = bits();
        assert!((0..5).all(|_| bits() == first), "{dtype:?}");
    }
}
