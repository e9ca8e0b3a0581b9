//! Causal attention by cuDNN: faster than torch's own kernels, and its backward pass repeats in bits.
//!
//! ```text
//!   library.rs   opens libcudnn at run time          graph.rs   graphs of operations and their plans
//!   sdpa.rs      the graphs of attention             `kernels::attention`: calls of a backward pass, so that its workspace is bounded
//! ```
//!
//! torch refuses cuDNN where algorithms must be deterministic, so this crate calls it directly. One [`CudnnAttention`] belongs
//! to one GPU; plans are made on first use of a shape and kept, since making one takes some tenths of a second. All work
//! is enqueued on the default stream, as torch's.

mod graph;
mod library;
mod sdpa;

use std::cell::RefCell;
use std::collections::HashMap;
use std::ffi::c_void;
use std::rc::Rc;

use kernels::attention::{AttentionSizes, Block, Chunk, Group, blocks, chunks, groups};
use kernels::gpu::library::dirs_of_loaded;
use kernels::gpu::{Gpu, GpuInfo, Vendor};
use tch::{Device, Kind, TchError, Tensor};

use self::graph::{CudnnType, Plan, Uid};
use self::library::Library9;
use self::sdpa::{Call, DK, DO, DQ, DQ_SUM, DV, Grads, K, LENGTHS, O, OFFSETS, Q, STATS, SUMS, V};
use super::TorchError;
use super::device::load_gpu_half;

/// Why cuDNN's attention cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum CudnnError {
    /// The library is missing or too old.
    #[error("cuDNN 9 was not found: {why}")]
    Missing {
        /// Each place tried, or what is wrong with the library.
        why: String,
    },
    /// The GPU is not one of those for which these kernels were checked.
    #[error("cuDNN's attention is used on NVIDIA's Hopper GPUs (sm_90) only, and this is {arch}")]
    Architecture {
        /// The GPU's architecture.
        arch: String,
    },
    /// A call failed.
    #[error("cuDNN failed in {op}: {message} (status {status})")]
    Call {
        /// What was done.
        op: &'static str,
        /// cuDNN's status.
        status: i32,
        /// cuDNN's message.
        message: String,
    },
    /// No engine supports the graph.
    #[error("cuDNN has no kernel for this attention")]
    NoEngine,
}

impl CudnnError {
    /// Whether cuDNN says that it does not support what was asked for: CUDNN_STATUS_NOT_SUPPORTED and its kinds.
    fn is_refusal(&self) -> bool {
        matches!(self, Self::Call { status, .. } if (3000..4000).contains(status))
    }
}

/// Returns whether cuDNN's attention can be used on this GPU: a Hopper GPU, and the library beside torch's GPU half.
///
/// # Errors
/// The reason why not.
pub fn find_cudnn(gpu: &GpuInfo) -> Result<(), TorchError> {
    library_for(gpu).map(|_| ())
}

fn library_for(gpu: &GpuInfo) -> Result<&'static Library9, TorchError> {
    if gpu.vendor != Vendor::Cuda || gpu.arch != "sm_90" {
        return Err(CudnnError::Architecture {
            arch: gpu.arch.clone(),
        }
        .into());
    }
    library()
}

fn library() -> Result<&'static Library9, TorchError> {
    // It loads cuDNN too, which then is found by its name.
    load_gpu_half()?;
    Ok(Library9::open(&dirs_of_loaded("libcudnn"))?)
}

/// Version of the library beside torch's GPU half, on any GPU.
///
/// # Errors
/// It was not found, lacks a function or is too old.
pub fn cudnn_version() -> Result<String, TorchError> {
    Ok(library()?.version_text())
}

/// Returns the chunk's part of `x` [batch, heads, ..], which has `heads` heads.
fn part_of_chunk(
    chunk: &Chunk,
    x: &Tensor,
    sizes: &AttentionSizes,
    heads: i64,
) -> Result<Tensor, TchError> {
    let share = sizes.heads / heads;
    x.f_narrow(0, chunk.sequence, chunk.batch)?
        .f_narrow(1, chunk.head / share, chunk.heads / share)
}

