//! The types of numbers that weights are kept in, and fp32 from and to their bytes.

use half::{bf16, f16};
use safetensors::Dtype;

/// A type that weights are read from and written in. Every value of each is one of fp32's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Element {
    Fp32,
    Bf16,
    Fp16,
}

impl Element {
    /// Of the same type in a file. The others are refused: fp64 would lose bits, the rest are no weights of full precision.
    pub(super) fn of(dtype: Dtype) -> Option<Self> {
        match dtype {
            Dtype::F32 => Some(Self::Fp32),
            Dtype::BF16 => Some(Self::Bf16),
            Dtype::F16 => Some(Self::Fp16),
            _ => None,
        }
    }

    /// Bytes of one number.
    pub(crate) fn size_bytes(self) -> usize {
        match self {
            Self::Fp32 => 4,
            Self::Bf16 | Self::Fp16 => 2,
        }
    }

    /// The numbers in `bytes`, exactly.
    pub(super) fn decode(self, bytes: &[u8], out: &mut [f32]) {
        assert_eq!(bytes.len(), out.len() * self.size_bytes(), "one each");
        let pair = |bytes: &[u8]| u16::from_le_bytes([bytes[0], bytes[1]]);
        match self {
            Self::Fp32 => {
                for (out, bytes) in out.iter_mut().zip(bytes.chunks_exact(4)) {
                    *out = f32::from_le_bytes(bytes.try_into().expect("four bytes"));
                }
            }
            Self::Bf16 => {
                for (out, bytes) in out.iter_mut().zip(bytes.chunks_exact(2)) {
                    *out = bf16::from_bits(pair(bytes)).to_f32();
                }
            }
            Self::Fp16 => {
                for (out, bytes) in out.iter_mut().zip(bytes.chunks_exact(2)) {
                    *out = f16::from_bits(pair(bytes)).to_f32();
                }
            }
        }
    }
}
