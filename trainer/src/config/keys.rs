//! Which keys a run file may have: the ones we read, and DeepSpeed's that we do not.
//!
//! Nothing is ignored in silence. A key is used, or it is DeepSpeed's and has no effect here (named before the start), or it
//! asks for something we do not do (refused unless it is switched off), or it is unknown (refused with the nearest known key).

use serde_json::Value;

use super::{SettingsError, toml::ConfigToml};

/// DeepSpeed keys that steer machinery this trainer does not have. Each stands for everything below it, too.
const NO_EFFECT: &[(&str, &str)] = &[
    (
        "steps_per_print",
        "train.log_every says how often a line is printed",
    ),
    (
        "wall_clock_breakdown",
        "metrics.jsonl has each step's times",
    ),
    ("dump_state", "the resolved settings are always printed"),
    ("memory_breakdown", "the memory plan is always printed"),
    (
        "communication_data_type",
        "one process has nobody to talk to",
    ),
    ("prescale_gradients", "one process has nothing to reduce"),
    (
        "gradient_predivide_factor",
        "one process has nothing to reduce",
    ),
    (
        "dataloader_drop_last",
        "the windows of a text are whole by construction",
    ),
    ("zero_allow_untested_optimizer", "there is one optimizer"),
    ("zero_force_ds_cpu_optimizer", "there is one optimizer"),
    (
        "activation_checkpointing",
        "train.keep says what of a block is not computed again",
    ),
    ("flops_profiler", "metrics.jsonl has each step's times"),
    ("comms_logger", "one process has nobody to talk to"),
    ("timers", "metrics.jsonl has each step's times"),
    ("checkpoint", "commits replace DeepSpeed's checkpoints"),
    (
        "aio",
        "offload.iodepth and the daemon's own settings take its place",
    ),
    (
        "bf16.immediate_grad_update",
        "gradients are summed in fp32 and rounded once",
    ),
    (
        "bf16.check_grad_overflow",
        "a gradient norm that is not finite always stops the run",
    ),
    ("optimizer.params.torch_adam", "there is one optimizer"),
    (
        "scheduler.params.last_batch_iteration",
        "the position is resumed with the run",
    ),
    (
        "zero_optimization.contiguous_gradients",
        "a unit's gradients are always one buffer",
    ),
    (
        "zero_optimization.reduce_scatter",
        "one process has nothing to reduce",
    ),
    (
        "zero_optimization.reduce_bucket_size",
        "one process has nothing to reduce",
    ),
    (
        "zero_optimization.use_multi_rank_bucket_allreduce",
        "one process has nothing to reduce",
    ),
    (
        "zero_optimization.allgather_partitions",
        "units are gathered tile by tile",
    ),
    (
        "zero_optimization.allgather_bucket_size",
        "units are gathered tile by tile",
    ),
    (
        "zero_optimization.overlap_comm",
        "moving always overlaps computing",
    ),
    (
        "zero_optimization.load_from_fp32_weights",
        "the master is always kept exactly",
    ),
    (
        "zero_optimization.sub_group_size",
        "offload.tile_elems is the size of an update",
    ),
    (
        "zero_optimization.stage3_prefetch_bucket_size",
        "offload.staging_bytes bounds the read-ahead",
    ),
    (
        "zero_optimization.stage3_param_persistence_threshold",
        "offload.resident_share says what stays",
    ),
    (
        "zero_optimization.stage3_model_persistence_threshold",
        "offload.resident_share says what stays",
    ),
    (
        "zero_optimization.stage3_max_live_parameters",
        "one unit is gathered at a time",
    ),
    (
        "zero_optimization.stage3_max_reuse_distance",
        "the step's order is known, nothing is guessed",
    ),
    (
        "zero_optimization.stage3_module_granularity_threshold",
        "a unit is a transformer block",
    ),
    (
        "zero_optimization.stage3_use_all_reduce_for_fetch_params",
        "one process has nobody to talk to",
    ),
    (
        "zero_optimization.stage3_allgather_sequential",
        "one process has nobody to talk to",
    ),
    (
        "zero_optimization.ignore_unused_parameters",
        "every parameter is used",
    ),
    (
        "zero_optimization.round_robin_gradients",
        "one process has nothing to reduce",
    ),
    (
        "zero_optimization.memory_efficient_linear",
        "each block is always recomputed from its input",
    ),
    (
        "zero_optimization.pipeline_loading_checkpoint",
        "commits replace DeepSpeed's checkpoints",
    ),
    (
        "zero_optimization.override_module_apply",
        "there are no Python modules",
    ),
    (
        "zero_optimization.log_trace_cache_warnings",
        "the step's order is known, nothing is traced",
    ),
    (
        "zero_optimization.enable_sanity_checks",
        "our own checks are always on",
    ),
    (
        "zero_optimization.offload_param.buffer_count",
        "offload.staging_bytes bounds the buffers",
    ),
    (
        "zero_optimization.offload_param.buffer_size",
        "offload.staging_bytes bounds the buffers",
    ),
    (
        "zero_optimization.offload_param.max_in_cpu",
        "offload.resident_share says what stays",
    ),
    (
        "zero_optimization.offload_param.pin_memory",
        "the daemon's memory is locked where it is allowed",
    ),
    (
        "zero_optimization.offload_optimizer.buffer_count",
        "offload.staging_bytes bounds the buffers",
    ),
    (
        "zero_optimization.offload_optimizer.pin_memory",
        "the daemon's memory is locked where it is allowed",
    ),
    (
        "zero_optimization.offload_optimizer.pipeline_read",
        "reading always overlaps updating",
    ),
    (
        "zero_optimization.offload_optimizer.pipeline_write",
        "writing always overlaps updating",
    ),
    (
        "zero_optimization.offload_optimizer.fast_init",
        "tiles are written once at the start",
    ),
];

