//! Matrices in 8-bit numbers for PyTorch's tensors; `offloadd/_fp8.py` multiplies them.

use kernels::gpu::{FP8_ALIGN, Fp8Addresses, Fp8Format, Fp8Kernels, Gpu};
use pyo3::prelude::*;

use crate::gpu::gpu_failed;
use crate::memory;

/// Why GPU `index` cannot multiply 8-bit numbers; None if it can.
#[pyfunction]
pub(crate) fn fp8_refusal(py: Python<'_>, index: u32) -> PyResult<Option<String>> {
    py.detach(|| Gpu::open(index))
        .map(|gpu| kernels::fp8::fp8_refusal(gpu.info().vendor, &gpu.info().arch))
        .map_err(gpu_failed)
}

/// Converts bf16 matrices of one GPU to 8-bit numbers. Addresses are PyTorch's, of memory that stays until `stream`, PyTorch's current one, has
/// run what is enqueued here.
#[pyclass(frozen, module = "offloadd._offloadd")]
pub(crate) struct Fp8Converter {
    gpu: Gpu,
    kernels: Fp8Kernels,
}

#[pymethods]
impl Fp8Converter {
    /// Compiles the kernels for GPU `index`.
    #[new]
    fn new(py: Python<'_>, index: u32) -> PyResult<Self> {
        py.detach(|| {
            let gpu = Gpu::open(index)?;
            let kernels = Fp8Kernels::compile(&gpu)?;
            Ok(Self { gpu, kernels })
        })
        .map_err(gpu_failed)
    }

    /// Bytes of which addresses of matrices are multiples.
    #[staticmethod]
    fn align() -> usize {
        FP8_ALIGN
    }

    /// Numbers of 32 bits that `convert` needs for a matrix of `elems` elements, to find its largest value.
    #[staticmethod]
    fn scratch_elems(elems: usize) -> usize {
        Fp8Kernels::part_count(elems)
    }

    /// Converts `x` of `sizes`, rows and columns, both multiples of `FP8_UNIT`, with the largest power of two as scale with which its largest
    /// value stays in the format, E5M2 for `gradients`, otherwise E4M3. `to` are the addresses of the numbers as they lie, of those with rows and
    /// columns exchanged, either of which may be 0, and of what they are to be multiplied by, fp32: NaN if an element is not finite.
    fn convert(
        &self,
        x: u64,
        sizes: (usize, usize),
        gradients: bool,
        scratch: u64,
        to: (u64, u64, u64),
        stream: usize,
    ) -> PyResult<()> {
        let stream = memory::torch_stream(&self.gpu, stream);
        let to = Fp8Addresses {
            straight: to.0,
            transposed: to.1,
            inverse_scale: to.2,
        };
        let format = match gradients {
            true => Fp8Format::E5m2,
            false => Fp8Format::E4m3,
        };
        memory::to_fp8(
            &self.kernels,
            &stream,
            (x, scratch),
            to,
            format,
            sizes.into(),
        )
        .map_err(gpu_failed)
    }
}
