//! The embedding: rows for tokens, and for positions if those are learned.

use tch::{Kind, Tensor};

use super::documents::Batch;
use super::dropout::{DropoutSite, Masks};
use super::linear::at_least_fp32;
use super::params::Params;
use super::{ComputeError, GradSink};
use training_run::model::{ParamRole, UnitLayout};

/// Looks up the rows for `ids` [micro_batch, seq_len]: [micro_batch, seq_len, hidden_size].
pub(super) fn forward(
    params: &Params,
    ids: &Tensor,
    batch: &Batch,
    masks: &Masks,
) -> Result<Tensor, ComputeError> {
    let table = params.get(ParamRole::Embedding);
    let mut rows = Tensor::f_embedding(table, ids, -1, false, false)?;
    if let Some(positions) = params.find(ParamRole::Positions) {
        let seq_len = ids.size()[1];
        rows = rows.f_add(&match batch.own_positions(seq_len)? {
            Some(at) => Tensor::f_embedding(positions, &at, -1, false, false)?,
            None => positions.f_narrow(0, batch.first_token as i64, seq_len)?,
        })?;
    }
    masks.apply(DropoutSite::Embedding, &rows)
}

/// Adds the gradients of the unit `layout` to `grads`: `grad_output` summed for each token's row and for each
/// position's, except to the row of the token `untrained`. The sum is in fp32 at least, because a frequent token's sum in bf16 would stop growing.
pub(super) fn backward(
    layout: &UnitLayout,
    ids: &Tensor,
    batch: &Batch,
    masks: &Masks,
    grad_output: &Tensor,
    untrained: Option<usize>,
    grads: &mut GradSink,
) -> Result<(), ComputeError> {
    let wide = at_least_fp32(grad_output.kind());
    let grad = masks
        .apply(DropoutSite::Embedding, grad_output)?
        .f_to_kind(wide)?;
    let rows_of = |member: ParamRole| {
        let param = layout.find(member)?;
        Some((param, layout.params[param].shape[0] as i64))
    };
    // PyTorch's number for no row.
    let untrained = untrained.map_or(-1, |id| id as i64);
    let (table, vocab_size) = rows_of(ParamRole::Embedding).expect("an embedding has a table");
    grads.add(
        table,
        Tensor::f_embedding_dense_backward(&grad, ids, vocab_size, untrained, false)?,
    )?;
    if let Some((positions, rows)) = rows_of(ParamRole::Positions) {
        grads.add(
            positions,
            match batch.own_positions(ids.size()[1])? {
                Some(at) => Tensor::f_embedding_dense_backward(&grad, &at, rows, -1, false)?,
                None => sum_of_positions(&grad, batch.first_token, rows, wide)?,
            },
        )?;
    }
    Ok(())
}

/// Sums `grad` [micro_batch, seq_len, hidden_size], whose tokens have the positions from `first` on, over the micro-batch; rows of
/// other positions are zero: [rows, hidden_size].
fn sum_of_positions(
    grad: &Tensor,
    first: usize,
    rows: i64,
    wide: Kind,
) -> Result<Tensor, ComputeError> {
    let (_, seq_len, hidden_size) = grad.size3()?;
    let all = Tensor::f_zeros([rows, hidden_size], (wide, grad.device()))?;
    let sum = grad.f_sum_dim_intlist(&[0i64][..], false, wide)?;
    all.f_narrow(0, first as i64, seq_len)?.f_copy_(&sum)?;
    Ok(all)
}
