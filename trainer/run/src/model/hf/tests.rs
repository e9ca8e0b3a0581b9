//! Errors that these tests find: a key is read under the wrong name or with the wrong default; a key that
//! changes the model is ignored.

use super::*;
use crate::model::RopeScaling;

fn with(base: Value, extra: Value) -> Result<HfModel, ConfigError> {
    let Value::Object(mut table) = base else {
        panic!("a table")
    };
    let Value::Object(extra) = extra else {
        panic!("a table")
    };
    table.extend(extra);
    HfModel::from_json(&Value::Object(table).to_string())
}

fn sizes(model_type: &str) -> Value {
    json!({"architectures": ["X"], "model_type": model_type, "torch_dtype": "bfloat16", "vocab_size": 256,
        "hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 3, "num_attention_heads": 4,
        "num_key_value_heads": 2, "transformers_version": "4.44.0"})
}

fn gpt2() -> Value {
    json!({"model_type": "gpt2", "vocab_size": 256, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 128,
        "n_ctx": 128, "summary_type": "cls_index", "activation_function": "gelu_new"})
}

fn refused(base: Value, extra: Value) -> (String, String) {
    match with(base, extra.clone()) {
        Err(error @ ConfigError::Unsupported { .. }) => {
            let ConfigError::Unsupported { key, .. } = &error else {
                unreachable!()
            };
            (key.clone(), error.to_string())
        }
        other => panic!("{extra}: {other:?}"),
    }
}

#[test]
fn llamas_keys_are_read_and_the_rest_has_its_defaults() {
    let model = with(
        sizes("llama"),
        json!({"rope_theta": 500000.0, "rope_scaling": null}),
    )
    .unwrap();
    let config = &model.config;
    assert_eq!(
        (
            config.layers,
            config.heads,
            config.kv_heads,
            config.head_dim()
        ),
        (3, 4, 2, 16)
    );
    assert_eq!(
        (config.rope_theta, config.norm_eps, config.tied),
        (500000.0, 1e-6, false)
    );
    assert!(config.biases.is_none() && model.dropout.is_none() && model.notes.is_empty());
    // By default there are as many key heads as query heads.
    let mut older = sizes("llama");
    older.as_object_mut().unwrap().remove("num_key_value_heads");
    assert_eq!(with(older, json!({})).unwrap().config.kv_heads, 4);
    let biased = with(
        sizes("llama"),
        json!({"attention_bias": true, "mlp_bias": true, "attention_dropout": 0.25}),
    );
    let biased = biased.unwrap();
    assert_eq!(
        biased.config.biases,
        Biases {
            qkv: true,
            out: true,
            mlp: true
        }
    );
    assert_eq!(biased.dropout.attention, 0.25);
}

#[test]
fn a_file_without_model_type_is_identified_by_its_class_or_refused() {
    let without = |architectures: Value| {
        let mut table = sizes("llama");
        table.as_object_mut().unwrap().remove("model_type");
        with(table, json!({"architectures": architectures}))
    };
    for known in Architecture::ALL {
        // GPT-2's keys have other names.
        if *known == Architecture::Gpt2 {
            continue;
        }
        let model = without(json!([known.class()])).unwrap();
        assert_eq!(model.config.architecture, *known);
        assert_eq!(model.notes.len(), 1, "{:?}", model.notes);
        assert!(
            model.notes[0].contains("has no model_type"),
            "{:?}",
            model.notes
        );
    }
    for other in [
        Value::Null,
        json!([]),
        json!(["PhiForCausalLM"]),
        json!(["LlamaForCausalLM", "MistralForCausalLM"]),
    ] {
        let text = without(other).unwrap_err().to_string();
        assert!(text.contains("has no model_type"), "{text}");
        assert!(text.contains("set model.model_type"), "{text}");
    }
    // Keys in the configuration may name it.
    let inline = json!({"model_type": "mistral"});
    let Value::Object(inline) = inline else {
        unreachable!()
    };
    let mut table = sizes("llama");
    table.as_object_mut().unwrap().remove("model_type");
    let Value::Object(table) = table else {
        unreachable!()
    };
    let model = HfModel::read(Some(table), inline).unwrap();
    assert_eq!(model.config.architecture, Architecture::Mistral);
}

