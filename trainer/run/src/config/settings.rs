//! Checked settings of a run. A value of these types has been through `resolve/`, so no field contradicts
//! another.

use std::fmt;
use std::path::{Path, PathBuf};

use kernels::adamw::{Master, TileFormat};
use offload_support::units::CountOf;
use serde::ser::SerializeMap;
use serde::{Serialize, Serializer};

use super::resolve::UnresolvedSettings;
use super::{
    Fraction, LrSchedule, MasterType, OptimizerSettings, OverflowPolicy, Reports, SettingsError,
    Stage, Tier,
};
use crate::computation::{ActivationCheckpointing, Matmuls};
use crate::model::{Dropout, Dtype, ModelConfig};
use training_state::learning_rate::learning_rate;
use training_state::plan::updaters::OptimizerDevice;

/// Passes over the data above which a run is warned about.
const EPOCHS_USUAL: f64 = 4.0;

/// Steps below which a run whose length is set in epochs is warned about: most of them would be warm-up.
const STEPS_FEW: u64 = 10;

/// Settings of a run, ready to be planned.
#[derive(Clone, Debug, Serialize)]
pub struct RunSettings {
    pub model: ModelConfig,
    /// Directory named by `model.path`, with the model's `config.json` and, if present, its tokenizer and
    /// weights.
    pub model_dir: Option<PathBuf>,
    /// Initial weights of a fresh run.
    pub first_weights: FirstWeights,
    /// Dropout probabilities in training.
    pub dropout: Dropout,
    /// Type of parameters and activations. Bf16 parameters are the upper half of a split fp32 master; fp16
    /// has a separate fp32 master.
    #[serde(serialize_with = "dtype_word")]
    pub dtype: Dtype,
    pub overflow: OverflowPolicy,
    /// Batch of one rank.
    pub batch: Batch,
    /// Processes that train the run together.
    pub ranks: u32,
    /// Processes among them on this node.
    #[serde(skip)]
    pub local_ranks: u32,
    /// Largest global norm of the gradients; 0 disables clipping.
    pub gradient_clipping: f64,
    /// Whether `gradient_clipping` is the default.
    #[serde(skip)]
    pub gradient_clipping_is_default: bool,
    pub optimizer: OptimizerSettings,
    pub lr: LrSchedule,
    pub data: DataSettings,
    pub train: TrainSettings,
    pub reports: Reports,
    pub placement: Placement,
    pub offload: OffloadSettings,
    /// Choices that may differ from what the author of the settings intended.
    #[serde(skip)]
    pub warnings: Vec<String>,
    /// Information for the author of the settings: keys without effect, defaults used.
    #[serde(skip)]
    pub notes: Vec<String>,
    /// What these settings were resolved from.
    #[serde(skip)]
    pub(super) unresolved: Box<UnresolvedSettings>,
}

impl RunSettings {
    /// Returns how tiles store masters and moments.
    pub fn tile_format(&self) -> TileFormat {
        let master = match self.dtype {
            Dtype::Bf16 => match self.optimizer.master {
                MasterType::Fp32 => Master::SplitBf16,
                MasterType::Bf16 => Master::Bf16,
            },
            Dtype::Fp16 => Master::Fp16WholeMaster,
            Dtype::Fp32 => Master::Fp32,
        };
        TileFormat {
            rule: self.optimizer.kind.into(),
            master,
            moments: self.optimizer.moments.into(),
        }
    }

