//! Measures how fast a GPU computes a model of 1.345 G parameters: a block, the head, the embedding, and all
//! of forward and backward.
//!
//! `cargo run --release -p trainer --example model_speed [plain]`; `plain` uses torch operators instead of
//! fused kernels. Needs neither a configuration nor a store. All 24 blocks have the same weights.

use std::process::{Command, ExitCode};

use kernels::gpu::{DeviceBuffer, Gpu};
use kernels_torch::{CUBLAS_WORKSPACE, CUBLAS_WORKSPACES, empty_gpu_cache, gpu_memory};
use trainer::compute::{
    Activation, ActivationCheckpointing, ComputeDevice, Engine, Tokens, UnitWeights, Work,
    device_working_bytes, kept_bytes_a_token, set_up,
};
use trainer::model::{Dropout, Dtype, ModelConfig, init};

const MICRO_BATCH: usize = 8;
const SEQ_LEN: usize = 2048;
const REPEATS: usize = 20;

fn main() -> ExitCode {
    // cuBLAS reads the variable when it starts, so the program starts again with it.
    if std::env::var_os(CUBLAS_WORKSPACE).is_none() {
        let program = std::env::current_exe().expect("the path of this program is known");
        let status = Command::new(program)
            .args(std::env::args_os().skip(1))
            .env(CUBLAS_WORKSPACE, CUBLAS_WORKSPACES[0])
            .status();
        return ExitCode::from(!status.is_ok_and(|status| status.success()) as u8);
    }
    match measure(std::env::args().nth(1).as_deref() == Some("plain")) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("model_speed: {error}");
            ExitCode::FAILURE
        }
    }
}

fn config() -> ModelConfig {
    ModelConfig {
        vocab_size: 32000,
        hidden_size: 2048,
        intermediate_size: 5504,
        layers: 24,
        heads: 16,
        kv_heads: 16,
        head_dim: None,
        rope_theta: 1e4,
        norm_eps: 1e-5,
        tied: false,
        initializer_range: 0.02,
        max_position_embeddings: SEQ_LEN,
        ..ModelConfig::default()
    }
}

