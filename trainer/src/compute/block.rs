//! One Llama block in torch operators, as Hugging Face's `LlamaDecoderLayer` computes it.

use tch::{Device, Kind, Tensor};

use super::ComputeError;
use crate::model::ModelConfig;

/// The parameters of a block in the order of its layout.
pub(super) const BLOCK_PARAMS: usize = 9;

/// cos and sin of each position's angles, [seq_len, head_dim], of the kind the model computes in.
pub(super) struct Rotary {
    pub(super) cos: Tensor,
    pub(super) sin: Tensor,
}

impl Rotary {
    /// Angles `position * theta^(-2i / head_dim)` for pair i, in fp32 (fp64 for an fp64 model), the pairs' angles twice
    /// over: pair i is the elements i and i + head_dim / 2.
    pub(super) fn new(
        config: &ModelConfig,
        seq_len: usize,
        kind: Kind,
    ) -> Result<Self, ComputeError> {
        let wide = at_least_fp32(kind);
        let head_dim = config.head_dim() as i64;
        let options = (wide, Device::Cpu);
        let exponents =
            Tensor::f_arange_start_step(0, head_dim, 2, options)?.f_div_scalar(head_dim as f64)?;
        let wavelengths = Tensor::f_full([1], config.rope_theta, options)?
            .f_pow(&exponents)?
            .f_reciprocal()?;
        let angles = Tensor::f_arange(seq_len as i64, options)?.f_outer(&wavelengths)?;
        let angles = Tensor::f_cat(&[&angles, &angles], -1)?;
        Ok(Rotary {
            cos: angles.f_cos()?.f_to_kind(kind)?,
            sin: angles.f_sin()?.f_to_kind(kind)?,
        })
    }

    /// The same numbers on `device`: computed once, on the CPU, so that every device turns by the same angles.
    pub(super) fn on(&self, device: Device) -> Result<Self, ComputeError> {
        Ok(Rotary {
            cos: self.cos.f_to_device(device)?,
            sin: self.sin.f_to_device(device)?,
        })
    }

    /// The tables' first `seq_len` rows.
    fn rows(&self, seq_len: i64) -> Result<(Tensor, Tensor), ComputeError> {
        Ok((
            self.cos.f_narrow(0, 0, seq_len)?,
            self.sin.f_narrow(0, 0, seq_len)?,
        ))
    }
}

/// The kind sums and norms are computed in.
pub(super) fn at_least_fp32(kind: Kind) -> Kind {
    if kind == Kind::Double {
        Kind::Double
    } else {
        Kind::Float
    }
}

/// `weight * x / rms(x)`, the quotient computed in fp32 and rounded to x's kind before the weight is applied.
pub(super) fn rms_norm(x: &Tensor, weight: &Tensor, eps: f64) -> Result<Tensor, ComputeError> {
    let wide = x.f_to_kind(at_least_fp32(x.kind()))?;
    let mean_square = wide
        .f_square()?
        .f_mean_dim(&[-1i64][..], true, wide.kind())?;
    let scale = mean_square.f_add_scalar(eps)?.f_rsqrt()?;
    Ok(wide.f_mul(&scale)?.f_to_kind(x.kind())?.f_mul(weight)?)
}

/// `x` as matrix products take it. On the CPU that is fp32 for bf16: few CPUs multiply bf16, and the others go through it
/// element by element (17 times slower than fp32 for a whole step on an EPYC with AVX2). Products of two bf16 numbers are
/// exact in fp32, so a result rounded to bf16 is what bf16 units with fp32 sums give, but for the order of the sums.
pub(super) fn product_input(x: &Tensor) -> Result<Tensor, ComputeError> {
    Ok(match (x.kind(), x.device()) {
        (Kind::BFloat16, Device::Cpu) => x.f_to_kind(Kind::Float)?,
        _ => x.shallow_clone(),
    })
}

/// `x` times the transposed `weight`, as `kind`; `x` and `weight` as [`product_input`] gives them.
pub(super) fn linear(x: &Tensor, weight: &Tensor, kind: Kind) -> Result<Tensor, ComputeError> {
    Ok(x.f_linear(weight, None::<Tensor>)?.f_to_kind(kind)?)
}

