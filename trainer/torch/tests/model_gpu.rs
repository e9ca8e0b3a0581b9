//! Compares a GPU's computation with the CPU's: the loss and every parameter's gradient for the same weights
//! and tokens. Also compares two equal steps, and steps with and without fused kernels.
//!
//! Each test runs in its own process, because cuBLAS reads its environment variable when it starts.

use std::process::Command;

use kernels::fp8::fp8_refusal;
use kernels::gpu::Gpu;
use kernels_torch::{CUBLAS_WORKSPACE, CUBLAS_WORKSPACES};
use trainer_torch::compute::{
    Activation, ComputeDevice, Engine, GradSink, Tokens, UnitWeights, set_up,
};
use training_run::computation::{
    ActivationCheckpointing, AttentionKernel, Matmuls, block_is_written_out,
};
use training_run::data::IGNORED;
use training_run::model::{
    Architecture, Biases, Dropout, Dtype, ModelConfig, ParamLayout, ParamRole, RopeScaling, Window,
    Yarn, init,
};

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

fn config(hidden_size: usize, intermediate_size: usize, vocab_size: usize) -> ModelConfig {
    ModelConfig {
        vocab_size,
        hidden_size,
        intermediate_size,
        layers: 2,
        heads: 4,
        kv_heads: 2,
        head_dim: None,
        rope_theta: 1e4,
        norm_eps: 1e-5,
        tied: false,
        initializer_range: 0.08,
        max_position_embeddings: 512,
        ..ModelConfig::default()
    }
}

/// Weights of a model and the micro-batches of a step, the same on every device.
struct Case {
    config: ModelConfig,
    dropout: Dropout,
    dtype: Dtype,
    seq_len: usize,
    /// Sequences in each micro-batch.
    micro_batch: usize,
    micro_batches: usize,
    /// First tokens of documents within the sequences of a micro-batch.
    starts: &'static [usize],
}

/// Results of a step.
struct Step {
    loss: f64,
    /// Loss of an evaluation.
    evaluated: f64,
    grads: Vec<Vec<u8>>,
}

impl Case {
    fn engine(&self, device: &ComputeDevice) -> Engine {
        set_up(2).unwrap();
        let engine = Engine::on(device, &self.config, self.dtype, self.seq_len).unwrap();
        engine.leaving_out(self.dropout, 3)
    }

    fn weights(&self, engine: &Engine, unit: usize) -> UnitWeights {
        let layout = &engine.units()[unit];
        let mut values = vec![0f32; layout.elems];
        let range = 0..layout.elems;
        let spread = self.config.initializer_range;
        init::fill(layout, unit, 7, spread, range, &mut values);
        for param in layout.params.iter().filter(|param| !param.decay) {
            for (i, value) in values[param.range_elems()].iter_mut().enumerate() {
                *value += 0.3 * (((i + 5 * unit) % 7) as f32 - 3.0) / 3.0;
            }
        }
        let bytes: Vec<u8> = match self.dtype {
            Dtype::Fp32 => values.iter().flat_map(|v| v.to_ne_bytes()).collect(),
            Dtype::Bf16 => values
                .iter()
                .flat_map(|v| half::bf16::from_f32(*v).to_ne_bytes())
                .collect(),
            Dtype::Fp16 => values
                .iter()
                .flat_map(|v| half::f16::from_f32(*v).to_ne_bytes())
                .collect(),
        };
        let mut weights = engine.new_weights(unit).unwrap();
        match weights.buffer() {
            Some(buffer) => {
                let gpu = buffer.gpu();
                gpu.upload(&gpu.default_stream(), buffer, &[(0, &bytes)])
                    .unwrap();
            }
            None => weights.bytes_mut().copy_from_slice(&bytes),
        }
        weights
    }

    /// Inputs and targets of a micro-batch.
    fn tokens(&self, batch: usize) -> (Tokens, Tokens) {
        let vocab = self.config.vocab_size;
        let count = self.micro_batch * self.seq_len;
        let id = |i: usize| ((i * i + 31 * i + 7 * batch) % vocab) as i64;
        let inputs: Vec<i64> = (0..count).map(id).collect();
        let mut targets: Vec<i64> = (1..=count).map(id).collect();
        targets[count / 2] = IGNORED;
        let (rows, seq_len) = (self.micro_batch, self.seq_len);
        (
            Tokens::inputs(&inputs, rows, seq_len, vocab)
                .unwrap()
                .in_documents(self.starts)
                .unwrap()
                .numbered((batch * rows) as u64),
            Tokens::targets(&targets, rows, seq_len, vocab).unwrap(),
        )
    }

