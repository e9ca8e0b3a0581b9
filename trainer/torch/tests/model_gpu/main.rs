//! Compares a GPU's computation with the CPU's: the loss and every parameter's gradient for the same weights
//! and tokens. Also compares two equal steps, and steps with and without fused kernels.
//!
//! Each test runs in its own process, because cuBLAS reads its environment variable when it starts.

mod case;
mod matmuls;

use std::process::Command;

use kernels::gpu::Gpu;
use kernels_torch::{CUBLAS_WORKSPACE, CUBLAS_WORKSPACES};
use trainer_torch::compute::ComputeDevice;
use training_run::computation::{ActivationCheckpointing, AttentionKernel};
use training_run::model::{Dropout, Dtype, ModelConfig};

use crate::case::{Case, cases, config, forms, tolerance};

/// Runs `test` in a process with cuBLAS's environment variable, if there is a GPU.
fn on_gpu(name: &str, test: impl FnOnce(Gpu)) {
    let gpu = match Gpu::open(0) {
        Ok(gpu) => gpu,
        Err(error) if error.is_absent() => {
            println!("skipped: {error}: the model's computation on a GPU");
            return;
        }
        Err(error) => panic!("{error}"),
    };
    if std::env::var_os(CUBLAS_WORKSPACE).is_some() {
        return test(gpu);
    }
    let child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", name, "--nocapture"])
        .env(CUBLAS_WORKSPACE, CUBLAS_WORKSPACES[0])
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&child.stdout).into_owned();
    print!("{said}");
    assert!(
        child.status.success() && said.contains("1 passed"),
        "{said}\n{}",
        String::from_utf8_lossy(&child.stderr)
    );
}

#[test]
fn a_gpu_computes_every_form_of_block_like_the_cpu_and_reproducibly() {
    on_gpu(
        "a_gpu_computes_every_form_of_block_like_the_cpu_and_reproducibly",
        |gpu| {
            let gpu = ComputeDevice::Gpu(gpu);
            for case in [Dtype::Fp32, Dtype::Bf16, Dtype::Fp16]
                .into_iter()
                .flat_map(forms)
            {
                let engine = case.engine(&gpu);
                let (dtype, kind) = (case.dtype, case.config.architecture.model_type());
                let cpu = case.step(&case.engine(&ComputeDevice::Cpu));
                let first = case.step(&engine);
                let what = format!("{kind}, GPU and CPU");
                case.assert_close(&what, &engine, &cpu, &first, tolerance(dtype));
                for keep in [
                    ActivationCheckpointing::Full,
                    ActivationCheckpointing::Attention,
                    ActivationCheckpointing::Matmuls,
                ] {
                    let again = case.step(&case.engine(&gpu).with_checkpointing(keep));
                    assert_eq!(
                        first.loss.to_bits(),
                        again.loss.to_bits(),
                        "{kind}, {keep:?}"
                    );
                    assert!(first.grads == again.grads, "{kind}, {dtype:?}, {keep:?}");
                }
            }
        },
    );
}

/// On a GPU, one kernel computes all documents in 16 bits; on the CPU, and in fp32, each is computed alone.
#[test]
fn a_gpu_computes_packed_documents_like_the_cpu_and_reproducibly() {
    on_gpu(
        "a_gpu_computes_packed_documents_like_the_cpu_and_reproducibly",
        |gpu| {
            let gpu = ComputeDevice::Gpu(gpu);
            for dtype in [Dtype::Fp32, Dtype::Bf16, Dtype::Fp16] {
                for case in forms(dtype).into_iter().chain(cases(dtype)) {
                    let whole = case.step(&case.engine(&gpu));
                    let case = Case {
                        starts: &[3, 40, 41, 100, 134, 190],
                        ..case
                    };
                    let engine = case.engine(&gpu);
                    let cpu = case.step(&case.engine(&ComputeDevice::Cpu));
                    let first = case.step(&engine);
                    let kind = case.config.architecture.model_type();
                    let what = format!("documents, {kind}, GPU and CPU");
                    case.assert_close(&what, &engine, &cpu, &first, tolerance(dtype));
                    assert_ne!(whole.loss, first.loss, "the documents change the loss");
                    for keep in [
                        ActivationCheckpointing::Attention,
                        ActivationCheckpointing::Matmuls,
                    ] {
                        let again = case.step(&case.engine(&gpu).with_checkpointing(keep));
                        assert_eq!(first.loss.to_bits(), again.loss.to_bits(), "{kind}");
                        assert!(first.grads == again.grads, "{kind}, {dtype:?}, {keep:?}");
                    }
                }
            }
        },
    );
}

