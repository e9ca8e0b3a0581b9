//! Defines one step of AdamW, of Lion and of SGD, operation by operation. The vector files compute these operations in this order.
//!
//! AdamW: Kingma & Ba, "Adam", ICLR 2015, algorithm 1, with the decoupled weight decay of Loshchilov & Hutter, "Decoupled Weight Decay
//! Regularization", ICLR 2019, algorithm 2 (the decay scaled by the learning rate, as every framework has it). For step t:
//!
//! ```text
//!   g = grad * grad_scale
//!   m = beta1 m + (1 - beta1) g
//!   v = beta2 v + (1 - beta2) g g
//!   p = p - lr weight_decay p - lr/(1 - beta1^t) * m / (sqrt(v / (1 - beta2^t)) + eps)
//! ```
//!
//! Lion: Chen et al., "Symbolic Discovery of Optimization Algorithms", NeurIPS 2023, algorithm 2:
//!
//! ```text
//!   g = grad * grad_scale
//!   p = p - lr weight_decay p - lr sign(beta1 m + (1 - beta1) g)
//!   m = beta2 m + (1 - beta2) g
//! ```
//!
//! SGD without momentum, as `torch.optim.SGD` has it. With a weight decay of 1 it is a mean of the weight and `-g`:
//!
//! ```text
//!   g = grad * grad_scale + weight_decay p
//!   p = p - lr g
//! ```
//!
//! All in fp32; each line of [`adamw`], [`lion`] and [`sgd`] is one rounding, with division and square root as in IEEE 754. Values that
//! depend on the step alone are computed in f64 and rounded once ([`Scalars::new`]). A NaN result is stored as the
//! canonical NaN. Moments in bf16 or 8 bits are widened before and rounded after
//! these operations (`rounding.rs`, `eight_bit.rs`).

use std::iter;

use super::Hyper;
use super::layout::{Elements, MomentPlanes, UpdateRule, Weights};
use super::rounding::RandomBits;
use crate::number;

/// Scalars derived from a step's hyperparameters.
#[derive(Clone, Copy, Debug)]
pub(super) struct Scalars {
    pub(super) grad_scale: f32,
    pub(super) beta1: f32,
    pub(super) one_minus_beta1: f32,
    pub(super) beta2: f32,
    pub(super) one_minus_beta2: f32,
    /// 1 / sqrt(1 - beta2^t)
    pub(super) root_correction: f32,
    pub(super) eps: f32,
    /// -lr weight_decay; weight_decay itself for SGD
    pub(super) minus_decay: f32,
    /// -lr / (1 - beta1^t) for AdamW, -lr for Lion and SGD
    pub(super) minus_step_size: f32,
    pub(super) random: RandomBits,
}

impl Scalars {
    pub(super) fn new(rule: UpdateRule, hyper: &Hyper) -> Self {
        assert!(
            hyper.step >= 1,
            "steps are counted from 1: bias correction of step 0 divides by zero"
        );
        let (lr, beta1, beta2) = (
            f64::from(hyper.lr),
            f64::from(hyper.beta1),
            f64::from(hyper.beta2),
        );
        let correction1 = match rule {
            UpdateRule::AdamW => 1.0 - power(beta1, hyper.step),
            UpdateRule::Lion | UpdateRule::Sgd | UpdateRule::Muon => 1.0,
        };
        let correction2 = 1.0 - power(beta2, hyper.step);
        Self {
            grad_scale: hyper.grad_scale,
            beta1: hyper.beta1,
            one_minus_beta1: (1.0 - beta1) as f32,
            beta2: hyper.beta2,
            one_minus_beta2: (1.0 - beta2) as f32,
            root_correction: (1.0 / correction2.sqrt()) as f32,
            eps: hyper.eps,
            minus_decay: match rule {
                UpdateRule::AdamW | UpdateRule::Lion => {
                    (-lr * f64::from(hyper.weight_decay)) as f32
                }
                UpdateRule::Sgd | UpdateRule::Muon => hyper.weight_decay,
            },
            minus_step_size: (-lr / correction1) as f32,
            random: hyper.rounding.of_step(hyper.step),
        }
    }
}

