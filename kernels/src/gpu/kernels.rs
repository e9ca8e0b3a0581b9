//! This crate's kernels, compiled once per device: the optimizer and the reductions over ranges of device memory.
//!
//! Lengths are checked before a launch; nothing waits for the device. Results have the bits of the CPU functions of the
//! same names, and move as many bytes per element. The device's memory is the bottleneck: `kernels/tests/gpu` prints
//! the GB/s reached.

use std::ops::Range;

use super::{Arg, DeviceAt, Function, FunctionUse, Gpu, GpuError, Stream};
use crate::adamw::{
    BLOCK_ELEMS, Hyper, Master, Moments, PLANE_ALIGN_BYTES, TileFormat, UpdateRule, kernel_scalars,
    state_planes, state_tile_bytes,
};
use crate::reduce::{CHUNK_ELEMS, GradType};

/// Threads of a block, as in the sources.
const BLOCK_THREADS: usize = 256;
/// Elements per thread of `steps`, `accumulate` and `store`.
const THREAD_ELEMS: usize = 4;
/// Blocks of moments in 8 bits per block of threads.
const GROUP_BLOCKS: usize = 16;
/// Chunks per block of `chunk_squares`: one per warp.
const BLOCK_CHUNKS: usize = 8;

/// The compiled kernels, see [`Gpu::kernels`].
#[derive(Debug)]
pub struct Kernels {
    /// Kernels of [`step_names`].
    steps: Vec<Function>,
    chunk_squares: [Function; 3],
    add_chunks: Function,
    accumulate: [Function; 3],
    store: [Function; 3],
}

/// Parts of the names of the kernels of `adamw.cu`: by rule, by master with gradients of its own type and then of fp32, and by
/// moments.
const RULES: [&str; 3] = ["adamw_", "lion_", "sgd_"];
const MASTERS: [&str; 7] = [
    "split_bf16",
    "fp32",
    "fp16_whole_master",
    "split_bf16_fp32_grad",
    "fp16_whole_master_fp32_grad",
    "bf16_master",
    "bf16_master_fp32_grad",
];
const MOMENTS: [&str; 3] = ["", "_bf16_moments", "_8bit_moments"];

/// Returns the names in the order of [`step_index`].
fn step_names() -> impl Iterator<Item = String> {
    RULES.into_iter().flat_map(|rule| {
        let of_master = move |master| MOMENTS.map(|moments| format!("{rule}{master}{moments}"));
        MASTERS.into_iter().flat_map(of_master)
    })
}

/// Panics if a master has no update with such gradients.
fn step_index(format: TileFormat, grad_type: GradType) -> usize {
    let TileFormat {
        rule,
        master,
        moments,
    } = format;
    let rule = match rule {
        UpdateRule::AdamW => 0,
        UpdateRule::Lion => 1,
        UpdateRule::Sgd | UpdateRule::Muon => 2,
    };
    let master = match (master, grad_type) {
        (Master::SplitBf16, GradType::Bf16) => 0,
        (Master::Fp32, GradType::Fp32) => 1,
        (Master::Fp16WholeMaster, GradType::Fp16) => 2,
        (Master::SplitBf16, GradType::Fp32) => 3,
        (Master::Fp16WholeMaster, GradType::Fp32) => 4,
        (Master::Bf16, GradType::Bf16) => 5,
        (Master::Bf16, GradType::Fp32) => 6,
        _ => panic!("no update of {master:?} takes gradients of type {grad_type:?}"),
    };
    let moments = match moments {
        Moments::Fp32 => 0,
        Moments::Bf16 => 1,
        Moments::EightBit => 2,
    };
    (rule * MASTERS.len() + master) * MOMENTS.len() + moments
}

/// Scratch memory of [`Kernels::sum_squares`] for `elems` elements, bytes.
pub fn sum_squares_scratch_bytes(elems: usize) -> usize {
    elems.div_ceil(CHUNK_ELEMS).max(1) * size_of::<f64>()
}

/// A tile in device memory, with the layout it has in host memory.
#[derive(Clone, Copy, Debug)]
pub struct TileAt<'a> {
    /// Storage of the numbers.
    pub format: TileFormat,
    /// Parameters, at a multiple of 64 bytes, updated in place.
    pub param: DeviceAt<'a>,
    /// State, at a multiple of 64 bytes, updated in place.
    pub state: DeviceAt<'a>,
    /// Gradients, at a multiple of 64 bytes.
    pub grad: DeviceAt<'a>,
    /// Type of the gradients: the master's own, or fp32.
    pub grad_type: GradType,
    /// Elements of the tile.
    pub elems: usize,
}

