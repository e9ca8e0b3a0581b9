//! Tests fused kernels through their functions: arguments, strides, grids and the choice of a kernel, against the plain formula in fp64.
//!
//! This finds arguments in the wrong place or size, strides of the wrong dimension, blocks that do not cover a shape, and wide accesses to unaligned
//! elements. `kernels/tests/emulated` tests the kernels' arithmetic, and trainer's `model_gpu` whole models.

use std::sync::OnceLock;

use kernels_torch::fused::{FusedKernels, Turn};
use tch::{Device, Kind, Tensor};

use crate::opened;

const KINDS: [Kind; 2] = [Kind::BFloat16, Kind::Float];

/// Returns the kernels, compiled once, and the device of their tensors.
fn fused() -> Option<&'static (FusedKernels, Device)> {
    static COMPILED: OnceLock<Option<(FusedKernels, Device)>> = OnceLock::new();
    let compiled = COMPILED.get_or_init(|| {
        let (gpu, device) = opened("fused kernels")?;
        Some((FusedKernels::compile(&gpu, device).unwrap(), device))
    });
    compiled.as_ref()
}

/// Returns numbers from -scale to scale, always the same for a shape, starting `shift` elements into their memory.
fn numbers(shape: &[i64], scale: f64, shift: i64, kind: Kind, device: Device) -> Tensor {
    let elems: i64 = shape.iter().product();
    let all = Tensor::arange(elems + shift, (Kind::Double, Device::Cpu));
    let all = ((all * 0.7153 + scale).sin() * scale)
        .to_kind(kind)
        .to_device(device);
    all.narrow(0, shift, elems).view(shape)
}

fn f64s(x: &Tensor) -> Tensor {
    x.to_device(Device::Cpu).to_kind(Kind::Double)
}

fn assert_near(what: &str, found: &Tensor, expected: &Tensor, kind: Kind) {
    let tolerance = if kind == Kind::Float { 2e-6 } else { 2e-2 };
    let expected = f64s(expected);
    let scale = expected.abs().max().double_value(&[]) + 1e-9;
    let apart = (f64s(found).view_as(&expected) - &expected).abs().max();
    let apart = apart.double_value(&[]) / scale;
    assert!(
        apart < tolerance,
        "{what}, {kind:?}: {apart:.1e} of the largest apart"
    );
}

#[test]
fn norms_of_any_shape_and_place_are_the_formula() {
    let Some(&(ref fused, device)) = fused() else {
        return;
    };
    for kind in KINDS {
        // Wide accesses; a size that is not a multiple; an unaligned place; more rows than parts; more columns than a block keeps.
        for (rows, columns, shift) in [
            (5, 64, 0),
            (3, 37, 0),
            (4, 64, 1),
            (1100, 8, 0),
            (2, 8200, 0),
        ] {
            let shape = [rows, columns];
            let x = numbers(&shape, 1.5, shift, kind, device);
            let added = numbers(&shape, 0.5, shift, kind, device);
            let weight = numbers(&[columns], 1.1, 0, kind, device);
            let grad = numbers(&shape, 0.9, shift, kind, device);
            let beside = numbers(&shape, 2.1, 0, kind, device);
            for (added, beside) in [(None, None), (Some(&added), Some(&beside))] {
                let normed = fused.rms_norm(&x, added, &weight, 1e-5).unwrap();
                let sum = match added {
                    Some(added) => f64s(&x) + f64s(added),
                    None => f64s(&x),
                };
                assert_eq!(normed.sum.is_some(), added.is_some());
                if let Some(found) = &normed.sum {
                    assert_near("sum", found, &sum, kind);
                }
                let scale =
                    ((&sum * &sum).mean_dim(&[-1i64][..], true, Kind::Double) + 1e-5).rsqrt();
                assert_near("scale", &normed.scale, &scale, Kind::BFloat16);
                assert_near(
                    "norm",
                    &normed.output,
                    &(&sum * &scale * f64s(&weight)),
                    kind,
                );

                let input = normed.sum.as_ref().unwrap_or(&x);
                let (grad_x, grad_weight) = fused
                    .rms_norm_backward(&grad, input, &weight, &normed.scale, beside)
                    .unwrap();
                let q = f64s(&grad) * f64s(&weight);
                let along = (&q * &sum).sum_dim_intlist(&[-1i64][..], true, Kind::Double);
                let along = along * scale.pow_tensor_scalar(3) / columns as f64;
                let mut expected = &q * &scale - &sum * along;
                if let Some(beside) = beside {
                    expected += f64s(beside);
                }
                assert_near("norm's input gradient", &grad_x, &expected, kind);
                let expected =
                    (f64s(&grad) * &sum * &scale).sum_dim_intlist(&[0i64][..], false, Kind::Double);
                assert_near("norm's weight gradient", &grad_weight, &expected, kind);
            }
        }
    }
}

