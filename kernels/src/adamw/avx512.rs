//! The update of `scalar.rs` with AVX-512F, sixteen elements at a time. One of the files that may use `unsafe`.
//!
//! Gives the same bits as the definition: each vector operation corresponds to the scalar one on its line there, and
//! elements that do not fill a block use the definition itself.
#![allow(unsafe_code)]

use std::arch::x86_64::*;

use super::layout::{Elements, MomentPlanes, Weights};
use super::planes::{prefetch_after, step_planes};
use super::scalar::{self, Scalars};
use crate::InstructionSet;
use crate::cast::Plain;
use crate::number::CANONICAL_NAN;

/// Elements of a block: one vector of fp32, half a vector of 16-bit numbers.
const BLOCK: usize = 16;

/// Steps one chunk. Panics without AVX-512F.
pub(super) fn step(s: &Scalars, elements: Elements<'_>) {
    assert!(InstructionSet::Avx512.available());
    // SAFETY: the assertion above checked every feature the function enables.
    unsafe { step_blocks(s, elements) }
}

step_planes!("avx512f", __m512, __m512, _mm512_set1_ps);

impl Vectors {
    /// Returns the new masters and replaces the moments in place, like `scalar::adamw`, line by line.
    #[inline]
    #[target_feature(enable = "avx512f")]
    fn adamw(
        &self,
        master: __m512,
        (momentum_in_out, variance_in_out): (&mut [f32; BLOCK], &mut [f32; BLOCK]),
        grad: __m512,
    ) -> __m512 {
        prefetch_after(momentum_in_out);
        prefetch_after(variance_in_out);
        let (momentum, variance) = (load(momentum_in_out), load(variance_in_out));
        let grad = _mm512_mul_ps(grad, self.grad_scale);
        let momentum = _mm512_fmadd_ps(
            self.beta1,
            momentum,
            _mm512_mul_ps(self.one_minus_beta1, grad),
        );
        let variance = _mm512_fmadd_ps(
            _mm512_mul_ps(self.one_minus_beta2, grad),
            grad,
            _mm512_mul_ps(self.beta2, variance),
        );
        let denominator = _mm512_fmadd_ps(_mm512_sqrt_ps(variance), self.root_correction, self.eps);
        let decayed = _mm512_fmadd_ps(self.minus_decay, master, master);
        let quotient = _mm512_div_ps(momentum, denominator);
        let master = _mm512_fmadd_ps(self.minus_step_size, quotient, decayed);
        store(canonical(momentum), momentum_in_out);
        store(canonical(variance), variance_in_out);
        canonical(master)
    }

    /// Returns the new masters and replaces the momentum in place, like `scalar::lion`, line by line.
    #[inline]
    #[target_feature(enable = "avx512f")]
    fn lion(&self, master: __m512, momentum_in_out: &mut [f32; BLOCK], grad: __m512) -> __m512 {
        prefetch_after(momentum_in_out);
        let momentum = load(momentum_in_out);
        let grad = _mm512_mul_ps(grad, self.grad_scale);
        let direction = sign(_mm512_fmadd_ps(
            self.beta1,
            momentum,
            _mm512_mul_ps(self.one_minus_beta1, grad),
        ));
        let momentum = _mm512_fmadd_ps(
            self.beta2,
            momentum,
            _mm512_mul_ps(self.one_minus_beta2, grad),
        );
        let decayed = _mm512_fmadd_ps(self.minus_decay, master, master);
        let master = _mm512_fmadd_ps(self.minus_step_size, direction, decayed);
        store(canonical(momentum), momentum_in_out);
        canonical(master)
    }

    /// Returns the new masters, like `scalar::sgd`, line by line.
    #[inline]
    #[target_feature(enable = "avx512f")]
    fn sgd(&self, master: __m512, grad: __m512) -> __m512 {
        let grad = _mm512_mul_ps(grad, self.grad_scale);
        let grad = _mm512_fmadd_ps(self.minus_decay, master, grad);
        canonical(_mm512_fmadd_ps(self.minus_step_size, grad, master))
    }
}

