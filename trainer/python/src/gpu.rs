//! Moves units between tiles and a GPU's memory beside what PyTorch computes.
//!
//! ```text
//!   Python   expect 4 | ready 3 | release 2 | ... | grad_room | hand_over 9      numbers and events, no copies
//!   mover    swapper: gather 4, upload | ... | scatter 9, download               a thread; waits for tiles and copies
//!
//!   room                    after 2           PyTorch's allocator frees and allocates units on this stream
//!   up       | weights 3 | weights 4 |        each behind `room` at its expect; PyTorch's stream waits at ready
//!   down     | squares 9 | gradients 9 |      behind PyTorch's stream at hand_over
//! ```
//!
//! A unit's memory returns to PyTorch's allocator when the host releases the unit, while kernels that read it may still be
//! queued. `room` waits for them, and whatever takes the memory next is copied behind `room`: no copy overwrites weights
//! that a kernel still needs. Gradients leave from buffers used in turn; `grad_room` makes PyTorch's stream wait for the
//! copy before.
//!
//! Python's threads wait for the mover in slices, so that Ctrl-C ends a wait.

use std::collections::HashMap;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use kernels::gpu::{
    DeviceBuffer, Event, Gpu, GpuError, Registration, Stream, sum_squares_scratch_bytes,
};
use kernels::reduce::GradType;
use pyo3::prelude::*;
use swapper::{ArenaMemory, Revision, SwapperError};

use crate::format::{Format, ParamPlan, UpdateFormat};
use crate::{Core, Error, OpenRun, failed, memory};

/// After so long a waiting thread looks for signals.
pub(crate) const SLICE: Duration = Duration::from_millis(100);

/// Bytes of a sum of squares.
const SQUARES_BYTES: usize = size_of::<f64>();

/// Why a job of the mover failed.
pub(crate) enum MoveError {
    Swapper(SwapperError),
    Gpu(GpuError),
}

impl From<SwapperError> for MoveError {
    fn from(error: SwapperError) -> Self {
        Self::Swapper(error)
    }
}

impl From<GpuError> for MoveError {
    fn from(error: GpuError) -> Self {
        Self::Gpu(error)
    }
}

impl From<MoveError> for PyErr {
    fn from(error: MoveError) -> Self {
        match error {
            MoveError::Swapper(error) => failed(error),
            MoveError::Gpu(error) => gpu_failed(error),
        }
    }
}

pub(crate) fn gpu_failed(error: GpuError) -> PyErr {
    Error::new_err(error.to_string())
}

type Job = Box<dyn FnOnce(&mut OpenRun) -> Result<(), MoveError> + Send>;

/// A unit on its way to the GPU.
#[derive(Clone)]
enum Upload {
    Coming,
    /// All copies are enqueued; the event stands behind them.
    Enqueued(Arc<Event>),
}

/// A buffer that gradients leave from: `None` while its copies are not all enqueued.
type Leaving = Option<Arc<Event>>;

/// What the mover has done; Python's threads wait for it.
#[derive(Default)]
struct Progress {
    /// Jobs that have not ended.
    jobs: usize,
    failure: Option<PyErr>,
    uploads: HashMap<usize, Upload>,
    /// Buffers of gradients, by slot, to which mixtures come.
    mixtures: HashMap<usize, Upload>,
    leaving: HashMap<usize, Leaving>,
}

/// The queue of the mover's thread, which takes jobs in order and does none after one has failed.
pub(crate) struct Mover {
    jobs: Sender<Job>,
    shared: Arc<SharedProgress>,
}

#[derive(Default)]
struct SharedProgress {
    progress: Mutex<Progress>,
    changed: Condvar,
}

impl SharedProgress {
    fn lock(&self) -> MutexGuard<'_, Progress> {
        self.progress.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn change(&self, change: impl FnOnce(&mut Progress)) {
        change(&mut self.lock());
        self.changed.notify_all();
    }

