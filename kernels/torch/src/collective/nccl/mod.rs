//! Collectives between GPUs: NCCL, or RCCL for AMD, opened at run time. May use `unsafe`.
//!
//! ```text
//!   Comm (Gloo) ── the communicator's id ──▶ GpuComm ── all_gather, reduce_scatter, all_to_all ──▶ a Stream
//!       └── heartbeats ──▶ watchdog: a rank is gone, or NCCL failed ──▶ abort, so that no stream waits for ever
//! ```
//!
//! Calls enqueue work and return. After an abort the stream's memory contains no result: call [`GpuComm::check`] after
//! waiting for a stream and before its results are used.
#![allow(unsafe_code)]

mod table;
mod watchdog;

use std::sync::Arc;

use self::table::{SUM, Table, UniqueId};
use self::watchdog::{Watchdog, WatchdogState};
use tch::Tensor;

use super::Comm;
use super::connect::left_alone;
use crate::device_of;
use kernels::gpu::{DeviceAt, Gpu, GpuError, Stream, Vendor};
use kernels::reduce::GradType;
use training_ranks::CollectiveError;

/// The connected GPUs of all ranks.
///
/// All ranks make the same calls in the same order. Drop it last on every rank, or on all ranks after a failure.
pub struct GpuComm {
    shared: Arc<WatchdogState>,
    gpu: Gpu,
    rank: usize,
    ranks: usize,
    _watchdog: Watchdog,
}

/// Number formats in device memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum NcclType {
    U8 = 1,
    Fp16 = 6,
    Fp32 = 7,
    Fp64 = 8,
    Bf16 = 9,
}

/// Version of the library for GPUs of `vendor`: NCCL or RCCL.
///
/// # Errors
/// It was not found, or lacks a function.
pub fn nccl_version(vendor: Vendor) -> Result<String, CollectiveError> {
    let version = Table::open(vendor)?.version()?;
    Ok(format!(
        "{}.{}.{}",
        version / 10_000,
        version / 100 % 100,
        version % 100
    ))
}

impl GpuComm {
    /// Connects `gpu` with those of all other ranks of `comm`; each rank has its own.
    ///
    /// # Errors
    /// No library ([`CollectiveError::NoLibrary`]); a dead rank; an error of NCCL.
    pub fn connect(comm: &Comm, gpu: &Gpu) -> Result<GpuComm, CollectiveError> {
        const OP: &str = "connecting the GPUs";
        let table = Table::open(gpu.info().vendor)?;
        comm.same_everywhere("NCCL's version", &table.version()?.to_string())?;
        let mut id = UniqueId([0; 128]);
        let world = *comm.world();
        if world.rank == 0 {
            // SAFETY: the pointer is live for the call.
            let code = unsafe { (table.unique_id)(&mut id) };
            table.check(code, "making a communicator's id")?;
        }
        let id = comm.broadcast_bytes(0, id.0.to_vec())?;
        let id = UniqueId(id[..].try_into().expect("as many as were sent"));
        // On a thread: it blocks until all ranks have come, and one may die meanwhile.
        let its_gpu = gpu.clone();
        let connecting = move || {
            current(&its_gpu)?;
            let mut handle = 0;
            // SAFETY: the pointer is live for the call; rank and ranks come from a World.
            let code = unsafe {
                (table.init_rank)(&mut handle, world.ranks as i32, id, world.rank as i32)
            };
            table.check(code, OP)?;
            Ok(handle)
        };
        let handle = left_alone(comm.timeouts().connect, OP, connecting, || comm.gone())?;
        let shared = Arc::new(WatchdogState::new(table, handle, comm.link()));
        let made = GpuComm {
            _watchdog: Watchdog::start(Arc::clone(&shared)),
            shared,
            gpu: gpu.clone(),
            rank: world.rank as usize,
            ranks: world.ranks as usize,
        };
        made.warm_up(comm)?;
        Ok(made)
    }

