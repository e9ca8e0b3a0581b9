//! Matrix products in the kind of their factors, summed in fp32 at least and rounded once.

use tch::{Device, Kind, Tensor};

use crate::compute::ComputeError;
use crate::compute::linear::product_input;

/// Multiplies `x` [n, k] by the transposed `weight` [m, k].
pub(super) fn times_transposed(x: &Tensor, weight: &Tensor) -> Result<Tensor, ComputeError> {
    times(x, &transposed(weight)?)
}

/// Like [`times_transposed`], adding `bias`, `[m]`, to each row before rounding.
pub(super) fn times_transposed_plus(
    x: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
) -> Result<Tensor, ComputeError> {
    let Some(bias) = bias else {
        return times_transposed(x, weight);
    };
    let weight = transposed(&product_input(weight)?)?;
    let product = product_input(bias)?.f_addmm(&product_input(x)?, &weight)?;
    Ok(product.f_to_kind(x.kind())?)
}

/// Multiplies `a` [n, k] by `b` [k, m].
pub(super) fn times(a: &Tensor, b: &Tensor) -> Result<Tensor, ComputeError> {
    let product = product_input(a)?.f_mm(&product_input(b)?)?;
    Ok(product.f_to_kind(a.kind())?)
}

/// Writes a weight's gradient, the transposed `grad` [n, m] times `x` [n, k], to `out` [m, k] in their kind.
pub(super) fn weight_grad(out: &Tensor, grad: &Tensor, x: &Tensor) -> Result<(), ComputeError> {
    if widens(x) {
        let product = transposed(&product_input(grad)?)?.f_mm(&product_input(x)?)?;
        out.shallow_clone().f_copy_(&product)?;
    } else {
        let _ = transposed(grad)?.f_mm_out(out, x)?;
    }
    Ok(())
}

/// Adds a weight's gradient to `sum` [m, k] in fp32 at least, without rounding to less.
pub(super) fn weight_grad_added(
    sum: &Tensor,
    grad: &Tensor,
    x: &Tensor,
) -> Result<(), ComputeError> {
    if sum.kind() == x.kind() {
        let _ = sum.f_addmm_out(sum, &transposed(grad)?, x)?;
    } else if widens(x) {
        let _ = sum.f_addmm_out(sum, &transposed(&product_input(grad)?)?, &product_input(x)?)?;
    } else {
        let _ = sum.f_addmm_dtype_out(sum, &transposed(grad)?, x, sum.kind())?;
    }
    Ok(())
}

fn transposed(x: &Tensor) -> Result<Tensor, ComputeError> {
    Ok(x.f_transpose(0, 1)?)
}

/// Returns whether products of this tensor use fp32 copies.
fn widens(x: &Tensor) -> bool {
    matches!(x.kind(), Kind::BFloat16 | Kind::Half) && x.device() == Device::Cpu
}
