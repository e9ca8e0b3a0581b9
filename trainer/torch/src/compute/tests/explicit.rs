//! Compares the explicit backward on the CPU with autograd, within the precision of the kind. gradients.rs
//! compares it with finite differences in fp64; the tests here use larger shapes with adjacent weights, and
//! rounding.

use super::forms::forms;
use super::gradients::gradients_are_slopes;
use super::whole_graph::larger;
use super::*;
use training_run::computation::block_is_written_out;
use training_run::computation::kept_bytes_a_token;
use training_run::computation::{ActivationCheckpointing, AttentionKernel};
use training_run::model::ParamLayout;

/// Largest difference of two gradients of a parameter, relative to the parameter's largest gradient.
fn distance(a: &[u8], b: &[u8], param: &ParamLayout, kind: Kind) -> f64 {
    let (a, b) = (numbers(a, kind), numbers(b, kind));
    let range = param.range_elems();
    let largest = a[range.clone()].iter().fold(0f64, |m, x| m.max(x.abs()));
    let apart = a[range.clone()]
        .iter()
        .zip(&b[range])
        .fold(0f64, |m, (a, b)| m.max((a - b).abs()));
    assert!(largest > 0.0, "{} has gradients", param.name);
    apart / largest
}

/// The numbers of a gradient of this kind.
pub(super) fn numbers(bytes: &[u8], kind: Kind) -> Vec<f64> {
    match kind {
        Kind::Float => bytes
            .chunks_exact(4)
            .map(|b| f64::from(f32::from_ne_bytes(b.try_into().unwrap())))
            .collect(),
        _ => bytes
            .chunks_exact(2)
            .map(|b| f64::from(half::bf16::from_ne_bytes([b[0], b[1]]).to_f32()))
            .collect(),
    }
}

/// Forms with an explicit backward, except the plain one.
pub(super) fn written_out_forms(base: &ModelConfig) -> Vec<ModelConfig> {
    let without_padding = |config| ModelConfig {
        pad_token_id: None,
        ..config
    };
    let configs = forms(base)
        .into_iter()
        .map(|(_, config)| without_padding(config));
    let written_out: Vec<ModelConfig> = configs
        .filter(|config| block_is_written_out(config, &Dropout::NONE))
        .collect();
    assert_eq!(written_out.len(), 4, "all but GPT-2");
    written_out
}

#[test]
fn explicit_gradients_with_biases_and_head_norms_are_the_slope_of_the_loss() {
    let base = ModelConfig {
        layers: 1,
        ..config(false)
    };
    for config in written_out_forms(&base) {
        let case = Case::from_config(&config, Kind::Double, MICRO_BATCH, SEQ_LEN);
        gradients_are_slopes(case.written_out());
    }
}

#[test]
fn the_explicit_backward_agrees_with_autograd() {
    // Only the order of roundings differs, so errors are some units in the last place of the largest value.
    for (kind, loss_tolerance, tolerance) in
        [(Kind::Float, 1e-6, 1e-5), (Kind::BFloat16, 3e-3, 4e-2)]
    {
        for tied in [false, true] {
            // Sizes that are not multiples of 64, so that weights are copied together, and sizes that are.
            let side_by_side = ModelConfig {
                hidden_size: 128,
                intermediate_size: 192,
                ..larger(tied)
            };
            let plain = [config(tied), larger(tied), side_by_side];
            for config in plain.into_iter().chain(written_out_forms(&larger(tied))) {
                let seq_len = config.max_position_embeddings;
                let (loss, grads) =
                    Case::from_config(&config, kind, MICRO_BATCH, seq_len).loss_and_grads(0.5);
                let other = Case::from_config(&config, kind, MICRO_BATCH, seq_len).written_out();
                let (other_loss, other_grads) = other.loss_and_grads(0.5);
                assert!(
                    (loss / other_loss - 1.0).abs() < loss_tolerance,
                    "{loss} and {other_loss}"
                );
                assert!(
                    (other.loss() / other_loss - 1.0).abs() < 1e-9,
                    "evaluation has the same loss"
                );
                for ((a, b), unit) in grads.iter().zip(&other_grads).zip(other.engine.units()) {
                    for param in &unit.params {
                        let apart = distance(a, b, param, kind);
                        assert!(
                            apart < tolerance,
                            "{kind:?}, {}: {apart:.1e} apart",
                            param.name
                        );
                    }
                }
            }
        }
    }
}