    /// Waits until `ready` returns something.
    ///
    /// # Errors
    /// A job's failure; a signal's exception.
    fn wait<T: Send>(
        &self,
        py: Python<'_>,
        ready: impl Send + Sync + Fn(&Progress) -> Option<T>,
    ) -> PyResult<T> {
        loop {
            let slice = py.detach(|| {
                let progress = self.lock();
                let waits = |progress: &mut Progress| {
                    progress.failure.is_none() && ready(progress).is_none()
                };
                let slice = (self.changed).wait_timeout_while(progress, SLICE, waits);
                let (progress, _) = slice.unwrap_or_else(PoisonError::into_inner);
                (progress.failure.is_some(), ready(&progress))
            });
            match slice {
                (true, _) => {
                    let progress = self.lock();
                    let failure = progress.failure.as_ref().expect("it stays");
                    return Err(failure.clone_ref(py));
                }
                (false, Some(found)) => return Ok(found),
                (false, None) => py.check_signals()?,
            }
        }
    }
}

impl Mover {
    pub(crate) fn start(open_run: Arc<Mutex<Option<OpenRun>>>) -> std::io::Result<Self> {
        let (jobs, coming) = channel::<Job>();
        let shared = Arc::<SharedProgress>::default();
        let progress = shared.clone();
        let run = move |job: Job| -> Result<(), PyErr> {
            let mut open_run = open_run.lock().unwrap_or_else(PoisonError::into_inner);
            let open_run = open_run
                .as_mut()
                .ok_or_else(|| Error::new_err("the run is closed"))?;
            match catch_unwind(AssertUnwindSafe(|| job(open_run))) {
                Ok(done) => Ok(done?),
                Err(_) => Err(Error::new_err("the thread that moves units panicked")),
            }
        };
        std::thread::Builder::new()
            .name("offloadd mover".into())
            .spawn(move || {
                for job in coming {
                    let failed = progress.lock().failure.is_some();
                    let done = if failed { Ok(()) } else { run(job) };
                    progress.change(|progress| {
                        progress.jobs -= 1;
                        if let Err(error) = done {
                            progress.failure = Some(error);
                        }
                    });
                }
            })?;
        Ok(Self { jobs, shared })
    }

    /// Enqueues a job.
    pub(crate) fn post(
        &self,
        job: impl FnOnce(&mut OpenRun) -> Result<(), MoveError> + Send + 'static,
    ) {
        self.shared.lock().jobs += 1;
        // The thread ends only after the sender.
        let _ = self.jobs.send(Box::new(job));
    }

    /// Waits until all jobs have ended.
    ///
    /// # Errors
    /// A job's failure; a signal's exception.
    pub(crate) fn settle(&self, py: Python<'_>) -> PyResult<()> {
        self.shared
            .wait(py, |progress| (progress.jobs == 0).then_some(()))
    }
}

/// Most elements whose earlier sums come to the GPU at a time.
const EARLIER_ELEMS_MAX: usize = 16 << 20;

/// Memory of the GPU's driver, beside PyTorch's allocator, which keeps what tensors no longer use.
struct DriverMemory {
    gpu: Gpu,
    /// Python's function that makes PyTorch's allocator give back what it does not use.
    give_back: Py<PyAny>,
}

impl DriverMemory {
    /// Allocates `bytes`, if need be after PyTorch has given back what it does not use.
    fn alloc(&self, bytes: usize) -> Result<DeviceBuffer, GpuError> {
        let refused = match self.gpu.alloc(bytes) {
            Err(error) if error.is_out_of_memory() => error,
            done => return done,
        };
        match Python::attach(|py| self.give_back.call0(py)) {
            Ok(_) => self.gpu.alloc(bytes),
            Err(error) => {
                // The refusal says what is wrong for the run.
                Python::attach(|py| error.print(py));
                Err(refused)
            }
        }
    }
}

/// Sums over gradients, made on the GPU.
struct Sums {
    memory: DriverMemory,
    /// Sum of squares of each parameter's gradients: one f64 a parameter on the GPU, and memory for the kernels.
    squares: DeviceBuffer,
    scratch: DeviceBuffer,
    /// Earlier sums in the tiles' type, and room to add in fp32: made when a step has a second backward pass.
    earlier: OnceLock<[DeviceBuffer; 2]>,
    earlier_elems: usize,
}

impl Sums {
    /// Enqueues the sum of squares of each of a unit's parameters, the first of which has index `first` over all units; of
    /// each the elements that this rank owns.
    fn square(
        &self,
        stream: &Stream,
        grads: GradType,
        from: &DeviceBuffer,
        first: usize,
        of_params: impl Iterator<Item = Option<Range<u64>>>,
    ) -> Result<(), GpuError> {
        for (index, elems) in (first..).zip(of_params) {
            let Some(elems) = elems else { continue };
            stream.gpu().kernels()?.sum_squares(
                stream,
                grads,
                from.at(elems.start as usize * grads.elem_bytes()),
                (elems.end - elems.start) as usize,
                self.scratch.at(0),
                self.squares.at(index * SQUARES_BYTES),
            )?;
        }
        Ok(())
    }

