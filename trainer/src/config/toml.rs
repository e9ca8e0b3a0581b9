//! The run file as written: every key we read, none of them checked yet.
//!
//! Each table has a value for every key (`None` where the file is silent), so writing `ConfigToml::default()` out gives the
//! list of keys we use. `keys.rs` takes it from there: the key table cannot disagree with what is read.
//! Top-level keys are DeepSpeed's, with DeepSpeed's meaning; `[model] [data] [train] [offload]` are ours.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

/// A run file, unchecked. `RunSettings` is the checked form.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct ConfigToml {
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
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Bf16Toml {
    pub enabled: Option<bool>,
    pub check_grad_overflow: Option<bool>,
}

/// `fp16`: DeepSpeed's table of that precision, and of how losses are scaled.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Fp16Toml {
    pub enabled: Option<bool>,
    pub loss_scale: Option<f64>,
    pub initial_scale_power: Option<u64>,
    pub loss_scale_window: Option<u64>,
    pub hysteresis: Option<u64>,
    pub consecutive_hysteresis: Option<bool>,
    pub min_loss_scale: Option<f64>,
}

/// `activation_checkpointing`: where DeepSpeed keeps what is not computed again.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct CheckpointingToml {
    pub cpu_checkpointing: Option<bool>,
}

/// `optimizer`: DeepSpeed's choice of optimizer.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct OptimizerToml {
    #[serde(rename = "type")]
    pub kind: Option<String>,
    pub params: OptimizerParamsToml,
}

/// `optimizer.params`: those of Adam and AdamW.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct OptimizerParamsToml {
    pub lr: Option<f64>,
    pub betas: Option<[f64; 2]>,
    pub eps: Option<f64>,
    pub weight_decay: Option<f64>,
    pub decay: Option<String>,
    pub no_decay: Option<Vec<String>>,
    pub adam_w_mode: Option<bool>,
}

/// `scheduler`: DeepSpeed's choice of learning rate schedule.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct SchedulerToml {
    #[serde(rename = "type")]
    pub kind: Option<String>,
    pub params: SchedulerParamsToml,
}

/// `scheduler.params`: those of all schedulers together.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
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
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct ZeroToml {
    pub stage: Option<u64>,
    pub offload_param: TierToml,
    pub offload_optimizer: TierToml,
    pub aio: AioToml,
}

/// `tensorboard`, `csv_monitor`: files with a step's scalars.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct MonitorToml {
    pub enabled: Option<bool>,
    pub output_path: Option<PathBuf>,
    pub job_name: Option<String>,
}

/// `aio`: how DeepSpeed's swapper does I/O.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct AioToml {
    pub queue_depth: Option<u64>,
}

/// Where the parameters, or the optimizer's state, live between uses.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct TierToml {
    pub device: Option<String>,
    pub nvme_path: Option<Paths>,
}

/// DeepSpeed knows one path; we take a list too, one store over all of them.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(untagged, expecting = "expected a path or a list of paths")]
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

/// The model: a directory of Hugging Face's (`path`), or its shape with Hugging Face's names, or both: what is named here then
/// takes the place of what the directory's `config.json` says. Which keys a model has depends on its architecture. `init`
/// says whether a fresh run takes the weights that are there; `from` is the folder of a run whose weights it takes instead.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct ModelToml {
    pub path: Option<PathBuf>,
    pub from: Option<PathBuf>,
    pub init: Option<String>,
    pub model_type: Option<String>,
    pub vocab_size: Option<u64>,
    pub hidden_size: Option<u64>,
    pub intermediate_size: Option<u64>,
    pub num_hidden_layers: Option<u64>,
    pub num_attention_heads: Option<u64>,
    pub num_key_value_heads: Option<u64>,
    pub head_dim: Option<u64>,
    pub rope_theta: Option<f64>,
    pub rope_scaling: RopeScalingToml,
    pub rms_norm_eps: Option<f64>,
    pub tie_word_embeddings: Option<bool>,
    pub initializer_range: Option<f64>,
    pub max_position_embeddings: Option<u64>,
    pub attention_bias: Option<bool>,
    pub mlp_bias: Option<bool>,
    pub sliding_window: Option<u64>,
    pub use_sliding_window: Option<bool>,
    pub max_window_layers: Option<u64>,
    pub attention_dropout: Option<f64>,
    pub n_embd: Option<u64>,
    pub n_inner: Option<u64>,
    pub n_layer: Option<u64>,
    pub n_head: Option<u64>,
    pub n_positions: Option<u64>,
    pub layer_norm_epsilon: Option<f64>,
    pub embd_pdrop: Option<f64>,
    pub resid_pdrop: Option<f64>,
    pub attn_pdrop: Option<f64>,
}

