//! Sums a unit's gradients until they are written to one flat buffer.
//!
//! The first contribution to a parameter is kept unchanged. Further ones are summed in fp32 in order of
//! arrival, and the sum is rounded once at the end. So one micro-batch needs no fp32 buffer, and the sum of
//! several keeps what 16 bits cannot represent. A further matrix product adds itself to the sum without being
//! rounded before, unless its parameters are not adjacent.

use std::ops::Range;

use kernels::gpu::DeviceBuffer;
use kernels_torch::{device_view, with_tensor_over};
use tch::{Device, Kind, TchError, Tensor};

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
    /// The unit's flat sums in fp32 at least, from the second gradient of a parameter on.
    sums: Option<Tensor>,
    params: Vec<Sum>,
}

/// What a product does to the matrix that it is given.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum WriteMode {
    /// Replaces it.
    Replace,
    /// Is added to it, without being rounded before. The matrix is fp32 at least.
    Add,
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
        Ok(Self {
            flat: empty_sums(device, layout, kind)?,
        })
    }
}

enum Sum {
    Nothing,
    One(Tensor),
    /// In the sink's flat sums.
    Many,
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
            sums: None,
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
        if matches!(self.params[param], Sum::Nothing) {
            self.params[param] = Sum::One(grad);
            return Ok(());
        }
        let _ = self.summed(param)?.f_add_(&grad.f_reshape([-1])?)?;
        Ok(())
    }

    /// Moves the gradient of parameter number `param`, which has one, to the flat sums. Returns its place there, one row.
    fn summed(&mut self, param: usize) -> Result<Tensor, ComputeError> {
        let sums = match &self.sums {
            Some(sums) => sums.shallow_clone(),
            None => empty_sums(self.device, &self.layout, self.kind)?,
        };
        let mut place = place_of(&sums, &self.layout.params[param])?;
        self.sums = Some(sums);
        if let Sum::One(first) = std::mem::replace(&mut self.params[param], Sum::Many) {
            place.f_copy_(&first.f_reshape([-1])?)?;
        }
        Ok(place)
    }

    /// Adds the sums of `other`: those of another use of the unit. Parameters without a gradient there are unchanged.
    pub fn add_sums(&mut self, mut other: GradSink) -> Result<(), ComputeError> {
        for param in 0..other.params.len() {
            if let Some(grad) = other.take_grad(param)? {
                self.add(param, grad)?;
            }
        }
        Ok(())
    }

    /// Takes the gradient of parameter number `param`, if it has one.
    pub(super) fn take_grad(&mut self, param: usize) -> Result<Option<Tensor>, ComputeError> {
        Ok(
            match std::mem::replace(&mut self.params[param], Sum::Nothing) {
                Sum::Nothing => None,
                Sum::One(grad) => Some(grad),
                Sum::Many => {
                    let sums = self.sums.as_ref().expect("several gradients were summed");
                    Some(place_of(sums, &self.layout.params[param])?)
                }
            },
        )
    }

    /// Moves the sums to `sums`, where gradients of later micro-batches are added to them. No bit changes, because fp32
    /// represents a first 16-bit gradient exactly. The memory of earlier gradients is not used any more.
    ///
    /// # Errors
    /// Torch fails.
    pub fn keep_in(&mut self, sums: &GradSums) -> Result<(), ComputeError> {
        let before = self.sums.replace(sums.flat.shallow_clone());
        let before = before.filter(|before| before.data_ptr() != sums.flat.data_ptr());
        for param in 0..self.params.len() {
            match (&self.params[param], &before) {
                (Sum::One(_), _) => drop(self.summed(param)?),
                (Sum::Many, Some(before)) => {
                    let layout = &self.layout.params[param];
                    place_of(&sums.flat, layout)?.f_copy_(&place_of(before, layout)?)?;
                }
                (Sum::Nothing, _) | (Sum::Many, None) => {}
            }
        }
        self.flat = None;
        Ok(())
    }

    /// Adds a gradient of consecutive parameters whose rows have the same length, a matrix of all their rows. `write` is
    /// told what to do with the matrix that it receives: a part of the flat gradient or of the flat sums, if possible.
    pub(super) fn add_product(
        &mut self,
        params: Range<usize>,
        write: impl FnOnce(&Tensor, WriteMode) -> Result<(), ComputeError>,
    ) -> Result<(), ComputeError> {
        let layouts = &self.layout.params[params.clone()];
        let first_elem = layouts[0].offset_elems as i64;
        let elems = layouts.iter().map(ParamLayout::elems).sum::<usize>() as i64;
        let rows = [-1, layouts[0].shape[1] as i64];
        let matrix = |flat: &Tensor, start| flat.f_narrow(0, start, elems)?.f_view(rows);
        let adjacent = adjacent(layouts);
        let slots = &self.params[params.clone()];
        let first = slots.iter().all(|sum| matches!(sum, Sum::Nothing));
        if adjacent && !slots.iter().any(|sum| matches!(sum, Sum::Nothing)) {
            for param in params {
                let _ = self.summed(param)?;
            }
            let sums = self.sums.as_ref().expect("they were moved there");
            return write(&matrix(sums, first_elem)?, WriteMode::Add);
        }
        let empty = |elems| Tensor::f_empty([elems], (self.kind, self.device));
        let (flat, mut start) = if adjacent && first && self.device != Device::Cpu {
            let flat = match &self.flat {
                Some(flat) => flat.shallow_clone(),
                None => empty(self.layout.elems as i64)?,
            };
            self.flat = Some(flat.shallow_clone());
            (flat, first_elem)
        } else {
            (empty(elems)?, 0)
        };
        write(&matrix(&flat, start)?, WriteMode::Replace)?;
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
        for param in 0..self.params.len() {
            let grad = self.take_grad(param)?;
            let param = &self.layout.params[param];
            let grad = grad.unwrap_or_else(|| panic!("{} got no gradient", param.name));
            let mut place = place_of(flat, param)?;
            // A product may already have been written to its final place.
            if grad.data_ptr() != place.data_ptr() {
                place.f_copy_(&grad.f_reshape([-1])?)?;
            }
        }
        for (start, length) in padding(&self.layout) {
            let _ = flat.f_narrow(0, start as i64, length as i64)?.f_zero_()?;
        }
        self.flat = None;
        self.sums = None;
        Ok(())
    }
}

/// Memory for the flat sums of a unit whose gradients are stored as `kind`.
fn empty_sums(device: Device, layout: &UnitLayout, kind: Kind) -> Result<Tensor, TchError> {
    Tensor::f_empty([layout.elems as i64], (at_least_fp32(kind), device))
}

/// Returns the part of `flat`, which has a unit's length, that belongs to a parameter.
fn place_of(flat: &Tensor, param: &ParamLayout) -> Result<Tensor, TchError> {
    flat.f_narrow(0, param.offset_elems as i64, param.elems() as i64)
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
