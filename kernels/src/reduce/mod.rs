//! Gradients on the CPU: norm, sum over micro-batches, and cast to their storage type.
//!
//! Bytes per element: `sum_squares` reads 2 or 4; `accumulate` reads 2 or 4 and 4, writes 4; `store_grad` reads 4,
//! writes 2 or 4. A few cores with AVX2 saturate memory, so there is no wider version.
//!
//! The bits of a result depend on the arguments alone; `scalar.rs` defines them.

#[cfg(target_arch = "x86_64")]
mod avx2;
mod scalar;

use rayon::prelude::*;

use crate::InstructionSet;
use crate::cast::{view, view_mut};
pub use crate::grad_type::GradType;

/// Elements whose squares are added in one tree of lanes. Part of the norm's definition: another value gives other
/// bits.
pub(crate) const CHUNK_ELEMS: usize = 4096;

/// Chunks whose sums are added before the others: one thread of a GPU for all of them takes 0.1 ms for 50 million gradients.
const GROUP_CHUNKS: usize = 64;

/// Elements that one thread takes at a time in the elementwise functions: 128 KB of fp32.
const PIECE_ELEMS: usize = 16 * 1024;

/// A slice of stored gradients, typed.
#[derive(Clone, Copy)]
enum Grads<'a> {
    Bf16(&'a [u16]),
    Fp16(&'a [u16]),
    Fp32(&'a [f32]),
}

/// A typed slice of stored gradients to write.
enum GradsMut<'a> {
    Bf16(&'a mut [u16]),
    Fp16(&'a mut [u16]),
    Fp32(&'a mut [f32]),
}

impl<'a> Grads<'a> {
    fn view(grad_type: GradType, bytes: &'a [u8]) -> Self {
        match grad_type {
            GradType::Bf16 => Self::Bf16(view(bytes)),
            GradType::Fp16 => Self::Fp16(view(bytes)),
            GradType::Fp32 => Self::Fp32(view(bytes)),
        }
    }
}

/// Sums the squares of all elements in f64.
///
/// The order is fixed: chunks of 4096 elements, within a chunk 32 lanes (element i adds to lane i mod 32), the lanes
/// folded in halves, the sums of 64 chunks added from first to last, and then these sums. NaN elements give NaN, infinities infinity.
///
/// Panics if `grad` is not a whole number of elements or not aligned to them.
pub fn sum_squares(grad_type: GradType, grad: &[u8]) -> f64 {
    sum_squares_with(InstructionSet::best(), grad_type, grad)
}

/// Like [`sum_squares`] with given instructions, for tests and measurements.
pub fn sum_squares_with(set: InstructionSet, grad_type: GradType, grad: &[u8]) -> f64 {
    assert!(set.available(), "this processor has no {set:?}");
    let chunk_sums: Vec<f64> = grad
        .par_chunks(CHUNK_ELEMS * grad_type.elem_bytes())
        .with_min_len(PIECE_ELEMS / CHUNK_ELEMS)
        .map(|chunk| {
            let chunk = Grads::view(grad_type, chunk);
            match set {
                InstructionSet::Scalar => scalar::sum_squares(chunk),
                #[cfg(target_arch = "x86_64")]
                _ => avx2::sum_squares(chunk),
                #[cfg(not(target_arch = "x86_64"))]
                _ => unreachable!("not available here"),
            }
        })
        .collect();
    // Not `iter().sum()`, which returns -0 for no gradients.
    let added = |sums: &[f64]| sums.iter().fold(0.0, |sum, one| sum + one);
    let group_sums: Vec<f64> = chunk_sums.chunks(GROUP_CHUNKS).map(added).collect();
    let sum = added(&group_sums);
    // Which NaN an addition returns depends on the processor; callers get one.
    if sum.is_nan() { f64::NAN } else { sum }
}

/// Adds stored gradients to an fp32 sum: `sum[i] += x[i]`.
///
/// Panics if `x_bytes` does not hold exactly `sum.len()` elements or is not aligned to them.
pub fn accumulate(sum: &mut [f32], x_bytes: &[u8], x_type: GradType) {
    accumulate_with(InstructionSet::best(), sum, x_bytes, x_type);
}

/// Like [`accumulate`] with given instructions, for tests and measurements.
pub fn accumulate_with(set: InstructionSet, sum: &mut [f32], x_bytes: &[u8], x_type: GradType) {
    assert!(set.available(), "this processor has no {set:?}");
    check_bytes(x_bytes.len(), sum.len(), x_type);
    sum.par_chunks_mut(PIECE_ELEMS)
        .zip(x_bytes.par_chunks(PIECE_ELEMS * x_type.elem_bytes()))
        .for_each(|(sum, x)| {
            let x = Grads::view(x_type, x);
            match set {
                InstructionSet::Scalar => scalar::accumulate(sum, x),
                #[cfg(target_arch = "x86_64")]
                _ => avx2::accumulate(sum, x),
                #[cfg(not(target_arch = "x86_64"))]
                _ => unreachable!("not available here"),
            }
        });
}

/// Casts fp32 to stored gradients: to nearest, halves to even; every NaN becomes the canonical one.
///
/// Panics if `out` does not hold exactly `from.len()` elements or is not aligned to them.
pub fn store_grad(grad_type: GradType, from: &[f32], out: &mut [u8]) {
    store_grad_with(InstructionSet::best(), grad_type, from, out);
}

/// Like [`store_grad`] with given instructions, for tests and measurements.
pub fn store_grad_with(set: InstructionSet, grad_type: GradType, from: &[f32], out: &mut [u8]) {
    assert!(set.available(), "this processor has no {set:?}");
    check_bytes(out.len(), from.len(), grad_type);
    from.par_chunks(PIECE_ELEMS)
        .zip(out.par_chunks_mut(PIECE_ELEMS * grad_type.elem_bytes()))
        .for_each(|(from, out)| {
            let out = match grad_type {
                GradType::Bf16 => GradsMut::Bf16(view_mut(out)),
                GradType::Fp16 => GradsMut::Fp16(view_mut(out)),
                GradType::Fp32 => GradsMut::Fp32(view_mut(out)),
            };
            match set {
                InstructionSet::Scalar => scalar::store(from, out),
                #[cfg(target_arch = "x86_64")]
                _ => avx2::store(from, out),
                #[cfg(not(target_arch = "x86_64"))]
                _ => unreachable!("not available here"),
            }
        });
}

fn check_bytes(bytes: usize, elems: usize, grad_type: GradType) {
    assert!(
        bytes == elems * grad_type.elem_bytes(),
        "{bytes} bytes of {grad_type:?} beside {elems} fp32 elements"
    );
}
