//! Moves inputs of checkpointed blocks between PyTorch's memory and scratch tiles of the run's devices.
//!
//! ```text
//!   Python   leave 3 | wait 2 | ... | bring_back 7 | wait 7            numbers, no copies
//!   thread   slots free ──▶ copy ──▶ write | ... | read ──▶ copy       waits for slots and drives
//! ```
//!
//! A forward waits until its inputs are in slots: for drives only as long as no slot is free. Each job has as many slots as are free, so that an
//! input may be larger than all of them.

use std::cell::Cell;
use std::collections::{HashMap, VecDeque};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

use kernels::gpu::{DeviceBuffer, Event, Gpu, GpuError, Stream};
use pyo3::prelude::*;
use swapper::{Scratch, ScratchSettings, Slot};

use crate::gpu::{MoveError, SLICE, gpu_failed};
use crate::{Core, Error, memory};

/// The bytes of one tile of a tensor.
#[derive(Clone, Copy)]
struct Piece {
    tile: u32,
    offset: usize,
    bytes: usize,
}

/// Where a tensor lies.
enum Place {
    Host(usize),
    Gpu(DeviceBuffer),
}

/// A tensor to move.
struct TensorCopy {
    number: u64,
    leaves: bool,
    place: Place,
    pieces: Vec<Piece>,
    /// Stands behind what PyTorch has enqueued before.
    after: Option<Event>,
    /// Whether whoever waits has been told.
    is_told: Cell<bool>,
}

/// A job whose copies are enqueued; on a GPU the event stands behind them.
type CopyResult = Result<Option<Arc<Event>>, PyErr>;

#[derive(Default)]
struct Results {
    jobs: Mutex<HashMap<u64, CopyResult>>,
    changed: Condvar,
}

impl Results {
    fn lock(&self) -> MutexGuard<'_, HashMap<u64, CopyResult>> {
        self.jobs.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn set_result(&self, number: u64, found: CopyResult) {
        self.lock().insert(number, found);
        self.changed.notify_all();
    }
}

/// The thread's side.
struct Worker {
    scratch: Scratch,
    /// Streams to and from a GPU, if one computes.
    streams: Option<[Stream; 2]>,
    results: Arc<Results>,
}

impl Worker {
    fn run(&self, job: &TensorCopy) -> Result<(), MoveError> {
        if let (Some(after), Some([up, down])) = (&job.after, &self.streams) {
            if job.leaves { down } else { up }.wait(after)?;
        }
        match job.leaves {
            true => self.leave(job),
            false => self.bring_back(job),
        }
    }

    fn leave(&self, job: &TensorCopy) -> Result<(), MoveError> {
        let mut left = &job.pieces[..];
        while !left.is_empty() {
            let mut slots = vec![self.scratch.slot()?];
            while slots.len() < left.len()
                && let Some(slot) = self.scratch.free_slot()
            {
                slots.push(slot);
            }
            let (now, later) = left.split_at(slots.len());
            if let Err(error) = self.copy_to(job, now, &mut slots, later.is_empty()) {
                slots
                    .drain(..)
                    .for_each(|slot| self.scratch.give_back(slot));
                return Err(error.into());
            }
            for (piece, slot) in now.iter().zip(slots) {
                self.scratch.write(piece.tile, slot);
            }
            left = later;
        }
        Ok(())
    }

    fn bring_back(&self, job: &TensorCopy) -> Result<(), MoveError> {
        let mut left = job.pieces.iter().copied();
        let mut coming = VecDeque::new();
        let brought = self.bring_pieces(job, &mut left, &mut coming);
        // After a failure.
        for piece in coming {
            if let Ok(slot) = self.scratch.wait(piece.tile) {
                self.scratch.give_back(slot);
            }
        }
        brought
    }

    /// Reads pieces as slots are free, and copies them in their order.
    fn bring_pieces(
        &self,
        job: &TensorCopy,
        left: &mut impl ExactSizeIterator<Item = Piece>,
        coming: &mut VecDeque<Piece>,
    ) -> Result<(), MoveError> {
        loop {
            while left.len() > 0 {
                let slot = match coming.is_empty() {
                    true => self.scratch.slot()?,
                    false => match self.scratch.free_slot() {
                        Some(slot) => slot,
                        None => break,
                    },
                };
                let piece = left.next().expect("some are left");
                self.scratch.begin_read(piece.tile, slot);
                coming.push_back(piece);
            }
            let Some(first) = coming.pop_front() else {
                return Ok(());
            };
            let mut pieces = vec![first];
            let mut slots = vec![self.scratch.wait(first.tile)?];
            let mut failed = None;
            while let Some(next) = coming.front()
                && let Some(read) = self.scratch.poll(next.tile)
            {
                pieces.extend(coming.pop_front());
                match read {
                    Ok(slot) => slots.push(slot),
                    Err(error) => {
                        pieces.pop();
                        failed = Some(error);
                        break;
                    }
                }
            }
            let is_last = left.len() == 0 && coming.is_empty() && failed.is_none();
            let copied = self.copy_from(job, &pieces, &slots, is_last);
            slots
                .into_iter()
                .for_each(|slot| self.scratch.give_back(slot));
            copied?;
            if let Some(error) = failed {
                return Err(error.into());
            }
        }
    }

