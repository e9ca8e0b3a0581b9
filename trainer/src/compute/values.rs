//! What goes in and out of the arithmetic: weights as bytes, losses as numbers, activations as nothing but a size.

use std::cell::RefCell;

use kernels::gpu::{DeviceBuffer, HostStash, Stream};
use kernels_torch::{HostBuffer, device_view, is_shared};
use tch::{Kind, Tensor};

use super::explicit::Kept;
use super::{ComputeDevice, ComputeError};
use crate::model::{Dtype, ParamLayout, UnitLayout};

/// torch's kind of `dtype`.
pub(super) fn kind_of(dtype: Dtype) -> Kind {
    match dtype {
        Dtype::Bf16 => Kind::BFloat16,
        Dtype::Fp16 => Kind::Half,
        Dtype::Fp32 => Kind::Float,
    }
}

/// Room for one unit's gathered weights: filled as bytes, computed with as parameters. Blocks are alike, so one can
/// serve one block after another.
pub struct UnitWeights {
    place: Place,
    elems: usize,
}

enum Place {
    Host(HostBuffer),
    /// `flat` is a tensor over the whole buffer.
    Gpu {
        buffer: DeviceBuffer,
        flat: Tensor,
    },
}

impl UnitWeights {
    /// Room for the weights of `layout`, zero at first.
    ///
    /// # Errors
    /// Out of memory.
    pub fn new(layout: &UnitLayout, dtype: Dtype) -> Result<Self, ComputeError> {
        Self::of_kind(layout, kind_of(dtype))
    }

    pub(super) fn of_kind(layout: &UnitLayout, kind: Kind) -> Result<Self, ComputeError> {
        Self::on(&ComputeDevice::Cpu, layout, kind, layout.elems)
    }

    /// On `device`, with room for `padded_elems`, at least the layout's.
    pub(super) fn on(
        device: &ComputeDevice,
        layout: &UnitLayout,
        kind: Kind,
        padded_elems: usize,
    ) -> Result<Self, ComputeError> {
        assert!(padded_elems >= layout.elems, "room for the whole unit");
        let place = match device {
            ComputeDevice::Cpu => Place::Host(HostBuffer::zeros(kind, padded_elems)?),
            ComputeDevice::Gpu(gpu) => {
                let buffer = gpu.alloc(padded_elems * kind.elt_size_in_bytes())?;
                let flat = device_view(&buffer, kind, 0, &[padded_elems as i64])?;
                let _ = flat.shallow_clone().f_zero_()?;
                Place::Gpu { buffer, flat }
            }
        };
        Ok(UnitWeights {
            place,
            elems: layout.elems,
        })
    }

    /// Over weights that lie at the start of `buffer` already.
    pub(super) fn over(
        buffer: &DeviceBuffer,
        layout: &UnitLayout,
        kind: Kind,
    ) -> Result<Self, ComputeError> {
        let flat = device_view(buffer, kind, 0, &[layout.elems as i64])?;
        Ok(UnitWeights {
            place: Place::Gpu {
                buffer: buffer.clone(),
                flat,
            },
            elems: layout.elems,
        })
    }

    /// The flat buffer: `layout.elems` elements of the dtype and any padding asked for, native byte order. Write the
    /// gathered weights here. Panics for weights on a GPU, which are reached by [`UnitWeights::buffer`].
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        match &mut self.place {
            Place::Host(buffer) => buffer.bytes_mut(),
            Place::Gpu { .. } => panic!("weights on a GPU must be written through buffer()"),
        }
    }

    /// The flat buffer on the host, for an operation that owns it while it is under way. Until [`UnitWeights::put_host`] gives it
    /// back there are no weights. Panics for weights on a GPU.
    pub fn take_host(&mut self) -> HostBuffer {
        match &mut self.place {
            Place::Host(buffer) => std::mem::take(buffer),
            Place::Gpu { .. } => panic!("these weights are on a GPU"),
        }
    }

    /// Gives back what [`UnitWeights::take_host`] took.
    pub fn put_host(&mut self, buffer: HostBuffer) {
        self.place = Place::Host(buffer);
    }

    /// The flat buffer on a GPU, to write the gathered weights to; `None` on the CPU. What is computed with the weights is
    /// enqueued on the default stream: a copy on another stream is ordered against it by events.
    pub fn buffer(&self) -> Option<&DeviceBuffer> {
        match &self.place {
            Place::Host(_) => None,
            Place::Gpu { buffer, .. } => Some(buffer),
        }
    }

    /// Elements of the unit, padding of the buffer not counted.
    pub fn elems(&self) -> usize {
        self.elems
    }

    /// Ends their use: until the buffer is filled again nothing may look at it, and what was kept from forward to backward owns
    /// its values. In debug builds the buffer is filled with NaN, behind what was computed on a GPU, so that a look shows.
    ///
    /// Panics if a tensor, or what a graph saved, still shares the buffer's memory: a later backward pass would take another
    /// unit's weights for these.
    ///
    /// # Errors
    /// What torch throws.
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

    /// Whether a tensor, or what a graph saved for its backward pass, shares the buffer's memory.
    pub fn is_shared(&self) -> bool {
        match &self.place {
            Place::Host(buffer) => buffer.is_shared(),
            Place::Gpu { flat, .. } => is_shared(flat),
        }
    }

    fn view(&self, offset_elems: usize, shape: &[i64]) -> Result<Tensor, ComputeError> {
        Ok(match &self.place {
            Place::Host(buffer) => buffer.view(offset_elems, shape)?,
            Place::Gpu { flat, .. } => {
                let elems = shape.iter().product();
                flat.f_narrow(0, offset_elems as i64, elems)?
                    .f_view(shape)?
            }
        })
    }

    /// Parameters that follow one another and have rows of one length (or are vectors), as one tensor of all their rows: a view
    /// where nothing lies between them, which is so when their sizes are multiples of [`crate::model::ALIGN_ELEMS`], a copy
    /// otherwise.
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

    /// A parameter as a tensor of its own that shares the memory. With `grad` it is a leaf autograd gives a gradient
    /// for: one leaf a parameter, because the gradient of a slice of one flat leaf is as long as the whole buffer.
    pub(super) fn param(&self, param: &ParamLayout, grad: bool) -> Result<Tensor, ComputeError> {
        let shape: Vec<i64> = param.shape.iter().map(|&n| n as i64).collect();
        let view = self.view(param.offset_elems, &shape)?;
        Ok(view.f_detach()?.set_requires_grad(grad))
    }
}

