//! Tests of summing and storing gradients.

use super::*;
use crate::compute::grads::WriteMode;
use training_run::model::{Dtype, InitialValue, ParamLayout, ParamRole, UnitLayout};

fn layout() -> UnitLayout {
    let param = |name: &str, shape: Vec<usize>, offset_elems| ParamLayout {
        member: ParamRole::Query,
        start: InitialValue::Normal { scale: 1.0 },
        name: name.into(),
        shape,
        offset_elems,
        decay: true,
    };
    UnitLayout {
        name: "u".into(),
        params: vec![param("a", vec![2, 3], 0), param("b", vec![4], 64)],
        elems: 128,
    }
}

fn tensor(values: &[f32], shape: &[i64], kind: Kind) -> tch::Tensor {
    tch::Tensor::from_slice(values).to_kind(kind).view(shape)
}

fn bf16s(bytes: &[u8]) -> Vec<f32> {
    bytes
        .chunks_exact(2)
        .map(|b| half::bf16::from_ne_bytes([b[0], b[1]]).to_f32())
        .collect()
}

#[test]
fn several_micro_batches_are_summed_in_fp32_and_rounded_once() {
    let mut sink = GradSink::new(&layout(), Dtype::Bf16);
    // In bf16, 256 + 1 is 256; the sum 260 can be stored.
    for value in [256.0, 1.0, 1.0, 1.0, 1.0] {
        sink.add(0, tensor(&[value; 6], &[2, 3], Kind::BFloat16))
            .unwrap();
    }
    // Order matters: 2^24 + 1 + 1 is 2^24 in fp32, 1 + 1 + 2^24 is not. The sum stays in fp32 until the end,
    // so it is rounded only once.
    for value in [16777216.0, 1.0, 1.0] {
        sink.add(1, tensor(&[value; 4], &[4], Kind::BFloat16))
            .unwrap();
    }
    let stored = bf16s(&finished(&mut sink));
    assert_eq!(stored[..6], [260.0; 6]);
    assert_eq!(stored[64..68], [16777216.0; 4]);

    let mut exact = GradSink::new(&layout(), Dtype::Fp32);
    for value in [1.0, 1.0, 16777216.0] {
        exact
            .add(0, tensor(&[value; 6], &[2, 3], Kind::Float))
            .unwrap();
        exact
            .add(1, tensor(&[value; 4], &[4], Kind::Float))
            .unwrap();
    }
    assert_eq!(finished(&mut exact)[..4], 16777218f32.to_ne_bytes());
}

#[test]
fn sums_kept_between_groups_are_those_of_all_gradients_at_once() {
    let grads = |number: u64| {
        let value = |elem: u64| {
            let bits = training_run::model::init::splitmix64((number << 32) + elem);
            ((bits >> 40) as f32 - 8e6) * 1e-3
        };
        let of = |elems: std::ops::Range<u64>| elems.map(value).collect::<Vec<f32>>();
        [
            tensor(&of(0..6), &[2, 3], Kind::BFloat16),
            tensor(&of(6..10), &[4], Kind::BFloat16),
        ]
    };
    let memory = GradSums::on(tch::Device::Cpu, &layout(), Kind::BFloat16).unwrap();
    // `keeps` has the number of gradients that come before the sums are moved.
    let summed = |keeps: &[u64]| {
        let mut sink = GradSink::new(&layout(), Dtype::Bf16);
        let mut used = Vec::new();
        for number in 0..5 {
            if keeps.contains(&number) {
                sink.keep_in(&memory).unwrap();
                // Another unit uses the memory of earlier gradients.
                let earlier: Vec<tch::Tensor> = std::mem::take(&mut used);
                for mut grad in earlier {
                    let _ = grad.fill_(f64::NAN);
                }
            }
            for (param, grad) in grads(number).into_iter().enumerate() {
                used.push(grad.shallow_clone());
                sink.add(param, grad).unwrap();
            }
        }
        bf16s(&finished(&mut sink))
    };
    let expected = summed(&[]);
    assert!(expected.iter().all(|value| value.is_finite()));
    for keeps in [&[1][..], &[2], &[1, 2, 3, 4], &[2, 4]] {
        assert_eq!(summed(keeps), expected, "{keeps:?}");
    }
}

