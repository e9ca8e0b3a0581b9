//! Token ids, checked against the vocabulary once.

use std::rc::Rc;

use tch::{Device, Tensor};

use super::ComputeError;
use super::documents::{Batch, Documents};
use training_run::data::IGNORED;

/// Token ids of a micro-batch, `micro_batch` sequences of `seq_len`: inputs, or the targets to predict.
pub struct Tokens {
    pub(super) ids: Tensor,
    counted: usize,
    shape: (usize, usize),
    /// Tokens of a whole sequence.
    seq_len: usize,
    vocab_size: usize,
    batch: Batch,
}

impl Tokens {
    /// Makes inputs from `ids`, which holds the sequences one after another. Each id must be below
    /// `vocab_size`.
    ///
    /// # Errors
    /// The number of tokens is wrong, or a token is outside the vocabulary.
    pub fn inputs(
        ids: &[i64],
        micro_batch: usize,
        seq_len: usize,
        vocab_size: usize,
    ) -> Result<Self, ComputeError> {
        Self::checked(ids, micro_batch, seq_len, vocab_size, false)
    }

    /// Makes targets. Like inputs, with [`IGNORED`] where nothing is to be predicted.
    ///
    /// # Errors
    /// The number of tokens is wrong, or a token is outside the vocabulary.
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
            seq_len,
            vocab_size,
            batch: Batch::default(),
        })
    }

    /// Numbers the sequences for training, starting with `first_sample`. The numbers determine dropout;
    /// without them there is none.
    pub fn numbered(mut self, first_sample: u64) -> Self {
        self.batch.first_sample = Some(first_sample);
        self
    }

    /// Says that they are the tokens from `first` on of sequences of `seq_len` tokens, which several ranks divide among themselves.
    pub fn part_of(mut self, seq_len: usize, first: usize) -> Self {
        self.seq_len = seq_len;
        self.batch.first_token = first;
        self
    }

    /// Divides the sequences into documents, which are computed as if each were alone: positions begin again
    /// and attention does not leave a document. `starts` has their first tokens, counted over all sequences
    /// and in order; of whole sequences, if these are a [part](Tokens::part_of). The first token of a sequence begins one in any case.
    ///
    /// # Errors
    /// Out of memory.
    pub fn in_documents(mut self, starts: &[usize]) -> Result<Self, ComputeError> {
        let (micro_batch, _) = self.shape;
        let documents = Documents::new(starts, micro_batch, self.seq_len)?;
        self.batch.documents = documents.map(Rc::new);
        Ok(self)
    }

    pub(super) fn batch(&self) -> &Batch {
        &self.batch
    }

    /// Copies the ids to `device`. This happens at the start of a step, when a GPU is idle, and takes some
    /// hundred kilobytes, so pinned memory would save nothing.
    pub(super) fn ids_on(&self, device: Device) -> Result<Tensor, ComputeError> {
        if self.ids.device() == device {
            return Ok(self.ids.shallow_clone());
        }
        Ok(self.ids.f_to_device(device)?)
    }

    /// Moves the tokens to `device`, so that they are not copied at each use.
    pub(super) fn moved(mut self, device: Device) -> Result<Self, ComputeError> {
        let ids = self.ids_on(device)?;
        if let Some(documents) = &self.batch.documents {
            self.batch.documents = Some(Rc::new(documents.on(device)?));
        }
        Ok(Tokens { ids, ..self })
    }

    /// Number of tokens that count in a loss: all except the [`IGNORED`] ones.
    pub fn counted(&self) -> usize {
        self.counted
    }

    /// Number of sequences, and of tokens in each.
    pub fn shape(&self) -> (usize, usize) {
        self.shape
    }

    /// Number of tokens in a whole sequence, of which these may be a part.
    pub(super) fn seq_len(&self) -> usize {
        self.seq_len
    }

    /// Upper limit (exclusive) of the ids.
    pub(super) fn vocab_size(&self) -> usize {
        self.vocab_size
    }
}
