//! The run file as written: every key we read, none of them checked yet.
//!
//! Each table is declared once, here: its doc comments, defaults and types are what `trainer config-reference` lists, what a file is checked
//! against (`keys/`) and what is parsed. Top-level keys are DeepSpeed's, with DeepSpeed's meaning, and `keys/table.rs` says what
//! they are for; `[model] [data] [train] [offload]` are ours.

use std::path::PathBuf;

use offload_support::units::parse_bytes;
use serde::{Deserialize, Serialize};

use super::schema::{keys, typed};

keys! {
    /// A run file, unchecked. `RunSettings` is the checked form.
    pub struct ConfigToml {
        /// A file for DeepSpeed or an Accelerate YAML, laid under the run file.
        #[default("none")]
        #[example("\"ds_config.json\"")]
        pub deepspeed: Option<PathBuf>,
        pub train_batch_size: Option<u64>,
        pub train_micro_batch_size_per_gpu: Option<u64>,
        pub gradient_accumulation_steps: Option<u64>,
        pub gradient_clipping: Option<f64>,
        pub steps_per_print: Option<u64>,
        pub wall_clock_breakdown: Option<bool>,
        pub tensorboard: MonitorToml,
        pub csv_monitor: MonitorToml,
        pub bf16: Bf16Toml,
        pub fp16: Fp16Toml,
        pub optimizer: OptimizerToml,
        pub scheduler: SchedulerToml,
        pub zero_optimization: ZeroToml,
        pub aio: AioToml,
        pub activation_checkpointing: CheckpointingToml,
        pub model: ModelToml,
        pub data: DataToml,
        pub train: TrainToml,
        pub offload: OffloadToml,
    }

    /// `bf16`: DeepSpeed's table of that precision.
    pub struct Bf16Toml {
        pub enabled: Option<Switch>,
        pub check_grad_overflow: Option<bool>,
    }

    /// `fp16`: DeepSpeed's table of that precision, and of how losses are scaled.
    pub struct Fp16Toml {
        pub enabled: Option<Switch>,
        pub loss_scale: Option<f64>,
        pub initial_scale_power: Option<u64>,
        pub loss_scale_window: Option<u64>,
        pub hysteresis: Option<u64>,
        pub consecutive_hysteresis: Option<bool>,
        pub min_loss_scale: Option<f64>,
    }

    /// `activation_checkpointing`: where DeepSpeed keeps what is not computed again.
    pub struct CheckpointingToml {
        pub cpu_checkpointing: Option<bool>,
    }

    /// `optimizer`: DeepSpeed's choice of optimizer.
    pub struct OptimizerToml {
        #[name("type")]
        pub kind: Option<String>,
        pub params: OptimizerParamsToml,
    }

    /// `optimizer.params`: those of Adam and AdamW.
    pub struct OptimizerParamsToml {
        pub lr: Option<f64>,
        pub betas: Option<[f64; 2]>,
        pub eps: Option<f64>,
        pub weight_decay: Option<f64>,
        /// Which parameters decay: "matrices" (not norms, not biases) or "all".
        #[default("\"matrices\"")]
        #[example("\"all\"")]
        pub decay: Option<String>,
        /// All parameters decay except those with one of these texts in their name.
        #[default("none")]
        #[example("[\"bias\", \"norm\"]")]
        pub no_decay: Option<Vec<String>>,
        pub adam_w_mode: Option<bool>,
    }

    /// `scheduler`: DeepSpeed's choice of learning rate schedule.
    pub struct SchedulerToml {
        #[name("type")]
        pub kind: Option<String>,
        pub params: SchedulerParamsToml,
    }

    /// `scheduler.params`: those of all schedulers together.
    pub struct SchedulerParamsToml {
        pub warmup_min_lr: Option<f64>,
        pub warmup_max_lr: Option<f64>,
        pub warmup_num_steps: Option<u64>,
        pub warmup_type: Option<String>,
        pub total_num_steps: Option<u64>,
        pub warmup_min_ratio: Option<f64>,
        pub cos_min_ratio: Option<f64>,
        pub lr_range_test_min_lr: Option<f64>,
        pub lr_range_test_step_size: Option<u64>,
        pub lr_range_test_step_rate: Option<f64>,
        pub lr_range_test_staircase: Option<bool>,
        pub cycle_min_lr: Option<f64>,
        pub cycle_max_lr: Option<f64>,
        pub decay_lr_rate: Option<f64>,
        pub cycle_first_step_size: Option<u64>,
        pub cycle_second_step_size: Option<u64>,
        pub cycle_first_stair_count: Option<u64>,
        pub cycle_second_stair_count: Option<u64>,
        pub decay_step_size: Option<u64>,
        pub cycle_momentum: Option<bool>,
        pub cycle_min_mom: Option<f64>,
        pub cycle_max_mom: Option<f64>,
        pub decay_mom_rate: Option<f64>,
    }

    /// `zero_optimization`: the stage and where state goes.
    pub struct ZeroToml {
        pub stage: Option<u64>,
        pub offload_param: TierToml,
        pub offload_optimizer: TierToml,
        pub aio: AioToml,
    }

    /// `tensorboard`, `csv_monitor`: files with a step's scalars.
    pub struct MonitorToml {
        pub enabled: Option<bool>,
        pub output_path: Option<PathBuf>,
        pub job_name: Option<String>,
    }

    /// `aio`: how DeepSpeed's swapper does I/O.
    pub struct AioToml {
        pub queue_depth: Option<u64>,
    }

    /// Where the parameters, or the optimizer's state, live between uses.
    pub struct TierToml {
        pub device: Option<String>,
        pub nvme_path: Option<Paths>,
    }

    /// The model: a directory of Hugging Face's (`path`), or its shape with Hugging Face's names, or both: what is named here then
    /// takes the place of what the directory's `config.json` says. Which keys a model has depends on its architecture.
    pub struct ModelToml {
        /// Model directory of Hugging Face's, or its config.json; its weights and tokenizer are used where it has them.
        #[default("none")]
        #[example("\"Qwen3-8B\"")]
        pub path: Option<PathBuf>,
        /// Run directory, or model directory, whose weights a fresh run starts with; the optimizer starts anew.
        #[default("none")]
        #[example("\"runs/first\"")]
        pub from: Option<PathBuf>,
        /// What a fresh run starts with: "auto" (those of model.path, which must be there; random without a model.path), "weights", "random".
        #[default("\"auto\"")]
        #[example("\"random\"")]
        pub init: Option<String>,
        /// Architecture, by Hugging Face's name.
        #[default("\"llama\"")]
        #[example("\"qwen3\"")]
        pub model_type: Option<String>,
        /// Number of tokens in the vocabulary.
        #[default("256 (bytes) without a model directory")]
        #[example("32000")]
        pub vocab_size: Option<u64>,
        /// Width of the model.
        #[default("the architecture's")]
        #[example("2048")]
        pub hidden_size: Option<u64>,
        /// Width of the feed-forward part.
        #[default("the architecture's")]
        #[example("5504")]
        pub intermediate_size: Option<u64>,
        /// Transformer blocks.
        #[default("the architecture's")]
        #[example("24")]
        pub num_hidden_layers: Option<u64>,
        /// Heads of attention.
        #[default("the architecture's")]
        #[example("16")]
        pub num_attention_heads: Option<u64>,
        /// Heads of keys and values.
        #[default("num_attention_heads")]
        #[example("8")]
        pub num_key_value_heads: Option<u64>,
        /// Width of a head.
        #[default("hidden_size / num_attention_heads")]
        #[example("128")]
        pub head_dim: Option<u64>,
        /// Base of the rotary embedding.
        #[default("the architecture's")]
        #[example("500000.0")]
        pub rope_theta: Option<f64>,
        pub rope_scaling: RopeScalingToml,
        /// Added to the mean square in norms.
        #[default("the architecture's")]
        #[example("1e-5")]
        pub rms_norm_eps: Option<f64>,
        /// Whether the head is the embedding.
        #[default("the architecture's")]
        #[example("false")]
        pub tie_word_embeddings: Option<bool>,
        /// Standard deviation of random first weights.
        #[default("the architecture's")]
        #[example("0.02")]
        pub initializer_range: Option<f64>,
        /// Longest sequence that the model accepts.
        #[default("2048, or train.seq_len if that is larger")]
        #[example("4096")]
        pub max_position_embeddings: Option<u64>,
        /// Whether attention's projections have biases.
        #[default("the architecture's")]
        #[example("false")]
        pub attention_bias: Option<bool>,
        /// Whether the feed-forward part's projections have biases.
        #[default("the architecture's")]
        #[example("false")]
        pub mlp_bias: Option<bool>,
        /// Tokens that attention reaches back.
        #[default("the architecture's")]
        #[example("4096")]
        pub sliding_window: Option<u64>,
        /// Whether sliding_window holds (Qwen2, Qwen3).
        #[default("the architecture's")]
        #[example("false")]
        pub use_sliding_window: Option<bool>,
        /// Blocks below this one have no sliding window (Qwen2, Qwen3).
        #[default("the architecture's")]
        #[example("28")]
        pub max_window_layers: Option<u64>,
        /// Share of attention's weights that is left out at random in training.
        #[default("the architecture's")]
        #[example("0.1")]
        pub attention_dropout: Option<f64>,
        /// GPT-2's hidden_size.
        #[default("the architecture's")]
        #[example("768")]
        pub n_embd: Option<u64>,
        /// GPT-2's intermediate_size.
        #[default("4 * n_embd")]
        #[example("3072")]
        pub n_inner: Option<u64>,
        /// GPT-2's num_hidden_layers.
        #[default("the architecture's")]
        #[example("12")]
        pub n_layer: Option<u64>,
        /// GPT-2's num_attention_heads.
        #[default("the architecture's")]
        #[example("12")]
        pub n_head: Option<u64>,
        /// GPT-2's max_position_embeddings.
        #[default("the architecture's")]
        #[example("1024")]
        pub n_positions: Option<u64>,
        /// GPT-2's number added to the variance in norms.
        #[default("the architecture's")]
        #[example("1e-5")]
        pub layer_norm_epsilon: Option<f64>,
        /// GPT-2's dropout of the embedding.
        #[default("the architecture's")]
        #[example("0.1")]
        pub embd_pdrop: Option<f64>,
        /// GPT-2's dropout of what blocks add.
        #[default("the architecture's")]
        #[example("0.1")]
        pub resid_pdrop: Option<f64>,
        /// GPT-2's attention_dropout.
        #[default("the architecture's")]
        #[example("0.1")]
        pub attn_pdrop: Option<f64>,
    }

    /// `model.rope_scaling`: how the rotary embedding is stretched.
    pub struct RopeScalingToml {
        /// Form of the stretching, by Hugging Face's name.
        #[default("none")]
        #[example("\"llama3\"")]
        pub rope_type: Option<String>,
        /// How far positions are stretched.
        #[default("required with rope_type")]
        #[example("8.0")]
        pub factor: Option<f64>,
        /// Llama 3: waves longer than the old window divided by this are stretched in full.
        #[default("required with rope_type = \"llama3\"")]
        #[example("1.0")]
        pub low_freq_factor: Option<f64>,
        /// Llama 3: waves shorter than the old window divided by this stay.
        #[default("required with rope_type = \"llama3\"")]
        #[example("4.0")]
        pub high_freq_factor: Option<f64>,
        /// Longest window the model was first trained with.
        #[default("required with rope_type = \"llama3\"")]
        #[example("8192")]
        pub original_max_position_embeddings: Option<u64>,
    }

    /// `data`: files or directories of text, how it becomes tokens, what of it is held out.
    pub struct DataToml {
        /// Files to train on: text, records (.jsonl, .parquet), token ids (.u16, .u32, .npy), or directories of them.
        #[default("required")]
        #[example("[\"chats.jsonl\", \"more/\"]")]
        pub files: Option<Vec<PathBuf>>,
        /// Text to evaluate on; without it data.validation_fraction of data.files is used.
        #[default("[]")]
        #[example("[\"held-out.jsonl\"]")]
        pub eval_files: Option<Vec<PathBuf>>,
        /// Fraction of the documents in data.files that is held out for evaluation.
        #[default("0.0")]
        #[example("0.05")]
        pub validation_fraction: Option<f64>,
        /// Directory with a tokenizer.json, or such a file, or "bytes".
        #[default("the model directory's, or \"bytes\"")]
        #[example("\"Qwen3-8B\"")]
        pub tokenizer: Option<PathBuf>,
        /// Template of conversations, in Jinja, in the place of the tokenizer's own.
        #[default("the tokenizer's")]
        #[example("\"chatml.jinja\"")]
        pub chat_template: Option<PathBuf>,
        /// How documents fill windows: "concatenate" (cut where a window ends) or "documents" (whole, with padding).
        #[default("\"concatenate\"")]
        #[example("\"documents\"")]
        pub packing: Option<String>,
        /// Tokens that count in the loss: "all", or "completions" (and what the assistant says in conversations).
        #[default("\"all\"")]
        #[example("\"completions\"")]
        pub loss_on: Option<String>,
        /// Whether windows are drawn in an order of `train.seed`; false: they come in the order in which they lie.
        #[default("true")]
        #[example("false")]
        pub shuffle: Option<bool>,
        /// Directory where tokens are kept for other runs too.
        #[default("the run directory")]
        #[example("\"tokens\"")]
        pub cache: Option<PathBuf>,
    }

    /// `train`: length, order, reports and place of the run.
    pub struct TrainToml {
        /// Optimizer steps of the whole run. 0: the run only takes its first weights, for `trainer export`.
        #[default("required")]
        #[example("1000")]
        pub steps: Option<u64>,
        /// Tokens of a window.
        #[default("required")]
        #[example("4096")]
        pub seq_len: Option<u64>,
        /// Seed of first weights, order of the data and dropout.
        #[default("0")]
        #[example("1")]
        pub seed: Option<u64>,
        /// Steps between evaluations; 0 for none.
        #[default("0")]
        #[example("100")]
        pub eval_every: Option<u64>,
        /// Batches of an evaluation.
        #[default("4")]
        #[example("8")]
        pub eval_batches: Option<u64>,
        /// Steps between printed lines.
        #[default("steps_per_print, or 10")]
        #[example("1")]
        pub log_every: Option<u64>,
        /// Steps between checkpoints into the run directory; 0 for none, except at the end of a run without a store.
        #[default("0")]
        #[example("200")]
        pub checkpoint_every: Option<u64>,
        /// Checkpoints that are kept, the newest ones; 0 for all.
        #[default("2")]
        #[example("3")]
        pub checkpoints_kept: Option<u64>,
        /// Run directory.
        #[default("runs/ and the run file's name")]
        #[example("\"runs/chat\"")]
        pub run_dir: Option<PathBuf>,
        /// Step at which this start ends, for a run that is continued later.
        #[default("train.steps")]
        #[example("500")]
        pub stop_after: Option<u64>,
        /// Threads that compute.
        #[default("all cores, divided among the ranks")]
        #[example("16")]
        pub threads: Option<u64>,
        /// What computes: "auto" (a GPU if there is one), "cpu" or "gpu".
        #[default("\"auto\"")]
        #[example("\"cpu\"")]
        pub device: Option<String>,
        /// What a block computes again in backward: "full" (everything, only its input is kept), "attention" (everything but query,
        /// key, value and attention's result), "matmuls" (only norms and elementwise operations), or "auto": the least for which GPU
        /// memory has room. The bits are the same.
        #[default("\"auto\"")]
        #[example("\"attention\"")]
        pub activation_checkpointing: Option<String>,
        /// Chunks in which a block's feed-forward part is computed, one after the other.
        #[default("1")]
        #[example("4")]
        pub mlp_chunks: Option<u64>,
    }

    /// `offload`: how tiles move.
    pub struct OffloadToml {
        /// Socket of an offloadd that runs already.
        #[default("none: a private offloadd is started")]
        #[example("\"/run/offloadd/offloadd.sock\"")]
        pub socket: Option<PathBuf>,
        /// When the optimizer step runs: "deferred" (a unit's just before the unit's next use) or "immediate" (after backward); the bits are the same.
        #[default("\"deferred\"")]
        #[example("\"immediate\"")]
        pub optimizer_step: Option<String>,
        /// Fraction of the tiles with device "nvme" that stays in host memory, or "auto" for what fits.
        #[default("0.0, or \"auto\" with offload.host_memory_bytes")]
        #[example("0.25")]
        pub resident_fraction: Option<FractionOrAuto>,
        /// Upper limit of host memory for all processes of the run on this node.
        #[default("the free memory")]
        #[example("\"200GiB\"")]
        pub host_memory_bytes: Option<ByteCount>,
        /// Steps between commits; 0 for only before evaluation and at the end.
        #[default("the plan's choice")]
        #[example("1")]
        pub commit_every: Option<u64>,
        /// Elements of a tile, a multiple of 4096.
        #[default("the plan's choice")]
        #[example("4194304")]
        pub tile_elems: Option<u64>,
        /// Host memory that tiles pass through.
        #[default("the plan's choice")]
        #[example("\"8GiB\"")]
        pub staging_bytes: Option<ByteCount>,
        /// Operations in flight of a process, 2 to 1024.
        #[default("aio.queue_depth, or 64")]
        #[example("32")]
        pub iodepth: Option<u64>,
        /// What a crash may cost: "full" (nothing that was committed) or "none" (everything; one copy on the device).
        #[default("\"full\"")]
        #[example("\"none\"")]
        pub durability: Option<String>,
        /// The private offloadd's engine: "auto", "uring", "aio" or "psync".
        #[default("\"auto\"")]
        #[example("\"uring\"")]
        pub engine: Option<String>,
        /// Where the optimizer runs: "auto", "cpu", "gpu" or "shared" (some tiles on each); the bits are the same.
        #[default("\"auto\"")]
        #[example("\"gpu\"")]
        pub optimizer_device: Option<String>,
        /// Where blocks' inputs wait for backward when a GPU computes: "auto" (in GPU memory while they fit), "gpu" or "cpu".
        #[default("\"auto\"")]
        #[example("\"cpu\"")]
        pub activations: Option<String>,
        /// Where gradients wait for their update: "auto", "cpu" or "nvme".
        #[default("\"auto\"")]
        #[example("\"cpu\"")]
        pub gradients: Option<String>,
    }
}

