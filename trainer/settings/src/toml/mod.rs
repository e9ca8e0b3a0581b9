//! The configuration file as written: every key that is read, not yet checked.
//!
//! Each table is declared once, in this module. Its doc comments, defaults and types are what `trainer
//! config-reference` lists, what a file is checked against (`keys/`) and what is parsed. Top-level keys are
//! DeepSpeed's with DeepSpeed's meaning and are described in `keys/table.rs`; `[model] [data] [train]
//! [offload]` are this program's own.
//!
//! ```text
//!   ConfigToml    the trainer's file    deepspeed: DeepSpeed's tables    trainer: [model] [data] [train] [offload]
//!   PackageToml   the package's file    deepspeed                        package: the table `offloadd`
//! ```

mod deepspeed;
mod package;
mod trainer;
mod values;

use std::path::PathBuf;

use crate::schema::keys;

pub use deepspeed::{
    AioToml, Bf16Toml, CheckpointToml, CheckpointingToml, DataTypesToml, Fp16Toml, MonitorToml,
    OptimizerParamsToml, OptimizerToml, ParamGroupToml, SchedulerParamsToml, SchedulerToml,
    TierToml, ZeroToml,
};
pub use package::OwnToml;
pub use trainer::{
    DataToml, FileTableToml, FileToml, ModelToml, OffloadToml, RopeScalingToml, TrainToml,
};
pub use values::{
    Auto, ByteCount, CheckpointInterval, Epoch, FractionOrAuto, Interval, Never, Paths, Steps,
    Switch,
};

keys! {
    /// Configuration file, unchecked. `RunSettings` is the checked form.
    pub struct ConfigToml {
        /// A DeepSpeed configuration (JSON), whose values this file completes or replaces
        /// "auto" in.
        #[default("none")]
        #[example("\"ds_config.json\"")]
        pub deepspeed: Option<PathBuf>,
        pub train_batch_size: Option<u64>,
        pub train_micro_batch_size_per_gpu: Option<u64>,
        pub gradient_accumulation_steps: Option<u64>,
        pub gradient_clipping: Option<f64>,
        pub sequence_parallel_size: Option<u64>,
        pub steps_per_print: Option<Steps>,
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

    /// DeepSpeed's file as the Python package reads it, unchecked. `PackageSettings` is the checked form.
    pub struct PackageToml {
        pub dataloader_drop_last: Option<bool>,
        pub train_batch_size: Option<u64>,
        pub train_micro_batch_size_per_gpu: Option<u64>,
        pub gradient_accumulation_steps: Option<u64>,
        pub gradient_clipping: Option<f64>,
        pub sequence_parallel_size: Option<u64>,
        pub steps_per_print: Option<Steps>,
        pub wall_clock_breakdown: Option<bool>,
        pub tensorboard: MonitorToml,
        pub csv_monitor: MonitorToml,
        pub data_types: DataTypesToml,
        pub bf16: Bf16Toml,
        pub fp16: Fp16Toml,
        pub optimizer: OptimizerToml,
        pub scheduler: SchedulerToml,
        pub zero_optimization: ZeroToml,
        pub activation_checkpointing: CheckpointingToml,
        pub checkpoint: CheckpointToml,
        pub offloadd: OwnToml,
    }
}