#[test]
fn rotary_turns_heads_wherever_they_lie() {
    let Some(&(ref fused, device)) = fused() else {
        return;
    };
    let (sequences, tokens, heads) = (2, 5, 3);
    for kind in KINDS {
        for head_dim in [16, 6] {
            // Some heads of longer rows, and heads before tokens, in the layout of attention's gradients.
            let rows = numbers(&[sequences, tokens, 7, head_dim], 1.3, 0, kind, device);
            let from = rows.narrow(2, 2, heads);
            let shape = [sequences, heads, tokens, head_dim];
            let by_head = numbers(&shape, 0.1, 0, kind, device);
            let to = by_head.transpose(1, 2);
            // More positions than tokens.
            let angles = numbers(&[9, head_dim / 2], 3.0, 0, Kind::Float, device);
            let angles = Tensor::cat(&[&angles, &angles], -1);
            let (cos, sin) = (angles.cos().to_kind(kind), angles.sin().to_kind(kind));
            for turn in [Turn::Forward, Turn::Backward, Turn::Not] {
                fused.rotary(&from, &to, &cos, &sin, turn).unwrap();
                let x = f64s(&from);
                let table = |t: &Tensor| f64s(&t.narrow(0, 0, tokens)).unsqueeze(1);
                let halves = x.chunk(2, -1);
                let crossed = Tensor::cat(&[-&halves[1], halves[0].shallow_clone()], -1);
                let expected = match turn {
                    Turn::Forward => &x * table(&cos) + crossed * table(&sin),
                    Turn::Backward => &x * table(&cos) - crossed * table(&sin),
                    Turn::Not => x.copy(),
                };
                assert_near(&format!("{turn:?}"), &to.contiguous(), &expected, kind);
            }
            // In place, with nothing written around it.
            let before = f64s(&rows);
            fused
                .rotary(&from, &from, &cos, &sin, Turn::Forward)
                .unwrap();
            fused
                .rotary(&from, &to, &cos, &sin, Turn::Backward)
                .unwrap();
            let kept = before.narrow(2, 2, heads).contiguous();
            assert_near("there and back", &to.contiguous(), &kept, kind);
            for (start, count) in [(0, 2), (5, 2)] {
                assert!(f64s(&rows).narrow(2, start, count) == before.narrow(2, start, count));
            }
        }
    }
}

#[test]
fn the_gated_activation_and_its_gradient_are_the_formula() {
    let Some(&(ref fused, device)) = fused() else {
        return;
    };
    for kind in KINDS {
        for (rows, columns, shift) in [(33, 48, 0), (7, 37, 0), (3, 48, 1)] {
            let mut gate_up = numbers(&[rows, 2 * columns], 3.0, shift, kind, device);
            let mut grad = numbers(&[rows, columns], 1.2, shift, kind, device);
            let halves = f64s(&gate_up).chunk(2, -1);
            let (gate, up) = (&halves[0], &halves[1]);
            let (sigmoid, upstream) = (gate.sigmoid(), f64s(&grad));
            let product = gate * &sigmoid * up;
            assert_near("gated", &fused.gated(&gate_up).unwrap(), &product, kind);
            fused.gated_backward(&mut grad, &mut gate_up).unwrap();
            let slope = &sigmoid * ((1.0 - &sigmoid) * gate + 1.0);
            let expected = Tensor::cat(&[&upstream * up * slope, upstream * gate * &sigmoid], -1);
            assert_near("gated, again", &grad, &product, kind);
            assert_near("gate's and up's gradient", &gate_up, &expected, kind);
        }
    }
}

#[test]
fn the_loss_of_rows_and_its_gradient_are_the_formula() {
    let Some(&(ref fused, device)) = fused() else {
        return;
    };
    for kind in KINDS {
        for (rows, words) in [(9, 1000), (5, 11)] {
            let mut logits = numbers(&[rows, words], 4.0, 0, kind, device);
            let ids: Vec<i64> = (0..rows)
                .map(|row| if row == 2 { -100 } else { row * 7 % words })
                .collect();
            let targets = Tensor::from_slice(&ids);
            let targets_there = targets.to_device(device);
            let mut losses = Tensor::zeros([rows], (Kind::Float, device));
            let logs = f64s(&logits).log_softmax(-1, Kind::Double);
            let counted = targets.ge(0).to_kind(Kind::Double);
            let index = targets.clamp_min(0).unsqueeze(1);
            let expected = -logs.gather(1, &index, false).squeeze_dim(1) * &counted;
            let before = f64s(&logits);
            fused
                .cross_entropy(&mut logits, &targets_there, &mut losses, None)
                .unwrap();
            assert_near("loss", &losses, &expected, Kind::Float);
            assert!(f64s(&logits) == before, "without a weight logits stay");
            fused
                .cross_entropy(&mut logits, &targets_there, &mut losses, Some(0.25))
                .unwrap();
            assert_near("loss", &losses, &expected, Kind::Float);
            let hit = Tensor::zeros_like(&logs).scatter_value(1, &index, 1.0);
            let expected = (logs.exp() - hit) * counted.unsqueeze(1) * 0.25;
            assert_near("logits' gradient", &logits, &expected, kind);
        }
    }
}
