//! Inputs and outputs of the computation: weights as bytes, losses as numbers, activations as opaque values.

use std::cell::RefCell;

use kernels::gpu::DeviceBuffer;
use kernels_torch::{HostBuffer, device_view, is_shared, with_tensor_over};
use tch::{Kind, Tensor};

use super::documents::Batch;
use super::explicit::KeptActivations;
use super::{ComputeDevice, ComputeError};
use training_run::model::{Dtype, ParamLayout, UnitLayout, adjacent};
use training_state::tile_stash::StashBuffer;

/// Returns torch's kind for `dtype`.
pub(super) fn kind_of(dtype: Dtype) -> Kind {
    match dtype {
        Dtype::Bf16 => Kind::BFloat16,
        Dtype::Fp16 => Kind::Half,
        Dtype::Fp32 => Kind::Float,
    }
}

/// Memory for one unit's gathered weights, filled as bytes and used as parameters. Blocks have the same
/// layout, so one buffer can serve several blocks in turn.
pub struct UnitWeights {
    place: WeightsMemory,
    elems: usize,
}

enum WeightsMemory {
    Host(HostBuffer),
    /// `flat` is a tensor over the whole buffer.
    Gpu {
        buffer: DeviceBuffer,
        flat: Tensor,
    },
}

impl UnitWeights {
    /// Allocates zeroed memory for the weights of `layout`.
    ///
    /// # Errors
    /// Out of memory.
    pub fn new(layout: &UnitLayout, dtype: Dtype) -> Result<Self, ComputeError> {
        Self::of_kind(layout, kind_of(dtype))
    }

    pub(super) fn of_kind(layout: &UnitLayout, kind: Kind) -> Result<Self, ComputeError> {
        Self::on(&ComputeDevice::Cpu, layout, kind, layout.elems)
    }

    /// Allocates memory on `device` for `padded_elems` elements, at least as many as in the layout.
    pub(super) fn on(
        device: &ComputeDevice,
        layout: &UnitLayout,
        kind: Kind,
        padded_elems: usize,
    ) -> Result<Self, ComputeError> {
        assert!(padded_elems >= layout.elems, "room for the whole unit");
        let place = match device {
            ComputeDevice::Cpu => WeightsMemory::Host(HostBuffer::zeros(kind, padded_elems)?),
            ComputeDevice::Gpu(gpu) => {
                let buffer = gpu.alloc(padded_elems * kind.elt_size_in_bytes())?;
                let flat = device_view(&buffer, kind, 0, &[padded_elems as i64])?;
                let _ = flat.shallow_clone().f_zero_()?;
                WeightsMemory::Gpu { buffer, flat }
            }
        };
        Ok(UnitWeights {
            place,
            elems: layout.elems,
        })
    }

    /// Makes a view of weights that are already at the start of `buffer`.
    pub(super) fn over(
        buffer: &DeviceBuffer,
        layout: &UnitLayout,
        kind: Kind,
    ) -> Result<Self, ComputeError> {
        let flat = device_view(buffer, kind, 0, &[layout.elems as i64])?;
        Ok(UnitWeights {
            place: WeightsMemory::Gpu {
                buffer: buffer.clone(),
                flat,
            },
            elems: layout.elems,
        })
    }

