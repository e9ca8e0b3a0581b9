//! Tests that the definition is AdamW as published, and that each way to store a master has its documented precision.
//!
//! Likely faults are a wrong formula (coupled decay, a missing correction, eps inside the root), scalars rounded too early, a parameter that is not
//! the rounded master, or a NaN that becomes a number. The steps are compared with the formula in fp64, implemented here a second time.

use crate::common::{AlignedBytes, MASTERS, OwnedTile, Random, step};
use kernels::adamw::{Hyper, Master, Rounding, init_tile, read_masters};
use kernels::number;

const HYPER: Hyper = Hyper {
    lr: 1e-3,
    beta1: 0.9,
    beta2: 0.999,
    eps: 1e-8,
    weight_decay: 0.01,
    step: 1,
    grad_scale: 1.0,
    rounding: Rounding::ZERO,
};

/// A parameter stepped by the published formula.
#[derive(Clone, Copy)]
struct Exact {
    p: f64,
    m: f64,
    v: f64,
}

impl Exact {
    fn step(&mut self, h: &Hyper, grad: f64) {
        let [lr, b1, b2, eps, decay, scale] =
            [h.lr, h.beta1, h.beta2, h.eps, h.weight_decay, h.grad_scale].map(f64::from);
        let g = grad * scale;
        self.m = b1 * self.m + (1.0 - b1) * g;
        self.v = b2 * self.v + (1.0 - b2) * g * g;
        let m_hat = self.m / (1.0 - b1.powf(h.step as f64));
        let v_hat = self.v / (1.0 - b2.powf(h.step as f64));
        self.p = self.p - lr * decay * self.p - lr * m_hat / (v_hat.sqrt() + eps);
    }
}

fn store_grads(tile: &mut OwnedTile, grads: &[f32]) -> Vec<f64> {
    let (bytes, values): (Vec<Vec<u8>>, Vec<f32>) = grads
        .iter()
        .map(|g| match tile.format.master {
            Master::SplitBf16 | Master::Bf16 => {
                let bits = number::to_bf16(*g);
                (bits.to_le_bytes().to_vec(), number::from_bf16(bits))
            }
            Master::Fp16WholeMaster => {
                let bits = number::to_fp16(*g);
                (bits.to_le_bytes().to_vec(), number::from_fp16(bits))
            }
            Master::Fp32 => (g.to_le_bytes().to_vec(), *g),
        })
        .unzip();
    tile.grad = AlignedBytes::from_bytes(&bytes.concat());
    values.into_iter().map(f64::from).collect()
}

fn new_tile(master: Master, masters: &[f32]) -> OwnedTile {
    let mut tile = OwnedTile::zeroed(master, masters.len());
    init_tile(tile.format, masters, &mut tile.param, &mut tile.state);
    tile
}

fn masters_of(tile: &OwnedTile) -> Vec<f32> {
    let mut out = vec![0.0; tile.elems];
    read_masters(tile.format, &tile.param, &tile.state, &mut out);
    out
}

/// Returns the element's momentum and variance.
fn moments_of(tile: &OwnedTile, index: usize) -> (f32, f32) {
    let plane_bytes = (4 * tile.elems).next_multiple_of(64);
    let variance_at = tile.state.len() - plane_bytes;
    (
        tile.state.f32_at(variance_at - plane_bytes + 4 * index),
        tile.state.f32_at(variance_at + 4 * index),
    )
}

