//! AdamW and Lion on the CPU, over tiles: unscaling, clipping, update and cast in one pass over the bytes.
//!
//! Bytes per parameter and step of AdamW, which limit the speed:
//!
//! | master | read | written |
//! |---|---|---|
//! | `SplitBf16` | 2 parameter + 10 state + 2 gradient | 2 + 10 |
//! | `Bf16` | 2 + 8 + 2 | 2 + 8 |
//! | `Fp32` | 4 + 8 + 4 | 4 + 8 |
//! | `Fp16WholeMaster` | 12 + 2 | 2 + 12 |
//!
//! Moments in bf16 take 4 bytes less of each, those in 8 bits 6. Lion has one moment of the two.
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
mod eight_bit;
mod layout;
#[cfg(target_arch = "x86_64")]
mod planes;
mod rounding;
mod scalar;

use std::ops::Range;

use eight_bit::CodeSign;
use layout::{Elements, MomentPlanes, Planes, Weights, blocks_around};
use rounding::RandomBits;
use scalar::Scalars;

use crate::cast::{view, view_mut};
use crate::grad_type::GradType;
use crate::number;

pub use crate::InstructionSet;
pub use eight_bit::BLOCK_ELEMS;
pub(crate) use layout::PLANE_ALIGN_BYTES;
pub use layout::{
    Master, Moments, Tile, TileFormat, UpdateRule, init_tile, read_masters, read_moments,
    state_planes, state_tile_bytes, write_moments,
};
pub use rounding::Rounding;

/// The scalars of one step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Hyper {
    /// Learning rate.
    pub lr: f32,
    /// Decay of the momentum, 0 to 1; for Lion, the momentum's part in a step.
    pub beta1: f32,
    /// Decay of the variance, 0 to 1; for Lion, of the momentum.
    pub beta2: f32,
    /// Added to the root of the variance. Lion has none.
    pub eps: f32,
    /// Weight decay: a step subtracts `lr * weight_decay` of the weight.
    pub weight_decay: f32,
    /// Number of the step, from 1, for bias correction.
    pub step: u64,
    /// Factor of each gradient: the inverse of the loss scale, times the clip factor.
    pub grad_scale: f32,
    /// Identifies the tile's elements for the rounding of moments and masters in bf16.
    pub rounding: Rounding,
}

/// Takes one step over the elements of `range` of a tile: updates its parameters and state in place. Tensors of one tile that
/// differ in weight decay or learning rate have ranges of their own.
///
/// The gradients are of `grad_type`: the master's own, or fp32 for sums that were never rounded. The tile's slices may be longer
/// than it needs; the rest is not touched. Panics if one is shorter or does not start at a multiple of 64 bytes, if `range`
/// reaches beyond the tile, or if `hyper.step` is 0.
pub fn step_range(hyper: &Hyper, tile: Tile<'_>, grad_type: GradType, range: Range<usize>) {
    step_range_with(InstructionSet::best(), hyper, tile, grad_type, range);
}

/// Elements that [`step_range`] converts at a time: 4 KiB of each plane in fp32, which stay in the first-level cache.
const CONVERTED_ELEMS: usize = 1024;
const _: () = assert!(CONVERTED_ELEMS.is_multiple_of(BLOCK_ELEMS));

/// Planes of a part of a tile in fp32.
struct ConvertedPlanes {
    weights: ConvertedWeights,
    momentum: [f32; CONVERTED_ELEMS],
    variance: [f32; CONVERTED_ELEMS],
}

/// Those that are no moments.
struct ConvertedWeights {
    masters: [f32; CONVERTED_ELEMS],
    grads: [f32; CONVERTED_ELEMS],
}

