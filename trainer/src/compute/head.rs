//! The final norm, the output projection and the loss. Logits are the largest thing a step computes (a row has
//! `vocab_size` numbers), so they exist for one slice of rows at a time: forward, loss, gradient, gone.

use kernels::torch::vjp;
use tch::{Kind, Reduction, Tensor};

use super::ComputeError;
use super::block::{at_least_fp32, linear, product_input, rms_norm};
use super::tokens::IGNORED;

/// Logits held at a time: 16 MiB in fp32, some copies of it in flight.
pub(super) const LOGITS_ELEMS_MAX: usize = 4 << 20;

/// The sum of the counted tokens' losses, in fp64 over fp32 losses in the order of rows.
pub(super) fn loss_sum(
    rows: &Tensor,
    norm: &Tensor,
    projection: &Tensor,
    eps: f64,
    targets: &Tensor,
    logits_elems_max: usize,
) -> Result<f64, ComputeError> {
    let normed = product_input(&rms_norm(rows, norm, eps)?)?;
    let projection = product_input(projection)?;
    let mut sum = 0.0;
    for (start, length) in slices(rows.size()[0], projection.size()[0], logits_elems_max) {
        let losses = row_losses(
            &normed.f_narrow(0, start, length)?,
            &projection,
            &targets.f_narrow(0, start, length)?,
            rows.kind(),
        )?;
        sum += f64::try_from(losses.f_sum(Kind::Double)?)?;
    }
    Ok(sum)
}

/// What the head's backward pass gives.
pub(super) struct HeadGrads {
    /// The sum of the counted tokens' losses.
    pub(super) loss_sum: f64,
    /// Gradient of the rows, [rows, hidden_size].
    pub(super) rows: Tensor,
    /// Gradient of the final norm's weight.
    pub(super) norm: Tensor,
    /// Gradient of the projection; not yet rounded to the kind it is stored in where it was computed in fp32.
    pub(super) projection: Tensor,
}

/// Loss and gradients of `token_weight` times the sum of the counted tokens' losses. `rows` is [rows, hidden_size],
/// `norm` is a leaf that wants a gradient, `targets` [rows].
pub(super) fn loss_and_grads(
    rows: &Tensor,
    norm: &Tensor,
    projection: &Tensor,
    eps: f64,
    targets: &Tensor,
    token_weight: f64,
    logits_elems_max: usize,
) -> Result<HeadGrads, ComputeError> {
    let rows = rows.f_detach()?.set_requires_grad(true);
    let normed = rms_norm(&rows, norm, eps)?;
    let leaf = product_input(&normed.f_detach()?)?;
    let projection = product_input(&projection.f_detach()?)?.set_requires_grad(true);
    let mut loss_sum = 0.0;
    let mut normed_grads = Vec::new();
    let mut projection_grad: Option<Tensor> = None;
    for (start, length) in slices(rows.size()[0], projection.size()[0], logits_elems_max) {
        let slice = leaf.f_narrow(0, start, length)?.set_requires_grad(true);
        let losses = row_losses(
            &slice,
            &projection,
            &targets.f_narrow(0, start, length)?,
            rows.kind(),
        )?;
        loss_sum += f64::try_from(losses.f_detach()?.f_sum(Kind::Double)?)?;
        let weights = losses.f_detach()?.f_full_like(token_weight)?;
        let mut grads = vjp(&[&losses], &[&weights], &[&slice, &projection])?.into_iter();
        let (slice_grad, grad) = (
            grads.next().expect("two inputs"),
            grads.next().expect("two inputs"),
        );
        normed_grads.push(slice_grad);
        projection_grad = Some(match projection_grad {
            None => grad,
            Some(sum) => sum.f_to_kind(at_least_fp32(sum.kind()))?.f_add_(&grad)?,
        });
    }
    let normed_grad = Tensor::f_cat(&normed_grads, 0)?.f_to_kind(rows.kind())?;
    let mut grads = vjp(&[&normed], &[&normed_grad], &[&rows, norm])?.into_iter();
    Ok(HeadGrads {
        loss_sum,
        rows: grads.next().expect("two inputs"),
        norm: grads.next().expect("two inputs"),
        projection: projection_grad.expect("a batch has rows"),
    })
}

/// Each row's loss in fp32 at least, from logits rounded to `kind`; 0 for an ignored target.
fn row_losses(
    normed: &Tensor,
    projection: &Tensor,
    targets: &Tensor,
    kind: Kind,
) -> Result<Tensor, ComputeError> {
    let logits = linear(normed, projection, kind)?;
    let logits = logits.f_to_kind(at_least_fp32(logits.kind()))?;
    Ok(logits.f_cross_entropy_loss(targets, None::<Tensor>, Reduction::None, IGNORED, 0.0)?)
}

/// Cuts `rows` so that a slice's logits stay within `logits_elems_max`: (start, length), at least one row each.
pub(super) fn slices(
    rows: i64,
    vocab_size: i64,
    logits_elems_max: usize,
) -> impl Iterator<Item = (i64, i64)> {
    let length = (logits_elems_max as i64 / vocab_size).max(1);
    (0..rows)
        .step_by(length as usize)
        .map(move |start| (start, length.min(rows - start)))
}