/// cuDNN's attention, also within documents, and without a fixed order.
#[test]
fn cudnns_attention_computes_like_the_cpu_and_reproducibly() {
    on_gpu(
        "cudnns_attention_computes_like_the_cpu_and_reproducibly",
        |gpu| {
            if let Err(error) = kernels_torch::find_cudnn(gpu.info()) {
                println!("skipped: {error}");
                return;
            }
            let gpu = ComputeDevice::Gpu(gpu);
            let starts: [&[usize]; 2] = [&[], &[3, 40, 41, 100, 134, 190]];
            for dtype in [Dtype::Bf16, Dtype::Fp16] {
                let all = forms(dtype).into_iter().chain(cases(dtype));
                for case in all.filter(|case| case.config.head_dim() % 8 == 0) {
                    for starts in starts {
                        let case = Case {
                            starts,
                            config: case.config.clone(),
                            ..case
                        };
                        let engine = |deterministic| {
                            let engine = case.engine(&gpu);
                            let kernel = AttentionKernel::Cudnn;
                            engine.with_attention(kernel, deterministic).unwrap()
                        };
                        let exact = engine(true);
                        let cpu = case.step(&case.engine(&ComputeDevice::Cpu));
                        let first = case.step(&exact);
                        let kind = case.config.architecture.model_type();
                        let what = format!("cuDNN, {kind}, {} documents", starts.len());
                        case.assert_close(&what, &exact, &cpu, &first, tolerance(dtype));
                        for keep in [
                            ActivationCheckpointing::Attention,
                            ActivationCheckpointing::Matmuls,
                        ] {
                            let again = case.step(&engine(true).with_checkpointing(keep));
                            assert_eq!(first.loss.to_bits(), again.loss.to_bits(), "{kind}");
                            assert!(first.grads == again.grads, "{kind}, {dtype:?}, {keep:?}");
                        }
                        let free = case.step(&engine(false));
                        case.assert_close(&what, &exact, &cpu, &free, tolerance(dtype));
                    }
                }
            }
        },
    );
}

#[test]
fn a_gpu_computes_the_same_as_the_cpu() {
    on_gpu("a_gpu_computes_the_same_as_the_cpu", |gpu| {
        let gpu = ComputeDevice::Gpu(gpu);
        for dtype in [Dtype::Fp32, Dtype::Bf16, Dtype::Fp16] {
            for case in cases(dtype) {
                let engine = case.engine(&gpu);
                let cpu = case.step(&case.engine(&ComputeDevice::Cpu));
                let what = format!("hidden size {}, GPU and CPU", case.config.hidden_size);
                case.assert_close(&what, &engine, &cpu, &case.step(&engine), tolerance(dtype));
            }
        }
    });
}

#[test]
fn fused_kernels_compute_the_same_as_torch_operators() {
    on_gpu("fused_kernels_compute_the_same_as_torch_operators", |gpu| {
        let gpu = ComputeDevice::Gpu(gpu);
        for dtype in [Dtype::Fp32, Dtype::Bf16] {
            // Rows as long as those of real models, and logits in several slices.
            let large = Case {
                config: ModelConfig {
                    layers: 1,
                    heads: 16,
                    kv_heads: 16,
                    initializer_range: 0.02,
                    ..config(2048, 5504, 32000)
                },
                dropout: Dropout::NONE,
                dtype,
                seq_len: 512,
                micro_batch: 6,
                micro_batches: 1,
                starts: &[],
            };
            for case in cases(dtype).into_iter().chain([large]) {
                let fused = case.engine(&gpu);
                let plain = case.engine(&gpu).without_fused_kernels();
                let what = format!("hidden size {}, fused and not", case.config.hidden_size);
                let (a, b) = (case.step(&plain), case.step(&fused));
                case.assert_close(&what, &fused, &a, &b, tolerance(dtype));
            }
        }
    });
}

