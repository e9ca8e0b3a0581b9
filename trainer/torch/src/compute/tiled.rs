//! A block's MLP in chunks of its intermediate size, computed one after the other.
//!
//! ```text
//!   x + down(act(gate n) * up n)  =  x + sum over chunks of  down[:, chunk](act(gate[chunk] n) * up[chunk] n),   n = norm x
//! ```
//!
//! Most of the MLP's memory is tensors as wide as the intermediate size. With chunks, the graph of only one
//! chunk exists at a time, also in backward, where each chunk is recomputed. Gradients of weights are
//! complete, because each chunk has its own rows or columns of them. The partial results are summed in fp32
//! at least and rounded once, in another order than the whole product: the loss agrees within the rounding of
//! sums, not bit for bit.

use kernels_torch::vjp;
use tch::Tensor;

use super::block::AutogradBlock;
use super::dropout::DropoutSite;
use super::linear::{at_least_fp32, linear, product_input};
use super::{ComputeError, GradSink};
use training_run::model::{Mlp, ParamRole};

/// Parameters with rows or columns for each intermediate element, and the dimension of these.
const SLICED: [(ParamRole, i64); 5] = [
    (ParamRole::Gate, 0),
    (ParamRole::GateBias, 0),
    (ParamRole::Up, 0),
    (ParamRole::UpBias, 0),
    (ParamRole::Down, 1),
];

/// One chunk of each of [`SLICED`] that the block has.
struct Slice(Vec<(ParamRole, Tensor)>);

impl Slice {
    fn find(&self, member: ParamRole) -> Option<&Tensor> {
        let found = self.0.iter().find(|(of, _)| *of == member);
        found.map(|(_, tensor)| tensor)
    }

    fn get(&self, member: ParamRole) -> &Tensor {
        self.find(member)
            .expect("every such block has this parameter")
    }
}

