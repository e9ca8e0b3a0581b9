//! Sums over ranks, in rank order.
//!
//! Reads `ranks` shards and writes one. Memory bandwidth is the bottleneck, far above that of the network.

use rayon::prelude::*;

use kernels::cast::{view, view_mut};
use kernels::number::{canonical, from_bf16, from_fp16, to_bf16, to_fp16};
use kernels::reduce::GradType;

/// Elements that one thread takes at a time.
const PIECE_ELEMS: usize = 16 * 1024;

/// Sets `out[i]` to the sum over ranks of `shards[rank][i]`; the shards are consecutive and as long as `out`.
///
/// Added in fp32 from rank 0 and rounded once, so the bits depend on the values alone. Every NaN becomes the canonical
/// one.
pub(super) fn sum_ranks(grad_type: GradType, shards: &[u8], out: &mut [u8]) {
    assert!(
        !out.is_empty() && shards.len().is_multiple_of(out.len()),
        "whole shards"
    );
    match grad_type {
        GradType::Bf16 => sum(view::<u16>(shards), view_mut(out), from_bf16, to_bf16),
        GradType::Fp16 => sum(view::<u16>(shards), view_mut(out), from_fp16, to_fp16),
        GradType::Fp32 => sum(view::<f32>(shards), view_mut(out), |x| x, canonical),
    }
}

fn sum<T: Copy + Send + Sync>(
    shards: &[T],
    out: &mut [T],
    value: impl Fn(T) -> f32 + Sync,
    store: impl Fn(f32) -> T + Sync,
) {
    let shard_elems = out.len();
    let pieces = out.par_chunks_mut(PIECE_ELEMS).enumerate();
    pieces.for_each(|(piece, out)| {
        let first = piece * PIECE_ELEMS;
        let mut sums = [0.0f32; PIECE_ELEMS];
        let sums = &mut sums[..out.len()];
        for (rank, shard) in shards.chunks_exact(shard_elems).enumerate() {
            let shard = &shard[first..first + out.len()];
            for (sum, x) in sums.iter_mut().zip(shard) {
                // Not from zero on: 0 + -0 is 0.
                *sum = if rank == 0 {
                    value(*x)
                } else {
                    *sum + value(*x)
                };
            }
        }
        for (out, sum) in out.iter_mut().zip(sums) {
            *out = store(*sum);
        }
    });
}

#[cfg(test)]
mod tests {
    //! Tests that the order of addition does not depend on threads or pieces, that the sum is rounded once, and that no tail is lost.
    use super::*;
    use proptest::prelude::*;

    fn bytes<T: Copy, const N: usize>(values: &[T], to: impl Fn(T) -> [u8; N]) -> Vec<u8> {
        values.iter().flat_map(|value| to(*value)).collect()
    }

    /// Returns the sum as bytes. malloc aligns them for any number.
    fn summed(grad_type: GradType, shards: &[u8], shard_elems: usize) -> Vec<u8> {
        let mut out = vec![0; shard_elems * grad_type.elem_bytes()];
        sum_ranks(grad_type, shards, &mut out);
        out
    }

    fn fp32_sum(values: &[f32]) -> f32 {
        let out = summed(GradType::Fp32, &bytes(values, f32::to_le_bytes), 1);
        f32::from_le_bytes(out.try_into().unwrap())
    }

    #[test]
    fn bf16_is_rounded_once_at_the_end() {
        // Eight times 2^-9 beside 1: each alone would be rounded away, together they are two steps of bf16.
        let mut shards = vec![to_bf16(1.0)];
        shards.extend([to_bf16(1.0 / 512.0); 8]);
        let out = summed(GradType::Bf16, &bytes(&shards, u16::to_le_bytes), 1);
        let out = u16::from_le_bytes(out.try_into().unwrap());
        assert_eq!(from_bf16(out), 1.0 + 8.0 / 512.0);
    }

    #[test]
    fn the_order_is_that_of_the_ranks() {
        let expected = ((1e8f32 + 1.0) - 1e8) + 0.5;
        assert_eq!(fp32_sum(&[1e8, 1.0, -1e8, 0.5]), expected);
    }

    #[test]
    fn a_nan_is_one_nan_and_a_lone_rank_keeps_its_zero() {
        let nan = f32::from_bits(0xffc0_1234);
        let sum = fp32_sum(&[1.0, nan]);
        assert_eq!(sum.to_bits(), kernels::number::CANONICAL_NAN);
        assert_eq!(fp32_sum(&[-0.0]).to_bits(), (-0.0f32).to_bits());
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(40))]
        #[test]
        fn every_element_is_the_plain_sum(ranks in 1usize..6, extra in 0usize..70, pieces in 0usize..3, seed: u32) {
            let shard = (pieces * PIECE_ELEMS + extra).max(1);
            let mut state = seed | 1;
            let mut next = || {
                state ^= state << 13;
                state ^= state >> 17;
                state ^= state << 5;
                state as f32 / 1e9 - 2.0
            };
            let values: Vec<f32> = (0..ranks * shard).map(|_| next()).collect();
            let out = summed(GradType::Fp32, &bytes(&values, f32::to_le_bytes), shard);
            for i in 0..shard {
                let plain = (1..ranks).fold(values[i], |sum, rank| sum + values[rank * shard + i]);
                prop_assert_eq!(&out[i * 4..i * 4 + 4], &plain.to_le_bytes()[..]);
            }
        }
    }
}
