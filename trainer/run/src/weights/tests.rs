//! Errors that these tests find: a value is read to the wrong place, for each order in files; a file that is
//! incomplete or belongs to another model is detected only after the run was partly created. Every fault is
//! put into a file that was valid before.

use std::collections::BTreeMap;
use std::path::Path;

use serde_json::{Value, json};
use tempfile::TempDir;

use super::*;
use crate::model::names::param_locations;
use crate::model::{Architecture, ModelConfig, unit_layouts};

/// Tensor to be written.
#[derive(Clone)]
struct TensorToWrite {
    dtype: &'static str,
    shape: Vec<usize>,
    bytes: Vec<u8>,
}

type Tensors = BTreeMap<String, TensorToWrite>;

fn model(architecture: Architecture, tied: bool) -> ModelConfig {
    ModelConfig {
        architecture,
        vocab_size: 19,
        hidden_size: 12,
        intermediate_size: 20,
        layers: 2,
        heads: 2,
        kv_heads: if architecture == Architecture::Gpt2 {
            2
        } else {
            1
        },
        biases: architecture.form().biases,
        max_position_embeddings: 16,
        tied,
        ..ModelConfig::default()
    }
}

/// Returns a number that every type can represent exactly.
fn weight(unit: usize, elem: usize) -> f32 {
    ((unit * 37 + elem * 11) % 251) as f32 - 125.0
}

fn encode(dtype: &str, numbers: &[f32]) -> Vec<u8> {
    let each = |number: &f32| match dtype {
        "F32" => number.to_le_bytes().to_vec(),
        "BF16" => half::bf16::from_f32(*number).to_le_bytes().to_vec(),
        "F16" => half::f16::from_f32(*number).to_le_bytes().to_vec(),
        other => panic!("{other}"),
    };
    numbers.iter().flat_map(each).collect()
}

/// Returns all tensors of a model, in the form of its files.
fn tensors(config: &ModelConfig, dtype: &'static str) -> Tensors {
    let mut numbers: BTreeMap<String, (Vec<usize>, Vec<f32>)> = BTreeMap::new();
    for (unit, (layout, places)) in unit_layouts(config)
        .iter()
        .zip(param_locations(config))
        .enumerate()
    {
        for (param, place) in layout.params.iter().zip(places) {
            let shape = place.stored_shape(&param.shape);
            let (_, tensor) = numbers
                .entry(place.name.clone())
                .or_insert_with(|| (shape.clone(), vec![f32::NAN; shape.iter().product()]));
            for elem in 0..param.elems() {
                tensor[place.stored_elem(&param.shape, elem)] =
                    weight(unit, param.offset_elems + elem);
            }
        }
    }
    let made = |(name, (shape, numbers)): (String, (Vec<usize>, Vec<f32>))| {
        let bytes = encode(dtype, &numbers);
        (
            name,
            TensorToWrite {
                dtype,
                shape,
                bytes,
            },
        )
    };
    numbers.into_iter().map(made).collect()
}

/// A file's bytes.
fn file(tensors: &Tensors) -> Vec<u8> {
    let mut header = serde_json::Map::new();
    header.insert("__metadata__".into(), json!({"format": "pt"}));
    let mut data = Vec::new();
    for (name, made) in tensors {
        let start = data.len();
        data.extend(&made.bytes);
        let entry =
            json!({"dtype": made.dtype, "shape": made.shape, "data_offsets": [start, data.len()]});
        header.insert(name.clone(), entry);
    }
    with_header(&Value::Object(header).to_string(), &data)
}

fn with_header(header: &str, data: &[u8]) -> Vec<u8> {
    let length = (header.len() as u64).to_le_bytes();
    [&length[..], header.as_bytes(), data].concat()
}

fn dir_of(bytes: &[u8]) -> TempDir {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join(SINGLE_FILE), bytes).unwrap();
    dir
}

/// Writes two files and their index.
fn sharded(tensors: &Tensors) -> TempDir {
    let dir = tempfile::tempdir().unwrap();
    let mut map = serde_json::Map::new();
    for (number, half) in ["model-00001-of-00002", "model-00002-of-00002"]
        .iter()
        .enumerate()
    {
        let own = tensors
            .iter()
            .enumerate()
            .filter(|(at, _)| at % 2 == number);
        let own: Tensors = own
            .map(|(_, (name, made))| (name.clone(), made.clone()))
            .collect();
        let name = format!("{half}.safetensors");
        map.extend(own.keys().map(|tensor| (tensor.clone(), json!(name))));
        std::fs::write(dir.path().join(&name), file(&own)).unwrap();
    }
    let index = json!({"metadata": {"total_size": 1}, "weight_map": map});
    std::fs::write(dir.path().join(INDEX_FILE), index.to_string()).unwrap();
    dir
}