impl AutogradBlock<'_> {
    /// Like [`AutogradBlock::forward`], with the MLP in `tiles` chunks.
    pub(super) fn forward_tiled(&self, x: &Tensor, tiles: usize) -> Result<Tensor, ComputeError> {
        let x = self.attended(x)?;
        let normed = self.norm(&x, ParamRole::PostNorm, ParamRole::PostNormBias)?;
        let mut sum: Option<Tensor> = None;
        for slice in self.slices(tiles, false)? {
            let part = self.part(&normed, &slice)?;
            sum = Some(match sum {
                None => part,
                Some(mut sum) => sum.f_add_(&part)?,
            });
        }
        let mut sum = sum.expect("at least one chunk");
        if let Some(bias) = self.params.find(ParamRole::DownBias) {
            sum = sum.f_add(bias)?;
        }
        let mlp_out = sum.f_to_kind(x.kind())?;
        Ok(x.f_add(&self.masks.apply(DropoutSite::MlpOut, &mlp_out)?)?)
    }

    /// Computes the gradient of `x`. Gradients of the parameters, which are leaves of a graph, are added to
    /// `grads`.
    pub(super) fn backward_tiled(
        &self,
        x: &Tensor,
        grad_output: &Tensor,
        tiles: usize,
        grads: &mut GradSink,
    ) -> Result<Tensor, ComputeError> {
        let attended = self.attended_tape(x)?;
        let middle = attended.output.f_detach()?.set_requires_grad(true);
        let normed = self.norm(&middle, ParamRole::PostNorm, ParamRole::PostNormBias)?;

        let grad_fed = self.masks.apply(DropoutSite::MlpOut, grad_output)?;
        let grad_fed = grad_fed.f_to_kind(at_least_fp32(grad_fed.kind()))?;
        let grad_normed = self.feed_back(&normed, &grad_fed, tiles, grads)?;
        if let Some(bias) = self.params.index(ParamRole::DownBias) {
            let rows = grad_fed.f_sum_dim_intlist(&[0i64, 1][..], false, grad_fed.kind())?;
            grads.add(bias, rows.f_to_kind(grad_output.kind())?)?;
        }
        drop(grad_fed);

        let grad_normed = grad_normed.f_to_kind(normed.kind())?;
        let norms = self
            .params
            .indices(|member| matches!(member, ParamRole::PostNorm | ParamRole::PostNormBias));
        let of_middle = self.back(&[&normed], &[&grad_normed], &[&middle], &norms, grads)?;
        drop((normed, grad_normed));
        let grad = grad_output.f_add(&of_middle[0])?;
        self.attended_backward(attended, &grad, grads)
    }

    /// Computes the backward pass of all chunks and returns the gradient of `normed`, in fp32 at least.
    fn feed_back(
        &self,
        normed: &Tensor,
        grad_fed: &Tensor,
        tiles: usize,
        grads: &mut GradSink,
    ) -> Result<Tensor, ComputeError> {
        let mut sum: Option<Tensor> = None;
        let mut found: Vec<Vec<Tensor>> = Vec::new();
        for slice in self.slices(tiles, true)? {
            let input = normed.f_detach()?.set_requires_grad(true);
            let part = self.part(&input, &slice)?;
            let weights = slice.0.iter().map(|(_, tensor)| tensor);
            let inputs: Vec<&Tensor> = weights.chain([&input]).collect();
            let mut of_slice = vjp(&[&part], &[grad_fed], &inputs)?;
            let grad = of_slice.pop().expect("each input has a gradient");
            let grad = grad.f_to_kind(grad_fed.kind())?;
            sum = Some(match sum {
                None => grad,
                Some(mut sum) => sum.f_add_(&grad)?,
            });
            found.push(of_slice);
        }
        let sliced = SLICED
            .iter()
            .filter_map(|(member, dim)| Some((self.params.index(*member)?, dim)));
        for (at, (param, dim)) in sliced.enumerate() {
            let parts: Vec<&Tensor> = found.iter().map(|of_slice| &of_slice[at]).collect();
            grads.add(param, Tensor::f_cat(&parts, *dim)?)?;
        }
        Ok(sum.expect("at least one chunk"))
    }

    /// Computes the contribution of one chunk to the MLP output, without the last bias.
    fn part(&self, normed: &Tensor, slice: &Slice) -> Result<Tensor, ComputeError> {
        let project = |weight: ParamRole, bias: ParamRole| -> Result<Tensor, ComputeError> {
            let weight = slice.get(weight);
            let bias = slice.find(bias).map(product_input).transpose()?;
            linear(
                normed,
                &product_input(weight)?,
                bias.as_ref(),
                weight.kind(),
            )
        };
        let up = project(ParamRole::Up, ParamRole::UpBias)?;
        let wide = match self.config.architecture.form().mlp {
            Mlp::GatedSilu => project(ParamRole::Gate, ParamRole::GateBias)?
                .f_silu()?
                .f_mul(&up)?,
            Mlp::Gelu => up.f_gelu("tanh")?,
        };
        let down = slice.get(ParamRole::Down);
        let kind = at_least_fp32(down.kind());
        linear(&product_input(&wide)?, &product_input(down)?, None, kind)
    }

    /// Divides the weights into `tiles` chunks of almost equal size; with `grad` they are leaves of separate
    /// graphs.
    fn slices(&self, tiles: usize, grad: bool) -> Result<Vec<Slice>, ComputeError> {
        let elems = self.config.intermediate_size;
        let at = |tile: usize| (tile * elems / tiles) as i64;
        let slice = |tile: usize| -> Result<Slice, ComputeError> {
            let there = SLICED
                .iter()
                .filter_map(|(member, dim)| Some((*member, *dim, self.params.find(*member)?)));
            let cut = there.map(
                |(member, dim, whole)| -> Result<(ParamRole, Tensor), ComputeError> {
                    let part =
                        whole
                            .f_detach()?
                            .f_narrow(dim, at(tile), at(tile + 1) - at(tile))?;
                    Ok((member, part.set_requires_grad(grad)))
                },
            );
            Ok(Slice(cut.collect::<Result<_, ComputeError>>()?))
        };
        (0..tiles).map(slice).collect()
    }
}
