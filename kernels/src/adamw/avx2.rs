//! The update of `scalar.rs` with AVX2, FMA and F16C, sixteen elements at a time. One of the files that may use
//! `unsafe`.
//!
//! Gives the same bits as the definition: each vector operation corresponds to the scalar one on its line there, and
//! elements that do not fill a block use the definition itself.
#![allow(unsafe_code)]

use std::arch::x86_64::*;

use super::eight_bit::{self, CodeSign};
use super::layout::{Elements, MomentPlanes, Weights};
use super::planes::{prefetch_after, step_planes};
use super::rounding::{self, RandomBits};
use super::scalar::{self, Scalars};
use crate::InstructionSet;
use crate::cast::Plain;
use crate::number::CANONICAL_NAN;

/// Elements of a block: two vectors of fp32, one of 16-bit numbers, so that packing crosses lanes once for both.
const BLOCK: usize = 16;

/// Steps one chunk. Panics without AVX2, FMA and F16C.
pub(super) fn step(s: &Scalars, elements: Elements<'_>) {
    assert!(InstructionSet::Avx2.available());
    // SAFETY: the assertion above checked every feature the function enables.
    unsafe { step_blocks(s, elements) }
}

/// Runs `rounding::widen` compiled for AVX2, which the compiler turns into vector instructions. AVX-512 gains nothing there.
pub(super) fn widen(stored: &[u16], out: &mut [f32]) {
    #[target_feature(enable = "avx2")]
    fn with_avx2(stored: &[u16], out: &mut [f32]) {
        rounding::widen(stored, out);
    }
    assert!(InstructionSet::Avx2.available());
    // SAFETY: the assertion above checked the feature the function enables.
    unsafe { with_avx2(stored, out) }
}

/// Runs `rounding::narrow` compiled for AVX2.
pub(super) fn narrow(random: RandomBits, first: usize, from: [&[f32]; 2], to: [&mut [u16]; 2]) {
    #[target_feature(enable = "avx2")]
    fn with_avx2(random: RandomBits, first: usize, from: [&[f32]; 2], to: [&mut [u16]; 2]) {
        rounding::narrow(random, first, from, to);
    }
    assert!(InstructionSet::Avx2.available());
    // SAFETY: the assertion above checked the feature the function enables.
    unsafe { with_avx2(random, first, from, to) }
}

/// Runs `eight_bit::narrow_fast` compiled for AVX2.
pub(super) fn encode(sign: CodeSign, from: &[f32], codes: &mut [u8], largest: &mut [f32]) {
    #[target_feature(enable = "avx2")]
    fn with_avx2(sign: CodeSign, from: &[f32], codes: &mut [u8], largest: &mut [f32]) {
        eight_bit::narrow_fast(sign, from, codes, largest);
    }
    assert!(InstructionSet::Avx2.available());
    // SAFETY: the assertion above checked the feature the function enables.
    unsafe { with_avx2(sign, from, codes, largest) }
}

step_planes!("avx2,fma,f16c", __m256, VectorPair, _mm256_set1_ps);

/// A block of fp32.
type VectorPair = [__m256; 2];

impl Vectors {
    /// Returns the new masters and replaces the moments in place.
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    fn adamw(
        &self,
        master: VectorPair,
        (momentum, variance): (&mut [f32; BLOCK], &mut [f32; BLOCK]),
        grad: VectorPair,
    ) -> VectorPair {
        prefetch_after(momentum);
        prefetch_after(variance);
        let (m, v) = (load(momentum), load(variance));
        let low = self.adamw_vector(master[0], m[0], v[0], grad[0]);
        let high = self.adamw_vector(master[1], m[1], v[1], grad[1]);
        store([low.1, high.1], momentum);
        store([low.2, high.2], variance);
        [low.0, high.0]
    }

