//! Suggestions for an unknown key: the key of the same meaning, if the name is known from Hugging Face's
//! Trainer, PyTorch or a tool built on them; otherwise the known key with the most similar spelling.

use serde_json::Value;

use super::table::{MLFLOW, TRACKER, WANDB};
use super::{Key, entries, used_keys};
use crate::reader::Reader;

/// Names in other programs and the keys with the same meaning here. A remark follows where the key alone
/// would mislead.
const OTHERS: &[(&str, &str)] = &[
    ("learning_rate", "optimizer.params.lr"),
    ("lr", "optimizer.params.lr"),
    ("max_lr", "optimizer.params.lr"),
    ("betas", "optimizer.params.betas"),
    ("adam_beta1", "optimizer.params.betas"),
    ("adam_beta2", "optimizer.params.betas"),
    ("beta1", "optimizer.params.betas"),
    ("beta2", "optimizer.params.betas"),
    ("eps", "optimizer.params.eps"),
    ("adam_epsilon", "optimizer.params.eps"),
    ("weight_decay", "optimizer.params.weight_decay"),
    ("optim", "optimizer.type"),
    ("optimizer.name", "optimizer.type"),
    ("scheduler.name", "scheduler.type"),
    ("lr_scheduler", "scheduler.type"),
    ("lr_scheduler_type", "scheduler.type"),
    ("num_warmup_steps", "scheduler.params.warmup_steps"),
    ("warmup_iters", "scheduler.params.warmup_steps"),
    ("num_training_steps", "train.steps"),
    ("max_steps", "train.steps"),
    ("max_iters", "train.steps"),
    ("total_steps", "train.steps"),
    ("num_train_epochs", "train.epochs"),
    ("num_epochs", "train.epochs"),
    ("batch_size", "train_batch_size"),
    (
        "per_device_train_batch_size",
        "train_micro_batch_size_per_gpu",
    ),
    ("per_device_batch_size", "train_micro_batch_size_per_gpu"),
    ("micro_batch_size", "train_micro_batch_size_per_gpu"),
    (
        "per_device_eval_batch_size",
        "train.eval_batches (in training batches)",
    ),
    ("max_grad_norm", "gradient_clipping"),
    ("grad_clip", "gradient_clipping"),
    ("clip_grad_norm", "gradient_clipping"),
    ("grad_accumulation", "gradient_accumulation_steps"),
    ("accumulate_grad_batches", "gradient_accumulation_steps"),
    (
        "gradient_checkpointing",
        "train.activation_checkpointing (blocks are recomputed unless it says otherwise)",
    ),
    ("activation_offloading", "offload.activations"),
    ("output_dir", "train.run_dir"),
    ("save_steps", "train.checkpoint_every"),
    ("save_interval", "train.checkpoint_every"),
    ("save_strategy", "train.checkpoint_every"),
    (
        "saves_per_epoch",
        "train.checkpoint_every (\"epoch\", a number of steps, or a time)",
    ),
    ("save_total_limit", "train.checkpoints_kept"),
    ("checkpoint.partner", "train.checkpoints_on_each_node"),
    ("save_on_each_node", "train.checkpoints_on_each_node"),
    ("load_best_model_at_end", "train.checkpoint_best"),
    (
        "metric_for_best_model",
        "train.checkpoint_best (by the validation loss)",
    ),
    ("overwrite_output_dir", "--fresh of the command line"),
    ("run_name", "train.run_dir"),
    ("early_stopping", "train.early_stopping_patience"),
    ("patience", "train.early_stopping_patience"),
    ("logging_steps", "train.log_every"),
    ("log_interval", "train.log_every"),
    ("logging_strategy", "train.log_every"),
    ("eval_steps", "train.eval_every"),
    ("eval_interval", "train.eval_every"),
    ("eval_strategy", "train.eval_every"),
    ("evaluation_strategy", "train.eval_every"),
    (
        "evals_per_epoch",
        "train.eval_every (a number of steps, or \"epoch\")",
    ),
    ("random_seed", "train.seed"),
    ("data_seed", "train.seed"),
    ("num_threads", "train.threads"),
    ("preprocessing_num_workers", "train.threads"),
    ("dataset_num_proc", "train.threads"),
    ("dataset_processes", "train.threads"),
    ("fsdp", "zero_optimization.stage"),
    ("block_size", "train.seq_len"),
    ("max_seq_length", "train.seq_len"),
    ("max_seq_len", "train.seq_len"),
    ("max_length", "train.seq_len"),
    ("sequence_len", "train.seq_len"),
    ("sequence_length", "train.seq_len"),
    ("seq_length", "train.seq_len"),
    ("cutoff_len", "train.seq_len"),
    ("sequence_parallel_degree", "train.sequence_parallel"),
    ("ulysses_sequence_parallel_size", "train.sequence_parallel"),
    ("sp_size", "train.sequence_parallel"),
    ("model_name", "model.path"),
    ("model_name_or_path", "model.path"),
    ("base_model", "model.path"),
    ("pretrained_model_name_or_path", "model.path"),
    (
        "resume_from_checkpoint",
        "--resume-from of the command line",
    ),
    ("dataset", "data.files"),
    ("datasets", "data.files"),
    ("dataset_name", "data.files"),
    ("dataset_path", "data.files"),
    ("train_file", "data.files"),
    ("train_files", "data.files"),
    ("validation_file", "data.eval_files"),
    ("test_datasets", "data.eval_files"),
    ("eval_dataset", "data.eval_files"),
    ("dataset_prepared_path", "data.cache"),
    ("tokenizer_name", "data.tokenizer"),
    ("tokenizer_name_or_path", "data.tokenizer"),
    ("val_set_size", "data.validation_fraction"),
    ("val_size", "data.validation_fraction"),
    (
        "validation_split_percentage",
        "data.validation_fraction (a fraction, not percent)",
    ),
    ("completion_only_loss", "data.loss_on"),
    ("assistant_only_loss", "data.loss_on"),
    ("train_on_inputs", "data.loss_on"),
    ("roles_to_train", "data.loss_on"),
    ("sample_packing", "data.packing"),
    ("eval_sample_packing", "data.packing"),
    ("pad_to_sequence_len", "data.packing"),
    ("group_by_length", "data.packing"),
    ("shuffle_merged_datasets", "data.shuffle"),
    ("neat_packing", "data.cross_document_attention"),
    ("interleave_probs", "data.files (the weight of an entry)"),
    ("max_train_samples", "data.max_samples"),
    ("dataset_format", "data.format"),
    ("template", "data.chat_template"),
    ("tokenizer_type", "data.tokenizer"),
    (
        "special_tokens",
        "data.tokenizer (special tokens come from its files)",
    ),
    ("torch_dtype", "bf16.enabled"),
    ("dtype", "bf16.enabled"),
    ("mixed_precision", "bf16.enabled"),
    ("precision", "bf16.enabled"),
    ("report_to", "tensorboard.enabled"),
    ("use_tensorboard", "tensorboard.enabled"),
    ("logging_dir", "tensorboard.output_path"),
];