/// Returns the chunk's part of the gradients of query, key and value.
fn grads_of_chunk(
    chunk: &Chunk,
    sizes: &AttentionSizes,
    [query, key, value]: [&Tensor; 3],
) -> Result<[Tensor; 3], TchError> {
    Ok([
        part_of_chunk(chunk, query, sizes, sizes.heads)?,
        part_of_chunk(chunk, key, sizes, sizes.kv_heads)?,
        part_of_chunk(chunk, value, sizes, sizes.kv_heads)?,
    ])
}

/// Plans by the call that they compute; with gradients, those of a backward pass.
type Plans = HashMap<(Call, Option<Grads>), Rc<Plan>>;

/// Causal attention on one GPU.
pub struct CudnnAttention {
    library: &'static Library9,
    handle: usize,
    /// Whether sums have a fixed order.
    deterministic: bool,
    plans: RefCell<Plans>,
}

/// Result of a forward pass.
pub struct AttentionOutput {
    /// [batch, tokens, heads, head_dim]
    pub output: Tensor,
    /// For each query, the logarithm of the sum of its exponentials, fp32: [batch, heads, tokens], or such a tensor for each
    /// call.
    pub stats: Vec<Tensor>,
}

/// Documents that fill the sequences of a batch one after the other; attention stays within each.
pub struct PackedDocuments {
    groups: Vec<GroupOnGpu>,
    /// First token and length of documents that are computed alone.
    alone: Vec<(i64, i64)>,
}

struct GroupOnGpu {
    tokens: i64,
    count: i64,
    /// First token of each document, and one more number that cuDNN's form has: i64.
    starts: Tensor,
    /// i32
    lengths: Tensor,
}

impl PackedDocuments {
    /// Prepares documents of these `lengths` on `device`, for attention with so many query heads.
    ///
    /// # Errors
    /// Out of memory.
    pub fn new(lengths: &[i64], heads: i64, device: Device) -> Result<Self, TorchError> {
        let (groups, alone) = groups(lengths, heads);
        let on_gpu = |group: Group| {
            let starts = [&group.starts[..], &[0]].concat();
            let lengths: Vec<i32> = group.lengths.iter().map(|&length| length as i32).collect();
            Ok::<_, TorchError>(GroupOnGpu {
                tokens: group.tokens,
                count: group.lengths.len() as i64,
                starts: Tensor::f_from_slice(&starts)?.f_to_device(device)?,
                lengths: Tensor::f_from_slice(&lengths)?.f_to_device(device)?,
            })
        };
        Ok(Self {
            groups: groups.into_iter().map(on_gpu).collect::<Result<_, _>>()?,
            alone,
        })
    }
}

impl CudnnAttention {
    /// Opens cuDNN for `gpu`, which torch already uses ([`super::use_gpu`]). With `deterministic`, results repeat in bits.
    ///
    /// # Errors
    /// See [`find_cudnn`]; cuDNN does not start.
    pub fn open(gpu: &Gpu, deterministic: bool) -> Result<Self, TorchError> {
        let library = library_for(gpu.info())?;
        gpu.make_current()?;
        let mut handle = 0;
        // SAFETY: the pointer is live for the call, and the GPU's context is current.
        let status = unsafe { (library.create)(&mut handle) };
        library.check(status, "starting it")?;
        Ok(Self {
            library,
            handle,
            deterministic,
            plans: RefCell::default(),
        })
    }

