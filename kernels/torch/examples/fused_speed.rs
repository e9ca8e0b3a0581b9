//! Measures the fused kernels, and the matrix products and attention between them, on a GPU, at the sizes of a model of 1.345 G parameters.
//!
//! `cargo run --release -p kernels-torch --example fused_speed`. A kernel bound by memory should reach some 80 % of the memory's bandwidth (4.8 TB/s
//! on an H200).

use std::process::{Command, ExitCode};

use kernels::gpu::Gpu;
use kernels_torch::fused::{Fused, Turn};
use kernels_torch::{CUBLAS_WORKSPACE, CUBLAS_WORKSPACES, use_gpu, vjp};
use tch::{Device, Kind, Tensor};

const SEQUENCES: i64 = 8;
const TOKENS: i64 = 2048;
const ROWS: i64 = SEQUENCES * TOKENS;
const HIDDEN: i64 = 2048;
const HEADS: i64 = 16;
const HEAD_DIM: i64 = 128;
const FEED_FORWARD: i64 = 5504;
const WORDS: i64 = 32000;
/// Rows of logits at a time.
const LOGIT_ROWS: i64 = 2048;
const REPEATS: usize = 20;
/// Consecutive calls, so that the host's time for a short call is hidden behind the call before.
const CALLS: usize = 10;

type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;

fn main() -> ExitCode {
    // cuBLAS reads the variable when it starts, so it must be set before.
    if std::env::var_os(CUBLAS_WORKSPACE).is_none() {
        let program = std::env::current_exe().expect("a program knows its own name");
        let status = Command::new(program)
            .env(CUBLAS_WORKSPACE, CUBLAS_WORKSPACES[0])
            .status();
        return ExitCode::from(!status.is_ok_and(|status| status.success()) as u8);
    }
    match measure() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("fused_speed: {error}");
            ExitCode::FAILURE
        }
    }
}

fn measure() -> Result<()> {
    let gpu = Gpu::open(0)?;
    let device = use_gpu(&gpu)?;
    println!("{:?}", gpu.info());
    let fused = Fused::compile(&gpu, device)?;
    kernels_alone(&gpu, &fused, device)?;
    products(&gpu, device)?;
    attention(&gpu, device)
}

fn random(device: Device, shape: &[i64]) -> Result<Tensor> {
    Ok(Tensor::f_randn(shape, (Kind::BFloat16, device))?)
}

fn kernels_alone(gpu: &Gpu, fused: &Fused, device: Device) -> Result<()> {
    let elems = (ROWS * HIDDEN) as f64;
    let x = random(device, &[ROWS, HIDDEN])?;
    let y = random(device, &[ROWS, HIDDEN])?;
    let weight = random(device, &[HIDDEN])?;
    let normed = fused.rms_norm(&x, None, &weight, 1e-5)?;
    bytes(gpu, "rms_norm", 4.0 * elems, || {
        fused.rms_norm(&x, None, &weight, 1e-5)?;
        Ok(())
    })?;
    bytes(gpu, "rms_norm of a sum", 8.0 * elems, || {
        fused.rms_norm(&x, Some(&y), &weight, 1e-5)?;
        Ok(())
    })?;
    bytes(gpu, "rms_norm_backward, with beside", 8.0 * elems, || {
        let _ = fused.rms_norm_backward(&y, &x, &weight, &normed.scale, Some(&y))?;
        Ok(())
    })?;
    let qkv = random(device, &[SEQUENCES, TOKENS, 3 * HEADS, HEAD_DIM])?;
    let turned = qkv.f_narrow(2, 0, 2 * HEADS)?;
    let tables = random(device, &[TOKENS, HEAD_DIM])?;
    bytes(gpu, "rotary of query and key", 8.0 * elems, || {
        Ok(fused.rotary(&turned, &turned, &tables, &tables, Turn::Forward)?)
    })?;
    let grad = random(device, &[SEQUENCES, TOKENS, HEADS, HEAD_DIM])?;
    let place = qkv.f_narrow(2, 0, HEADS)?;
    bytes(gpu, "rotary back, packed", 4.0 * elems, || {
        Ok(fused.rotary(&grad, &place, &tables, &tables, Turn::Backward)?)
    })?;
    let mut gate_up = random(device, &[ROWS, 2 * FEED_FORWARD])?;
    let mut grad = random(device, &[ROWS, FEED_FORWARD])?;
    let elems = (ROWS * FEED_FORWARD) as f64;
    bytes(gpu, "gated", 6.0 * elems, || {
        let _ = fused.gated(&gate_up)?;
        Ok(())
    })?;
    bytes(gpu, "gated_backward", 12.0 * elems, || {
        Ok(fused.gated_backward(&mut grad, &mut gate_up)?)
    })?;
    let mut logits = random(device, &[LOGIT_ROWS, WORDS])?;
    let targets = Tensor::f_randint(WORDS, [LOGIT_ROWS], (Kind::Int64, device))?;
    let mut losses = Tensor::f_empty([LOGIT_ROWS], (Kind::Float, device))?;
    let elems = (LOGIT_ROWS * WORDS) as f64;
    bytes(gpu, "cross_entropy, a slice", 4.0 * elems, || {
        Ok(fused.cross_entropy(&mut logits, &targets, &mut losses, Some(1.0))?)
    })
}