    /// Adds the sums of earlier passes, which tiles hold in `parts`, to a unit's gradients on the GPU, rounded to their type.
    fn add_earlier(
        &self,
        stream: &Stream,
        grads: GradType,
        to: &DeviceBuffer,
        parts: &[(Range<u64>, &[u8])],
    ) -> Result<(), GpuError> {
        let (gpu, bytes) = (stream.gpu(), grads.elem_bytes());
        let earlier = match self.earlier.get() {
            Some(earlier) => earlier,
            None => {
                // Of the largest type: units may differ in theirs.
                let room = || self.memory.alloc(self.earlier_elems * size_of::<f32>());
                let earlier = [room()?, room()?];
                self.earlier.get_or_init(|| earlier)
            }
        };
        let [came, sum] = earlier;
        for (elems, stored) in parts {
            let starts = (elems.start as usize..).step_by(self.earlier_elems);
            for (start, stored) in starts.zip(stored.chunks(self.earlier_elems * bytes)) {
                let count = stored.len() / bytes;
                gpu.upload(stream, came, &[(0, stored)])?;
                let kernels = gpu.kernels()?;
                stream.fill_zero(sum.at(0), count * size_of::<f32>())?;
                kernels.accumulate(stream, sum.at(0), came.at(0), grads, count)?;
                kernels.accumulate(stream, sum.at(0), to.at(start * bytes), grads, count)?;
                kernels.store_grad(stream, grads, sum.at(0), to.at(start * bytes), count)?;
            }
        }
        Ok(())
    }
}

/// A unit's part of the plan, and the index of its first parameter over all units.
struct UnitOnGpu {
    elems: u64,
    /// Elements whose tiles this rank has.
    own: Range<u64>,
    format: Format,
    params: Vec<ParamPlan>,
    first: usize,
}

impl UnitOnGpu {
    /// The elements of `param` whose tiles this rank has; `None` if it has none of them.
    fn own_part(&self, param: &ParamPlan) -> Option<Range<u64>> {
        let start = param.offset.max(self.own.start);
        let end = (param.offset + param.elems).min(self.own.end);
        (start < end).then_some(start..end)
    }
}

/// The units of a run whose model computes on a GPU.
#[pyclass(frozen)]
pub(crate) struct GpuMover {
    core: Py<Core>,
    gpu: Gpu,
    room: Stream,
    up: Stream,
    down: Stream,
    units: Arc<Vec<UnitOnGpu>>,
    sums: Arc<Sums>,
    _pinned: Option<Registration>,
}

impl GpuMover {
    fn mover(&self) -> &Mover {
        let mover = self.core.get().mover.get();
        mover.expect("it was started with this object")
    }

    fn buffer(&self, unit: usize, address: usize, elem_bytes: usize) -> DeviceBuffer {
        let bytes = self.units[unit].elems as usize * elem_bytes;
        memory::on_gpu(&self.gpu, address, bytes)
    }
}

