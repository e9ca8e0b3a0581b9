//! Tests of masters that are bf16 themselves: their rounding is right on average, so that steps far below their last bit count, and depends on seed, unit,
//! step and element alone.
//!
//! Likely faults are a rounding to the nearest (weights then stand still), random bits that favour a direction or are those of the moments, a hash that counts
//! elements from the tile's start instead of the unit's, and a weight that is rounded although it is a bf16 already.

use crate::bf16_moments::losses;
use crate::common::{AlignedBytes, OwnedTile, Random, step};
use kernels::adamw::{
    Hyper, Master, Moments, Rounding, TileFormat, UpdateRule, init_tile, read_masters,
};
use kernels::number;

/// With gradients of -1, a step adds the learning rate to each weight.
const HYPER: Hyper = Hyper {
    lr: LR,
    beta1: 0.0,
    beta2: 0.0,
    eps: 0.0,
    weight_decay: 0.0,
    step: 1,
    grad_scale: 1.0,
    rounding: Rounding::ZERO,
};

/// 0.3 of the way from 1 to the next bf16.
const LR: f32 = 0.3 / 128.0;

fn format(master: Master, moments: Moments) -> TileFormat {
    let rule = UpdateRule::AdamW;
    TileFormat {
        rule,
        master,
        moments,
    }
}

fn tile_of(format: TileFormat, masters: &[f32], grads: &[f32]) -> OwnedTile {
    let mut tile = OwnedTile::zeroed(format, masters.len());
    init_tile(format, masters, &mut tile.param, &mut tile.state);
    kernels::reduce::store_grad(format.master.grad_type(), grads, &mut tile.grad);
    tile
}

fn weights(tile: &OwnedTile) -> Vec<f32> {
    let mut out = vec![0.0; tile.elems];
    read_masters(tile.format, &tile.param, &tile.state, &mut out);
    out
}

fn mean(numbers: &[f32]) -> f64 {
    numbers.iter().map(|x| f64::from(*x)).sum::<f64>() / numbers.len() as f64
}

/// Asserts that weights of 1 that [`HYPER`] has stepped went up three times in ten.
fn assert_right_on_average(weights: &[f32], what: &str) {
    let up = weights.iter().filter(|w| **w == 1.0 + 1.0 / 128.0).count();
    let stayed = weights.iter().filter(|w| **w == 1.0).count();
    assert_eq!(up + stayed, weights.len(), "{what}: no others");
    let share = up as f64 / weights.len() as f64;
    // Five deviations of the mean of this many roundings.
    let off = 5.0 * (0.3 * 0.7 / weights.len() as f64).sqrt();
    assert!((share - 0.3).abs() < off, "{what}: {share} went up");
}

#[test]
fn rounded_masters_are_right_on_average_over_elements_seeds_units_and_steps() {
    const COUNT: usize = 20_000;
    for moments in [Moments::Fp32, Moments::Bf16] {
        let format = format(Master::Bf16, moments);
        let mut tile = tile_of(format, &[1.0; COUNT], &[-1.0; COUNT]);
        step(&mut tile, &HYPER);
        let elements = weights(&tile);
        assert_right_on_average(&elements, "elements");
        let of = |hyper: &dyn Fn(u64) -> Hyper| -> Vec<f32> {
            let first = |number: usize| {
                let mut tile = tile_of(format, &[1.0], &[-1.0]);
                step(&mut tile, &hyper(number as u64));
                weights(&tile)[0]
            };
            (1..=COUNT).map(first).collect()
        };
        let rounded = |rounding| Hyper { rounding, ..HYPER };
        let zero = Rounding::ZERO;
        let seeds = of(&|seed| rounded(Rounding { seed, ..zero }));
        let units = of(&|unit| rounded(Rounding { unit, ..zero }));
        let steps = of(&|step| Hyper { step, ..HYPER });
        assert_right_on_average(&seeds, "seeds");
        assert_right_on_average(&units, "units");
        assert_right_on_average(&steps, "steps");
        assert!(elements != seeds && seeds != units && units != steps);
    }
}

#[test]
fn masters_and_moments_are_rounded_independently() {
    const COUNT: usize = 20_000;
    // The momentum is rounded up three times in ten too, and so is the weight: by other bits.
    let mut tile = tile_of(
        format(Master::Bf16, Moments::Bf16),
        &[1.0; COUNT],
        &[-1.0; COUNT],
    );
    let hyper = Hyper {
        grad_scale: 1.0 + LR,
        ..HYPER
    };
    step(&mut tile, &hyper);
    let weights = weights(&tile);
    let both = (0..COUNT).filter(|elem| {
        let momentum = number::from_bf16(tile.state.u16_at(2 * elem));
        momentum != -1.0 && weights[*elem] != 1.0
    });
    let share = both.count() as f64 / COUNT as f64;
    let off = 5.0 * (0.09 * 0.91 / COUNT as f64).sqrt();
    assert!((share - 0.09).abs() < off, "{share} of both");
}

