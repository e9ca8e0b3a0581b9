//! Models with weights and the micro-batches of a step, the same on every device, and what a step computes of them.

use trainer_torch::compute::{
    Activation, ComputeDevice, Engine, GradSink, Tokens, UnitWeights, set_up,
};
use training_run::data::IGNORED;
use training_run::model::{
    Architecture, Biases, Dropout, Dtype, ModelConfig, ParamLayout, ParamRole, RopeScaling, Window,
    Yarn, init,
};

pub(crate) fn config(
    hidden_size: usize,
    intermediate_size: usize,
    vocab_size: usize,
) -> ModelConfig {
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
pub(crate) struct Case {
    pub(crate) config: ModelConfig,
    pub(crate) dropout: Dropout,
    pub(crate) dtype: Dtype,
    pub(crate) seq_len: usize,
    /// Sequences in each micro-batch.
    pub(crate) micro_batch: usize,
    pub(crate) micro_batches: usize,
    /// First tokens of documents within the sequences of a micro-batch.
    pub(crate) starts: &'static [usize],
}

/// Results of a step.
pub(crate) struct Step {
    pub(crate) loss: f64,
    /// Loss of an evaluation.
    pub(crate) evaluated: f64,
    pub(crate) grads: Vec<Vec<u8>>,
}

impl Case {
    pub(crate) fn engine(&self, device: &ComputeDevice) -> Engine {
        set_up(2).unwrap();
        let engine = Engine::on(device, &self.config, self.dtype, self.seq_len).unwrap();
        engine.leaving_out(self.dropout, 3)
    }

    pub(crate) fn weights(&self, engine: &Engine, unit: usize) -> UnitWeights {
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
    pub(crate) fn tokens(&self, batch: usize) -> (Tokens, Tokens) {
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

    pub(crate) fn step(&self, engine: &Engine) -> Step {
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
    pub(crate) fn assert_close(
        &self,
        what: &str,
        engine: &Engine,
        a: &Step,
        b: &Step,
        tolerance: f64,
    ) {
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
pub(crate) fn tolerance(dtype: Dtype) -> f64 {
    match dtype {
        Dtype::Fp32 => 5e-5,
        Dtype::Bf16 => 4e-2,
        Dtype::Fp16 => 5e-3,
    }
}

pub(crate) fn cases(dtype: Dtype) -> Vec<Case> {
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
pub(crate) fn forms(dtype: Dtype) -> Vec<Case> {
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