#[pymethods]
impl GpuMover {
    /// Starts moving the units of `core` to and from GPU `index`: pins the host memory they pass through. `give_back()` makes PyTorch's
    /// allocator give back memory of the GPU that it does not use; it is called where the driver has none left.
    #[staticmethod]
    fn open(py: Python<'_>, core: Py<Core>, index: u32, give_back: Py<PyAny>) -> PyResult<Self> {
        let (arena, units) = core.get().with(py, |run| {
            let mut first = 0;
            let layout = run.swapper.layout();
            let units = run
                .plan
                .units
                .iter()
                .zip(&run.formats)
                .zip(layout.units())
                .map(|((unit, format), own)| {
                    let own = &layout.ranges()[own.start as usize..own.end as usize];
                    let unit = UnitOnGpu {
                        elems: unit.elems,
                        own: match own {
                            [] => 0..0,
                            [first, .., last] => first.elems.start..last.elems.end,
                            [only] => only.elems.clone(),
                        },
                        format: *format,
                        params: unit.params.clone(),
                        first,
                    };
                    first += unit.params.len();
                    unit
                });
            Ok((run.arena.clone(), units.collect::<Vec<_>>()))
        })?;
        let opened = py.detach(|| -> Result<_, GpuError> {
            let gpu = Gpu::open(index)?;
            gpu.kernels()?;
            let pin = |arena: &ArenaMemory| {
                gpu.register(arena.address(), arena.bytes(), Box::new(arena.clone()))
            };
            let pinned = arena.as_ref().map(pin).transpose()?;
            let params = units.iter().flat_map(|unit| &unit.params);
            let largest = params.clone().map(|param| param.elems).max().unwrap_or(0);
            let largest_unit = units.iter().map(|unit| unit.elems).max().unwrap_or(0);
            let memory = DriverMemory {
                gpu: gpu.clone(),
                give_back,
            };
            let sums = Sums {
                squares: memory.alloc(params.count() * SQUARES_BYTES)?,
                scratch: memory.alloc(sum_squares_scratch_bytes(largest as usize))?,
                memory,
                earlier: OnceLock::new(),
                earlier_elems: EARLIER_ELEMS_MAX.min(largest_unit as usize),
            };
            let streams = [gpu.stream()?, gpu.stream()?, gpu.stream()?];
            Ok((gpu, pinned, sums, streams))
        });
        let (gpu, pinned, sums, [room, up, down]) = opened.map_err(gpu_failed)?;
        let mover = Mover::start(core.get().run.clone());
        let mover = mover.map_err(|error| Error::new_err(format!("starting a thread: {error}")))?;
        if core.get().mover.set(mover).is_err() {
            return Err(Error::new_err("this run has a GPU already"));
        }
        Ok(Self {
            core,
            gpu,
            room,
            up,
            down,
            units: Arc::new(units),
            sums: Arc::new(sums),
            _pinned: pinned,
        })
    }

    /// The stream on which PyTorch's allocator must free and allocate the memory of units.
    #[getter]
    fn room(&self) -> usize {
        self.room.raw()
    }

    /// Begins to bring `unit`'s newest parameters to `address`, memory that was allocated on the stream `room`.
    fn expect(&self, py: Python<'_>, unit: usize, address: usize) -> PyResult<()> {
        let elem_bytes = self.units[unit].format.param_bytes;
        let to = self.buffer(unit, address, elem_bytes);
        let after = py.detach(|| self.room.record()).map_err(gpu_failed)?;
        let mover = self.mover();
        mover
            .shared
            .change(|progress| drop(progress.uploads.insert(unit, Upload::Coming)));
        let (shared, gpu, up) = (mover.shared.clone(), self.gpu.clone(), self.up.clone());
        let own = &self.units[unit].own;
        let mut left = own.end - own.start;
        mover.post(move |run| {
            up.wait(&after)?;
            let arrived = || -> Result<(), GpuError> {
                let enqueued = Upload::Enqueued(Arc::new(up.record()?));
                shared.change(|progress| drop(progress.uploads.insert(unit, enqueued)));
                Ok(())
            };
            if left == 0 {
                arrived()?;
            }
            run.swapper.gather(unit, |parts| {
                let pieces: Vec<(usize, &[u8])> = parts
                    .iter()
                    .map(|(elems, bytes)| (elems.start as usize * elem_bytes, *bytes))
                    .collect();
                left -= parts
                    .iter()
                    .map(|(elems, _)| elems.end - elems.start)
                    .sum::<u64>();
                gpu.upload_then(&up, &to, &pieces, || {
                    if left == 0 {
                        arrived()?;
                    }
                    Ok(())
                })?;
                Ok::<(), MoveError>(())
            })
        });
        Ok(())
    }

    /// Makes `stream`, PyTorch's current one, wait for the parameters of `unit`. Returns when their copies are enqueued.
    fn ready(&self, py: Python<'_>, unit: usize, stream: usize) -> PyResult<()> {
        let arrived = self.mover().shared.wait(py, |progress| {
            match progress.uploads.get(&unit).expect("expected before") {
                Upload::Coming => None,
                Upload::Enqueued(event) => Some(event.clone()),
            }
        })?;
        let stream = memory::torch_stream(&self.gpu, stream);
        py.detach(|| stream.wait(&arrived)).map_err(gpu_failed)
    }

