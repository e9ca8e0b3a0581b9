//! Number types of a model's computation.

/// Number type of parameters, activations and stored gradients.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Dtype {
    /// 16 bits; norms, rotary tables and losses are computed in fp32, as in Hugging Face's models.
    Bf16,
    /// 16 bits with a 5-bit exponent: losses are scaled so that small gradients do not vanish.
    Fp16,
    /// 32 bits throughout.
    Fp32,
}

impl Dtype {
    /// Bytes of one element.
    pub fn elem_bytes(self) -> usize {
        match self {
            Dtype::Bf16 | Dtype::Fp16 => 2,
            Dtype::Fp32 => 4,
        }
    }

    /// Name in settings and records.
    pub fn name(self) -> &'static str {
        match self {
            Dtype::Bf16 => "bf16",
            Dtype::Fp16 => "fp16",
            Dtype::Fp32 => "fp32",
        }
    }

    /// Returns the type with this name.
    pub fn parse(name: &str) -> Option<Self> {
        [Self::Bf16, Self::Fp16, Self::Fp32]
            .into_iter()
            .find(|dtype| dtype.name() == name)
    }
}
