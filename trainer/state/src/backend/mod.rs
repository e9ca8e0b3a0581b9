//! Storage of a run's tiles between uses: in the swapper (host memory and devices), or all in a GPU's memory.
//!
//! Both divide units into the same tiles with the same bytes, so a checkpoint does not depend on the storage.

mod gpu;

use kernels::adamw::Hyper;
use kernels::gpu::GpuError;
use swapper::{
    Canceller, Spans, StepIo, StepProgram, Swapper, SwapperError, TileVisitor, UninitTile,
};

pub use gpu::{GPU_STAGING_BYTES, GpuBackend};

/// Error of accessing tiles.
#[derive(Debug, thiserror::Error)]
pub enum BackendError {
    #[error(transparent)]
    Swapper(#[from] SwapperError),
    #[error(transparent)]
    Gpu(#[from] GpuError),
}

/// Tiles of one rank. `S` and `G` are the buffers that compute with tiles of either kind; `()` while tiles
/// are only filled or read.
pub enum TileBackend<S = (), G = ()> {
    /// In host memory and on devices.
    Swapper(Box<Swapper<Hyper>>, S),
    /// In a GPU's memory.
    Gpu(Box<GpuBackend>, G),
}

impl<S, G> TileBackend<S, G> {
    /// Fills every tile with `fill`, in order. With a store, commits the result with `blob`.
    ///
    /// # Errors
    /// `fill` or the backend fails.
    pub fn initialize<E: From<SwapperError> + From<GpuError>>(
        &mut self,
        fill: impl FnMut(&mut [UninitTile<'_>]) -> Result<(), E>,
        blob: Vec<u8>,
    ) -> Result<(), E> {
        match self {
            Self::Swapper(swapper, _) => swapper.initialize(fill, blob),
            Self::Gpu(backend, _) => backend.initialize(fill),
        }
    }

    /// Begins a pass over the units in the order of `program`.
    ///
    /// # Errors
    /// The swapper fails.
    pub fn begin_step(&mut self, program: StepProgram) -> Result<(), BackendError> {
        match self {
            Self::Swapper(swapper, _) => Ok(swapper.begin_step(program)?),
            Self::Gpu(..) => Ok(()),
        }
    }

    /// Updates all tiles with the step's gradients, at once or before the next use of each. Without `hyper`
    /// the step is skipped: its gradients are dropped, and no tile is read or written.
    ///
    /// # Errors
    /// The backend fails.
    pub fn finish_step(
        &mut self,
        hyper: Option<Hyper>,
        blob: Vec<u8>,
    ) -> Result<StepIo, BackendError> {
        match self {
            Self::Swapper(swapper, _) => Ok(match hyper {
                Some(hyper) => swapper.finish_step(hyper, blob)?,
                None => swapper.skip_step(blob)?,
            }),
            Self::Gpu(backend, _) => {
                if let Some(hyper) = hyper {
                    backend.update(&hyper)?;
                }
                Ok(StepIo::default())
            }
        }
    }

    /// Returns whether the host processes each tile when it is updated.
    pub fn updates_on_host(&self) -> bool {
        matches!(self, Self::Swapper(..))
    }

    /// Applies pending updates; with a store, commits them.
    ///
    /// # Errors
    /// The backend fails.
    pub fn drain(&mut self) -> Result<(), BackendError> {
        match self {
            Self::Swapper(swapper, _) => Ok(swapper.drain()?),
            Self::Gpu(backend, _) => Ok(backend.settle()?),
        }
    }

    /// Drains, then calls `see` with the parameters and optimizer state of each range, in the order of units
    /// and elements.
    ///
    /// # Errors
    /// The backend fails.
    pub fn visit(&mut self, see: &mut TileVisitor) -> Result<(), BackendError> {
        match self {
            Self::Swapper(swapper, _) => Ok(swapper.visit(see)?),
            Self::Gpu(backend, _) => Ok(backend.visit(see)?),
        }
    }

    /// Starts or stops recording spans.
    ///
    /// # Errors
    /// The backend fails.
    pub fn record_spans(&mut self, recording: bool) -> Result<(), BackendError> {
        match self {
            Self::Swapper(swapper, _) => Ok(swapper.record_spans(recording)?),
            Self::Gpu(..) => Ok(()),
        }
    }

    /// Returns the spans collected since the last call.
    pub fn take_spans(&mut self) -> Spans {
        match self {
            Self::Swapper(swapper, _) => swapper.take_spans(),
            Self::Gpu(..) => Spans::default(),
        }
    }

    /// Returns a handle with which another thread ends a call that waits for other ranks; `None` if no call
    /// does.
    pub fn canceller(&self) -> Option<Canceller> {
        match self {
            Self::Swapper(swapper, _) => Some(swapper.canceller()),
            Self::Gpu(..) => None,
        }
    }

    /// Closes the session.
    ///
    /// # Errors
    /// The backend fails.
    pub fn close(self) -> Result<(), BackendError> {
        match self {
            Self::Swapper(swapper, _) => Ok(swapper.close()?),
            Self::Gpu(backend, _) => Ok(backend.settle()?),
        }
    }
}