#[test]
fn a_gpu_gives_the_same_bits_each_time() {
    on_gpu("a_gpu_gives_the_same_bits_each_time", |gpu| {
        let gpu = ComputeDevice::Gpu(gpu);
        for dtype in [Dtype::Fp32, Dtype::Bf16] {
            let case = Case {
                config: ModelConfig {
                    heads: 8,
                    ..config(1024, 2752, 8000)
                },
                dropout: Dropout::NONE,
                dtype,
                seq_len: 512,
                micro_batch: 4,
                micro_batches: 2,
                starts: &[],
            };
            let engine = case.engine(&gpu);
            let first = case.step(&engine);
            // A second engine, whose buffers are elsewhere because the first one's still exist. Activation
            // checkpointing changes nothing.
            let other = case.engine(&gpu);
            let attention = case
                .engine(&gpu)
                .with_checkpointing(ActivationCheckpointing::Attention);
            let products = case
                .engine(&gpu)
                .with_checkpointing(ActivationCheckpointing::Matmuls);
            for engine in [&engine, &other, &attention, &products] {
                let again = case.step(engine);
                assert_eq!(first.loss.to_bits(), again.loss.to_bits(), "{dtype:?}");
                assert!(first.grads == again.grads, "{dtype:?}: the gradients");
            }
        }
    });
}

#[test]
fn gradients_end_up_in_the_callers_buffer_with_zero_padding() {
    on_gpu(
        "gradients_end_up_in_the_callers_buffer_with_zero_padding",
        |gpu| {
            let device = ComputeDevice::Gpu(gpu.clone());
            for case in cases(Dtype::Bf16) {
                let engine = case.engine(&device);
                let weights = case.weights(&engine, 1);
                let (inputs, _) = case.tokens(0);
                let embedding = case.weights(&engine, 0);
                let input = engine.embed_forward(&embedding, &inputs).unwrap();
                let elems = engine.units()[1].elems;
                let padded_elems = elems + 192;
                let finished = |straight: bool, uses: usize| {
                    let buffer = gpu.alloc(padded_elems * 2).unwrap();
                    let noise = vec![0xA5u8; padded_elems * 2];
                    let stream = gpu.default_stream();
                    gpu.upload(&stream, &buffer, &[(0, &noise)]).unwrap();
                    let mut sink = engine.new_grads(1);
                    if straight {
                        sink.write_to(&buffer).unwrap();
                    }
                    for _ in 0..uses {
                        // The values of the gradient do not matter.
                        engine
                            .block_backward(1, &weights, &input, &input, &mut sink)
                            .unwrap();
                    }
                    sink.finish_into(&buffer, padded_elems).unwrap();
                    let mut bytes = vec![0u8; padded_elems * 2];
                    gpu.download(&stream, &buffer, &mut [(0, &mut bytes)])
                        .unwrap();
                    bytes
                };
                for uses in [1, 3] {
                    let straight = finished(true, uses);
                    assert!(straight == finished(false, uses));
                    assert!(straight[elems * 2..].iter().all(|&byte| byte == 0));
                    let mut sink = engine.new_grads(1);
                    for _ in 0..uses {
                        engine
                            .block_backward(1, &weights, &input, &input, &mut sink)
                            .unwrap();
                    }
                    let mut bytes = vec![0u8; elems * 2];
                    sink.finish(&mut bytes).unwrap();
                    assert!(straight[..elems * 2] == bytes);
                }
            }
        },
    );
}