impl Kernels {
    pub(super) fn compile(gpu: &Gpu) -> Result<Self, GpuError> {
        let (adamw, reduce) = (gpu.compile_own("adamw")?, gpu.compile_own("reduce")?);
        let of_types = |name: &str| -> Result<[Function; 3], GpuError> {
            Ok([
                reduce.function(&format!("{name}_bf16"))?,
                reduce.function(&format!("{name}_fp16"))?,
                reduce.function(&format!("{name}_fp32"))?,
            ])
        };
        Ok(Self {
            steps: step_names()
                .map(|name| adamw.function(&name))
                .collect::<Result<_, _>>()?,
            chunk_squares: of_types("chunk_squares")?,
            add_chunks: reduce.function("add_chunks")?,
            accumulate: of_types("accumulate")?,
            store: of_types("store")?,
        })
    }

    /// Registers and local memory of each kernel, by name.
    ///
    /// # Errors
    /// The call failed.
    pub fn resources(&self) -> Result<Vec<(String, FunctionUse)>, GpuError> {
        let reductions = [
            ("chunk_squares_bf16", &self.chunk_squares[0]),
            ("add_chunks", &self.add_chunks),
            ("accumulate_bf16", &self.accumulate[0]),
            ("store_bf16", &self.store[0]),
        ];
        let reductions = reductions.map(|(name, function)| (name.to_owned(), function));
        (step_names().zip(&self.steps))
            .chain(reductions)
            .map(|(name, function)| Ok((name, function.resources()?)))
            .collect()
    }

    /// Enqueues one step over the elements `range` of a tile, like [`crate::adamw::step_range`].
    ///
    /// Moves 26 bytes per element (split bf16), 22 (bf16 master), 28 (fp32, fp16); two more for fp32 gradients of a 16-bit parameter, and four
    /// less for each moment in bf16, six less for one in 8 bits. Lion moves no variance: eight less; SGD no momentum either.
    ///
    /// Panics if a range is not within its buffer or its tile, a position is not aligned as [`TileAt`] says,
    /// `hyper.step` is 0, or the gradients are of the other 16-bit type.
    ///
    /// # Errors
    /// The launch failed.
    pub fn adamw_range(
        &self,
        stream: &Stream,
        hyper: &Hyper,
        tile: TileAt<'_>,
        range: Range<usize>,
    ) -> Result<(), GpuError> {
        let TileAt {
            format,
            param,
            state,
            grad,
            grad_type,
            elems,
        } = tile;
        assert!(
            range.start <= range.end && range.end <= elems,
            "range {range:?} is not within the tile's {elems} elements"
        );
        for (name, place) in [("param", param), ("state", state), ("grad", grad)] {
            assert!(
                place.offset_bytes.is_multiple_of(PLANE_ALIGN_BYTES),
                "the {name} starts at byte {}, which is no multiple of {PLANE_ALIGN_BYTES}",
                place.offset_bytes
            );
        }
        let param = param.address(elems * format.master.param_bytes());
        let state = state.address(state_tile_bytes(format, elems));
        let grad = grad.address(elems * grad_type.elem_bytes());
        let (scalars, random) = kernel_scalars(format.rule, hyper);
        if range.is_empty() {
            return Ok(());
        }
        let [
            first,
            momentum,
            variance,
            momentum_largest,
            variance_largest,
        ] = state_planes(format, elems).map(|plane| Arg::Ptr(state + plane.start as u64));
        let mut args = vec![
            Arg::Ptr(param),
            first,
            momentum,
            variance,
            Arg::Ptr(grad),
            Arg::U64(range.start as u64),
            Arg::U64(range.end as u64),
        ];
        args.extend(scalars.map(Arg::F32));
        args.extend(random.map(Arg::U32));
        let groups = |elems: usize| range.end.div_ceil(elems) - range.start / elems;
        let has_moments = matches!(format.rule, UpdateRule::AdamW | UpdateRule::Lion);
        let blocks = if format.moments == Moments::EightBit && has_moments {
            args.extend([momentum_largest, variance_largest, Arg::U64(elems as u64)]);
            groups(BLOCK_ELEMS).div_ceil(GROUP_BLOCKS)
        } else {
            groups(THREAD_ELEMS).div_ceil(BLOCK_THREADS)
        };
        let function = &self.steps[step_index(format, grad_type)];
        // SAFETY: the arguments match the kernel, which writes elements of `range` and the blocks of moments around it only; their
        // planes are within their buffers (checked above). Freeing a buffer waits for the device.
        unsafe { launch(function, blocks, stream, &args) }
    }