/// Like [`step_range`] with given instructions, for tests and measurements. Goes in parts if numbers are converted on the way.
///
/// Panics if this machine does not support them.
pub fn step_range_with(
    set: InstructionSet,
    hyper: &Hyper,
    tile: Tile<'_>,
    grad_type: GradType,
    range: Range<usize>,
) {
    assert!(set.available(), "this processor has no {set:?}");
    let Tile {
        format,
        param,
        state,
        grad,
        elems,
    } = tile;
    assert!(
        range.start <= range.end && range.end <= elems,
        "range {range:?} is not within the tile's {elems} elements"
    );
    let scalars = Scalars::new(format.rule, hyper);
    let converts = format.moments != Moments::Fp32
        || format.master == Master::Bf16
        || grad_type != format.master.grad_type();
    let mut converted = ConvertedPlanes {
        weights: ConvertedWeights {
            masters: [0.0; CONVERTED_ELEMS],
            grads: [0.0; CONVERTED_ELEMS],
        },
        momentum: [0.0; CONVERTED_ELEMS],
        variance: [0.0; CONVERTED_ELEMS],
    };
    let mut start = range.start;
    loop {
        // Parts end where blocks of moments end.
        let end = if converts {
            (start / CONVERTED_ELEMS + 1) * CONVERTED_ELEMS
        } else {
            elems
        };
        let part = start..range.end.min(end);
        start = part.end;
        let tile = Tile {
            format,
            param: &mut *param,
            state: &mut *state,
            grad,
            elems,
        };
        step_part(set, &scalars, tile, grad_type, part, &mut converted);
        if start == range.end {
            return;
        }
    }
}

/// Takes a step with the vector functions, which compute on fp32 moments and take the master's own type of gradients.
/// Converts moments and masters that are not fp32, and masters whose gradients are fp32, to fp32 and back.
fn step_part(
    set: InstructionSet,
    scalars: &Scalars,
    tile: Tile<'_>,
    grad_type: GradType,
    part: Range<usize>,
    converted: &mut ConvertedPlanes,
) {
    let format = tile.format;
    let blocks = match format.moments {
        Moments::EightBit => blocks_around(&part, tile.elems),
        Moments::Fp32 | Moments::Bf16 => part.clone(),
    };
    let Planes {
        param,
        first,
        momentum,
        variance,
        largest: [momentum_largest, variance_largest],
        grad,
    } = Planes::select(tile, grad_type, part.clone(), blocks.clone());
    let count = part.len();
    let (m, v): (&mut [f32], &mut [f32]) = match format.moments {
        Moments::Fp32 => (view_mut(&mut *momentum), view_mut(&mut *variance)),
        Moments::Bf16 => {
            let m = &mut converted.momentum[..count];
            let v = &mut converted.variance[..count];
            widen(set, view(momentum), m);
            widen(set, view(variance), v);
            (m, v)
        }
        Moments::EightBit => {
            let within = part.start - blocks.start..part.end - blocks.start;
            let m = &mut converted.momentum[..blocks.len()];
            let v = &mut converted.variance[..blocks.len()];
            eight_bit::widen(CodeSign::Signed, momentum, view(momentum_largest), m);
            eight_bit::widen(CodeSign::Unsigned, variance, view(variance_largest), v);
            (&mut m[within.clone()], &mut v[within])
        }
    };
    let weights = StoredWeights {
        param,
        first,
        grad,
        grad_type,
    };
    let scratch = &mut converted.weights;
    step_weights(set, scalars, format, part.start, weights, [m, v], scratch);
    match format.moments {
        Moments::Fp32 => {}
        Moments::Bf16 => {
            let from = [&converted.momentum[..], &converted.variance];
            let to = [view_mut(momentum), view_mut(variance)];
            narrow(set, scalars.random, part.start, from, to);
        }
        Moments::EightBit => {
            let largest = view_mut(momentum_largest);
            encode(
                set,
                CodeSign::Signed,
                &converted.momentum,
                momentum,
                largest,
            );
            let largest = view_mut(variance_largest);
            encode(
                set,
                CodeSign::Unsigned,
                &converted.variance,
                variance,
                largest,
            );
        }
    }
}

/// The stored planes of a part of a tile that are no moments.
struct StoredWeights<'a> {
    param: &'a mut [u8],
    first: &'a mut [u8],
    grad: &'a [u8],
    grad_type: GradType,
}

