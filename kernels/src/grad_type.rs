//! How gradients are stored.

/// Storage type of a gradient.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GradType {
    /// Two bytes: the upper half of an fp32.
    Bf16,
    /// Two bytes: IEEE 754 binary16.
    Fp16,
    /// Four bytes.
    Fp32,
}

impl GradType {
    /// Bytes of one element.
    pub fn elem_bytes(self) -> usize {
        match self {
            Self::Bf16 | Self::Fp16 => 2,
            Self::Fp32 => 4,
        }
    }
}