    /// Corresponds to `scalar::adamw`, line by line.
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    fn adamw_vector(
        &self,
        master: __m256,
        momentum: __m256,
        variance: __m256,
        grad: __m256,
    ) -> (__m256, __m256, __m256) {
        let grad = _mm256_mul_ps(grad, self.grad_scale);
        let momentum = _mm256_fmadd_ps(
            self.beta1,
            momentum,
            _mm256_mul_ps(self.one_minus_beta1, grad),
        );
        let variance = _mm256_fmadd_ps(
            _mm256_mul_ps(self.one_minus_beta2, grad),
            grad,
            _mm256_mul_ps(self.beta2, variance),
        );
        let denominator = _mm256_fmadd_ps(_mm256_sqrt_ps(variance), self.root_correction, self.eps);
        let decayed = _mm256_fmadd_ps(self.minus_decay, master, master);
        let quotient = _mm256_div_ps(momentum, denominator);
        let master = _mm256_fmadd_ps(self.minus_step_size, quotient, decayed);
        (canonical(master), canonical(momentum), canonical(variance))
    }

    /// Returns the new masters and replaces the momentum in place.
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    fn lion(
        &self,
        master: VectorPair,
        momentum: &mut [f32; BLOCK],
        grad: VectorPair,
    ) -> VectorPair {
        prefetch_after(momentum);
        let m = load(momentum);
        let low = self.lion_vector(master[0], m[0], grad[0]);
        let high = self.lion_vector(master[1], m[1], grad[1]);
        store([low.1, high.1], momentum);
        [low.0, high.0]
    }

    /// Corresponds to `scalar::lion`, line by line.
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    fn lion_vector(&self, master: __m256, momentum: __m256, grad: __m256) -> (__m256, __m256) {
        let grad = _mm256_mul_ps(grad, self.grad_scale);
        let direction = sign(_mm256_fmadd_ps(
            self.beta1,
            momentum,
            _mm256_mul_ps(self.one_minus_beta1, grad),
        ));
        let momentum = _mm256_fmadd_ps(
            self.beta2,
            momentum,
            _mm256_mul_ps(self.one_minus_beta2, grad),
        );
        let decayed = _mm256_fmadd_ps(self.minus_decay, master, master);
        let master = _mm256_fmadd_ps(self.minus_step_size, direction, decayed);
        (canonical(master), canonical(momentum))
    }

    /// Returns the new masters.
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    fn sgd(&self, master: VectorPair, grad: VectorPair) -> VectorPair {
        [
            self.sgd_vector(master[0], grad[0]),
            self.sgd_vector(master[1], grad[1]),
        ]
    }

    /// Corresponds to `scalar::sgd`, line by line.
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    fn sgd_vector(&self, master: __m256, grad: __m256) -> __m256 {
        let grad = _mm256_mul_ps(grad, self.grad_scale);
        let grad = _mm256_fmadd_ps(self.minus_decay, master, grad);
        canonical(_mm256_fmadd_ps(self.minus_step_size, grad, master))
    }
}

/// `scalar::sign`.
#[inline]
#[target_feature(enable = "avx2")]
fn sign(x: __m256) -> __m256 {
    let sign_bit = _mm256_and_ps(x, _mm256_set1_ps(-0.0));
    let one = _mm256_or_ps(sign_bit, _mm256_set1_ps(1.0));
    _mm256_blendv_ps(x, one, _mm256_cmp_ps::<_CMP_NEQ_OQ>(x, _mm256_setzero_ps()))
}

#[inline]
#[target_feature(enable = "avx2")]
fn canonical(x: __m256) -> __m256 {
    let nan = _mm256_set1_ps(f32::from_bits(CANONICAL_NAN));
    _mm256_blendv_ps(x, nan, _mm256_cmp_ps::<_CMP_UNORD_Q>(x, x))
}

#[inline]
#[target_feature(enable = "avx2")]
fn load(from: &[f32; BLOCK]) -> VectorPair {
    let from = from.as_ptr();
    // SAFETY: the array holds the 16 numbers that both loads read; they need no alignment.
    unsafe { [_mm256_loadu_ps(from), _mm256_loadu_ps(from.add(8))] }
}

#[inline]
#[target_feature(enable = "avx2")]
fn store(x: VectorPair, to: &mut [f32; BLOCK]) {
    let to = to.as_mut_ptr();
    // SAFETY: the array holds the 16 numbers that both stores write; they need no alignment.
    unsafe {
        _mm256_storeu_ps(to, x[0]);
        _mm256_storeu_ps(to.add(8), x[1]);
    }
}