/// Computes `base^exponent` by squaring: the library's powers differ in their bits between platforms.
fn power(base: f64, exponent: u64) -> f64 {
    let (mut result, mut square, mut left) = (1.0, base, exponent);
    while left > 0 {
        if left & 1 == 1 {
            result *= square;
        }
        square *= square;
        left >>= 1;
    }
    result
}

/// Returns the new master of one element and replaces its moments.
#[inline(always)]
fn adamw(s: &Scalars, master: f32, (m, v): (&mut f32, &mut f32), grad: f32) -> f32 {
    let grad = grad * s.grad_scale;
    let momentum = s.beta1.mul_add(*m, s.one_minus_beta1 * grad);
    let variance = (s.one_minus_beta2 * grad).mul_add(grad, s.beta2 * *v);
    let denominator = variance.sqrt().mul_add(s.root_correction, s.eps);
    let decayed = s.minus_decay.mul_add(master, master);
    let master = s.minus_step_size.mul_add(momentum / denominator, decayed);
    (*m, *v) = (number::canonical(momentum), number::canonical(variance));
    number::canonical(master)
}

/// Returns the new master of one element and replaces its momentum.
#[inline(always)]
fn lion(s: &Scalars, master: f32, m: &mut f32, grad: f32) -> f32 {
    let grad = grad * s.grad_scale;
    let direction = sign(s.beta1.mul_add(*m, s.one_minus_beta1 * grad));
    let momentum = s.beta2.mul_add(*m, s.one_minus_beta2 * grad);
    let decayed = s.minus_decay.mul_add(master, master);
    let master = s.minus_step_size.mul_add(direction, decayed);
    *m = number::canonical(momentum);
    number::canonical(master)
}

/// Returns the new master of one element.
#[inline(always)]
fn sgd(s: &Scalars, master: f32, grad: f32) -> f32 {
    let grad = grad * s.grad_scale;
    let grad = s.minus_decay.mul_add(master, grad);
    number::canonical(s.minus_step_size.mul_add(grad, master))
}

/// Returns 1 or -1; a zero and a NaN stay as they are, as with PyTorch's `sign`.
#[inline(always)]
fn sign(x: f32) -> f32 {
    if x > 0.0 {
        1.0
    } else if x < 0.0 {
        -1.0
    } else {
        x
    }
}

// Inlined into the vector files for their last elements: there `mul_add` is an instruction, here it may be a call.

#[inline(always)]
pub(super) fn step(s: &Scalars, elements: Elements<'_>) {
    let weights = elements.weights;
    match elements.moments {
        MomentPlanes::AdamW { momentum, variance } => {
            let moments = momentum.iter_mut().zip(variance);
            each(weights, moments, |master, m, grad| {
                adamw(s, master, m, grad)
            });
        }
        MomentPlanes::Lion { momentum } => {
            let moments = momentum.iter_mut();
            each(weights, moments, |master, m, grad| lion(s, master, m, grad));
        }
        MomentPlanes::Sgd => {
            each(weights, iter::repeat(()), |master, (), grad| {
                sgd(s, master, grad)
            });
        }
    }
}

/// Replaces the master of each element with what `update` returns for it, its moments and its gradient.
#[inline(always)]
fn each<M>(
    weights: Weights<'_>,
    moments: impl Iterator<Item = M>,
    update: impl Fn(f32, M, f32) -> f32,
) {
    match weights {
        Weights::SplitBf16 {
            param,
            residual,
            grad,
        } => {
            let weights = param.iter_mut().zip(residual).zip(grad);
            for (((param, residual), grad), m) in weights.zip(moments) {
                let master = number::join(*param, *residual);
                let master = update(master, m, number::from_bf16(*grad));
                (*param, *residual) = number::split(master);
            }
        }
        Weights::Fp32 { param, grad } => {
            for ((param, grad), m) in param.iter_mut().zip(grad).zip(moments) {
                *param = update(*param, m, *grad);
            }
        }
        Weights::Fp16WholeMaster { param, whole, grad } => {
            let weights = param.iter_mut().zip(whole).zip(grad);
            for (((param, whole), grad), m) in weights.zip(moments) {
                *whole = update(*whole, m, number::from_fp16(*grad));
                *param = number::to_fp16(*whole);
            }
        }
    }
}
