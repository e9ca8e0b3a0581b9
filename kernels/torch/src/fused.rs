//! Fused kernels of a Llama block and its head over torch's tensors: each does in one pass over memory what torch's
//! operators do in several. Everything is enqueued on the default stream, where torch computes; nothing waits.
//!
//! All kernels are memory-bound; the sources state the bytes per element. The arithmetic is fp32, rounded where the
//! operators round. Sums are added in an order that depends on the shape alone, so the bits are the same each time.
//!
//! A tensor on another device, or of another kind, shape or layout than documented is a bug of this program: these
//! functions panic.

use tch::{Device, Kind, Tensor};

use crate::TorchError;
use kernels::gpu::{Arg, Function, Gpu, GpuError, Module, Stream};

/// Lanes of a warp, as in the sources.
const WARP_LANES: usize = 32;
/// Threads of a block in which each thread has its own elements.
const BLOCK_THREADS: usize = 256;
/// Threads of a block of `sum_parts`.
const SUM_THREADS: usize = 1024;
/// How wide the blocks of a norm's forward are.
const NORM: RowBlock = RowBlock {
    chunks: 4,
    threads_max: 512,
};
/// And those of its backward.
const NORM_BACKWARD: RowBlock = RowBlock {
    chunks: 1,
    threads_max: 1024,
};
/// Most parts into which rows are cut when a weight's gradient is summed over them: enough blocks for any GPU, while
/// the parts (fp32) stay small beside the rows.
const NORM_PARTS_MAX: usize = 512;
/// Threads for a row of logits: 8 passes over a vocabulary of 32,000.
const LOSS_THREADS: usize = 512;
/// Bytes of the widest access.
const ACCESS_BYTES: usize = 16;

/// The compiled kernels of one GPU.
#[derive(Debug)]
pub struct FusedKernels {
    stream: Stream,
    device: Device,
    rms_norm: Variants,
    rms_norm_backward: Variants,
    sum_parts: [Function; 2],
    rotary: Variants,
    gated: Variants,
    gated_backward: Variants,
    cross_entropy: Variants,
}

/// A block of threads that works on one row at a time, as the source has it.
struct RowBlock {
    /// Accesses of a thread to a row of each operand.
    chunks: usize,
    /// So that a thread has registers for its chunks.
    threads_max: usize,
}

impl RowBlock {
    /// Threads for a row of `columns` elements, `lanes` in an access.
    fn threads(&self, columns: usize, lanes: usize) -> usize {
        (columns / lanes)
            .div_ceil(self.chunks)
            .next_multiple_of(WARP_LANES)
            .clamp(WARP_LANES, self.threads_max)
    }
}

/// The variants of a kernel: per kind, with wide accesses or without.
#[derive(Debug)]
struct Variants {
    bf16: [Function; 2],
    fp32: [Function; 2],
}

/// A norm's result, and the inputs of its backward pass.
#[derive(Debug)]
pub struct FusedNorm {
    /// The normed input where it was a sum; of the input's shape.
    pub sum: Option<Tensor>,
    /// The result with the weight applied, of the input's shape.
    pub output: Tensor,
    /// 1 / rms of each row, [rows, 1], fp32.
    pub scale: Tensor,
}

/// Direction of a rotary embedding.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Turn {
    /// By the position's angle.
    Forward,
    /// By its negative, for gradients.
    Backward,
    /// No rotation, only a copy.
    Not,
}

impl FusedKernels {
    /// Compiles the kernels for `gpu` (about 2 s), which is torch's `device` ([`crate::use_gpu`]).
    ///
    /// # Errors
    /// There is no run-time compiler, or it refused the source.
    pub fn compile(gpu: &Gpu, device: Device) -> Result<Self, GpuError> {
        let module = gpu.compile_own("fused")?;
        let variants = |name: &str| Variants::load(&module, name);
        Ok(Self {
            stream: gpu.default_stream(),
            device,
            rms_norm: variants("rms_norm")?,
            rms_norm_backward: variants("rms_norm_backward")?,
            sum_parts: [
                module.function("sum_parts_bf16")?,
                module.function("sum_parts_fp32")?,
            ],
            rotary: variants("rotary")?,
            gated: variants("gated")?,
            gated_backward: variants("gated_backward")?,
            cross_entropy: variants("cross_entropy")?,
        })
    }