    /// Enqueues on `stream` filling `elems` elements of `elem_bytes` bytes from `at` with every rank's shard, in rank
    /// order; this rank's own shard is already in place.
    ///
    /// Panics if that is not one whole shard per rank, or is not within the buffer.
    ///
    /// # Errors
    /// The first failure of this connection.
    pub fn all_gather(
        &self,
        stream: &Stream,
        at: DeviceAt<'_>,
        elems: usize,
        elem_bytes: usize,
    ) -> Result<(), CollectiveError> {
        let (address, shard) = self.address_and_shard(at, elems, elem_bytes);
        let shard_bytes = shard * elem_bytes;
        let own = address + (self.rank * shard_bytes) as u64;
        self.enqueue(shard_bytes, |table, handle| {
            // SAFETY: the communicator is live; the memory is allocated (place), and the caller's buffer outlives the
            // stream's work, since freeing it waits for the device. This rank's shard is where NCCL expects it for an
            // in-place gather.
            unsafe {
                let number = NcclType::U8 as i32;
                (table.all_gather)(own, address, shard_bytes, number, handle, stream.raw())
            }
        })
    }

    /// Enqueues on `stream` replacing this rank's shard of the `elems` elements from `at` by the sum of all ranks'
    /// values there. The other shards are undefined afterwards. NCCL chooses the order of addition, the same in every
    /// run on the same machines.
    ///
    /// Panics as [`GpuComm::all_gather`].
    ///
    /// # Errors
    /// The first failure of this connection.
    pub fn reduce_scatter(
        &self,
        stream: &Stream,
        at: DeviceAt<'_>,
        elems: usize,
        grad_type: GradType,
    ) -> Result<(), CollectiveError> {
        let (address, shard) = self.address_and_shard(at, elems, grad_type.elem_bytes());
        let own = address + (self.rank * shard * grad_type.elem_bytes()) as u64;
        let number = match grad_type {
            GradType::Bf16 => NcclType::Bf16,
            GradType::Fp16 => NcclType::Fp16,
            GradType::Fp32 => NcclType::Fp32,
        };
        self.enqueue(shard, |table, handle| {
            // SAFETY: as in all_gather.
            unsafe {
                let number = number as i32;
                (table.reduce_scatter)(address, own, shard, number, SUM, handle, stream.raw())
            }
        })
    }

    /// Enqueues on `stream` replacing `count` f64 from `at` by their sums over the ranks.
    ///
    /// Panics if they are not within the buffer.
    ///
    /// # Errors
    /// The first failure of this connection.
    pub fn all_reduce_sum_f64(
        &self,
        stream: &Stream,
        at: DeviceAt<'_>,
        count: usize,
    ) -> Result<(), CollectiveError> {
        let address = at.address(count * 8);
        self.enqueue(count, |table, handle| {
            // SAFETY: as in all_gather.
            unsafe {
                let number = NcclType::Fp64 as i32;
                (table.all_reduce)(address, address, count, number, SUM, handle, stream.raw())
            }
        })
    }

    /// Enqueues on `stream` sending part r of the `elems` elements from `from` to rank r, and receiving what rank r sends here
    /// as part r of those from `to`.
    ///
    /// Panics if that is not one part of the same length for each rank, or is not within the buffers.
    ///
    /// # Errors
    /// The first failure of this connection.
    pub fn all_to_all(
        &self,
        stream: &Stream,
        from: DeviceAt<'_>,
        to: DeviceAt<'_>,
        elems: usize,
        elem_bytes: usize,
    ) -> Result<(), CollectiveError> {
        let (from, part) = self.address_and_shard(from, elems, elem_bytes);
        let (to, _) = self.address_and_shard(to, elems, elem_bytes);
        self.all_to_all_at(stream, [from, to], part * elem_bytes)
    }

