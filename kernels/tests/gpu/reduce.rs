//! Tests that the norm, the sum and the cast on the GPU give the same bits as on the CPU.
//!
//! Likely faults are another order of addition, a tail dropped or added twice, lanes folded differently, a NaN that becomes another one, a cast that
//! rounds differently at one of its turning points (all are tried), and wide accesses where the two sides have different alignment.

use kernels::gpu::sum_squares_scratch_bytes;
use kernels::reduce::{GradType, accumulate, store_grad, sum_squares};

use crate::device::{downloaded, gpu, uploaded};
use crate::shared::{AlignedBytes, Random};

const GRAD_TYPES: [GradType; 3] = [GradType::Bf16, GradType::Fp16, GradType::Fp32];

fn hard(grad_type: GradType, elems: usize, random: &mut Random) -> AlignedBytes {
    let mut bytes = AlignedBytes::zeroed(elems * grad_type.elem_bytes());
    random.fill_hard(&mut bytes, grad_type.elem_bytes());
    bytes
}

/// Returns numbers without infinities and NaNs, so that every addition counts.
fn finite(grad_type: GradType, elems: usize, random: &mut Random) -> AlignedBytes {
    let numbers: Vec<f32> = (0..elems).map(|_| random.normal()).collect();
    let mut bytes = AlignedBytes::zeroed(elems * grad_type.elem_bytes());
    store_grad(grad_type, &numbers, &mut bytes);
    bytes
}

#[test]
fn the_norm_has_the_cpus_bits_at_every_length() {
    let Some(gpu) = gpu() else { return };
    let stream = gpu.stream().unwrap();
    let kernels = gpu.kernels().unwrap();
    let mut random = Random(1);
    let lengths = (0..=70).chain([
        4095,
        4096,
        4097,
        8 * 4096 + 33,
        256 * 4096,
        257 * 4096 + 1,
        5_000_011,
    ]);
    for elems in lengths {
        for grad_type in GRAD_TYPES {
            for bytes in [
                finite(grad_type, elems, &mut random),
                hard(grad_type, elems, &mut random),
            ] {
                // Gradients of a tensor may start anywhere in their unit's buffer.
                let offset_bytes = 3 * grad_type.elem_bytes();
                let grad = uploaded(&gpu, &stream, offset_bytes, &bytes);
                let scratch = gpu.alloc(sum_squares_scratch_bytes(elems)).unwrap();
                let out = uploaded(&gpu, &stream, 8, &[0xAB; 8]);
                kernels
                    .sum_squares(
                        &stream,
                        grad_type,
                        grad.at(offset_bytes),
                        elems,
                        scratch.at(0),
                        out.at(8),
                    )
                    .unwrap();
                let found = downloaded(&gpu, &stream, &out, 8, 8);
                let found = u64::from_le_bytes(found.try_into().unwrap());
                let expected = sum_squares(grad_type, &bytes).to_bits();
                assert_eq!(
                    found,
                    expected,
                    "{elems} of {grad_type:?}: {} and {}",
                    f64::from_bits(found),
                    f64::from_bits(expected)
                );
            }
        }
    }
}

#[test]
fn norms_of_more_chunks_than_a_block_has_groups_have_the_cpus_bits() {
    let Some(gpu) = gpu() else { return };
    let stream = gpu.stream().unwrap();
    let kernels = gpu.kernels().unwrap();
    let elems: usize = 256 * 64 * 4096 + 65 * 4096 + 1;
    let mut random = Random(5);
    let mut bytes = finite(GradType::Bf16, 99_991, &mut random).to_vec();
    bytes = bytes.repeat(elems.div_ceil(99_991));
    bytes.truncate(2 * elems);
    let grad = uploaded(&gpu, &stream, 0, &bytes);
    let scratch = gpu.alloc(sum_squares_scratch_bytes(elems)).unwrap();
    let out = gpu.alloc(8).unwrap();
    kernels
        .sum_squares(
            &stream,
            GradType::Bf16,
            grad.at(0),
            elems,
            scratch.at(0),
            out.at(0),
        )
        .unwrap();
    let found = downloaded(&gpu, &stream, &out, 0, 8);
    let found = f64::from_le_bytes(found.try_into().unwrap());
    let expected = sum_squares(GradType::Bf16, &AlignedBytes::from_bytes(&bytes));
    assert_eq!(
        found.to_bits(),
        expected.to_bits(),
        "{found} and {expected}"
    );
}