    /// Computes `weight * x / rms(x)` for each row of `x` [rows, columns], or of `x + added` if given. The sum is
    /// rounded before it is normed, and the quotient before the weight `[columns]` is applied.
    ///
    /// # Errors
    /// Out of memory, or the launch failed.
    pub fn rms_norm(
        &self,
        x: &Tensor,
        added: Option<&Tensor>,
        weight: &Tensor,
        eps: f64,
    ) -> Result<FusedNorm, TorchError> {
        let (rows, columns, kind) = (size(x, 0), size(x, 1), x.kind());
        let sum = added.map(|_| x.f_empty_like()).transpose()?;
        let output = x.f_empty_like()?;
        let scale = Tensor::f_empty([rows as i64, 1], (Kind::Float, self.device))?;
        let matrix = |t: &Tensor| self.operand(t, kind, rows * columns);
        let addresses = [
            matrix(x),
            added.map_or(0, matrix),
            self.operand(weight, kind, columns),
            sum.as_ref().map_or(0, matrix),
            matrix(&output),
        ];
        let (function, lanes) = self.rms_norm.pick(kind, columns, &addresses);
        let threads = NORM.threads(columns, lanes);
        let mut args: Vec<Arg> = addresses.map(Arg::Ptr).into();
        args.extend([
            Arg::Ptr(self.operand(&scale, Kind::Float, rows)),
            Arg::U32(columns as u32),
            Arg::F32(eps as f32),
        ]);
        // SAFETY: the arguments match the kernel, which touches `rows` rows of `columns` elements; `operand` verified
        // the tensors' sizes (without `added` and `sum` they are null, which the kernel handles).
        unsafe { self.launch(function, rows, threads, &args)? };
        Ok(FusedNorm { sum, output, scale })
    }

    /// Computes the gradients of a norm's input and weight from that of its output, all [rows, columns] but the
    /// weight's. `beside` is added to the input's gradient, after rounding.
    ///
    /// # Errors
    /// Out of memory, or a launch failed.
    pub fn rms_norm_backward(
        &self,
        grad: &Tensor,
        x: &Tensor,
        weight: &Tensor,
        scale: &Tensor,
        beside: Option<&Tensor>,
    ) -> Result<(Tensor, Tensor), TorchError> {
        let (rows, columns, kind) = (size(x, 0), size(x, 1), x.kind());
        let rows_each = rows.div_ceil(NORM_PARTS_MAX).max(1);
        let parts_count = rows.div_ceil(rows_each);
        let grad_x = x.f_empty_like()?;
        let grad_weight = weight.f_empty_like()?;
        let parts = Tensor::f_empty(
            [parts_count as i64, columns as i64],
            (Kind::Float, self.device),
        )?;
        let matrix = |t: &Tensor| self.operand(t, kind, rows * columns);
        let weight = self.operand(weight, kind, columns);
        let scale = self.operand(scale, Kind::Float, rows);
        let parts_address = self.operand(&parts, Kind::Float, parts_count * columns);
        let wide = [matrix(grad), matrix(x), weight, matrix(&grad_x)];
        let beside = beside.map_or(0, matrix);
        let (function, lanes) = self.rms_norm_backward.pick(
            kind,
            columns,
            &[wide[0], wide[1], wide[2], wide[3], beside],
        );
        let threads = NORM_BACKWARD.threads(columns, lanes);
        let args = [
            Arg::Ptr(wide[0]),
            Arg::Ptr(wide[1]),
            Arg::Ptr(weight),
            Arg::Ptr(scale),
            Arg::Ptr(beside),
            Arg::Ptr(wide[3]),
            Arg::Ptr(parts_address),
            Arg::U32(rows as u32),
            Arg::U32(rows_each as u32),
            Arg::U32(columns as u32),
        ];
        // SAFETY: the arguments match the kernel; block b works on rows from b * rows_each, at most to `rows`, and on
        // part b, with as many parts as blocks. `operand` verified the tensors' sizes.
        unsafe { self.launch(function, parts_count, threads, &args)? };
        let function = &self.sum_parts[usize::from(kind == Kind::Float)];
        let args = [
            Arg::Ptr(parts_address),
            Arg::Ptr(self.operand(&grad_weight, kind, columns)),
            Arg::U32(parts_count as u32),
            Arg::U32(columns as u32),
        ];
        // SAFETY: the arguments match the kernel, which reads the parts and writes `columns` elements; `operand`
        // verified the sizes.
        unsafe { self.launch(function, columns.div_ceil(WARP_LANES), SUM_THREADS, &args)? };
        Ok((grad_x, grad_weight))
    }