    /// Lets whoever is `ready` for `unit` next, or takes its memory, wait for what `stream` has enqueued so far: what other ranks have brought
    /// to it, and what computes with it.
    fn keep(&self, py: Python<'_>, unit: usize, stream: usize) -> PyResult<()> {
        let stream = memory::torch_stream(&self.gpu, stream);
        let left = py.detach(|| stream.record()).map_err(gpu_failed)?;
        let left = Upload::Enqueued(Arc::new(left));
        let shared = &self.mover().shared;
        shared.change(|progress| drop(progress.uploads.insert(unit, left)));
        Ok(())
    }

    /// To be called before the memory of `unit` is freed: it is used again only when what `stream` has enqueued so far, and
    /// the copies to it, have run.
    fn release(&self, py: Python<'_>, unit: usize, stream: usize) -> PyResult<()> {
        let shared = &self.mover().shared;
        let arrived = shared.wait(py, |progress| match progress.uploads.get(&unit) {
            Some(Upload::Coming) => None,
            Some(Upload::Enqueued(event)) => Some(Some(event.clone())),
            None => Some(None),
        });
        let arrived = match arrived {
            Ok(arrived) => arrived,
            // After a failure nothing is copied any more.
            Err(_) if shared.lock().failure.is_some() => None,
            Err(signal) => return Err(signal),
        };
        shared.lock().uploads.remove(&unit);
        let stream = memory::torch_stream(&self.gpu, stream);
        py.detach(|| {
            if let Some(arrived) = arrived {
                self.room.wait(&arrived)?;
            }
            self.room.wait(&stream.record()?)
        })
        .map_err(gpu_failed)
    }

    /// Makes `stream` wait until the gradients that were handed over in the buffer `slot` have left it.
    fn grad_room(&self, py: Python<'_>, slot: usize, stream: usize) -> PyResult<()> {
        let left = self
            .mover()
            .shared
            .wait(py, |progress| match progress.leaving.get(&slot) {
                None => Some(None),
                Some(None) => None,
                Some(Some(event)) => Some(Some(event.clone())),
            })?;
        let stream = memory::torch_stream(&self.gpu, stream);
        match left {
            Some(event) => py.detach(|| stream.wait(&event)).map_err(gpu_failed),
            None => Ok(()),
        }
    }

    /// Updates the momenta of `unit`, and brings what is to be made orthogonal to `address`, the buffer `slot`, after what `stream` has enqueued, which
    /// then waits for it. As `Core.revise`; `hand_over` must follow, which `replaces`.
    fn revise(
        &self,
        py: Python<'_>,
        unit: usize,
        slot: usize,
        address: usize,
        stream: usize,
    ) -> PyResult<()> {
        let Some(UpdateFormat { grads, .. }) = self.units[unit].format.update else {
            return Err(Error::new_err(format!("unit {unit} is not trained")));
        };
        let to = self.buffer(unit, address, grads.elem_bytes());
        let stream = memory::torch_stream(&self.gpu, stream);
        let after = py.detach(|| stream.record()).map_err(gpu_failed)?;
        let mover = self.mover();
        mover
            .shared
            .change(|progress| drop(progress.mixtures.insert(slot, Upload::Coming)));
        let (shared, gpu, up) = (mover.shared.clone(), self.gpu.clone(), self.up.clone());
        let own = &self.units[unit].own;
        let mut left = own.end - own.start;
        mover.post(move |run| {
            up.wait(&after)?;
            let arrived = || -> Result<(), GpuError> {
                let enqueued = Upload::Enqueued(Arc::new(up.record()?));
                shared.change(|progress| drop(progress.mixtures.insert(slot, enqueued)));
                Ok(())
            };
            if left == 0 {
                arrived()?;
            }
            run.revise(unit, |tiles| {
                let elems = tiles.iter().map(|tile| &tile.range.elems);
                left -= elems.map(|elems| elems.end - elems.start).sum::<u64>();
                let at = |tile: &Revision| tile.range.elems.start as usize * grads.elem_bytes();
                let pieces = tiles.iter().map(|tile| (at(tile), &*tile.grad));
                let pieces: Vec<(usize, &[u8])> = pieces.collect();
                gpu.upload_then(&up, &to, &pieces, || {
                    if left == 0 {
                        arrived()?;
                    }
                    Ok(())
                })?;
                Ok::<(), MoveError>(())
            })
        });
        let arrived = mover.shared.wait(py, |progress| {
            match progress.mixtures.get(&slot).expect("inserted above") {
                Upload::Coming => None,
                Upload::Enqueued(event) => Some(event.clone()),
            }
        })?;
        py.detach(|| stream.wait(&arrived)).map_err(gpu_failed)
    }