#[test]
fn further_products_are_added_to_the_sums_without_being_rounded() {
    // Two matrices whose rows are joined, and one after a gap.
    let mut layout = layout();
    let joined = |name: &str, rows, offset_elems| ParamLayout {
        name: name.into(),
        shape: vec![rows, 3],
        offset_elems,
        ..layout.params[0].clone()
    };
    layout.params = vec![joined("a", 2, 0), joined("b", 1, 6), joined("c", 2, 64)];
    let memory = GradSums::on(tch::Device::Cpu, &layout, Kind::BFloat16).unwrap();
    let summed = |keeps: &[i32]| {
        let mut sink = GradSink::new(&layout, Dtype::Bf16);
        for number in 0..4 {
            if keeps.contains(&number) {
                sink.keep_in(&memory).unwrap();
            }
            for (params, rows) in [(0..2, 3), (2..3, 2)] {
                let write = |out: &tch::Tensor, mode| {
                    assert_eq!(out.size(), [rows, 3]);
                    // A sum of these needs more bits than bf16 has, and so does the second.
                    let value = if number == 0 {
                        256.0
                    } else {
                        0.25 + 2f64.powi(-9)
                    };
                    match mode {
                        WriteMode::Replace => assert_eq!((number, out.kind()), (0, Kind::BFloat16)),
                        WriteMode::Add => assert_eq!((number > 0, out.kind()), (true, Kind::Float)),
                    }
                    let before = if mode == WriteMode::Add {
                        out.shallow_clone()
                    } else {
                        out.zeros_like()
                    };
                    out.shallow_clone().copy_(&(before + value));
                    Ok(())
                };
                sink.add_product(params, write).unwrap();
            }
        }
        let sums: Vec<f32> = (0..3)
            .flat_map(|param| {
                let sum = sink.take_grad(param).unwrap().unwrap();
                Vec::<f32>::try_from(&sum.view([-1])).unwrap()
            })
            .collect();
        sums
    };
    let expected = 256.0 + 3.0 * (0.25 + 2f32.powi(-9));
    for keeps in [&[][..], &[1], &[2, 3]] {
        assert_eq!(summed(keeps), [expected; 15], "{keeps:?}");
    }
}

#[test]
fn the_sums_of_two_uses_are_added() {
    let one = |value: f32, params: std::ops::Range<usize>| {
        let mut sink = GradSink::new(&layout(), Dtype::Fp32);
        for param in params {
            let shape = layout().params[param].shape.clone();
            let elems = shape.iter().product();
            let shape: Vec<i64> = shape.into_iter().map(|size| size as i64).collect();
            let grad = tensor(&vec![value; elems], &shape, Kind::Float);
            sink.add(param, grad).unwrap();
        }
        sink
    };
    let mut both = one(1.0, 0..2);
    both.add_sums(one(2.0, 0..1)).unwrap();
    let bytes = finished(&mut both);
    assert_eq!(bytes[..4], 3f32.to_ne_bytes());
    assert_eq!(bytes[256..260], 1f32.to_ne_bytes());
}

#[test]
fn one_micro_batch_is_stored_unchanged_with_zero_padding_and_empties_the_sink() {
    let mut sink = GradSink::new(&layout(), Dtype::Fp32);
    for round in 1..=2 {
        let a: Vec<f32> = (0..6).map(|i| (i * round) as f32 + 0.1).collect();
        sink.add(0, tensor(&a, &[2, 3], Kind::Float)).unwrap();
        // A gradient may be transposed, or one element expanded.
        sink.add(1, tensor(&[0.3], &[1], Kind::Float).expand([4], false))
            .unwrap();
        let stored: Vec<f32> = finished(&mut sink)
            .chunks_exact(4)
            .map(|b| f32::from_ne_bytes(b.try_into().unwrap()))
            .collect();
        assert_eq!(stored[..6], a[..]);
        assert_eq!(stored[64..68], [0.3; 4]);
        assert!(
            stored[6..64]
                .iter()
                .chain(&stored[68..])
                .all(|&x| x.to_bits() == 0),
            "padding is zero"
        );
    }
}

#[test]
#[should_panic(expected = "b got no gradient")]
fn a_parameter_without_gradient_panics() {
    let mut sink = GradSink::new(&layout(), Dtype::Fp32);
    sink.add(0, tensor(&[0.0; 6], &[2, 3], Kind::Float))
        .unwrap();
    finished(&mut sink);
}

#[test]
fn a_buffer_of_another_length_or_alignment_is_refused() {
    let mut sink = GradSink::new(&layout(), Dtype::Bf16);
    assert_eq!(sink.size_bytes(), 256);
    let mut bytes = aligned(264);
    assert!(matches!(
        sink.finish(&mut bytes[..255]),
        Err(ComputeError::BufferLength {
            expected: 256,
            found: 255,
            ..
        })
    ));
    assert!(matches!(
        sink.finish(&mut bytes[1..257]),
        Err(ComputeError::Torch(_))
    ));
}