/// The block's output for input `x`, both [micro_batch, seq_len, hidden_size]; `params` in the order of the layout.
pub(super) fn forward(
    config: &ModelConfig,
    rotary: &Rotary,
    params: &[Tensor; BLOCK_PARAMS],
    x: &Tensor,
) -> Result<Tensor, ComputeError> {
    let [input_norm, q, k, v, o, post_norm, gate, up, down] = params;
    let project =
        |x: &Tensor, weight: &Tensor| linear(x, &product_input(weight)?, params[0].kind());

    let normed = product_input(&rms_norm(x, input_norm, config.norm_eps)?)?;
    let [q, k, v] = [
        project(&normed, q)?,
        project(&normed, k)?,
        project(&normed, v)?,
    ];
    let mixed = attention(config, rotary, [&q, &k, &v])?;
    let x = x.f_add(&project(&mixed, o)?)?;

    let normed = product_input(&rms_norm(&x, post_norm, config.norm_eps)?)?;
    let gated = project(&normed, gate)?
        .f_silu()?
        .f_mul(&project(&normed, up)?)?;
    Ok(x.f_add(&project(&product_input(&gated)?, down)?)?)
}

/// Causal attention of [micro_batch, seq_len, heads * head_dim] each; the result is an input for a product.
fn attention(
    config: &ModelConfig,
    rotary: &Rotary,
    [q, k, v]: [&Tensor; 3],
) -> Result<Tensor, ComputeError> {
    let (micro_batch, seq_len, _) = q.size3()?;
    let head_dim = config.head_dim() as i64;
    let (cos, sin) = rotary.rows(seq_len)?;
    // [micro_batch, heads, seq_len, head_dim]
    let heads = |x: &Tensor, count: usize| -> Result<Tensor, ComputeError> {
        Ok(x.f_view([micro_batch, seq_len, count as i64, head_dim])?
            .f_transpose(1, 2)?)
    };
    let query = rotate(&heads(q, config.heads)?, &cos, &sin)?;
    let key = rotate(&heads(k, config.kv_heads)?, &cos, &sin)?;
    let value = heads(v, config.kv_heads)?;
    let share = (config.heads / config.kv_heads) as i64;
    let mixed = causal_attention(&query, &key, &value, share)?;
    let mixed = mixed
        .f_transpose(1, 2)?
        .f_reshape([micro_batch, seq_len, -1])?;
    // Rounded as a bf16 attention's output is.
    product_input(&mixed.f_to_kind(q.kind())?)
}

/// Each pair (i, i + head_dim / 2) turned by its position's angle.
fn rotate(x: &Tensor, cos: &Tensor, sin: &Tensor) -> Result<Tensor, ComputeError> {
    let halves = x.f_chunk(2, -1)?;
    let turned = Tensor::f_cat(&[halves[1].f_neg()?, halves[0].shallow_clone()], -1)?;
    Ok(x.f_mul(cos)?.f_add(&turned.f_mul(sin)?)?)
}

/// Causal attention of [micro_batch, heads, seq_len, head_dim], keys and values with a `share`-th of the heads; the result
/// is as wide as [`product_input`] makes its inputs.
pub(super) fn causal_attention(
    query: &Tensor,
    key: &Tensor,
    value: &Tensor,
    share: i64,
) -> Result<Tensor, ComputeError> {
    Ok(Tensor::f_scaled_dot_product_attention(
        &product_input(query)?,
        &shared_heads(&product_input(key)?, share)?,
        &shared_heads(&product_input(value)?, share)?,
        None::<Tensor>,
        0.0,
        true,
        None,
        false,
    )?)
}

/// Each key or value head repeated for the `share` query heads that use it. Repeated here and not inside the attention
/// (`enable_gqa`) so that every device's attention kernel is open to torch's choice.
fn shared_heads(x: &Tensor, share: i64) -> Result<Tensor, ComputeError> {
    if share == 1 {
        return Ok(x.shallow_clone());
    }
    let (micro_batch, heads, seq_len, head_dim) = x.size4()?;
    let repeated = x
        .f_unsqueeze(2)?
        .f_expand([micro_batch, heads, share, seq_len, head_dim], false)?;
    Ok(repeated.f_reshape([micro_batch, heads * share, seq_len, head_dim])?)
}
