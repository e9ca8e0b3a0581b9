//! Moves inputs of checkpointed blocks between PyTorch's memory and scratch tiles of the run's devices.
//!
//! `training_state::scratch_copies` has the thread that copies. Here PyTorch's addresses and streams become memory and events, and a wait lets
//! Python look at signals.

use std::sync::Arc;

use kernels::gpu::Gpu;
use pyo3::prelude::*;
use swapper::ScratchSettings;
use training_state::scratch_copies::{CopyError, HostMemory, ScratchCopies, TensorMemory};

use crate::errors::{failed, failed_with};
use crate::gpu::{SLICE, gpu_failed};
use crate::{Core, Error, memory};

/// A tensor of PyTorch in the processor's memory.
struct HostTensor {
    address: usize,
}

impl HostMemory for HostTensor {
    fn read(&self, offset: usize, to: &mut [u8]) {
        let range = offset as u64..(offset + to.len()) as u64;
        to.copy_from_slice(memory::elements(self.address, &range, 1));
    }

    fn write(&self, offset: usize, from: &[u8]) {
        let range = offset as u64..(offset + from.len()) as u64;
        memory::write(self.address, &range, 1, from);
    }
}

fn copy_failed(error: &CopyError) -> PyErr {
    match error {
        CopyError::Swapper(error) => failed_with(error),
        CopyError::Gpu(_) | CopyError::Thread(_) | CopyError::Panicked => {
            Error::new_err(error.to_string())
        }
    }
}

/// The area of a run's inputs of blocks.
#[pyclass(frozen)]
pub(crate) struct ActivationTiles {
    core: Py<Core>,
    gpu: Option<Gpu>,
    copies: ScratchCopies,
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
        let (memory, after) = match &self.gpu {
            None => (TensorMemory::Host(Box::new(HostTensor { address })), None),
            Some(gpu) => {
                let stream = memory::torch_stream(gpu, stream);
                let after = py.detach(|| stream.record()).map_err(gpu_failed)?;
                let memory = TensorMemory::Gpu(memory::on_gpu(gpu, address, bytes));
                (memory, Some(Arc::new(after)))
            }
        };
        let tiles = tiles.iter().copied();
        let number = match leaves {
            true => self.copies.leave(memory, bytes, tiles, after),
            false => self.copies.bring_back(memory, bytes, tiles, after),
        };
        number.ok_or_else(|| Error::new_err("the run is closed"))
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
        let gpu = py.detach(|| index.map(Gpu::open).transpose());
        let gpu = gpu.map_err(gpu_failed)?;
        let copies = py.detach(|| ScratchCopies::start(scratch, gpu.as_ref()));
        let copies = copies.map_err(|error| copy_failed(&error))?;
        Ok(Self { core, gpu, copies })
    }

    #[getter]
    fn tile_bytes(&self) -> u32 {
        self.copies.area().tile_bytes
    }

    #[getter]
    fn tile_count(&self) -> u32 {
        self.copies.area().tile_count
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
            match py.detach(|| self.copies.wait(number, SLICE)) {
                Some(found) => break found.map_err(|error| copy_failed(&error))?,
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
        self.copies.has_result(number)
    }

    /// Ends the thread when the copies that have begun are made.
    fn close(&self, py: Python<'_>) {
        let thread = self.copies.stop();
        if let Some(thread) = thread.filter(|_| !self.core.get().is_forked()) {
            py.detach(|| drop(thread.join()));
        }
    }
}

/// Bytes of an area in which tensors of these sizes fit.
#[pyfunction]
pub(crate) fn activation_area(sizes: Vec<u64>) -> PyResult<u64> {
    let area = ScratchSettings::for_tensors(&sizes).map_err(failed)?;
    Ok(area.bytes())
}
