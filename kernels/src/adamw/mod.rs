//! AdamW on the CPU, over tiles: unscaling, clipping, update and cast in one pass over the bytes.
//!
//! Bytes per parameter and step, which limit the speed:
//!
//! | master | read | written |
//! |---|---|---|
//! | `SplitBf16` | 2 parameter + 10 state + 2 gradient | 2 + 10 |
//! | `Fp32` | 4 + 8 + 4 | 4 + 8 |
//! | `Fp16WholeMaster` | 12 + 2 | 2 + 12 |
//!
//! Stores go through the cache. The update is in place, so the lines are in the cache when they are written, and
//! non-temporal stores save no read: with AVX2 on four Zen 3 cores they ran at a fifth to a half of the speed.
//!
//! A step runs on the calling thread: tiles are many and small, so a caller that wants more cores steps several tiles
//! at a time.
//!
//! The bits of a result depend on the arguments alone, not on the instruction set or the cut of a tile into ranges;
//! `scalar.rs` defines them. The floating-point environment must be the default one (no flushing of denormals).

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod layout;
#[cfg(target_arch = "x86_64")]
mod planes;
mod scalar;

use std::ops::Range;

use layout::{Elements, Weights};
use scalar::Scalars;

use crate::cast::view;
use crate::number;

pub use crate::InstructionSet;
pub use layout::{Master, Tile, init_tile, read_masters, state_planes, state_tile_bytes};
pub(crate) use layout::{PLANE_ALIGN_BYTES, moment_offsets_bytes};

/// The scalars of one step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Hyper {
    /// Learning rate.
    pub lr: f32,
    /// Decay of the momentum, 0 to 1.
    pub beta1: f32,
    /// Decay of the variance, 0 to 1.
    pub beta2: f32,
    /// Added to the root of the variance.
    pub eps: f32,
    /// Decoupled weight decay: a step subtracts `lr * weight_decay` of the weight.
    pub weight_decay: f32,
    /// Number of the step, from 1, for bias correction.
    pub step: u64,
    /// Factor of each gradient: the inverse of the loss scale, times the clip factor.
    pub grad_scale: f32,
}

/// Takes one AdamW step over a tile of `elems` elements: updates `param` and `state` in place.
///
/// The slices may be longer than the tile needs; the rest is not touched. Panics if one is shorter or does not start at
/// a multiple of 64 bytes, or if `hyper.step` is 0.
pub fn step_tile(
    master: Master,
    hyper: &Hyper,
    param: &mut [u8],
    state: &mut [u8],
    grad: &[u8],
    elems: usize,
) {
    step_range(master, hyper, param, state, grad, elems, 0..elems);
}

/// Like [`step_tile`] for the elements of `range` alone: for tensors of one tile that differ in weight decay or
/// learning rate.
///
/// `tile_elems` is the count of the whole tile, which determines the planes' offsets. Panics if `range` reaches beyond
/// it.
pub fn step_range(
    master: Master,
    hyper: &Hyper,
    param: &mut [u8],
    state: &mut [u8],
    grad: &[u8],
    tile_elems: usize,
    range: Range<usize>,
) {
    let tile = Tile {
        master,
        param,
        state,
        grad,
        elems: tile_elems,
    };
    step_range_with(InstructionSet::best(), hyper, tile, range);
}

/// Like [`step_range`] with fp32 gradients whatever the master, for sums that were never rounded: `grad` has four bytes an
/// element.
pub fn step_range_fp32_grad(
    master: Master,
    hyper: &Hyper,
    param: &mut [u8],
    state: &mut [u8],
    grad: &[u8],
    tile_elems: usize,
    range: Range<usize>,
) {
    if master == Master::Fp32 {
        return step_range(master, hyper, param, state, grad, tile_elems, range);
    }
    let (set, scalars) = (InstructionSet::best(), Scalars::new(hyper));
    let grads: &[f32] = view(&grad[..tile_elems * 4]);
    // Masters are joined, updated as fp32 parameters and split again, a few pages at a time. The bits are those of an update
    // of this master's own.
    let mut masters = [0.0; FP32_GRAD_ELEMS];
    let mut start = range.start;
    while start < range.end {
        let part = start..range.end.min(start + FP32_GRAD_ELEMS);
        start = part.end;
        let masters = &mut masters[..part.len()];
        let tile = Tile {
            master,
            param: &mut *param,
            state: &mut *state,
            grad,
            elems: tile_elems,
        };
        let Elements {
            weights,
            momentum,
            variance,
        } = Elements::of(tile, part.clone());
        let fp32 = |masters| Elements {
            weights: Weights::Fp32 {
                param: masters,
                grad: &grads[part],
            },
            momentum,
            variance,
        };
        match weights {
            Weights::SplitBf16 {
                param, residual, ..
            } => {
                for (at, master) in masters.iter_mut().enumerate() {
                    *master = number::join(param[at], residual[at]);
                }
                step_chunk(set, &scalars, fp32(&mut *masters));
                for (at, master) in masters.iter().enumerate() {
                    (param[at], residual[at]) = number::split(*master);
                }
            }
            Weights::Fp16WholeMaster { param, whole, .. } => {
                step_chunk(set, &scalars, fp32(&mut *whole));
                for (param, master) in param.iter_mut().zip(whole) {
                    *param = number::to_fp16(*master);
                }
            }
            Weights::Fp32 { .. } => unreachable!("has its own gradients' type"),
        }
    }
}

/// Elements that [`step_range_fp32_grad`] joins at a time: 8 KiB, which stay in the first-level cache.
const FP32_GRAD_ELEMS: usize = 2048;

/// Like [`step_range`] with given instructions, for tests and measurements.
///
/// Panics if this machine does not support them.
pub fn step_range_with(set: InstructionSet, hyper: &Hyper, tile: Tile<'_>, range: Range<usize>) {
    assert!(set.available(), "this processor has no {set:?}");
    let scalars = Scalars::new(hyper);
    step_chunk(set, &scalars, Elements::of(tile, range));
}

/// The scalars in the order of the GPU kernel's arguments (`gpu/source/adamw.cu`).
pub(crate) fn kernel_scalars(hyper: &Hyper) -> [f32; 9] {
    let s = Scalars::new(hyper);
    [
        s.grad_scale,
        s.beta1,
        s.one_minus_beta1,
        s.beta2,
        s.one_minus_beta2,
        s.root_correction,
        s.eps,
        s.minus_decay,
        s.minus_step_size,
    ]
}

fn step_chunk(set: InstructionSet, scalars: &Scalars, elements: Elements<'_>) {
    match set {
        #[cfg(target_arch = "x86_64")]
        InstructionSet::Avx2 => avx2::step(scalars, elements),
        #[cfg(target_arch = "x86_64")]
        InstructionSet::Avx512 => avx512::step(scalars, elements),
        _ => scalar::step(scalars, elements),
    }
}
