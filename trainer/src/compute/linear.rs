//! In which kinds numbers are multiplied and summed, and the product of a projection.

use tch::{Device, Kind, Tensor};

use super::ComputeError;

/// The kind sums and norms are computed in.
pub(super) fn at_least_fp32(kind: Kind) -> Kind {
    if kind == Kind::Double {
        Kind::Double
    } else {
        Kind::Float
    }
}

/// `x` as matrix products take it. On the CPU that is fp32 for 16 bits: few CPUs multiply bf16, and the others go through it
/// element by element (17 times slower than fp32 for a whole step on an EPYC with AVX2). Products of two bf16 numbers are
/// exact in fp32, and those of two fp16 numbers too, so a result rounded to bf16 is what bf16 units with fp32 sums give, but for the order of the sums.
pub(super) fn product_input(x: &Tensor) -> Result<Tensor, ComputeError> {
    Ok(match (x.kind(), x.device()) {
        (Kind::BFloat16 | Kind::Half, Device::Cpu) => x.f_to_kind(Kind::Float)?,
        _ => x.shallow_clone(),
    })
}

/// `x` times the transposed `weight`, and `bias` added before it is rounded to `kind`; all as [`product_input`] gives them.
pub(super) fn linear(
    x: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
    kind: Kind,
) -> Result<Tensor, ComputeError> {
    Ok(x.f_linear(weight, bias)?.f_to_kind(kind)?)
}