    /// Sets the number of training windows. It determines the number of steps if `train.epochs` is set.
    ///
    /// # Errors
    /// A setting contradicts the number of steps.
    pub fn set_windows(&mut self, windows: u64) -> Result<(), SettingsError> {
        if let Some(epochs) = self.train.epochs {
            let steps = (epochs * windows as f64 / self.step_samples() as f64).ceil() as u64;
            let resolved = self.unresolved.with_steps(steps.max(1), self.ranks)?;
            self.train = TrainSettings {
                epochs: self.train.epochs,
                ..resolved.train
            };
            self.lr = resolved.lr;
            self.warnings = resolved.warnings;
            self.notes = resolved.notes;
        }
        if self.train.epochs.is_some() && self.train.steps < STEPS_FEW {
            self.warnings.push(format!(
                "the run has only {}: a step takes {} of {} tokens, and the data has {windows}; for more steps lower gradient_accumulation_steps or train_micro_batch_size_per_gpu, then train.seq_len",
                CountOf(self.train.steps, "step"),
                CountOf(self.step_samples(), "window"),
                self.batch.seq_len
            ));
        }
        let mut rates = (1..=self.train.steps).map(|step| learning_rate(&self.lr, step));
        if self.optimizer.lr > 0.0 && self.train.steps > 0 && rates.all(|rate| rate == 0.0) {
            self.warnings.push(format!(
                "the run learns nothing: its warm-up takes all of {} and starts at a learning rate of 0; make more steps, or shorten the warm-up (scheduler.params)",
                CountOf(self.train.steps, "step")
            ));
        }
        let epochs = self.epochs(windows);
        if epochs > EPOCHS_USUAL {
            self.warnings.push(format!(
                "the run passes over its data {epochs:.1} times; models often memorize data after {EPOCHS_USUAL} passes: watch the validation loss (train.eval_every), or lower {}",
                match self.train.epochs {
                    Some(_) => "train.epochs",
                    None => "train.steps",
                }
            ));
        }
        Ok(())
    }

    /// Passes of the whole run over `windows` training windows.
    pub fn epochs(&self, windows: u64) -> f64 {
        (self.train.steps as f64 * self.step_samples() as f64) / windows.max(1) as f64
    }

    /// Says that a run of `train.epochs` ends after more or less of the data, because the steps up to `step`, which took
    /// `next_sample` windows, had others than the steps from now on; `None` if it ends as it should.
    pub fn missed_epochs(&self, windows: u64, step: u64, next_sample: u64) -> Option<String> {
        let epochs = self.train.epochs?;
        let (samples, asked) = (self.step_samples(), (epochs * windows as f64).ceil() as u64);
        let end = next_sample + self.train.steps.saturating_sub(step) * samples;
        if step == 0 || end.abs_diff(asked) < samples {
            return None;
        }
        let needed = step + asked.saturating_sub(next_sample).div_ceil(samples);
        Some(format!(
            "the run ends at epoch {:.2}, not at {epochs}: its {} so far took {next_sample} windows, and a step now takes {samples}; for {epochs} epochs set train.steps = {needed} in place of train.epochs, or the batch of before (train_batch_size)",
            end as f64 / windows.max(1) as f64,
            CountOf(step, "step"),
        ))
    }

    /// Returns the directory of the run's tokenizer, or `None` if tokens are bytes.
    pub fn tokenizer_dir(&self) -> Option<&Path> {
        match self.data.tokenizer.as_deref() {
            None => self.model_dir.as_deref(),
            Some(dir) if dir.is_dir() => Some(dir),
            Some(file) => file.parent().filter(|_| file.is_file()),
        }
    }

    /// Whether these settings make checkpoints, during the run or at its end.
    pub fn makes_checkpoints(&self) -> bool {
        let train = &self.train;
        !self.placement.has_store()
            || train.checkpoint_every != Interval::Never
            || train.checkpoint_best
            || train.export_to.is_some()
    }

    /// Directory outside of the run directory that only the checkpoints of the run `job` use.
    pub(crate) fn checkpoints_elsewhere(&self, job: &str) -> Option<PathBuf> {
        let dir = self.train.checkpoint_dir.as_ref()?;
        Some(
            std::path::absolute(dir)
                .unwrap_or_else(|_| dir.clone())
                .join(job),
        )
    }

    /// Groups of ranks that train different sequences.
    pub fn sequence_groups(&self) -> u32 {
        self.ranks / self.batch.sequence_ranks
    }

    /// Windows of one step, over all ranks.
    pub fn step_samples(&self) -> u64 {
        self.batch.samples() * u64::from(self.sequence_groups())
    }

    /// Tokens of one step, over all ranks.
    pub fn step_tokens(&self) -> u64 {
        self.batch.tokens() * u64::from(self.ranks)
    }

