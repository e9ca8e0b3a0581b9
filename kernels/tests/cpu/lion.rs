//! Tests that Lion is the optimizer of its paper: Chen et al., "Symbolic Discovery of Optimization Algorithms", algorithm 2.
//!
//! Likely faults are a step along the new momentum instead of the interpolated one, exchanged betas, a bias correction as in Adam, decay inside the
//! gradient, and a step where the direction is zero. The recurrence is implemented here a second time, in fp64.

use crate::common::{MASTERS, OwnedTile, Random, step};
use kernels::adamw::{
    Hyper, Master, Moments, Rounding, TileFormat, UpdateRule, init_tile, read_masters, read_moments,
};
use kernels::number;

const HYPER: Hyper = Hyper {
    lr: 1e-3,
    beta1: 0.9,
    beta2: 0.99,
    // Not used.
    eps: f32::NAN,
    weight_decay: 0.1,
    step: 1,
    grad_scale: 0.25,
    rounding: Rounding::ZERO,
};

fn lion(master: Master) -> TileFormat {
    TileFormat {
        rule: UpdateRule::Lion,
        ..master.into()
    }
}

fn tile_of(format: TileFormat, masters: &[f32]) -> OwnedTile {
    let mut tile = OwnedTile::zeroed(format, masters.len());
    init_tile(format, masters, &mut tile.param, &mut tile.state);
    tile
}

fn step_with(tile: &mut OwnedTile, hyper: &Hyper, grads: &[f32]) {
    kernels::reduce::store_grad(tile.format.master.grad_type(), grads, &mut tile.grad);
    step(tile, hyper);
}

fn masters_of(tile: &OwnedTile) -> Vec<f32> {
    let mut out = vec![0.0; tile.elems];
    read_masters(tile.format, &tile.param, &tile.state, &mut out);
    out
}

fn momentum_of(tile: &OwnedTile, elem: usize) -> f32 {
    read_moments(tile.format, &tile.state, tile.elems)[0][elem]
}

/// Returns the gradient as tiles store it.
fn stored(master: Master, grad: f32) -> f64 {
    f64::from(match master {
        Master::SplitBf16 | Master::Bf16 => number::from_bf16(number::to_bf16(grad)),
        Master::Fp16WholeMaster => number::from_fp16(number::to_fp16(grad)),
        Master::Fp32 => grad,
    })
}

#[test]
fn a_hundred_steps_follow_the_published_recurrence() {
    const ELEMS: usize = 500;
    for master in MASTERS {
        let mut random = Random(51);
        let masters: Vec<f32> = (0..ELEMS).map(|_| random.normal()).collect();
        let mut tile = tile_of(lion(master), &masters);
        let mut exact: Vec<[f64; 2]> = masters.iter().map(|p| [f64::from(*p), 0.0]).collect();
        for step_index in 1..=100 {
            let hyper = Hyper {
                lr: 1e-3 * (1.0 + step_index as f32 / 50.0),
                step: step_index,
                ..HYPER
            };
            let grads: Vec<f32> = (0..ELEMS).map(|_| random.normal()).collect();
            step_with(&mut tile, &hyper, &grads);
            let [lr, b1, b2, decay, scale] = [
                hyper.lr,
                hyper.beta1,
                hyper.beta2,
                hyper.weight_decay,
                hyper.grad_scale,
            ]
            .map(f64::from);
            for ([p, m], grad) in exact.iter_mut().zip(grads) {
                let g = stored(master, grad) * scale;
                let c = b1 * *m + (1.0 - b1) * g;
                *p -= lr * (c.signum() + decay * *p);
                *m = b2 * *m + (1.0 - b2) * g;
            }
        }
        for (index, (p, [exact_p, exact_m])) in masters_of(&tile).iter().zip(exact).enumerate() {
            // A hundred roundings; a step in the other direction would be off by 2e-3.
            let off = (f64::from(*p) - exact_p).abs();
            assert!(
                off <= 100.0 * f64::from(f32::EPSILON) * exact_p.abs().max(0.1),
                "{master:?} [{index}]: {off:e}"
            );
            let off = (f64::from(momentum_of(&tile, index)) - exact_m).abs();
            assert!(off <= 1e-6, "{master:?} [{index}]: {off:e}");
        }
    }
}

#[test]
fn a_weight_stays_where_gradient_and_momentum_are_zero_and_becomes_nan_where_one_is_nan() {
    let mut tile = tile_of(lion(Master::Fp32), &[1.0, 1.0, -2.0, 1.0]);
    let hyper = Hyper {
        weight_decay: 0.0,
        lr: 0.5,
        ..HYPER
    };
    step_with(
        &mut tile,
        &hyper,
        &[0.0, f32::MIN_POSITIVE, -1e30, f32::NAN],
    );
    let masters = masters_of(&tile);
    assert_eq!(masters[..3], [1.0, 0.5, -1.5]);
    assert!(masters[3].is_nan() && momentum_of(&tile, 3).is_nan());
    // Decay alone, by the learning rate and the factor.
    let mut tile = tile_of(lion(Master::Fp32), &[1.0]);
    let hyper = Hyper {
        weight_decay: 0.5,
        ..hyper
    };
    step_with(&mut tile, &hyper, &[0.0]);
    assert_eq!(masters_of(&tile), [0.75]);
}

#[test]
fn a_momentum_in_bf16_reaches_the_gradient_in_steps_below_its_last_bit() {
    let format = TileFormat {
        moments: Moments::Bf16,
        ..lion(Master::SplitBf16)
    };
    let mut tile = tile_of(format, &[0.0; 256]);
    for step_index in 1..=1000 {
        let hyper = Hyper {
            beta2: 0.995,
            step: step_index,
            grad_scale: 1.0,
            ..HYPER
        };
        step_with(&mut tile, &hyper, &[1.0; 256]);
    }
    let mean = (0..256)
        .map(|elem| f64::from(momentum_of(&tile, elem)))
        .sum::<f64>()
        / 256.0;
    // Rounding to the nearest would stop at about 0.6.
    assert!(
        (mean / (1.0 - 0.995f64.powi(1000)) - 1.0).abs() < 0.01,
        "{mean}"
    );
}
