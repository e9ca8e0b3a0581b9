//! Writes the `config.json` from which Hugging Face's library builds the model.
//!
//! A model that came with a file keeps it, including keys that are not read here. Keys that the run's
//! configuration changed are overwritten.

use serde_json::{Map, Value, json};

use super::{HfModel, keys};
use crate::model::{Architecture, ModelConfig, RopeScaling};

/// Returns the keys of `config`'s file for weights in `dtype` ("float32"). `original` is the file that the
/// model came with.
pub fn config_json(
    config: &ModelConfig,
    dtype: &str,
    original: Option<Map<String, Value>>,
) -> Map<String, Value> {
    let mut table = original.unwrap_or_default();
    let says_so = |table: &Map<String, Value>| {
        let model = HfModel::read(Some(table.clone()), Map::new());
        model.is_ok_and(|model| model.config == *config)
    };
    if table.is_empty() || !says_so(&table) {
        // Only one of two names of a key may remain, and only one table of the rotary embedding.
        for (theirs, common) in keys::aliases(config.architecture) {
            table.remove(*theirs);
            table.remove(*common);
        }
        for key in [
            "rope_parameters",
            "original_max_position_embeddings",
            "layer_types",
        ] {
            table.remove(key);
        }
        table.extend(model_keys(config));
    }
    assert!(says_so(&table), "the written keys describe the model");
    if !table.contains_key("architectures") {
        table.insert("architectures".into(), json!([config.architecture.class()]));
    }
    // The name that all versions of the library know, unless the file has the newer one.
    let key = if table.contains_key("dtype") {
        "dtype"
    } else {
        "torch_dtype"
    };
    table.insert(key.into(), dtype.into());
    table
}

fn model_keys(config: &ModelConfig) -> Map<String, Value> {
    let mut keys = Map::new();
    let mut set = |key: &str, value: Value| {
        keys.insert(key.to_owned(), value);
    };
    set("model_type", json!(config.architecture.model_type()));
    set("vocab_size", json!(config.vocab_size));
    set("initializer_range", json!(config.initializer_range));
    set("tie_word_embeddings", json!(config.tied));
    if config.architecture == Architecture::Gpt2 {
        set("n_embd", json!(config.hidden_size));
        set("n_inner", json!(config.intermediate_size));
        set("n_layer", json!(config.layers));
        set("n_head", json!(config.heads));
        set("n_positions", json!(config.max_position_embeddings));
        set("layer_norm_epsilon", json!(config.norm_eps));
        set("activation_function", json!("gelu_new"));
        return keys;
    }
    set("hidden_size", json!(config.hidden_size));
    set("intermediate_size", json!(config.intermediate_size));
    set("num_hidden_layers", json!(config.layers));
    set("num_attention_heads", json!(config.heads));
    set("num_key_value_heads", json!(config.kv_heads));
    set("rms_norm_eps", json!(config.norm_eps));
    set("rope_theta", json!(config.rope_theta));
    set("rope_scaling", rope_scaling(config));
    set(
        "max_position_embeddings",
        json!(config.max_position_embeddings),
    );
    if config.pad_token_id.is_some() {
        set("pad_token_id", json!(config.pad_token_id));
    }
    set("hidden_act", json!("silu"));
    // Qwen3's default is 128.
    if config.head_dim.is_some() || config.architecture == Architecture::Qwen3 {
        set("head_dim", json!(config.head_dim));
    }
    if matches!(
        config.architecture,
        Architecture::Llama | Architecture::Qwen3
    ) {
        set("attention_bias", json!(config.biases.qkv));
    }
    if config.architecture == Architecture::Llama {
        set("mlp_bias", json!(config.biases.mlp));
    }
    let window = config.sliding_window;
    let tokens = window.map(|window| window.tokens);
    match config.architecture {
        Architecture::Mistral => set("sliding_window", json!(tokens)),
        Architecture::Qwen2 | Architecture::Qwen3 => {
            set("use_sliding_window", json!(window.is_some()));
            set("sliding_window", json!(tokens));
            let first = window.map_or(config.layers, |window| window.first_layer);
            set("max_window_layers", json!(first));
        }
        Architecture::Llama | Architecture::Gpt2 => {}
    }
    keys
}

fn rope_scaling(config: &ModelConfig) -> Value {
    match config.rope_scaling {
        None => Value::Null,
        Some(RopeScaling::Linear { factor }) => json!({"rope_type": "linear", "factor": factor}),
        Some(RopeScaling::Dynamic { factor }) => json!({"rope_type": "dynamic", "factor": factor}),
        Some(RopeScaling::Llama3 {
            factor,
            low_freq_factor,
            high_freq_factor,
            original_max_position_embeddings,
        }) => json!({
            "rope_type": "llama3",
            "factor": factor,
            "low_freq_factor": low_freq_factor,
            "high_freq_factor": high_freq_factor,
            "original_max_position_embeddings": length(original_max_position_embeddings),
        }),
        Some(RopeScaling::Yarn(yarn)) => {
            let mut keys = json!({
                "rope_type": "yarn",
                "factor": yarn.factor,
                "original_max_position_embeddings": length(yarn.original_max_position_embeddings),
                "beta_fast": yarn.beta_fast,
                "beta_slow": yarn.beta_slow,
                "truncate": yarn.truncate,
            });
            for (key, value) in [
                ("attention_factor", yarn.attention_factor),
                ("mscale", yarn.mscale),
                ("mscale_all_dim", yarn.mscale_all_dim),
            ] {
                if let Some(value) = value {
                    keys[key] = value.into();
                }
            }
            keys
        }
    }
}