#[test]
fn sums_have_the_cpus_bits_wherever_they_start() {
    let Some(gpu) = gpu() else { return };
    let stream = gpu.stream().unwrap();
    let kernels = gpu.kernels().unwrap();
    let mut random = Random(2);
    for elems in (0..=20).chain([1023, 1024, 1025, 100_003]) {
        for x_type in GRAD_TYPES {
            for (sum_at, x_at) in [(0, 0), (4, 4), (1, 0), (0, 3), (2, 2)] {
                let x = hard(x_type, elems, &mut random);
                let mut sum: Vec<f32> = (0..elems).map(|_| random.hard_f32()).collect();
                let (sum_at, x_at) = (4 * sum_at, x_type.elem_bytes() * x_at);
                let x_there = uploaded(&gpu, &stream, x_at, &x);
                // One more element follows, which must not change.
                let mut framed = AlignedBytes::of_f32(&sum).to_vec();
                framed.extend([0xAB; 4]);
                let sum_there = uploaded(&gpu, &stream, sum_at, &framed);
                kernels
                    .accumulate(
                        &stream,
                        sum_there.at(sum_at),
                        x_there.at(x_at),
                        x_type,
                        elems,
                    )
                    .unwrap();
                accumulate(&mut sum, &x, x_type);
                let mut expected = AlignedBytes::of_f32(&sum).to_vec();
                expected.extend([0xAB; 4]);
                let found = downloaded(&gpu, &stream, &sum_there, sum_at, expected.len());
                assert!(
                    found == expected,
                    "{elems} of {x_type:?}, from byte {sum_at} and {x_at} on"
                );
            }
        }
    }
}

#[test]
fn casts_have_the_cpus_bits_at_every_turning_point() {
    let Some(gpu) = gpu() else { return };
    let stream = gpu.stream().unwrap();
    let kernels = gpu.kernels().unwrap();
    // Every upper half of an fp32, with the lower halves at which a rounding to bf16 or fp16 changes, and some between.
    let lower = [
        0, 1, 0x0FFF, 0x1000, 0x1001, 0x1FFF, 0x2FFF, 0x3000, 0x3001, 0x5555, 0x7FFF, 0x8000,
        0x8001, 0xFFFF,
    ];
    let all: Vec<f32> = (0..=u16::MAX)
        .flat_map(|upper| lower.map(|lower| f32::from_bits(u32::from(upper) << 16 | lower)))
        .collect();
    for grad_type in GRAD_TYPES {
        for (from_at, out_at, elems) in [
            (0, 0, all.len()),
            (1, 0, 5000),
            (4, 4, 1023),
            (0, 1, 7),
            (0, 0, 0),
        ] {
            // The short slices start at the special numbers.
            let from = if elems == all.len() {
                &all[..]
            } else {
                &all[all.len() / 2 - elems..all.len() / 2]
            };
            let (from_at, out_at) = (4 * from_at, grad_type.elem_bytes() * out_at);
            let from_there = uploaded(&gpu, &stream, from_at, &AlignedBytes::of_f32(from));
            let mut expected = AlignedBytes::zeroed(elems * grad_type.elem_bytes());
            store_grad(grad_type, from, &mut expected);
            let mut expected = expected.to_vec();
            expected.extend([0xAB; 2]);
            let out = uploaded(&gpu, &stream, out_at, &vec![0xAB; expected.len()]);
            kernels
                .store_grad(
                    &stream,
                    grad_type,
                    from_there.at(from_at),
                    out.at(out_at),
                    elems,
                )
                .unwrap();
            let found = downloaded(&gpu, &stream, &out, out_at, expected.len());
            if let Some(at) = (0..found.len()).find(|at| found[*at] != expected[*at]) {
                let elem = at / grad_type.elem_bytes();
                panic!(
                    "{grad_type:?}: element {elem} of {elems}, {:?}",
                    from.get(elem).map(|x| x.to_bits())
                );
            }
        }
    }
}

#[test]
fn every_stored_16_bit_number_has_its_value() {
    let Some(gpu) = gpu() else { return };
    let stream = gpu.stream().unwrap();
    let kernels = gpu.kernels().unwrap();
    let all: Vec<u16> = (0..=u16::MAX).collect();
    let x = AlignedBytes::of_u16(&all);
    let x_there = uploaded(&gpu, &stream, 0, &x);
    for x_type in [GradType::Bf16, GradType::Fp16] {
        let sum_there = gpu.alloc(4 * all.len()).unwrap();
        stream.fill_zero(sum_there.at(0), 4 * all.len()).unwrap();
        kernels
            .accumulate(&stream, sum_there.at(0), x_there.at(0), x_type, all.len())
            .unwrap();
        let found =
            AlignedBytes::from_bytes(&downloaded(&gpu, &stream, &sum_there, 0, 4 * all.len()));
        let mut sum = vec![0.0; all.len()];
        accumulate(&mut sum, &x, x_type);
        for (i, expected) in sum.iter().enumerate() {
            assert_eq!(
                found.f32_at(4 * i).to_bits(),
                expected.to_bits(),
                "{x_type:?} {i:#06x} is {:#06x}",
                x.u16_at(2 * i)
            );
        }
    }
}