#[test]
fn a_hundred_steps_follow_the_published_formula() {
    const ELEMS: usize = 500;
    for master in MASTERS {
        let mut random = Random(11);
        let masters: Vec<f32> = (0..ELEMS).map(|_| random.normal()).collect();
        let mut tile = new_tile(master, &masters);
        let mut exact: Vec<Exact> = masters
            .iter()
            .map(|p| Exact {
                p: f64::from(*p),
                m: 0.0,
                v: 0.0,
            })
            .collect();
        for step_index in 1..=100 {
            let hyper = Hyper {
                lr: 1e-3 * (1.0 + step_index as f32 / 50.0),
                step: step_index,
                grad_scale: 0.25,
                ..HYPER
            };
            // Magnitudes from 1e-3 to 10, as layers differ.
            let grads: Vec<f32> = (0..ELEMS)
                .map(|i| random.normal() * 10f32.powi(i as i32 % 5 - 3))
                .collect();
            let grads = store_grads(&mut tile, &grads);
            step(&mut tile, &hyper);
            for (exact, grad) in exact.iter_mut().zip(grads) {
                exact.step(&hyper, grad);
            }
        }
        for (index, (p, exact)) in masters_of(&tile).into_iter().zip(&exact).enumerate() {
            let (m, v) = moments_of(&tile, index);
            let moved = (exact.p - f64::from(masters[index])).abs();
            // A hundred roundings of p, and the errors of each step's few operations.
            let allowed = 100.0 * f64::from(f32::EPSILON) * exact.p.abs().max(0.1) + 1e-5 * moved;
            let error = (f64::from(p) - exact.p).abs();
            assert!(
                error <= allowed,
                "{master:?} [{index}]: {p} for {}, off by {error:e}",
                exact.p
            );
            assert!(
                (f64::from(m) - exact.m).abs() <= 1e-5 * exact.v.sqrt(),
                "{master:?} [{index}]"
            );
            assert!(
                (f64::from(v) - exact.v).abs() <= 1e-5 * exact.v,
                "{master:?} [{index}]"
            );
        }
    }
}

#[test]
fn one_step_from_any_moments_is_right_to_a_few_roundings() {
    const ELEMS: usize = 4000;
    let mut random = Random(12);
    for step_index in [1, 2, 10, 1000, 1_000_000] {
        let mut tile = new_tile(Master::Fp32, &[0.0; ELEMS]);
        let mut exact = Vec::new();
        let plane_bytes = 4 * ELEMS;
        for i in 0..ELEMS {
            let (p, m) = (random.normal() * 0.02, random.normal() * 1e-3);
            let v = random.normal().powi(2) * 1e-6;
            tile.param[4 * i..4 * i + 4].copy_from_slice(&p.to_le_bytes());
            tile.state[4 * i..4 * i + 4].copy_from_slice(&m.to_le_bytes());
            tile.state[plane_bytes + 4 * i..plane_bytes + 4 * i + 4]
                .copy_from_slice(&v.to_le_bytes());
            exact.push(Exact {
                p: f64::from(p),
                m: f64::from(m),
                v: f64::from(v),
            });
        }
        let hyper = Hyper {
            step: step_index,
            ..HYPER
        };
        let grads: Vec<f32> = (0..ELEMS).map(|_| random.normal() * 1e-3).collect();
        let grads = store_grads(&mut tile, &grads);
        step(&mut tile, &hyper);
        for (index, exact) in exact.iter_mut().enumerate() {
            let before = exact.p;
            exact.step(&hyper, grads[index]);
            let p = f64::from(tile.param.f32_at(4 * index));
            let update = (exact.p - before).abs();
            // m may cancel: its error is relative to its terms, which the step size turns into a part of lr.
            let allowed = f64::from(f32::EPSILON) * (exact.p.abs() + 4.0 * update)
                + 1e-6 * f64::from(hyper.lr);
            let error = (p - exact.p).abs();
            assert!(
                error <= allowed,
                "step {step_index} [{index}]: {p} for {}: {error:e}",
                exact.p
            );
        }
    }
}

#[test]
fn the_first_step_is_as_long_as_the_learning_rate_whatever_the_gradient() {
    // Holds only with both bias corrections and with eps outside the root.
    let hyper = Hyper {
        weight_decay: 0.0,
        eps: 1e-12,
        ..HYPER
    };
    let mut tile = new_tile(Master::Fp32, &[0.0; 3]);
    store_grads(&mut tile, &[1e-3, -2.0, 3e4]);
    step(&mut tile, &hyper);
    for (p, sign) in masters_of(&tile).into_iter().zip([-1.0, 1.0, -1.0]) {
        assert!((p * sign - hyper.lr).abs() < 1e-6 * hyper.lr, "{p}");
    }
}

