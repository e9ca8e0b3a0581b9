//! Number types of stored weights, and conversion between fp32 and their bytes.

use kernels::number::{from_bf16, from_fp16, split, to_fp16};
use safetensors::Dtype;

/// Number type that weights are read from and written in. Every value of each is exact in fp32.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Element {
    Fp32,
    Bf16,
    Fp16,
}

impl Element {
    /// Returns the type for a file's. Others are refused: fp64 would lose bits, the rest are not
    /// full-precision weights.
    pub(super) fn from_dtype(dtype: Dtype) -> Option<Self> {
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

    /// Type in a file's header.
    pub(crate) fn dtype(self) -> Dtype {
        match self {
            Self::Fp32 => Dtype::F32,
            Self::Bf16 => Dtype::BF16,
            Self::Fp16 => Dtype::F16,
        }
    }

    /// This program's name of the type.
    pub(crate) fn word(self) -> &'static str {
        match self {
            Self::Fp32 => "fp32",
            Self::Bf16 => "bf16",
            Self::Fp16 => "fp16",
        }
    }

    /// PyTorch's name of the type.
    pub(crate) fn torch_word(self) -> &'static str {
        match self {
            Self::Fp32 => "float32",
            Self::Bf16 => "bfloat16",
            Self::Fp16 => "float16",
        }
    }

    /// Appends the bytes of `numbers`, rounded to the nearest value: to bf16 as training rounds its masters,
    /// to fp16 with halves to even.
    ///
    /// # Errors
    /// A finite number would become infinite.
    pub(crate) fn encode(self, numbers: &[f32], bytes: &mut Vec<u8>) -> Result<(), f32> {
        let overflow = |number: f32, rounded: f32| number.is_finite() && !rounded.is_finite();
        for &number in numbers {
            match self {
                Self::Fp32 => bytes.extend(number.to_le_bytes()),
                Self::Bf16 => {
                    let (bits, _) = split(number);
                    if overflow(number, from_bf16(bits)) {
                        return Err(number);
                    }
                    bytes.extend(bits.to_le_bytes());
                }
                Self::Fp16 => {
                    let bits = to_fp16(number);
                    if overflow(number, from_fp16(bits)) {
                        return Err(number);
                    }
                    bytes.extend(bits.to_le_bytes());
                }
            }
        }
        Ok(())
    }

    /// Converts `bytes` to numbers exactly.
    pub(super) fn decode(self, bytes: &[u8], out: &mut [f32]) {
        assert_eq!(
            bytes.len(),
            out.len() * self.size_bytes(),
            "the output has one place for each number"
        );
        let pair = |bytes: &[u8]| u16::from_le_bytes([bytes[0], bytes[1]]);
        match self {
            Self::Fp32 => {
                for (out, bytes) in out.iter_mut().zip(bytes.chunks_exact(4)) {
                    *out = f32::from_le_bytes(bytes.try_into().expect("four bytes"));
                }
            }
            Self::Bf16 => {
                for (out, bytes) in out.iter_mut().zip(bytes.chunks_exact(2)) {
                    *out = from_bf16(pair(bytes));
                }
            }
            Self::Fp16 => {
                for (out, bytes) in out.iter_mut().zip(bytes.chunks_exact(2)) {
                    *out = from_fp16(pair(bytes));
                }
            }
        }
    }
}