    /// Computes causal attention of query, key and value, each [batch, heads, tokens, head_dim] with any strides but
    /// adjacent elements of a head; key and value have as many heads or a divisor. With a `window`, a query sees only so many
    /// tokens, its own included. With `documents`, attention stays within each; the sequences must follow each other in memory.
    ///
    /// # Errors
    /// cuDNN has no kernel for it; out of memory.
    pub fn forward(
        &self,
        qkv: [&Tensor; 3],
        window: Option<i64>,
        documents: Option<&PackedDocuments>,
    ) -> Result<AttentionOutput, TorchError> {
        let (batch, heads, tokens, head_dim) = qkv[0].size4()?;
        let kind = (qkv[0].kind(), qkv[0].device());
        let output = Tensor::f_empty([batch, tokens, heads, head_dim], kind)?;
        let by_head = output.f_transpose(1, 2)?;
        let Some(documents) = documents else {
            let stats = vec![self.forward_to(qkv, window, &by_head)?];
            return Ok(AttentionOutput { output, stats });
        };
        let qkv = flat_all(qkv)?;
        let (qkv, by_head) = ([&qkv[0], &qkv[1], &qkv[2]], flat(&by_head)?);
        let mut stats = Vec::new();
        for group in &documents.groups {
            stats.push(self.forward_group(qkv, window, group, &by_head)?);
        }
        for &(start, length) in &documents.alone {
            let [query, key, value] = &part_all(qkv, start, length)?;
            let output = by_head.f_narrow(2, start, length)?;
            stats.push(self.forward_to([query, key, value], window, &output)?);
        }
        Ok(AttentionOutput { output, stats })
    }

    /// Computes the output and returns the statistics.
    fn forward_to(
        &self,
        [query, key, value]: [&Tensor; 3],
        window: Option<i64>,
        by_head: &Tensor,
    ) -> Result<Tensor, TorchError> {
        let sizes = sizes_of(query, key, window)?;
        let device = query.device();
        let rows = [sizes.batch, sizes.heads, sizes.tokens];
        let stats = Tensor::f_empty(rows, (Kind::Float, device))?;
        let all = Chunk::all(&sizes);
        let block = Block::all(&sizes);
        let call = call_of(&sizes, &all, &block, [query, key, value], by_head);
        let plan = self.plan((call, None), || call.forward(self.library, self.handle))?;
        let addresses = [
            (Q, address(query)),
            (K, address(key)),
            (V, address(value)),
            (O, address(by_head)),
            (STATS, address(&stats)),
        ];
        self.enqueue(&plan, &addresses, device)?;
        Ok(stats)
    }

    /// The same for the documents of a group.
    fn forward_group(
        &self,
        [query, key, value]: [&Tensor; 3],
        window: Option<i64>,
        group: &GroupOnGpu,
        by_head: &Tensor,
    ) -> Result<Tensor, TorchError> {
        let sizes = group.sizes(query, key, window)?;
        let device = query.device();
        let rows = [sizes.batch, sizes.heads, sizes.tokens];
        let stats = Tensor::f_empty(rows, (Kind::Float, device))?;
        let call = group.call(&sizes, [query, key, value], by_head);
        let plan = self.plan((call, None), || call.forward(self.library, self.handle))?;
        let offsets = group.offsets(&[query, key, value, by_head])?;
        let mut addresses = vec![
            (Q, address(query)),
            (K, address(key)),
            (V, address(value)),
            (O, address(by_head)),
            (STATS, address(&stats)),
            (LENGTHS, address(&group.lengths)),
        ];
        addresses.extend(OFFSETS.iter().copied().zip(offsets.iter().map(address)));
        self.enqueue(&plan, &addresses, device)?;
        Ok(stats)
    }

    /// Computes the gradients of query, key and value from that of the output, and writes them to `grads`, which have the
    /// layouts that [`CudnnAttention::forward`] takes. `output` and `grad` are [batch, heads, tokens, head_dim] with equal
    /// strides.
    ///
    /// # Errors
    /// cuDNN has no kernel for it; out of memory.
    pub fn backward(
        &self,
        qkv: [&Tensor; 3],
        window: Option<i64>,
        documents: Option<&PackedDocuments>,
        (output, stats): (&Tensor, &[Tensor]),
        grad: &Tensor,
        grads: [&Tensor; 3],
    ) -> Result<(), TorchError> {
        let Some(documents) = documents else {
            return self.backward_of(qkv, window, (output, &stats[0]), grad, grads);
        };
        let (qkv, grads) = (flat_all(qkv)?, flat_all(grads)?);
        let (output, grad) = (flat(output)?, flat(grad)?);
        let qkv = [&qkv[0], &qkv[1], &qkv[2]];
        let grads = [&grads[0], &grads[1], &grads[2]];
        let (of_groups, of_alone) = stats.split_at(documents.groups.len());
        for (group, stats) in documents.groups.iter().zip(of_groups) {
            self.backward_group(qkv, window, group, (&output, stats), &grad, grads)?;
        }
        for (&(start, length), stats) in documents.alone.iter().zip(of_alone) {
            let [query, key, value] = &part_all(qkv, start, length)?;
            let [of_query, of_key, of_value] = &part_all(grads, start, length)?;
            let part = |x: &Tensor| x.f_narrow(2, start, length);
            self.backward_of(
                [query, key, value],
                window,
                (&part(&output)?, stats),
                &part(&grad)?,
                [of_query, of_key, of_value],
            )?;
        }
        Ok(())
    }