/// DeepSpeed keys that ask for what is not built, with what to do instead. Each stands for everything below it, too.
const NOT_SUPPORTED: &[(&str, &str)] = &[
    (
        "fp16",
        "use bf16.enabled = true, or leave both out for fp32",
    ),
    ("amp", "use bf16.enabled = true"),
    ("torch_autocast", "use bf16.enabled = true"),
    (
        "data_types",
        "gradients are summed in fp32 and stored in the model's type",
    ),
    ("tensorboard", "read metrics.jsonl in the run folder"),
    ("wandb", "read metrics.jsonl in the run folder"),
    ("csv_monitor", "read metrics.jsonl in the run folder"),
    ("comet", "read metrics.jsonl in the run folder"),
    ("nebula", "commits replace DeepSpeed's checkpoints"),
    ("datastates_ckpt", "commits replace DeepSpeed's checkpoints"),
    ("data_efficiency", "leave it out"),
    ("curriculum_learning", "leave it out"),
    ("compile", "leave it out"),
    ("hybrid_engine", "leave it out"),
    ("elasticity", "leave it out"),
    ("tensor_parallel", "leave it out"),
    ("expert_parallel", "leave it out"),
    ("gradient_allreduce_op", "leave it out: the mean is taken"),
    ("sparse_gradients", "leave it out"),
    (
        "bf16.bf16_master_weights_and_grads",
        "the split master is exact and as small",
    ),
    ("bf16.bf16_optimizer_states", "moments are kept in fp32"),
    ("optimizer.legacy_fusion", "leave it out"),
    (
        "zero_optimization.cpu_offload",
        "write offload_optimizer.device = \"cpu\"",
    ),
    (
        "zero_optimization.cpu_offload_params",
        "write offload_param.device = \"cpu\"",
    ),
    (
        "zero_optimization.cpu_offload_use_pin_memory",
        "leave it out",
    ),
    ("zero_optimization.elastic_checkpoint", "leave it out"),
    ("zero_optimization.legacy_stage1", "leave it out"),
    (
        "zero_optimization.stage3_gather_16bit_weights_on_model_save",
        "leave it out",
    ),
    ("zero_optimization.zero_hpz_partition_size", "leave it out"),
    (
        "zero_optimization.zero_quantized_weights",
        "leave it out: it changes the weights",
    ),
    (
        "zero_optimization.zero_quantized_nontrainable_weights",
        "leave it out: it changes the weights",
    ),
    (
        "zero_optimization.zero_quantized_gradients",
        "leave it out: it changes the gradients",
    ),
    ("zero_optimization.zeropp_loco_param", "leave it out"),
    ("zero_optimization.mics_shard_size", "leave it out"),
    (
        "zero_optimization.mics_hierarchical_params_gather",
        "leave it out",
    ),
    (
        "zero_optimization.zenflow",
        "updates overlap computing without changing the result: leave it out",
    ),
    (
        "zero_optimization.save_muon_momentum_buffer_in_memory",
        "leave it out",
    ),
    ("zero_optimization.leaf_module", "leave it out"),
    (
        "zero_optimization.offload_optimizer.ratio",
        "use offload.resident_share",
    ),
    (
        "zero_optimization.offload_optimizer.super_offload",
        "leave it out",
    ),
    (
        "zero_optimization.offload_optimizer.cpuadam_cores_perc",
        "use train.threads",
    ),
];

/// Checks every key of a run file. Answers the notes about keys without effect.
///
/// # Errors
/// The first key that is unknown or not supported, with its path.
pub(super) fn check(file: &Value) -> Result<Vec<String>, SettingsError> {
    let used = used_keys();
    let mut notes = Vec::new();
    walk("", file, &used, &mut notes)?;
    Ok(notes)
}

