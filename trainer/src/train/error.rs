//! Why a run did not start, or ended before its time: every part's error, and what only the whole run knows.

use std::path::PathBuf;

use kernels::gpu::GpuError;
use kernels_torch::collective::CollectiveError;
use offload_support::units::ApproxBytes;
use swapper::{SwapperError, TileError};

use crate::accelerator::AcceleratorError;
use crate::backend::BackendError;
use crate::compute::ComputeError;
use crate::config::RunSettings;
use crate::data::DataError;
use crate::export::ExportError;
use crate::metrics::MetricsError;
use crate::monitor::MonitorError;
use crate::plan::PlanError;
use crate::run::{CheckpointError, DirError, StateError, daemon_dir, resolved};
use crate::store::StoreError;
use crate::trace::TraceError;
use crate::weights::WeightsError;

/// Why a run did not start, or ended before its time.
#[derive(Debug, thiserror::Error)]
pub enum TrainError {
    #[error(transparent)]
    Data(#[from] DataError),
    #[error(transparent)]
    Plan(#[from] PlanError),
    #[error(transparent)]
    Dir(#[from] DirError),
    #[error(transparent)]
    Store(#[from] StoreError),
    #[error(transparent)]
    Swapper(#[from] SwapperError),
    #[error(transparent)]
    Weights(#[from] WeightsError),
    #[error("model.from: {0}")]
    FirstRun(Box<ExportError>),
    #[error("model.from: {} is this run's own directory: name another train.run_dir for the new run", dir.display())]
    FromItself { dir: PathBuf },
    #[error(transparent)]
    Gpu(#[from] GpuError),
    #[error(transparent)]
    Accelerator(#[from] AcceleratorError),
    #[error(transparent)]
    Compute(#[from] ComputeError),
    #[error(transparent)]
    Metrics(#[from] MetricsError),
    #[error(transparent)]
    Monitor(#[from] MonitorError),
    #[error(transparent)]
    State(#[from] StateError),
    #[error(transparent)]
    Trace(#[from] TraceError),
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    #[error("{count} checkpoints could not be made, all else is done; the first: {first}")]
    Checkpoints { count: u64, first: String },
    #[error(transparent)]
    Collective(#[from] CollectiveError),
    #[error(
        "{ranks} ranks, {local_ranks} of them on this node: runs over several nodes are not supported yet, start all ranks on one node"
    )]
    Nodes { ranks: u32, local_ranks: u32 },
    #[error("{death}. Here: {error}")]
    AfterDeath {
        death: CollectiveError,
        error: Box<TrainError>,
    },
    #[error("rank {rank} failed in {what}: see its own message")]
    OtherRank { rank: u32, what: String },
    #[error("cannot take over SIGTERM and SIGINT: {0}")]
    Signals(std::io::Error),
    #[error("cannot start {count} threads for the optimizer: {message}")]
    Threads { count: usize, message: String },
    #[error(
        "step {step}: loss {loss}, gradient norm {norm}: training diverged. Step {} was kept: lower optimizer.params.lr or warm up longer and resume from there, or start again with --fresh", step - 1
    )]
    Diverged { step: u64, loss: f64, norm: f64 },
    #[error(
        "step {step}: gradients are not finite, and the loss scale is at its least, {scale} (fp16.min_loss_scale): training diverged. Step {} was kept: lower optimizer.params.lr or warm up longer and resume from there, use bf16, or start again with --fresh", step - 1
    )]
    LeastScale { step: u64, scale: f64 },
    #[error(
        "{copy}{} has metrics of {steps} steps, but the store on {devices} has no generation of job {job}: bring the store back, look at it with `offloadd verify`, resume from a checkpoint with --resume-from STEP (`trainer runs` lists them), or start again with --fresh",
        run_dir.display()
    )]
    StoreLost {
        run_dir: PathBuf,
        steps: u64,
        devices: String,
        job: String,
        /// That the directory is a copy, if it is; a sentence of its own.
        copy: String,
    },
    #[error(
        "{0}\nThe run has offload.durability = \"none\": --fresh starts it again, \"full\" survives a crash"
    )]
    InPlace(SwapperError),
    #[error(
        "{error}\nWhen its daemon has ended, `offloadd verify --config {}` lists what is damaged. To go on, take a checkpoint with --resume-from STEP (`trainer runs` lists them), bring back an older copy of the run directory and of its store together, or start again with --fresh",
        config.display()
    )]
    DamagedTile {
        error: Box<SwapperError>,
        config: PathBuf,
    },
    #[error(
        "there is no run in {}: it has no run.json. Name the directory of a run, as in its train.run_dir",
        dir.display()
    )]
    NoRun { dir: PathBuf },
    #[error(
        "the run in {} cannot be read: {message}. Another version of this program made it, or run.json is damaged",
        dir.display()
    )]
    UnknownRun { dir: PathBuf, message: String },
    #[error(
        "the file system of {} has {} free, and {what} {}: {change}",
        dir.display(), ApproxBytes(*free_bytes), ApproxBytes(*needed_bytes)
    )]
    CheckpointSpace {
        dir: PathBuf,
        free_bytes: u64,
        needed_bytes: u64,
        /// What takes it, as the beginning of a sentence.
        what: &'static str,
        /// What a person can do.
        change: &'static str,
    },
    #[error("nothing was committed yet in {}", run_dir.display())]
    NothingCommitted { run_dir: PathBuf },
}

impl From<BackendError> for TrainError {
    fn from(error: BackendError) -> Self {
        match error {
            BackendError::Swapper(error) => Self::Swapper(error),
            BackendError::Gpu(error) => Self::Gpu(error),
        }
    }
}

impl TrainError {
    /// Whether another rank's death may be why, of which the daemon or its end told first. The first rank's daemon dies with it
    /// and with nobody else.
    pub(crate) fn may_follow_a_death(&self, is_first: bool) -> bool {
        match self {
            Self::Swapper(error) | Self::InPlace(error) => {
                error.is_of_a_poisoned_job() || !is_first && error.is_of_a_gone_daemon()
            }
            _ => false,
        }
    }

    /// With what a person can do about it, as far as that depends on the run.
    pub(crate) fn of_run(self, settings: &RunSettings) -> Self {
        match self {
            Self::Swapper(
                error @ SwapperError::Tile {
                    source: TileError::Damaged { .. },
                    ..
                },
            ) => Self::DamagedTile {
                error: Box::new(error),
                config: match settings.offload.socket {
                    Some(_) => "OFFLOADD.toml".into(),
                    None => daemon_dir(&resolved(&settings.train.run_dir)).join("offloadd.toml"),
                },
            },
            error => error,
        }
    }
}