    /// Returns the flat buffer, for writing the gathered weights: `layout.elems` elements of the dtype and
    /// any requested padding, in native byte order. Panics for weights on a GPU, whose buffer is returned by
    /// [`UnitWeights::buffer`].
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        match &mut self.place {
            WeightsMemory::Host(buffer) => buffer.bytes_mut(),
            WeightsMemory::Gpu { .. } => {
                panic!("weights on a GPU must be written through buffer()")
            }
        }
    }

    /// Takes the flat buffer on the host, for an operation that owns it while it runs. There are no weights
    /// until [`UnitWeights::put_host`] returns it. Panics for weights on a GPU.
    pub fn take_host(&mut self) -> HostBuffer {
        match &mut self.place {
            WeightsMemory::Host(buffer) => std::mem::take(buffer),
            WeightsMemory::Gpu { .. } => panic!("these weights are on a GPU"),
        }
    }

    /// Returns the buffer taken by [`UnitWeights::take_host`].
    pub fn put_host(&mut self, buffer: HostBuffer) {
        self.place = WeightsMemory::Host(buffer);
    }

    /// Returns the flat buffer on a GPU, for writing the gathered weights; `None` on the CPU. Computation
    /// with the weights is enqueued on the default stream; a copy on another stream must be ordered by
    /// events.
    pub fn buffer(&self) -> Option<&DeviceBuffer> {
        match &self.place {
            WeightsMemory::Host(_) => None,
            WeightsMemory::Gpu { buffer, .. } => Some(buffer),
        }
    }

    /// Number of elements of the unit, without the buffer's padding.
    pub fn elems(&self) -> usize {
        self.elems
    }

    /// Ends the use of the weights: nothing may read the buffer until it is filled again. Values kept from
    /// forward to backward own their memory. Debug builds fill the buffer with NaN, after the work enqueued
    /// on a GPU, so that a wrong use becomes visible.
    ///
    /// Panics if a tensor or a saved graph still shares the buffer's memory, because a later backward pass
    /// would read another unit's weights.
    ///
    /// # Errors
    /// Torch fails.
    pub fn give_back(&mut self) -> Result<(), ComputeError> {
        assert!(
            !self.is_shared(),
            "the weights of a unit are released while a tensor still refers to them"
        );
        if cfg!(debug_assertions) {
            let mut unit = self.view(0, &[self.elems as i64])?;
            let _ = unit.f_fill_(f64::NAN)?;
        }
        Ok(())
    }

    /// Returns whether a tensor or a saved graph shares the buffer's memory.
    pub fn is_shared(&self) -> bool {
        match &self.place {
            WeightsMemory::Host(buffer) => buffer.is_shared(),
            WeightsMemory::Gpu { flat, .. } => is_shared(flat),
        }
    }

    fn view(&self, offset_elems: usize, shape: &[i64]) -> Result<Tensor, ComputeError> {
        Ok(match &self.place {
            WeightsMemory::Host(buffer) => buffer.view(offset_elems, shape)?,
            WeightsMemory::Gpu { flat, .. } => {
                let elems = shape.iter().product();
                flat.f_narrow(0, offset_elems as i64, elems)?
                    .f_view(shape)?
            }
        })
    }

    /// Returns consecutive parameters whose rows have the same length (or vectors) as one tensor of all their
    /// rows. This is a view if they are adjacent, which is so if their sizes are multiples of
    /// [`training_run::model::ALIGN_ELEMS`], otherwise a copy.
    pub(super) fn joined(&self, params: &[ParamLayout]) -> Result<Tensor, ComputeError> {
        if adjacent(params) {
            let rows: usize = params.iter().map(|param| param.shape[0]).sum();
            let row = &params[0].shape[1..];
            let shape: Vec<i64> = [&[rows], row].concat().iter().map(|&n| n as i64).collect();
            return self.view(params[0].offset_elems, &shape);
        }
        let parts: Vec<Tensor> = params
            .iter()
            .map(|param| self.param(param, false))
            .collect::<Result<_, _>>()?;
        Ok(Tensor::f_cat(&parts, 0)?)
    }

    /// Returns a parameter as a tensor that shares the memory. With `grad` it is a leaf of autograd. Each
    /// parameter is its own leaf, because the gradient of a slice of one flat leaf would be as long as the
    /// whole buffer.
    pub(super) fn param(&self, param: &ParamLayout, grad: bool) -> Result<Tensor, ComputeError> {
        let shape: Vec<i64> = param.shape.iter().map(|&n| n as i64).collect();
        let view = self.view(param.offset_elems, &shape)?;
        Ok(view.f_detach()?.set_requires_grad(grad))
    }
}