/// The paths of all keys that are read, tables included.
fn used_keys() -> Vec<String> {
    fn collect(prefix: &str, value: &Value, paths: &mut Vec<String>) {
        let Value::Object(table) = value else { return };
        for (key, value) in table {
            let path = join(prefix, key);
            collect(&path, value, paths);
            paths.push(path);
        }
    }
    let all = serde_json::to_value(ConfigToml::default()).expect("the settings are plain data");
    let mut paths = Vec::new();
    collect("", &all, &mut paths);
    paths
}

fn walk(
    prefix: &str,
    value: &Value,
    used: &[String],
    notes: &mut Vec<String>,
) -> Result<(), SettingsError> {
    let Value::Object(table) = value else {
        return Ok(());
    };
    for (key, value) in table {
        let path = join(prefix, key);
        if used.contains(&path) {
            walk(&path, value, used, notes)?;
        } else if let Some((_, why)) = NO_EFFECT.iter().find(|(known, _)| *known == path) {
            notes.push(format!("{path} has no effect here: {why}"));
        } else if let Some((_, instead)) = NOT_SUPPORTED.iter().find(|(known, _)| *known == path) {
            if !is_off(value) {
                return Err(SettingsError::NotSupported { key: path, instead });
            }
            notes.push(format!("{path} is off, as it must be: it is not supported"));
        } else {
            let nearest = nearest(&path, used);
            return Err(SettingsError::UnknownKey { key: path, nearest });
        }
    }
    Ok(())
}

/// Switched off in DeepSpeed's ways: false, null, an empty table, a table with `enabled = false`, or the neutral number.
fn is_off(value: &Value) -> bool {
    match value {
        Value::Null | Value::Bool(false) => true,
        Value::Number(number) => number.as_f64() == Some(1.0) || number.as_f64() == Some(-1.0),
        Value::Object(table) => {
            table.is_empty() || table.get("enabled") == Some(&Value::Bool(false))
        }
        _ => false,
    }
}

/// The known key that looks most like `path`, if one does. Keys of the same name in another table count as near.
fn nearest(path: &str, used: &[String]) -> Option<String> {
    let name = |path: &str| path.rsplit('.').next().unwrap_or("").to_owned();
    let near = |known: &str| {
        let whole = strsim::jaro_winkler(path, known);
        let last = 0.99 * strsim::normalized_damerau_levenshtein(&name(path), &name(known));
        let table = path.rsplit_once('.').map(|(table, _)| table)
            == known.rsplit_once('.').map(|(table, _)| table);
        last.max(0.9 * whole) + if table { 0.05 } else { 0.0 }
    };
    let known = used
        .iter()
        .map(String::as_str)
        .chain(NO_EFFECT.iter().map(|(known, _)| *known));
    known
        .map(|known| (near(known), known))
        .filter(|(near, _)| *near > 0.7)
        .max_by(|a, b| a.0.total_cmp(&b.0))
        .map(|(_, known)| known.to_owned())
}

/// The path of `key` in the table `prefix`.
pub(super) fn join(prefix: &str, key: &str) -> String {
    if prefix.is_empty() {
        key.to_owned()
    } else {
        format!("{prefix}.{key}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn unknown(file: Value) -> (String, Option<String>) {
        match check(&file) {
            Err(SettingsError::UnknownKey { key, nearest }) => (key, nearest),
            other => panic!("expected an unknown key, got {other:?}"),
        }
    }

    #[test]
    fn an_unknown_key_is_named_with_its_path_and_the_nearest_one() {
        let (key, nearest) = unknown(json!({"optimizer": {"params": {"weight_decai": 0.1}}}));
        assert_eq!(key, "optimizer.params.weight_decai");
        assert_eq!(nearest.as_deref(), Some("optimizer.params.weight_decay"));
        let (_, nearest) = unknown(json!({"train_micro_batch_size": 4}));
        assert_eq!(nearest.as_deref(), Some("train_micro_batch_size_per_gpu"));
        let (_, nearest) = unknown(json!({"seq_len": 4}));
        assert_eq!(nearest.as_deref(), Some("train.seq_len"));
        let (_, nearest) = unknown(json!({"qqq": 4}));
        assert_eq!(nearest, None);
    }

    #[test]
    fn a_deepspeed_key_we_do_not_read_is_never_silent() {
        let notes = check(&json!({"aio": {"block_size": 1}, "steps_per_print": 10})).unwrap();
        assert_eq!(notes.len(), 2);
        assert!(check(&json!({"fp16": {"enabled": true}})).is_err());
        assert_eq!(
            check(&json!({"fp16": {"enabled": false}})).unwrap().len(),
            1
        );
    }

    #[test]
    fn no_key_is_in_two_lists() {
        let used = used_keys();
        let mut seen = std::collections::HashSet::new();
        let listed = NO_EFFECT
            .iter()
            .chain(NOT_SUPPORTED)
            .map(|(key, _)| (*key).to_owned());
        for key in used.into_iter().chain(listed) {
            assert!(seen.insert(key.clone()), "{key} is listed twice");
        }
    }
}