#[test]
fn explicit_logits_in_slices_equal_all_logits_at_once() {
    let (loss, grads) = Case::new(false, Kind::Float)
        .written_out()
        .loss_and_grads(1.0);
    for logits_elems_max in [1, 11 * 3, 11 * 10 - 1] {
        let mut sliced = Case::new(false, Kind::Float).written_out();
        sliced.engine = sliced.engine.with_logits_elems_max(logits_elems_max);
        let (sliced_loss, sliced_grads) = sliced.loss_and_grads(1.0);
        assert!((sliced_loss - loss).abs() < 1e-6);
        for ((a, b), unit) in grads.iter().zip(&sliced_grads).zip(sliced.engine.units()) {
            for param in &unit.params {
                assert!(distance(a, b, param, Kind::Float) < 1e-5, "{}", param.name);
            }
        }
    }
}

#[test]
fn an_explicit_batch_without_targets_has_no_loss_and_no_gradient() {
    let mut case = Case::new(true, Kind::Float).written_out();
    case.targets =
        Tokens::targets(&[IGNORED; MICRO_BATCH * SEQ_LEN], MICRO_BATCH, SEQ_LEN, 11).unwrap();
    let (loss, grads) = case.loss_and_grads(1.0);
    assert_eq!(loss, 0.0);
    assert!(
        grads.iter().flatten().all(|&byte| byte & 0x7F == 0),
        "zeros of either sign"
    );
}

#[test]
fn activation_checkpointing_changes_no_bit_and_its_bytes_are_counted() {
    for kind in [Kind::Float, Kind::BFloat16] {
        let forms = written_out_forms(&larger(true));
        for config in [config(false), larger(true)].into_iter().chain(forms) {
            let case = |keep| {
                let mut case = Case::from_config(&config, kind, MICRO_BATCH, 16).written_out();
                case.engine = case.engine.with_checkpointing(keep);
                case
            };
            let (loss, grads) = case(ActivationCheckpointing::Full).loss_and_grads(1.0);
            let mut before = 0;
            for keep in [
                ActivationCheckpointing::Full,
                ActivationCheckpointing::Attention,
                ActivationCheckpointing::Matmuls,
            ] {
                let case = case(keep);
                let (kept_loss, kept_grads) = case.loss_and_grads(1.0);
                assert_eq!(loss.to_bits(), kept_loss.to_bits(), "{keep:?}");
                assert!(grads == kept_grads, "{kind:?}, {keep:?}");
                let input = &case.forward()[0];
                let tokens = MICRO_BATCH * 16;
                let elem_bytes = kind.elt_size_in_bytes();
                let kernel = AttentionKernel::Torch;
                let promised =
                    kept_bytes_a_token(&config, &Dropout::NONE, kernel, elem_bytes, keep, 1);
                assert_eq!(
                    input.size_bytes(),
                    tokens * (config.hidden_size * kind.elt_size_in_bytes() + promised),
                    "{keep:?}"
                );
                assert!(input.size_bytes() > before, "{keep:?} keeps more");
                before = input.size_bytes();
                // The backward pass consumes what was kept.
                let mut sink = case.engine.new_grads(1);
                let grad = Activation::new(input.tensor.copy(), &Batch::default());
                case.engine
                    .block_backward(1, &case.weights[1], input, &grad, &mut sink)
                    .unwrap();
                assert_eq!(
                    input.size_bytes(),
                    tokens * config.hidden_size * kind.elt_size_in_bytes()
                );
            }
        }
    }
}
