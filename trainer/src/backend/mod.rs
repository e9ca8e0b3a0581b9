//! Where a run's tiles live between uses: with the swapper (host memory and devices), or all of them in a GPU's memory.
//!
//! Both cut units into the same tiles with the same bytes, so checkpoints and digests do not tell where a run lived.

mod gpu;

use kernels::adamw::Hyper;
use kernels::gpu::GpuError;
use swapper::{
    Canceller, Spans, StepIo, StepProgram, Swapper, SwapperError, TileVisitor, UninitTile,
};

pub(crate) use gpu::GpuBackend;

/// Why tiles could not be reached.
#[derive(Debug, thiserror::Error)]
pub enum BackendError {
    #[error(transparent)]
    Swapper(#[from] SwapperError),
    #[error(transparent)]
    Gpu(#[from] GpuError),
}

/// The tiles of one rank.
pub(crate) enum TileBackend {
    Swapper(Box<Swapper<Hyper>>),
    Gpu(Box<GpuBackend>),
}

impl TileBackend {
    /// Gives every tile its first content: all that `fill` is given, in order. With a store it is committed with `blob`.
    ///
    /// # Errors
    /// What `fill` returns; what the tiles' place says.
    pub(crate) fn initialize<E: From<SwapperError> + From<GpuError>>(
        &mut self,
        fill: impl FnMut(&mut [UninitTile<'_>]) -> Result<(), E>,
        blob: Vec<u8>,
    ) -> Result<(), E> {
        match self {
            Self::Swapper(swapper) => swapper.initialize(fill, blob),
            Self::Gpu(backend) => backend.initialize(fill),
        }
    }

    /// Begins a pass over the units as `program` says.
    ///
    /// # Errors
    /// As the swapper says.
    pub(crate) fn begin_step(&mut self, program: StepProgram) -> Result<(), BackendError> {
        match self {
            Self::Swapper(swapper) => Ok(swapper.begin_step(program)?),
            // Everything is there.
            Self::Gpu(_) => Ok(()),
        }
    }

    /// All gradients are there: updates what they belong to, now or before its next use. Without `hyper` the step is skipped:
    /// its gradients are dropped, and no tile is read or written for it.
    ///
    /// # Errors
    /// What the tiles' place says.
    pub(crate) fn finish_step(
        &mut self,
        hyper: Option<Hyper>,
        blob: Vec<u8>,
    ) -> Result<StepIo, BackendError> {
        match self {
            Self::Swapper(swapper) => Ok(match hyper {
                Some(hyper) => swapper.finish_step(hyper, blob)?,
                None => swapper.skip_step(blob)?,
            }),
            Self::Gpu(backend) => {
                if let Some(hyper) = hyper {
                    backend.update(&hyper)?;
                }
                Ok(StepIo::default())
            }
        }
    }

    /// Whether the host sees each tile as it is updated.
    pub(crate) fn updates_on_host(&self) -> bool {
        matches!(self, Self::Swapper(_))
    }

    /// Applies what is pending; with a store, commits it.
    ///
    /// # Errors
    /// What the tiles' place says.
    pub(crate) fn drain(&mut self) -> Result<(), BackendError> {
        match self {
            Self::Swapper(swapper) => Ok(swapper.drain()?),
            Self::Gpu(backend) => Ok(backend.settle()?),
        }
    }

    /// Drains, then calls `see` with each range's param and state, units and elements in order.
    ///
    /// # Errors
    /// What the tiles' place says.
    pub(crate) fn visit(&mut self, see: &mut TileVisitor) -> Result<(), BackendError> {
        match self {
            Self::Swapper(swapper) => Ok(swapper.visit(see)?),
            Self::Gpu(backend) => Ok(backend.visit(see)?),
        }
    }

    /// Begins or ends the collecting of spans.
    ///
    /// # Errors
    /// What the tiles' place says.
    pub(crate) fn record_spans(&mut self, recording: bool) -> Result<(), BackendError> {
        match self {
            Self::Swapper(swapper) => Ok(swapper.record_spans(recording)?),
            // Nothing moves.
            Self::Gpu(_) => Ok(()),
        }
    }

    /// What was collected since it was taken before.
    pub(crate) fn take_spans(&mut self) -> Spans {
        match self {
            Self::Swapper(swapper) => swapper.take_spans(),
            Self::Gpu(_) => Spans::default(),
        }
    }

    /// For a thread that learns first that a call waits in vain; `None` where no call waits for others.
    pub(crate) fn canceller(&self) -> Option<Canceller> {
        match self {
            Self::Swapper(swapper) => Some(swapper.canceller()),
            Self::Gpu(_) => None,
        }
    }

    /// Ends in order.
    ///
    /// # Errors
    /// What the tiles' place says.
    pub(crate) fn close(self) -> Result<(), BackendError> {
        match self {
            Self::Swapper(swapper) => Ok(swapper.close()?),
            Self::Gpu(backend) => Ok(backend.settle()?),
        }
    }
}
