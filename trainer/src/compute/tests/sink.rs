//! Tests of summing and storing gradients.

use super::*;
use crate::model::{Dtype, ParamLayout, ParamRole, Start, UnitLayout};

fn layout() -> UnitLayout {
    let param = |name: &str, shape: Vec<usize>, offset_elems| ParamLayout {
        member: ParamRole::Query,
        start: Start::Normal { scale: 1.0 },
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
