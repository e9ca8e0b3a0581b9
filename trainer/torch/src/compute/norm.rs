//! Norms of rows and of heads.

use tch::Tensor;

use super::ComputeError;
use super::linear::at_least_fp32;
use super::params::Params;
use training_run::model::{ModelConfig, Norm, ParamRole};

/// A norm's parameters.
pub(super) struct NormWeights {
    pub(super) weight: Tensor,
    /// Bias of a layer norm.
    pub(super) bias: Option<Tensor>,
}

impl NormWeights {
    pub(super) fn new(params: &Params, weight: ParamRole, bias: ParamRole) -> Self {
        NormWeights {
            weight: params.get(weight).shallow_clone(),
            bias: params.find(bias).map(Tensor::shallow_clone),
        }
    }

    /// Returns the parameters in the order of the layout.
    pub(super) fn all(&self) -> Vec<&Tensor> {
        [&self.weight].into_iter().chain(&self.bias).collect()
    }
}

/// Normalizes the rows of `x` as the model does.
pub(super) fn norm(
    config: &ModelConfig,
    x: &Tensor,
    weights: &NormWeights,
) -> Result<Tensor, ComputeError> {
    match config.architecture.form().norm {
        Norm::Rms => rms_norm(x, &weights.weight, config.norm_eps),
        // Computed in fp32 internally and rounded at the end.
        Norm::Layer => Ok(x.f_layer_norm(
            [config.hidden_size as i64],
            Some(&weights.weight),
            weights.bias.as_ref(),
            config.norm_eps,
            false,
        )?),
    }
}

/// Computes `weight * x / rms(x)`. The quotient is computed in fp32 and rounded to x's kind before it is
/// multiplied by the weight.
pub(super) fn rms_norm(x: &Tensor, weight: &Tensor, eps: f64) -> Result<Tensor, ComputeError> {
    let wide = x.f_to_kind(at_least_fp32(x.kind()))?;
    let mean_square = wide
        .f_square()?
        .f_mean_dim(&[-1i64][..], true, wide.kind())?;
    let scale = mean_square.f_add_scalar(eps)?.f_rsqrt()?;
    Ok(wide.f_mul(&scale)?.f_to_kind(x.kind())?.f_mul(weight)?)
}