#[test]
fn weight_decay_is_decoupled_from_the_gradient() {
    let hyper = Hyper {
        lr: 0.5,
        weight_decay: 0.25,
        ..HYPER
    };
    for master in MASTERS {
        let mut tile = new_tile(master, &[8.0, -2.0]);
        step(&mut tile, &hyper);
        assert_eq!(masters_of(&tile), [7.0, -1.75], "{master:?}");
        assert_eq!(
            moments_of(&tile, 0),
            (0.0, 0.0),
            "{master:?}: decay went into the moments"
        );
    }
}

#[test]
fn the_multiplier_scales_the_gradient_and_nothing_else() {
    for master in MASTERS {
        let mut scaled = new_tile(master, &[1.0, -0.5]);
        let mut plain = scaled.clone();
        store_grads(&mut scaled, &[4.0, -12.0]);
        store_grads(&mut plain, &[1.0, -3.0]);
        step(
            &mut scaled,
            &Hyper {
                grad_scale: 0.25,
                ..HYPER
            },
        );
        step(&mut plain, &HYPER);
        assert_eq!(*scaled.param, *plain.param, "{master:?}");
        assert_eq!(*scaled.state, *plain.state, "{master:?}");
        step(&mut plain, &HYPER);
        assert_ne!(*scaled.state, *plain.state, "{master:?}");
    }
}

#[test]
fn the_parameter_is_the_rounded_master_after_a_step() {
    let mut random = Random(13);
    let masters: Vec<f32> = (0..1000).map(|_| random.normal()).collect();
    let grads: Vec<f32> = (0..1000).map(|_| random.normal()).collect();
    for master in MASTERS {
        let mut tile = new_tile(master, &masters);
        store_grads(&mut tile, &grads);
        step(&mut tile, &HYPER);
        let after = masters_of(&tile);
        assert!(
            after.iter().zip(&masters).all(|(a, b)| a != b),
            "{master:?}: not stepped"
        );
        for (index, p) in after.into_iter().enumerate() {
            match master {
                Master::SplitBf16 => assert_eq!(tile.param.u16_at(2 * index), number::split(p).0),
                Master::Fp16WholeMaster => {
                    assert_eq!(tile.param.u16_at(2 * index), number::to_fp16(p))
                }
                Master::Fp32 => assert_eq!(tile.param.f32_at(4 * index), p),
                Master::Bf16 => unreachable!("not in MASTERS"),
            }
        }
    }
}

#[test]
fn updates_too_small_for_the_parameter_are_kept_in_the_master() {
    // A bf16 has 8 bits: 1e-4 added to 1.0 is lost in it, a hundred times 1e-4 are not.
    let hyper = Hyper {
        lr: 1e-4,
        weight_decay: 0.0,
        ..HYPER
    };
    for master in MASTERS {
        let mut tile = new_tile(master, &[1.0]);
        store_grads(&mut tile, &[-1.0]);
        for step_index in 1..=100 {
            step(
                &mut tile,
                &Hyper {
                    step: step_index,
                    ..hyper
                },
            );
        }
        let p = masters_of(&tile)[0];
        assert!((p - 1.01).abs() < 1e-5, "{master:?}: {p}");
    }
}

#[test]
fn a_nan_gradient_makes_a_nan_and_no_number() {
    for master in MASTERS {
        for elems in [1, 16, 40] {
            let mut tile = new_tile(master, &vec![1.0; elems]);
            store_grads(&mut tile, &vec![f32::NAN; elems]);
            step(&mut tile, &HYPER);
            for p in masters_of(&tile) {
                assert_eq!(p.to_bits(), number::CANONICAL_NAN, "{master:?}");
            }
            let stored_nan = match master {
                Master::SplitBf16 => tile.param.u16_at(0) == 0x7FC0 && tile.state[..2] == [0, 0],
                Master::Fp16WholeMaster => tile.param.u16_at(0) == 0x7E00,
                Master::Fp32 => tile.param.f32_at(0).to_bits() == 0x7FC0_0000,
                Master::Bf16 => unreachable!("not in MASTERS"),
            };
            assert!(stored_nan, "{master:?}");
        }
    }
}