/// Whether nothing lies between parameters.
pub(super) fn adjacent(params: &[ParamLayout]) -> bool {
    params
        .windows(2)
        .all(|pair| pair[0].range_elems().end == pair[1].offset_elems)
}

/// A micro-batch's loss: a mean over the counted targets, in nats. On a GPU it is still being computed when this exists.
pub struct LossHandle {
    value: LossValue,
}

enum LossValue {
    Known(f64),
    /// The sum of the losses, a number on a device, and how many count.
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

    /// The number. Waits for a GPU until it is computed: ask at the end of a step.
    ///
    /// # Errors
    /// The GPU failed at this or at something before it.
    pub fn value(&self) -> Result<f64, ComputeError> {
        match &self.value {
            LossValue::Known(loss) => Ok(*loss),
            LossValue::Pending { sum, counted } => Ok(f64::try_from(sum)? / counted),
        }
    }
}

/// What a block's backward pass computes again. The bits are the same. All but `Full` need forward and backward that are written
/// out (`explicit/`), which is so on a GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, serde::Serialize)]
#[serde(rename_all = "snake_case")]
pub enum ActivationCheckpointing {
    /// Everything: only the block's input is kept.
    #[default]
    Full,
    /// Everything but query, key, value and attention's result.
    Attention,
    /// Norms and elementwise operations. The results of all matrix products are kept but the last one's, which backward does not
    /// need.
    Matmuls,
}

/// What flows between units, [micro_batch, seq_len, hidden_size]: an activation forward, its gradient backward.
pub struct Activation {
    pub(super) tensor: Tensor,
    /// The number of its first sample in a run, in training.
    pub(super) first_sample: Option<u64>,
    /// What the block that took this as its input kept.
    pub(super) kept: RefCell<Kept>,
}

impl Activation {
    pub(super) fn new(tensor: Tensor, first_sample: Option<u64>) -> Self {
        Activation {
            tensor,
            first_sample,
            kept: RefCell::default(),
        }
    }

    /// Copies it to `host_stash` as its piece of that number and lets go of it here, but for what a block kept beside it. `compute` is
    /// the stream that made it.
    ///
    /// # Errors
    /// The GPU or torch failed.
    pub fn put(
        self,
        host_stash: &mut HostStash,
        piece: usize,
        compute: &Stream,
    ) -> Result<AwayActivation, ComputeError> {
        let (kind, shape) = (self.tensor.kind(), self.tensor.size());
        device_view(host_stash.room(compute)?, kind, 0, &shape)?.f_copy_(&self.tensor)?;
        host_stash.put(piece, compute)?;
        Ok(AwayActivation {
            kind,
            shape,
            first_sample: self.first_sample,
            kept: self.kept,
        })
    }

    /// Bytes it takes, with what was kept beside it.
    pub fn size_bytes(&self) -> usize {
        size_bytes(&self.tensor) + self.kept.borrow().size_bytes()
    }
}

/// An activation whose content is on a shelf.
pub struct AwayActivation {
    kind: Kind,
    shape: Vec<i64>,
    first_sample: Option<u64>,
    kept: RefCell<Kept>,
}

impl AwayActivation {
    /// Copies it back from its piece of `host_stash`, for what is enqueued on `compute` from now on.
    ///
    /// # Errors
    /// The GPU or torch failed; too little memory.
    pub fn take(
        self,
        host_stash: &mut HostStash,
        piece: usize,
        compute: &Stream,
    ) -> Result<Activation, ComputeError> {
        let there = device_view(host_stash.take(piece, compute)?, self.kind, 0, &self.shape)?;
        let mut tensor = there.f_empty_like()?;
        tensor.f_copy_(&there)?;
        drop(there);
        host_stash.taken(piece, compute)?;
        Ok(Activation {
            tensor,
            first_sample: self.first_sample,
            kept: self.kept,
        })
    }
}

pub(super) fn size_bytes(tensor: &Tensor) -> usize {
    tensor.numel() * tensor.kind().elt_size_in_bytes()
}
