//! The checked settings of a run. Whatever holds one of these has been through `resolve/`; no field contradicts another.

use std::path::PathBuf;

use serde::{Serialize, Serializer};

use super::{LrSchedule, OverflowPolicy, Reports, Stage};
use crate::compute::ActivationCheckpointing;
use crate::model::{Dropout, Dtype, ModelConfig};

/// A run, ready to be planned.
#[derive(Clone, Debug, Serialize)]
pub struct RunSettings {
    pub model: ModelConfig,
    /// The directory that `model.path` names, with the model's `config.json`, and its tokenizer and weights if it has them.
    pub model_dir: Option<PathBuf>,
    /// What the weights of a fresh run are.
    pub first_weights: FirstWeights,
    /// What is left out at random in training.
    pub dropout: Dropout,
    /// Parameters and activations. Bf16 keeps its fp32 master split, fp16 whole.
    #[serde(serialize_with = "dtype_word")]
    pub dtype: Dtype,
    pub overflow: OverflowPolicy,
    /// Of one rank.
    pub batch: Batch,
    /// Processes that train the run together.
    pub ranks: u32,
    /// Largest global norm of the gradients; 0 leaves them as they are.
    pub gradient_clipping: f64,
    pub optimizer: OptimizerSettings,
    pub lr: LrSchedule,
    pub data: DataSettings,
    pub train: TrainSettings,
    pub reports: Reports,
    pub placement: Placement,
    pub offload: OffloadSettings,
    /// Choices made for the reader of the run file that may be another than what was meant.
    #[serde(skip)]
    pub warnings: Vec<String>,
    /// What a reader of the run file should know: keys without effect, defaults taken.
    #[serde(skip)]
    pub notes: Vec<String>,
}

impl RunSettings {
    /// Windows of one step, over all ranks.
    pub fn step_samples(&self) -> u64 {
        self.batch.samples() * u64::from(self.ranks)
    }

    /// Tokens of one step, over all ranks.
    pub fn step_tokens(&self) -> u64 {
        self.batch.tokens() * u64::from(self.ranks)
    }

    /// Every resolved setting as `key = value`, one a line.
    pub fn lines(&self) -> Vec<String> {
        fn walk(path: &str, value: &serde_json::Value, lines: &mut Vec<String>) {
            let serde_json::Value::Object(table) = value else {
                return lines.push(format!("{path} = {value}"));
            };
            for (key, value) in table {
                walk(&super::keys::join(path, key), value, lines);
            }
        }
        let mut lines = Vec::new();
        walk(
            "",
            &serde_json::to_value(self).expect("the settings are plain data"),
            &mut lines,
        );
        lines
    }
}

fn dtype_word<S: Serializer>(dtype: &Dtype, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(dtype.name())
}

/// One rank's samples of a step: `micro_batches` micro-batches of `micro_batch` windows of `seq_len` tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Batch {
    pub micro_batch: usize,
    pub micro_batches: usize,
    pub seq_len: usize,
}

impl Batch {
    /// Windows of one step on one rank.
    pub fn samples(&self) -> u64 {
        (self.micro_batch * self.micro_batches) as u64
    }

    /// Tokens of one step on one rank.
    pub fn tokens(&self) -> u64 {
        self.samples() * self.seq_len as u64
    }
}

/// What the weights of a fresh run are. A run that goes on has its own.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum FirstWeights {
    /// Random numbers, by `train.seed`.
    Random,
    /// Those in the model's directory.
    Files,
    /// Those that the run in a directory holds.
    Run(PathBuf),
}

/// AdamW with decoupled weight decay.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct OptimizerSettings {
    pub lr: f64,
    pub betas: [f64; 2],
    pub eps: f64,
    pub weight_decay: f64,
    pub decay: Decaying,
}

/// Which parameters weight decay takes from.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Decaying {
    /// Matrices and the embedding: not norms, not biases.
    Matrices,
    /// All, as an optimizer has it that was given a model's parameters in one group.
    All,
    /// All whose name in a checkpoint has none of these texts in it.
    AllBut(Vec<String>),
}

/// What is learned from, how it becomes tokens, and what of it is kept for evaluation.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct DataSettings {
    /// Empty where the run has no steps.
    pub files: Vec<PathBuf>,
    /// Text of its own for evaluation; empty when a share of `files` is held out, or nothing.
    pub eval_files: Vec<PathBuf>,
    pub validation_fraction: Fraction,
    /// A directory with `tokenizer.json`, or such a file; "bytes"; `None` for that of the model's directory, or bytes.
    pub tokenizer: Option<PathBuf>,
    /// Takes the place of the tokenizer's own.
    pub chat_template: Option<PathBuf>,
    pub packing: Packing,
    pub loss_on: LossOn,
    /// Whether windows are drawn in an order of the seed, another one each time through; otherwise they come as they lie in the files.
    pub shuffle: bool,
    /// Where tokens are kept for other runs too; `None` for the run directory.
    pub cache: Option<PathBuf>,
}

/// How documents fill windows. In both, attention reaches back over documents that stand before in the same window.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Packing {
    /// One after another, cut where a window ends.
    Concatenate,
    /// Whole, with padding that does not count.
    Documents,
}

/// Which tokens the loss is the mean of.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum LossOn {
    /// All.
    All,
    /// Completions, and what the assistant says in conversations.
    Completions,
}