    /// Begins to take `unit`'s gradients, which `stream` writes to `address`, the buffer `slot`, to their tiles. Unless it `replaces` what is there, it adds
    /// to gradients that have come in this step.
    #[allow(clippy::too_many_arguments, reason = "where a buffer lies")]
    fn hand_over(
        &self,
        py: Python<'_>,
        unit: usize,
        slot: usize,
        address: usize,
        stream: usize,
        replaces: bool,
    ) -> PyResult<()> {
        let Some(UpdateFormat { grads, .. }) = self.units[unit].format.update else {
            return Err(Error::new_err(format!("unit {unit} is not trained")));
        };
        let from = self.buffer(unit, address, grads.elem_bytes());
        let stream = memory::torch_stream(&self.gpu, stream);
        let complete = py.detach(|| stream.record()).map_err(gpu_failed)?;
        let mover = self.mover();
        mover
            .shared
            .change(|progress| drop(progress.leaving.insert(slot, None)));
        let (shared, gpu, down) = (mover.shared.clone(), self.gpu.clone(), self.down.clone());
        let (units, sums) = (self.units.clone(), self.sums.clone());
        mover.post(move |run| {
            let of_unit = &units[unit];
            let UnitOnGpu {
                own, params, first, ..
            } = of_unit;
            let mut left = own.end - own.start;
            let left_gpu = || -> Result<(), GpuError> {
                let event = Arc::new(down.record()?);
                shared.change(|progress| drop(progress.leaving.insert(slot, Some(event))));
                Ok(())
            };
            down.wait(&complete)?;
            if own.is_empty() {
                left_gpu()?;
            }
            let add = !replaces && run.swapper.has_gradients(unit);
            run.swapper.scatter(unit, |parts| {
                if add {
                    let earlier: Vec<(Range<u64>, &[u8])> = parts
                        .iter()
                        .map(|(elems, sum)| (elems.clone(), &**sum))
                        .collect();
                    sums.add_earlier(&down, grads, &from, &earlier)?;
                }
                left -= parts
                    .iter()
                    .map(|(elems, _)| elems.end - elems.start)
                    .sum::<u64>();
                let mut pieces: Vec<(usize, &mut [u8])> = parts
                    .iter_mut()
                    .map(|(elems, sum)| (elems.start as usize * grads.elem_bytes(), &mut **sum))
                    .collect();
                gpu.download_then(&down, &from, &mut pieces, || {
                    if left == 0 {
                        let of_params = params.iter().map(|param| of_unit.own_part(param));
                        sums.square(&down, grads, &from, *first, of_params)?;
                        left_gpu()?;
                    }
                    Ok(())
                })?;
                Ok::<(), MoveError>(())
            })
        });
        Ok(())
    }

    /// Waits until all gradients have left, and returns each unit's sums of squares, one a parameter: of the gradients in this
    /// rank's tiles that were handed over last, earlier ones of the step added.
    fn square_sums(&self, py: Python<'_>) -> PyResult<Vec<Vec<f64>>> {
        self.mover().settle(py)?;
        py.detach(|| {
            let mut bytes = vec![0; self.sums.squares.bytes()];
            (self.gpu).download(&self.down, &self.sums.squares, &mut [(0, &mut bytes)])?;
            let (all, _) = bytes.as_chunks::<SQUARES_BYTES>();
            let of_unit = |unit: &UnitOnGpu| {
                (all[unit.first..].iter().zip(&unit.params))
                    .map(|(bytes, param)| match unit.own_part(param) {
                        Some(_) => f64::from_ne_bytes(*bytes),
                        None => 0.0,
                    })
                    .collect()
            };
            Ok(self.units.iter().map(of_unit).collect())
        })
        .map_err(gpu_failed)
    }
}

/// The name of GPU `index`, or why it cannot be used.
#[pyfunction]
pub(crate) fn gpu_name(py: Python<'_>, index: u32) -> PyResult<String> {
    py.detach(|| Gpu::open(index))
        .map(|gpu| gpu.info().name.clone())
        .map_err(gpu_failed)
}

/// A place for a mover, empty while the model computes on the processor.
pub(crate) type MoverCell = OnceLock<Mover>;
