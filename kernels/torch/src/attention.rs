//! Flash attention over documents of different lengths, packed one after another: `tch` lacks the operator.

use std::ptr;

use tch::{Kind, Tensor};

use super::TorchError;
use super::ffi::{self, RawTensor};

/// Largest head that flash attention supports; the size must also be a multiple of [`HEAD_DIM_UNIT`].
const HEAD_DIM_MAX: i64 = 256;
const HEAD_DIM_UNIT: i64 = 8;

/// Returns whether [`attention_of_documents`] supports this query: 16-bit, on a GPU, with heads of a supported size.
pub fn has_attention_of_documents(query: &Tensor) -> bool {
    let head_dim = query.size().last().copied().unwrap_or(0);
    query.device().is_cuda()
        && matches!(query.kind(), Kind::BFloat16 | Kind::Half)
        && head_dim % HEAD_DIM_UNIT == 0
        && (1..=HEAD_DIM_MAX).contains(&head_dim)
}

/// Computes causal attention of each document by itself: [tokens, heads, head_dim] for a query of this shape, and key
/// and value with as many heads or a divisor. `bounds` holds the start of each document and the end of the last one, as
/// i32 on the same GPU; `longest` is the largest number of tokens in a document. With a `window`, a query sees only so
/// many tokens, its own included. The result has a gradient.
///
/// # Errors
/// torch's error: out of memory, shapes or kinds that the operator does not support.
pub fn attention_of_documents(
    [query, key, value]: [&Tensor; 3],
    bounds: &Tensor,
    longest: i64,
    window: Option<i64>,
) -> Result<Tensor, TorchError> {
    let raw = |tensor: &Tensor| tensor.as_ptr() as RawTensor;
    let mut result = ptr::null_mut();
    // SAFETY: the pointers come from live `Tensor`s borrowed for the whole call, and the shim writes one pointer.
    let message = unsafe {
        ffi::offload_attention_of_documents(
            raw(query),
            raw(key),
            raw(value),
            raw(bounds),
            longest,
            window.unwrap_or(0),
            &mut result,
        )
    };
    // SAFETY: the shim has just returned `message`, and it is used only here.
    unsafe { ffi::check("attention of documents", message) }?;
    // SAFETY: a new `at::Tensor` that the shim released to us.
    Ok(unsafe { Tensor::from_ptr(result.cast()) })
}

#[cfg(test)]
mod tests {
    use super::*;
    use tch::Device;

    /// The CPU has no such kernel, so torch's refusal must come back as an error.
    #[test]
    fn without_a_gpu_the_operator_is_not_offered_and_fails() {
        let x = Tensor::zeros([4, 2, 8], (Kind::BFloat16, Device::Cpu));
        assert!(!has_attention_of_documents(&x));
        let bounds = Tensor::from_slice(&[0i32, 3, 4]);
        let error = attention_of_documents([&x, &x, &x], &bounds, 3, None).unwrap_err();
        assert!(
            error.to_string().contains("attention of documents"),
            "{error}"
        );
    }
}
