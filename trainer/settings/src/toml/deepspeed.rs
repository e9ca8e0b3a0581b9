//! DeepSpeed's tables, with DeepSpeed's meaning: `keys/table.rs` describes their keys.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use super::values::{Paths, Switch};
use crate::schema::{keys, typed};

/// An entry of `optimizer.groups`.
#[derive(Clone, Debug, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct ParamGroupToml {
    pub params: Vec<String>,
    pub lr: Option<f64>,
    pub weight_decay: Option<f64>,
}

keys! {
    /// `data_types`: DeepSpeed's table of number formats.
    pub struct DataTypesToml {
        pub grad_accum_dtype: Option<String>,
    }

    /// `checkpoint`: DeepSpeed's table of checkpoints.
    pub struct CheckpointToml {
        pub use_node_local_storage: Option<bool>,
    }

    /// `bf16`: DeepSpeed's table for bf16.
    pub struct Bf16Toml {
        pub enabled: Option<Switch>,
        pub check_grad_overflow: Option<bool>,
        pub bf16_master_weights_and_grads: Option<bool>,
        pub bf16_optimizer_states: Option<bool>,
    }

    /// `fp16`: DeepSpeed's table for fp16 and loss scaling.
    pub struct Fp16Toml {
        pub enabled: Option<Switch>,
        pub loss_scale: Option<f64>,
        pub initial_scale_power: Option<u64>,
        pub loss_scale_window: Option<u64>,
        pub hysteresis: Option<u64>,
        pub consecutive_hysteresis: Option<bool>,
        pub min_loss_scale: Option<f64>,
    }

    /// `activation_checkpointing`: DeepSpeed's table; where kept activations are stored.
    pub struct CheckpointingToml {
        pub cpu_checkpointing: Option<bool>,
    }

    /// `optimizer`: DeepSpeed's choice of optimizer.
    pub struct OptimizerToml {
        #[name("type")]
        pub kind: Option<String>,
        pub params: OptimizerParamsToml,
        /// Parameters with a learning rate or weight decay of their own: tables {params, lr, weight_decay}. A group has
        /// the parameters whose name contains one of the texts in params; a parameter that fits several groups is in
        /// the first one. The schedule scales a group's lr as it scales optimizer.params.lr.
        #[default("[]")]
        #[example("[{ params = [\"embed_tokens\", \"lm_head\"], lr = 1e-6, weight_decay = 0.0 }]")]
        #[only(trainer)]
        pub groups: Option<Vec<ParamGroupToml>>,
        /// Number format of momentum and variance: "fp32", "bf16" with stochastic rounding, which makes the state of AdamW 4 bytes a
        /// parameter smaller and Lion's 2, or "8bit" as bitsandbytes has it, 6 bytes smaller and Lion's 3. Fixed for the life of a run.
        #[default("\"fp32\"")]
        #[example("\"bf16\"")]
        #[only(trainer)]
        pub moments: Option<String>,
        /// Number format of the masters of a bf16 run: "fp32" (exact, the parameter is its upper half), or "bf16": the parameter is its own
        /// master, rounded stochastically after each step, 2 bytes a parameter less. Fixed for the life of a run.
        #[default("\"fp32\"")]
        #[example("\"bf16\"")]
        #[only(trainer)]
        pub master: Option<String>,
    }

    /// `optimizer.params`: parameters of the optimizer.
    pub struct OptimizerParamsToml {
        pub lr: Option<f64>,
        pub betas: Option<[f64; 2]>,
        pub eps: Option<f64>,
        pub weight_decay: Option<f64>,
        /// Parameters that weight decay applies to: "matrices" (neither norms nor biases) or "all".
        #[default("\"matrices\"")]
        #[example("\"all\"")]
        #[only(trainer)]
        pub decay: Option<String>,
        /// Weight decay applies to all parameters except those whose name contains one of these texts.
        #[default("none")]
        #[example("[\"bias\", \"norm\"]")]
        #[only(trainer)]
        pub no_decay: Option<Vec<String>>,
        pub adam_w_mode: Option<bool>,
        pub torch_adam: Option<bool>,
        pub muon_lr: Option<f64>,
        pub adam_lr: Option<f64>,
        pub momentum: Option<f64>,
        /// Muon: whether a direction is made of gradient and momentum, as torch.optim.Muon does, or of the momentum alone.
        #[default("true")]
        #[example("false")]
        pub nesterov: Option<bool>,
        /// Muon: steps of Newton and Schulz's iteration.
        #[default("5")]
        #[example("6")]
        pub ns_steps: Option<u64>,
        /// Muon: coefficients of the iteration's polynomial.
        #[default("[3.4445, -4.775, 2.0315]")]
        #[example("[2.0, -1.5, 0.5]")]
        pub ns_coefficients: Option<[f64; 3]>,
        /// Muon: what the rate of a matrix is multiplied by: "original", the root of rows over columns and at least 1, or "match_rms_adamw", 0.2 times the
        /// root of the larger of them, with which AdamW's rate and weight decay can be kept.
        #[default("\"original\"")]
        #[example("\"match_rms_adamw\"")]
        pub adjust_lr_fn: Option<String>,
    }

    /// `scheduler`: DeepSpeed's choice of learning rate schedule.
    pub struct SchedulerToml {
        #[name("type")]
        pub kind: Option<String>,
        pub params: SchedulerParamsToml,
    }

    /// `scheduler.params`: parameters of all schedulers.
    pub struct SchedulerParamsToml {
        /// linear, cosine, constant: steps in which the learning rate rises from 0.
        #[default("0")]
        #[example("100")]
        pub warmup_steps: Option<u64>,
        /// linear, cosine, constant: the same as a fraction of all steps.
        #[default("0.0")]
        #[example("0.03")]
        pub warmup_ratio: Option<f64>,
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
        #[only(trainer)]
        pub aio: AioToml,
    }

    /// `tensorboard`, `csv_monitor`: files with the scalars of each step.
    pub struct MonitorToml {
        pub enabled: Option<bool>,
        pub output_path: Option<PathBuf>,
        pub job_name: Option<String>,
    }

    /// `aio`: DeepSpeed's settings of asynchronous I/O.
    pub struct AioToml {
        pub queue_depth: Option<u64>,
    }

    /// Where the parameters or the optimizer's state are kept between uses.
    pub struct TierToml {
        pub device: Option<String>,
        pub nvme_path: Option<Paths>,
    }
}

typed! {
    Vec<ParamGroupToml> = "a list of tables with params, lr and weight_decay, for example [{params = [\"lm_head\"], lr = 1e-6}]";
}