fn products(gpu: &Gpu, device: Device) -> Result<()> {
    let shapes = [
        ("query, key, value", HIDDEN, 3 * HIDDEN),
        ("attention's output", HIDDEN, HIDDEN),
        ("gate and up", HIDDEN, 2 * FEED_FORWARD),
        ("down", FEED_FORWARD, HIDDEN),
    ];
    for (name, inputs, outputs) in shapes {
        let x = random(device, &[ROWS, inputs])?;
        let weight = random(device, &[outputs, inputs])?;
        let grad = random(device, &[ROWS, outputs])?;
        let weight_grad = random(device, &[outputs, inputs])?;
        let tera = 2.0 * (ROWS * inputs * outputs) as f64 / 1e12;
        operations(gpu, &format!("{name}: forward"), tera, || {
            let _ = x.f_mm(&weight.f_transpose(0, 1)?)?;
            Ok(())
        })?;
        operations(gpu, &format!("{name}: input's gradient"), tera, || {
            let _ = grad.f_mm(&weight)?;
            Ok(())
        })?;
        operations(gpu, &format!("{name}: weight's gradient"), tera, || {
            let _ = grad.f_transpose(0, 1)?.f_mm_out(&weight_grad, &x)?;
            Ok(())
        })?;
    }
    let x = random(device, &[LOGIT_ROWS, HIDDEN])?;
    let grad = random(device, &[LOGIT_ROWS, WORDS])?;
    let sum = Tensor::f_zeros([WORDS, HIDDEN], (Kind::Float, device))?;
    let tera = 2.0 * (LOGIT_ROWS * HIDDEN * WORDS) as f64 / 1e12;
    operations(gpu, "logits' weight gradient, added in fp32", tera, || {
        let grad = grad.f_transpose(0, 1)?;
        let _ = sum.f_addmm_dtype_out(&sum, &grad, &x, Kind::Float)?;
        Ok(())
    })
}

fn attention(gpu: &Gpu, device: Device) -> Result<()> {
    let qkv = random(device, &[SEQUENCES, TOKENS, 3 * HEADS, HEAD_DIM])?;
    let leaves: Vec<Tensor> = (0..3)
        .map(|part| {
            let heads = qkv.f_narrow(2, part * HEADS, HEADS)?.f_transpose(1, 2)?;
            Ok(heads.f_detach()?.set_requires_grad(true))
        })
        .collect::<Result<_>>()?;
    let forward = || {
        let [q, k, v] = [&leaves[0], &leaves[1], &leaves[2]];
        Tensor::f_scaled_dot_product_attention(q, k, v, None::<Tensor>, 0.0, true, None, false)
    };
    // Causal: half of two products of TOKENS by TOKENS.
    let tera = 2.0 * (ROWS * TOKENS * HEADS * HEAD_DIM) as f64 / 1e12;
    operations(gpu, "attention forward", tera, || {
        let _ = forward()?;
        Ok(())
    })?;
    let grad = forward()?.f_detach()?.f_ones_like()?;
    operations(gpu, "attention forward and backward", 3.5 * tera, || {
        let leaves: Vec<&Tensor> = leaves.iter().collect();
        vjp(&[&forward()?], &[&grad], &leaves)?;
        Ok(())
    })
}

fn bytes(gpu: &Gpu, what: &str, bytes: f64, work: impl FnMut() -> Result<()>) -> Result<()> {
    let ms = median_ms(gpu, work)?;
    println!("{what}: {ms:.3} ms, {:.0} GB/s", bytes / ms / 1e6);
    Ok(())
}

fn operations(gpu: &Gpu, what: &str, tera: f64, work: impl FnMut() -> Result<()>) -> Result<()> {
    let ms = median_ms(gpu, work)?;
    println!("{what}: {ms:.3} ms, {:.0} TFLOPS", tera / ms * 1e3);
    Ok(())
}

fn median_ms(gpu: &Gpu, mut work: impl FnMut() -> Result<()>) -> Result<f64> {
    let stream = gpu.default_stream();
    for _ in 0..3 {
        work()?;
    }
    let mut times = Vec::new();
    for _ in 0..REPEATS {
        let start = stream.record_timed()?;
        for _ in 0..CALLS {
            work()?;
        }
        let end = stream.record_timed()?;
        end.synchronize()?;
        times.push(f64::from(end.elapsed_ms_since(&start)?) / CALLS as f64);
    }
    times.sort_by(f64::total_cmp);
    Ok(times[REPEATS / 2])
}
