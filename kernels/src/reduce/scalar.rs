//! Defines the norm, the sum and the cast, element by element.

use super::{Grads, GradsMut};
use crate::number::{canonical, from_bf16, from_fp16, to_bf16, to_fp16};

/// Lanes of the norm's tree: eight vectors of AVX2, enough additions in flight to hide their latency.
pub(super) const LANES: usize = 32;

pub(super) fn sum_squares(x: Grads<'_>) -> f64 {
    let mut lanes = [0.0; LANES];
    match x {
        Grads::Bf16(x) => add_squares(&mut lanes, x, from_bf16),
        Grads::Fp16(x) => add_squares(&mut lanes, x, from_fp16),
        Grads::Fp32(x) => add_squares(&mut lanes, x, |x| x),
    }
    fold(lanes)
}

/// Adds the square of element i to lane i mod [`LANES`]. The square of an fp32 is exact in f64, so fusing the
/// multiplication changes nothing.
#[inline(always)]
pub(super) fn add_squares<T: Copy>(lanes: &mut [f64; LANES], x: &[T], value: impl Fn(T) -> f32) {
    for row in x.chunks(LANES) {
        for (lane, x) in lanes.iter_mut().zip(row) {
            let x = f64::from(value(*x));
            *lane += x * x;
        }
    }
}

/// Adds the upper half of the lanes to the lower half until one is left.
pub(super) fn fold(mut lanes: [f64; LANES]) -> f64 {
    let mut width = LANES / 2;
    while width > 0 {
        let (low, high) = lanes.split_at_mut(width);
        for (low, high) in low.iter_mut().zip(high) {
            *low += *high;
        }
        width /= 2;
    }
    lanes[0]
}

// The elementwise functions are inlined into the vector file too, where the same code gets wider registers.

#[inline(always)]
pub(super) fn accumulate(sum: &mut [f32], x: Grads<'_>) {
    match x {
        Grads::Bf16(x) => add(sum, x, from_bf16),
        Grads::Fp16(x) => add(sum, x, from_fp16),
        Grads::Fp32(x) => add(sum, x, |x| x),
    }
}

#[inline(always)]
fn add<T: Copy>(sum: &mut [f32], x: &[T], value: impl Fn(T) -> f32) {
    for (sum, x) in sum.iter_mut().zip(x) {
        *sum = canonical(*sum + value(*x));
    }
}

#[inline(always)]
pub(super) fn store(from: &[f32], out: GradsMut<'_>) {
    match out {
        GradsMut::Bf16(out) => cast(from, out, to_bf16),
        GradsMut::Fp16(out) => cast(from, out, to_fp16),
        GradsMut::Fp32(out) => cast(from, out, canonical),
    }
}

#[inline(always)]
fn cast<T>(from: &[f32], out: &mut [T], to: impl Fn(f32) -> T) {
    for (from, out) in from.iter().zip(out) {
        *out = to(*from);
    }
}