    /// Formats every resolved setting as a line `key = value`.
    pub fn lines(&self) -> Vec<String> {
        fn walk(path: &str, value: &serde_json::Value, lines: &mut Vec<String>) {
            let serde_json::Value::Object(table) = value else {
                return lines.push(format!("{path} = {value}"));
            };
            for (key, value) in table {
                walk(&training_settings::keys::join(path, key), value, lines);
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

/// One rank's samples of a step: `micro_batches` micro-batches of `micro_batch` windows of `seq_len` tokens, of which
/// `sequence_ranks` neighbouring ranks have an equal part each.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Batch {
    pub micro_batch: usize,
    pub micro_batches: usize,
    pub seq_len: usize,
    /// Ranks that divide each window among themselves (`train.sequence_parallel`). Not written if it is 1, as in runs that are older
    /// than the setting.
    #[serde(skip_serializing_if = "is_one")]
    pub sequence_ranks: u32,
}

fn is_one(count: &u32) -> bool {
    *count == 1
}

impl Batch {
    /// Windows of one step, of which one rank has a part.
    pub fn samples(&self) -> u64 {
        (self.micro_batch * self.micro_batches) as u64
    }

    /// Tokens of a window on one rank.
    pub fn own_seq_len(&self) -> usize {
        self.seq_len / self.sequence_ranks as usize
    }

    /// Tokens of a micro-batch on one rank.
    pub fn micro_batch_tokens(&self) -> usize {
        self.micro_batch * self.own_seq_len()
    }

    /// Tokens of one step on one rank.
    pub fn tokens(&self) -> u64 {
        self.samples() * self.own_seq_len() as u64
    }
}

/// Initial weights of a fresh run. A resumed run has its own.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum FirstWeights {
    /// Random numbers, by `train.seed`.
    Random,
    /// Weights in the model's directory.
    Files,
    /// Weights of the run in this directory.
    Run(PathBuf),
}

/// Training data: its files, how they are tokenized, and what is reserved for evaluation.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct DataSettings {
    /// Empty if the run has no steps.
    pub files: Vec<DataFile>,
    /// Files for evaluation; empty if a fraction of `files` is used, or nothing.
    pub eval_files: Vec<DataFile>,
    pub validation_fraction: Fraction,
    /// Directory with `tokenizer.json`, or such a file, or "bytes"; `None` for the model directory's
    /// tokenizer, or bytes if it has none.
    pub tokenizer: Option<PathBuf>,
    /// Replaces the tokenizer's own template: the name of a known one, or a file.
    pub chat_template: Option<PathBuf>,
    /// `None`: whole documents if these are conversations or prompts with completions, otherwise concatenated.
    pub packing: Option<Packing>,
    /// Whether attention reaches back over earlier documents in the same window.
    pub cross_document_attention: bool,
    pub loss_on: LossOn,
    /// Whether windows are shuffled by the seed, differently in each epoch; otherwise they follow the order
    /// of the files.
    pub shuffle: bool,
    pub on_bad_record: OnBadRecord,
    /// Directory of a token cache shared with other runs; `None` for the run directory.
    pub cache: Option<PathBuf>,
}

/// What happens if a record cannot be read or does not suit the chat template.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum OnBadRecord {
    /// The run is refused.
    Error,
    /// The record is left out, counted and named.
    Skip,
}

/// A file of data, or a directory of such files.
#[derive(Clone, Debug, PartialEq)]
pub struct DataFile {
    pub path: PathBuf,
    /// How records are read; `None`: according to their fields.
    pub format: Option<RecordFormat>,
    /// How often each document is used in an epoch.
    pub weight: f64,
    /// Documents that are read at most.
    pub max_samples: Option<u64>,
}

impl DataFile {
    /// Makes an entry without settings of its own.
    pub fn new(path: PathBuf) -> Self {
        Self {
            path,
            format: None,
            weight: 1.0,
            max_samples: None,
        }
    }
}

/// As in a run file: a path, or a table.
impl Serialize for DataFile {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        if *self == Self::new(self.path.clone()) {
            return self.path.serialize(serializer);
        }
        let mut table = serializer.serialize_map(None)?;
        table.serialize_entry("path", &self.path)?;
        table.serialize_entry("weight", &self.weight)?;
        if let Some(max_samples) = self.max_samples {
            table.serialize_entry("max_samples", &max_samples)?;
        }
        if let Some(format) = self.format {
            table.serialize_entry("format", format.name())?;
        }
        table.end()
    }
}