/// `model.rope_scaling`: how the rotary embedding is stretched.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct RopeScalingToml {
    pub rope_type: Option<String>,
    pub factor: Option<f64>,
    pub low_freq_factor: Option<f64>,
    pub high_freq_factor: Option<f64>,
    pub original_max_position_embeddings: Option<u64>,
}

/// `data`: files or folders of text, how it becomes tokens, what of it is held out.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct DataToml {
    pub files: Option<Vec<PathBuf>>,
    pub eval_files: Option<Vec<PathBuf>>,
    pub holdout_share: Option<f64>,
    pub tokenizer: Option<PathBuf>,
    pub chat_template: Option<PathBuf>,
    pub packing: Option<String>,
    pub loss_on: Option<String>,
    pub shuffle: Option<bool>,
    pub cache: Option<PathBuf>,
}

/// `train`: length, order, reports and place of the run.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct TrainToml {
    pub steps: Option<u64>,
    pub seq_len: Option<u64>,
    pub seed: Option<u64>,
    pub eval_every: Option<u64>,
    pub eval_batches: Option<u64>,
    pub log_every: Option<u64>,
    pub save_every: Option<u64>,
    pub saves_kept: Option<u64>,
    pub run_folder: Option<PathBuf>,
    pub stop_after: Option<u64>,
    pub threads: Option<u64>,
    pub device: Option<String>,
    pub keep: Option<String>,
    pub activations: Option<String>,
    pub tiling: Option<u64>,
}

/// `offload`: how tiles move.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct OffloadToml {
    pub socket: Option<PathBuf>,
    pub schedule: Option<String>,
    pub resident_share: Option<ShareOrAuto>,
    pub host_memory: Option<ByteCount>,
    pub commit_every: Option<u64>,
    pub tile_elems: Option<u64>,
    pub staging_bytes: Option<ByteCount>,
    pub iodepth: Option<u64>,
    pub durability: Option<String>,
    pub engine: Option<String>,
    pub update: Option<String>,
    pub gradients: Option<String>,
}

/// A share from 0 to 1, or "auto": as much as fits.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(untagged, expecting = "expected a share from 0 to 1, or \"auto\"")]
pub enum ShareOrAuto {
    Share(f64),
    Word(String),
}

/// A number of bytes: an integer, or text such as "64MiB".
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(
    untagged,
    expecting = "expected a number of bytes, as 67108864 or \"64MiB\""
)]
pub enum ByteCount {
    Number(u64),
    Text(String),
}

impl ByteCount {
    /// The bytes, or `None` when the text is no number with KiB, MiB, GiB or TiB, or does not fit 64 bits.
    pub fn bytes(&self) -> Option<u64> {
        let text = match self {
            Self::Number(bytes) => return Some(*bytes),
            Self::Text(text) => text.trim(),
        };
        let (number, shift) = [("KiB", 10), ("MiB", 20), ("GiB", 30), ("TiB", 40)]
            .iter()
            .find_map(|(unit, shift)| Some((text.strip_suffix(unit)?, *shift)))
            .unwrap_or((text, 0));
        let number: u64 = number.trim().parse().ok()?;
        number.checked_mul(1 << shift)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_numbers_or_binary_units() {
        let bytes = |text: &str| ByteCount::Text(text.into()).bytes();
        assert_eq!(bytes("64MiB"), Some(64 << 20));
        assert_eq!(bytes("2 GiB"), Some(2 << 30));
        assert_eq!(bytes("4096"), Some(4096));
        assert_eq!(bytes("64MB"), None);
        assert_eq!(bytes("99999999999TiB"), None);
    }
}