/// Starts of names with which other programs choose or configure an experiment tracker, and the answer.
const TRACKERS: &[(&str, &str)] = &[
    ("wandb", WANDB),
    ("mlflow", MLFLOW),
    ("hf_mlflow", MLFLOW),
    ("comet", TRACKER),
    ("swanlab", TRACKER),
    ("neptune", TRACKER),
    ("clearml", TRACKER),
    ("trackio", TRACKER),
    ("aim", TRACKER),
    ("dvclive", TRACKER),
    ("all", TRACKER),
];

/// Returns what to do instead if an unknown `path` asks for an experiment tracker: `report_to = "wandb"` of Hugging
/// Face's Trainer, `use_wandb` and `wandb_project` of axolotl and LLaMA-Factory.
pub(super) fn tracker(path: &str, value: &Value) -> Option<&'static str> {
    let name = last(path).to_ascii_lowercase();
    let answer = |asked: &str| {
        let asked = asked.to_ascii_lowercase();
        let found = TRACKERS.iter().find(|(start, _)| asked.starts_with(start));
        found.map(|(_, answer)| *answer)
    };
    match name.strip_prefix("use_").unwrap_or(&name) {
        "report_to" | "log_with" => match value {
            Value::Array(asked) => asked.iter().filter_map(Value::as_str).find_map(answer),
            value => value.as_str().and_then(answer),
        },
        // `all` and `aim` are common starts of other names.
        name if name.starts_with("a") => None,
        name => answer(name),
    }
}