/// Takes a step over weights, the first of which is the element `first_elem` of the tile, and their momentum and variance in fp32.
fn step_weights(
    set: InstructionSet,
    scalars: &Scalars,
    format: TileFormat,
    first_elem: usize,
    weights: StoredWeights<'_>,
    [momentum, variance]: [&mut [f32]; 2],
    converted: &mut ConvertedWeights,
) {
    let StoredWeights {
        param,
        first,
        grad,
        grad_type,
    } = weights;
    let count = grad.len() / grad_type.elem_bytes();
    let moments = match format.rule {
        UpdateRule::AdamW => MomentPlanes::AdamW { momentum, variance },
        UpdateRule::Lion => MomentPlanes::Lion { momentum },
        UpdateRule::Sgd | UpdateRule::Muon => MomentPlanes::Sgd,
    };
    let step = |weights| step_chunk(set, scalars, Elements { weights, moments });
    let master = format.master;
    match master {
        Master::Bf16 => {
            let masters = &mut converted.masters[..count];
            widen(set, view(&*param), masters);
            let grad = match grad_type {
                GradType::Fp32 => view(grad),
                GradType::Bf16 => {
                    let grads = &mut converted.grads[..count];
                    widen(set, view(grad), grads);
                    grads
                }
                GradType::Fp16 => {
                    panic!("no update of {master:?} takes gradients of {grad_type:?}")
                }
            };
            step(Weights::Fp32 {
                param: &mut *masters,
                grad,
            });
            let random = scalars.random.of_master();
            let to: [&mut [u16]; 2] = [view_mut(param), &mut []];
            narrow(set, random, first_elem, [masters, &[]], to);
        }
        _ if grad_type == master.grad_type() => {
            step(Weights::view(master, param, first, grad));
        }
        Master::SplitBf16 => {
            let (param, residual): (&mut [u16], &mut [i16]) = (view_mut(param), view_mut(first));
            let masters = &mut converted.masters[..count];
            for (at, master) in masters.iter_mut().enumerate() {
                *master = number::join(param[at], residual[at]);
            }
            step(Weights::Fp32 {
                param: &mut *masters,
                grad: view(grad),
            });
            for (at, master) in masters.iter().enumerate() {
                (param[at], residual[at]) = number::split(*master);
            }
        }
        Master::Fp16WholeMaster => {
            let (param, whole): (&mut [u16], &mut [f32]) = (view_mut(param), view_mut(first));
            step(Weights::Fp32 {
                param: &mut *whole,
                grad: view(grad),
            });
            for (param, master) in param.iter_mut().zip(whole) {
                *param = number::to_fp16(*master);
            }
        }
        Master::Fp32 => panic!("no update of {master:?} takes gradients of type {grad_type:?}"),
    }
}

/// The scalars in the order of the GPU kernel's arguments (`gpu/source/adamw.cu`), and the two keys and the first element that the
/// kernel derives a tile's random bits from.
pub(crate) fn kernel_scalars(rule: UpdateRule, hyper: &Hyper) -> ([f32; 9], [u32; 3]) {
    let s = Scalars::new(rule, hyper);
    let scalars = [
        s.grad_scale,
        s.beta1,
        s.one_minus_beta1,
        s.beta2,
        s.one_minus_beta2,
        s.root_correction,
        s.eps,
        s.minus_decay,
        s.minus_step_size,
    ];
    let random = s.random;
    (scalars, [random.key, random.master_key, random.first_elem])
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

fn widen(set: InstructionSet, stored: &[u16], out: &mut [f32]) {
    match set {
        InstructionSet::Scalar => rounding::widen(stored, out),
        #[cfg(target_arch = "x86_64")]
        _ => avx2::widen(stored, out),
        #[cfg(not(target_arch = "x86_64"))]
        _ => unreachable!("not available"),
    }
}

fn narrow(
    set: InstructionSet,
    random: RandomBits,
    first: usize,
    from: [&[f32]; 2],
    to: [&mut [u16]; 2],
) {
    match set {
        InstructionSet::Scalar => rounding::narrow(random, first, from, to),
        #[cfg(target_arch = "x86_64")]
        _ => avx2::narrow(random, first, from, to),
        #[cfg(not(target_arch = "x86_64"))]
        _ => unreachable!("not available"),
    }
}

/// Stores moments in 8 bits, as many as there are codes.
fn encode(
    set: InstructionSet,
    sign: CodeSign,
    from: &[f32],
    codes: &mut [u8],
    largest: &mut [f32],
) {
    let from = &from[..codes.len()];
    match set {
        InstructionSet::Scalar => eight_bit::narrow(sign, from, codes, largest),
        #[cfg(target_arch = "x86_64")]
        _ => avx2::encode(sign, from, codes, largest),
        #[cfg(not(target_arch = "x86_64"))]
        _ => unreachable!("not available"),
    }
}
