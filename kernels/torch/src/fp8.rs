//! Matrices in 8-bit numbers and their products, which a GPU's matrix units compute at twice the rate of 16-bit ones.
//!
//! A matrix has one scale, a power of two, chosen from its largest absolute value now and not from earlier ones: nothing has to be
//! kept between steps or in a checkpoint, and no number overflows. A matrix with an element that is not finite gives products of NaN.

use tch::{Device, Kind, Tensor};

pub use kernels::gpu::Fp8Format;

use crate::TorchError;
use kernels::fp8::FP8_UNIT;
use kernels::gpu::{Fp8Addresses, Gpu, GpuError, Stream};

/// Layouts of a converted matrix.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fp8Layout {
    /// That of the matrix.
    Straight,
    /// Rows and columns exchanged. Matrix units take 8-bit factors only along the dimension that is summed.
    Transposed,
    /// Both, which is cheaper than one after the other.
    Both,
}

/// The largest absolute value of a matrix, in parts on its GPU, from which its scale is chosen.
#[derive(Debug)]
pub struct Largest(Tensor);

/// A matrix [rows, columns] in 8-bit numbers.
#[derive(Debug)]
pub struct Fp8Matrix {
    /// [rows, columns]
    pub straight: Option<Tensor>,
    /// [columns, rows]
    pub transposed: Option<Tensor>,
    /// What the numbers are to be multiplied by: fp32, without a dimension.
    pub inverse_scale: Tensor,
}

/// The compiled kernels of one GPU, for torch's tensors.
#[derive(Debug)]
pub struct Fp8Kernels {
    stream: Stream,
    device: Device,
    kernels: kernels::gpu::Fp8Kernels,
}

/// torch's name of a format.
pub fn fp8_kind(format: Fp8Format) -> Kind {
    match format {
        Fp8Format::E4m3 => Kind::Float8e4m3fn,
        Fp8Format::E5m2 => Kind::Float8e5m2,
    }
}

impl Fp8Layout {
    fn is_straight(self) -> bool {
        self != Fp8Layout::Transposed
    }

    fn is_transposed(self) -> bool {
        self != Fp8Layout::Straight
    }
}

impl Fp8Kernels {
    /// Compiles the kernels for `gpu`, which is torch's `device` ([`crate::use_gpu`]).
    ///
    /// # Errors
    /// There is no run-time compiler, or it refused the source.
    pub fn compile(gpu: &Gpu, device: Device) -> Result<Self, GpuError> {
        Ok(Self {
            stream: gpu.default_stream(),
            device,
            kernels: kernels::gpu::Fp8Kernels::compile(gpu)?,
        })
    }

    /// Finds the largest absolute value of `x`, of a shape that [`Fp8Kernels::convert`] takes.
    ///
    /// # Errors
    /// Out of memory, or the launch failed.
    pub fn largest(&self, x: &Tensor) -> Result<Largest, TorchError> {
        self.check(x)?;
        let part_count = kernels::gpu::Fp8Kernels::part_count(x.numel());
        let parts = Tensor::f_empty([part_count as i64], (Kind::Int, self.device))?;
        let (from, to) = (x.data_ptr() as u64, parts.data_ptr() as u64);
        // SAFETY: `x` has `numel` elements at torch's alignment, and `parts` was allocated for it. Tensors keep their memory until the
        // kernel has run, as in `fused.rs`.
        unsafe { self.kernels.largest(&self.stream, from, x.numel(), to)? };
        Ok(Largest(parts))
    }

    /// Converts `x` [rows, columns], bf16 and contiguous, both sizes multiples of [`FP8_UNIT`], whose largest value is `largest`.
    ///
    /// # Errors
    /// Out of memory, or the launch failed.
    pub fn convert(
        &self,
        x: &Tensor,
        Largest(parts): &Largest,
        format: Fp8Format,
        layout: Fp8Layout,
    ) -> Result<Fp8Matrix, TorchError> {
        let (rows, columns) = self.check(x)?;
        let empty = |shape: [i64; 2]| Tensor::f_empty(shape, (fp8_kind(format), self.device));
        let straight = layout.is_straight().then(|| empty([rows, columns]));
        let transposed = layout.is_transposed().then(|| empty([columns, rows]));
        let (straight, transposed) = (straight.transpose()?, transposed.transpose()?);
        let inverse_scale = Tensor::f_empty([0i64; 0], (Kind::Float, self.device))?;

        let address = |x: &Option<Tensor>| x.as_ref().map_or(0, |x| x.data_ptr() as u64);
        let to = Fp8Addresses {
            straight: address(&straight),
            transposed: address(&transposed),
            inverse_scale: inverse_scale.data_ptr() as u64,
        };
        let from = (x.data_ptr() as u64, parts.data_ptr() as u64);
        let sizes = [rows as usize, columns as usize];
        // SAFETY: all matrices were allocated with rows times columns elements (asserted for `x`), and `parts` are those of `x`, by the
        // contract. Tensors keep their memory until the kernel has run, as in `fused.rs`.
        unsafe { (self.kernels).convert(&self.stream, from, to, format, sizes)? };
        Ok(Fp8Matrix {
            straight,
            transposed,
            inverse_scale,
        })
    }

    /// Returns rows and columns of a matrix that can be converted.
    fn check(&self, x: &Tensor) -> Result<(i64, i64), TorchError> {
        let (rows, columns) = x.size2()?;
        for size in [rows, columns] {
            assert!(
                (size as usize).is_multiple_of(FP8_UNIT) && size > 0,
                "sizes in multiples of {FP8_UNIT}, not {size}"
            );
        }
        assert!(
            x.is_contiguous() && x.kind() == Kind::BFloat16 && x.device() == self.device,
            "a contiguous bf16 matrix on this GPU"
        );
        Ok((rows, columns))
    }
}

/// How sums of products are kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fp8Sums {
    /// In the matrix units, with some 14 bits: for outputs of forward.
    Fast,
    /// Moved to fp32 every few products: for gradients.
    Exact,
}

/// Multiplies `a` [n, k] by the transposed `b` [m, k], each with what its numbers are to be multiplied by, and adds `bias`, `[m]`: [n, m]
/// in bf16, which is written to `out` if given. On a GPU of NVIDIA from compute capability 8.9.
///
/// # Errors
/// torch's: out of memory, a size that is no multiple of 16.
pub fn fp8_product(
    (a, a_scale): (&Tensor, &Tensor),
    (b, b_scale): (&Tensor, &Tensor),
    bias: Option<&Tensor>,
    out: Option<&Tensor>,
    sums: Fp8Sums,
) -> Result<Tensor, TorchError> {
    let b = b.f_transpose(0, 1)?;
    let (fast, none) = (sums == Fp8Sums::Fast, None::<&Tensor>);
    Ok(match out {
        None => a.f_internal_scaled_mm(&b, a_scale, b_scale, bias, none, Kind::BFloat16, fast)?,
        Some(out) => {
            a.f_internal_scaled_mm_out(out, &b, a_scale, b_scale, bias, none, Kind::BFloat16, fast)?
        }
    })
}