fn refused(dir: &Path, config: &ModelConfig) -> String {
    let error = Weights::open(dir, config).expect_err("must be refused");
    error.to_string()
}

/// Reads all weights in ranges of `step` elements, and compares them.
fn check_all(dir: &Path, config: &ModelConfig, step: usize) {
    let weights = Weights::open(dir, config).unwrap();
    for (unit, layout) in unit_layouts(config).iter().enumerate() {
        let mut expected = vec![0f32; layout.elems];
        for param in &layout.params {
            for elem in param.range_elems() {
                expected[elem] = weight(unit, elem);
            }
        }
        let mut found = vec![f32::NAN; layout.elems];
        for start in (0..layout.elems).step_by(step) {
            let end = (start + step).min(layout.elems);
            weights
                .fill(unit, start..end, &mut found[start..end])
                .unwrap();
        }
        assert_eq!(found, expected, "{}, ranges of {step}", layout.name);
    }
}

#[test]
fn every_value_is_read_to_its_place_in_any_range() {
    for architecture in Architecture::ALL {
        for (tied, dtype) in [(true, "F32"), (false, "BF16"), (true, "F16")] {
            let config = model(*architecture, tied);
            let tensors = tensors(&config, dtype);
            let one = dir_of(&file(&tensors));
            for step in [1, 7, 64, 100, 1 << 20] {
                check_all(one.path(), &config, step);
            }
            check_all(sharded(&tensors).path(), &config, 50);
        }
    }
}

#[test]
fn files_of_bare_models_and_with_stored_tables_are_accepted() {
    let config = model(Architecture::Gpt2, true);
    let mut bare: Tensors = tensors(&config, "F32")
        .into_iter()
        .map(|(name, made)| (name.replace("transformer.", ""), made))
        .collect();
    let table = TensorToWrite {
        dtype: "U8",
        shape: vec![1, 1, 16, 16],
        bytes: vec![1; 256],
    };
    bare.insert("h.0.attn.bias".into(), table);
    check_all(dir_of(&file(&bare)).path(), &config, 77);
}

#[test]
fn a_file_truncated_anywhere_is_named() {
    let config = model(Architecture::Llama, true);
    let whole = file(&tensors(&config, "F32"));
    for length in [0, 7, 8, 100, whole.len() / 2, whole.len() - 1] {
        let dir = dir_of(&whole[..length]);
        let text = refused(dir.path(), &config);
        assert!(
            text.contains("model.safetensors is truncated") && text.contains(": copy or download"),
            "{length}: {text}"
        );
    }
    let longer = [&whole[..], b"x"].concat();
    assert!(refused(dir_of(&longer).path(), &config).contains("1 bytes follow the last tensor"));
}