/// A number of tokens, without a decimal point.
fn length(tokens: f64) -> Value {
    if tokens.fract() == 0.0 {
        json!(tokens as u64)
    } else {
        json!(tokens)
    }
}

#[cfg(test)]
mod tests {
    //! The error that these tests find: the file describes another model than the weights beside it.
    use super::*;
    use crate::model::{Window, Yarn};

    fn models() -> Vec<ModelConfig> {
        let mut models = Vec::new();
        for architecture in Architecture::ALL {
            for tied in [false, true] {
                models.push(ModelConfig {
                    architecture: *architecture,
                    vocab_size: 300,
                    hidden_size: 64,
                    intermediate_size: 100,
                    layers: 4,
                    heads: 4,
                    kv_heads: if *architecture == Architecture::Gpt2 {
                        4
                    } else {
                        2
                    },
                    head_dim: (*architecture == Architecture::Qwen3).then_some(32),
                    norm_eps: 1e-5,
                    biases: architecture.form().biases,
                    tied,
                    ..ModelConfig::default()
                });
            }
        }
        let of = |architecture: Architecture| {
            let mut found = models.iter().filter(|m| m.architecture == architecture);
            found.next().expect("one of each").clone()
        };
        let mut llama = of(Architecture::Llama);
        llama.rope_theta = 5e5;
        llama.rope_scaling = Some(RopeScaling::Llama3 {
            factor: 8.0,
            low_freq_factor: 1.0,
            high_freq_factor: 4.0,
            original_max_position_embeddings: 8192.0,
        });
        (llama.biases.qkv, llama.biases.out, llama.biases.mlp) = (true, true, true);
        let mut mistral = of(Architecture::Mistral);
        let mut qwen = of(Architecture::Qwen2);
        for (model, first_layer) in [(&mut mistral, 0), (&mut qwen, 2)] {
            let tokens = 16;
            model.sliding_window = Some(Window {
                tokens,
                first_layer,
            });
        }
        let plain = Yarn {
            factor: 2.5,
            original_max_position_embeddings: 1000.5,
            attention_factor: None,
            beta_fast: 32.0,
            beta_slow: 1.0,
            mscale: None,
            mscale_all_dim: None,
            truncate: true,
        };
        let full = Yarn {
            attention_factor: Some(1.5),
            mscale: Some(0.7),
            mscale_all_dim: Some(1.0),
            truncate: false,
            ..plain
        };
        let scalings = [
            RopeScaling::Linear { factor: 2.0 },
            RopeScaling::Dynamic { factor: 2.0 },
            RopeScaling::Yarn(plain),
            RopeScaling::Yarn(full),
        ];
        let scaled = scalings.map(|scaling| ModelConfig {
            rope_scaling: Some(scaling),
            head_dim: Some(24),
            ..of(Architecture::Llama)
        });
        models.extend([llama, mistral, qwen]);
        models.extend(scaled);
        models
    }

    #[test]
    fn a_written_model_is_read_as_the_same_model() {
        for model in models() {
            let table = config_json(&model, "float32", None);
            let text = serde_json::to_string_pretty(&table).unwrap();
            let read = HfModel::from_json(&text).unwrap();
            assert_eq!(read.config, model, "{text}");
            assert!(read.notes.is_empty(), "{:?}", read.notes);
            assert_eq!(table["architectures"], json!([model.architecture.class()]));
            assert_eq!(table["torch_dtype"], "float32");
        }
    }

    #[test]
    fn a_models_own_file_is_kept() {
        for model in models() {
            let mut own = config_json(&model, "float32", None);
            own.remove("torch_dtype");
            for (key, value) in [
                ("dtype", json!("float32")),
                ("eos_token_id", json!(7)),
                ("something_new", json!([1, {"a": null}])),
            ] {
                own.insert(key.into(), value);
            }
            let mut expected = own.clone();
            expected["dtype"] = "bfloat16".into();
            assert_eq!(config_json(&model, "bfloat16", Some(own.clone())), expected);
            // A key changed by the configuration is overwritten under any of its names.
            let changed = ModelConfig {
                norm_eps: 1e-4,
                hidden_size: 128,
                ..model.clone()
            };
            let table = config_json(&changed, "bfloat16", Some(own));
            assert_eq!(table["something_new"], expected["something_new"]);
            let read = HfModel::read(Some(table), Map::new()).unwrap();
            assert_eq!(read.config, changed);
        }
    }

    #[test]
    fn only_one_table_of_the_rotary_embedding_is_written() {
        let model = models().remove(2);
        assert_eq!(model.architecture, Architecture::Llama);
        let mut own = config_json(&model, "float32", None);
        own.remove("rope_theta");
        own.remove("rope_scaling");
        own.insert(
            "rope_parameters".into(),
            json!({"rope_type": "default", "rope_theta": 10000.0}),
        );
        let same = config_json(&model, "float32", Some(own.clone()));
        assert_eq!(same["rope_parameters"], own["rope_parameters"]);
        let stretched = ModelConfig {
            rope_theta: 2e4,
            rope_scaling: models().pop().expect("a model with YaRN").rope_scaling,
            ..model
        };
        // Transformers would take the length beside the table.
        own.insert("original_max_position_embeddings".into(), json!(99));
        let table = config_json(&stretched, "float32", Some(own));
        assert!(!table.contains_key("rope_parameters"));
        assert!(!table.contains_key("original_max_position_embeddings"));
        assert_eq!(table["rope_theta"], 2e4);
    }
}
