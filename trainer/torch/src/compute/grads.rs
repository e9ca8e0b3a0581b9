//! Sums a unit's gradients until they are written to one flat buffer.
//!
//! The first contribution to a parameter is kept unchanged. Further ones are summed in fp32 in order of
//! arrival, and the sum is rounded once at the end. So one micro-batch needs no fp32 buffer, and the sum of
//! several keeps what 16 bits cannot represent.

use std::ops::Range;

use kernels::gpu::DeviceBuffer;
use kernels_torch::{device_view, with_tensor_over};
use tch::{Device, Kind, Tensor};

use super::ComputeError;
use super::linear::at_least_fp32;
use super::values::kind_of;
use training_run::model::{Dtype, ParamLayout, UnitLayout, adjacent};

/// Gradients of one unit's parameters, summed over micro-batches and over uses of the unit.
pub struct GradSink {
    layout: UnitLayout,
    kind: Kind,
    device: Device,
    /// The unit's flat gradient on a GPU: its final buffer, or one made when the first product is written.
    flat: Option<Tensor>,
    params: Vec<Sum>,
}

/// fp32 memory for a unit's sums of gradients between groups of micro-batches.
pub struct GradSums {
    flat: Tensor,
}

impl GradSums {
    pub(super) fn on(
        device: Device,
        layout: &UnitLayout,
        kind: Kind,
    ) -> Result<Self, ComputeError> {
        let elems = [layout.elems as i64];
        Ok(Self {
            flat: Tensor::f_zeros(elems, (at_least_fp32(kind), device))?,
        })
    }
}

enum Sum {
    Nothing,
    One(Tensor),
    /// Owned exclusively, fp32 at least.
    Many(Tensor),
}

impl GradSink {
    /// Makes an empty sum for the parameters of `layout`, stored as `dtype`.
    pub fn new(layout: &UnitLayout, dtype: Dtype) -> Self {
        Self::on(Device::Cpu, layout, kind_of(dtype))
    }

    pub(super) fn on(device: Device, layout: &UnitLayout, kind: Kind) -> Self {
        GradSink {
            layout: layout.clone(),
            kind,
            device,
            flat: None,
            params: layout.params.iter().map(|_| Sum::Nothing).collect(),
        }
    }

    /// Makes matrix products write directly to `buffer`, which holds the flat gradient after a call of
    /// [`GradSink::finish_into`] with it. Nothing else may use the buffer until then.
    ///
    /// # Errors
    /// Torch fails.
    pub fn write_to(&mut self, buffer: &DeviceBuffer) -> Result<(), ComputeError> {
        assert!(
            self.params.iter().all(|sum| matches!(sum, Sum::Nothing)),
            "the sink is empty"
        );
        self.flat = Some(device_view(
            buffer,
            self.kind,
            0,
            &[self.layout.elems as i64],
        )?);
        Ok(())
    }

    /// Adds a gradient of parameter number `param`. Nothing else may modify the tensor.
    pub(super) fn add(&mut self, param: usize, grad: Tensor) -> Result<(), ComputeError> {
        assert_eq!(
            grad.numel(),
            self.layout.params[param].elems(),
            "a gradient has its parameter's size"
        );
        let slot = &mut self.params[param];
        *slot = match std::mem::replace(slot, Sum::Nothing) {
            Sum::Nothing => Sum::One(grad),
            // Not in place: the first gradient may be a view, and it has the stored kind.
            Sum::One(first) => Sum::Many(widened(&first)?.f_add(&grad)?),
            Sum::Many(mut sum) => {
                let _ = sum.f_add_(&grad)?;
                Sum::Many(sum)
            }
        };
        Ok(())
    }

    /// Adds the sums of `other`: those of another use of the unit. Parameters without a gradient there are unchanged.
    pub fn add_sums(&mut self, other: GradSink) -> Result<(), ComputeError> {
        for (param, sum) in other.params.into_iter().enumerate() {
            match sum {
                Sum::Nothing => {}
                Sum::One(grad) | Sum::Many(grad) => self.add(param, grad)?,
            }
        }
        Ok(())
    }

    /// Moves the sums to `sums`, where gradients of later micro-batches are added to them. No bit changes, because fp32
    /// represents a first 16-bit gradient exactly. The memory of earlier gradients is not used any more.
    ///
    /// # Errors
    /// Torch fails.
    pub fn keep_in(&mut self, sums: &GradSums) -> Result<(), ComputeError> {
        self.flat = None;
        for (slot, param) in self.params.iter_mut().zip(&self.layout.params) {
            let grad = match std::mem::replace(slot, Sum::Nothing) {
                Sum::Nothing => continue,
                Sum::One(grad) | Sum::Many(grad) => grad,
            };
            let (start, elems) = (param.offset_elems as i64, param.elems() as i64);
            let mut place = sums.flat.f_narrow(0, start, elems)?.f_view_as(&grad)?;
            if grad.data_ptr() != place.data_ptr() {
                place.f_copy_(&grad)?;
            }
            *slot = Sum::Many(place);
        }
        Ok(())
    }

