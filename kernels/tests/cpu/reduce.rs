//! Tests that the norm, the sum over micro-batches and the cast have the same bits with every instruction set and any number of threads.
//!
//! Likely faults are an order of addition that depends on threads or vectors (a clipped run would then differ from run to run), a tail dropped or
//! counted twice, a lost NaN or infinity (a broken step would be taken), and a cast with another rounding. The norm is compared with its order
//! implemented here a second time, and all sets with the definition.

use crate::common::{AlignedBytes, Random, available_vector_sets, with_threads};
use kernels::InstructionSet;
use kernels::number;
use kernels::reduce::{
    GradType, accumulate, accumulate_with, store_grad, store_grad_with, sum_squares,
    sum_squares_with,
};

const GRAD_TYPES: [GradType; 3] = [GradType::Bf16, GradType::Fp16, GradType::Fp32];

fn lengths() -> impl Iterator<Item = usize> {
    (0..=70).chain([4095, 4096, 4097, 8192 + 33, 100_003, 600_011])
}

fn hard(grad_type: GradType, elems: usize, random: &mut Random) -> AlignedBytes {
    let mut bytes = AlignedBytes::zeroed(elems * grad_type.elem_bytes());
    random.fill_hard(&mut bytes, grad_type.elem_bytes());
    bytes
}

fn values(grad_type: GradType, bytes: &AlignedBytes) -> Vec<f32> {
    (0..bytes.len() / grad_type.elem_bytes())
        .map(|i| match grad_type {
            GradType::Bf16 => number::from_bf16(bytes.u16_at(2 * i)),
            GradType::Fp16 => number::from_fp16(bytes.u16_at(2 * i)),
            GradType::Fp32 => bytes.f32_at(4 * i),
        })
        .collect()
}

fn stored(grad_type: GradType, values: &[f32]) -> AlignedBytes {
    let mut bytes = AlignedBytes::zeroed(values.len() * grad_type.elem_bytes());
    store_grad(grad_type, values, &mut bytes);
    bytes
}

/// Sums in the order that `sum_squares` promises.
fn sum_in_the_promised_order(values: &[f32]) -> f64 {
    let mut sum = 0.0;
    for group in values.chunks(64 * 4096) {
        let mut group_sum = 0.0;
        for chunk in group.chunks(4096) {
            let mut lanes = vec![0.0f64; 32];
            for (i, x) in chunk.iter().enumerate() {
                lanes[i % 32] += f64::from(*x) * f64::from(*x);
            }
            while lanes.len() > 1 {
                let high = lanes.split_off(lanes.len() / 2);
                lanes = lanes.iter().zip(&high).map(|(a, b)| a + b).collect();
            }
            group_sum += lanes[0];
        }
        sum += group_sum;
    }
    sum
}

#[test]
fn the_norm_is_added_in_the_promised_order_on_every_instruction_set() {
    let sets = available_vector_sets();
    let mut random = Random(31);
    for elems in lengths() {
        let normal: Vec<f32> = (0..elems).map(|_| random.normal() * 1e-3).collect();
        for grad_type in GRAD_TYPES {
            let grad = stored(grad_type, &normal);
            let promised = sum_in_the_promised_order(&values(grad_type, &grad));
            for set in sets.iter().chain(&[InstructionSet::Scalar]) {
                let sum = sum_squares_with(*set, grad_type, &grad);
                assert_eq!(
                    sum.to_bits(),
                    promised.to_bits(),
                    "{set:?} {grad_type:?} {elems}"
                );
            }
        }
    }
}

#[test]
fn the_norm_of_hard_numbers_is_the_same_on_every_instruction_set() {
    let mut random = Random(32);
    for set in available_vector_sets() {
        for elems in lengths().chain([3; 200]) {
            for grad_type in GRAD_TYPES {
                let grad = hard(grad_type, elems, &mut random);
                let defined = sum_squares_with(InstructionSet::Scalar, grad_type, &grad);
                let sum = sum_squares_with(set, grad_type, &grad);
                assert_eq!(
                    sum.to_bits(),
                    defined.to_bits(),
                    "{set:?} {grad_type:?} {elems}"
                );
            }
        }
    }
}

#[test]
fn a_single_nan_or_infinity_shows_in_the_norm() {
    for grad_type in GRAD_TYPES {
        for elems in [1, 31, 32, 5000] {
            for at in [0, elems / 2, elems - 1] {
                let mut grads = vec![1.0f32; elems];
                assert_eq!(
                    sum_squares(grad_type, &stored(grad_type, &grads)),
                    elems as f64
                );
                grads[at] = f32::NEG_INFINITY;
                assert_eq!(
                    sum_squares(grad_type, &stored(grad_type, &grads)),
                    f64::INFINITY
                );
                grads[at] = f32::NAN;
                assert!(sum_squares(grad_type, &stored(grad_type, &grads)).is_nan());
            }
        }
    }
}