    fn step(&self, engine: &Engine) -> Step {
        let head = engine.units().len() - 1;
        let weights: Vec<UnitWeights> = (0..=head).map(|unit| self.weights(engine, unit)).collect();
        let mut sinks: Vec<GradSink> = (0..=head).map(|unit| engine.new_grads(unit)).collect();
        let share = 1.0 / self.micro_batches as f64;
        // Values below fp16's normal range keep few bits.
        let scale = if self.dtype == Dtype::Fp16 {
            1024.0
        } else {
            1.0
        };
        let (mut loss, mut evaluated) = (0.0, 0.0);
        for batch in 0..self.micro_batches {
            let (inputs, targets) = self.tokens(batch);
            let inputs = engine.take_tokens(inputs).unwrap();
            let mut kept: Vec<Activation> =
                vec![engine.embed_forward(&weights[0], &inputs).unwrap()];
            for (unit, block) in weights.iter().enumerate().take(head).skip(1) {
                let input = kept.last().unwrap();
                kept.push(engine.block_forward(unit, block, input).unwrap());
            }
            // In backward, a unit's buffer may hold another unit.
            let shared = weights.iter().position(UnitWeights::is_shared);
            assert_eq!(shared, None, "a kept tensor refers to a unit's weights");
            let (embedding, rest) = sinks.split_at_mut(1);
            let tied = self.config.tied;
            let last = kept.pop().unwrap();
            let seen = engine
                .head_loss(&weights[head], tied.then_some(&weights[0]), &last, &targets)
                .unwrap();
            evaluated += share * seen.value().unwrap();
            let (found, mut grad) = engine
                .head_loss_backward(
                    &weights[head],
                    tied.then_some((&weights[0], &mut embedding[0])),
                    &last,
                    &targets,
                    share * scale,
                    &mut rest[head - 1],
                )
                .unwrap();
            loss += share * found.value().unwrap();
            for unit in (1..head).rev() {
                let input = kept.pop().unwrap();
                grad = engine
                    .block_backward(unit, &weights[unit], &input, &grad, &mut rest[unit - 1])
                    .unwrap();
            }
            engine
                .embed_backward(&inputs, &grad, &mut embedding[0])
                .unwrap();
        }
        let grads = sinks
            .iter_mut()
            .map(|sink| {
                let mut bytes = vec![0xA5u8; sink.size_bytes()];
                sink.finish(&mut bytes).unwrap();
                bytes
            })
            .collect();
        Step {
            loss,
            evaluated,
            grads,
        }
    }

    fn numbers(&self, bytes: &[u8], param: &ParamLayout) -> Vec<f64> {
        let width = self.dtype.elem_bytes();
        let range = param.range_elems();
        bytes[range.start * width..range.end * width]
            .chunks_exact(width)
            .map(|b| match self.dtype {
                Dtype::Fp32 => f64::from(f32::from_ne_bytes(b.try_into().unwrap())),
                Dtype::Bf16 => f64::from(half::bf16::from_ne_bytes([b[0], b[1]]).to_f32()),
                Dtype::Fp16 => f64::from(half::f16::from_ne_bytes([b[0], b[1]]).to_f32()),
            })
            .collect()
    }

    /// Checks that every gradient of `b` equals that of `a` within `tolerance` of the parameter's largest.
    /// Prints the largest difference.
    fn assert_close(&self, what: &str, engine: &Engine, a: &Step, b: &Step, tolerance: f64) {
        let dtype = self.dtype;
        let mut farthest = (0.0, "");
        for (unit, layout) in engine.units().iter().enumerate() {
            for param in &layout.params {
                // A key bias adds one number to all scores of a row if positions are not rotated: its
                // gradient is only noise.
                let gpt2 = self.config.architecture == Architecture::Gpt2;
                if gpt2 && param.member == ParamRole::KeyBias {
                    continue;
                }
                let (x, y) = (
                    self.numbers(&a.grads[unit], param),
                    self.numbers(&b.grads[unit], param),
                );
                let largest = x.iter().fold(0f64, |most, x| most.max(x.abs()));
                assert!(largest > 0.0, "{what}: {} has gradients", param.name);
                let apart = x.iter().zip(&y).map(|(x, y)| (x - y).abs() / largest);
                // Unlike `max`, this keeps a NaN.
                let apart = apart.fold(0f64, |most, x| if x <= most { most } else { x });
                assert!(
                    apart < tolerance,
                    "{what}, {dtype:?}: {} differs by {apart:.1e} of its largest value",
                    param.name
                );
                if apart > farthest.0 {
                    farthest = (apart, &param.name);
                }
            }
        }
        let apart = (a.loss / b.loss - 1.0).abs();
        println!(
            "{what}, {dtype:?}: losses {:.6} and {:.6}, gradients differ by at most {:.1e} ({})",
            a.loss, b.loss, farthest.0, farthest.1
        );
        assert!(apart < tolerance, "{what}, {dtype:?}: the loss");
        assert!(
            (b.evaluated / b.loss - 1.0).abs() < 1e-6,
            "{what}: evaluation"
        );
    }
}

/// Tolerance as a fraction of a parameter's largest gradient, for rounding in another order.
fn tolerance(dtype: Dtype) -> f64 {
    match dtype {
        Dtype::Fp32 => 5e-5,
        Dtype::Bf16 => 4e-2,
        Dtype::Fp16 => 5e-3,
    }
}

