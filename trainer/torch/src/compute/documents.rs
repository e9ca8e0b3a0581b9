//! Documents packed into the sequences of a micro-batch: each has its own positions, and attention stays within
//! it.
//!
//! ```text
//!   sequence     [ a a a a b b b c c c c c ]      keys that a query sees:  a ▉
//!   positions      0 1 2 3 0 1 2 0 1 2 3 4                                 b   ▉
//!                                                                          c     ▉
//! ```
//!
//! A document is thus computed as if it were alone in its sequence.

use std::cell::OnceCell;
use std::rc::Rc;

use kernels_torch::{PackedDocuments, attention_of_documents, has_attention_of_documents};
use tch::{Device, Tensor};

use super::ComputeError;
use training_run::computation::LONG_DOCUMENT_TOKENS;

/// Properties of a micro-batch that blocks need besides their input.
#[derive(Clone, Default)]
pub(super) struct Batch {
    /// Number of the first sample in the run, in training.
    pub(super) first_sample: Option<u64>,
    /// `None` if each sequence is one document. They are those of whole sequences, also if this rank has a part of each.
    pub(super) documents: Option<Rc<Documents>>,
    /// First token of each sequence that this rank has.
    pub(super) first_token: usize,
}

impl Batch {
    /// Positions in their documents of the `seq_len` tokens of each sequence that this rank has; `None` if they are those from
    /// `first_token` on.
    pub(super) fn own_positions(&self, seq_len: i64) -> Result<Option<Tensor>, ComputeError> {
        let own = |documents: &Rc<Documents>| {
            Ok(documents
                .positions
                .f_narrow(1, self.first_token as i64, seq_len)?)
        };
        self.documents.as_ref().map(own).transpose()
    }
}

/// Documents of a micro-batch.
pub(super) struct Documents {
    /// Lengths of the documents of each sequence.
    lengths: Vec<Vec<i64>>,
    pub(super) longest: i64,
    /// Start of each document, counted over all sequences, and the end of the last one.
    bounds: Tensor,
    /// Position of each token in its document, [micro_batch, seq_len].
    pub(super) positions: Tensor,
    /// What cuDNN's attention needs of them, made on first use.
    packed: OnceCell<PackedDocuments>,
}

impl Documents {
    /// Makes documents that begin at the tokens `starts`, counted over all sequences and in order. The first
    /// token of a sequence always begins one. Returns `None` if there are no others.
    pub(super) fn new(
        starts: &[usize],
        micro_batch: usize,
        seq_len: usize,
    ) -> Result<Option<Self>, ComputeError> {
        if starts.iter().all(|start| start % seq_len == 0) {
            return Ok(None);
        }
        let mut begins = vec![false; micro_batch * seq_len];
        for start in starts {
            begins[*start] = true;
        }
        let (mut bounds, mut positions) = (Vec::new(), Vec::new());
        let mut lengths = vec![Vec::new(); micro_batch];
        for (at, begins) in begins.into_iter().enumerate() {
            if begins || at % seq_len == 0 {
                bounds.push(at as i32);
                lengths[at / seq_len].push(0);
            }
            let length = lengths[at / seq_len].last_mut().expect("begun above");
            positions.push(*length);
            *length += 1;
        }
        bounds.push((micro_batch * seq_len) as i32);
        Ok(Some(Self {
            longest: lengths.iter().flatten().copied().max().unwrap_or(0),
            lengths,
            packed: OnceCell::new(),
            bounds: Tensor::f_from_slice(&bounds)?,
            positions: Tensor::f_from_slice(&positions)?
                .f_view([micro_batch as i64, seq_len as i64])?,
        }))
    }

    /// Copies the documents to `device`.
    pub(super) fn on(&self, device: Device) -> Result<Self, ComputeError> {
        Ok(Self {
            lengths: self.lengths.clone(),
            longest: self.longest,
            packed: OnceCell::new(),
            bounds: self.bounds.f_to_device(device)?,
            positions: self.positions.f_to_device(device)?,
        })
    }