/// Loss of a micro-batch: mean over the counted targets, in nats. On a GPU the computation may still be
/// running.
pub struct LossHandle {
    value: LossValue,
}

enum LossValue {
    Known(f64),
    /// Sum of the losses, a number on a device, and the number of counted targets.
    Pending {
        sum: Tensor,
        counted: f64,
    },
}

impl LossHandle {
    pub(super) fn known(loss: f64) -> Self {
        LossHandle {
            value: LossValue::Known(loss),
        }
    }

    pub(super) fn pending(sum: Tensor, counted: f64) -> Self {
        LossHandle {
            value: LossValue::Pending { sum, counted },
        }
    }

    /// Returns the number. Waits for a GPU, so call it at the end of a step.
    ///
    /// # Errors
    /// The GPU failed in this or an earlier operation.
    pub fn value(&self) -> Result<f64, ComputeError> {
        match &self.value {
            LossValue::Known(loss) => Ok(*loss),
            LossValue::Pending { sum, counted } => Ok(f64::try_from(sum)? / counted),
        }
    }
}

/// Tensor between units, [micro_batch, seq_len, hidden_size]: an activation in forward, its gradient in
/// backward.
pub struct Activation {
    pub(super) tensor: Tensor,
    pub(super) batch: Batch,
    /// Values kept by the block that took this as its input.
    pub(super) kept: RefCell<KeptActivations>,
}

impl Activation {
    pub(super) fn new(tensor: Tensor, batch: &Batch) -> Self {
        Activation {
            tensor,
            batch: batch.clone(),
            kept: RefCell::default(),
        }
    }

    /// Copies the activation to `to` and releases its memory here, except for what a block kept. On a GPU the copy is enqueued on the
    /// default stream.
    ///
    /// # Errors
    /// Torch failed.
    pub fn leave(self, to: StashBuffer<'_>) -> Result<AwayActivation, ComputeError> {
        let (kind, shape) = (self.tensor.kind(), self.tensor.size());
        in_buffer(to, kind, &shape, |there| Ok(there.f_copy_(&self.tensor)?))?;
        Ok(AwayActivation {
            kind,
            shape,
            batch: self.batch,
            kept: self.kept,
        })
    }

    /// Bytes of the activation, including what was kept with it.
    pub fn size_bytes(&self) -> usize {
        size_bytes(&self.tensor) + self.kept.borrow().size_bytes()
    }
}

/// Activation whose content is elsewhere.
pub struct AwayActivation {
    kind: Kind,
    shape: Vec<i64>,
    batch: Batch,
    kept: RefCell<KeptActivations>,
}

impl AwayActivation {
    /// Copies the activation back from `from`, for work enqueued on the default stream from now on.
    ///
    /// # Errors
    /// Torch failed; out of memory.
    pub fn bring_back(self, from: StashBuffer<'_>) -> Result<Activation, ComputeError> {
        let tensor = in_buffer(from, self.kind, &self.shape, |there| {
            let mut tensor = there.f_empty_like()?;
            tensor.f_copy_(there)?;
            Ok(tensor)
        })?;
        Ok(Activation {
            tensor,
            batch: self.batch,
            kept: self.kept,
        })
    }
}

/// Calls `f` with a tensor at the start of `buffer`.
fn in_buffer<T>(
    buffer: StashBuffer<'_>,
    kind: Kind,
    shape: &[i64],
    f: impl FnOnce(&mut Tensor) -> Result<T, ComputeError>,
) -> Result<T, ComputeError> {
    match buffer {
        StashBuffer::Host(bytes) => with_tensor_over(bytes, kind, shape, f),
        StashBuffer::Gpu(buffer) => f(&mut device_view(buffer, kind, 0, shape)?),
    }
}

pub(super) fn size_bytes(tensor: &Tensor) -> usize {
    tensor.numel() * tensor.kind().elt_size_in_bytes()
}