#[test]
fn both_forms_of_the_rotary_keys_have_the_same_meaning() {
    let llama3 = json!({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192});
    let mut newer = llama3.clone();
    newer["rope_theta"] = json!(250000.0);
    let older = json!({"rope_theta": 250000.0, "rope_scaling": llama3});
    let a = with(sizes("llama"), older).unwrap().config;
    let b = with(sizes("llama"), json!({"rope_parameters": newer}))
        .unwrap()
        .config;
    assert_eq!(a, b);
    assert_eq!(a.rope_theta, 250000.0);
    assert_eq!(
        a.rope_scaling,
        Some(RopeScaling::Llama3 {
            factor: 8.0,
            low_freq_factor: 1.0,
            high_freq_factor: 4.0,
            original_max_position_embeddings: 8192.0
        })
    );
    let linear = with(
        sizes("llama"),
        json!({"rope_scaling": {"type": "linear", "factor": 2}}),
    );
    assert_eq!(
        linear.unwrap().config.rope_scaling,
        Some(RopeScaling::Linear { factor: 2.0 })
    );
    // As many model cards tell people to add it, in the older words, to a newer file.
    let added = json!({"rope_parameters": {"rope_type": "default", "rope_theta": 7.0}, "rope_scaling": {"type": "linear", "factor": 2}});
    let added = with(sizes("llama"), added).unwrap().config;
    assert_eq!(
        added.rope_scaling,
        Some(RopeScaling::Linear { factor: 2.0 })
    );
    let plain = json!({"rope_parameters": {"rope_type": "default", "rope_theta": 5.0}});
    let plain = with(sizes("llama"), plain).unwrap().config;
    assert_eq!((plain.rope_theta, plain.rope_scaling), (5.0, None));
    for (extra, key) in [
        (
            json!({"rope_scaling": {"rope_type": "longrope", "factor": 4.0}}),
            "rope_scaling.rope_type",
        ),
        (
            json!({"rope_parameters": {"rope_type": "proportional", "factor": 4.0}}),
            "rope_parameters.rope_type",
        ),
        (
            json!({"rope_scaling": {"rope_type": "dynamic", "factor": 4.0, "alpha": 2.0}}),
            "rope_scaling.alpha",
        ),
        (
            json!({"rope_parameters": {"rope_theta": 1.0, "partial_rotary_factor": 0.5}}),
            "rope_parameters.partial_rotary_factor",
        ),
        (
            json!({"rope_scaling": {"factor": 4.0}}),
            "rope_scaling.rope_type",
        ),
    ] {
        assert_eq!(refused(sizes("llama"), extra).0, key);
    }
}

/// [`tables_of_published_models_are_those_of_transformers`](../../../../torch/src/compute/positions.rs) compares the numbers.
#[test]
fn constants_of_yarn_out_of_range_are_refused_by_name() {
    let yarn = |extra: Value| {
        let mut scaling =
            json!({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32});
        scaling
            .as_object_mut()
            .unwrap()
            .extend(extra.as_object().unwrap().clone());
        with(sizes("qwen2"), json!({"rope_scaling": scaling}))
    };
    yarn(json!({})).unwrap();
    for (extra, part) in [
        (json!({"factor": -1.0}), "rope_scaling.factor = -1 "),
        (
            json!({"factor": "4"}),
            "rope_scaling.factor = \"4\": expected a number",
        ),
        (
            json!({"attention_factor": 0.0}),
            "rope_scaling.attention_factor = 0 ",
        ),
        (
            json!({"mscale": -9.0, "mscale_all_dim": 1.0}),
            "rope_scaling.attention_factor = -",
        ),
        (
            json!({"beta_fast": 1.0, "beta_slow": 2.0}),
            "rope_scaling.beta_fast - beta_slow = -1 ",
        ),
        (json!({"beta_slow": -1.0}), "rope_scaling.beta_slow = -1 "),
        (
            json!({"truncate": 1}),
            "rope_scaling.truncate = 1: expected true or false",
        ),
        (
            json!({"original_max_position_embeddings": 0}),
            "rope_scaling.original_max_position_embeddings = 0 ",
        ),
        (
            json!({"short_factor": [1.0]}),
            "rope_scaling.short_factor = [1.0] is not supported",
        ),
    ] {
        let text = yarn(extra).unwrap_err().to_string();
        assert!(text.contains(part), "{text}");
    }
    let Value::Object(inline) = json!({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}})
    else {
        unreachable!()
    };
    let file = parse(&sizes("llama").to_string()).unwrap();
    let text = HfModel::read(Some(file), inline).unwrap_err().to_string();
    assert!(
        text.contains("rope_scaling.original_max_position_embeddings = nothing"),
        "{text}"
    );
}