    /// The same for whole sequences.
    fn backward_of(
        &self,
        [query, key, value]: [&Tensor; 3],
        window: Option<i64>,
        (output, stats): (&Tensor, &Tensor),
        grad: &Tensor,
        grads: [&Tensor; 3],
    ) -> Result<(), TorchError> {
        let sizes = sizes_of(query, key, window)?;
        let inputs = Inputs {
            qkv: [query, key, value],
            output,
            stats,
            grad,
        };
        if !self.deterministic {
            let (all, block) = (Chunk::all(&sizes), Block::all(&sizes));
            return self.call_backward(&sizes, &all, &block, &inputs, grads);
        }
        let blocks = blocks(&sizes);
        for chunk in chunks(&sizes, &blocks) {
            match &blocks[..] {
                [block] => {
                    let grads = grads_of_chunk(&chunk, &sizes, grads)?;
                    let grads = [&grads[0], &grads[1], &grads[2]];
                    self.call_backward(&sizes, &chunk, block, &inputs, grads)?;
                }
                blocks => self.sum_of_blocks(&sizes, &chunk, blocks, &inputs, grads)?,
            }
        }
        Ok(())
    }

    /// The same for the documents of a group.
    fn backward_group(
        &self,
        [query, key, value]: [&Tensor; 3],
        window: Option<i64>,
        group: &GroupOnGpu,
        (output, stats): (&Tensor, &Tensor),
        grad: &Tensor,
        grads: [&Tensor; 3],
    ) -> Result<(), TorchError> {
        let sizes = group.sizes(query, key, window)?;
        let call = group.call(&sizes, [query, key, value], output);
        let [of_query, of_key, of_value] = grads;
        let tensors = [query, key, value, output, of_query, of_key, of_value];
        let offsets = group.offsets(&tensors)?;
        let more = [(LENGTHS, address(&group.lengths))]
            .into_iter()
            .chain(OFFSETS.iter().copied().zip(offsets.iter().map(address)));
        let inputs = Inputs {
            qkv: [query, key, value],
            output,
            stats,
            grad,
        };
        self.enqueue_backward(call, &inputs, grads, more)
    }

    /// Adds the gradients of all `blocks` in their order, in fp32.
    fn sum_of_blocks(
        &self,
        sizes: &AttentionSizes,
        chunk: &Chunk,
        blocks: &[Block],
        inputs: &Inputs,
        grads: [&Tensor; 3],
    ) -> Result<(), TorchError> {
        let grads = grads_of_chunk(chunk, sizes, grads)?;
        let device = inputs.grad.device();
        let kind = inputs.grad.kind();
        let zeros = |like: &Tensor| Tensor::f_zeros(like.size(), (Kind::Float, device));
        let sums = [zeros(&grads[0])?, zeros(&grads[1])?, zeros(&grads[2])?];
        for block in blocks {
            let rows = [block.queries, block.keys, block.keys];
            let part = |x: &Tensor, at: usize| {
                let (start, count) = if at == 0 {
                    (block.query, block.queries)
                } else {
                    (block.key, block.keys)
                };
                x.f_narrow(2, start, count)
            };
            let mut found = Vec::with_capacity(3);
            for (sum, rows) in sums.iter().zip(rows) {
                let (batch, heads, _, head_dim) = sum.size4()?;
                found.push(Tensor::f_empty(
                    [batch, heads, rows, head_dim],
                    (kind, device),
                )?);
            }
            self.call_backward(
                sizes,
                chunk,
                block,
                inputs,
                [&found[0], &found[1], &found[2]],
            )?;
            for (at, (sum, found)) in sums.iter().zip(&found).enumerate() {
                let _ = part(sum, at)?.f_add_(found)?;
            }
        }
        for (mut grad, sum) in grads.into_iter().zip(&sums) {
            grad.f_copy_(sum)?;
        }
        Ok(())
    }

