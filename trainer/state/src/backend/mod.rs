//! Storage of a run's tiles between uses: in the swapper (host memory and devices), in a GPU's memory, or those of some units in each.
//!
//! All divide units into the same tiles with the same bytes, so a checkpoint does not depend on the storage.

mod gpu;

use kernels::adamw::Hyper;
use kernels::gpu::GpuError;
use swapper::{
    Canceller, Scratch, Spans, StepIo, StepProgram, Swapper, SwapperError, TileVisitor, UninitTile,
};

pub use gpu::{BesideGpu, GPU_STAGING_BYTES, GpuBackend, GpuReader};

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
    /// Those of some units in host memory or on devices, those of the others in a GPU's memory.
    Both(Both, S, G),
}

/// Tiles in two places. Without a store, each unit is empty in one of them. With a store the swapper has all units, and those in the GPU's memory are
/// external there: the GPU has their newest content, and commits copy it.
pub struct Both {
    pub swapper: Box<Swapper<Hyper>>,
    pub backend: Box<GpuBackend>,
}

impl Both {
    /// Whether commits contain what is in the GPU's memory.
    fn commits_all(&self) -> bool {
        !self.swapper.external_units().is_empty()
    }

    /// Reads the store's content of units that are in the GPU's memory.
    fn load(&mut self) -> Result<(), BackendError> {
        let Self { swapper, backend } = self;
        let mut loaded = Ok(());
        swapper.visit_units(&swapper.external_units(), &mut |range, param, state| {
            if loaded.is_ok() {
                loaded = backend.write(range, param, state);
            }
        })?;
        Ok(loaded?)
    }

    /// Sees the tiles of both in the order of units.
    fn visit(&mut self, see: &mut TileVisitor) -> Result<(), BackendError> {
        let Self { swapper, backend } = self;
        let mut next = 0;
        let mut failed = Ok(());
        swapper.visit(&mut |range, param, state| {
            if next < range.unit && failed.is_ok() {
                failed = backend.visit(next..range.unit, see);
                next = range.unit;
            }
            see(range, param, state);
        })?;
        failed?;
        Ok(backend.visit(next..usize::MAX, see)?)
    }
}

impl<S, G> TileBackend<S, G> {
    /// Fills every tile with `fill`. With a store, commits the result with `blob`.
    ///
    /// # Errors
    /// `fill` or the backend fails.
    pub fn initialize<E: From<SwapperError> + From<GpuError>>(
        &mut self,
        mut fill: impl FnMut(&mut [UninitTile<'_>]) -> Result<(), E>,
        blob: Vec<u8>,
    ) -> Result<(), E> {
        match self {
            Self::Swapper(swapper, _) => swapper.initialize(fill, blob),
            Self::Gpu(backend, _) => backend.initialize(fill),
            Self::Both(both, ..) if both.commits_all() => {
                let Both { swapper, backend } = both;
                let fill_both = |tiles: &mut [UninitTile<'_>]| {
                    fill(tiles)?;
                    for tile in tiles {
                        backend.write(tile.range, tile.param, tile.state)?;
                    }
                    Ok(())
                };
                swapper.initialize(fill_both, blob)
            }
            Self::Both(both, ..) => {
                both.backend.initialize(&mut fill)?;
                both.swapper.initialize(fill, blob)
            }
        }
    }

    /// Reads what the store has of units whose tiles are in a GPU's memory: after a resumption.
    ///
    /// # Errors
    /// The backend fails; a tile is damaged.
    pub fn load(&mut self) -> Result<(), BackendError> {
        match self {
            Self::Both(both, ..) => both.load(),
            Self::Swapper(..) | Self::Gpu(..) => Ok(()),
        }
    }

    /// Begins a pass over the units in the order of `program`.
    ///
    /// # Errors
    /// The swapper fails.
    pub fn begin_step(&mut self, program: StepProgram) -> Result<(), BackendError> {
        match self {
            Self::Swapper(swapper, _) | Self::Both(Both { swapper, .. }, ..) => {
                Ok(swapper.begin_step(program)?)
            }
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
        if let (Self::Both(both, ..), Some(_)) = (&mut *self, &hyper) {
            // The last commit still copies what this update changes.
            both.swapper.settle_updates()?;
        }
        if let (Some(backend), Some(hyper)) = (self.gpu(), &hyper) {
            backend.update(hyper)?;
        }
        match self {
            Self::Swapper(swapper, _) | Self::Both(Both { swapper, .. }, ..) => Ok(match hyper {
                Some(hyper) => swapper.finish_step(hyper, blob)?,
                None => swapper.skip_step(blob)?,
            }),
            Self::Gpu(..) => Ok(StepIo::default()),
        }
    }

    /// The tiles that are in a GPU's memory.
    fn gpu(&mut self) -> Option<&mut GpuBackend> {
        match self {
            Self::Swapper(..) => None,
            Self::Gpu(backend, _) | Self::Both(Both { backend, .. }, ..) => Some(backend),
        }
    }

    /// Applies pending updates; with a store, commits them.
    ///
    /// # Errors
    /// The backend fails.
    pub fn drain(&mut self) -> Result<(), BackendError> {
        match self {
            Self::Swapper(swapper, _) => Ok(swapper.drain()?),
            Self::Gpu(backend, _) => Ok(backend.settle()?),
            Self::Both(both, ..) => {
                both.backend.settle()?;
                Ok(both.swapper.drain()?)
            }
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
            Self::Gpu(backend, _) => Ok(backend.visit(0..usize::MAX, see)?),
            Self::Both(both, ..) => both.visit(see),
        }
    }

    /// Calls `see` with the tiles that the host does not process when it updates them: those in a GPU's memory.
    ///
    /// # Errors
    /// The GPU fails.
    pub fn visit_updated_elsewhere(&mut self, see: &mut TileVisitor) -> Result<(), BackendError> {
        match self.gpu() {
            Some(backend) => Ok(backend.visit(0..usize::MAX, see)?),
            None => Ok(()),
        }
    }

    /// Starts or stops recording spans.
    ///
    /// # Errors
    /// The backend fails.
    pub fn record_spans(&mut self, recording: bool) -> Result<(), BackendError> {
        match self {
            Self::Swapper(swapper, _) | Self::Both(Both { swapper, .. }, ..) => {
                Ok(swapper.record_spans(recording)?)
            }
            Self::Gpu(..) => Ok(()),
        }
    }

    /// Returns the spans collected since the last call.
    pub fn take_spans(&mut self) -> Spans {
        match self {
            Self::Swapper(swapper, _) | Self::Both(Both { swapper, .. }, ..) => {
                swapper.take_spans()
            }
            Self::Gpu(..) => Spans::default(),
        }
    }

    /// Returns a handle with which another thread ends a call that waits for other ranks; `None` if no call
    /// does.
    pub fn canceller(&self) -> Option<Canceller> {
        match self {
            Self::Swapper(swapper, _) | Self::Both(Both { swapper, .. }, ..) => {
                Some(swapper.canceller())
            }
            Self::Gpu(..) => None,
        }
    }

    /// Returns the caller's own tiles on devices; `None` without an area in the swapper's settings.
    pub fn scratch(&self) -> Option<Scratch> {
        match self {
            Self::Swapper(swapper, _) | Self::Both(Both { swapper, .. }, ..) => swapper.scratch(),
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
            Self::Both(both, ..) => {
                both.backend.settle()?;
                Ok(both.swapper.close()?)
            }
        }
    }
}
