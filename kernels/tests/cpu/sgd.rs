//! Tests that SGD is `torch.optim.SGD` without momentum, that a weight decay of 1 makes it the mean that Muon's momentum is, and that Muon's step is SGD's
//! beside a momentum.
//!
//! Likely faults are a decay outside the gradient's factor, or scaled by the gradient's scale, and moments that tiles keep for nothing.

use crate::common::{MASTERS, OwnedTile, Random, step};
use kernels::adamw::{
    Hyper, Master, Rounding, TileFormat, UpdateRule, init_tile, read_masters, read_moments,
    state_tile_bytes, write_moments,
};

const HYPER: Hyper = Hyper {
    lr: 0.25,
    // Not used.
    beta1: f32::NAN,
    beta2: f32::NAN,
    eps: f32::NAN,
    weight_decay: 0.5,
    step: 1,
    grad_scale: 4.0,
    rounding: Rounding::ZERO,
};

fn sgd(master: Master) -> TileFormat {
    TileFormat {
        rule: UpdateRule::Sgd,
        ..master.into()
    }
}

fn stepped(format: TileFormat, hyper: &Hyper, masters: &[f32], grads: &[f32]) -> Vec<f32> {
    let mut tile = OwnedTile::zeroed(format, masters.len());
    init_tile(format, masters, &mut tile.param, &mut tile.state);
    kernels::reduce::store_grad(format.master.grad_type(), grads, &mut tile.grad);
    step(&mut tile, hyper);
    let mut out = vec![0.0; masters.len()];
    read_masters(format, &tile.param, &tile.state, &mut out);
    out
}

#[test]
fn a_step_subtracts_the_gradient_and_the_decay_inside_it() {
    for master in MASTERS {
        let new = stepped(
            sgd(master),
            &HYPER,
            &[1.0, -2.0, 0.0],
            &[1.0, 0.5, f32::NAN],
        );
        // 1 - 0.25 (4 + 0.5), -2 - 0.25 (2 - 1)
        assert_eq!(new[..2], [-0.125, -2.25], "{master:?}");
        assert!(new[2].is_nan());
    }
}

#[test]
fn a_decay_of_one_and_a_negative_scale_make_a_mean_of_weight_and_gradient() {
    let mut random = Random(5);
    let [old, grads] = [0, 1].map(|_| (0..500).map(|_| random.normal()).collect::<Vec<f32>>());
    let hyper = Hyper {
        lr: 0.05,
        weight_decay: 1.0,
        grad_scale: -1.0,
        ..HYPER
    };
    let new = stepped(sgd(Master::Fp32), &hyper, &old, &grads);
    for ((new, old), grad) in new.iter().zip(old).zip(grads) {
        // One rounding each, as `torch.lerp` has them.
        assert_eq!(*new, 0.05_f32.mul_add(grad - old, old));
    }
}

#[test]
fn a_step_of_muon_leaves_the_momentum_as_it_is() {
    for master in MASTERS {
        let rule = UpdateRule::Muon;
        let format = TileFormat {
            rule,
            ..master.into()
        };
        let (old, grads, momentum) = ([1.0, -2.0], [1.0, 0.5], [3.0, 0.1]);
        let mut tile = OwnedTile::zeroed(format, 2);
        init_tile(format, &old, &mut tile.param, &mut tile.state);
        write_moments(format, &mut tile.state, 2, 0..2, [&momentum, &[]]);
        kernels::reduce::store_grad(master.grad_type(), &grads, &mut tile.grad);
        step(&mut tile, &HYPER);
        let mut new = [0.0; 2];
        read_masters(format, &tile.param, &tile.state, &mut new);
        assert_eq!(new.to_vec(), stepped(sgd(master), &HYPER, &old, &grads));
        let stored = read_moments(format, &tile.state, 2);
        assert_eq!(stored, [momentum.to_vec(), vec![]]);
    }
}

#[test]
fn a_tile_has_the_master_alone() {
    let state_bytes = MASTERS.map(|master| state_tile_bytes(sgd(master), 1024));
    assert_eq!(state_bytes, [2 * 1024, 0, 4 * 1024]);
}
