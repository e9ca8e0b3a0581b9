//! Tests of every form of block: gradients, the block by block order, what a window hides, rounding in bf16.
//! `tests/model_hf.rs` compares the forms with Hugging Face's models.

use super::gradients::gradients_are_slopes;
use super::whole_graph::{gives_the_bits_of_one_graph, larger};
use super::*;
use training_run::model::{Architecture, Biases, RopeScaling, Window, Yarn};

/// Returns `base` in the form of each architecture, with all options of its configuration.
pub(super) fn forms(base: &ModelConfig) -> Vec<(&'static str, ModelConfig)> {
    let of = |architecture: Architecture| ModelConfig {
        architecture,
        biases: architecture.form().biases,
        ..base.clone()
    };
    let window = |tokens, first_layer| {
        Some(Window {
            tokens,
            first_layer,
        })
    };
    let all = Biases {
        qkv: true,
        out: true,
        mlp: true,
    };
    // Cosines and sines have a factor, so a rotation is not the inverse of the opposite one.
    let yarn = Some(RopeScaling::Yarn(Yarn {
        factor: 4.0,
        original_max_position_embeddings: 4.0,
        attention_factor: Some(1.25),
        beta_fast: 0.6,
        beta_slow: 0.2,
        mscale: None,
        mscale_all_dim: None,
        truncate: false,
    }));
    vec![
        (
            "gpt2",
            ModelConfig {
                kv_heads: base.heads,
                head_dim: None,
                ..of(Architecture::Gpt2)
            },
        ),
        (
            "llama with biases and scaled positions",
            ModelConfig {
                biases: all,
                rope_scaling: yarn,
                ..of(Architecture::Llama)
            },
        ),
        (
            "mistral",
            ModelConfig {
                sliding_window: window(3, 0),
                ..of(Architecture::Mistral)
            },
        ),
        (
            "qwen2",
            ModelConfig {
                sliding_window: window(2, base.layers - 1),
                ..of(Architecture::Qwen2)
            },
        ),
        (
            "qwen3 with scaled positions",
            ModelConfig {
                rope_scaling: yarn,
                ..of(Architecture::Qwen3)
            },
        ),
    ]
}

pub(super) const SOME: Dropout = Dropout {
    embedding: 0.2,
    residual: 0.3,
    attention: 0.25,
};

#[test]
fn the_gradients_of_every_form_are_slopes() {
    let base = ModelConfig {
        layers: 1,
        ..config(false)
    };
    for (name, config) in forms(&base) {
        println!("{name}");
        gradients_are_slopes(Case::from_config(
            &config,
            Kind::Double,
            MICRO_BATCH,
            SEQ_LEN,
        ));
    }
}

#[test]
fn gradients_with_dropout_are_slopes() {
    let base = ModelConfig {
        layers: 1,
        ..config(true)
    };
    for (name, config) in forms(&base) {
        println!("{name}");
        let case = Case::from_config(&config, Kind::Double, MICRO_BATCH, SEQ_LEN);
        gradients_are_slopes(case.leaving_out(SOME));
    }
}

#[test]
fn every_form_gives_the_bits_of_one_graph() {
    for kind in [Kind::Float, Kind::BFloat16] {
        for (name, config) in forms(&larger(false)) {
            println!("{name}, {kind:?}");
            let case = || Case::from_config(&config, kind, MICRO_BATCH, 64);
            gives_the_bits_of_one_graph(&case());
            gives_the_bits_of_one_graph(&case().leaving_out(SOME));
        }
    }
}

#[test]
fn every_form_in_bf16_is_near_fp32() {
    for (name, config) in forms(&larger(true)) {
        let of = |kind| Case::from_config(&config, kind, MICRO_BATCH, 64);
        let (wide, narrow) = (of(Kind::Float).loss(), of(Kind::BFloat16).loss());
        assert!(
            (wide / narrow - 1.0).abs() < 1e-2,
            "{name}: {wide}, {narrow}"
        );
    }
}

/// Returns for each position whether a change of the token at `position` affects the block's output there.
fn seen_from(config: &ModelConfig, dropout: Dropout, position: i64) -> Vec<bool> {
    let case = Case::from_config(config, Kind::Double, 1, SEQ_LEN).leaving_out(dropout);
    let input = case.forward().swap_remove(0).tensor;
    let moved = input.copy();
    let _ = moved.get(0).get(position).fill_(0.5);
    let output = |x: &tch::Tensor| {
        let input = Activation::new(x.copy(), case.inputs.batch());
        let block = case.engine.block_forward(1, &case.weights[1], &input);
        block.unwrap().tensor.get(0)
    };
    let (before, after) = (output(&input), output(&moved));
    (0..SEQ_LEN as i64)
        .map(|row| !before.get(row).equal(&after.get(row)))
        .collect()
}

#[test]
fn a_window_hides_what_is_further_back_and_a_long_one_nothing() {
    let windowed = |tokens| ModelConfig {
        layers: 1,
        sliding_window: Some(Window {
            tokens,
            first_layer: 0,
        }),
        ..config(false)
    };
    // Rates so small that nothing is dropped, but the computation with all weights at once is used.
    let weighed = Dropout {
        attention: 1e-9,
        ..Dropout::NONE
    };
    for dropout in [Dropout::NONE, weighed] {
        for tokens in [1, 2, 4, 5, 9] {
            let expected: Vec<bool> = (0..SEQ_LEN)
                .map(|row| row >= 1 && row < 1 + tokens)
                .collect();
            let found = seen_from(&windowed(tokens), dropout, 1);
            assert_eq!(found, expected, "window of {tokens}");
        }
    }
}

#[test]
fn a_window_of_later_layers_leaves_the_first_alone() {
    let config = ModelConfig {
        sliding_window: Some(Window {
            tokens: 2,
            first_layer: 1,
        }),
        ..config(false)
    };
    let expected = [false, true, true, true, true];
    assert_eq!(seen_from(&config, Dropout::NONE, 1), expected);
}