    /// Rotates the pairs (i, i + half of a head) of `from` into `to`, both [sequences, tokens, heads, head_dim] with
    /// contiguous heads, of one kind with the tables `cos` and `sin` [positions, head_dim], whose halves are equal.
    /// `to` may be `from`.
    ///
    /// # Errors
    /// The launch failed.
    pub fn rotary(
        &self,
        from: &Tensor,
        to: &Tensor,
        cos: &Tensor,
        sin: &Tensor,
        turn: Turn,
    ) -> Result<(), TorchError> {
        let (kind, shape) = (from.kind(), from.size());
        assert_eq!(shape, to.size(), "both have one shape");
        let [_, tokens, heads, head_dim] = shape[..] else {
            panic!("rotary takes four dimensions, not {shape:?}");
        };
        let tables = self.operand(cos, kind, cos.numel());
        let tables = [tables, self.operand(sin, kind, cos.numel())];
        assert!(
            size(cos, 0) >= tokens as usize && size(cos, 1) == head_dim as usize,
            "the tables have every position"
        );
        let places = [self.strided(from, kind), self.strided(to, kind)];
        let half = head_dim as usize / 2;
        let strides: Vec<i64> = [from, to]
            .iter()
            .flat_map(|t| t.stride()[..3].to_vec())
            .collect();
        // Wide accesses require every head to start at a multiple of their width.
        let lanes_wide = ACCESS_BYTES / kind.elt_size_in_bytes();
        let regular = strides.iter().all(|s| *s % lanes_wide as i64 == 0);
        let unit = if regular { half } else { 1 };
        let (function, lanes) =
            self.rotary
                .pick(kind, unit, &[places[0], places[1], tables[0], tables[1]]);
        let count = from.numel() / 2 / lanes;
        if count == 0 {
            return Ok(());
        }
        let mut args: Vec<Arg> = [places[0], places[1], tables[0], tables[1]]
            .map(Arg::Ptr)
            .into();
        args.extend(strides.iter().map(|stride| Arg::I64(*stride)));
        args.extend([
            Arg::U32(tokens as u32),
            Arg::U32(heads as u32),
            Arg::U32(half as u32),
            accesses(count),
            Arg::F32(match turn {
                Turn::Forward => 1.0,
                Turn::Backward => -1.0,
                Turn::Not => 0.0,
            }),
        ]);
        // SAFETY: the arguments match the kernel, which touches the elements given by shape and strides, which are
        // torch's own for these tensors; the tables have `tokens` rows of `head_dim` (asserted above).
        unsafe {
            self.launch(
                function,
                count.div_ceil(BLOCK_THREADS),
                BLOCK_THREADS,
                &args,
            )?
        };
        Ok(())
    }

    /// Computes silu(gate) * up for `gate_up` [rows, 2 * columns], with gate in the first half of each row: [rows,
    /// columns].
    ///
    /// # Errors
    /// Out of memory, or the launch failed.
    pub fn gated(&self, gate_up: &Tensor) -> Result<Tensor, TorchError> {
        let (rows, columns, kind) = (size(gate_up, 0), size(gate_up, 1) / 2, gate_up.kind());
        let output = Tensor::f_empty([rows as i64, columns as i64], (kind, self.device))?;
        let addresses = [
            self.operand(gate_up, kind, rows * columns * 2),
            self.operand(&output, kind, rows * columns),
        ];
        // SAFETY: the arguments match the kernel; `operand` verified the tensors' sizes.
        unsafe { self.launch_pairs(&self.gated, kind, addresses, rows, columns)? };
        Ok(output)
    }

    /// Runs [`FusedKernels::gated`] backward in place: `grad` [rows, columns], the gradient of its result, becomes that result
    /// again, and `gate_up` [rows, 2 * columns] becomes its own gradient.
    ///
    /// # Errors
    /// The launch failed.
    pub fn gated_backward(
        &self,
        grad: &mut Tensor,
        gate_up: &mut Tensor,
    ) -> Result<(), TorchError> {
        let (rows, columns, kind) = (size(grad, 0), size(grad, 1), grad.kind());
        let addresses = [
            self.operand(grad, kind, rows * columns),
            self.operand(gate_up, kind, rows * columns * 2),
        ];
        // SAFETY: the arguments match the kernel; `operand` verified the tensors' sizes.
        unsafe { self.launch_pairs(&self.gated_backward, kind, addresses, rows, columns) }
    }

    /// Writes each row's loss to `losses`, `[rows]` (fp32): the cross entropy of `logits` [rows, words] and the row's
    /// number in `targets`, `[rows]` (i64, less than `words`), 0 where that is negative. With `weight` the logits become
    /// the gradient of `weight` times the sum of the losses.
    ///
    /// # Errors
    /// The launch failed.
    pub fn cross_entropy(
        &self,
        logits: &mut Tensor,
        targets: &Tensor,
        losses: &mut Tensor,
        weight: Option<f64>,
    ) -> Result<(), TorchError> {
        let (rows, columns, kind) = (size(logits, 0), size(logits, 1), logits.kind());
        let address = self.operand(logits, kind, rows * columns);
        let (function, _) = self.cross_entropy.pick(kind, columns, &[address]);
        let args = [
            Arg::Ptr(address),
            Arg::Ptr(self.operand(targets, Kind::Int64, rows)),
            Arg::Ptr(self.operand(losses, Kind::Float, rows)),
            Arg::U32(columns as u32),
            Arg::U32(weight.is_some().into()),
            Arg::F32(weight.unwrap_or(0.0) as f32),
        ];
        // SAFETY: the arguments match the kernel, which touches `rows` rows; `operand` verified the tensors' sizes.
        // Targets are less than `words` (this function's contract, checked where tokens come in:
        // `trainer::compute::Tokens`).
        unsafe { self.launch(function, rows, LOSS_THREADS, &args)? };
        Ok(())
    }