#[expect(
    clippy::too_many_lines,
    reason = "measurements in the order in which they run"
)]
fn measure(plain: bool) -> anyhow::Result<()> {
    let gpu = Gpu::open(0)?;
    println!("{:?}", gpu.info());
    let config = config();
    set_up(4)?;
    let device = ComputeDevice::Gpu(gpu.clone());
    let mut engine = Engine::on(&device, &config, Dtype::Bf16, SEQ_LEN)?;
    if plain {
        engine = engine.without_fused_kernels();
    }
    let head = engine.units().len() - 1;
    let weights = [0, 1, head].map(|unit| filled(&gpu, &engine, unit));
    let [embedding, block, last] = &weights;
    let ids: Vec<i64> = (0..MICRO_BATCH * SEQ_LEN)
        .map(|i| (i * 7919 % config.vocab_size) as i64)
        .collect();
    let tokens = Tokens::inputs(&ids, MICRO_BATCH, SEQ_LEN, config.vocab_size)?;
    let tokens = engine.take_tokens(tokens)?;
    let targets = Tokens::targets(&ids, MICRO_BATCH, SEQ_LEN, config.vocab_size)?;
    let targets = engine.take_tokens(targets)?;
    let buffers: Vec<DeviceBuffer> = [0, 1, head]
        .iter()
        .map(|&unit| gpu.alloc(engine.units()[unit].elems * 2))
        .collect::<Result<_, _>>()?;

    let input = engine.embed_forward(embedding, &tokens)?;
    let tokens_count = (MICRO_BATCH * SEQ_LEN) as f64;
    let block_params = engine.units()[1].params_elems() as f64;
    let head_params = engine.units()[head].params_elems() as f64;
    let products = |params: f64, times: f64| 2.0 * params * tokens_count * times / 1e12;
    // Causal attention: half of two products of seq_len by seq_len for each head; 2.5 times that in backward,
    // and the same once more for recomputation.
    let attention = 2.0 * tokens_count * SEQ_LEN as f64 * config.hidden_size as f64 / 1e12;

    timed(&gpu, "embedding forward", None, || {
        engine.embed_forward(embedding, &tokens)?;
        Ok(())
    })?;
    let tera = products(block_params, 1.0) + attention;
    timed(&gpu, "block forward", Some(tera), || {
        engine.block_forward(1, block, &input)?;
        Ok(())
    })?;
    let down = (config.hidden_size * config.intermediate_size) as f64;
    let tera = products(block_params, 3.0) - products(down, 1.0) + 3.5 * attention;
    timed(
        &gpu,
        "block backward with recomputation",
        Some(tera),
        || {
            let mut grads = engine.new_grads(1);
            grads.write_to(&buffers[1])?;
            engine.block_backward(1, block, &input, &input, &mut grads)?;
            Ok(grads.finish_into(&buffers[1], engine.units()[1].elems)?)
        },
    )?;
    timed(
        &gpu,
        "head, forward and backward",
        Some(products(head_params, 3.0)),
        || {
            let mut grads = engine.new_grads(head);
            engine.head_loss_backward(last, None, &input, &targets, 1.0, &mut grads)?;
            Ok(grads.finish_into(&buffers[2], engine.units()[head].elems)?)
        },
    )?;
    timed(&gpu, "embedding backward", None, || {
        let mut grads = engine.new_grads(0);
        engine.embed_backward(&tokens, &input, &mut grads)?;
        Ok(grads.finish_into(&buffers[0], engine.units()[0].elems)?)
    })?;

    for keep in [
        ActivationCheckpointing::Full,
        ActivationCheckpointing::Attention,
        ActivationCheckpointing::Matmuls,
    ] {
        engine = engine.with_checkpointing(keep);
        empty_gpu_cache()?;
        gpu_memory(&gpu, true)?;
        let forward = || -> anyhow::Result<Vec<Activation>> {
            let mut kept = vec![engine.embed_forward(embedding, &tokens)?];
            for _ in 0..config.layers {
                kept.push(engine.block_forward(
                    1,
                    block,
                    kept.last().expect("there is at least one input"),
                )?);
            }
            Ok(kept)
        };
        let backward = |mut kept: Vec<Activation>| -> anyhow::Result<()> {
            let mut grads = engine.new_grads(head);
            let input = kept.pop().expect("the last block's output");
            let (_, mut grad) =
                engine.head_loss_backward(last, None, &input, &targets, 1.0, &mut grads)?;
            grads.finish_into(&buffers[2], engine.units()[head].elems)?;
            while let Some(input) = kept.pop() {
                let mut grads = engine.new_grads(1);
                grads.write_to(&buffers[1])?;
                grad = engine.block_backward(1, block, &input, &grad, &mut grads)?;
                grads.finish_into(&buffers[1], engine.units()[1].elems)?;
            }
            let mut grads = engine.new_grads(0);
            engine.embed_backward(&tokens, &grad, &mut grads)?;
            Ok(grads.finish_into(&buffers[0], engine.units()[0].elems)?)
        };
        println!("activation checkpointing {keep:?}:");
        let forward_ms = timed(&gpu, "  all of forward", None, || forward().map(drop))?;
        let both_ms = timed(
            &gpu,
            "  forward and backward",
            None,
            || backward(forward()?),
        )?;
        let params = config.params_count() as f64;
        println!(
            "  {:.3} G parameters: {forward_ms:.1} ms forward, {:.1} ms backward, {:.0} TFLOPS (6 x parameters x tokens)",
            params / 1e9,
            both_ms - forward_ms,
            6.0 * params * tokens_count / 1e9 / both_ms
        );
        let memory = gpu_memory(&gpu, false)?;
        let kept_each =
            kept_bytes_a_token(&config, &Dropout::NONE, SEQ_LEN, 2, keep) * MICRO_BATCH * SEQ_LEN;
        let promised = (input.size_bytes() + kept_each) * (config.layers + 1);
        println!(
            "  torch's memory: {:.2} GiB at most, {:.2} reserved; planned {:.2} for activations, {:.2} for work",
            gib(memory.allocated_bytes_peak),
            gib(memory.reserved_bytes_peak),
            gib(promised as u64),
            gib(device_working_bytes(
                &config,
                &Dropout::NONE,
                Dtype::Bf16,
                Work {
                    micro_batch: MICRO_BATCH,
                    seq_len: SEQ_LEN,
                    micro_batches: 1,
                    tiles: 1,
                },
            )),
        );
    }
    Ok(())
}

fn gib(bytes: u64) -> f64 {
    bytes as f64 / (1u64 << 30) as f64
}

/// Prints and returns the median of [`REPEATS`] times, in ms. `tera` is what it computes, in 10^12 operations.
fn timed(
    gpu: &Gpu,
    what: &str,
    tera: Option<f64>,
    mut work: impl FnMut() -> anyhow::Result<()>,
) -> anyhow::Result<f64> {
    let stream = gpu.default_stream();
    // Warm-up: torch's allocator reserves memory, cuBLAS chooses kernels.
    for _ in 0..3 {
        work()?;
    }
    let mut times = Vec::new();
    for _ in 0..REPEATS {
        let start = stream.record_timed()?;
        work()?;
        let end = stream.record_timed()?;
        end.synchronize()?;
        times.push(f64::from(end.elapsed_ms_since(&start)?));
    }
    times.sort_by(f64::total_cmp);
    let median = times[REPEATS / 2];
    let rate = tera.map_or(String::new(), |tera| {
        format!(", {:.0} TFLOPS", tera / median * 1e3)
    });
    println!(
        "{what}: {median:.3} ms (from {:.3} to {:.3}){rate}",
        times[0],
        times[REPEATS - 1]
    );
    Ok(median)
}

fn filled(gpu: &Gpu, engine: &Engine, unit: usize) -> UnitWeights {
    let layout = &engine.units()[unit];
    let mut values = vec![0f32; layout.elems];
    let range = 0..layout.elems;
    init::fill(layout, unit, 7, 0.02, range, &mut values);
    let bytes: Vec<u8> = values
        .iter()
        .flat_map(|value| half::bf16::from_f32(*value).to_ne_bytes())
        .collect();
    let weights = engine.new_weights(unit).expect("memory for a unit");
    let buffer = weights.buffer().expect("weights on a GPU");
    gpu.upload(&gpu.default_stream(), buffer, &[(0, &bytes)])
        .expect("weights are copied to the GPU");
    weights
}