/// The plan warns of longer sequences.
#[test]
fn positions_that_the_weights_know_are_those_of_the_file_and_the_scaled_ones() {
    let yarn = |factor: f64, original: u64| json!({"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original});
    let linear = |factor: f64| json!({"rope_type": "linear", "factor": factor});
    let llama3 = json!({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 100});
    for (file, inline, covered) in [
        (json!(null), json!(null), 1000),
        (json!(null), yarn(4.0, 800), 3200),
        (json!(null), yarn(1.0007, 1000), 1001),
        (json!(null), yarn(4.0, 100), 1000),
        (yarn(4.0, 1000), json!(null), 4000),
        (json!({"type": "yarn", "factor": 2.0}), json!(null), 2000),
        (yarn(4.0, 1000), yarn(8.0, 1000), 8000),
        (llama3, json!(null), 1000),
        (json!(null), linear(4.0), 4000),
        (linear(4.0), json!(null), 1000),
        (linear(4.0), linear(8.0), 2000),
        (
            json!(null),
            json!({"rope_type": "dynamic", "factor": 4.0}),
            1000,
        ),
    ] {
        let mut table = parse(&sizes("llama").to_string()).unwrap();
        table.insert("max_position_embeddings".into(), json!(1000));
        table.insert("rope_scaling".into(), file.clone());
        let mut given = Map::new();
        given.insert("max_position_embeddings".into(), json!(100_000));
        if !inline.is_null() {
            given.insert("rope_scaling".into(), inline.clone());
        }
        let model = HfModel::read(Some(table), given).unwrap();
        assert_eq!(model.covered_len, Some(covered), "{file}, {inline}");
        assert_eq!(model.config.max_position_embeddings, 100_000);
    }
}

#[test]
fn gpt2_has_its_own_names_and_defaults() {
    let model = with(gpt2(), json!({})).unwrap();
    let config = &model.config;
    assert_eq!(
        (
            config.hidden_size,
            config.intermediate_size,
            config.layers,
            config.kv_heads
        ),
        (64, 256, 2, 4)
    );
    assert_eq!(
        (
            config.max_position_embeddings,
            config.norm_eps,
            config.tied,
            config.head_dim
        ),
        (128, 1e-5, true, None)
    );
    assert_eq!(
        model.dropout,
        Dropout {
            embedding: 0.1,
            residual: 0.1,
            attention: 0.1
        }
    );
    assert!(model.notes.is_empty(), "{:?}", model.notes);
    let other = with(gpt2(), json!({"n_inner": 100, "attn_pdrop": 0.0})).unwrap();
    assert_eq!(
        (other.config.intermediate_size, other.dropout.attention),
        (100, 0.0)
    );
    for (extra, key) in [
        (
            json!({"activation_function": "relu"}),
            "activation_function",
        ),
        (
            json!({"scale_attn_by_inverse_layer_idx": true}),
            "scale_attn_by_inverse_layer_idx",
        ),
        (json!({"scale_attn_weights": false}), "scale_attn_weights"),
        (
            json!({"reorder_and_upcast_attn": true}),
            "reorder_and_upcast_attn",
        ),
        (json!({"add_cross_attention": true}), "add_cross_attention"),
        (json!({"pruned_heads": {"0": [1]}}), "pruned_heads"),
    ] {
        assert_eq!(refused(gpt2(), extra).0, key);
    }
}

#[test]
fn mistral_and_later_layers_of_qwen_have_windows() {
    let window = |model_type: &str, extra| {
        let config = with(sizes(model_type), extra).unwrap().config;
        (0..3).map(|layer| config.window(layer)).collect::<Vec<_>>()
    };
    assert_eq!(window("mistral", json!({})), [Some(4096); 3]);
    assert_eq!(
        window("mistral", json!({"sliding_window": 9})),
        [Some(9); 3]
    );
    assert_eq!(
        window("mistral", json!({"sliding_window": null})),
        [None; 3]
    );
    let off = json!({"sliding_window": 9, "max_window_layers": 1});
    assert_eq!(window("qwen2", off), [None; 3]);
    let on = json!({"use_sliding_window": true, "sliding_window": 9, "max_window_layers": 1});
    assert_eq!(window("qwen3", on), [None, Some(9), Some(9)]);
    let types = json!({"use_sliding_window": true, "sliding_window": 9,
        "layer_types": ["full_attention", "full_attention", "sliding_attention"]});
    assert_eq!(window("qwen2", types), [None, None, Some(9)]);
    let mixed = json!({"use_sliding_window": true, "sliding_window": 9,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]});
    assert_eq!(refused(sizes("qwen2"), mixed).0, "layer_types");
}

#[test]
fn qwen_models_have_their_own_biases_and_head_widths() {
    let qwen2 = with(sizes("qwen2"), json!({})).unwrap().config;
    assert!(qwen2.biases.qkv && !qwen2.biases.out && !qwen2.biases.mlp);
    assert_eq!(qwen2.head_dim(), 16);
    let qwen3 = with(sizes("qwen3"), json!({})).unwrap().config;
    assert_eq!((qwen3.head_dim(), qwen3.biases), (128, Biases::default()));
    let qwen3 = with(
        sizes("qwen3"),
        json!({"head_dim": 32, "attention_bias": true}),
    );
    let qwen3 = qwen3.unwrap().config;
    assert_eq!(qwen3.head_dim(), 32);
    assert!(qwen3.biases.qkv && qwen3.biases.out);
}

#[test]
fn another_form_of_model_is_refused_by_name() {
    let (key, text) = refused(sizes("bert"), json!({}));
    assert_eq!(key, "model_type");
    assert!(
        text.contains("encoder models are not supported yet") && text.contains("qwen2"),
        "{text}"
    );
    let (key, text) = refused(sizes("mamba"), json!({}));
    assert!(
        key == "model_type" && text.contains("gpt2, llama, mistral, qwen2, qwen3"),
        "{text}"
    );
    for (extra, key) in [
        (json!({"hidden_act": "gelu"}), "hidden_act"),
        (
            json!({"quantization_config": {"bits": 4}}),
            "quantization_config",
        ),
        (json!({"is_encoder_decoder": true}), "is_encoder_decoder"),
        (
            json!({"attention_dropout": 1.0}),
            "attention_dropout (attn_pdrop)",
        ),
    ] {
        assert_eq!(refused(sizes("llama"), extra).0, key);
    }
    assert!(matches!(
        HfModel::from_json("{"),
        Err(ConfigError::Unreadable(_))
    ));
    assert!(matches!(
        HfModel::from_json("[]"),
        Err(ConfigError::Unreadable(_))
    ));
    assert!(matches!(
        HfModel::from_json(r#"{"model_type": "llama"}"#),
        Err(ConfigError::Missing {
            key: "hidden_size",
            ..
        })
    ));
    assert!(matches!(
        with(sizes("llama"), json!({"hidden_size": "64"})),
        Err(ConfigError::Type { .. })
    ));
}

#[test]
fn an_unknown_key_is_reported() {
    let model = with(sizes("llama"), json!({"my_trick": 3})).unwrap();
    assert_eq!(
        model.notes,
        ["my_trick of the model's config.json is unknown and not used"]
    );
}

#[test]
fn inline_keys_take_precedence_and_must_belong_to_the_model() {
    let file = parse(&gpt2().to_string()).unwrap();
    let inline = |value: Value| value.as_object().unwrap().clone();
    let model = HfModel::read(
        Some(file.clone()),
        inline(json!({"hidden_size": 32, "resid_pdrop": 0.0})),
    );
    let model = model.unwrap();
    assert_eq!(
        (model.config.hidden_size, model.dropout.residual),
        (32, 0.0)
    );
    assert_eq!(
        model.notes,
        ["model.hidden_size = 32 replaces 64 from the model's config.json"]
    );
    let wrong = HfModel::read(Some(file), inline(json!({"num_key_value_heads": 2})));
    assert!(
        matches!(wrong, Err(ConfigError::NotOfThisModel { key, .. }) if key == "num_key_value_heads")
    );
    // Without a file there is no dropout by default.
    let alone = HfModel::read(None, inline(gpt2())).unwrap();
    assert!(alone.dropout.is_none());
    let asked = inline(
        json!({"model_type": "gpt2", "vocab_size": 256, "n_embd": 64, "n_layer": 2, "n_head": 4,
        "embd_pdrop": 0.2}),
    );
    assert_eq!(HfModel::read(None, asked).unwrap().dropout.embedding, 0.2);
}

#[test]
fn keys_of_a_run_file_change_windows_or_are_refused() {
    let inline = |value: Value| value.as_object().unwrap().clone();
    let file = |model_type: &str| {
        inline(json!({
            "model_type": model_type, "vocab_size": 256, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3,
            "num_attention_heads": 4, "num_key_value_heads": 2, "use_sliding_window": model_type == "qwen2", "sliding_window": 16,
            "max_window_layers": 1, "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
        }))
    };
    let without_windows = || {
        let mut table = file("qwen3");
        table["layer_types"] = json!(["full_attention", "full_attention", "full_attention"]);
        table
    };
    let mistral = || {
        let mut table = file("mistral");
        table["layer_types"] = json!([
            "sliding_attention",
            "sliding_attention",
            "sliding_attention"
        ]);
        table
    };
    let llama = || {
        let mut table = without_windows();
        table["model_type"] = json!("llama");
        table
    };
    // The window's tokens and its first layer, or words of the refusal.
    type Found = Result<Option<(usize, usize)>, &'static str>;
    let cases: [(Map<String, Value>, Value, Found); 13] = [
        (file("qwen2"), json!({}), Ok(Some((16, 1)))),
        (
            file("qwen2"),
            json!({"sliding_window": 8}),
            Ok(Some((8, 1))),
        ),
        (
            file("qwen2"),
            json!({"max_window_layers": 0}),
            Ok(Some((16, 0))),
        ),
        (file("qwen2"), json!({"max_window_layers": 3}), Ok(None)),
        (
            file("qwen2"),
            json!({"use_sliding_window": false}),
            Ok(None),
        ),
        (
            file("qwen2"),
            json!({"num_hidden_layers": 2}),
            Ok(Some((16, 1))),
        ),
        (
            without_windows(),
            json!({"use_sliding_window": true, "sliding_window": 8}),
            Ok(Some((8, 1))),
        ),
        (
            without_windows(),
            json!({"sliding_window": 8}),
            Err("without use_sliding_window"),
        ),
        (
            without_windows(),
            json!({"max_window_layers": 0}),
            Err("without use_sliding_window"),
        ),
        (mistral(), json!({"sliding_window": null}), Ok(None)),
        (
            mistral(),
            json!({"num_hidden_layers": 2}),
            Ok(Some((16, 0))),
        ),
        (llama(), json!({"num_hidden_layers": 2}), Ok(None)),
        (
            llama(),
            json!({"sliding_window": 8}),
            Err("not a key of llama models"),
        ),
    ];
    for (file, given, expected) in cases {
        let found = HfModel::read(Some(file), inline(given.clone()));
        match (expected, found) {
            (Ok(window), Ok(model)) => {
                let found = model.config.sliding_window;
                assert_eq!(
                    found.map(|found| (found.tokens, found.first_layer)),
                    window,
                    "{given}"
                );
            }
            (Err(words), Err(error)) => assert!(error.to_string().contains(words), "{error}"),
            (_, found) => panic!("{given}: {found:?}"),
        }
    }
    let gpt2 = HfModel::read(Some(inline(gpt2())), inline(json!({"rope_theta": 5.0})));
    assert!(
        gpt2.unwrap_err()
            .to_string()
            .contains("not a key of gpt2 models")
    );
}

/// Every key that transformers knows is used, refused, or has no effect there either (`tests/fixtures/hf/config_keys.py`).
#[test]
fn every_key_that_transformers_knows_has_a_place() {
    let fixture = include_str!("../../../../tests/fixtures/hf/config_keys.json");
    let fixture: Value = serde_json::from_str(fixture).unwrap();
    for architecture in Architecture::ALL.iter().copied() {
        let family = architecture.model_type();
        let keys = fixture[family].as_object().unwrap();
        assert!(keys.len() > 40, "{family}");
        for (key, effect) in keys {
            let aliases = keys::aliases(architecture);
            let common = aliases
                .iter()
                .find(|(theirs, _)| theirs == key)
                .map_or(key.as_str(), |(_, common)| common);
            let is_rotary = family != "gpt2" && key == "rope_parameters";
            let is_used = is_rotary
                || keys::read(architecture)
                    .iter()
                    .any(|(known, _)| *known == common);
            let is_fixed = keys::fixed(architecture)
                .iter()
                .any(|(known, ..)| *known == common);
            let is_without = keys::WITHOUT_EFFECT.contains(&common)
                || keys::of_others(architecture).contains(&common);
            assert!(
                is_used || is_fixed || is_without,
                "{family}: {key} has no place"
            );
            if effect == "changes" {
                assert!(
                    is_used || is_fixed,
                    "{family}: {key} changes the training of transformers"
                );
            }
        }
    }
}

#[test]
fn layers_of_another_kind_than_transformers_computes_are_refused() {
    let types = |kinds: [&str; 3]| json!(kinds.map(|kind| format!("{kind}_attention")));
    let mixed = types(["full", "sliding", "full"]);
    for (family, extra) in [
        ("llama", json!({"layer_types": mixed})),
        (
            "mistral",
            json!({"layer_types": mixed, "sliding_window": 8}),
        ),
        (
            "mistral",
            json!({"layer_types": types(["full"; 3]), "sliding_window": 8}),
        ),
        (
            "mistral",
            json!({"layer_types": types(["sliding"; 3]), "sliding_window": null}),
        ),
        (
            "qwen3",
            json!({"layer_types": mixed, "use_sliding_window": false}),
        ),
        (
            "qwen2",
            json!({"layer_types": mixed, "use_sliding_window": true}),
        ),
    ] {
        assert_eq!(refused(sizes(family), extra).0, "layer_types", "{family}");
    }
    for (family, kind, window) in [
        ("llama", "full", None),
        ("mistral", "sliding", Some(8)),
        ("mistral", "full", None),
    ] {
        let model = with(
            sizes(family),
            json!({"layer_types": types([kind; 3]), "sliding_window": window}),
        );
        let found = model
            .unwrap()
            .config
            .sliding_window
            .map(|window| window.tokens);
        assert_eq!(found, window, "{family}");
    }
}

#[test]
fn the_padding_token_is_known_where_transformers_does_not_train_it() {
    let pad = |base, id: Value| {
        with(base, json!({"pad_token_id": id})).map(|model| model.config.pad_token_id)
    };
    assert_eq!(pad(sizes("llama"), json!(5)), Ok(Some(5)));
    assert_eq!(pad(sizes("qwen3"), json!(-1)), Ok(Some(255)));
    assert_eq!(pad(sizes("mistral"), json!(null)), Ok(None));
    assert_eq!(pad(gpt2(), json!(5)), Ok(None));
    let (key, message) = refused(sizes("llama"), json!({"pad_token_id": 256}));
    assert!(
        key == "pad_token_id" && message.contains("below vocab_size = 256"),
        "{message}"
    );
}
