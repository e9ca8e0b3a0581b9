//! Tests of moments that are stored as codes of 8 bits: each is the nearest value of its block, and blocks depend on nothing around them.
//!
//! Likely faults are a largest magnitude of another block, a momentum read with the values of variances, moments that are stored before the parameter
//! uses them, a code that is not the nearest, and a last block with fewer elements.

use crate::common::{AlignedBytes, MASTERS, OwnedTile, Random, step};
use kernels::adamw::{
    BLOCK_ELEMS, Hyper, Master, Moments, Rounding, TileFormat, UpdateRule, init_tile, read_masters,
    read_moments, state_planes, step_range, write_moments,
};

const HYPER: Hyper = Hyper {
    lr: 1e-2,
    beta1: 0.9,
    beta2: 0.99,
    eps: 1e-8,
    weight_decay: 0.1,
    step: 3,
    grad_scale: 0.5,
    rounding: Rounding::ZERO,
};

/// Three blocks and a part of one.
const ELEMS: usize = 3 * BLOCK_ELEMS + 100;

fn tile_format(rule: UpdateRule, master: Master, moments: Moments) -> TileFormat {
    TileFormat {
        rule,
        master,
        moments,
    }
}

/// The values of the 256 codes of momentums and of variances.
fn values() -> [Vec<f32>; 2] {
    let mut tile = OwnedTile::zeroed(
        tile_format(UpdateRule::AdamW, Master::Fp32, Moments::EightBit),
        256,
    );
    let [_, momentum, variance, momentum_largest, variance_largest] =
        state_planes(tile.format, 256);
    for plane in [momentum, variance] {
        for (code, byte) in tile.state[plane].iter_mut().enumerate() {
            *byte = code as u8;
        }
    }
    for plane in [momentum_largest, variance_largest] {
        tile.state[plane].copy_from_slice(&1.0f32.to_le_bytes());
    }
    read_moments(tile.format, &tile.state, 256)
}

/// What a moment becomes when it is stored, by comparing with each value.
fn stored(moment: &[f32], values: &[f32]) -> Vec<f32> {
    let of_block = |block: &[f32]| -> Vec<f32> {
        let largest = block.iter().fold(0.0f32, |largest, x| largest.max(x.abs()));
        let nearest = |x: &f32| {
            let distance = |value: f32| (f64::from(x / largest) - f64::from(value)).abs();
            let is_variance = values[0] == 0.0;
            let fit = |value: &f32| *value != 0.0 || *x <= 0.0 || !is_variance;
            let nearest = (values.iter().copied().filter(fit))
                .min_by(|a, b| distance(*a).total_cmp(&distance(*b)));
            nearest.unwrap() * largest
        };
        block.iter().map(nearest).collect()
    };
    moment.chunks(BLOCK_ELEMS).flat_map(of_block).collect()
}

/// Makes a tile with masters, gradients and moments that differ by blocks.
fn random_tile(format: TileFormat, random: &mut Random) -> OwnedTile {
    let mut tile = OwnedTile::zeroed(format, ELEMS);
    let masters: Vec<f32> = (0..ELEMS).map(|_| random.normal()).collect();
    init_tile(format, &masters, &mut tile.param, &mut tile.state);
    let scale = |elem: usize| [1e-3f32, 1.0, 1e-9, 30.0][elem / BLOCK_ELEMS];
    let grads: Vec<f32> = (0..ELEMS)
        .map(|elem| random.normal() * scale(elem))
        .collect();
    kernels::reduce::store_grad(format.master.grad_type(), &grads, &mut tile.grad);
    let momentum: Vec<f32> = (0..ELEMS)
        .map(|elem| random.normal() * scale(elem))
        .collect();
    let variance: Vec<f32> = momentum.iter().map(|x| x * x + 1e-12).collect();
    write_moments(
        format,
        &mut tile.state,
        ELEMS,
        0..ELEMS,
        [&momentum, &variance],
    );
    tile
}