    /// Address of a tensor on this GPU, of this kind, with this number of contiguous elements.
    fn operand(&self, tensor: &Tensor, kind: Kind, elems: usize) -> u64 {
        assert!(
            tensor.is_contiguous(),
            "a tensor whose elements lie side by side"
        );
        assert_eq!(tensor.numel(), elems, "a tensor of the shape asked for");
        self.strided(tensor, kind)
    }

    /// Address of a tensor of which only the last dimension is contiguous.
    fn strided(&self, tensor: &Tensor, kind: Kind) -> u64 {
        assert_eq!(tensor.device(), self.device, "a tensor on this GPU");
        assert_eq!(tensor.kind(), kind, "a tensor of one kind with the others");
        assert_eq!(
            tensor.stride().last(),
            Some(&1),
            "neighbours lie side by side"
        );
        tensor.data_ptr() as u64
    }

    /// # Safety
    /// Like [`FusedKernels::launch`], for a kernel that takes two addresses, columns and a count of accesses.
    unsafe fn launch_pairs(
        &self,
        variants: &Variants,
        kind: Kind,
        addresses: [u64; 2],
        rows: usize,
        columns: usize,
    ) -> Result<(), TorchError> {
        let (function, lanes) = variants.pick(kind, columns, &addresses);
        let count = rows * (columns / lanes);
        let args = [
            Arg::Ptr(addresses[0]),
            Arg::Ptr(addresses[1]),
            Arg::U32(columns as u32),
            accesses(count),
        ];
        // SAFETY: the caller's promise.
        unsafe {
            self.launch(
                function,
                count.div_ceil(BLOCK_THREADS),
                BLOCK_THREADS,
                &args,
            )
        }
    }

    /// # Safety
    /// Same as [`Function::launch`]. Tensors keep their memory until the kernel has run: torch reuses memory in the order of
    /// the default stream, and freeing a [`kernels::gpu::DeviceBuffer`] waits for the device.
    unsafe fn launch(
        &self,
        function: &Function,
        blocks: usize,
        threads: usize,
        args: &[Arg],
    ) -> Result<(), TorchError> {
        if blocks == 0 {
            return Ok(());
        }
        let grid = [u32::try_from(blocks).expect("fewer than 2^32 blocks"), 1, 1];
        // SAFETY: the caller's promise.
        unsafe { function.launch(grid, [threads as u32, 1, 1], 0, &self.stream, args)? };
        Ok(())
    }
}

impl Variants {
    fn load(module: &Module, name: &str) -> Result<Self, GpuError> {
        let pair = |kind: &str| -> Result<[Function; 2], GpuError> {
            Ok([
                module.function(&format!("{name}_{kind}_each"))?,
                module.function(&format!("{name}_{kind}_wide"))?,
            ])
        };
        Ok(Self {
            bf16: pair("bf16")?,
            fp32: pair("fp32")?,
        })
    }

    /// Selects the kernel for rows of `columns` elements at these addresses (0: none), and the number of elements it
    /// takes at a time.
    fn pick(&self, kind: Kind, columns: usize, addresses: &[u64]) -> (&Function, usize) {
        let pair = match kind {
            Kind::BFloat16 => &self.bf16,
            Kind::Float => &self.fp32,
            other => panic!("no fused kernel computes in {other:?}"),
        };
        let lanes = ACCESS_BYTES / kind.elt_size_in_bytes();
        let aligned = addresses
            .iter()
            .all(|address| address.is_multiple_of(ACCESS_BYTES as u64));
        if aligned && columns.is_multiple_of(lanes) {
            (&pair[1], lanes)
        } else {
            (&pair[0], 1)
        }
    }
}

/// The number of a kernel's accesses, whose threads count in 32 bits, up to the last block's end.
fn accesses(count: usize) -> Arg {
    assert!(
        count <= u32::MAX as usize - BLOCK_THREADS,
        "fewer than 2^32 accesses of a micro-batch"
    );
    Arg::U32(count as u32)
}

fn size(tensor: &Tensor, dimension: usize) -> usize {
    tensor.size()[dimension] as usize
}