/// Meaning of a record's fields.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum RecordFormat {
    Text,
    Completion,
    Messages,
    Sharegpt,
    Alpaca,
    TokenIds,
}

impl RecordFormat {
    /// Every format with its name in a run file.
    pub const ALL: [(&str, Self); 6] = [
        ("text", Self::Text),
        ("completion", Self::Completion),
        ("messages", Self::Messages),
        ("sharegpt", Self::Sharegpt),
        ("alpaca", Self::Alpaca),
        ("token_ids", Self::TokenIds),
    ];

    /// Name in a run file.
    pub fn name(self) -> &'static str {
        let found = Self::ALL.iter().find(|(_, format)| *format == self);
        found.expect("every format has a name").0
    }
}

/// How documents fill windows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Packing {
    /// One after another, cut at the end of a window.
    Concatenate,
    /// Whole, with padding that does not count in the loss.
    Documents,
}

/// Tokens that the loss is averaged over.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum LossOn {
    /// All tokens.
    All,
    /// Completions, and the assistant's messages in conversations.
    Completions,
}

/// Times between evaluations, or between checkpoints.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Interval {
    Never,
    Steps(u64),
    /// The end of each pass over the training data.
    Epoch,
    /// The first step that ends at least this many seconds after the checkpoint before. Evaluations have no such
    /// interval: they may end a run, so they must not depend on the machine.
    Seconds(u64),
}

impl Interval {
    /// The value in a run file.
    pub(super) fn written(self) -> serde_json::Value {
        match self {
            Self::Never => 0.into(),
            Self::Steps(steps) => steps.into(),
            Self::Epoch => "epoch".into(),
            Self::Seconds(seconds) => format!("{seconds}s").into(),
        }
    }
}

impl fmt::Display for Interval {
    /// Completes "a checkpoint is made ...".
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Never => f.write_str("never"),
            Self::Steps(1) => f.write_str("every step"),
            Self::Steps(steps) => write!(f, "every {steps} steps"),
            Self::Epoch => f.write_str("every epoch"),
            Self::Seconds(seconds) if seconds.is_multiple_of(60) => {
                write!(f, "every {} min", seconds / 60)
            }
            Self::Seconds(seconds) => write!(f, "every {seconds} s"),
        }
    }
}

/// Length, reports and directory of the run.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct TrainSettings {
    /// Length in passes over the training data; `None` if it is set in steps.
    pub epochs: Option<f64>,
    /// Steps of the whole run; 0: the run only takes its initial weights, and can be exported.
    pub steps: u64,
    /// Step at which this start ends: `steps`, or less if the run is to be continued later.
    pub stop_after: u64,
    pub seed: u64,
    pub eval_every: Interval,
    /// Most micro-batches in an evaluation; `None`: all.
    pub eval_batches: Option<u64>,
    /// Evaluations in a row without a new lowest loss after which the run ends; 0: never.
    pub early_stopping_patience: u64,
    /// Whether an evaluation with a new lowest loss makes a checkpoint.
    pub checkpoint_best: bool,
    /// Directory to which the finished run exports its weights.
    pub export_to: Option<PathBuf>,
    pub log_every: u64,
    /// Times of checkpoints. A run without a store also makes one at its end and when a signal ends it.
    pub checkpoint_every: Interval,
    /// Number of newest checkpoints to keep; 0: all.
    pub checkpoints_kept: u64,
    /// Directory for checkpoints that `run_dir` has no room for.
    pub checkpoint_dir: Option<PathBuf>,
    /// Whether every node that does not share `run_dir` with the others keeps every checkpoint whole.
    pub checkpoints_on_each_node: bool,
    pub run_dir: PathBuf,
    /// Computing threads.
    pub threads: usize,
    pub device: DeviceChoice,
    /// `None` if the plan chooses.
    pub activation_checkpointing: Option<ActivationCheckpointing>,
    pub attention: AttentionChoice,
    /// Whether results repeat in bits. Otherwise a GPU may add in any order, which is faster in places.
    pub deterministic: bool,
    /// Numbers of the factors in the products of blocks.
    pub matmuls: Matmuls,
    /// Chunks into which the MLP of a block is divided; they are computed one after the other. 1: undivided.
    /// More chunks need less memory and change the order of summation.
    pub mlp_chunks: usize,
    /// Micro-batches that are processed together; `None` if the plan chooses. More than a step has mean all.
    pub micro_batch_group: Option<usize>,
}

