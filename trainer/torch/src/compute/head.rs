//! The final norm, the output projection and the loss. Logits are the largest tensor of a step (a row has
//! `vocab_size` numbers), so they exist for one slice of rows at a time, from forward to gradient.

use kernels_torch::vjp;
use tch::{Kind, Reduction, Tensor};

use super::ComputeError;
use super::linear::{at_least_fp32, linear, product_input};
use super::norm::{NormWeights, norm};
use training_run::data::IGNORED;
use training_run::model::ModelConfig;

/// Returns the sum of the losses of counted tokens, in fp64 over fp32 losses in the order of rows.
pub(super) fn loss_sum(
    config: &ModelConfig,
    rows: &Tensor,
    norm_weights: &NormWeights,
    projection: &Tensor,
    targets: &Tensor,
    logits_elems_max: usize,
) -> Result<f64, ComputeError> {
    let normed = product_input(&norm(config, rows, norm_weights)?)?;
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

/// Results of the head's backward pass.
pub(super) struct AutogradHeadGrads {
    /// Sum of the losses of counted tokens.
    pub(super) loss_sum: f64,
    /// Gradient of the rows, [rows, hidden_size].
    pub(super) rows: Tensor,
    /// Gradients of the final norm's parameters, in the order of the layout.
    pub(super) norm: Vec<Tensor>,
    /// Gradient of the projection. If it was computed in fp32, it is not yet rounded to the stored kind.
    pub(super) projection: Tensor,
}

/// Computes the loss, and the gradients of `token_weight` times the sum of the losses of counted tokens.
/// `rows` is [rows, hidden_size], `targets` is `[rows]`; the norm's parameters are leaves that require
/// gradients.
pub(super) fn loss_and_grads(
    config: &ModelConfig,
    rows: &Tensor,
    norm_weights: &NormWeights,
    projection: &Tensor,
    targets: &Tensor,
    token_weight: f64,
    logits_elems_max: usize,
) -> Result<AutogradHeadGrads, ComputeError> {
    let rows = rows.f_detach()?.set_requires_grad(true);
    let normed = norm(config, &rows, norm_weights)?;
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
            grads.next().expect("each input has a gradient"),
            grads.next().expect("each input has a gradient"),
        );
        normed_grads.push(slice_grad);
        projection_grad = Some(match projection_grad {
            None => grad,
            Some(sum) => sum.f_to_kind(at_least_fp32(sum.kind()))?.f_add_(&grad)?,
        });
    }
    let normed_grad = Tensor::f_cat(&normed_grads, 0)?.f_to_kind(rows.kind())?;
    let inputs: Vec<&Tensor> = [&rows].into_iter().chain(norm_weights.all()).collect();
    let mut grads = vjp(&[&normed], &[&normed_grad], &inputs)?.into_iter();
    Ok(AutogradHeadGrads {
        loss_sum,
        rows: grads.next().expect("the rows come first"),
        norm: grads.collect(),
        projection: projection_grad.expect("a batch has rows"),
    })
}

/// Computes each row's loss in fp32 at least, from logits rounded to `kind`; 0 for an ignored target.
fn row_losses(
    normed: &Tensor,
    projection: &Tensor,
    targets: &Tensor,
    kind: Kind,
) -> Result<Tensor, ComputeError> {
    let logits = linear(normed, projection, None, kind)?;
    let logits = logits.f_to_kind(at_least_fp32(logits.kind()))?;
    Ok(logits.f_cross_entropy_loss(targets, None::<Tensor>, Reduction::None, IGNORED, 0.0)?)
}

/// Divides `rows` into slices whose logits stay within `logits_elems_max`: (start, length), at least one row
/// each.
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
