//! Compares the planned memory of a computation with the peak resident memory of a process that runs a
//! micro-batch of each shape. A wrong plan would let a run start and be killed.

use std::process::{Child, Command, Stdio};

use trainer_torch::compute::{Activation, Engine, Tokens, UnitWeights, set_up};
use training_run::computation::{AttentionKernel, Matmuls, Work, working_bytes};
use training_run::model::{Architecture, Dropout, Dtype, ModelConfig, Window};

const CASE: &str = "TRAINER_TEST_MEMORY_CASE";

struct Case {
    name: &'static str,
    config: ModelConfig,
    dropout: Dropout,
    dtype: Dtype,
    micro_batch: usize,
    seq_len: usize,
    micro_batches: usize,
    tiles: usize,
}

#[expect(clippy::too_many_lines, reason = "a table")]
fn cases() -> Vec<Case> {
    let config = |hidden_size, intermediate_size, vocab_size, kv_heads, tied| ModelConfig {
        vocab_size,
        hidden_size,
        intermediate_size,
        layers: 2,
        heads: 4,
        kv_heads,
        head_dim: None,
        rope_theta: 1e4,
        norm_eps: 1e-6,
        tied,
        initializer_range: 0.02,
        max_position_embeddings: 512,
        ..ModelConfig::default()
    };
    let case = |name, config, dtype, micro_batch, micro_batches| Case {
        name,
        config,
        dropout: Dropout::NONE,
        dtype,
        micro_batch,
        seq_len: 256,
        micro_batches,
        tiles: 1,
    };
    let of = |architecture: Architecture, config: ModelConfig| ModelConfig {
        architecture,
        biases: architecture.form().biases,
        ..config
    };
    let gpt2 = of(Architecture::Gpt2, config(256, 1024, 256, 4, true));
    let mistral = ModelConfig {
        sliding_window: Some(Window {
            tokens: 50,
            first_layer: 0,
        }),
        ..of(Architecture::Mistral, config(256, 704, 256, 2, false))
    };
    let qwen3 = of(Architecture::Qwen3, config(256, 704, 256, 2, false));
    vec![
        case("gpt2, fp32", gpt2.clone(), Dtype::Fp32, 12, 1),
        Case {
            dropout: Dropout {
                embedding: 0.1,
                residual: 0.1,
                attention: 0.1,
            },
            ..case("gpt2 in training, bf16", gpt2, Dtype::Bf16, 12, 1)
        },
        case("mistral, fp32", mistral, Dtype::Fp32, 12, 1),
        case("qwen3, bf16", qwen3, Dtype::Bf16, 12, 1),
        case(
            "many tokens, fp32",
            config(256, 704, 256, 4, false),
            Dtype::Fp32,
            12,
            1,
        ),
        case(
            "many tokens, bf16",
            config(256, 704, 256, 2, false),
            Dtype::Bf16,
            12,
            1,
        ),
        case(
            "large blocks, fp32",
            config(640, 1760, 256, 4, false),
            Dtype::Fp32,
            1,
            2,
        ),
        case(
            "large blocks, bf16",
            config(640, 1760, 256, 4, false),
            Dtype::Bf16,
            1,
            2,
        ),
        case(
            "a wide MLP, fp32",
            config(128, 4096, 256, 4, false),
            Dtype::Fp32,
            8,
            1,
        ),
        Case {
            tiles: 8,
            ..case(
                "a wide MLP in 8 chunks, fp32",
                config(128, 4096, 256, 4, false),
                Dtype::Fp32,
                8,
                1,
            )
        },
        case(
            "many words, fp32",
            config(256, 512, 16000, 4, false),
            Dtype::Fp32,
            2,
            1,
        ),
        case(
            "many words tied, bf16",
            config(256, 512, 16000, 4, true),
            Dtype::Bf16,
            2,
            2,
        ),
    ]
}

#[test]
fn the_computation_takes_no_more_memory_than_planned() {
    if let Ok(name) = std::env::var(CASE) {
        let case = cases()
            .into_iter()
            .find(|case| case.name == name)
            .expect("a case of this name");
        println!("peak {}", peak_bytes(&case));
        return;
    }
    // All run at the same time: each measures its own memory, and most of their time is torch's start.
    let children: Vec<(Case, Child)> = cases()
        .into_iter()
        .map(|case| {
            let child = Command::new(std::env::current_exe().unwrap())
                .args([
                    "--exact",
                    "the_computation_takes_no_more_memory_than_planned",
                    "--nocapture",
                ])
                .env(CASE, case.name)
                .stdout(Stdio::piped())
                .spawn()
                .unwrap();
            (case, child)
        })
        .collect();
    for (case, child) in children {
        let child = child.wait_with_output().unwrap();
        let output = String::from_utf8_lossy(&child.stdout).into_owned();
        let number = output
            .split_once("peak ")
            .and_then(|(_, rest)| rest.split_whitespace().next());
        let taken: u64 = number
            .unwrap_or_else(|| panic!("{}: {output}", case.name))
            .parse()
            .unwrap();
        let promised = working_bytes(
            &case.config,
            &case.dropout,
            case.dtype,
            Work {
                sequence_ranks: 1,
                micro_batch: case.micro_batch,
                seq_len: case.seq_len,
                micro_batches: case.micro_batches,
                tiles: case.tiles,
                attention: AttentionKernel::Torch,
                matmuls: Matmuls::InDtype,
                deterministic: true,
            },
        );
        println!(
            "{}: {} MB taken, {} MB planned",
            case.name,
            taken / 1_000_000,
            promised / 1_000_000
        );
        assert!(
            taken <= promised,
            "{}: {taken} bytes taken, {promised} planned",
            case.name
        );
        assert!(
            promised < 3 * taken,
            "{}: {taken} bytes taken, {promised} planned: runs that fit would be refused",
            case.name
        );
    }
}