#[test]
fn an_invalid_header_is_reported() {
    let config = model(Architecture::Llama, true);
    let entry = |what: &str| format!(r#"{{"model.norm.weight": {what}}}"#);
    for (bytes, part) in [
        (with_header("{", b""), "its header is invalid: "),
        (with_header("[]", b""), "a table of tensors"),
        (with_header("\u{1}\u{2}", b""), "its header is invalid: "),
        (
            b"version https://git-lfs.github.com/spec/v1\noid sha256:0".to_vec(),
            "bring them with `git lfs pull`",
        ),
        (
            u64::MAX.to_le_bytes().to_vec(),
            "its header has 18446744073709551615 bytes",
        ),
        (
            with_header(
                &entry(r#"{"dtype": "F33", "shape": [1], "data_offsets": [0, 4]}"#),
                &[0; 4],
            ),
            "tensor model.norm.weight: \"F33\" is not a known number type",
        ),
        (
            with_header(&entry(r#"{"dtype": "F32", "shape": [1]}"#), b""),
            "tensor model.norm.weight: its entry in the header is invalid: missing field",
        ),
        (
            with_header(
                &entry(r#"{"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}"#),
                b"",
            ),
            "tensor model.norm.weight: its entry in the header is invalid: ",
        ),
        (
            with_header(
                &entry(r#"{"dtype": "F32", "shape": [3], "data_offsets": [0, 4]}"#),
                &[0; 4],
            ),
            "F32 of shape [3] does not have the size of bytes 0 to 4",
        ),
        (
            with_header(
                &entry(r#"{"dtype": "F32", "shape": [1], "data_offsets": [4, 0]}"#),
                &[0; 4],
            ),
            "does not have the size of bytes 4 to 0",
        ),
        (
            with_header(
                &entry(
                    r#"{"dtype": "F32", "shape": [9223372036854775807, 9], "data_offsets": [0, 4]}"#,
                ),
                &[0; 4],
            ),
            "does not have the size of bytes 0 to 4",
        ),
        (
            with_header(
                &entry(r#"{"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}"#),
                &[0; 8],
            ),
            "tensor model.norm.weight: it starts at byte 4 of the data instead of 0",
        ),
        (
            with_header(
                r#"{"a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}, "a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}}"#,
                &[0; 1],
            ),
            "duplicate tensor a",
        ),
    ] {
        let text = refused(dir_of(&bytes).path(), &config);
        assert!(
            text.contains(part) && text.contains(SINGLE_FILE),
            "{part}: {text}"
        );
    }
}

#[test]
fn weights_of_another_model_are_named_by_tensor() {
    let config = model(Architecture::Llama, false);
    let right = tensors(&config, "F32");
    let with = |change: &dyn Fn(&mut Tensors)| {
        let mut changed = right.clone();
        change(&mut changed);
        refused(dir_of(&file(&changed)).path(), &config)
    };
    let name = "model.layers.1.mlp.up_proj.weight";
    let text = with(&|tensors| tensors.get_mut(name).unwrap().shape.reverse());
    assert!(
        text.contains(name)
            && text.contains("its shape is [12, 20], but the model in config.json has [20, 12]"),
        "{text}"
    );
    let text = with(&|tensors| {
        let made = tensors.get_mut(name).unwrap();
        (made.dtype, made.bytes) = ("F64", made.bytes.repeat(2));
    });
    assert!(
        text.contains(name) && text.contains("F64 is not supported: save the model in F32"),
        "{text}"
    );
    let text = with(&|tensors| drop(tensors.remove(name)));
    assert!(
        text.contains("have no tensor model.layers.1.mlp.up_proj.weight, which the model"),
        "{text}"
    );
    let text = with(&|tensors| drop(tensors.remove("lm_head.weight")));
    assert!(
        text.contains("no tensor lm_head.weight: if the model's projection is its embedding"),
        "{text}"
    );
    let text = with(&|tensors| {
        for more in [
            "model.layers.2.mlp.up_proj.weight",
            "model.layers.3.mlp.up_proj.weight",
        ] {
            let made = tensors[name].clone();
            tensors.insert(more.into(), made);
        }
    });
    assert!(
        text.contains("tensor model.layers.2.mlp.up_proj.weight: ")
            && text.contains("(nor for one other)"),
        "{text}"
    );
    // A value that is not finite is found when it is read.
    let mut broken = right.clone();
    broken.get_mut(name).unwrap().bytes[20..24].copy_from_slice(&f32::INFINITY.to_le_bytes());
    let dir = dir_of(&file(&broken));
    let weights = Weights::open(dir.path(), &config).unwrap();
    let mut out = vec![0.0; unit_layouts(&config)[2].elems];
    let text = weights
        .fill(2, 0..out.len(), &mut out)
        .unwrap_err()
        .to_string();
    assert!(
        text.contains(name) && text.contains("element 5 is inf"),
        "{text}"
    );
}

#[test]
fn shards_that_do_not_fit_together_are_named() {
    let config = model(Architecture::Qwen2, true);
    let right = tensors(&config, "F32");
    let second = "model-00002-of-00002.safetensors";
    let dir = sharded(&right);
    std::fs::remove_file(dir.path().join(second)).unwrap();
    let text = refused(dir.path(), &config);
    assert!(
        text.contains("names the file model-00002-of-00002.safetensors, which does not exist"),
        "{text}"
    );
    // With the whole model in a second file, each of its tensors exists twice.
    std::fs::write(dir.path().join(second), file(&right)).unwrap();
    let text = refused(dir.path(), &config);
    assert!(
        text.contains("is in ") && text.contains("model-00001-of-00002.safetensors and in "),
        "{text}"
    );
    for (index, part) in [
        ("{", "it is not a safetensors index"),
        (r#"{"weight_map": {}}"#, "it names no file"),
        (
            r#"{"weight_map": {"a": "../secret"}}"#,
            "\"../secret\" is not a file name",
        ),
        (
            r#"{"weight_map": {"a": "/etc/passwd"}}"#,
            "is not a file name",
        ),
        (
            r#"{"weight_map": {"a": 1}}"#,
            "it is not a safetensors index",
        ),
    ] {
        std::fs::write(dir.path().join(INDEX_FILE), index).unwrap();
        let text = refused(dir.path(), &config);
        assert!(
            text.contains(part) && text.contains(INDEX_FILE),
            "{part}: {text}"
        );
    }
}

#[test]
fn missing_weights_are_refused_with_what_is_there_instead() {
    let config = model(Architecture::Llama, true);
    let with = |names: &[&str]| {
        let dir = tempfile::tempdir().unwrap();
        for name in names {
            let path = dir.path().join(name);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            match name.strip_suffix("->gone") {
                Some(_) => std::os::unix::fs::symlink(
                    "../blobs/gone",
                    path.with_file_name(name.trim_end_matches("->gone")),
                )
                .unwrap(),
                None => std::fs::write(path, "x").unwrap(),
            }
        }
        refused(dir.path(), &config)
    };
    for (names, part) in [
        (&["config.json"][..], "contains no weights in other formats"),
        (
            &["training_args.bin"],
            "contains no weights in other formats",
        ),
        (
            &["model-00001-of-00002.safetensors"],
            "model-00001-of-00002.safetensors exists, but its index is missing",
        ),
        (
            &["model.safetensors->gone"],
            "model.safetensors is a link to ../blobs/gone, which does not exist",
        ),
        (
            &["adapter_model.safetensors", "adapter_config.json"],
            "belongs to an adapter (LoRA)",
        ),
        (
            &["model.safetensors.incomplete"],
            "is an incomplete download",
        ),
        (
            &[".cache/huggingface/download/abc.incomplete"],
            "abc.incomplete is an incomplete download",
        ),
    ] {
        let text = with(names);
        assert!(text.contains(part), "{names:?}: {text}");
        for part in [
            "neither model.safetensors nor model.safetensors.index.json",
            "model.init = \"random\"",
        ] {
            assert!(text.contains(part), "{names:?}: {text}");
        }
    }
    let text = with(&["training_args.bin", "pytorch_model.bin"]);
    assert!(
        text.contains("weights in pytorch_model.bin") && text.contains("save_pretrained"),
        "{text}"
    );
}

/// Tries different thirds of GPT-2's fused projection, a transposed matrix, a vector, the last element.
#[test]
fn a_weight_that_is_not_finite_is_found_wherever_it_is() {
    for architecture in [Architecture::Llama, Architecture::Gpt2] {
        let config = model(architecture, true);
        let right = tensors(&config, "BF16");
        for (name, made) in &right {
            let elems = made.bytes.len() / 2;
            for at in [0, elems / 2, elems - 1] {
                let mut broken = right.clone();
                let bytes = &mut broken.get_mut(name).unwrap().bytes;
                bytes[2 * at..2 * at + 2].copy_from_slice(&half::bf16::NAN.to_le_bytes());
                let dir = dir_of(&file(&broken));
                let weights = Weights::open(dir.path(), &config).unwrap();
                let text = weights.check(2).unwrap_err().to_string();
                let expected = format!("tensor {name}: element {at} is NaN");
                assert!(text.contains(&expected), "{expected}: {text}");
            }
        }
        let dir = dir_of(&file(&right));
        Weights::open(dir.path(), &config)
            .unwrap()
            .check(2)
            .unwrap();
    }
}

#[test]
fn a_tied_models_projection_must_equal_its_embedding() {
    let config = model(Architecture::Qwen2, true);
    let mut repeated = tensors(&config, "F32");
    let embedding = repeated["model.embed_tokens.weight"].clone();
    repeated.insert("lm_head.weight".into(), embedding);
    let check = |tensors: &Tensors| {
        let dir = dir_of(&file(tensors));
        Weights::open(dir.path(), &config).unwrap().check(1)
    };
    check(&repeated).unwrap();
    let head = &mut repeated.get_mut("lm_head.weight").unwrap().bytes;
    head[40..44].copy_from_slice(&7.5f32.to_le_bytes());
    let text = check(&repeated).unwrap_err().to_string();
    for part in [
        "tensor lm_head.weight: it differs from the embedding",
        "element 10 is 7.5",
        "model.tie_word_embeddings = false",
    ] {
        assert!(text.contains(part), "{part}: {text}");
    }
    repeated.get_mut("lm_head.weight").unwrap().shape.reverse();
    let text = refused(dir_of(&file(&repeated)).path(), &config);
    assert!(text.contains("lm_head.weight: its shape is"), "{text}");
}

#[test]
fn other_weights_have_another_identity() {
    let config = model(Architecture::Llama, true);
    let right = tensors(&config, "F32");
    let identity = |tensors: &Tensors| {
        let dir = dir_of(&file(tensors));
        let mut identity = Weights::open(dir.path(), &config).unwrap().identity();
        identity["directory"] = Value::Null;
        identity
    };
    let mut other = right.clone();
    other.values_mut().next().unwrap().bytes[0] ^= 1;
    assert_eq!(identity(&right), identity(&right));
    assert_ne!(identity(&right), identity(&other));
}