/// `scalar::sign`.
#[inline]
#[target_feature(enable = "avx512f")]
fn sign(x: __m512) -> __m512 {
    let bits = _mm512_castps_si512(x);
    let sign_bit = _mm512_and_si512(bits, _mm512_set1_epi32(i32::MIN));
    let one = _mm512_or_si512(sign_bit, _mm512_castps_si512(_mm512_set1_ps(1.0)));
    let is_signed = _mm512_cmp_ps_mask::<_CMP_NEQ_OQ>(x, _mm512_setzero_ps());
    _mm512_mask_mov_ps(x, is_signed, _mm512_castsi512_ps(one))
}

#[inline]
#[target_feature(enable = "avx512f")]
fn canonical(x: __m512) -> __m512 {
    let nan = _mm512_set1_ps(f32::from_bits(CANONICAL_NAN));
    _mm512_mask_mov_ps(x, _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(x, x), nan)
}

#[inline]
#[target_feature(enable = "avx512f")]
fn load(from: &[f32; BLOCK]) -> __m512 {
    // SAFETY: the array holds the 64 bytes read; the load needs no alignment.
    unsafe { _mm512_loadu_ps(from.as_ptr()) }
}

#[inline]
#[target_feature(enable = "avx512f")]
fn store(x: __m512, to: &mut [f32; BLOCK]) {
    // SAFETY: the array holds the 64 bytes written; the store needs no alignment.
    unsafe { _mm512_storeu_ps(to.as_mut_ptr(), x) }
}

/// Sixteen 16-bit numbers.
#[inline]
#[target_feature(enable = "avx512f")]
fn load_halves<T: Plain>(from: &[T; BLOCK]) -> __m256i {
    const { assert!(size_of::<T>() == 2) };
    // SAFETY: the array holds the 32 bytes read; the load needs no alignment.
    unsafe { _mm256_loadu_si256(from.as_ptr().cast()) }
}

#[inline]
#[target_feature(enable = "avx512f")]
fn store_halves<T: Plain>(x: __m256i, to: &mut [T; BLOCK]) {
    const { assert!(size_of::<T>() == 2) };
    // SAFETY: the array holds the 32 bytes written; the store needs no alignment.
    unsafe { _mm256_storeu_si256(to.as_mut_ptr().cast(), x) }
}

/// 16-bit numbers as the upper halves of 32-bit ones.
#[inline]
#[target_feature(enable = "avx512f")]
fn upper_halves(x: __m256i) -> __m512i {
    _mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(x))
}

#[inline]
#[target_feature(enable = "avx512f")]
fn from_bf16(from: &[u16; BLOCK]) -> __m512 {
    _mm512_castsi512_ps(upper_halves(load_halves(from)))
}

#[inline]
#[target_feature(enable = "avx512f")]
fn from_fp16(from: &[u16; BLOCK]) -> __m512 {
    _mm512_cvtph_ps(load_halves(from))
}

/// `number::to_fp16`; `x` has no NaN but the canonical one.
#[inline]
#[target_feature(enable = "avx512f")]
fn to_fp16(x: __m512, to: &mut [u16; BLOCK]) {
    store_halves(_mm512_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(x), to);
}

/// `number::join`.
#[inline]
#[target_feature(enable = "avx512f")]
fn join(param: &[u16; BLOCK], residual: &[i16; BLOCK]) -> __m512 {
    let residual = _mm512_cvtepi16_epi32(load_halves(residual));
    let bits = _mm512_add_epi32(upper_halves(load_halves(param)), residual);
    _mm512_castsi512_ps(bits)
}

/// `number::split`; `x` has no NaN but the canonical one.
#[inline]
#[target_feature(enable = "avx512f")]
fn split(x: __m512, param: &mut [u16; BLOCK], residual: &mut [i16; BLOCK]) {
    let bits = _mm512_castps_si512(x);
    let high = _mm512_srli_epi32::<16>(_mm512_add_epi32(bits, _mm512_set1_epi32(0x8000)));
    store_halves(_mm512_cvtepi32_epi16(high), param);
    // The narrowing keeps the low halves.
    store_halves(_mm512_cvtepi32_epi16(bits), residual);
}
