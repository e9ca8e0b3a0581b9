//! The vector-Jacobian product: `tch` can start a backward pass only from a scalar; training block by block starts it
//! from the gradient of a block's output.

use std::ptr;

use tch::Tensor;

use super::TorchError;
use super::ffi::{self, RawTensor};

/// Computes the gradients of `sum over i of <outputs[i], grad_outputs[i]>` with respect to each of `inputs`.
///
/// Each `grad_outputs[i]` has the shape and kind of `outputs[i]`; each result has the shape and kind of its input. The
/// graph is freed. On CPU tensors all work runs on the calling thread and torch's pool.
///
/// # Errors
/// torch's error: out of memory, an input that the outputs do not depend on, a graph already freed.
pub fn vjp(
    outputs: &[&Tensor],
    grad_outputs: &[&Tensor],
    inputs: &[&Tensor],
) -> Result<Vec<Tensor>, TorchError> {
    assert_eq!(outputs.len(), grad_outputs.len(), "one gradient an output");
    for (output, grad) in outputs.iter().zip(grad_outputs) {
        // torch would sum a larger gradient down to the output's shape.
        assert_eq!(
            output.size(),
            grad.size(),
            "a gradient has its output's shape"
        );
    }
    let raw = |tensors: &[&Tensor]| -> Vec<RawTensor> {
        tensors.iter().map(|t| t.as_ptr() as RawTensor).collect()
    };
    let (raw_outputs, raw_grads, raw_inputs) = (raw(outputs), raw(grad_outputs), raw(inputs));
    let mut results: Vec<RawTensor> = vec![ptr::null_mut(); inputs.len()];
    // SAFETY: the pointers come from live `Tensor`s borrowed for the whole call; the counts are the vectors' lengths
    // (equal for outputs and gradients, asserted above); `results` has `inputs.len()` elements.
    let message = unsafe {
        ffi::offload_vjp(
            raw_outputs.as_ptr(),
            raw_grads.as_ptr(),
            raw_outputs.len(),
            raw_inputs.as_ptr(),
            raw_inputs.len(),
            results.as_mut_ptr(),
        )
    };
    // SAFETY: the shim has just returned `message`, and it is used only here.
    unsafe { ffi::check("the backward pass", message) }?;
    Ok(results
        .into_iter()
        .map(|raw| {
            assert!(!raw.is_null(), "the shim filled every result");
            // SAFETY: a new `at::Tensor` that the shim released to us.
            unsafe { Tensor::from_ptr(raw.cast()) }
        })
        .collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use tch::Kind;

    #[test]
    fn the_product_is_the_jacobian_times_the_given_gradient() {
        let x = Tensor::from_slice(&[1.0f64, 2.0, 3.0]).set_requires_grad(true);
        let w = Tensor::from_slice(&[4.0f64, 5.0, 6.0]).set_requires_grad(true);
        let y = &x * &x * &w;
        let dy = Tensor::from_slice(&[1.0f64, -1.0, 0.5]);
        let grads = vjp(&[&y], &[&dy], &[&x, &w]).unwrap();
        // dx = 2 x w dy, dw = x^2 dy
        assert_eq!(Vec::<f64>::try_from(&grads[0]).unwrap(), [8.0, -20.0, 18.0]);
        assert_eq!(Vec::<f64>::try_from(&grads[1]).unwrap(), [1.0, -4.0, 4.5]);
    }

    #[test]
    fn what_torch_throws_comes_back_as_an_error() {
        let x = Tensor::from_slice(&[1.0f32]).set_requires_grad(true);
        let unused = Tensor::from_slice(&[1.0f32]).set_requires_grad(true);
        let y = &x * 2.0;
        let dy = Tensor::ones([1], (Kind::Float, tch::Device::Cpu));
        let error = vjp(&[&y], &[&dy], &[&x, &unused]).unwrap_err().to_string();
        assert!(error.contains("appears to not have been used"), "{error}");
        assert!(!error.contains('\n'), "the backtrace is left out: {error}");
        let y = &x * &x;
        vjp(&[&y], &[&dy], &[&x]).unwrap();
        let error = vjp(&[&y], &[&dy], &[&x]).unwrap_err().to_string();
        assert!(
            error.contains("backward through the graph a second time"),
            "{error}"
        );
    }
}