#[test]
fn steps_of_a_millionth_move_weights_of_one_as_they_move_fp32_masters() {
    const COUNT: usize = 20_000;
    const STEPS: u64 = 1000;
    let [fp32, bf16] = [Master::SplitBf16, Master::Bf16].map(|master| {
        let format = format(master, Moments::Bf16);
        let mut tile = tile_of(format, &[1.0; COUNT], &[-1.0; COUNT]);
        for step_index in 1..=STEPS {
            let hyper = Hyper {
                lr: 1e-6,
                step: step_index,
                ..HYPER
            };
            step(&mut tile, &hyper);
        }
        mean(&weights(&tile)) - 1.0
    });
    assert!((fp32 / 1e-3 - 1.0).abs() < 0.05, "{fp32}");
    // Five deviations of this many roundings.
    assert!((bf16 / fp32 - 1.0).abs() < 0.1, "{bf16}, fp32 {fp32}");
    // A rounding to the nearest stands still.
    assert_eq!(number::to_bf16(1.0 + 1e-6), number::to_bf16(1.0));
}

#[test]
fn a_step_of_nothing_changes_no_weight() {
    let mut random = Random(61);
    let masters: Vec<f32> = (0..5000).map(|_| random.normal()).collect();
    let grads: Vec<f32> = (0..5000).map(|_| random.normal()).collect();
    let mut tile = tile_of(format(Master::Bf16, Moments::Fp32), &masters, &grads);
    let before = weights(&tile);
    step(&mut tile, &Hyper { lr: 0.0, ..HYPER });
    assert_eq!(weights(&tile), before);
}

#[test]
fn the_cut_of_a_unit_into_tiles_changes_no_bit() {
    let elems = 5000;
    let mut random = Random(62);
    let masters: Vec<f32> = (0..elems).map(|_| random.normal()).collect();
    let grads: Vec<f32> = (0..elems).map(|_| random.normal()).collect();
    let stepped = |cut: &[usize]| {
        let parts = cut.iter().zip(&cut[1..]);
        let parts = parts.map(|(start, end)| {
            let format = format(Master::Bf16, Moments::Bf16);
            let mut tile = tile_of(format, &masters[*start..*end], &grads[*start..*end]);
            for step_index in 1..=3 {
                let rounding = Rounding {
                    seed: 5,
                    unit: 2,
                    first_elem: *start as u64,
                };
                let hyper = Hyper {
                    lr: 1e-3,
                    step: step_index,
                    rounding,
                    ..HYPER
                };
                step(&mut tile, &hyper);
            }
            weights(&tile)
        });
        parts.collect::<Vec<_>>().concat()
    };
    assert!(stepped(&[0, 5000]) == stepped(&[0, 1024, 1027, 4000, 5000]));
}

#[test]
fn a_number_between_the_greatest_bf16_and_infinity_becomes_one_of_them_and_a_nan_stays_one() {
    let of = |master: f32, grad: f32, lr: f32| {
        let mut tile = tile_of(
            format(Master::Bf16, Moments::Fp32),
            &[master; 100],
            &[grad; 100],
        );
        step(&mut tile, &Hyper { lr, ..HYPER });
        AlignedBytes::from_bytes(&tile.param)
    };
    let greatest = number::from_bf16(0x7F7F);
    let rounded = of(greatest, -1.0, 1e36);
    let kinds: Vec<u16> = (0..100).map(|elem| rounded.u16_at(2 * elem)).collect();
    assert!(kinds.iter().all(|bits| [0x7F7F, 0x7F80].contains(bits)));
    assert!(kinds.contains(&0x7F7F) && kinds.contains(&0x7F80));
    let nan = of(1.0, f32::NAN, 1.0);
    assert!((0..100).all(|elem| nan.u16_at(2 * elem) == 0x7FC0));
}

#[test]
fn four_hundred_steps_have_the_losses_of_fp32_masters_within_five_percent() {
    let of = |master, moments| losses(format(master, moments), 400);
    let fp32 = of(Master::Fp32, Moments::Fp32);
    for moments in [Moments::Fp32, Moments::Bf16] {
        let bf16 = of(Master::Bf16, moments);
        println!("fp32 {fp32:?}\nbf16 {bf16:?}");
        assert!(fp32 != bf16, "nothing was rounded");
        for (fp32, bf16) in fp32.iter().zip(&bf16) {
            assert!((bf16 / fp32 - 1.0).abs() < 0.05, "{bf16}, fp32 {fp32}");
        }
    }
}
