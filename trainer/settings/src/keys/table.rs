//! DeepSpeed's keys and how each is supported by the trainer and by the Python package. The check of configuration files and
//! `docs/coming-from-deepspeed.md` both use this table.
//!
//! An entry may name keys below it (`below`, dotted if they are deeper) that have the same support; `*`
//! accepts any. This finds a misspelled key even in a table that has no effect.

/// How a key is supported.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum KeySupport {
    /// Read: `ConfigToml` or `PackageToml` has a field for it.
    Used,
    /// Accepted and reported before the start: it controls a mechanism that does not exist here.
    Unused,
    /// Asks for an unsupported feature: refused unless it is off (false, null, 0, an empty table, `enabled =
    /// false`).
    Refused,
    /// Refused unless it is null, "auto" or one of these values (as JSON).
    RefusedBut(&'static [&'static str]),
}

/// One key, or a table with the keys below it.
pub(crate) struct Key {
    pub(crate) path: &'static str,
    pub(crate) below: &'static str,
    /// What the trainer does with it.
    pub(crate) support: KeySupport,
    /// How it is used, why it has no effect, or what to do instead.
    pub(crate) why: &'static str,
    /// The same for the Python package, where it differs.
    pub(crate) package: Option<(KeySupport, &'static str)>,
}

impl Key {
    /// Says what the Python package does with it instead, and why.
    const fn package(mut self, support: KeySupport, why: &'static str) -> Self {
        self.package = Some((support, why));
        self
    }
}

const fn key(path: &'static str, support: KeySupport, why: &'static str) -> Key {
    table(path, "", support, why)
}

const fn table(
    path: &'static str,
    below: &'static str,
    support: KeySupport,
    why: &'static str,
) -> Key {
    Key {
        path,
        below,
        support,
        why,
        package: None,
    }
}

use KeySupport::{Refused, RefusedBut, Unused, Used};

/// Tables in which DeepSpeed ignores unknown keys. In all others it refuses them.
pub(crate) const IGNORES_OTHERS: &[&str] = &[
    "",
    "activation_checkpointing",
    "aio",
    "checkpoint",
    "checkpoint.parallel_write",
    "checkpoint.writer",
    "data_efficiency",
    "data_types",
    "datastates_ckpt",
    "flops_profiler",
    "optimizer",
    "scheduler",
    "timers",
    "torch_autocast",
];

/// The sections of the table, with their titles.
pub(crate) const SECTIONS: &[(&str, &[Key])] = &[
    ("Batch, precision, optimizer", TRAINING),
    ("Learning rate", SCHEDULER),
    ("ZeRO", ZERO),
    ("Offload", OFFLOAD),
    ("Reports", REPORTS),
    ("Everything else", OTHERS),
];

// One key a line, so that it reads as a table.
#[rustfmt::skip]
const TRAINING: &[Key] = &[
    key("train_batch_size", Used, "samples of a step over all ranks; any two of the three sizes give the third"),
    key("train_micro_batch_size_per_gpu", Used, "samples one rank computes at a time"),
    key("gradient_accumulation_steps", Used, "micro-batches of one rank in a step; 1 if the other sizes do not determine it"),
    key("gradient_clipping", Used, "largest norm of all gradients; 1.0 when left out, as in DeepSpeed since June 2026 (before, it did not clip then); 0 disables clipping").package(Used, "largest norm of all gradients; 1.0 with `initialize` when left out, and below the Trainer its `max_grad_norm`; 0 disables it; `prepare` and `attach` clip only if it is given, because their scripts clip themselves (a step is then clipped by both)"),
    key("bf16.enabled", Used, "16-bit parameters and gradients with an exact 32-bit master copy; \"auto\" takes the checkpoint's type; false when left out").package(Used, "`initialize` brings the model to the type; with `prepare` and `attach` the script has done it"),
    key("bf16.immediate_grad_update", Unused, "gradients are summed in fp32 and rounded once"),
    key("bf16.check_grad_overflow", Used, "true: a step whose gradients are not finite is skipped; left out or false: it stops the run, and the step before is kept").package(Used, "true: a step whose gradients are not finite is skipped by `initialize`'s engine; left out or false: parameters become nan, with a warning, as with torch.optim"),
    key("bf16.bf16_master_weights_and_grads", Used, "true: as optimizer.master = \"bf16\", which rounds weights stochastically, not to the nearest as DeepSpeed; gradients are summed in fp32 all the same").package(Used, "true: as offloadd.master = \"bf16\", which rounds weights stochastically, not to the nearest as DeepSpeed"),
    key("bf16.bf16_optimizer_states", Used, "true: as optimizer.moments = \"bf16\", which rounds moments stochastically").package(Used, "true: as offloadd.moments = \"bf16\", which rounds moments stochastically"),
    key("fp16.enabled", Used, "16-bit parameters and gradients with a separate 32-bit master copy; a step that overflows is skipped; \"auto\" takes the checkpoint's type; false when left out").package(Used, "`initialize` brings the model to the type and scales the loss; with `prepare` and `attach` the script does"),
    key("fp16.loss_scale", Used, "factor on the loss; 0, the default, adapts it"),
    key("fp16.initial_scale_power", Used, "the first adapted scale is 2 to this power; 16 when left out"),
    key("fp16.loss_scale_window", Used, "steps without an overflow after which the scale doubles; 1000 when left out"),
    key("fp16.hysteresis", Used, "overflows until the scale halves; 2 when left out, so that the first one only skips its step"),
    key("fp16.consecutive_hysteresis", Used, "true: each step without an overflow resets hysteresis; false when left out: only a doubling of the scale does"),
    key("fp16.min_loss_scale", Used, "the scale does not fall below this; 1 when left out"),
    key("fp16.auto_cast", Unused, "inputs are tokens, which have no precision").package(Unused, "inputs are as the script makes them"),
    key("fp16.fp16_master_weights_and_grads", Refused, "leave it out: the master is kept in fp32"),
    key("optimizer.type", Used, "Adam, AdamW, Lion and Muon; others are refused; AdamW when left out").package(Used, "Adam, AdamW, Lion and Muon, for `initialize` without an optimizer of the script; others are refused; AdamW when left out"),
    key("optimizer.params.lr", Used, "learning rate; without an optimizer 5e-5, as in Hugging Face's Trainer; 1e-3 when only the rate is left out, as in PyTorch (1e-4 with Lion); each with a warning").package(Used, "learning rate; 1e-3 when left out, as in PyTorch (1e-4 with Lion)"),
    key("optimizer.params.betas", Used, "decay of momentum and variance; [0.9, 0.999] when left out, [0.9, 0.99] with Lion"),
    key("optimizer.params.eps", Used, "added to the root of the variance; 1e-8 when left out; Lion has none"),
    key("optimizer.params.weight_decay", Used, "decoupled weight decay, not applied to norms; 0 when left out (0.01 with torch_adam)").package(Used, "decoupled weight decay of all parameters, as in DeepSpeed; 0 when left out (0.01 with torch_adam)"),
    key("optimizer.params.muon_lr", Used, "Muon's learning rate of the matrices of blocks; optimizer.params.lr when left out"),
    key("optimizer.params.adam_lr", Used, "with Muon the learning rate of all other parameters; optimizer.params.lr when left out"),
    key("optimizer.params.momentum", Used, "decay of Muon's momentum; 0.95 when left out"),
    key("optimizer.params.ns_method", RefusedBut(&["\"standard\""]), "leave it out: the iteration is that of torch.optim.Muon"),
    key("optimizer.params.adam_w_mode", Used, "false with a weight decay is refused: weight decay inside the gradient is not supported, use AdamW; true when left out"),
    key("optimizer.params.torch_adam", Used, "if true, a weight_decay that is left out is 0.01 with AdamW, as in torch.optim.AdamW; the update is the same"),
    key("optimizer.params.fp32_optimizer_states", RefusedBut(&["true"]), "leave it out: optimizer.moments says how moments are stored").package(RefusedBut(&["true"]), "leave it out: offloadd.moments says how moments are stored"),
    key("optimizer.params.bias_correction", RefusedBut(&["true"]), "leave it out: bias correction is always applied"),
    key("optimizer.params.amsgrad", Refused, "leave it out: DeepSpeed's own Adam refuses it too"),
    key("optimizer.params.fused", Unused, "the update is always fused"),
    key("optimizer.params.foreach", Unused, "the update is always fused"),
    key("optimizer.params.max_grad_norm", Refused, "write it as gradient_clipping, at the top level"),
    key("optimizer.legacy_fusion", Refused, "leave it out: the update is always fused"),
    key("zero_allow_untested_optimizer", Unused, "every optimizer that there is works with every setting"),
    key("zero_force_ds_cpu_optimizer", Unused, "the optimizer works on CPU and GPU"),
    key("managed_gradient_accumulation", RefusedBut(&["true"]), "leave it out: the trainer always counts the micro-batches").package(RefusedBut(&["true"]), "leave it out: the engine counts the micro-batches, unless the script calls set_gradient_accumulation_boundary"),
    key("gradient_allreduce_op", RefusedBut(&["\"mean\""]), "leave it out: gradients are averaged"),
    key("prescale_gradients", Unused, "losses are weighted before backward, so gradients need no scaling").package(Unused, "gradients are averaged over the ranks in fp32"),
    key("gradient_predivide_factor", Unused, "losses are weighted before backward, so gradients need no scaling").package(Unused, "gradients are averaged over the ranks in fp32"),
    key("data_types.grad_accum_dtype", Refused, "leave it out: gradients are summed in fp32 and stored in the model's type").package(Used, "type of the gradients of 16-bit parameters in tiles: \"fp32\", or the parameters' with \"bf16\" and \"fp16\"; when left out, fp32, and the parameters' type if gradient_accumulation_steps is 1: the model makes them in its own type"),
    table("data_types", "param_dtype buffer_dtype keep_in_fp32_modules", Refused, "leave it out: parameters have the model's type"),
    table("torch_autocast", "enabled dtype lower_precision_safe_modules", Refused, "use bf16.enabled = true"),
    table("amp", "*", Refused, "use bf16.enabled = true"),
    key("sparse_gradients", Refused, "leave it out: gradients of the embedding are dense"),
];

#[rustfmt::skip]
const SCHEDULER: &[Key] = &[
    key("scheduler.type", Used, "\"linear\", \"cosine\" (both fall to 0 at total_num_steps) and \"constant\", with the rates of Hugging Face's Trainer, or DeepSpeed's LRRangeTest, OneCycle, WarmupLR, WarmupDecayLR, WarmupCosineLR with DeepSpeed's. When left out: linear, with a warning, if there is no optimizer either or Hugging Face's Trainer fills in the file (a value is \"auto\"); constant otherwise").package(Used, "as for the trainer, for `initialize` without a schedule of the script; when left out, the rate is the optimizer's"),
    key("scheduler.params.warmup_min_lr", Used, "WarmupLR, WarmupDecayLR: learning rate at the first step; 0 when left out"),
    key("scheduler.params.warmup_max_lr", Used, "WarmupLR, WarmupDecayLR: learning rate after the warm-up; optimizer.params.lr when left out (DeepSpeed's WarmupDecayLR uses 1e-3)"),
    key("scheduler.params.warmup_num_steps", Used, "WarmupLR, WarmupDecayLR, WarmupCosineLR: steps of the warm-up; 1000 when left out"),
    key("scheduler.params.warmup_type", Used, "\"log\", DeepSpeed's default, or \"linear\""),
    key("scheduler.params.total_num_steps", Used, "step at which the decay ends; train.steps when left out").package(Used, "step at which the decay ends; `initialize` requires it for schedules that have an end, because the script knows the number of steps"),
    key("scheduler.params.warmup_min_ratio", Used, "WarmupCosineLR: learning rate at the first step, as a fraction of optimizer.params.lr; 0 when left out"),
    key("scheduler.params.cos_min_ratio", Used, "WarmupCosineLR: learning rate at the end, as a fraction of optimizer.params.lr; 1e-4 when left out"),
    key("scheduler.params.lr_range_test_min_lr", Used, "LRRangeTest: learning rate at the first step; 1e-3 when left out"),
    key("scheduler.params.lr_range_test_step_size", Used, "LRRangeTest: steps of an interval; 2000 when left out"),
    key("scheduler.params.lr_range_test_step_rate", Used, "LRRangeTest: an interval raises the learning rate by this multiple of lr_range_test_min_lr; 1.0 when left out"),
    key("scheduler.params.lr_range_test_staircase", Used, "LRRangeTest: true: the learning rate rises once an interval; false when left out: it rises at each step"),
    key("scheduler.params.cycle_min_lr", Used, "OneCycle: learning rate at both ends of the cycle; required"),
    key("scheduler.params.cycle_max_lr", Used, "OneCycle: learning rate in the middle of the cycle; required"),
    key("scheduler.params.cycle_first_step_size", Used, "OneCycle: steps in which the learning rate rises; 2000 when left out"),
    key("scheduler.params.cycle_second_step_size", Used, "OneCycle: steps in which the learning rate falls; cycle_first_step_size when left out"),
    key("scheduler.params.cycle_first_stair_count", Used, "OneCycle: the learning rate rises in this many stairs; 0 when left out: at each step"),
    key("scheduler.params.cycle_second_stair_count", Used, "OneCycle: the learning rate falls in this many stairs; cycle_first_stair_count when left out"),
    key("scheduler.params.cycle_momentum", Used, "OneCycle: the momentum (the first beta) falls while the learning rate rises, and the second beta is 0.99; true when left out"),
    key("scheduler.params.cycle_min_mom", Used, "OneCycle: momentum in the middle of the cycle; 0.8 when left out"),
    key("scheduler.params.cycle_max_mom", Used, "OneCycle: momentum at the end of the cycle; 0.9 when left out"),
    key("scheduler.params.decay_step_size", Used, "OneCycle: steps of an interval of the decay after the cycle; 0 when left out: no decay"),
    key("scheduler.params.decay_lr_rate", Used, "OneCycle: after n intervals of decay, the learning rate is cycle_min_lr / (1 + n * decay_lr_rate); 0 when left out"),
    key("scheduler.params.decay_mom_rate", Used, "OneCycle: after n intervals of decay, the momentum is cycle_max_mom * (1 + n * decay_mom_rate); 0 when left out"),
    key("scheduler.params.last_batch_iteration", Unused, "the position is resumed with the run"),
];

#[rustfmt::skip]
const ZERO: &[Key] = &[
    key("zero_optimization.stage", Used, "0 to 3, which parts of the state are divided among the ranks; 3 when left out").package(Used, "0 to 3: gradients and optimizer state are always divided among the ranks, parameters too, unless they stay where the model has them (offload_optimizer.device)"),
    key("zero_optimization.contiguous_gradients", Unused, "a unit's gradients are always one buffer"),
    key("zero_optimization.reduce_scatter", Unused, "gradients are always summed to the rank that needs them, except in stage 0"),
    key("zero_optimization.reduce_bucket_size", Unused, "gradients are summed a unit at a time"),
    key("zero_optimization.use_multi_rank_bucket_allreduce", Unused, "gradients are summed a unit at a time"),
    key("zero_optimization.allgather_partitions", Unused, "weights are gathered a unit at a time"),
    key("zero_optimization.allgather_bucket_size", Unused, "weights are gathered a unit at a time"),
    key("zero_optimization.overlap_comm", Unused, "communication always overlaps computation"),
    key("zero_optimization.compute_grad_norm", Unused, "the norm is always computed"),
    key("zero_optimization.load_from_fp32_weights", Unused, "the 32-bit master is always kept and resumed exactly"),
    key("zero_optimization.elastic_checkpoint", Unused, "a run can always be resumed with any number of ranks"),
    key("zero_optimization.sub_group_size", Unused, "offload.tile_elems is the size of an update; left out, the plan chooses").package(Unused, "the size of tiles is chosen by the model's size"),
    table("zero_optimization", "stage3_prefetch_bucket_size prefetch_bucket_size", Unused, "the order of a step is known, so the next unit is always prefetched; offload.staging_bytes limits the read-ahead").package(Unused, "the order of a step is learned, so the next unit is always prefetched; offloadd.staging_bytes limits the read-ahead"),
    table("zero_optimization", "stage3_param_persistence_threshold param_persistence_threshold", Unused, "a unit is one buffer, its small parameters included; offload.gpu_resident_fraction says what stays in GPU memory").package(Unused, "a unit is one buffer, its small parameters included; offloadd.gpu_resident_fraction says what stays in GPU memory"),
    table("zero_optimization", "stage3_model_persistence_threshold model_persistence_threshold", Unused, "offload.gpu_resident_fraction says what stays in GPU memory").package(Unused, "offloadd.gpu_resident_fraction says what stays in GPU memory"),
    table("zero_optimization", "stage3_max_live_parameters max_live_parameters", Unused, "at most three units are gathered at a time").package(Unused, "at most three units are gathered at a time, beside those that offloadd.gpu_resident_fraction keeps"),
    table("zero_optimization", "stage3_max_reuse_distance max_reuse_distance", Unused, "the order of a step is known").package(Unused, "the order of a step is learned"),
    table("zero_optimization", "stage3_gather_16bit_weights_on_model_save gather_16bit_weights_on_model_save", Unused, "checkpoints are always complete, for any number of ranks"),
    key("zero_optimization.stage3_gather_fp16_weights_on_model_save", Unused, "checkpoints are always complete, for any number of ranks"),
    table("zero_optimization", "stage3_module_granularity_threshold module_granularity_threshold", Unused, "a unit is a transformer block").package(Unused, "a unit is a block of the model; offloadd.units names others"),
    table("zero_optimization", "stage3_use_all_reduce_for_fetch_params use_all_reduce_for_fetch_params", Unused, "weights are gathered a unit at a time"),
    table("zero_optimization", "stage3_allgather_sequential allgather_sequential", Unused, "weights are gathered a unit at a time"),
    key("zero_optimization.ignore_unused_parameters", Unused, "every parameter is used").package(Unused, "a parameter may be unused in any step"),
    key("zero_optimization.legacy_stage1", Refused, "leave it out: there is one stage 1"),
    key("zero_optimization.round_robin_gradients", Unused, "each rank owns a part of every unit"),
    key("zero_optimization.parameter_alignment", Unused, "tiles are always aligned"),
    key("zero_optimization.zero_hpz_partition_size", RefusedBut(&["1", "0"]), "leave it out: the ranks of each node keep a copy of the parameters together, unless offload.shard is \"all\"").package(RefusedBut(&["1", "0"]), "leave it out: the ranks of each node keep a copy of the parameters together, unless offloadd.shard is \"all\""),
    key("zero_optimization.zero_quantized_weights", Refused, "leave it out: it changes the weights"),
    key("zero_optimization.zero_quantized_nontrainable_weights", Refused, "leave it out: it changes the weights"),
    key("zero_optimization.zero_quantized_gradients", Refused, "leave it out: it changes the gradients"),
    table("zero_optimization.zeropp_loco_param", "err_beta reset_T", Refused, "leave it out: it changes the gradients"),
    key("zero_optimization.mics_shard_size", RefusedBut(&["-1"]), "leave it out: all ranks of a run divide the whole state"),
    key("zero_optimization.mics_hierarchical_params_gather", Refused, "leave it out: all ranks of a run divide all parameters"),
    key("zero_optimization.memory_efficient_linear", Unused, "train.activation_checkpointing says what a block keeps and what it recomputes").package(Unused, "the script's checkpointing says what is recomputed"),
    key("zero_optimization.pipeline_loading_checkpoint", Unused, "tiles are always read ahead"),
    key("zero_optimization.override_module_apply", Unused, "there are no Python modules").package(Unused, "modules are changed with `GatheredParameters`"),
    key("zero_optimization.log_trace_cache_warnings", Unused, "the order of a step is known, nothing is traced").package(Unused, "an order of blocks that changes again and again is said once"),
    key("zero_optimization.enable_sanity_checks", Unused, "the trainer's own checks are always on").package(Unused, "the checks are always on"),
    key("zero_optimization.save_muon_momentum_buffer_in_memory", Unused, "offload_optimizer.device says where the momentum is"),
    table("zero_optimization.leaf_module", "classes names name_suffixes", Unused, "a unit is a transformer block, gathered whole").package(Unused, "a unit is a block of the model, gathered whole; offloadd.units names others"),
    table("zero_optimization.zenflow", "topk_ratio select_strategy select_interval update_interval full_warm_up_rounds overlap_step offload auto_ratio pt_reserved_cores_perc", Refused, "leave it out: updates overlap computing without changing the result (offload.optimizer_step)").package(Refused, "leave it out: updates overlap computing without changing the result (offloadd.optimizer_step)"),
];

#[rustfmt::skip]
const OFFLOAD: &[Key] = &[
    key("zero_optimization.offload_param.device", Used, "where parameters are: \"cpu\", \"nvme\" or \"none\", GPU memory; \"cpu\" and \"nvme\" need stage 3, and \"nvme\" needs an offload_optimizer.device; \"none\" when left out").package(Used, "\"cpu\", \"nvme\" or \"none\"; \"cpu\" and \"nvme\" take the optimizer state along, also without offload_optimizer: everything is on drives if either table says \"nvme\", else in host memory; \"none\" when left out: parameters stay with the model"),
    key("zero_optimization.offload_param.nvme_path", Used, "a directory on the drive, or a list of directories on several").package(Used, "an existing directory on the drive, or a list of them; both tables may name some"),
    key("zero_optimization.offload_param.buffer_count", Unused, "offload.staging_bytes limits the memory for tiles in transit").package(Unused, "offloadd.staging_bytes limits the memory for tiles in transit"),
    key("zero_optimization.offload_param.buffer_size", Unused, "offload.staging_bytes limits the memory for tiles in transit").package(Unused, "offloadd.staging_bytes limits the memory for tiles in transit"),
    key("zero_optimization.offload_param.max_in_cpu", Unused, "offload.host_memory_bytes and offload.resident_fraction say what stays in host memory").package(Unused, "offloadd.resident_fraction says what stays in host memory"),
    key("zero_optimization.offload_param.pin_memory", Unused, "host memory is always pinned if there is a GPU, and locked if the system allows it"),
    key("zero_optimization.offload_optimizer.device", Used, "where the optimizer state is: \"cpu\", \"nvme\" (needs stage 3) or \"none\", GPU memory; \"none\" when left out").package(Used, "\"cpu\" or \"none\", host memory, or \"nvme\"; \"none\" when left out; without offload_param the parameters stay where the model has them, whole on each rank, but for stage 3 with several ranks: they then go to the same place"),
    key("zero_optimization.offload_optimizer.nvme_path", Used, "a directory on the drive, or a list of directories on several").package(Used, "an existing directory on the drive, or a list of them; both tables may name some"),
    key("zero_optimization.offload_optimizer.buffer_count", Unused, "offload.staging_bytes limits the memory for tiles in transit").package(Unused, "offloadd.staging_bytes limits the memory for tiles in transit"),
    key("zero_optimization.offload_optimizer.pin_memory", Unused, "host memory is always pinned if there is a GPU, and locked if the system allows it"),
    key("zero_optimization.offload_optimizer.pipeline", Unused, "reading, updating and writing always overlap"),
    key("zero_optimization.offload_optimizer.pipeline_read", Unused, "reading always overlaps updating"),
    key("zero_optimization.offload_optimizer.pipeline_write", Unused, "writing always overlaps updating"),
    key("zero_optimization.offload_optimizer.fast_init", Unused, "tiles are written once at the start"),
    key("zero_optimization.offload_optimizer.ratio", Unused, "offload.optimizer_device = \"shared\" divides the update between GPU and CPU according to their speeds").package(Unused, "offloadd.optimizer_device = \"shared\" divides the update between GPU and CPU"),
    key("zero_optimization.offload_optimizer.super_offload", Unused, "updates always overlap computing; offload.optimizer_device says where they run").package(Unused, "updates always overlap computing; offloadd.optimizer_device says where they run"),
    key("zero_optimization.offload_optimizer.cpuadam_cores_perc", Unused, "train.threads says how many cores the run uses").package(Unused, "offloadd.update_threads says how many cores update"),
    key("zero_optimization.cpu_offload", Refused, "true in a file for DeepSpeed is used: as offload_optimizer.device \"cpu\"; elsewhere write zero_optimization.offload_optimizer = {\"device\": \"cpu\"}"),
    key("zero_optimization.cpu_offload_param", Refused, "true in a file for DeepSpeed is used: as offload_param.device \"cpu\"; elsewhere write zero_optimization.offload_param = {\"device\": \"cpu\"}"),
    key("zero_optimization.cpu_offload_params", Refused, "write zero_optimization.offload_param = {\"device\": \"cpu\"}").package(Refused, "write zero_optimization.offload_param = {\"device\": \"cpu\"}"),
    key("zero_optimization.cpu_offload_use_pin_memory", Unused, "host memory is always pinned if there is a GPU, and locked if the system allows it"),
    table("aio", "queue_depth", Used, "I/O operations in flight for each process (offload.iodepth); 64 when left out").package(Unused, "the daemon's default; with offloadd.socket, the daemon's own"),
    table("aio", "block_size intra_op_parallelism thread_count num_threads single_submit overlap_events use_gds", Unused, "one thread drives each daemon's io_uring; an operation is a whole tile"),
    table("zero_optimization.aio", "queue_depth", Used, "like aio.queue_depth; Hugging Face's documentation places the table here, where DeepSpeed ignores it").package(Unused, "as for aio"),
    table("zero_optimization.aio", "block_size intra_op_parallelism thread_count num_threads single_submit overlap_events use_gds", Unused, "as for aio"),
    key("activation_checkpointing.cpu_checkpointing", Used, "true: block inputs are kept in host memory while a GPU computes (offload.activations = \"cpu\"); left out or false: as offload.activations says").package(Used, "true: inputs of blocks that the script checkpoints are kept in host memory while a GPU computes (offloadd.activations = \"cpu\"); left out or false: as offloadd.activations says"),
    table("activation_checkpointing", "partition_activations contiguous_memory_optimization number_checkpoints profile synchronize_checkpoint_boundary", Unused, "each block is recomputed from its input; train.activation_checkpointing says what is kept instead").package(Unused, "the script's checkpointing decides"),
];

/// The answer to a tracker's table in the Python package.
const NO_NETWORK: &str = "offloadd does not use the network: set enabled = false, and upload metrics.jsonl of the run directory, or the files of tensorboard; the script's own calls of the tracker stay";

/// Answers to keys that choose an experiment tracker.
pub(crate) const WANDB: &str = "the trainer does not use the network: set tensorboard.enabled = true, and upload its files with `wandb sync RUN_DIR/tensorboard`";
pub(crate) const MLFLOW: &str = "the trainer does not use the network: upload metrics.jsonl of the run directory with mlflow.log_metrics, as docs/training.md shows, or set tensorboard.enabled = true for TensorBoard";
pub(crate) const TRACKER: &str = "the trainer does not use the network: set tensorboard.enabled = true for TensorBoard, or upload metrics.jsonl of the run directory";

#[rustfmt::skip]
const REPORTS: &[Key] = &[
    key("steps_per_print", Used, "steps between printed lines, if train.log_every is left out").package(Used, "steps between printed lines; a line every 10 s when left out"),
    key("wall_clock_breakdown", Used, "prints the parts of a step's time with each line, and adds them to the monitors; train --trace records them as a timeline; false when left out").package(Used, "adds the parts of a step's time to the monitors"),
    table("flops_profiler", "enabled recompute_fwd_factor profile_step module_depth top_modules detailed output_file", Unused, "trainer plan shows what a step computes, train --trace records a timeline").package(Unused, "python -m offloadd plan says what a step moves, and metrics.jsonl what it took"),
    table("comms_logger", "enabled verbose prof_all debug prof_ops", Unused, "metrics.jsonl has the bytes that each step exchanges").package(Unused, "metrics.jsonl has the times of each step"),
    table("timers", "throughput.enabled throughput.synchronized", Unused, "tokens per second are always printed").package(Unused, "seconds a step are always printed"),
    key("dump_state", Unused, "the resolved settings are always printed").package(Unused, "a start says what the run has"),
    key("memory_breakdown", Unused, "the memory plan is always printed").package(Unused, "a start says how much memory the run takes"),
    key("log_level", Unused, "RUST_LOG sets the log level").package(Unused, "there are few lines, and none to leave out"),
    key("tensorboard.enabled", Used, "writes TensorBoard event files; false when left out"),
    key("tensorboard.output_path", Used, "parent directory of the event files; tensorboard/ in the run directory when left out"),
    key("tensorboard.job_name", Used, "name of the directory of the event files; DeepSpeedJobName when left out"),
    key("csv_monitor.enabled", Used, "writes a CSV file for each scalar, with DeepSpeed's names; false when left out"),
    key("csv_monitor.output_path", Used, "parent directory of the CSV files; csv_monitor/ in the run directory when left out"),
    key("csv_monitor.job_name", Used, "name of the directory of the CSV files; DeepSpeedJobName when left out"),
    table("wandb", "enabled group team project", Refused, WANDB).package(Refused, NO_NETWORK),
    table("comet", "enabled samples_log_interval project workspace api_key experiment_name experiment_key online mode", Refused, TRACKER).package(Refused, NO_NETWORK),
];

#[rustfmt::skip]
const OTHERS: &[Key] = &[
    key("checkpoint.use_node_local_storage", Refused, "leave it out and set train.checkpoints_on_each_node = true: every node then keeps every checkpoint whole").package(Used, "with several nodes that share no directory, every node keeps every checkpoint whole; false when left out"),
    table("checkpoint", "tag_validation load_universal parallel_write.pipeline_stage checkpoint_serialization writer.type writer.io_buffer_size writer.io_buffer_double writer.io_multiplier writer.data_parallel writer.show_statistics writer.decoupled", Unused, "the trainer's commits replace DeepSpeed's checkpoints").package(Unused, "checkpoints have a format of their own and are always complete"),
    table("nebula", "*", Refused, "leave it out: the trainer's commits replace DeepSpeed's checkpoints").package(Refused, "leave it out: commits take the place of DeepSpeed's checkpoints"),
    table("datastates_ckpt", "host_cache_size", Refused, "leave it out: the trainer's commits replace DeepSpeed's checkpoints").package(Refused, "leave it out: commits take the place of DeepSpeed's checkpoints"),
    key("communication_data_type", Unused, "ranks exchange the model's type"),
    key("seq_parallel_communication_data_type", Unused, "sequence-parallel ranks exchange the model's type").package(Unused, "sequence-parallel ranks exchange the model's type"),
    key("disable_allgather", Refused, "leave it out: the stage determines whether ranks gather weights"),
    key("disable_python_gc", Unused, "the trainer does not use Python").package(Unused, "Python's garbage collector is left alone"),
    key("dataloader_drop_last", Unused, "a batch may continue over the end of the data").package(Used, "true: the loader that `initialize` makes of training_data leaves a smaller last batch out; a loader of the script decides for itself; false when left out"),
    key("use_data_before_expert_parallelism", Unused, "there are no experts").package(Unused, "there is no expert parallelism"),
    table("amd_specific", "*", Unused, "the same code runs through HIP on AMD GPUs"),
    table("data_efficiency", "enabled seed data_sampling.enabled data_sampling.num_epochs data_sampling.num_workers data_sampling.pin_memory data_sampling.curriculum_learning data_sampling.curriculum_learning.* data_sampling.dynamic_batching data_sampling.dynamic_batching.* data_routing data_routing.*", Refused, "leave it out: train.seed determines the order of the data").package(Refused, "leave it out: the data comes in the order of the script's loader"),
    table("curriculum_learning", "*", Refused, "leave it out: train.seed determines the order of the data").package(Refused, "leave it out: the data comes in the order of the script's loader"),
    table("progressive_layer_drop", "*", Refused, "leave it out: all layers are always computed").package(Refused, "leave it out: the model's forward says what is computed"),
    table("eigenvalue", "*", Refused, "leave it out: eigenvalues are not computed"),
    table("quantize_training", "*", Refused, "leave it out: it changes the weights"),
    table("weight_quantization", "*", Refused, "leave it out: it changes the weights"),
    table("compression_training", "*", Refused, "leave it out: it changes the weights"),
    table("sparse_attention", "*", Refused, "leave it out: the model's config.json determines the attention").package(Refused, "leave it out: attention is the model's own"),
    table("autotuning", "*", Refused, "leave it out: trainer plan shows what fits and how fast a step can be").package(Refused, "leave it out: python -m offloadd plan says what fits and how fast it can be"),
    table("compile", "*", Unused, "nothing is compiled from Python; it changes no result").package(Unused, "compile blocks in the script (block.compile()) before the model is taken over"),
    table("hybrid_engine", "*", Refused, "leave it out: the trainer does not run inference").package(Refused, "leave it out: the model generates with `generate`, also while it trains"),
    table("elasticity", "*", Refused, "leave it out: a run can be resumed with any number of ranks and keeps train_batch_size"),
    table("tensor_parallel", "*", Refused, "leave it out: ranks divide batches and sequences (train.sequence_parallel), not matrices or layers; zero_optimization.stage divides state among them").package(Refused, "leave it out: all ranks compute the whole model, each on its part of a batch"),
    table("expert_parallel", "*", Refused, "leave it out: there are no experts").package(Refused, "leave it out: all ranks compute the whole model, each on its part of a batch"),
    table("pipeline", "*", Refused, "leave it out: ranks divide batches and sequences (train.sequence_parallel), not matrices or layers; zero_optimization.stage divides state among them").package(Refused, "leave it out: all ranks compute the whole model, each on its part of a batch"),
    key("sequence_parallel_size", Used, "ranks that divide each sequence, if train.sequence_parallel is left out; they count once in train_batch_size").package(Used, "ranks that have parts of one sequence, for attention of transformers; they count once in train_batch_size"),
];