const LORA: &str = "every parameter is trained: leave it out, and the state goes to host memory or drives; for LoRA use the Python package with PEFT (docs/pytorch.md)";
const ONE_BIT: &str = "it configures the compressed gradients of OneBitAdam and ZeroOneAdam, and this program sends gradients whole: leave it out";
const QUANTIZED: &str = "weights are not quantized: leave it out, and the state goes to host memory or drives; optimizer.moments = \"bf16\" makes it smaller";
const KERNELS: &str = "the trainer has its own kernels for attention and the loss, and documents in one window do not see each other: leave it out";
const LOSS: &str = "the loss is the mean cross-entropy of the tokens that count, without noise or smoothing: leave it out";
const HUB: &str = "the trainer does not use the network: leave it out, and upload the exported directory with `hf upload`";
const STATE: &str = "the whole state is kept in host memory or on drives: leave it out; optimizer.type = \"Lion\" and optimizer.moments = \"bf16\" make it smaller";
const STREAMING: &str =
    "data is read from files and tokenized once, without being in memory as a whole: leave it out";
const STAGES: &str = "the trainer learns texts and answers (SFT, continued pretraining): leave it out for these; for DPO, rewards and RL use TRL on the Python package (docs/pytorch.md)";

/// Starts of names with which axolotl, LLaMA-Factory, TRL and Hugging Face's Trainer ask for a feature, and the answer.
const FEATURES: &[(&str, &str)] = &[
    // Before "freeze", which is LLaMA-Factory's.
    ("freeze_step", ONE_BIT),
    ("var_freeze_step", ONE_BIT),
    ("var_update_scaler", ONE_BIT),
    ("local_step_", ONE_BIT),
    ("cuda_aware", ONE_BIT),
    ("comm_backend_name", ONE_BIT),
    ("lora", LORA),
    ("qlora", LORA),
    ("use_dora", LORA),
    ("use_rslora", LORA),
    ("peft", LORA),
    ("adapter", LORA),
    ("finetuning_type", LORA),
    ("freeze", LORA),
    ("load_in_", QUANTIZED),
    ("quantization", QUANTIZED),
    ("bnb_", QUANTIZED),
    ("attn_implementation", KERNELS),
    ("flash_attn", KERNELS),
    ("flash_attention", KERNELS),
    ("sdp_attention", KERNELS),
    ("xformers", KERNELS),
    ("liger", KERNELS),
    ("use_liger", KERNELS),
    ("enable_liger", KERNELS),
    ("cut_cross_entropy", KERNELS),
    ("torch_compile", KERNELS),
    ("neftune", LOSS),
    ("label_smoothing", LOSS),
    ("push_to_hub", HUB),
    ("hub_", HUB),
    ("use_galore", STATE),
    ("use_badam", STATE),
    ("use_apollo", STATE),
    ("streaming", STREAMING),
    ("rl", STAGES),
    ("dpo", STAGES),
    ("pref_", STAGES),
];

/// Returns what to do instead if an unknown `path` asks for a feature of another program.
pub(super) fn feature(path: &str) -> Option<&'static str> {
    let names = path.split('.').map(str::to_ascii_lowercase);
    let starts = |name: &str| {
        let found = FEATURES.iter().find(|(start, _)| {
            let rest = name.strip_prefix(start);
            // `rl` is no start of `rlimit`.
            rest.is_some_and(|rest| start.len() > 3 || rest.is_empty() || rest.starts_with('_'))
        });
        found.map(|(_, answer)| *answer)
    };
    names.into_iter().find_map(|name| starts(&name))
}

/// Names that are less similar than this are considered different words.
const ALIKE_MIN: f64 = 0.7;

/// Returns the key of `reader` that was probably meant by the unknown `path`.
pub(crate) fn suggestion(path: &str, reader: Reader) -> Option<String> {
    if reader == Reader::Package && is_nearly(path, "offloadd") {
        return Some("offloadd".into());
    }
    let used = used_keys(reader);
    let name = last(path).to_ascii_lowercase().replace('-', "_");
    // Exactly one other table has a key of this name, for example `steps`.
    let named: Vec<&String> = used.iter().filter(|used| last(used) == name).collect();
    let has = |ours: &str| {
        let key = ours.split(' ').next().unwrap_or_default();
        reader == Reader::Trainer || used.iter().any(|used| used == key)
    };
    let known =
        (OTHERS.iter()).find(|(other, ours)| (*other == name || *other == path) && has(ours));
    match (named.as_slice(), known) {
        (_, Some((_, ours))) => Some((*ours).to_owned()),
        ([one], None) => Some((*one).clone()),
        _ => nearest(path, &used),
    }
}

/// Returns whether `name` is a misspelling of `word`, one or two letters away.
pub(crate) fn is_nearly(name: &str, word: &str) -> bool {
    (1..=2).contains(&strsim::damerau_levenshtein(name, word))
}

