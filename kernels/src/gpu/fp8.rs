//! Kernels that convert bf16 matrices to 8-bit numbers, at addresses.
//!
//! A matrix has one scale, a power of two, chosen from its largest absolute value now and not from earlier ones: nothing has to be
//! kept between steps or in a checkpoint, and no number overflows. A matrix with an element that is not finite gets a scale of NaN.

use super::{Arg, Function, Gpu, GpuError, Stream};
use crate::fp8::FP8_UNIT;

/// Most parts of a matrix's largest value, as in the source; also the threads of a block that converts.
const LARGEST_PARTS: usize = 256;
/// Threads of a block that finds a part of the largest value.
const LARGEST_THREADS: usize = 512;
/// Rows and columns that a block converts.
const TILE: usize = 128;
/// Elements of an access to 16-bit numbers.
const ACCESS_ELEMS: usize = 8;

/// Bytes of which addresses of matrices are multiples.
pub const FP8_ALIGN: usize = 16;

/// A format of 8 bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fp8Format {
    /// 3 bits of mantissa, up to 448: activations and weights.
    E4m3,
    /// 2 bits of mantissa, up to 57,344: gradients, whose sizes differ more.
    E5m2,
}

impl Fp8Format {
    /// The largest number.
    pub fn largest(self) -> f64 {
        match self {
            Self::E4m3 => 448.0,
            Self::E5m2 => 57344.0,
        }
    }
}

/// Where a converted matrix is written, as addresses on the GPU.
#[derive(Clone, Copy, Debug)]
pub struct Fp8Addresses {
    /// `[rows, columns]`, a byte each; 0 to leave it out.
    pub straight: u64,
    /// `[columns, rows]`; 0 to leave it out.
    pub transposed: u64,
    /// What the numbers are to be multiplied by: an f32.
    pub inverse_scale: u64,
}

/// The compiled kernels of one GPU.
#[derive(Debug)]
pub struct Fp8Kernels {
    largest_parts: Function,
    to_e4m3: Function,
    to_e5m2: Function,
}

impl Fp8Kernels {
    /// Compiles the kernels for `gpu`.
    ///
    /// # Errors
    /// There is no run-time compiler, or it refused the source.
    pub fn compile(gpu: &Gpu) -> Result<Self, GpuError> {
        let module = gpu.compile_own("fp8")?;
        Ok(Self {
            largest_parts: module.function("largest_parts")?,
            to_e4m3: module.function("to_fp8_e4m3")?,
            to_e5m2: module.function("to_fp8_e5m2")?,
        })
    }

    /// Parts, u32 each, in which [`Fp8Kernels::largest`] writes the largest value of a matrix of `elems` elements.
    pub fn part_count(elems: usize) -> usize {
        (elems / ACCESS_ELEMS)
            .div_ceil(LARGEST_THREADS)
            .min(LARGEST_PARTS)
    }

    /// Finds the largest absolute value of the bf16 matrix `x` of `elems` elements, in parts.
    ///
    /// # Errors
    /// The launch failed.
    ///
    /// # Safety
    /// `x` and `parts` are addresses of memory of the stream's GPU, `x` a multiple of [`FP8_ALIGN`], of `elems` elements, a multiple of
    /// [`FP8_UNIT`], and of [`Fp8Kernels::part_count`] parts, which stays until the kernel has run.
    pub unsafe fn largest(
        &self,
        stream: &Stream,
        x: u64,
        elems: usize,
        parts: u64,
    ) -> Result<(), GpuError> {
        let args = [Arg::Ptr(x), Arg::Ptr(parts), count(elems / ACCESS_ELEMS)];
        let grid = [Self::part_count(elems) as u32, 1, 1];
        let block = [LARGEST_THREADS as u32, 1, 1];
        // SAFETY: the arguments match the kernel, which reads `elems` elements and writes a part for each block.
        unsafe { self.largest_parts.launch(grid, block, 0, stream, &args) }
    }

    /// Converts the bf16 matrix `x` `[rows, columns]`, whose largest value is in `parts`.
    ///
    /// # Errors
    /// The launch failed.
    ///
    /// # Panics
    /// If a size is no multiple of [`FP8_UNIT`], or 0.
    ///
    /// # Safety
    /// All addresses are of memory of the stream's GPU, multiples of [`FP8_ALIGN`] but that of the scale, which stays until the kernel has run; `to` has
    /// room for what it names; [`Fp8Kernels::largest`] was enqueued before with the same `x` and `parts`.
    pub unsafe fn convert(
        &self,
        stream: &Stream,
        (x, parts): (u64, u64),
        to: Fp8Addresses,
        format: Fp8Format,
        [rows, columns]: [usize; 2],
    ) -> Result<(), GpuError> {
        for size in [rows, columns] {
            assert!(
                size.is_multiple_of(FP8_UNIT) && size > 0,
                "sizes in multiples of {FP8_UNIT}, not {size}"
            );
        }
        let args = [
            Arg::Ptr(x),
            Arg::Ptr(to.straight),
            Arg::Ptr(to.transposed),
            Arg::Ptr(parts),
            count(Self::part_count(rows * columns)),
            Arg::Ptr(to.inverse_scale),
            count(rows),
            count(columns),
        ];
        let function = match format {
            Fp8Format::E4m3 => &self.to_e4m3,
            Fp8Format::E5m2 => &self.to_e5m2,
        };
        let blocks = rows.div_ceil(TILE) * columns.div_ceil(TILE);
        let grid = [u32::try_from(blocks).expect("fewer than 2^32 blocks"), 1, 1];
        // SAFETY: the arguments match the kernel, which touches `rows` times `columns` elements of each matrix that is not null.
        unsafe { function.launch(grid, [LARGEST_PARTS as u32, 1, 1], 0, stream, &args) }
    }
}

/// A kernel's argument for a number of elements, rows or parts.
fn count(elems: usize) -> Arg {
    Arg::U32(u32::try_from(elems).expect("fewer than 2^32"))
}