/// Where block inputs are kept from forward to backward. The choice does not change results. Without a GPU they are in
/// host memory unless they are on devices.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum ActivationsChoice {
    /// GPU memory as long as they fit, then host memory, then devices of the run's store.
    Auto,
    /// GPU memory.
    Gpu,
    /// Host memory; each input crosses the bus twice.
    Cpu,
    /// Devices of the store; each input is written once and read once, through host memory.
    Nvme,
}

/// Kernels that compute attention on a GPU. Their results differ within the rounding of sums.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum AttentionChoice {
    /// cuDNN's where it can be used, otherwise torch's.
    Auto,
    /// cuDNN's. The run refuses to start where it cannot be used.
    Cudnn,
    /// Those that torch chooses.
    Torch,
}

/// Device that computes forward and backward.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum DeviceChoice {
    /// A GPU if there is one, the processor otherwise.
    Auto,
    /// The processor.
    Cpu,
    /// A GPU. The run refuses to start without one.
    Gpu,
}

/// Where parameters and optimizer state are kept.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Placement {
    /// Which parts of the state are divided among the ranks.
    pub stage: Stage,
    pub param: Tier,
    pub optimizer: Tier,
    /// Directories of a private daemon's device files, without duplicates.
    pub nvme_paths: Vec<PathBuf>,
    /// Fraction of the tiles of tier nvme that stays in host memory.
    pub resident_fraction: ResidentFraction,
    /// Fraction of the parameters of tiers cpu and nvme whose tiles stay in GPU memory.
    pub gpu_resident_fraction: ResidentFraction,
}

/// Fraction of the tiles of one tier that stays in the memory of the next faster one.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum ResidentFraction {
    /// This fraction of each kind of tile.
    Fixed(Fraction),
    /// As much as fits.
    Auto,
}

impl Placement {
    /// Returns whether any state is kept on devices.
    pub fn has_store(&self) -> bool {
        self.param == Tier::Nvme || self.optimizer == Tier::Nvme
    }
}

/// When the optimizer updates the parameters of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum OptimizerStep {
    /// After backward, before the next step.
    Immediate,
    /// Each unit just before its first use in the next step.
    Deferred,
}

/// Where gradients are kept between backward and update. The choice does not change results, so a resumed run
/// may change it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum GradientsChoice {
    /// In host memory as far as they fit, the rest on devices.
    Auto,
    /// In host memory.
    Cpu,
    /// On devices of the store; reads and writes two more bytes a parameter.
    Nvme,
}

/// The ranks that divide 16-bit parameters among themselves in a run on several nodes. The choice does not change
/// results, so a resumed run may change it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum ShardChoice {
    /// Those of each node, which keep a copy of all parameters, if every node has room for it.
    Auto,
    /// Those of all nodes.
    All,
}

/// State that a crash of the machine may destroy.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Durability {
    /// Nothing that was committed: each tile has two extents on the device.
    Full,
    /// Everything: each tile has one extent and is written in place.
    None,
}

/// How tiles are moved between memory and devices.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct OffloadSettings {
    /// Socket of a running daemon; `None` starts a private daemon.
    pub socket: Option<PathBuf>,
    pub optimizer_step: OptimizerStep,
    /// Steps between commits; 0: only before evaluation and at the end. `None` if the plan chooses.
    pub commit_every: Option<u64>,
    /// Upper limit of host memory for all processes of the run on this node. `None`: the free memory.
    pub host_memory_bytes: Option<u64>,
    pub optimizer_device: OptimizerDevice,
    pub activations: ActivationsChoice,
    /// Where gradients are kept until their update.
    pub gradients: GradientsChoice,
    pub shard: ShardChoice,
    /// Elements of a tile; derived from the model's size if left out.
    pub tile_elems: Option<u64>,
    /// Bytes of the slots that tiles pass through. `None` if the plan chooses.
    pub staging_bytes: Option<u64>,
    pub iodepth: u32,
    pub durability: Durability,
    /// The private daemon's I/O engine: one of [`swapper::ENGINES`].
    pub engine: String,
}
