//! The kinds of numbers that a model is computed with.

/// The kind of number of parameters, activations and stored gradients.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Dtype {
    /// 16 bits: norms, rotary tables and losses still compute in fp32 where Hugging Face's model does.
    Bf16,
    /// 16 bits of which five are the exponent: losses are scaled so that small gradients do not vanish.
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

    /// The name in settings and records.
    pub fn name(self) -> &'static str {
        match self {
            Dtype::Bf16 => "bf16",
            Dtype::Fp16 => "fp16",
            Dtype::Fp32 => "fp32",
        }
    }

    /// The type of this name.
    pub fn parse(name: &str) -> Option<Self> {
        [Self::Bf16, Self::Fp16, Self::Fp32]
            .into_iter()
            .find(|dtype| dtype.name() == name)
    }
}