    /// Returns what cuDNN's attention with so many query heads needs.
    pub(super) fn packed(&self, heads: i64) -> Result<&PackedDocuments, ComputeError> {
        if let Some(packed) = self.packed.get() {
            return Ok(packed);
        }
        let lengths = self.lengths.concat();
        let packed = PackedDocuments::new(&lengths, heads, self.positions.device())?;
        Ok(self.packed.get_or_init(|| packed))
    }

    /// Returns whether a token's document is long in the mean, so that cuDNN's attention is the fastest for them.
    pub(super) fn are_long(&self) -> bool {
        let lengths = || self.lengths.iter().flatten();
        let tokens: i64 = lengths().sum();
        let squares: i64 = lengths().map(|length| length * length).sum();
        squares >= tokens * LONG_DOCUMENT_TOKENS as i64
    }

    /// Returns which keys belong to the document of a query: [micro_batch, 1, queries, keys].
    pub(super) fn same(&self) -> Result<Tensor, ComputeError> {
        let (_, seq_len) = self.positions.size2()?;
        let tokens = Tensor::f_arange(seq_len, (self.positions.kind(), self.positions.device()))?;
        let starts = tokens.f_sub(&self.positions)?;
        let same = starts
            .f_unsqueeze(-1)?
            .f_eq_tensor(&starts.f_unsqueeze(-2)?)?;
        Ok(same.f_unsqueeze(1)?)
    }

    /// Returns whether a kernel computes all documents at once for such a `query`.
    pub(super) fn at_once(query: &Tensor) -> bool {
        has_attention_of_documents(query)
    }

    /// Computes attention of [micro_batch, heads, seq_len, head_dim] with one kernel on a GPU.
    pub(super) fn attend_at_once(
        &self,
        qkv: [&Tensor; 3],
        window: Option<i64>,
    ) -> Result<Tensor, ComputeError> {
        let (micro_batch, _, seq_len, head_dim) = qkv[0].size4()?;
        // [tokens, heads, head_dim]
        let rows = |x: &Tensor| {
            let heads = x.size()[1];
            x.f_transpose(1, 2)?.f_reshape([-1, heads, head_dim])
        };
        let [query, key, value] = [rows(qkv[0])?, rows(qkv[1])?, rows(qkv[2])?];
        let output =
            attention_of_documents([&query, &key, &value], &self.bounds, self.longest, window)?;
        Ok(output
            .f_view([micro_batch, seq_len, -1, head_dim])?
            .f_transpose(1, 2)?)
    }

    /// Calls `attend` for query, key and value of each document, [1, heads, tokens, head_dim], and joins the
    /// results to [micro_batch, heads, seq_len, head_dim]. Splitting, and not narrowing, gives autograd one
    /// gradient for the whole sequence.
    pub(super) fn attend_each(
        &self,
        qkv: [&Tensor; 3],
        attend: impl Fn([&Tensor; 3]) -> Result<Tensor, ComputeError>,
    ) -> Result<Tensor, ComputeError> {
        let rows = [
            qkv[0].f_split(1, 0)?,
            qkv[1].f_split(1, 0)?,
            qkv[2].f_split(1, 0)?,
        ];
        let mut outputs = Vec::new();
        for (row, lengths) in self.lengths.iter().enumerate() {
            let parts = |x: &[Tensor]| x[row].f_split_with_sizes(&lengths[..], 2);
            let [query, key, value] = [parts(&rows[0])?, parts(&rows[1])?, parts(&rows[2])?];
            let of_row: Vec<Tensor> = (0..lengths.len())
                .map(|document| attend([&query[document], &key[document], &value[document]]))
                .collect::<Result<_, _>>()?;
            outputs.push(Tensor::f_cat(&of_row, 2)?);
        }
        Ok(Tensor::f_cat(&outputs, 0)?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn documents_are_long_if_a_token_is_in_a_long_one_in_the_mean() {
        let are_long = |starts: &[usize], seq_len| {
            let documents = Documents::new(starts, 1, seq_len).unwrap();
            documents.expect("several documents").are_long()
        };
        assert!(are_long(&[0, 3000], 3100));
        assert!(are_long(&[0, 50, 100], 5000));
        assert!(!are_long(&[0, 2047], 2560));
        let many: Vec<usize> = (0..80).map(|at| at * 100).collect();
        assert!(!are_long(&many, 8192));
    }
}