    /// Copies pieces of a tensor to slots. With the last ones, whoever waits for the job may go on.
    fn copy_to(
        &self,
        job: &TensorCopy,
        pieces: &[Piece],
        slots: &mut [Slot],
        is_last: bool,
    ) -> Result<(), GpuError> {
        let parts = pieces.iter().zip(slots);
        let parts = parts.map(|(piece, slot)| (piece, &mut slot.as_mut_slice()[..piece.bytes]));
        match &job.place {
            Place::Host(address) => {
                for (piece, to) in parts {
                    let range = piece.offset as u64..(piece.offset + piece.bytes) as u64;
                    to.copy_from_slice(memory::elements(*address, &range, 1));
                }
                Ok(())
            }
            Place::Gpu(from) => {
                let mut parts: Vec<_> = parts.map(|(piece, to)| (piece.offset, to)).collect();
                let [_, down] = self.streams.as_ref().expect("a GPU computes");
                let enqueued = || self.tell_enqueued(job, down, is_last);
                from.gpu().download_then(down, from, &mut parts, enqueued)
            }
        }
    }

    /// Copies slots to pieces of a tensor.
    fn copy_from(
        &self,
        job: &TensorCopy,
        pieces: &[Piece],
        slots: &[Slot],
        is_last: bool,
    ) -> Result<(), GpuError> {
        let parts = pieces.iter().zip(slots);
        let parts = parts.map(|(piece, slot)| (piece, &slot.as_slice()[..piece.bytes]));
        match &job.place {
            Place::Host(address) => {
                for (piece, from) in parts {
                    let range = piece.offset as u64..(piece.offset + piece.bytes) as u64;
                    memory::write(*address, &range, 1, from);
                }
                Ok(())
            }
            Place::Gpu(to) => {
                let parts: Vec<_> = parts.map(|(piece, from)| (piece.offset, from)).collect();
                let [up, _] = self.streams.as_ref().expect("a GPU computes");
                let enqueued = || self.tell_enqueued(job, up, is_last);
                to.gpu().upload_then(up, to, &parts, enqueued)
            }
        }
    }

    fn tell_enqueued(
        &self,
        job: &TensorCopy,
        stream: &Stream,
        is_last: bool,
    ) -> Result<(), GpuError> {
        if is_last {
            let event = Arc::new(stream.record()?);
            job.is_told.set(true);
            self.results.set_result(job.number, Ok(Some(event)));
        }
        Ok(())
    }
}

/// A queue of copies, and the thread that makes them in order.
struct Queue {
    /// `None` once it is closed.
    jobs: Option<Sender<TensorCopy>>,
    thread: Option<JoinHandle<()>>,
    next: u64,
}

/// The area of a run's inputs of blocks.
#[pyclass(frozen)]
pub(crate) struct ActivationTiles {
    core: Py<Core>,
    gpu: Option<Gpu>,
    area: ScratchSettings,
    queue: Mutex<Queue>,
    results: Arc<Results>,
}

impl ActivationTiles {
    fn begin(
        &self,
        py: Python<'_>,
        leaves: bool,
        address: usize,
        bytes: usize,
        tiles: &[u32],
        stream: usize,
    ) -> PyResult<u64> {
        if self.core.get().is_forked() {
            return Err(Error::new_err(
                "this process is a fork of the one that opened the run, and cannot train: start it before offloadd.prepare",
            ));
        }
        let tile_bytes = self.area.tile_bytes as usize;
        assert_eq!(
            tiles.len(),
            bytes.div_ceil(tile_bytes),
            "tiles for {bytes} bytes"
        );
        let piece = |(index, &tile): (usize, &u32)| Piece {
            tile,
            offset: index * tile_bytes,
            bytes: tile_bytes.min(bytes - index * tile_bytes),
        };
        let (place, after) = match &self.gpu {
            None => (Place::Host(address), None),
            Some(gpu) => {
                let stream = memory::torch_stream(gpu, stream);
                let after = py.detach(|| stream.record()).map_err(gpu_failed)?;
                (Place::Gpu(memory::on_gpu(gpu, address, bytes)), Some(after))
            }
        };
        let mut queue = self.queue.lock().unwrap_or_else(PoisonError::into_inner);
        let number = queue.next;
        queue.next += 1;
        let job = TensorCopy {
            number,
            leaves,
            place,
            pieces: tiles.iter().enumerate().map(piece).collect(),
            after,
            is_told: Cell::new(false),
        };
        let sent = queue
            .jobs
            .as_ref()
            .is_some_and(|jobs| jobs.send(job).is_ok());
        match sent {
            true => Ok(number),
            false => Err(Error::new_err("the run is closed")),
        }
    }
}