    /// Computes the gradients of one block of queries and keys, for one chunk of sequences and heads.
    fn call_backward(
        &self,
        sizes: &AttentionSizes,
        chunk: &Chunk,
        block: &Block,
        inputs: &Inputs,
        [of_query, of_key, of_value]: [&Tensor; 3],
    ) -> Result<(), TorchError> {
        let [query, key, value] = inputs.qkv;
        let queries = |x: &Tensor| {
            part_of_chunk(chunk, x, sizes, sizes.heads)?.f_narrow(2, block.query, block.queries)
        };
        let keys = |x: &Tensor| {
            part_of_chunk(chunk, x, sizes, sizes.kv_heads)?.f_narrow(2, block.key, block.keys)
        };
        let (query, output, grad) = (
            queries(query)?,
            queries(inputs.output)?,
            queries(inputs.grad)?,
        );
        let (key, value) = (keys(key)?, keys(value)?);
        // cuDNN reads it as contiguous, whatever strides are given.
        let stats = queries(&inputs.stats.f_unsqueeze(-1)?)?.f_contiguous()?;
        let call = call_of(sizes, chunk, block, [&query, &key, &value], &output);
        let inputs = Inputs {
            qkv: [&query, &key, &value],
            output: &output,
            stats: &stats,
            grad: &grad,
        };
        let grads = [of_query, of_key, of_value];
        self.enqueue_backward(call, &inputs, grads, std::iter::empty())
    }

    /// Enqueues one call, with `more` tensors of its graph.
    fn enqueue_backward(
        &self,
        call: Call,
        inputs: &Inputs,
        grads: [&Tensor; 3],
        more: impl Iterator<Item = (Uid, *mut c_void)>,
    ) -> Result<(), TorchError> {
        assert_eq!(
            strides(inputs.output),
            strides(inputs.grad),
            "output and its gradient"
        );
        let device = inputs.grad.device();
        let layouts = Grads {
            outputs: grads.map(strides),
            deterministic: self.deterministic,
        };
        let plan = self.plan((call, Some(layouts)), || {
            call.backward(layouts, self.library, self.handle)
        })?;
        let rows = [call.batch, call.heads, call.queries];
        let sums = Tensor::f_empty(rows, (Kind::Float, device))?;
        let [query, key, value] = inputs.qkv;
        let mut addresses = vec![
            (Q, address(query)),
            (K, address(key)),
            (V, address(value)),
            (O, address(inputs.output)),
            (DO, address(inputs.grad)),
            (STATS, address(inputs.stats)),
            (SUMS, address(&sums)),
            (DQ, address(grads[0])),
            (DK, address(grads[1])),
            (DV, address(grads[2])),
        ];
        addresses.extend(more);
        let shape = [rows[0], rows[1], rows[2], call.head_dim];
        let query_sum = match self.deterministic {
            true => None,
            false => Some(Tensor::f_empty(shape, (Kind::Float, device))?),
        };
        addresses.extend(query_sum.iter().map(|sum| (DQ_SUM, address(sum))));
        self.enqueue(&plan, &addresses, device)
    }

    fn plan(
        &self,
        key: (Call, Option<Grads>),
        make: impl FnOnce() -> Result<Plan, CudnnError>,
    ) -> Result<Rc<Plan>, TorchError> {
        if let Some(plan) = self.plans.borrow().get(&key) {
            return Ok(Rc::clone(plan));
        }
        let plan = Rc::new(make()?);
        self.plans.borrow_mut().insert(key, Rc::clone(&plan));
        Ok(plan)
    }

