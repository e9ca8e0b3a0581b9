//! Tests that each optimizer gives the same bits with every instruction set, any number of threads, and any division of a tile.
//!
//! Likely faults are a vector kernel with another rounding, tails, NaNs, infinities or denormals that are handled differently, a plane read at the
//! wrong place, or a write beyond the range. Each kernel is compared with the definition byte by byte, padding included, on numbers chosen to expose
//! these.

use crate::common::{AlignedBytes, MASTERS, OwnedTile, Random, available_vector_sets, formats};
use kernels::InstructionSet;
use kernels::adamw::{
    BLOCK_ELEMS, Hyper, Master, Moments, Rounding, Tile, TileFormat, state_planes, step_range,
    step_range_with,
};
use kernels::number;
use kernels::reduce::GradType;
use proptest::prelude::*;

const HYPER: Hyper = Hyper {
    lr: 3e-4,
    beta1: 0.9,
    beta2: 0.95,
    eps: 1e-8,
    weight_decay: 0.1,
    step: 7,
    grad_scale: 0.37,
    rounding: Rounding {
        seed: 9,
        unit: 3,
        first_elem: u32::MAX as u64 - 100,
    },
};

fn stepped(set: InstructionSet, hyper: &Hyper, before: &OwnedTile) -> OwnedTile {
    let mut tile = before.clone();
    let (all, grad_type) = (0..tile.elems, tile.format.master.grad_type());
    step_range_with(set, hyper, tile.borrow(), grad_type, all);
    tile
}

#[test]
fn every_instruction_set_gives_the_definitions_bits_at_every_tail_length() {
    let sets = available_vector_sets();
    let mut random = Random(1);
    let lengths = (0..=70).chain([1000, 16 * 1024 - 1, 16 * 1024 + 17, 100_003]);
    for elems in lengths {
        for format in formats() {
            let before = OwnedTile::hard(format, elems, &mut random);
            let defined = stepped(InstructionSet::Scalar, &HYPER, &before);
            // A few bf16 masters without state may all be rounded to what they were.
            assert!(
                elems < 32 || *defined.param != *before.param || *defined.state != *before.state,
                "nothing was stepped"
            );
            for set in &sets {
                let tile = stepped(*set, &HYPER, &before);
                tile.assert_same_bits(&defined, &format!("{set:?} and the definition"));
            }
        }
    }
}

#[test]
fn every_instruction_set_starts_a_range_anywhere() {
    let mut random = Random(2);
    for set in available_vector_sets() {
        for format in formats() {
            for start in 0..40 {
                let before = OwnedTile::hard(format, 150, &mut random);
                let (range, grad_type) = (start..start + 70, format.master.grad_type());
                let mut defined = before.clone();
                let scalar = InstructionSet::Scalar;
                step_range_with(scalar, &HYPER, defined.borrow(), grad_type, range.clone());
                let mut tile = before;
                step_range_with(set, &HYPER, tile.borrow(), grad_type, range.clone());
                tile.assert_same_bits(&defined, &format!("{set:?}, range {range:?}"));
            }
        }
    }
}

fn any_hyper() -> impl Strategy<Value = Hyper> {
    let magnitude = prop_oneof![Just(0.0f32), 1e-9f32..1e-3, 1e-3f32..1.0, Just(1e30f32)];
    (
        (magnitude.clone(), 0.0f32..1.0, 0.0f32..1.0),
        (magnitude.clone(), magnitude.clone(), 1u64..100_000),
        prop_oneof![Just(1.0f32), Just(f32::NAN), Just(f32::INFINITY), magnitude],
    )
        .prop_map(
            |((lr, beta1, beta2), (eps, weight_decay, step), grad_scale)| Hyper {
                lr,
                beta1,
                beta2,
                eps,
                weight_decay,
                step,
                grad_scale,
                rounding: HYPER.rounding,
            },
        )
}