#[pymethods]
impl ActivationTiles {
    /// Starts the thread that moves inputs of blocks between the memory of GPU `index`, or of the processor, and the tiles of `core`'s run.
    #[staticmethod]
    #[pyo3(signature = (core, index))]
    fn open(py: Python<'_>, core: Py<Core>, index: Option<u32>) -> PyResult<Self> {
        let scratch = core.get().with(py, |run| Ok(run.swapper.scratch()))?;
        let scratch =
            scratch.ok_or_else(|| Error::new_err("the run has no area for inputs of blocks"))?;
        let opened = py.detach(|| -> Result<_, GpuError> {
            let Some(index) = index else {
                return Ok((None, None));
            };
            let gpu = Gpu::open(index)?;
            let streams = [gpu.stream()?, gpu.stream()?];
            Ok((Some(gpu), Some(streams)))
        });
        let (gpu, streams) = opened.map_err(gpu_failed)?;
        let (area, results) = (scratch.settings(), Arc::<Results>::default());
        let (jobs, coming) = channel::<TensorCopy>();
        let worker = Worker {
            scratch,
            streams,
            results: results.clone(),
        };
        let thread = std::thread::Builder::new()
            .name("offloadd inputs".into())
            .spawn(move || {
                // A failure after whoever waits was told.
                let mut broken: Option<PyErr> = None;
                for job in coming {
                    let again = |error: &PyErr| Python::attach(|py| error.clone_ref(py));
                    let moved = match broken.as_ref().map(again) {
                        Some(error) => Err(error),
                        None => worker.run(&job).map_err(PyErr::from),
                    };
                    match (job.is_told.get(), moved) {
                        (false, moved) => {
                            worker.results.set_result(job.number, moved.map(|()| None));
                        }
                        (true, Err(error)) => broken = Some(error),
                        (true, Ok(())) => {}
                    }
                }
            })
            .map_err(|error| Error::new_err(format!("starting a thread: {error}")))?;
        Ok(Self {
            core,
            gpu,
            area,
            queue: Mutex::new(Queue {
                jobs: Some(jobs),
                thread: Some(thread),
                next: 0,
            }),
            results,
        })
    }

    #[getter]
    fn tile_bytes(&self) -> u32 {
        self.area.tile_bytes
    }

    #[getter]
    fn tile_count(&self) -> u32 {
        self.area.tile_count
    }

    /// Begins to take `bytes` bytes at `address`, which `stream` writes, to `tiles`. Returns the number to `wait` for, until when the memory
    /// must stay as it is.
    fn leave(
        &self,
        py: Python<'_>,
        address: usize,
        bytes: usize,
        tiles: Vec<u32>,
        stream: usize,
    ) -> PyResult<u64> {
        self.begin(py, true, address, bytes, &tiles, stream)
    }

    /// Begins to bring what `tiles` have to `address`, memory that `stream` may use. Returns the number to `wait` for.
    fn bring_back(
        &self,
        py: Python<'_>,
        address: usize,
        bytes: usize,
        tiles: Vec<u32>,
        stream: usize,
    ) -> PyResult<u64> {
        self.begin(py, false, address, bytes, &tiles, stream)
    }

    /// Returns when the copies of a job are made, or on a GPU enqueued, and lets `streams` wait for them.
    fn wait(&self, py: Python<'_>, number: u64, streams: Vec<usize>) -> PyResult<()> {
        let enqueued = loop {
            let found = py.detach(|| {
                let jobs = self.results.lock();
                let waits = |jobs: &mut HashMap<u64, CopyResult>| !jobs.contains_key(&number);
                let slice = self.results.changed.wait_timeout_while(jobs, SLICE, waits);
                let (mut jobs, _) = slice.unwrap_or_else(PoisonError::into_inner);
                jobs.remove(&number)
            });
            match found {
                Some(found) => break found?,
                None => py.check_signals()?,
            }
        };
        let (Some(event), Some(gpu)) = (enqueued, &self.gpu) else {
            return Ok(());
        };
        py.detach(|| {
            let mut streams = streams.into_iter();
            streams.try_for_each(|stream| memory::torch_stream(gpu, stream).wait(&event))
        })
        .map_err(gpu_failed)
    }

    /// Whether `wait` for a job, which nobody has waited for, returns at once.
    fn has_result(&self, number: u64) -> bool {
        self.results.lock().contains_key(&number)
    }

    /// Ends the thread when the copies that have begun are made.
    fn close(&self, py: Python<'_>) {
        let thread = {
            let mut queue = self.queue.lock().unwrap_or_else(PoisonError::into_inner);
            queue.jobs = None;
            queue.thread.take()
        };
        if let Some(thread) = thread.filter(|_| !self.core.get().is_forked()) {
            py.detach(|| drop(thread.join()));
        }
    }
}

/// Bytes of an area in which tensors of these sizes fit.
#[pyfunction]
pub(crate) fn activation_area(sizes: Vec<u64>) -> PyResult<u64> {
    let area = ScratchSettings::for_tensors(&sizes).map_err(crate::failed)?;
    Ok(area.bytes())
}
