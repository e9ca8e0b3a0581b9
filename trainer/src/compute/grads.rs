//! Where a unit's gradients are gathered until they are written out as one flat buffer.
//!
//! The first contribution to a parameter is kept as it came; from the second on they are summed in fp32 in the order
//! they come and rounded once at the end. So one micro-batch costs no fp32 buffer, and the sum of several does not
//! lose what bf16 cannot hold.

use kernels::torch::with_tensor_over;
use tch::{Kind, Tensor};

use super::{ComputeError, Dtype};
use crate::model::{ParamLayout, UnitLayout};

/// The gradients of one unit's parameters, summed over micro-batches and over uses of the unit.
pub struct GradSink {
    layout: UnitLayout,
    kind: Kind,
    params: Vec<Sum>,
}

enum Sum {
    Nothing,
    One(Tensor),
    /// Owned by us alone, fp32 at least.
    Many(Tensor),
}

impl GradSink {
    /// An empty sum for the parameters of `layout`, to be stored as `dtype`.
    pub fn new(layout: &UnitLayout, dtype: Dtype) -> Self {
        Self::of_kind(layout, dtype.kind())
    }

    pub(super) fn of_kind(layout: &UnitLayout, kind: Kind) -> Self {
        GradSink {
            layout: layout.clone(),
            kind,
            params: layout.params.iter().map(|_| Sum::Nothing).collect(),
        }
    }

    /// Adds a gradient of parameter number `param`, which nothing else writes to.
    pub(super) fn add(&mut self, param: usize, grad: Tensor) -> Result<(), ComputeError> {
        assert_eq!(
            grad.numel(),
            self.layout.params[param].elems(),
            "a gradient has its parameter's size"
        );
        let slot = &mut self.params[param];
        *slot = match std::mem::replace(slot, Sum::Nothing) {
            Sum::Nothing => Sum::One(grad),
            // Out of place: the first may be a view of something, and has the stored kind.
            Sum::One(first) => Sum::Many(widened(&first)?.f_add(&grad)?),
            Sum::Many(mut sum) => {
                let _ = sum.f_add_(&grad)?;
                Sum::Many(sum)
            }
        };
        Ok(())
    }

    /// Bytes of the unit's flat gradient.
    pub fn size_bytes(&self) -> usize {
        self.layout.elems * self.kind.elt_size_in_bytes()
    }

    /// Writes the unit's flat gradient to `out`, rounded to the stored kind, padding zero; the sink is empty after.
    /// Every parameter must have got a gradient.
    ///
    /// # Errors
    /// `out` has not [`GradSink::size_bytes`] bytes, or does not start at a multiple of an element's size.
    pub fn finish(&mut self, out: &mut [u8]) -> Result<(), ComputeError> {
        if out.len() != self.size_bytes() {
            let (unit, expected) = (self.layout.name.clone(), self.size_bytes());
            return Err(ComputeError::BufferLength {
                unit,
                expected,
                found: out.len(),
            });
        }
        with_tensor_over(out, self.kind, &[self.layout.elems as i64], |flat| {
            for (slot, param) in self.params.iter_mut().zip(&self.layout.params) {
                let grad = match std::mem::replace(slot, Sum::Nothing) {
                    Sum::One(grad) | Sum::Many(grad) => grad,
                    Sum::Nothing => panic!("{} got no gradient", param.name),
                };
                let mut place =
                    flat.f_narrow(0, param.offset_elems as i64, param.elems() as i64)?;
                place.f_copy_(&grad.f_reshape([-1])?)?;
            }
            for (start, length) in padding(&self.layout) {
                let _ = flat.f_narrow(0, start as i64, length as i64)?.f_zero_()?;
            }
            Ok(())
        })
    }
}

/// fp32 in place of bf16; wider kinds as they are.
fn widened(tensor: &Tensor) -> Result<Tensor, ComputeError> {
    Ok(match tensor.kind() {
        Kind::BFloat16 => tensor.f_to_kind(Kind::Float)?,
        _ => tensor.shallow_clone(),
    })
}

/// The parts of a unit's buffer that belong to no parameter: (start, length).
fn padding(layout: &UnitLayout) -> Vec<(usize, usize)> {
    let ends = layout.params.iter().map(|param| param.range_elems().end);
    let starts = layout
        .params
        .iter()
        .skip(1)
        .map(|param: &ParamLayout| param.offset_elems)
        .chain([layout.elems]);
    ends.zip(starts)
        .map(|(end, next)| (end, next - end))
        .filter(|&(_, length)| length > 0)
        .collect()
}