fn last(path: &str) -> &str {
    path.rsplit('.').next().unwrap_or("")
}

/// Returns the known key most similar to `path`, if any is similar enough. A key of the same name in another
/// table also counts as similar.
fn nearest(path: &str, used: &[String]) -> Option<String> {
    let near = |known: &str| {
        let whole = strsim::jaro_winkler(path, known);
        let name = 0.99 * strsim::normalized_damerau_levenshtein(last(path), last(known));
        let table = path.rsplit_once('.').map(|(table, _)| table)
            == known.rsplit_once('.').map(|(table, _)| table);
        // Two names that share only a prefix are different names.
        let whole = if name > 0.5 { 0.9 * whole } else { 0.0 };
        name.max(whole) + if table { 0.05 } else { 0.0 }
    };
    let known = used.iter().cloned().chain(entries().flat_map(Key::paths));
    known
        .map(|known| (near(&known), known))
        .filter(|(near, _)| *near > ALIKE_MIN)
        .max_by(|a, b| a.0.total_cmp(&b.0))
        .map(|(_, known)| known)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn names_of_other_programs_are_suggested_by_meaning() {
        let used = used_keys(Reader::Trainer);
        for (other, ours) in OTHERS {
            let key = ours.split(' ').next().unwrap();
            assert!(
                key.starts_with("--") || used.iter().any(|used| used == key),
                "{other}: {key}"
            );
            assert!(!used.iter().any(|used| used == other), "{other} is ours");
        }
        for (name, expected) in [
            ("learning_rate", "optimizer.params.lr"),
            ("train.learning-rate", "optimizer.params.lr"),
            (
                "per_device_train_batch_size",
                "train_micro_batch_size_per_gpu",
            ),
            ("train.max_grad_norm", "gradient_clipping"),
            ("seq_len", "train.seq_len"),
            ("optimizer.name", "optimizer.type"),
            ("train.stepz", "train.steps"),
        ] {
            assert_eq!(
                suggestion(name, Reader::Trainer).as_deref(),
                Some(expected),
                "{name}"
            );
        }
        assert_eq!(suggestion("train.qqq", Reader::Trainer), None);
    }

    #[test]
    fn features_of_other_programs_are_answered_with_what_to_do() {
        for (key, part) in [
            ("lora_r", "Python package with PEFT"),
            ("train.peft.lora_alpha", "Python package with PEFT"),
            ("load_in_4bit", "not quantized"),
            ("attn_implementation", "its own kernels"),
            ("rl", "for DPO"),
            ("rl_beta", "for DPO"),
            ("neftune_noise_alpha", "without noise"),
            ("hub_model_id", "`hf upload`"),
            ("freeze_trainable_layers", "Python package with PEFT"),
            ("optimizer.params.freeze_step", "compressed gradients"),
            ("optimizer.params.cuda_aware", "compressed gradients"),
        ] {
            let answer = feature(key);
            assert!(
                answer.is_some_and(|text| text.contains(part)),
                "{key}: {answer:?}"
            );
        }
        for key in ["rlimit", "learning_rate", "train.seq_length"] {
            assert_eq!(feature(key), None, "{key}");
        }
        // No key of ours begins like one of them.
        for used in used_keys(Reader::Trainer) {
            assert_eq!(feature(&used), None, "{used}");
        }
    }

    #[test]
    fn experiment_trackers_are_answered_with_what_reads_the_runs_files() {
        for (key, value, part) in [
            ("train.report_to", json!("wandb"), "`wandb sync "),
            ("report_to", json!(["tensorboard", "wandb"]), "`wandb sync "),
            ("report_to", json!("mlflow"), "mlflow.log_metrics"),
            ("report_to", json!("all"), "tensorboard.enabled = true"),
            ("wandb_project", json!("chat"), "`wandb sync "),
            ("use_mlflow", json!(true), "mlflow.log_metrics"),
            ("use_swanlab", json!(true), "metrics.jsonl"),
        ] {
            let answer = tracker(key, &value);
            assert!(
                answer.is_some_and(|text| text.contains(part)),
                "{key}: {answer:?}"
            );
        }
        // These ask for what the trainer has, or for nothing.
        for (key, value) in [
            ("report_to", json!("tensorboard")),
            ("report_to", json!("none")),
            ("use_tensorboard", json!(true)),
            ("allow_tf32", json!(true)),
        ] {
            assert_eq!(tracker(key, &value), None, "{key}");
        }
    }
}
