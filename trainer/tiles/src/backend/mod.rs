//! Where a run's tiles live between uses: with the swapper (host memory and devices), or all of them in a GPU's memory.
//!
//! Both cut units into the same tiles with the same bytes, so a checkpoint does not depend on where its run lived.

mod gpu;

use kernels::adamw::Hyper;
use kernels::gpu::GpuError;
use swapper::{
    Canceller, Spans, StepIo, StepProgram, Swapper, SwapperError, TileVisitor, UninitTile,
};

pub use gpu::{GPU_STAGING_BYTES, GpuBackend};

/// Why tiles could not be reached.
#[derive(Debug, thiserror::Error)]
pub enum BackendError {
    #[error(transparent)]
    Swapper(#[from] SwapperError),
    #[error(transparent)]
    Gpu(#[from] GpuError),
}

/// The tiles of one rank. `S` and `G` are what computes with tiles in either place; nothing while tiles are only filled or read.
pub enum TileBackend<S = (), G = ()> {
    /// In host memory and on devices.
    Swapper(Box<Swapper<Hyper>>, S),
    /// In a GPU's memory.
    Gpu(Box<GpuBackend>, G),
}

impl<S, G> TileBackend<S, G> {
    /// Fills every tile by `fill`, in order. With a store, the result is committed with `blob`.
    ///
    /// # Errors
    /// What `fill` returns; an error of the backend.
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
    /// An error of the swapper.
    pub fn begin_step(&mut self, program: StepProgram) -> Result<(), BackendError> {
        match self {
            Self::Swapper(swapper, _) => Ok(swapper.begin_step(program)?),
            Self::Gpu(..) => Ok(()),
        }
    }

    /// Updates all tiles with the step's gradients, now or before the next use of each. Without `hyper` the step is skipped: its
    /// gradients are dropped, and no tile is read or written for it.
    ///
    /// # Errors
    /// An error of the backend.
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

    /// Whether the host sees each tile as it is updated.
    pub fn updates_on_host(&self) -> bool {
        matches!(self, Self::Swapper(..))
    }

    /// Applies pending updates; with a store, commits them.
    ///
    /// # Errors
    /// An error of the backend.
    pub fn drain(&mut self) -> Result<(), BackendError> {
        match self {
            Self::Swapper(swapper, _) => Ok(swapper.drain()?),
            Self::Gpu(backend, _) => Ok(backend.settle()?),
        }
    }

    /// Drains, then calls `see` with each range's param and state, units and elements in order.
    ///
    /// # Errors
    /// An error of the backend.
    pub fn visit(&mut self, see: &mut TileVisitor) -> Result<(), BackendError> {
        match self {
            Self::Swapper(swapper, _) => Ok(swapper.visit(see)?),
            Self::Gpu(backend, _) => Ok(backend.visit(see)?),
        }
    }

    /// Begins or ends the collecting of spans.
    ///
    /// # Errors
    /// An error of the backend.
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

    /// A handle by which another thread ends a call that waits in vain; `None` where no call waits for others.
    pub fn canceller(&self) -> Option<Canceller> {
        match self {
            Self::Swapper(swapper, _) => Some(swapper.canceller()),
            Self::Gpu(..) => None,
        }
    }

    /// Ends the session in order.
    ///
    /// # Errors
    /// An error of the backend.
    pub fn close(self) -> Result<(), BackendError> {
        match self {
            Self::Swapper(swapper, _) => Ok(swapper.close()?),
            Self::Gpu(backend, _) => Ok(backend.settle()?),
        }
    }
}
