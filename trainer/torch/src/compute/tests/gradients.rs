//! Compares gradients with central differences in fp64, whose error is about 1e-9: every one of the plain model, and with
//! `OFFLOADD_ALL_CASES` those of every form of model too.

use super::*;

const STEP: f64 = 1e-5;

/// Distance of the elements that a push compares of other forms of models: no divisor of a row's length, so that each column
/// has its turn.
const DISTANCE_OF_A_PUSH: usize = 5;

/// Changes each parameter of each unit separately and compares the slope of the loss with its gradient.
fn all_gradients_are_slopes(tied: bool, change: impl FnOnce(Case) -> Case) {
    // One block is enough: a second would double the time and test nothing new.
    let config = ModelConfig {
        layers: 1,
        head_dim: None,
        ..config(tied)
    };
    let case = Case::from_config(&config, Kind::Double, MICRO_BATCH, SEQ_LEN);
    compare(change(case), 1);
}

/// Like [`all_gradients_are_slopes`], of a part of the elements in a push.
pub(super) fn gradients_are_slopes(case: Case) {
    let all_cases = std::env::var_os("OFFLOADD_ALL_CASES").is_some();
    compare(case, if all_cases { 1 } else { DISTANCE_OF_A_PUSH });
}

fn compare(mut case: Case, distance: usize) {
    let loss_scale = 0.75;
    let (loss, grads) = case.loss_and_grads(loss_scale);
    assert!(
        (loss - case.loss()).abs() < 1e-12,
        "training and evaluation have the same loss"
    );
    for (unit, flat) in grads.iter().enumerate() {
        let flat = f64s(flat);
        let layout = case.engine.units()[unit].clone();
        assert!(
            flat.iter().any(|&g| g.abs() > 1e-3),
            "{} has gradients worth checking",
            layout.name
        );
        for param in &layout.params {
            for offset in param.range_elems().step_by(distance) {
                let slope = loss_scale * slope(&mut case, unit, offset);
                let error = (flat[offset] - slope).abs();
                let at = offset - param.offset_elems;
                assert!(
                    error < 1e-7 * (1.0 + slope.abs()),
                    "{} [{at}]: {} and {slope}",
                    param.name,
                    flat[offset]
                );
            }
        }
    }
}

fn slope(case: &mut Case, unit: usize, offset: usize) -> f64 {
    let mut value = [0u8; 8];
    value.copy_from_slice(&case.weights[unit].bytes_mut()[offset * 8..][..8]);
    let here = f64::from_ne_bytes(value);
    let set = |case: &mut Case, x: f64| {
        case.weights[unit].bytes_mut()[offset * 8..][..8].copy_from_slice(&x.to_ne_bytes());
    };
    set(case, here + STEP);
    let above = case.loss();
    set(case, here - STEP);
    let below = case.loss();
    set(case, here);
    (above - below) / (2.0 * STEP)
}

#[test]
fn the_gradient_of_every_parameter_is_the_slope_of_the_loss() {
    all_gradients_are_slopes(false, |case| case);
}

#[test]
fn the_gradient_of_a_tied_embedding_counts_both_of_its_uses() {
    all_gradients_are_slopes(true, |case| case);
}

#[test]
fn explicit_gradients_are_the_slope_of_the_loss() {
    all_gradients_are_slopes(false, Case::written_out);
}

#[test]
fn explicit_gradients_of_a_tied_model_are_the_slope_of_the_loss() {
    all_gradients_are_slopes(true, Case::written_out);
}

#[test]
fn the_gradient_of_a_blocks_input_is_a_slope() {
    let case = Case::new(false, Kind::Double);
    let input = case.forward().swap_remove(0).tensor;
    let grad_output = Activation::new(input.cos() * 2.0, &Batch::default()); // any fixed direction
    let mut sink = case.engine.new_grads(1);
    let found = case.engine.block_backward(
        1,
        &case.weights[1],
        &Activation::new(input.copy(), &Batch::default()),
        &grad_output,
        &mut sink,
    );
    let found = Vec::<f64>::try_from(found.unwrap().tensor.view([-1])).unwrap();
    let along = |moved: &tch::Tensor| {
        let output = case
            .engine
            .block_forward(
                1,
                &case.weights[1],
                &Activation::new(moved.copy(), &Batch::default()),
            )
            .unwrap();
        f64::try_from((output.tensor * &grad_output.tensor).sum(Kind::Double)).unwrap()
    };
    for (i, &gradient) in found.iter().enumerate() {
        let moved = |by: f64| {
            let mut values = Vec::<f64>::try_from(input.view([-1])).unwrap();
            values[i] += by;
            tch::Tensor::from_slice(&values).view_as(&input)
        };
        let slope = (along(&moved(STEP)) - along(&moved(-STEP))) / (2.0 * STEP);
        assert!(
            (gradient - slope).abs() < 1e-7 * (1.0 + slope.abs()),
            "element {i}: {gradient} and {slope}"
        );
    }
}