    fn enqueue(
        &self,
        plan: &Plan,
        addresses: &[(Uid, *mut c_void)],
        device: Device,
    ) -> Result<(), TorchError> {
        let bytes = plan.workspace_bytes.max(1) as i64;
        let workspace = Tensor::f_empty([bytes], (Kind::Uint8, device))?;
        // SAFETY: the handle is this object's, for which the plan was made. Every tensor of the graph has an address: callers
        // list those that `sdpa.rs` names, with the layouts from which the plan was made. torch gives freed memory only to later
        // work of the same stream.
        unsafe { plan.enqueue(self.handle, addresses, address(&workspace))? };
        Ok(())
    }
}

impl GroupOnGpu {
    fn sizes(
        &self,
        query: &Tensor,
        key: &Tensor,
        window: Option<i64>,
    ) -> Result<AttentionSizes, TorchError> {
        let sizes = sizes_of(query, key, None)?;
        Ok(AttentionSizes {
            batch: self.count,
            tokens: self.tokens,
            window: window.filter(|&window| window < self.tokens),
            ..sizes
        })
    }

    fn call(&self, sizes: &AttentionSizes, inputs: [&Tensor; 3], output: &Tensor) -> Call {
        let (all, block) = (Chunk::all(sizes), Block::all(sizes));
        Call {
            documents: true,
            ..call_of(sizes, &all, &block, inputs, output)
        }
    }

    /// First elements of the documents in tensors with different strides of tokens.
    fn offsets(&self, tensors: &[&Tensor]) -> Result<Vec<Tensor>, TorchError> {
        let of = |x: &&Tensor| Ok(self.starts.f_mul_scalar(strides(x)[2])?);
        tensors.iter().map(of).collect()
    }
}

/// The sequences of `x` [batch, heads, tokens, head_dim], which follow each other in memory, as one.
fn flat(x: &Tensor) -> Result<Tensor, TorchError> {
    let (batch, heads, tokens, head_dim) = x.size4()?;
    let rows = x.f_transpose(1, 2)?;
    let rows = rows.f_view([1, batch * tokens, heads, head_dim])?;
    Ok(rows.f_transpose(1, 2)?)
}

fn flat_all([x, y, z]: [&Tensor; 3]) -> Result<[Tensor; 3], TorchError> {
    Ok([flat(x)?, flat(y)?, flat(z)?])
}

/// Tokens `start` to `start + length` of tensors with one sequence.
fn part_all([x, y, z]: [&Tensor; 3], start: i64, length: i64) -> Result<[Tensor; 3], TorchError> {
    let part = |x: &Tensor| x.f_narrow(2, start, length);
    Ok([part(x)?, part(y)?, part(z)?])
}

/// Tensors that a backward pass reads.
struct Inputs<'a> {
    qkv: [&'a Tensor; 3],
    output: &'a Tensor,
    stats: &'a Tensor,
    grad: &'a Tensor,
}

fn sizes_of(
    query: &Tensor,
    key: &Tensor,
    window: Option<i64>,
) -> Result<AttentionSizes, TorchError> {
    let (batch, heads, tokens, head_dim) = query.size4()?;
    Ok(AttentionSizes {
        batch,
        heads,
        kv_heads: key.size()[1],
        tokens,
        head_dim,
        // A window as long as the sequence hides nothing.
        window: window.filter(|&window| window < tokens),
    })
}

fn call_of(
    sizes: &AttentionSizes,
    chunk: &Chunk,
    block: &Block,
    inputs: [&Tensor; 3],
    output: &Tensor,
) -> Call {
    Call {
        number: match output.kind() {
            Kind::Half => CudnnType::Fp16,
            Kind::BFloat16 => CudnnType::Bf16,
            kind => panic!("cuDNN's attention takes 16-bit numbers, not {kind:?}"),
        },
        batch: chunk.batch,
        heads: chunk.heads,
        kv_heads: chunk.heads / sizes.share(),
        queries: block.queries,
        keys: block.keys,
        head_dim: sizes.head_dim,
        mask: block.mask,
        documents: false,
        inputs: inputs.map(strides),
        output: strides(output),
    }
}

/// Strides of batch, head and token.
fn strides(x: &Tensor) -> [i64; 3] {
    let strides = x.stride();
    assert_eq!(strides[3], 1, "elements of a head are adjacent");
    [strides[0], strides[1], strides[2]]
}

fn address(x: &Tensor) -> *mut c_void {
    x.data_ptr()
}
