//! Kinds of numbers in which products and sums are computed, and the product of a projection.

use tch::{Device, Kind, Tensor};

use super::ComputeError;

/// Kind in which sums and norms are computed.
pub(super) fn at_least_fp32(kind: Kind) -> Kind {
    if kind == Kind::Double {
        Kind::Double
    } else {
        Kind::Float
    }
}

/// Converts `x` to the kind in which matrix products are computed. On the CPU, 16-bit kinds become fp32: few
/// CPUs multiply bf16, and the others process it element by element (17 times slower than fp32 for a whole
/// step on an EPYC with AVX2). Products of two bf16 or two fp16 numbers are exact in fp32, so a result
/// rounded to 16 bits equals that of 16-bit units with fp32 sums, except for the order of the sums.
pub(super) fn product_input(x: &Tensor) -> Result<Tensor, ComputeError> {
    Ok(match (x.kind(), x.device()) {
        (Kind::BFloat16 | Kind::Half, Device::Cpu) => x.f_to_kind(Kind::Float)?,
        _ => x.shallow_clone(),
    })
}

/// Multiplies `x` by the transposed `weight` and adds `bias` before rounding to `kind`. All inputs are in the
/// form of [`product_input`].
pub(super) fn linear(
    x: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
    kind: Kind,
) -> Result<Tensor, ComputeError> {
    Ok(x.f_linear(weight, bias)?.f_to_kind(kind)?)
}
