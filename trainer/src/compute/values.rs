//! What goes in and out of the arithmetic: weights as bytes, tokens as numbers, activations as nothing but a size.

use kernels::torch::HostBuffer;
use tch::{Kind, Tensor};

use super::ComputeError;
use crate::model::{ParamLayout, UnitLayout};

/// The kind of number of parameters, activations and stored gradients.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Dtype {
    /// 16 bits: norms, rotary tables and losses still compute in fp32 where Hugging Face's model does.
    Bf16,
    /// 32 bits throughout.
    Fp32,
}

impl Dtype {
    /// Bytes of one element.
    pub fn elem_bytes(self) -> usize {
        match self {
            Dtype::Bf16 => 2,
            Dtype::Fp32 => 4,
        }
    }

    pub(super) fn kind(self) -> Kind {
        match self {
            Dtype::Bf16 => Kind::BFloat16,
            Dtype::Fp32 => Kind::Float,
        }
    }
}

/// Room for one unit's gathered weights: filled as bytes, computed with as parameters. Blocks are alike, so one can
/// serve one block after another.
pub struct UnitWeights {
    buffer: HostBuffer,
}

impl UnitWeights {
    /// Room for the weights of `layout`, zero at first.
    ///
    /// # Errors
    /// Out of memory.
    pub fn new(layout: &UnitLayout, dtype: Dtype) -> Result<Self, ComputeError> {
        Self::of_kind(layout, dtype.kind())
    }

    pub(super) fn of_kind(layout: &UnitLayout, kind: Kind) -> Result<Self, ComputeError> {
        Ok(UnitWeights {
            buffer: HostBuffer::zeros(kind, layout.elems)?,
        })
    }

    /// The flat buffer: `layout.elems` elements of the dtype, native byte order. Write the gathered weights here.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        self.buffer.bytes_mut()
    }

    /// Elements of the flat buffer.
    pub fn elems(&self) -> usize {
        self.buffer.elems()
    }

    /// A parameter as a tensor of its own that shares the memory. With `grad` it is a leaf autograd gives a gradient
    /// for: one leaf a parameter, because the gradient of a slice of one flat leaf is as long as the whole buffer.
    pub(super) fn param(&self, param: &ParamLayout, grad: bool) -> Result<Tensor, ComputeError> {
        let shape: Vec<i64> = param.shape.iter().map(|&n| n as i64).collect();
        Ok(self
            .buffer
            .view(param.offset_elems, &shape)?
            .f_detach()?
            .set_requires_grad(grad))
    }
}

/// A target that is not counted in the loss: padding, or a prompt.
pub const IGNORED: i64 = -100;

/// A micro-batch of token numbers, `micro_batch` sequences of `seq_len`: inputs, or the targets they should predict.
pub struct Tokens {
    pub(super) ids: Tensor,
    counted: usize,
    shape: (usize, usize),
    vocab_size: usize,
}

impl Tokens {
    /// Inputs: `ids` holds the sequences one after another, each number below `vocab_size`.
    ///
    /// # Errors
    /// Too few or too many tokens, or one outside the vocabulary.
    pub fn inputs(
        ids: &[i64],
        micro_batch: usize,
        seq_len: usize,
        vocab_size: usize,
    ) -> Result<Self, ComputeError> {
        Self::checked(ids, micro_batch, seq_len, vocab_size, false)
    }

    /// Targets: as inputs, and [`IGNORED`] where nothing is to be predicted.
    ///
    /// # Errors
    /// Too few or too many tokens, or one outside the vocabulary.
    pub fn targets(
        ids: &[i64],
        micro_batch: usize,
        seq_len: usize,
        vocab_size: usize,
    ) -> Result<Self, ComputeError> {
        Self::checked(ids, micro_batch, seq_len, vocab_size, true)
    }

    fn checked(
        ids: &[i64],
        micro_batch: usize,
        seq_len: usize,
        vocab_size: usize,
        ignored: bool,
    ) -> Result<Self, ComputeError> {
        if ids.is_empty() || Some(ids.len()) != micro_batch.checked_mul(seq_len) {
            return Err(ComputeError::TokenCount {
                count: ids.len(),
                micro_batch,
                seq_len,
            });
        }
        let inside = |id: i64| usize::try_from(id).is_ok_and(|id| id < vocab_size);
        if let Some(position) = ids
            .iter()
            .position(|&id| !(inside(id) || ignored && id == IGNORED))
        {
            return Err(ComputeError::TokenOutside {
                id: ids[position],
                position,
                vocab_size,
            });
        }
        let counted = ids.iter().filter(|&&id| id != IGNORED).count();
        let tensor = Tensor::f_from_slice(ids)?.f_view([micro_batch as i64, seq_len as i64])?;
        Ok(Tokens {
            ids: tensor,
            counted,
            shape: (micro_batch, seq_len),
            vocab_size,
        })
    }

    /// Tokens that count in a loss: all but the [`IGNORED`] ones.
    pub fn counted(&self) -> usize {
        self.counted
    }

    /// Sequences, and tokens of each.
    pub fn shape(&self) -> (usize, usize) {
        self.shape
    }

    /// All numbers are below this.
    pub(super) fn vocab_size(&self) -> usize {
        self.vocab_size
    }
}

/// What flows between units, [micro_batch, seq_len, hidden_size]: an activation forward, its gradient backward.
pub struct Activation(pub(super) Tensor);

impl Activation {
    /// Bytes it takes.
    pub fn size_bytes(&self) -> usize {
        self.0.numel() * self.0.kind().elt_size_in_bytes()
    }
}
