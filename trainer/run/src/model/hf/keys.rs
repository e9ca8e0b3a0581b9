//! All keys that Hugging Face's `config.json` may have for the supported architectures, and their meaning
//! here.
//!
//! Keys in none of these lists are not read by Hugging Face's models either; they are ignored and reported.

use serde_json::{Value, json};

use crate::model::Architecture;

/// Other names of keys by architecture: (architecture's name, common name).
pub(super) fn aliases(architecture: Architecture) -> &'static [(&'static str, &'static str)] {
    match architecture {
        Architecture::Gpt2 => &[
            ("n_embd", "hidden_size"),
            ("n_positions", "max_position_embeddings"),
            ("n_head", "num_attention_heads"),
            ("n_layer", "num_hidden_layers"),
            ("n_inner", "intermediate_size"),
            ("layer_norm_epsilon", "rms_norm_eps"),
            ("attn_pdrop", "attention_dropout"),
        ],
        _ => &[],
    }
}

/// Keys that are read, under the common names, with Hugging Face's default for a missing key; `Null` if there
/// is none. Keys whose default depends on others are in `mod.rs`.
pub(super) fn read(architecture: Architecture) -> Vec<(&'static str, Value)> {
    let mut keys = vec![
        ("model_type", json!("llama")),
        ("vocab_size", Value::Null),
        ("hidden_size", Value::Null),
        ("intermediate_size", Value::Null),
        ("num_hidden_layers", Value::Null),
        ("num_attention_heads", Value::Null),
        ("initializer_range", json!(0.02)),
        ("attention_dropout", json!(0.0)),
        ("layer_types", Value::Null),
        ("pad_token_id", Value::Null),
    ];
    if architecture == Architecture::Gpt2 {
        keys.extend([
            ("max_position_embeddings", json!(1024)),
            ("rms_norm_eps", json!(1e-5)),
            ("tie_word_embeddings", json!(true)),
            ("embd_pdrop", json!(0.1)),
            ("resid_pdrop", json!(0.1)),
        ]);
        keys.retain(|(key, _)| *key != "attention_dropout");
        keys.push(("attention_dropout", json!(0.1)));
        return keys;
    }
    keys.extend([
        ("num_key_value_heads", Value::Null),
        ("rms_norm_eps", json!(1e-6)),
        ("tie_word_embeddings", json!(false)),
        ("rope_theta", json!(10000.0)),
        ("rope_scaling", Value::Null),
    ]);
    keys.extend(match architecture {
        Architecture::Llama => vec![
            ("max_position_embeddings", json!(2048)),
            ("head_dim", Value::Null),
            ("attention_bias", json!(false)),
            ("mlp_bias", json!(false)),
        ],
        Architecture::Mistral => vec![
            ("max_position_embeddings", json!(4096 * 32)),
            ("head_dim", Value::Null),
            ("sliding_window", json!(4096)),
        ],
        Architecture::Qwen2 => vec![
            ("max_position_embeddings", json!(32768)),
            ("head_dim", Value::Null),
            ("use_sliding_window", json!(false)),
            ("sliding_window", json!(4096)),
            ("max_window_layers", json!(28)),
        ],
        Architecture::Qwen3 => vec![
            ("max_position_embeddings", json!(32768)),
            ("head_dim", json!(128)),
            ("attention_bias", json!(false)),
            ("use_sliding_window", json!(false)),
            ("sliding_window", json!(4096)),
            ("max_window_layers", json!(28)),
        ],
        Architecture::Gpt2 => unreachable!("GPT-2 is handled above"),
    });
    keys
}

