//! Newton and Schulz's iteration, which makes a matrix orthogonal for Muon: `tch` lacks products with factors.

use std::ptr;

use tch::Tensor;

use super::TorchError;
use super::ffi::{self, RawTensor};

/// Added to no norm that is larger: a matrix of zeros stays one. `torch.optim.Muon`'s.
const EPS: f64 = 1e-7;

/// Steps and coefficients of the iteration.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct NewtonSchulz {
    /// Number of steps.
    pub steps: u64,
    /// Coefficients of the polynomial.
    pub coefficients: [f64; 3],
}

impl NewtonSchulz {
    /// Brings the singular values of a matrix near 1. Computes in bf16, with the operations of `torch.optim.Muon` in their order; the result is bf16.
    ///
    /// # Errors
    /// torch's error: out of memory, or a tensor that is no matrix.
    pub fn orthogonal(&self, matrix: &Tensor) -> Result<Tensor, TorchError> {
        let mut result = ptr::null_mut();
        // SAFETY: the matrix is a live `Tensor` borrowed for the whole call, the shim reads three coefficients and writes one pointer.
        let message = unsafe {
            ffi::offload_orthogonal(
                matrix.as_ptr() as RawTensor,
                self.coefficients.as_ptr(),
                EPS,
                self.steps,
                &mut result,
            )
        };
        // SAFETY: the shim has just returned `message`, and it is used only here.
        unsafe { ffi::check("making a matrix orthogonal", message) }?;
        // SAFETY: a new `at::Tensor` that the shim released to us.
        Ok(unsafe { Tensor::from_ptr(result.cast()) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tch::{Device, Kind};

    #[test]
    fn singular_values_come_near_one_in_either_shape_and_zeros_stay() {
        // x (3 - x^2) / 2 converges to 1 from below.
        let iteration = NewtonSchulz {
            steps: 20,
            coefficients: [1.5, -0.5, 0.0],
        };
        tch::manual_seed(1);
        let wide = Tensor::randn([6, 20], (Kind::Float, Device::Cpu));
        for matrix in [wide.shallow_clone(), wide.tr()] {
            let made = iteration.orthogonal(&matrix).unwrap();
            assert_eq!(made.size(), matrix.size());
            let made = made.to_kind(Kind::Float);
            let wide = if made.size()[0] > 6 { made.tr() } else { made };
            let gram = wide.matmul(&wide.tr()) - Tensor::eye(6, (Kind::Float, Device::Cpu));
            assert!(f64::try_from(gram.abs().max()).unwrap() < 0.03);
        }
        let zeros = iteration.orthogonal(&Tensor::zeros([3, 2], (Kind::Float, Device::Cpu)));
        assert_eq!(f64::try_from(zeros.unwrap().abs().max()).unwrap(), 0.0);
    }

    #[test]
    fn what_is_no_matrix_is_an_error() {
        let iteration = NewtonSchulz {
            steps: 1,
            coefficients: [1.0; 3],
        };
        let vector = Tensor::zeros([3], (Kind::Float, Device::Cpu));
        let error = iteration.orthogonal(&vector).unwrap_err().to_string();
        assert!(error.contains("making a matrix orthogonal"), "{error}");
    }
}