#[test]
fn a_step_is_one_of_fp32_moments_whose_results_are_stored_as_the_nearest_values() {
    let values = values();
    let mut random = Random(31);
    for (rule, master) in [UpdateRule::AdamW, UpdateRule::Lion]
        .into_iter()
        .flat_map(|rule| MASTERS.map(|master| (rule, master)))
    {
        let mut tile = random_tile(tile_format(rule, master, Moments::EightBit), &mut random);
        let moments = read_moments(tile.format, &tile.state, ELEMS);
        let mut wide = OwnedTile::zeroed(tile_format(rule, master, Moments::Fp32), ELEMS);
        let mut masters = vec![0.0; ELEMS];
        read_masters(tile.format, &tile.param, &tile.state, &mut masters);
        init_tile(wide.format, &masters, &mut wide.param, &mut wide.state);
        let [momentum, variance] = &moments;
        write_moments(
            wide.format,
            &mut wide.state,
            ELEMS,
            0..ELEMS,
            [momentum, variance],
        );
        wide.grad = tile.grad.clone();
        step(&mut tile, &HYPER);
        step(&mut wide, &HYPER);
        assert!(
            *tile.param == *wide.param,
            "{rule:?} {master:?}: parameters"
        );
        let exact = read_moments(wide.format, &wide.state, ELEMS);
        let found = read_moments(tile.format, &tile.state, ELEMS);
        assert!(found != exact, "nothing was rounded");
        for ((found, exact), values) in found.iter().zip(&exact).zip(&values) {
            assert_eq!(*found, stored(exact, values), "{rule:?} {master:?}");
        }
    }
}

#[test]
fn a_weight_without_a_gradient_moves_no_further_than_before() {
    for rule_moments in [Moments::Fp32, Moments::EightBit] {
        let mut tile = OwnedTile::zeroed(
            tile_format(UpdateRule::AdamW, Master::Fp32, rule_moments),
            2,
        );
        // The variance of the second is 1e-10 of the first one's.
        tile.grad = AlignedBytes::of_f32(&[1.0, 1e-5]);
        let hyper = Hyper {
            weight_decay: 0.0,
            ..HYPER
        };
        let mut before = 0.0;
        for step_index in 1..=5 {
            let hyper = Hyper {
                step: step_index,
                ..hyper
            };
            step(&mut tile, &hyper);
            let weight = tile.param.f32_at(4);
            let moved = f32::abs(weight - before);
            assert!(moved <= 1.1 * hyper.lr, "{rule_moments:?}: {moved}");
            before = weight;
            tile.grad = AlignedBytes::of_f32(&[1.0, 0.0]);
        }
    }
}

#[test]
fn the_cut_of_a_unit_between_blocks_changes_no_bit() {
    let format = tile_format(UpdateRule::AdamW, Master::Fp32, Moments::EightBit);
    let mut random = Random(32);
    let whole = random_tile(format, &mut random);
    let stepped = |cut: &[usize]| {
        let mut found = Vec::new();
        for (start, end) in cut.iter().zip(&cut[1..]) {
            let elems = end - start;
            let mut tile = OwnedTile::zeroed(format, elems);
            let bytes = 4 * start..4 * end;
            tile.param = AlignedBytes::from_bytes(&whole.param[bytes.clone()]);
            tile.grad = AlignedBytes::from_bytes(&whole.grad[bytes]);
            let from = state_planes(format, ELEMS);
            let blocks = start / BLOCK_ELEMS;
            for (plane, (to, from)) in state_planes(format, elems)
                .into_iter()
                .zip(from)
                .enumerate()
            {
                let skipped = if plane < 3 { *start } else { 4 * blocks };
                let skipped = if from.is_empty() { 0 } else { skipped };
                let len = to.len();
                tile.state[to].copy_from_slice(&whole.state[from.start + skipped..][..len]);
            }
            step(&mut tile, &HYPER);
            let [momentum, variance] = read_moments(format, &tile.state, elems);
            let moments = momentum.into_iter().zip(variance).enumerate();
            found.extend(
                moments.map(|(elem, (m, v))| [tile.param.f32_at(4 * elem), m, v].map(f32::to_bits)),
            );
        }
        found
    };
    assert!(stepped(&[0, ELEMS]) == stepped(&[0, BLOCK_ELEMS, 3 * BLOCK_ELEMS, ELEMS]));
}

