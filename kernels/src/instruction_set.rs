//! The processor's vector instructions, detected once at run time. The choice changes speed and no bit of a result.

/// A family of vector instructions a kernel is written for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum InstructionSet {
    /// The plain definition, without named vector instructions.
    Scalar,
    /// AVX2, FMA and F16C: eight fp32 lanes.
    Avx2,
    /// AVX-512F: sixteen fp32 lanes.
    Avx512,
}

impl InstructionSet {
    /// All sets, slowest first.
    pub const ALL: [Self; 3] = [Self::Scalar, Self::Avx2, Self::Avx512];

    /// Whether this machine supports the set.
    #[cfg(target_arch = "x86_64")]
    pub fn available(self) -> bool {
        match self {
            Self::Scalar => true,
            Self::Avx2 => {
                is_x86_feature_detected!("avx2")
                    && is_x86_feature_detected!("fma")
                    && is_x86_feature_detected!("f16c")
            }
            Self::Avx512 => Self::Avx2.available() && is_x86_feature_detected!("avx512f"),
        }
    }

    /// Whether this machine supports the set.
    #[cfg(not(target_arch = "x86_64"))]
    pub fn available(self) -> bool {
        self == Self::Scalar
    }

    /// The fastest set that this machine supports.
    pub fn best() -> Self {
        let mut fastest_first = Self::ALL.into_iter().rev();
        fastest_first
            .find(|set| set.available())
            .unwrap_or(Self::Scalar)
    }
}