    /// Adds a gradient of consecutive parameters whose rows have the same length. `write` overwrites the
    /// matrix of all their rows that it receives; if possible, that matrix is a part of the flat buffer
    /// itself.
    pub(super) fn add_product(
        &mut self,
        params: Range<usize>,
        write: impl FnOnce(&Tensor) -> Result<(), ComputeError>,
    ) -> Result<(), ComputeError> {
        let layouts = &self.layout.params[params.clone()];
        let first_elem = layouts[0].offset_elems;
        let elems: usize = layouts.iter().map(ParamLayout::elems).sum();
        let matrix = [-1, layouts[0].shape[1] as i64];
        let nothing = |sum: &Sum| matches!(sum, Sum::Nothing);
        let direct = adjacent(layouts) && self.params[params.clone()].iter().all(nothing);
        let empty = |elems: usize| Tensor::f_empty([elems as i64], (self.kind, self.device));
        let (flat, start) = if direct && self.device != Device::Cpu {
            let flat = match &self.flat {
                Some(flat) => flat.shallow_clone(),
                None => empty(self.layout.elems)?,
            };
            self.flat = Some(flat.shallow_clone());
            (flat, first_elem)
        } else {
            (empty(elems)?, 0)
        };
        write(
            &flat
                .f_narrow(0, start as i64, elems as i64)?
                .f_view(matrix)?,
        )?;
        let mut start = start as i64;
        for param in params {
            let elems = self.layout.params[param].elems() as i64;
            self.add(param, flat.f_narrow(0, start, elems)?)?;
            start += elems;
        }
        Ok(())
    }

    /// Adds a gradient of consecutive vectors, given as one vector: the biases of a joined product.
    pub(super) fn add_parts(
        &mut self,
        params: Range<usize>,
        grad: &Tensor,
    ) -> Result<(), ComputeError> {
        let mut start = 0;
        for param in params {
            let elems = self.layout.params[param].elems() as i64;
            self.add(param, grad.f_narrow(0, start, elems)?)?;
            start += elems;
        }
        Ok(())
    }

    /// Bytes of the unit's flat gradient.
    pub fn size_bytes(&self) -> usize {
        self.layout.elems * self.kind.elt_size_in_bytes()
    }

    /// Writes the unit's flat gradient to `out`, rounded to the stored kind, with zero padding. The sink is
    /// empty afterwards. Every parameter must have a gradient.
    ///
    /// # Errors
    /// `out` does not have [`GradSink::size_bytes`] bytes, or is not aligned to an element.
    pub fn finish(&mut self, out: &mut [u8]) -> Result<(), ComputeError> {
        if out.len() != self.size_bytes() {
            let (unit, expected) = (self.layout.name.clone(), self.size_bytes());
            return Err(ComputeError::BufferLength {
                unit,
                expected,
                found: out.len(),
            });
        }
        let (kind, shape) = (self.kind, [self.layout.elems as i64]);
        with_tensor_over(out, kind, &shape, |flat| self.gather(flat))
    }

    /// Like [`GradSink::finish`], into memory of the GPU that computed. Elements from the unit's end to
    /// `padded_elems` are zero. All work is enqueued on the default stream, without waiting.
    ///
    /// Panics if the buffer is shorter than `padded_elems`, or these are fewer than the unit's elements.
    ///
    /// # Errors
    /// Torch fails.
    pub fn finish_into(
        &mut self,
        buffer: &DeviceBuffer,
        padded_elems: usize,
    ) -> Result<(), ComputeError> {
        let elems = self.layout.elems;
        assert!(padded_elems >= elems, "room for the whole unit");
        let flat = device_view(buffer, self.kind, 0, &[padded_elems as i64])?;
        self.gather(&flat.f_narrow(0, 0, elems as i64)?)?;
        if padded_elems > elems {
            let rest = (padded_elems - elems) as i64;
            let _ = flat.f_narrow(0, elems as i64, rest)?.f_zero_()?;
        }
        Ok(())
    }

    /// Moves all gradients into `flat`, which has the unit's length.
    fn gather(&mut self, flat: &Tensor) -> Result<(), ComputeError> {
        for (slot, param) in self.params.iter_mut().zip(&self.layout.params) {
            let grad = match std::mem::replace(slot, Sum::Nothing) {
                Sum::One(grad) | Sum::Many(grad) => grad,
                Sum::Nothing => panic!("{} got no gradient", param.name),
            };
            let mut place = flat.f_narrow(0, param.offset_elems as i64, param.elems() as i64)?;
            // A product may already have been written to its final place.
            if grad.data_ptr() != place.data_ptr() {
                place.f_copy_(&grad.f_reshape([-1])?)?;
            }
        }
        for (start, length) in padding(&self.layout) {
            let _ = flat.f_narrow(0, start as i64, length as i64)?.f_zero_()?;
        }
        self.flat = None;
        Ok(())
    }
}

/// Converts 16-bit tensors to fp32; others are unchanged.
fn widened(tensor: &Tensor) -> Result<Tensor, ComputeError> {
    Ok(match tensor.kind() {
        Kind::BFloat16 | Kind::Half => tensor.f_to_kind(Kind::Float)?,
        _ => tensor.shallow_clone(),
    })
}

/// Returns the parts of a unit's buffer that belong to no parameter: (start, length).
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