/// Sixteen 16-bit numbers.
#[inline]
#[target_feature(enable = "avx2")]
fn load_halves<T: Plain>(from: &[T; BLOCK]) -> [__m128i; 2] {
    const { assert!(size_of::<T>() == 2) };
    let from = from.as_ptr();
    // SAFETY: the array holds the 16 numbers that both loads read; they need no alignment.
    unsafe {
        [
            _mm_loadu_si128(from.cast()),
            _mm_loadu_si128(from.add(8).cast()),
        ]
    }
}

/// Stores 32-bit lanes, each within 0..=0xFFFF, as 16-bit numbers.
#[inline]
#[target_feature(enable = "avx2")]
fn store_halves<T: Plain>(x: [__m256i; 2], to: &mut [T; BLOCK]) {
    const { assert!(size_of::<T>() == 2) };
    // Packing works within 128-bit halves: it gives the quarters 0, 2, 1, 3.
    let packed = _mm256_permute4x64_epi64::<0b11_01_10_00>(_mm256_packus_epi32(x[0], x[1]));
    // SAFETY: the array holds the 32 bytes written; the store needs no alignment.
    unsafe { _mm256_storeu_si256(to.as_mut_ptr().cast(), packed) }
}

/// 16-bit numbers as the upper halves of 32-bit ones.
#[inline]
#[target_feature(enable = "avx2")]
fn upper_halves(x: __m128i) -> __m256i {
    _mm256_slli_epi32::<16>(_mm256_cvtepu16_epi32(x))
}

#[inline]
#[target_feature(enable = "avx2")]
fn from_bf16(from: &[u16; BLOCK]) -> VectorPair {
    let [a, b] = load_halves(from);
    [
        _mm256_castsi256_ps(upper_halves(a)),
        _mm256_castsi256_ps(upper_halves(b)),
    ]
}

#[inline]
#[target_feature(enable = "avx2,f16c")]
fn from_fp16(from: &[u16; BLOCK]) -> VectorPair {
    let [a, b] = load_halves(from);
    [_mm256_cvtph_ps(a), _mm256_cvtph_ps(b)]
}

/// `number::to_fp16`; `x` has no NaN but the canonical one.
#[inline]
#[target_feature(enable = "avx2,f16c")]
fn to_fp16(x: VectorPair, to: &mut [u16; BLOCK]) {
    let a = _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(x[0]);
    let b = _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(x[1]);
    let both = _mm256_set_m128i(b, a);
    // SAFETY: the array holds the 32 bytes written; the store needs no alignment.
    unsafe { _mm256_storeu_si256(to.as_mut_ptr().cast(), both) }
}

/// `number::join`.
#[inline]
#[target_feature(enable = "avx2")]
fn join(param: &[u16; BLOCK], residual: &[i16; BLOCK]) -> VectorPair {
    let (param, residual) = (load_halves(param), load_halves(residual));
    let join = |param, residual| {
        let bits = _mm256_add_epi32(upper_halves(param), _mm256_cvtepi16_epi32(residual));
        _mm256_castsi256_ps(bits)
    };
    [join(param[0], residual[0]), join(param[1], residual[1])]
}

/// `number::split`; `x` has no NaN but the canonical one.
#[inline]
#[target_feature(enable = "avx2")]
fn split(x: VectorPair, param: &mut [u16; BLOCK], residual: &mut [i16; BLOCK]) {
    let bits = [_mm256_castps_si256(x[0]), _mm256_castps_si256(x[1])];
    let half = _mm256_set1_epi32(0x8000);
    let high = |bits| _mm256_srli_epi32::<16>(_mm256_add_epi32(bits, half));
    store_halves([high(bits[0]), high(bits[1])], param);
    let mask = _mm256_set1_epi32(0xFFFF);
    let low = |bits| _mm256_and_si256(bits, mask);
    store_halves([low(bits[0]), low(bits[1])], residual);
}
