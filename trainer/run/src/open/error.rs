//! Errors of opening, reading and closing a run.

use std::path::PathBuf;

use kernels::gpu::GpuError;
use offload_support::paths::Word;
use offload_support::units::ApproxBytes;
use swapper::SwapperError;

use crate::accelerator::AcceleratorError;
use crate::config::RunSettings;
use crate::plan::PlanError;
use crate::run_record::RecordError;
use crate::weights::WeightsError;
use training_state::backend::BackendError;
use training_state::metrics::MetricsError;
use training_state::ranks::RankError;
use training_state::run::{CheckpointError, DirError, StateError, daemon_dir, resolved};
use training_state::store::{NotMounted, StoreError};

/// Error of opening, reading or closing a run.
#[derive(Debug, thiserror::Error)]
pub enum RunError {
    #[error(transparent)]
    Plan(#[from] PlanError),
    #[error(transparent)]
    Record(#[from] RecordError),
    #[error(transparent)]
    Rank(#[from] RankError),
    #[error(transparent)]
    Dir(#[from] DirError),
    #[error(transparent)]
    Store(#[from] StoreError),
    #[error(transparent)]
    Swapper(#[from] SwapperError),
    #[error(transparent)]
    Weights(#[from] WeightsError),
    #[error("model.from: {0}")]
    FirstRun(Box<dyn std::error::Error + Send + Sync>),
    #[error("model.from: {} is this run's own directory; set another train.run_dir for the new run", dir.display())]
    FromItself { dir: PathBuf },
    #[error(transparent)]
    Gpu(#[from] GpuError),
    #[error(transparent)]
    Accelerator(#[from] AcceleratorError),
    #[error(transparent)]
    Metrics(#[from] MetricsError),
    #[error(transparent)]
    State(#[from] StateError),
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    #[error(
        "{copy}{} has metrics of {steps} steps, but the store on {devices} has no generation of job {job}: if the store was moved, name its directory in nvme_path; or bring it back, look at it with `offloadd verify`, resume from a checkpoint with --resume-from STEP (`trainer runs` lists them), or start again with --fresh",
        run_dir.display()
    )]
    StoreLost {
        run_dir: PathBuf,
        steps: u64,
        devices: String,
        job: String,
        /// A sentence that says that the directory is a copy, or empty.
        copy: String,
    },
    #[error(
        "a crash lost the state of this run, because offload.durability is \"none\". To continue from a checkpoint, start a new run with it: --resume-from CHECKPOINT_DIR --set train.run_dir=NEW_DIR (`trainer runs` lists checkpoints). To start again, which deletes them: --fresh. The store reported: {0}"
    )]
    InPlace(SwapperError),
    #[error(
        "{error}\nAfter the daemon has ended, `offloadd verify --config {}` lists what is damaged. To continue, resume from a checkpoint with --resume-from STEP (`trainer runs` lists them), bring back an older copy of the run directory and of its store together, or start again with --fresh",
        Word(config)
    )]
    DamagedTile {
        error: Box<SwapperError>,
        config: PathBuf,
    },
    #[error(
        "the run in {} keeps its state in {files}, which does not exist: move the store back there, or read a checkpoint (`trainer runs` lists them)",
        run_dir.display()
    )]
    StoreMissing { run_dir: PathBuf, files: String },
    #[error(
        "node {node} does not see the run's directory {} as the first node does, and checkpoints are written there by all nodes: set train.run_dir to a shared directory, set train.checkpoints_on_each_node = true so that every node keeps every checkpoint, or keep the state on nvme and make no checkpoints (train.checkpoint_every = 0, no train.checkpoint_best, no train.export_to)",
        run_dir.display()
    )]
    NotShared { node: u32, run_dir: PathBuf },
    #[error(
        "train.checkpoints_on_each_node: nodes {sharing} see the same {} as other nodes, but not all nodes do: let all share it, or give each a directory of its own",
        run_dir.display()
    )]
    PartlyShared { run_dir: PathBuf, sharing: String },
    #[error(
        "node {node}: the store on {devices} holds {found}, and not {expected}: set zero_optimization's nvme_path to this node's own drives, or resume all nodes from a checkpoint with --resume-from STEP (`trainer runs` lists them)"
    )]
    OtherStore {
        node: u32,
        devices: String,
        found: String,
        expected: String,
    },
    #[error(
        "the state of the run in {} is divided over {nodes} nodes, and this command reads one directory: name a checkpoint with --checkpoint STEP (`trainer runs` lists them)",
        run_dir.display()
    )]
    OnNodes { run_dir: PathBuf, nodes: u32 },
    #[error(
        "the run in {} keeps its state {was}, and these settings keep it {now}: {remedy}. Or continue from a checkpoint with --resume-from STEP (`trainer runs` lists them), or in another train.run_dir",
        run_dir.display()
    )]
    Elsewhere {
        run_dir: PathBuf,
        was: String,
        now: String,
        remedy: String,
    },
    #[error(
        "{error}; {} of this are for block inputs (offload.activations = \"nvme\"): they take less with a smaller train_micro_batch_size_per_gpu (and more gradient_accumulation_steps), train.micro_batch_group or train.seq_len",
        ApproxBytes(*input_bytes)
    )]
    NoRoomForInputs {
        error: StoreError,
        /// Bytes of block inputs of all processes of the node.
        input_bytes: u64,
    },
    #[error(transparent)]
    NotMounted(#[from] NotMounted),
    #[error("the run in {} has committed nothing yet: train it for at least one step", run_dir.display())]
    NothingCommitted { run_dir: PathBuf },
    #[error(
        "the run in {} has no checkpoint yet: its {steps} steps are only in the memory of the running trainer. SIGUSR1 asks that trainer for a checkpoint; train.checkpoint_every = \"30min\" makes one every half hour",
        run_dir.display()
    )]
    OnlyInMemory { run_dir: PathBuf, steps: u64 },
    #[error(
        "the run in {} ended without a checkpoint, and its {steps} steps were only in memory, so they are lost. Train it again, with train.checkpoint_every = \"30min\"",
        run_dir.display()
    )]
    NothingKept { run_dir: PathBuf, steps: u64 },
}

impl From<BackendError> for RunError {
    fn from(error: BackendError) -> Self {
        match error {
            BackendError::Swapper(error) => Self::Swapper(error),
            BackendError::Gpu(error) => Self::Gpu(error),
        }
    }
}

impl RunError {
    /// Returns whether this error may be a consequence of another rank's death. A private daemon is a child
    /// of the first rank and dies with it, so losing the daemon counts on every other rank.
    pub fn may_follow_a_death(&self, is_first: bool) -> bool {
        match self {
            Self::Swapper(error) => {
                error.is_of_a_poisoned_job() || !is_first && error.is_of_a_gone_daemon()
            }
            _ => false,
        }
    }

    /// Adds a remedy that depends on the run's settings.
    pub fn of_run(self, settings: &RunSettings) -> Self {
        match self {
            Self::Swapper(error) if error.is_of_a_damaged_tile() => Self::DamagedTile {
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