/// Where a tile may be cut into ranges that have the bits of the whole: blocks of moments in 8 bits stay whole.
fn cut(format: TileFormat, elem: usize) -> usize {
    match format.moments {
        Moments::Fp32 | Moments::Bf16 => elem,
        Moments::EightBit => elem / BLOCK_ELEMS * BLOCK_ELEMS,
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, failure_persistence: None, ..ProptestConfig::default() })]
    #[test]
    fn any_scalars_and_any_numbers_give_the_definitions_bits(
        hyper in any_hyper(), seed: u64, elems in 0usize..600, which in 0usize..36
    ) {
        let before = OwnedTile::hard(formats().nth(which).unwrap(), elems, &mut Random(seed));
        let defined = stepped(InstructionSet::Scalar, &hyper, &before);
        for set in InstructionSet::ALL.into_iter().filter(|set| set.available()) {
            stepped(set, &hyper, &before).assert_same_bits(&defined, &format!("{set:?}"));
        }
    }
}

#[test]
fn a_tile_stepped_in_ranges_has_the_bits_of_one_stepped_whole() {
    for format in formats() {
        let before = OwnedTile::hard(format, 50_000, &mut Random(4));
        let whole = stepped(InstructionSet::best(), &HYPER, &before);
        let mut tile = before;
        let [a, b] = [3, 20_001].map(|elem| cut(format, elem));
        for range in [b..50_000, 0..a, a..a, a..b] {
            step_range(&HYPER, tile.borrow(), format.master.grad_type(), range);
        }
        tile.assert_same_bits(&whole, "ranges and the whole");
    }
}

#[test]
fn a_range_leaves_the_rest_of_its_tile_alone() {
    for format in formats() {
        let before = OwnedTile::hard(format, 1000, &mut Random(5));
        let mut tile = before.clone();
        let grad_type = format.master.grad_type();
        let [a, b] = [300, 900].map(|elem| cut(format, elem));
        step_range(&HYPER, tile.borrow(), grad_type, a..b);
        // Stepping the other elements too must give the step of the whole tile: elements that were touched would be two steps ahead.
        for range in [0..a, b..1000] {
            step_range(&HYPER, tile.borrow(), grad_type, range);
        }
        tile.assert_same_bits(
            &stepped(InstructionSet::Scalar, &HYPER, &before),
            "each element once",
        );
    }
}

#[test]
fn fp32_gradients_that_16_bits_hold_give_the_bits_of_16_bit_gradients() {
    for format in formats() {
        let before = OwnedTile::hard(format, 5000, &mut Random(6));
        let grad: Vec<u8> = before
            .grad
            .chunks_exact(format.master.grad_bytes())
            .flat_map(|bytes| wide(format.master, bytes).to_le_bytes())
            .collect();
        let grad = AlignedBytes::from_bytes(&grad);
        let mut tile = before.clone();
        let [a, b] = [1, 4097].map(|elem| cut(format, elem));
        for range in [0..a, a..b, b..5000] {
            let wide = Tile {
                grad: &grad,
                ..tile.borrow()
            };
            step_range(&HYPER, wide, GradType::Fp32, range);
        }
        tile.assert_same_bits(
            &stepped(InstructionSet::Scalar, &HYPER, &before),
            "wide and narrow gradients",
        );
    }
}

#[test]
fn fp32_gradients_are_not_rounded() {
    let (elems, hyper) = (
        16,
        Hyper {
            grad_scale: 1.0,
            ..HYPER
        },
    );
    // Half way between two bf16 numbers and a little more.
    let grad = 1.0f32 + 1.0 / 256.0 + 1.0 / 65536.0;
    let grads = AlignedBytes::of_f32(&vec![grad; elems]);
    for master in MASTERS {
        let mut tile = OwnedTile::zeroed(master, elems);
        let wide = Tile {
            grad: &grads,
            ..tile.borrow()
        };
        step_range(&hyper, wide, GradType::Fp32, 0..elems);
        let momentum = &tile.state[state_planes(master.into(), elems)[1].clone()][..4];
        let expected = (1.0 - f64::from(hyper.beta1)) as f32 * grad;
        assert_eq!(
            f32::from_le_bytes(momentum.try_into().unwrap()),
            expected,
            "{master:?}"
        );
    }
}

fn wide(master: Master, bytes: &[u8]) -> f32 {
    let half = || u16::from_le_bytes(bytes.try_into().unwrap());
    match master {
        Master::Fp32 => f32::from_le_bytes(bytes.try_into().unwrap()),
        Master::SplitBf16 | Master::Bf16 => number::from_bf16(half()),
        Master::Fp16WholeMaster => number::from_fp16(half()),
    }
}