    /// Enqueues the sum of the squares of `elems` elements into the f64 at `out`, in the order of
    /// [`crate::reduce::sum_squares`].
    ///
    /// `scratch` has [`sum_squares_scratch_bytes`] and belongs to this call until it has run.
    ///
    /// Panics if a range is not within its buffer or not aligned to its elements.
    ///
    /// # Errors
    /// A launch failed.
    pub fn sum_squares(
        &self,
        stream: &Stream,
        grad_type: GradType,
        grad: DeviceAt<'_>,
        elems: usize,
        scratch: DeviceAt<'_>,
        out: DeviceAt<'_>,
    ) -> Result<(), GpuError> {
        let grad = elements(grad, elems, grad_type.elem_bytes());
        let scratch = elements(scratch, sum_squares_scratch_bytes(elems) / 8, 8);
        let out = elements(out, 1, 8);
        let chunks = elems.div_ceil(CHUNK_ELEMS);
        if chunks > 0 {
            let args = [Arg::Ptr(grad), Arg::U64(elems as u64), Arg::Ptr(scratch)];
            let function = &self.chunk_squares[type_index(grad_type)];
            // SAFETY: the arguments match the kernel, which reads `elems` elements and writes one f64 per chunk; both
            // are within their buffers (checked above). Freeing a buffer waits for the device.
            unsafe { launch(function, chunks.div_ceil(BLOCK_CHUNKS), stream, &args)? };
        }
        let args = [Arg::Ptr(scratch), Arg::U64(chunks as u64), Arg::Ptr(out)];
        // SAFETY: the arguments match the kernel, which reads one f64 per chunk and writes one at `out`, all within
        // their buffers.
        unsafe { launch(&self.add_chunks, 1, stream, &args) }
    }

    /// Enqueues `sum[i] += x[i]` over `elems` elements, the sum in fp32, like [`crate::reduce::accumulate`].
    ///
    /// Panics if a range is not within its buffer or not aligned to its elements.
    ///
    /// # Errors
    /// The launch failed.
    pub fn accumulate(
        &self,
        stream: &Stream,
        sum: DeviceAt<'_>,
        x: DeviceAt<'_>,
        x_type: GradType,
        elems: usize,
    ) -> Result<(), GpuError> {
        let function = &self.accumulate[type_index(x_type)];
        let sum = (elements(sum, elems, 4), 4);
        let x = (elements(x, elems, x_type.elem_bytes()), x_type.elem_bytes());
        // SAFETY: `elements` checked that both ranges are within their buffers.
        unsafe { launch_pairs(function, stream, sum, x, elems) }
    }

    /// Enqueues the cast of `elems` fp32 elements to stored gradients, like [`crate::reduce::store_grad`].
    ///
    /// Panics if a range is not within its buffer or not aligned to its elements.
    ///
    /// # Errors
    /// The launch failed.
    pub fn store_grad(
        &self,
        stream: &Stream,
        grad_type: GradType,
        from: DeviceAt<'_>,
        out: DeviceAt<'_>,
        elems: usize,
    ) -> Result<(), GpuError> {
        let function = &self.store[type_index(grad_type)];
        let elem_bytes = grad_type.elem_bytes();
        let from = (elements(from, elems, 4), 4);
        let out = (elements(out, elems, elem_bytes), elem_bytes);
        // SAFETY: `elements` checked that both ranges are within their buffers.
        unsafe { launch_pairs(function, stream, from, out, elems) }
    }
}

/// Returns the address of `elems` elements. Panics unless they are within the buffer and aligned.
fn elements(at: DeviceAt<'_>, elems: usize, elem_bytes: usize) -> u64 {
    assert!(
        at.offset_bytes.is_multiple_of(elem_bytes),
        "elements of {elem_bytes} bytes start at byte {}",
        at.offset_bytes
    );
    at.address(elems * elem_bytes)
}

/// Launches a kernel over pairs of elements, each given as address and bytes per element.
///
/// # Safety
/// `function` takes two addresses, a count and a flag; both ranges are device memory that stays allocated until it has run.
unsafe fn launch_pairs(
    function: &Function,
    stream: &Stream,
    (a, a_bytes): (u64, usize),
    (b, b_bytes): (u64, usize),
    elems: usize,
) -> Result<(), GpuError> {
    if elems == 0 {
        return Ok(());
    }
    let whole = |address: u64, bytes: usize| address.is_multiple_of((THREAD_ELEMS * bytes) as u64);
    let args = [
        Arg::Ptr(a),
        Arg::Ptr(b),
        Arg::U64(elems as u64),
        Arg::U32(u32::from(whole(a, a_bytes) && whole(b, b_bytes))),
    ];
    let blocks = elems.div_ceil(THREAD_ELEMS * BLOCK_THREADS);
    // SAFETY: the caller's promise.
    unsafe { launch(function, blocks, stream, &args) }
}

/// # Safety
/// Same as [`Function::launch`].
unsafe fn launch(
    function: &Function,
    blocks: usize,
    stream: &Stream,
    args: &[Arg],
) -> Result<(), GpuError> {
    let blocks =
        u32::try_from(blocks).expect("fewer than 2^32 blocks: a buffer of less than 16 TB");
    // SAFETY: the caller's promise.
    unsafe {
        function.launch(
            [blocks, 1, 1],
            [BLOCK_THREADS as u32, 1, 1],
            0,
            stream,
            args,
        )
    }
}

fn type_index(grad_type: GradType) -> usize {
    match grad_type {
        GradType::Bf16 => 0,
        GradType::Fp16 => 1,
        GradType::Fp32 => 2,
    }
}
