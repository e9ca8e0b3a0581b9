//! Errors that stop a run from starting or end it early.

use std::path::PathBuf;

use kernels::gpu::GpuError;
use swapper::SwapperError;
use training_ranks::CollectiveError;

use crate::compute::ComputeError;
use crate::ranks::ConnectError;
use training_run::config::{RunSettings, SettingsError};
use training_run::data::DataError;
use training_run::export::ExportError;
use training_run::open::RunError;
use training_state::backend::BackendError;
use training_state::checkpointer::CheckpointsFailed;
use training_state::metrics::MetricsError;
use training_state::monitor::MonitorError;
use training_state::ranks::RankError;
use training_state::scratch_copies::CopyError;
use training_state::trace::TraceError;

/// Error that stops a run from starting or ends it early.
#[derive(Debug, thiserror::Error)]
pub enum TrainError {
    #[error(transparent)]
    Run(#[from] RunError),
    #[error(transparent)]
    Connect(#[from] ConnectError),
    #[error(transparent)]
    Data(#[from] DataError),
    #[error(transparent)]
    Settings(#[from] SettingsError),
    #[error("train.export_to: {} already exists: name another directory, or remove it", out.display())]
    ExportExists { out: PathBuf },
    #[error("the run is complete, but its weights could not be exported to {} (train.export_to): {error}. `trainer export` repeats the export", out.display())]
    Export {
        out: PathBuf,
        error: Box<ExportError>,
    },
    #[error(transparent)]
    Compute(#[from] ComputeError),
    #[error(
        "inputs of blocks on drives (offload.activations = \"nvme\"), which are no part of the run's state: {0}"
    )]
    Inputs(CopyError),
    #[error(
        "{error}. The GPU has too little memory for this run. Less is needed with a smaller train_micro_batch_size_per_gpu (and more \
         gradient_accumulation_steps), train.activation_checkpointing = \"full\", offload.activations = \"cpu\" or \
         offload.gpu_resident_fraction = 0; `trainer plan RUN.toml` shows what takes how much. {kept}"
    )]
    GpuMemory {
        error: Box<TrainError>,
        kept: &'static str,
    },
    #[error(transparent)]
    Monitor(#[from] MonitorError),
    #[error(transparent)]
    Trace(#[from] TraceError),
    #[error(transparent)]
    Checkpoints(#[from] CheckpointsFailed),
    #[error(transparent)]
    Collective(#[from] CollectiveError),
    #[error("{death}; this rank then failed: {error}")]
    AfterDeath {
        death: CollectiveError,
        error: Box<TrainError>,
    },
    #[error("cannot install handlers for signals: {0}")]
    Signals(std::io::Error),
    #[error(
        "cannot start {count} threads for the optimizer: {message}; raise the limit of processes (ulimit -u)"
    )]
    Threads { count: usize, message: String },
    #[error(
        "step {step}: loss {loss}, gradient norm {norm}: training diverged. The state of step {} was kept: lower optimizer.params.lr or warm up longer and resume from there, or start again with --fresh", step - 1
    )]
    Diverged { step: u64, loss: f64, norm: f64 },
    #[error(
        "step {step}: gradients are not finite, and the loss scale is at its minimum, {scale} (fp16.min_loss_scale): training diverged. The state of step {} was kept: lower optimizer.params.lr or warm up longer and resume from there, use bf16, or start again with --fresh", step - 1
    )]
    LeastScale { step: u64, scale: f64 },
}

/// Converts errors of parts that training shares with opening a run.
macro_rules! from_run_errors {
    ($($error:ty),*) => {$(
        impl From<$error> for TrainError {
            fn from(error: $error) -> Self {
                Self::Run(error.into())
            }
        }
    )*};
}

from_run_errors!(
    BackendError,
    GpuError,
    MetricsError,
    RankError,
    SwapperError
);

impl From<CopyError> for TrainError {
    fn from(error: CopyError) -> Self {
        match error {
            // It concerns the whole run.
            CopyError::Swapper(error)
                if !matches!(error.cause(), SwapperError::ScratchTile { .. }) =>
            {
                SwapperError::Shared(error).into()
            }
            error => Self::Inputs(error),
        }
    }
}

impl TrainError {
    /// Returns whether this error may be a consequence of another rank's death.
    pub(super) fn may_follow_a_death(&self, is_first: bool) -> bool {
        matches!(self, Self::Run(error) if error.may_follow_a_death(is_first))
    }

    /// Returns whether a GPU had too little memory. Torch says so in words only.
    fn is_out_of_gpu_memory(&self) -> bool {
        match self {
            Self::Run(RunError::Gpu(error)) | Self::Compute(ComputeError::Gpu(error)) => {
                error.is_out_of_memory()
            }
            Self::Compute(ComputeError::Torch(error)) => {
                error.to_string().contains("out of memory")
            }
            _ => false,
        }
    }

    /// Adds a remedy that depends on the run's settings.
    pub(super) fn of_run(self, settings: &RunSettings) -> Self {
        match self {
            error if error.is_out_of_gpu_memory() => Self::GpuMemory {
                error: Box::new(error),
                kept: match settings.placement.has_store() {
                    true => "The next start resumes after the last committed step",
                    false => "The next start resumes from the newest checkpoint, if there is one",
                },
            },
            Self::Run(error) => Self::Run(error.of_run(settings)),
            error => error,
        }
    }
}