/// The run itself.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct TrainSettings {
    /// Steps of the whole run; 0: it is made from its first weights, and can be exported.
    pub steps: u64,
    /// The step this start ends with: `steps`, or less when the run is to be continued later.
    pub stop_after: u64,
    pub seed: u64,
    /// Steps between evaluations; 0: none.
    pub eval_every: u64,
    pub eval_batches: u64,
    pub log_every: u64,
    /// Steps between checkpoints into the run directory; 0: none, but for runs without a store one at the end and on SIGTERM.
    pub checkpoint_every: u64,
    /// Checkpoints that are kept, the newest ones; 0: all.
    pub checkpoints_kept: u64,
    pub run_dir: PathBuf,
    /// Threads that compute.
    pub threads: usize,
    pub device: DeviceChoice,
    /// `None`: the plan chooses.
    pub activation_checkpointing: Option<ActivationCheckpointing>,
    /// Chunks in which blocks' feed-forward parts are computed, one after the other; 1: whole. More chunks take less memory and
    /// sum in another order.
    pub mlp_chunks: usize,
}

/// Where blocks' inputs wait from forward to backward when a GPU computes. The bits are the same. Without a GPU they are in host
/// memory in any case.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum ActivationsChoice {
    /// In GPU memory while they fit.
    Auto,
    /// In GPU memory.
    Gpu,
    /// In host memory: they cross the bus and back.
    Cpu,
}

/// What computes forward and backward.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum DeviceChoice {
    /// A GPU if there is one, the processor otherwise.
    Auto,
    /// The processor.
    Cpu,
    /// A GPU. Without one the run does not start.
    Gpu,
}

/// Where the optimizer runs. All give the same bits, so a run may go on with another one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum OptimizerDevice {
    /// The plan chooses.
    Auto,
    /// The processor, on host memory.
    Cpu,
    /// The GPU: state that lives in host memory or on devices is streamed through it.
    Gpu,
    /// Some tiles here, some there.
    Shared,
}

/// Where something lives between uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Tier {
    /// With the processor that computes: host memory on a machine without a GPU.
    None,
    /// Host memory.
    Cpu,
    /// Devices of the store.
    Nvme,
}

impl Tier {
    /// DeepSpeed's word.
    pub fn word(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Cpu => "cpu",
            Self::Nvme => "nvme",
        }
    }
}

/// Where parameters and optimizer state live.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Placement {
    /// What the ranks divide among themselves.
    pub stage: Stage,
    pub param: Tier,
    pub optimizer: Tier,
    /// Directories for a private daemon's device files, each once.
    pub nvme_paths: Vec<PathBuf>,
    /// How many of the tiles whose tier is nvme stay in host memory.
    pub resident_fraction: ResidentFraction,
}

/// How many of the tiles whose tier is nvme stay in host memory.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum ResidentFraction {
    /// This fraction of each kind of tile.
    Fixed(Fraction),
    /// What fits the budget beside the rest: parameters first, they are read twice a step.
    Auto,
}

impl Placement {
    /// Whether anything lives on devices.
    pub fn has_store(&self) -> bool {
        self.param == Tier::Nvme || self.optimizer == Tier::Nvme
    }
}

/// A fraction between 0 and 1, both included.
#[derive(Clone, Copy, Debug, PartialEq, PartialOrd, Serialize)]
pub struct Fraction(f64);

impl Fraction {
    pub const NONE: Self = Self(0.0);
    pub const ALL: Self = Self(1.0);

    /// `None` unless `0 <= fraction <= 1`.
    pub fn new(fraction: f64) -> Option<Self> {
        (0.0..=1.0).contains(&fraction).then_some(Self(fraction))
    }

    pub fn get(self) -> f64 {
        self.0
    }
}

/// When a step's update runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum OptimizerStep {
    /// After backward, before the next step.
    Immediate,
    /// Each unit's just before its first use in the next step.
    Deferred,
}

/// Where gradients are between backward and update. All give the same bits, so a run may go on with another one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum GradientsChoice {
    /// In host memory while they fit; what does not goes to devices.
    Auto,
    /// In host memory.
    Cpu,
    /// On devices of the store: two bytes more read and two more written a parameter.
    Nvme,
}

/// What a crash may cost.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Durability {
    /// Nothing that was committed: two extents a tile.
    Full,
    /// Everything: one extent a tile, written in place.
    None,
}

/// How tiles move.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct OffloadSettings {
    /// A daemon that runs already; without one a private daemon is started.
    pub socket: Option<PathBuf>,
    pub optimizer_step: OptimizerStep,
    /// Steps between commits; 0: only before evaluation and at the end. `None`: the plan chooses.
    pub commit_every: Option<u64>,
    /// Most host memory the run may take, all its processes on this node together. `None`: what is free.
    pub host_memory_bytes: Option<u64>,
    pub optimizer_device: OptimizerDevice,
    pub activations: ActivationsChoice,
    /// Where gradients wait for their update.
    pub gradients: GradientsChoice,
    /// Elements of a tile; chosen from the model's size when left out.
    pub tile_elems: Option<u64>,
    /// Bytes of slots through which tiles pass. `None`: the plan chooses.
    pub staging_bytes: Option<u64>,
    pub iodepth: u32,
    pub durability: Durability,
    /// The private daemon's engine: one of [`swapper::ENGINES`].
    pub engine: String,
}