fn cases(dtype: Dtype) -> Vec<Case> {
    // Sizes that are multiples of 64, so that weights are adjacent; odd sizes; a tied model; heads with their
    // own keys.
    let odd = ModelConfig {
        heads: 6,
        head_dim: Some(10),
        ..config(36, 50, 101)
    };
    let tied = ModelConfig {
        tied: true,
        ..config(128, 192, 500)
    };
    let every_head = ModelConfig {
        kv_heads: 4,
        ..config(256, 704, 1000)
    };
    [config(128, 192, 512), odd, tied, every_head]
        .into_iter()
        .zip([1, 2, 2, 1])
        .map(|(config, micro_batches)| Case {
            config,
            dropout: Dropout::NONE,
            dtype,
            seq_len: 67,
            micro_batch: 3,
            micro_batches,
            starts: &[],
        })
        .collect()
}

/// Other forms of blocks than Llama's, with a window shorter than the sequence, with dropout.
fn forms(dtype: Dtype) -> Vec<Case> {
    let of = |architecture: Architecture| ModelConfig {
        architecture,
        biases: architecture.form().biases,
        ..config(128, 192, 500)
    };
    let gpt2 = ModelConfig {
        kv_heads: 4,
        tied: true,
        ..of(Architecture::Gpt2)
    };
    let biased = ModelConfig {
        biases: Biases {
            qkv: true,
            out: true,
            mlp: true,
        },
        ..of(Architecture::Llama)
    };
    // Cosines and sines have a factor.
    let yarn = Some(RopeScaling::Yarn(Yarn {
        factor: 4.0,
        original_max_position_embeddings: 20.0,
        attention_factor: Some(1.25),
        beta_fast: 4.0,
        beta_slow: 1.0,
        mscale: None,
        mscale_all_dim: None,
        truncate: true,
    }));
    let mistral = ModelConfig {
        sliding_window: Some(Window {
            tokens: 20,
            first_layer: 1,
        }),
        rope_scaling: yarn,
        ..of(Architecture::Mistral)
    };
    let qwen3 = ModelConfig {
        head_dim: Some(64),
        rope_scaling: yarn,
        ..of(Architecture::Qwen3)
    };
    let some = Dropout {
        embedding: 0.1,
        residual: 0.2,
        attention: 0.1,
    };
    let none = Dropout::NONE;
    [
        (gpt2.clone(), none),
        (gpt2, some),
        (biased, none),
        (mistral, none),
        (of(Architecture::Qwen2), none),
        (qwen3, none),
    ]
    .into_iter()
    .map(|(config, dropout)| Case {
        config,
        dropout,
        dtype,
        seq_len: 67,
        micro_batch: 3,
        micro_batches: 2,
        starts: &[],
    })
    .collect()
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

/// The matrix units add forward products in fewer bits than torch operators, and a number beside the middle between two of 8 bits
/// then becomes the other one.
#[test]
fn products_in_8_bits_are_those_of_torch_operators_and_repeat() {
    on_gpu(
        "products_in_8_bits_are_those_of_torch_operators_and_repeat",
        |gpu| {
            if let Some(why) = fp8_refusal(gpu.info().vendor, &gpu.info().arch) {
                println!("skipped: {why}: products in 8 bits");
                return;
            }
            let gpu = ComputeDevice::Gpu(gpu);
            let starts: [&[usize]; 2] = [&[], &[3, 40, 41, 100, 134, 190]];
            let mut seen = 0;
            for case in forms(Dtype::Bf16).into_iter().chain(cases(Dtype::Bf16)) {
                let config = &case.config;
                let sizes = [
                    config.hidden_size,
                    config.intermediate_size,
                    config.kv_heads * config.head_dim(),
                ];
                if sizes.iter().any(|size| size % 16 != 0)
                    || !block_is_written_out(config, &case.dropout)
                {
                    continue;
                }
                for starts in starts {
                    let case = Case {
                        starts,
                        config: config.clone(),
                        seq_len: 80,
                        ..case
                    };
                    let engine = || case.engine(&gpu).with_matmuls(Matmuls::Fp8).unwrap();
                    let plain = case.step(&case.engine(&gpu).with_plain_fp8());
                    let first = case.step(&engine());
                    let kind = config.architecture.model_type();
                    let what = format!("8 bits, {kind}, hidden size {}", config.hidden_size);
                    case.assert_close(&what, &engine(), &plain, &first, 0.3);
                    for keep in [
                        ActivationCheckpointing::Full,
                        ActivationCheckpointing::Attention,
                        ActivationCheckpointing::Matmuls,
                    ] {
                        let again = case.step(&engine().with_checkpointing(keep));
                        assert_eq!(
                            first.loss.to_bits(),
                            again.loss.to_bits(),
                            "{kind}, {keep:?}"
                        );
                        assert!(first.grads == again.grads, "{kind}, {keep:?}");
                    }
                    let in_bf16 = case.step(&case.engine(&gpu));
                    assert!(first.grads != in_bf16.grads, "8 bits change the numbers");
                    seen += 1;
                }
            }
            assert!(seen >= 8, "{seen} cases");
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
