//! Tokens: checked against the vocabulary once, then taken as they are.

use tch::{Device, Tensor};

use super::ComputeError;

/// A target that is not counted in the loss: padding, or a prompt.
pub const IGNORED: i64 = -100;

/// A micro-batch of token numbers, `micro_batch` sequences of `seq_len`: inputs, or the targets they should predict.
pub struct Tokens {
    pub(super) ids: Tensor,
    counted: usize,
    shape: (usize, usize),
    vocab_size: usize,
    first_sample: Option<u64>,
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
            first_sample: None,
        })
    }

    /// The same for training: `first_sample` is the first sequence's number in the run, the others follow. What is left out at
    /// random is chosen by these numbers; where there are none, nothing is left out.
    pub fn numbered(self, first_sample: u64) -> Self {
        Tokens {
            first_sample: Some(first_sample),
            ..self
        }
    }

    pub(super) fn first_sample(&self) -> Option<u64> {
        self.first_sample
    }

    /// The numbers on `device`. Some hundred kilobytes, at a step's start, when a GPU has nothing else to do: pinning them
    /// would save nothing.
    pub(super) fn ids_on(&self, device: Device) -> Result<Tensor, ComputeError> {
        if self.ids.device() == device {
            return Ok(self.ids.shallow_clone());
        }
        Ok(self.ids.f_to_device(device)?)
    }

    /// The same tokens on `device`, so that each use need not copy them.
    pub(super) fn moved(self, device: Device) -> Result<Self, ComputeError> {
        let ids = self.ids_on(device)?;
        Ok(Tokens { ids, ..self })
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