#[test]
fn elements_beside_a_range_keep_their_weights_and_have_moments_near_those_they_had() {
    let format = tile_format(UpdateRule::AdamW, Master::Fp32, Moments::EightBit);
    let before = random_tile(format, &mut Random(33));
    let mut tile = before.clone();
    step_range(&HYPER, tile.borrow(), format.master.grad_type(), 300..301);
    let [old, new] = [&before, &tile].map(|tile| read_moments(format, &tile.state, ELEMS));
    for elem in 0..ELEMS {
        let weights = [&before, &tile].map(|tile| tile.param.f32_at(4 * elem));
        assert_eq!(weights[0] != weights[1], elem == 300, "{elem}");
        let in_block = elem / BLOCK_ELEMS == 300 / BLOCK_ELEMS;
        for (old, new) in old.iter().zip(&new) {
            let near = if in_block {
                0.08 * old[elem].abs()
            } else {
                0.0
            };
            let kept = (old[elem] - new[elem]).abs() <= near;
            assert!(kept || elem == 300, "{elem}: {}, {}", old[elem], new[elem]);
        }
    }
}

#[test]
fn a_moment_that_is_infinite_or_no_number_makes_its_block_and_then_its_weights_none() {
    let format = tile_format(UpdateRule::AdamW, Master::Fp32, Moments::EightBit);
    // The square of the last one is infinite, and its momentum is not.
    for bad in [f32::NAN, f32::INFINITY, 1e25] {
        let mut tile = random_tile(format, &mut Random(34));
        let in_block = |elem: usize| elem / BLOCK_ELEMS == 300 / BLOCK_ELEMS;
        tile.grad[4 * 300..4 * 301].copy_from_slice(&bad.to_le_bytes());
        step(&mut tile, &HYPER);
        let [momentum, variance] = read_moments(format, &tile.state, ELEMS);
        for elem in 0..ELEMS {
            let is_none = [momentum[elem], variance[elem]].map(f32::is_nan);
            assert_eq!(is_none, [in_block(elem) && bad != 1e25, in_block(elem)]);
        }
        tile.grad[4 * 300..4 * 301].copy_from_slice(&1.0f32.to_le_bytes());
        step(&mut tile, &HYPER);
        let none = (0..ELEMS).filter(|elem| tile.param.f32_at(4 * elem).is_nan());
        assert!(none.eq((0..ELEMS).filter(|elem| in_block(*elem))), "{bad}");
    }
}

#[test]
fn moments_that_were_read_are_written_as_they_are_there_and_elsewhere() {
    let mut random = Random(7);
    let format = tile_format(UpdateRule::AdamW, Master::SplitBf16, Moments::EightBit);
    let mut tile = random_tile(format, &mut random);
    step(&mut tile, &HYPER);
    let read = read_moments(format, &tile.state, ELEMS);
    let [momentum, variance] = &read;
    let largest_is_negative = |block: &[f32]| {
        let order = |a: &&f32, b: &&f32| a.abs().total_cmp(&b.abs());
        block.iter().max_by(order).is_some_and(|x| *x < 0.0)
    };
    let negative = momentum
        .chunks(BLOCK_ELEMS)
        .filter(|block| largest_is_negative(block));
    assert!([1, 2, 3].contains(&negative.count()), "both signs occur");
    for range in [0..ELEMS, 300..ELEMS - 50] {
        let new = [&momentum[range.clone()], &variance[range.clone()]];
        write_moments(format, &mut tile.state, ELEMS, range.clone(), new);
        assert!(
            read_moments(format, &tile.state, ELEMS) == read,
            "{range:?}"
        );
    }
    let mut empty = OwnedTile::zeroed(format, ELEMS);
    write_moments(
        format,
        &mut empty.state,
        ELEMS,
        0..ELEMS,
        [momentum, variance],
    );
    assert!(
        read_moments(format, &empty.state, ELEMS) == read,
        "elsewhere"
    );
    let before = tile.state.clone();
    let mut other = momentum.clone();
    other[400] += 1.0;
    let new = [&other[..], variance];
    write_moments(format, &mut tile.state, ELEMS, 0..ELEMS, new);
    assert!(*tile.state != *before, "one that differs is stored");
}