    /// Like [`GpuComm::all_to_all`] for tensors in the memory of this GPU, on the stream on which torch computes. `from` is
    /// contiguous; its first dimension are the ranks. The result has its shape.
    ///
    /// Panics if `from` is on another device or has another shape or layout.
    ///
    /// # Errors
    /// The first failure of this connection; out of memory.
    pub fn all_to_all_tensor(&self, from: &Tensor) -> Result<Tensor, CollectiveError> {
        let op = "an all-to-all between GPUs";
        assert_eq!(from.device(), device_of(&self.gpu), "a tensor of this GPU");
        assert!(from.is_contiguous(), "parts that are contiguous");
        assert_eq!(from.size()[0], self.ranks as i64, "one part for each rank");
        let to = from
            .f_empty_like()
            .map_err(|error| CollectiveError::Backend {
                op: op.to_owned(),
                message: error.to_string(),
            })?;
        let part_bytes = from.numel() / self.ranks * from.kind().elt_size_in_bytes();
        // Torch frees memory in the order of the default stream, so both tensors stay while the operation uses them.
        let addresses = [from, &to].map(|tensor| tensor.data_ptr() as u64);
        self.all_to_all_at(&self.gpu.default_stream(), addresses, part_bytes)?;
        Ok(to)
    }

    /// Enqueues an exchange of parts of `part_bytes`.
    fn all_to_all_at(
        &self,
        stream: &Stream,
        [from, to]: [u64; 2],
        part_bytes: usize,
    ) -> Result<(), CollectiveError> {
        let at = |address: u64, rank: usize| address + (rank * part_bytes) as u64;
        self.enqueue(part_bytes, |table, handle| {
            let number = NcclType::U8 as i32;
            // SAFETY: as in all_gather; both have a part for each rank. Every call between start and end is made, so that each
            // start has its end; the first error is returned.
            unsafe {
                let mut code = (table.group_start)();
                for rank in 0..self.ranks {
                    let (sent, received) = (at(from, rank), at(to, rank));
                    let peer = rank as i32;
                    for made in [
                        (table.send)(sent, part_bytes, number, peer, handle, stream.raw()),
                        (table.receive)(received, part_bytes, number, peer, handle, stream.raw()),
                    ] {
                        code = if code == 0 { made } else { code };
                    }
                }
                let ended = (table.group_end)();
                if code == 0 { ended } else { code }
            }
        })
    }

    /// Checks that no operation has failed so far. Call it after waiting for a stream, before its results are used.
    ///
    /// # Errors
    /// A dead rank, or an error of NCCL: the streams have no valid results.
    pub fn check(&self) -> Result<(), CollectiveError> {
        self.shared.check()
    }

    /// Address of a buffer, and elements of a shard.
    fn address_and_shard(&self, at: DeviceAt<'_>, elems: usize, elem_bytes: usize) -> (u64, usize) {
        assert!(
            elems.is_multiple_of(self.ranks),
            "{elems} elements are no whole shard for each of {} ranks",
            self.ranks
        );
        (at.address(elems * elem_bytes), elems / self.ranks)
    }

    fn enqueue(
        &self,
        count: usize,
        call: impl FnOnce(&Table, usize) -> i32,
    ) -> Result<(), CollectiveError> {
        current(&self.gpu)?;
        if count == 0 {
            return self.check();
        }
        self.shared.enqueue(call)
    }

    /// Runs the first operation of each kind, which establishes connections and may wait for a dead rank: here instead
    /// of within a step.
    fn warm_up(&self, comm: &Comm) -> Result<(), CollectiveError> {
        let failed = |error: GpuError| failed("warming up", &error);
        let stream = self.gpu.stream().map_err(failed)?;
        let bytes = self.ranks * 256;
        let buffer = self.gpu.alloc(bytes).map_err(failed)?;
        stream.fill_zero(buffer.at(0), bytes).map_err(failed)?;
        self.all_gather(&stream, buffer.at(0), bytes, 1)?;
        self.reduce_scatter(&stream, buffer.at(0), bytes / 4, GradType::Fp32)?;
        self.all_reduce_sum_f64(&stream, buffer.at(0), bytes / 8)?;
        // The watchdog ends it when a rank is dead.
        stream.synchronize().map_err(failed)?;
        self.check()?;
        comm.barrier()
    }
}

fn current(gpu: &Gpu) -> Result<(), CollectiveError> {
    gpu.make_current()
        .map_err(|error| failed("choosing the GPU", &error))
}

fn failed(op: &str, error: &GpuError) -> CollectiveError {
    CollectiveError::Backend {
        op: op.to_owned(),
        message: error.to_string(),
    }
}
