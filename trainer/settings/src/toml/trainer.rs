//! The trainer's own tables: `[model]`, `[data]`, `[train]` and `[offload]`.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use super::values::{ByteCount, CheckpointInterval, FractionOrAuto, Interval};
use crate::schema::{keys, typed};

/// An entry of `data.files`.
#[derive(Clone, Debug, Deserialize, Serialize)]
#[serde(untagged)]
pub enum FileToml {
    Path(PathBuf),
    Table(FileTableToml),
}

/// An entry of `data.files` with settings of its own.
#[derive(Clone, Debug, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct FileTableToml {
    pub path: PathBuf,
    pub weight: Option<f64>,
    pub max_samples: Option<u64>,
    pub format: Option<String>,
}

keys! {
    /// The model: a Hugging Face model directory (`path`), or its shape under Hugging Face's names, or both;
    /// a key here replaces the one in the directory's `config.json`. The keys that a model has depend on its
    /// architecture.
    pub struct ModelToml {
        /// Hugging Face model directory, or its config.json. Weights and tokenizer in the directory are used.
        #[default("none")]
        #[example("\"Qwen3-8B\"")]
        pub path: Option<PathBuf>,
        /// Run directory or model directory whose weights a fresh run starts with. The optimizer state starts
        /// at zero.
        #[default("none")]
        #[example("\"runs/first\"")]
        pub from: Option<PathBuf>,
        /// Initial weights of a fresh run: "auto" (from model.path, where they must exist; random without a
        /// model.path), "weights" or "random".
        #[default("\"auto\"")]
        #[example("\"weights\"")]
        pub init: Option<String>,
        /// Architecture, under Hugging Face's name.
        #[default("\"llama\"")]
        #[example("\"qwen3\"")]
        pub model_type: Option<String>,
        /// Number of tokens in the vocabulary.
        #[default("256 (bytes) without a model directory")]
        #[example("32000")]
        pub vocab_size: Option<u64>,
        /// Width of the hidden states.
        #[default("the architecture's")]
        #[example("2048")]
        pub hidden_size: Option<u64>,
        /// Width of the MLP.
        #[default("the architecture's")]
        #[example("5504")]
        pub intermediate_size: Option<u64>,
        /// Transformer blocks.
        #[default("the architecture's")]
        #[example("24")]
        pub num_hidden_layers: Option<u64>,
        /// Attention heads.
        #[default("the architecture's")]
        #[example("16")]
        pub num_attention_heads: Option<u64>,
        /// Key and value heads.
        #[default("num_attention_heads")]
        #[example("8")]
        pub num_key_value_heads: Option<u64>,
        /// Width of an attention head.
        #[default("hidden_size / num_attention_heads")]
        #[example("128")]
        pub head_dim: Option<u64>,
        /// Base of the rotary position embedding.
        #[default("the architecture's")]
        #[example("500000.0")]
        pub rope_theta: Option<f64>,
        pub rope_scaling: RopeScalingToml,
        /// Epsilon added to the mean square in RMSNorm.
        #[default("the architecture's")]
        #[example("1e-5")]
        pub rms_norm_eps: Option<f64>,
        /// Whether the head shares the embedding's weights.
        #[default("the architecture's")]
        #[example("false")]
        pub tie_word_embeddings: Option<bool>,
        /// Standard deviation of random initial weights.
        #[default("the architecture's")]
        #[example("0.02")]
        pub initializer_range: Option<f64>,
        /// Longest sequence that the model accepts. A value above that of the model's config.json raises it;
        /// rope_scaling brings the positions into the range that the weights know.
        #[default("that of config.json; without one 2048, or train.seq_len if that is larger")]
        #[example("4096")]
        pub max_position_embeddings: Option<u64>,
        /// Whether the attention projections have biases.
        #[default("the architecture's")]
        #[example("false")]
        pub attention_bias: Option<bool>,
        /// Whether the MLP projections have biases.
        #[default("the architecture's")]
        #[example("false")]
        pub mlp_bias: Option<bool>,
        /// Number of previous tokens that attention sees.
        #[default("the architecture's")]
        #[example("4096")]
        pub sliding_window: Option<u64>,
        /// Whether sliding_window is used (Qwen2, Qwen3).
        #[default("the architecture's")]
        #[example("false")]
        pub use_sliding_window: Option<bool>,
        /// Number of first blocks without a sliding window (Qwen2, Qwen3).
        #[default("the architecture's")]
        #[example("28")]
        pub max_window_layers: Option<u64>,
        /// Dropout probability of attention weights in training.
        #[default("the architecture's")]
        #[example("0.1")]
        pub attention_dropout: Option<f64>,
        /// GPT-2's name for hidden_size.
        #[default("the architecture's")]
        #[example("768")]
        pub n_embd: Option<u64>,
        /// GPT-2's name for intermediate_size.
        #[default("4 * n_embd")]
        #[example("3072")]
        pub n_inner: Option<u64>,
        /// GPT-2's name for num_hidden_layers.
        #[default("the architecture's")]
        #[example("12")]
        pub n_layer: Option<u64>,
        /// GPT-2's name for num_attention_heads.
        #[default("the architecture's")]
        #[example("12")]
        pub n_head: Option<u64>,
        /// GPT-2's name for max_position_embeddings.
        #[default("the architecture's")]
        #[example("1024")]
        pub n_positions: Option<u64>,
        /// GPT-2's epsilon, added to the variance in LayerNorm.
        #[default("the architecture's")]
        #[example("1e-5")]
        pub layer_norm_epsilon: Option<f64>,
        /// GPT-2's dropout probability of the embedding.
        #[default("the architecture's")]
        #[example("0.1")]
        pub embd_pdrop: Option<f64>,
        /// GPT-2's dropout probability of the outputs of attention and MLP.
        #[default("the architecture's")]
        #[example("0.1")]
        pub resid_pdrop: Option<f64>,
        /// GPT-2's name for attention_dropout.
        #[default("the architecture's")]
        #[example("0.1")]
        pub attn_pdrop: Option<f64>,
    }

    /// `model.rope_scaling`: scaling of the rotary position embedding.
    pub struct RopeScalingToml {
        /// Scaling method, under Hugging Face's name: "linear", "llama3", "yarn", or "dynamic", which extends nothing.
        #[default("none")]
        #[example("\"llama3\"")]
        pub rope_type: Option<String>,
        /// Factor by which positions are scaled.
        #[default("required with rope_type")]
        #[example("8.0")]
        pub factor: Option<f64>,
        /// Llama 3: wavelengths longer than the original window divided by this are scaled by the full
        /// factor.
        #[default("required with rope_type = \"llama3\"")]
        #[example("1.0")]
        pub low_freq_factor: Option<f64>,
        /// Llama 3: wavelengths shorter than the original window divided by this are not scaled.
        #[default("required with rope_type = \"llama3\"")]
        #[example("4.0")]
        pub high_freq_factor: Option<f64>,
        /// Longest sequence that the model was first trained with.
        #[default("required with rope_type = \"llama3\" or \"yarn\"")]
        #[example("8192")]
        pub original_max_position_embeddings: Option<u64>,
        /// YaRN: factor on cosines and sines.
        #[default("1 + 0.1 ln(factor), unless both mscale keys are set")]
        #[example("1.0")]
        pub attention_factor: Option<f64>,
        /// YaRN: pairs that rotate more often than this over the original window are not scaled.
        #[default("32 with rope_type = \"yarn\"")]
        #[example("32.0")]
        pub beta_fast: Option<f64>,
        /// YaRN: pairs that rotate less often than this over the original window are scaled by the full factor.
        #[default("1 with rope_type = \"yarn\"")]
        #[example("1.0")]
        pub beta_slow: Option<f64>,
        /// YaRN: used together with mscale_all_dim, if attention_factor is not set. It is then
        /// (1 + 0.1 x mscale x ln(factor)) / (1 + 0.1 x mscale_all_dim x ln(factor)).
        #[default("none")]
        #[example("1.0")]
        pub mscale: Option<f64>,
        /// YaRN: see mscale.
        #[default("none")]
        #[example("1.0")]
        pub mscale_all_dim: Option<f64>,
        /// YaRN: whether the limits between scaled and other pairs are rounded to whole pairs.
        #[default("true with rope_type = \"yarn\"")]
        #[example("true")]
        pub truncate: Option<bool>,
    }

    /// `data`: files or directories of text, how they are tokenized, and what is reserved for evaluation.
    pub struct DataToml {
        /// Files to train on: text, records (.jsonl, .json, .csv, .tsv, .parquet, .arrow), token ids (.u16, .u32,
        /// .npy), or directories of them. An entry may be a table {path, weight, max_samples, format}: a weight
        /// of 2 uses each document twice in an epoch, 0.5 every second one.
        #[default("required")]
        #[example("[\"chats.jsonl\", { path = \"alpaca.json\", weight = 0.5 }]")]
        pub files: Option<Vec<FileToml>>,
        /// Text to evaluate on. Without it, data.validation_fraction of data.files is used.
        #[default("[]")]
        #[example("[\"held-out.jsonl\"]")]
        pub eval_files: Option<Vec<FileToml>>,
        /// How records are read, instead of according to their fields: "text", "completion" (prompt, completion),
        /// "messages", "sharegpt" (conversations), "alpaca" (instruction, input, output) or "token_ids".
        #[default("by their fields")]
        #[example("\"alpaca\"")]
        pub format: Option<String>,
        /// Documents that are used of each entry of data.files at most, the first ones.
        #[default("all")]
        #[example("1000")]
        pub max_samples: Option<u64>,
        /// Fraction of the documents in data.files that is reserved for evaluation; of a single one, its last windows.
        #[default("0.0")]
        #[example("0.05")]
        pub validation_fraction: Option<f64>,
        /// Directory with a tokenizer.json, or such a file, or "bytes".
        #[default("the model directory's, or \"bytes\"")]
        #[example("\"Qwen3-8B\"")]
        pub tokenizer: Option<PathBuf>,
        /// Template for conversations, instead of the tokenizer's own: "alpaca", "chatml", "gemma", "llama2",
        /// "llama3", "mistral", "phi3", "qwen", "vicuna", "zephyr", or a Jinja file.
        #[default("the tokenizer's")]
        #[example("\"chatml\"")]
        pub chat_template: Option<PathBuf>,
        /// How documents fill windows: "concatenate" (cut at the end of a window) or "documents" (whole, with
        /// padding).
        #[default("\"documents\" for conversations and completions, otherwise \"concatenate\"")]
        #[example("\"documents\"")]
        pub packing: Option<String>,
        /// Whether attention reaches back over earlier documents in the same window. Without it, each document is
        /// computed as if it were alone: its positions start at 0.
        #[default("false")]
        #[example("false")]
        pub cross_document_attention: Option<bool>,
        /// Tokens that count in the loss: "all", or "completions" (completions, and the assistant's messages
        /// in conversations).
        #[default("\"all\"")]
        #[example("\"completions\"")]
        pub loss_on: Option<String>,
        /// Whether windows are shuffled by `train.seed`; false keeps the order of the files.
        #[default("true")]
        #[example("true")]
        pub shuffle: Option<bool>,
        /// What happens if a record cannot be read or its conversation does not suit the chat template: "error"
        /// refuses the run, "skip" leaves the record out; the first lines of a run count and name such records.
        #[default("\"error\"")]
        #[example("\"error\"")]
        pub on_bad_record: Option<String>,
        /// Directory of a token cache that several runs share.
        #[default("the run directory")]
        #[example("\"tokens\"")]
        pub cache: Option<PathBuf>,
    }

    /// `train`: length, order, reports and directory of the run.
    pub struct TrainToml {
        /// Passes over the training data, or a fraction of one. Gives the number of steps once the data is tokenized.
        #[default("required, unless train.steps is set")]
        #[example("3")]
        pub epochs: Option<f64>,
        /// Optimizer steps of the whole run, in place of train.epochs. 0: the run only takes its initial weights, for
        /// `trainer export`.
        #[default("required, unless train.epochs is set")]
        #[example("1000")]
        pub steps: Option<u64>,
        /// Tokens in a sequence.
        #[default("required")]
        #[example("4096")]
        pub seq_len: Option<u64>,
        /// Neighbouring ranks that divide each sequence among themselves, for sequences whose activations one GPU cannot hold: each
        /// computes consecutive tokens, and in attention all tokens for a part of the heads. They count as one rank in
        /// train_batch_size. The number divides that of the ranks, seq_len and the heads. Not with dropout.
        #[default("sequence_parallel_size, or 1")]
        #[example("2")]
        pub sequence_parallel: Option<u64>,
        /// Seed of initial weights, data order and dropout.
        #[default("0")]
        #[example("1")]
        pub seed: Option<u64>,
        /// Steps between evaluations on the validation data, or "epoch" for one at the end of each epoch; 0 for none.
        #[default("0")]
        #[example("\"epoch\"")]
        pub eval_every: Option<Interval>,
        /// Most micro-batches in an evaluation.
        #[default("all of the validation data")]
        #[example("8")]
        pub eval_batches: Option<u64>,
        /// Ends the run after this many evaluations in a row without a new lowest loss; 0 for never.
        #[default("0")]
        #[example("3")]
        pub early_stopping_patience: Option<u64>,
        /// Steps between printed lines.
        #[default("steps_per_print, or 10")]
        #[example("1")]
        pub log_every: Option<u64>,
        /// Steps between checkpoints into the run directory, a time such as "30min", or "epoch" for one at the end of each
        /// epoch; 0 for none, except at the end of a run without a store.
        #[default("0")]
        #[example("\"30min\"")]
        pub checkpoint_every: Option<CheckpointInterval>,
        /// Number of newest checkpoints to keep; 0 for all.
        #[default("2")]
        #[example("3")]
        pub checkpoints_kept: Option<u64>,
        /// Directory on another drive for checkpoints that the run directory has no room for; the run directory then has links to them.
        #[default("none")]
        #[example("\"/mnt/spare\"")]
        pub checkpoint_dir: Option<PathBuf>,
        /// Whether every node of a run on several nodes keeps every checkpoint whole, in its own directory, so that the nodes need to
        /// share none. One node, and nodes that share train.run_dir, write each checkpoint once.
        #[default("false")]
        #[example("true")]
        pub checkpoints_on_each_node: Option<bool>,
        /// Whether each evaluation with a new lowest loss makes a checkpoint. The one with the lowest is kept in
        /// addition to train.checkpoints_kept.
        #[default("false")]
        #[example("true")]
        pub checkpoint_best: Option<bool>,
        /// Directory to which the finished run exports its weights, as `trainer export` does; with
        /// train.checkpoint_best, those of the checkpoint with the lowest loss.
        #[default("none")]
        #[example("\"chat-model\"")]
        pub export_to: Option<PathBuf>,
        /// Run directory.
        #[default("runs/ and the run file's name")]
        #[example("\"runs/chat\"")]
        pub run_dir: Option<PathBuf>,
        /// Step at which this start ends, for a run that is continued later.
        #[default("train.steps")]
        #[example("500")]
        pub stop_after: Option<u64>,
        /// Computing threads. On CPUs, results with another number differ within the rounding of sums.
        #[default("all cores, divided among the ranks")]
        #[example("16")]
        pub threads: Option<u64>,
        /// Device that computes: "auto" (a GPU if there is one), "cpu" or "gpu".
        #[default("\"auto\"")]
        #[example("\"auto\"")]
        pub device: Option<String>,
        /// Part of a block that backward recomputes: "full" (everything; only its input is kept), "attention"
        /// (everything except queries, keys, values and the attention output), "matmuls" (only norms and
        /// elementwise operations), or "auto": as little as GPU memory allows, so that some blocks may recompute less than
        /// others. The choice does not change results.
        #[default("\"auto\"")]
        #[example("\"attention\"")]
        pub activation_checkpointing: Option<String>,
        /// Kernels that compute attention on a GPU: "cudnn" (faster; Hopper GPUs, 16-bit numbers), "torch" (those that torch
        /// chooses), or "auto": cuDNN's where it can be used. The plan shows the choice. Results differ within the
        /// rounding of sums, so a resumed run repeats its bits only with the same kernels.
        #[default("\"auto\"")]
        #[example("\"auto\"")]
        pub attention: Option<String>,
        /// Whether a GPU's results repeat in bits. If false, the backward pass of attention adds in any order, which is faster and
        /// needs less memory; the plan says how much.
        #[default("true")]
        #[example("true")]
        pub deterministic: Option<bool>,
        /// Numbers of the factors in the products of blocks: "dtype" (the model's) or "fp8" (8 bits, up to twice as fast; NVIDIA GPUs
        /// from Hopper and Ada on, with dtype "bf16"). Each factor is rounded with a scale of its own: 3 bits of mantissa for weights and
        /// activations, 2 for gradients. Stored weights, norms, attention and the head stay as they are. The choice changes results.
        #[default("\"dtype\"")]
        #[example("\"dtype\"")]
        pub matmuls: Option<String>,
        /// Chunks into which the MLP of a block is divided; they are computed one after the other. With more than one, all
        /// activations are recomputed, attention is not cuDNN's, and sums are added in another order.
        #[default("1")]
        #[example("4")]
        pub mlp_chunks: Option<u64>,
        /// Micro-batches of a step that pass through each block together, which reads the block's parameters once for all
        /// of them. In a smaller group fewer activations are kept, so less is recomputed. The choice does not change results.
        #[default("the plan's choice")]
        #[example("4")]
        pub micro_batch_group: Option<u64>,
    }

    /// `offload`: how tiles are moved between memory and devices.
    pub struct OffloadToml {
        /// Socket of a running offloadd.
        #[default("none: a private offloadd is started")]
        #[example("\"/run/offloadd/offloadd.sock\"")]
        pub socket: Option<PathBuf>,
        /// When the optimizer runs: "deferred" (for each unit just before its next use) or "immediate" (after
        /// backward). The choice does not change results.
        #[default("\"deferred\"")]
        #[example("\"immediate\"")]
        pub optimizer_step: Option<String>,
        /// Fraction of the tiles with device "nvme" that stays in host memory, or "auto" for as much as fits.
        #[default("0.0, or \"auto\" with offload.host_memory_bytes")]
        #[example("0.25")]
        pub resident_fraction: Option<FractionOrAuto>,
        /// Fraction of the parameters whose tiles stay in GPU memory although a device is "cpu" or "nvme", in whole units, or "auto"
        /// for as much as fits where that shortens the step. Each of several ranks keeps its part of them. With a device "nvme", commits write
        /// them to the drives, too: offload.commit_every says how often. The choice does not change results.
        #[default("\"auto\"; 0.0 with a device \"nvme\"")]
        #[example("0.5")]
        pub gpu_resident_fraction: Option<FractionOrAuto>,
        /// Upper limit of host memory for all processes of the run on this node.
        #[default("the free memory")]
        #[example("\"200GiB\"")]
        pub host_memory_bytes: Option<ByteCount>,
        /// Steps between commits; 0 for only before evaluation and at the end.
        #[default("the plan's choice")]
        #[example("1")]
        pub commit_every: Option<u64>,
        /// Elements in a tile, a multiple of 4096.
        #[default("the plan's choice")]
        #[example("4194304")]
        pub tile_elems: Option<u64>,
        /// Host memory for tiles in transit.
        #[default("the plan's choice")]
        #[example("\"8GiB\"")]
        pub staging_bytes: Option<ByteCount>,
        /// I/O operations in flight for each process, 2 to 1024.
        #[default("aio.queue_depth, or 64")]
        #[example("32")]
        pub iodepth: Option<u64>,
        /// State that survives a crash: "full" (everything that was committed) or "none" (nothing; one copy on the
        /// device).
        #[default("\"full\"")]
        #[example("\"full\"")]
        pub durability: Option<String>,
        /// I/O engine of the private offloadd: "auto", "uring", "aio" or "psync".
        #[default("\"auto\"")]
        #[example("\"uring\"")]
        pub engine: Option<String>,
        /// Where the optimizer runs: "auto", "cpu", "gpu" or "shared" (each updates a part of the tiles). The
        /// choice does not change results.
        #[default("\"auto\"")]
        #[example("\"gpu\"")]
        pub optimizer_device: Option<String>,
        /// Where block inputs are kept until backward: "auto" (GPU memory as long as they fit, then host memory, then the drives of
        /// the run's state, if it has any), "gpu", "cpu" or "nvme" (those drives, with any device). The choice does not change results.
        #[default("\"auto\"")]
        #[example("\"cpu\"")]
        pub activations: Option<String>,
        /// Where gradients are kept until their update: "auto", "cpu" or "nvme".
        #[default("\"auto\"")]
        #[example("\"cpu\"")]
        pub gradients: Option<String>,
        /// With several nodes, where a unit's parameters come from after their first use in a step: "auto" (a copy in
        /// host memory that the ranks of each node keep together, as long as every node has room for it) or "all" (the
        /// ranks of all nodes again). The choice does not change results.
        #[default("\"auto\"")]
        #[example("\"all\"")]
        pub shard: Option<String>,
    }
}

typed! {
    Vec<FileToml> = "a list of paths, or of tables with path, weight, max_samples and format, for example [\"a\", \"b\"]";
}