typed! {
    Switch = "true, false or \"auto\"";
    Paths = "a path or a list of paths";
    FractionOrAuto = "a fraction from 0 to 1, or \"auto\"";
    ByteCount = "a number of bytes, for example 67108864 or \"64MiB\"";
}

/// A precision's `enabled`: said, or left to the checkpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum Switch {
    Said(bool),
    Auto(Auto),
}

/// The word "auto".
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Auto {
    #[serde(rename = "auto")]
    Auto,
}

/// DeepSpeed knows one path; we take a list too, one store over all of them.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(untagged)]
pub enum Paths {
    One(PathBuf),
    Several(Vec<PathBuf>),
}

impl Paths {
    /// The paths in the order written.
    pub fn list(&self) -> Vec<PathBuf> {
        match self {
            Self::One(path) => vec![path.clone()],
            Self::Several(paths) => paths.clone(),
        }
    }
}

/// A fraction from 0 to 1, or "auto": as much as fits.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(untagged)]
pub enum FractionOrAuto {
    Fraction(f64),
    Word(String),
}

/// A number of bytes: an integer, or text such as "64MiB".
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(untagged)]
pub enum ByteCount {
    Number(u64),
    Text(String),
}

impl ByteCount {
    /// The bytes, or `None` when the text is not a size.
    pub fn bytes(&self) -> Option<u64> {
        match self {
            Self::Number(bytes) => Some(*bytes),
            Self::Text(text) => parse_bytes(text).ok(),
        }
    }
}