/// Peak memory of a step's forward and backward, without weights and kept activations.
fn peak_bytes(case: &Case) -> u64 {
    set_up(1).unwrap();
    // Excludes torch's own memory (thread stacks, oneDNN's tables), which a tiny first step allocates.
    let small = ModelConfig {
        hidden_size: 32,
        intermediate_size: 32,
        vocab_size: 64,
        layers: 1,
        ..case.config.clone()
    };
    let small = Case {
        config: small,
        micro_batch: 1,
        seq_len: 64,
        micro_batches: 1,
        ..*case
    };
    step(&small, &mut || ());
    let mut before = 0;
    let kept = step(case, &mut || {
        // Resets the kernel's high-water mark.
        std::fs::write("/proc/self/clear_refs", "5").unwrap();
        before = status_bytes("VmRSS:");
    });
    status_bytes("VmHWM:").saturating_sub(before + kept)
}

/// Runs `micro_batches` micro-batches unit by unit, like the training step. Returns the bytes of kept
/// activations.
fn step(case: &Case, weights_are_there: &mut dyn FnMut()) -> u64 {
    let Case {
        ref config,
        dropout,
        dtype,
        micro_batch,
        seq_len,
        micro_batches,
        ..
    } = *case;
    let engine = Engine::new(config, dtype, seq_len).unwrap();
    let engine = engine.leaving_out(dropout, 1).in_tiles(case.tiles);
    let weights: Vec<UnitWeights> = (0..engine.units().len())
        .map(|unit| {
            let mut weights = engine.new_weights(unit).unwrap();
            weights.bytes_mut().fill(0x3C); // small numbers of either type, and the pages are touched
            weights
        })
        .collect();
    let ids: Vec<i64> = (0..micro_batch * seq_len)
        .map(|i| (i % config.vocab_size) as i64)
        .collect();
    let tokens = Tokens::inputs(&ids, micro_batch, seq_len, config.vocab_size).unwrap();
    let tokens = tokens.numbered(0);
    let mut outs: Vec<Vec<u8>> = (0..weights.len())
        .map(|unit| vec![1; engine.new_grads(unit).size_bytes()])
        .collect();
    weights_are_there();

    let head = weights.len() - 1;
    let each = || 0..micro_batches;
    let mut kept: Vec<Vec<Activation>> = vec![
        each()
            .map(|_| engine.embed_forward(&weights[0], &tokens).unwrap())
            .collect(),
    ];
    for (unit, block) in weights.iter().enumerate().take(head).skip(1) {
        let inputs = kept.last().unwrap();
        kept.push(
            inputs
                .iter()
                .map(|input| engine.block_forward(unit, block, input).unwrap())
                .collect(),
        );
    }
    let kept_bytes: usize = kept.iter().flatten().map(Activation::size_bytes).sum();
    let gradient_bytes: usize = kept[0].iter().map(Activation::size_bytes).sum();
    let (mut head_grads, mut embedding_grads) = (engine.new_grads(head), engine.new_grads(0));
    let mut grads: Vec<Activation> = Vec::new();
    for input in kept.pop().unwrap() {
        let tied = config.tied.then_some((&weights[0], &mut embedding_grads));
        let (_, grad) = engine
            .head_loss_backward(&weights[head], tied, &input, &tokens, 1.0, &mut head_grads)
            .unwrap();
        grads.push(grad);
    }
    head_grads.finish(&mut outs[head]).unwrap();
    for unit in (1..head).rev() {
        let mut sink = engine.new_grads(unit);
        let inputs = kept.pop().unwrap();
        grads = inputs
            .iter()
            .zip(&grads)
            .map(|(input, grad)| {
                engine
                    .block_backward(unit, &weights[unit], input, grad, &mut sink)
                    .unwrap()
            })
            .collect();
        sink.finish(&mut outs[unit]).unwrap();
    }
    for grad in &grads {
        engine
            .embed_backward(&tokens, grad, &mut embedding_grads)
            .unwrap();
    }
    embedding_grads.finish(&mut outs[0]).unwrap();
    (kept_bytes + gradient_bytes) as u64
}

fn status_bytes(key: &str) -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status
        .lines()
        .find_map(|line| line.strip_prefix(key))
        .unwrap();
    line.trim().trim_end_matches(" kB").parse::<u64>().unwrap() * 1024
}
