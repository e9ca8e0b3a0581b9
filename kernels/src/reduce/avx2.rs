//! The functions of `scalar.rs` with AVX2, FMA and F16C. One of the files that may use `unsafe`.
//!
//! The definition's loop vectorizes well for bf16 and fp32, elementwise: it is compiled again with these features.
//! Written by hand are the fp16 conversions, and the norm, whose 32 lanes a compiler does not keep in registers.
#![allow(unsafe_code)]

use std::arch::x86_64::*;

use super::scalar::{self, LANES};
use super::{Grads, GradsMut};
use crate::InstructionSet;
use crate::number::{CANONICAL_NAN, from_bf16, from_fp16};

/// Same result as `scalar::sum_squares`. Like all functions here it panics without AVX2, FMA and F16C.
pub(super) fn sum_squares(x: Grads<'_>) -> f64 {
    assert!(InstructionSet::Avx2.available());
    // SAFETY: the assertion above checked every feature the function enables.
    unsafe { sum_squares_blocks(x) }
}

/// Same result as `scalar::accumulate`.
pub(super) fn accumulate(sum: &mut [f32], x: Grads<'_>) {
    assert!(InstructionSet::Avx2.available());
    // SAFETY: the assertion above checked every feature the function enables.
    unsafe { accumulate_blocks(sum, x) }
}

/// Same result as `scalar::store`.
pub(super) fn store(from: &[f32], out: GradsMut<'_>) {
    assert!(InstructionSet::Avx2.available());
    // SAFETY: the assertion above checked every feature the function enables.
    unsafe { store_blocks(from, out) }
}

/// Four elements in fp32.
type Quad = __m128;

#[target_feature(enable = "avx2,fma,f16c")]
fn sum_squares_blocks(x: Grads<'_>) -> f64 {
    let mut sums = [_mm256_setzero_pd(); LANES / 4];
    let mut lanes = [0.0; LANES];
    match x {
        Grads::Bf16(x) => {
            let (rows, rest) = x.as_chunks::<LANES>();
            for row in rows {
                let quads = row.as_chunks::<4>().0;
                for (sum, quad) in sums.iter_mut().zip(quads) {
                    let bits = _mm_slli_epi32::<16>(_mm_cvtepu16_epi32(load_halves(quad)));
                    *sum = add_squares(*sum, _mm_castsi128_ps(bits));
                }
            }
            store_lanes(&sums, &mut lanes);
            scalar::add_squares(&mut lanes, rest, from_bf16);
        }
        Grads::Fp16(x) => {
            let (rows, rest) = x.as_chunks::<LANES>();
            for row in rows {
                let quads = row.as_chunks::<4>().0;
                for (sum, quad) in sums.iter_mut().zip(quads) {
                    *sum = add_squares(*sum, _mm_cvtph_ps(load_halves(quad)));
                }
            }
            store_lanes(&sums, &mut lanes);
            scalar::add_squares(&mut lanes, rest, from_fp16);
        }
        Grads::Fp32(x) => {
            let (rows, rest) = x.as_chunks::<LANES>();
            for row in rows {
                let quads = row.as_chunks::<4>().0;
                for (sum, quad) in sums.iter_mut().zip(quads) {
                    // SAFETY: the array holds the 16 bytes read; the load needs no alignment.
                    *sum = add_squares(*sum, unsafe { _mm_loadu_ps(quad.as_ptr()) });
                }
            }
            store_lanes(&sums, &mut lanes);
            scalar::add_squares(&mut lanes, rest, |x| x);
        }
    }
    scalar::fold(lanes)
}

#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn add_squares(sum: __m256d, x: Quad) -> __m256d {
    let x = _mm256_cvtps_pd(x);
    _mm256_fmadd_pd(x, x, sum)
}

#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn load_halves(from: &[u16; 4]) -> __m128i {
    // SAFETY: the array holds the 8 bytes read; the load needs no alignment.
    unsafe { _mm_loadl_epi64(from.as_ptr().cast()) }
}

#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn store_lanes(sums: &[__m256d; LANES / 4], lanes: &mut [f64; LANES]) {
    for (sum, lanes) in sums.iter().zip(lanes.as_chunks_mut::<4>().0) {
        // SAFETY: the array holds the 32 bytes written; the store needs no alignment.
        unsafe { _mm256_storeu_pd(lanes.as_mut_ptr(), *sum) }
    }
}

#[target_feature(enable = "avx2,fma,f16c")]
fn accumulate_blocks(sum: &mut [f32], x: Grads<'_>) {
    let Grads::Fp16(x) = x else {
        return scalar::accumulate(sum, x);
    };
    let (blocks, rest) = x.as_chunks::<8>();
    let (sums, sum_rest) = sum.as_chunks_mut::<8>();
    for (sum, x) in sums.iter_mut().zip(blocks) {
        // SAFETY: the arrays hold the 32 and 16 bytes read; the loads need no alignment.
        let (old, x) = unsafe {
            let x = _mm_loadu_si128(x.as_ptr().cast());
            (_mm256_loadu_ps(sum.as_ptr()), _mm256_cvtph_ps(x))
        };
        let new = canonical(_mm256_add_ps(old, x));
        // SAFETY: the array holds the 32 bytes written; the store needs no alignment.
        unsafe { _mm256_storeu_ps(sum.as_mut_ptr(), new) }
    }
    scalar::accumulate(sum_rest, Grads::Fp16(rest));
}

#[target_feature(enable = "avx2,fma,f16c")]
fn store_blocks(from: &[f32], out: GradsMut<'_>) {
    let GradsMut::Fp16(out) = out else {
        return scalar::store(from, out);
    };
    let (blocks, rest) = from.as_chunks::<8>();
    let (outs, out_rest) = out.as_chunks_mut::<8>();
    for (from, out) in blocks.iter().zip(outs) {
        // SAFETY: the array holds the 32 bytes read; the load needs no alignment.
        let x = canonical(unsafe { _mm256_loadu_ps(from.as_ptr()) });
        let x = _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(x);
        // SAFETY: the array holds the 16 bytes written; the store needs no alignment.
        unsafe { _mm_storeu_si128(out.as_mut_ptr().cast(), x) }
    }
    scalar::store(rest, GradsMut::Fp16(out_rest));
}

#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn canonical(x: __m256) -> __m256 {
    let nan = _mm256_set1_ps(f32::from_bits(CANONICAL_NAN));
    _mm256_blendv_ps(x, nan, _mm256_cmp_ps::<_CMP_UNORD_Q>(x, x))
}