/// Keys that would change the computation, with the only supported values: (key, values, what is supported).
/// `null` and a missing key are always accepted.
pub(super) fn fixed(architecture: Architecture) -> Vec<(&'static str, Vec<Value>, &'static str)> {
    let off = || vec![json!(false)];
    let mut keys = vec![
        (
            "quantization_config",
            vec![],
            "only full-precision weights are; use the model that this one was made from",
        ),
        (
            "is_encoder_decoder",
            off(),
            "only models with a single decoder are",
        ),
        (
            "add_cross_attention",
            off(),
            "only models with a single decoder are",
        ),
        ("pruned_heads", vec![json!({})], "pruned heads are not"),
        (
            "is_causal",
            vec![json!(true)],
            "only models in which a token sees earlier ones are",
        ),
        (
            "per_layer_config",
            vec![json!({})],
            "only models whose layers are equal are",
        ),
        (
            "partial_rotary_factor",
            vec![json!(1.0), json!(1)],
            "only rotation of whole heads is",
        ),
    ];
    keys.extend(match architecture {
        Architecture::Gpt2 => vec![
            (
                "activation_function",
                vec![json!("gelu_new"), json!("gelu_pytorch_tanh")],
                "only \"gelu_new\" is",
            ),
            ("scale_attn_weights", vec![json!(true)], "only true is"),
            ("scale_attn_by_inverse_layer_idx", off(), "only false is"),
            ("reorder_and_upcast_attn", off(), "only false is"),
        ],
        _ => vec![(
            "hidden_act",
            vec![json!("silu"), json!("swish")],
            "only \"silu\" is",
        )],
    });
    keys
}

/// Keys that transformers does not read in models of this architecture.
pub(super) fn of_others(architecture: Architecture) -> &'static [&'static str] {
    match architecture {
        Architecture::Gpt2 => &[
            "head_dim",
            "rope_parameters",
            "rope_theta",
            "sliding_window",
        ],
        Architecture::Llama => &["sliding_window"],
        _ => &[],
    }
}

/// Keys without effect on training here: origin of the file; text generation; heads of other tasks; ids of
/// special tokens (the data determines the contents of a batch); other implementations of the same
/// computation. A test compares them with what transformers computes (`tests/fixtures/hf/config_keys.py`).
pub(super) const WITHOUT_EFFECT: &[&str] = &[
    // Origin of the file.
    "_name_or_path",
    "architectures",
    "auto_map",
    "dtype",
    "torch_dtype",
    "torchscript",
    "transformers_version",
    "unsloth_fixed",
    "unsloth_version",
    // Text generation.
    "bad_words_ids",
    "begin_suppress_tokens",
    "decoder_start_token_id",
    "diversity_penalty",
    "do_sample",
    "early_stopping",
    "encoder_no_repeat_ngram_size",
    "exponential_decay_length_penalty",
    "forced_bos_token_id",
    "forced_eos_token_id",
    "length_penalty",
    "max_length",
    "min_length",
    "no_repeat_ngram_size",
    "num_beam_groups",
    "num_beams",
    "num_return_sequences",
    "remove_invalid_values",
    "repetition_penalty",
    "suppress_tokens",
    "temperature",
    "top_k",
    "top_p",
    "typical_p",
    "use_cache",
    // Other tasks.
    "classifier_dropout",
    "hidden_dropout",
    "token_classification_bias",
    "finetuning_task",
    "id2label",
    "label2id",
    "num_labels",
    "problem_type",
    "summary_activation",
    "summary_first_dropout",
    "summary_last_dropout",
    "summary_proj_to_labels",
    "summary_type",
    "summary_use_proj",
    "task_specific_params",
    // Special tokens.
    "bos_token_id",
    "cls_token_id",
    "eos_token_id",
    "prefix",
    "sep_token_id",
    "tokenizer_class",
    // Other implementations, or the number of rows of a table that older versions stored.
    "attention_chunk_size",
    "attn_implementation",
    "experts_implementation",
    "logits_mup_width_multiplier",
    "mtp_hidden_states_first",
    "unpadded_vocab_size",
    "_attn_implementation",
    "chunk_size_feed_forward",
    "cross_attention_hidden_size",
    "gradient_checkpointing",
    "is_decoder",
    "n_ctx",
    "output_attentions",
    "output_hidden_states",
    "pretraining_tp",
    "return_dict",
    "tf_legacy_loss",
    "tie_encoder_decoder",
    "use_bfloat16",
];