#[test]
fn every_nan_norm_is_the_same_nan() {
    // Negative, with a payload, quiet and signalling: the processor would propagate these unchanged.
    for bits in [0xFFC0_1234u32, 0x7F80_0001, 0xFF80_4000] {
        let grad = AlignedBytes::from_bytes(&bits.to_le_bytes());
        let sum = sum_squares(GradType::Fp32, &grad);
        assert_eq!(sum.to_bits(), f64::NAN.to_bits(), "{bits:#x}");
    }
}

#[test]
fn the_norm_neither_overflows_nor_vanishes() {
    let huge = AlignedBytes::of_f32(&[3e38; 4]);
    let expected = 4.0 * f64::from(3e38f32).powi(2);
    assert_eq!(sum_squares(GradType::Fp32, &huge), expected);
    let tiny = AlignedBytes::of_f32(&[f32::from_bits(1)]);
    assert_eq!(sum_squares(GradType::Fp32, &tiny), 2f64.powi(-298));
}

#[test]
fn the_number_of_threads_changes_no_bit() {
    let mut random = Random(33);
    let elems = 300_007;
    for grad_type in GRAD_TYPES {
        let normal: Vec<f32> = (0..elems).map(|_| random.normal()).collect();
        let grad = stored(grad_type, &normal);
        let results = [1, 2, 3].map(|thread_count| {
            with_threads(thread_count, || {
                let norm = sum_squares(grad_type, &grad);
                let mut sum = normal.clone();
                accumulate(&mut sum, &grad, grad_type);
                let back = stored(grad_type, &sum);
                (norm.to_bits(), back.to_vec())
            })
        });
        assert!(
            results[0] == results[1],
            "{grad_type:?}: one thread and two"
        );
        assert!(
            results[0] == results[2],
            "{grad_type:?}: one thread and three"
        );
    }
}

#[test]
fn micro_batches_are_summed_in_fp32_on_every_instruction_set() {
    let sets = available_vector_sets();
    let mut random = Random(34);
    for elems in lengths() {
        for grad_type in GRAD_TYPES {
            let x = hard(grad_type, elems, &mut random);
            let before: Vec<f32> = (0..elems).map(|_| random.hard_f32()).collect();
            let expected: Vec<u32> = before
                .iter()
                .zip(values(grad_type, &x))
                .map(|(sum, x)| number::canonical(sum + x).to_bits())
                .collect();
            for set in sets.iter().chain(&[InstructionSet::Scalar]) {
                let mut sum = before.clone();
                accumulate_with(*set, &mut sum, &x, grad_type);
                let sum: Vec<u32> = sum.into_iter().map(f32::to_bits).collect();
                assert!(sum == expected, "{set:?} {grad_type:?} {elems}");
            }
        }
    }
}

#[test]
fn gradients_are_cast_to_nearest_even_on_every_instruction_set() {
    let sets = available_vector_sets();
    let mut random = Random(35);
    for elems in lengths() {
        let from: Vec<f32> = (0..elems).map(|_| random.hard_f32()).collect();
        for grad_type in GRAD_TYPES {
            let expected: Vec<u8> = from
                .iter()
                .flat_map(|x| match grad_type {
                    GradType::Bf16 => number::to_bf16(*x).to_le_bytes().to_vec(),
                    GradType::Fp16 => number::to_fp16(*x).to_le_bytes().to_vec(),
                    GradType::Fp32 => number::canonical(*x).to_le_bytes().to_vec(),
                })
                .collect();
            for set in sets.iter().chain(&[InstructionSet::Scalar]) {
                let mut out = AlignedBytes::from_bytes(&vec![0xAB; expected.len()]);
                store_grad_with(*set, grad_type, &from, &mut out);
                assert!(*out == *expected, "{set:?} {grad_type:?} {elems}");
            }
        }
    }
}

#[test]
fn casts_round_halves_to_even() {
    // Halves between bf16 neighbours: 1 + 2^-8 goes down to even 1, 1 + 3 * 2^-8 up to even 1 + 2^-6.
    let bf16 = stored(
        GradType::Bf16,
        &[1.0 + 2f32.powi(-8), 1.0 + 3.0 * 2f32.powi(-8)],
    );
    assert_eq!((bf16.u16_at(0), bf16.u16_at(2)), (0x3F80, 0x3F82));
    let fp16 = stored(
        GradType::Fp16,
        &[1.0 + 2f32.powi(-11), 1.0 + 3.0 * 2f32.powi(-11)],
    );
    assert_eq!((fp16.u16_at(0), fp16.u16_at(2)), (0x3C00, 0x3C02));
}

#[test]
#[should_panic(expected = "6 bytes of Bf16 beside 4 fp32 elements")]
fn a_sum_of_another_length_is_refused() {
    accumulate(&mut [0.0; 4], &AlignedBytes::zeroed(6), GradType::Bf16);
}

#[test]
#[should_panic(expected = "16 bytes of Fp16 beside 4 fp32 elements")]
fn a_cast_to_another_length_is_refused() {
    store_grad(GradType::Fp16, &[0.0; 4], &mut AlignedBytes::zeroed(16));
}
