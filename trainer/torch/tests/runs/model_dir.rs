//! Model directories for tests: fixtures saved by Hugging Face's library, copies of them to be damaged, and
//! their tensors.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;

use safetensors::{Dtype, SafeTensors};

use crate::harness::{Harness, Run, fail, succeed};
use crate::random::Random;

/// A model of each architecture.
pub(crate) const ALL: [&str; 8] = [
    "gpt2",
    "llama",
    "llama3",
    "llama_yarn",
    "mistral",
    "qwen2",
    "qwen3",
    "tied_pad",
];

pub(crate) const FILE: &str = "model.safetensors";

pub(crate) fn fixture(name: &str) -> PathBuf {
    let fixtures = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/fixtures/hf");
    fixtures.join(name)
}

/// Copies a fixture to the test's directory.
pub(crate) fn copy(harness: &Harness, name: &str, to: &str) -> PathBuf {
    let dir = harness.path(to);
    std::fs::create_dir(&dir).expect("a directory");
    for file in ["config.json", FILE] {
        std::fs::copy(fixture(name).join(file), dir.join(file)).expect("the fixture is there");
    }
    dir
}

/// Makes the directory `to` with a GPT-2 of random weights, also in its norms and biases.
pub(crate) fn random_model(harness: &Harness, to: &str, layers: usize) -> PathBuf {
    const HIDDEN: usize = 32;
    let dir = harness.path(to);
    std::fs::create_dir(&dir).expect("a directory");
    let text = std::fs::read_to_string(fixture("gpt2").join("config.json")).expect("a config");
    let mut config: serde_json::Value = serde_json::from_str(&text).expect("JSON");
    config["n_embd"] = HIDDEN.into();
    config["n_layer"] = layers.into();
    std::fs::write(dir.join("config.json"), config.to_string()).expect("a config");
    let mut shapes = vec![
        ("wte.weight".to_owned(), vec![256, HIDDEN]),
        ("wpe.weight".to_owned(), vec![64, HIDDEN]),
    ];
    let mut linear = |name: String, shape: &[usize]| {
        shapes.push((format!("{name}.weight"), shape.to_vec()));
        shapes.push((format!("{name}.bias"), shape[shape.len() - 1..].to_vec()));
    };
    for layer in 0..layers {
        linear(format!("h.{layer}.ln_1"), &[HIDDEN]);
        linear(format!("h.{layer}.attn.c_attn"), &[HIDDEN, 3 * HIDDEN]);
        linear(format!("h.{layer}.attn.c_proj"), &[HIDDEN, HIDDEN]);
        linear(format!("h.{layer}.ln_2"), &[HIDDEN]);
        linear(format!("h.{layer}.mlp.c_fc"), &[HIDDEN, 4 * HIDDEN]);
        linear(format!("h.{layer}.mlp.c_proj"), &[4 * HIDDEN, HIDDEN]);
    }
    linear("ln_f".to_owned(), &[HIDDEN]);
    let mut random = Random::from_seed(3);
    let tensors = shapes.into_iter().map(|(name, shape)| {
        let is_scale = name.contains("ln_") && name.ends_with("weight");
        let value = |_| {
            let uniform = random.below(1 << 24) as f32 / (1 << 24) as f32 - 0.5;
            let value = 0.3 * uniform + if is_scale { 1.0 } else { 0.0 };
            value.to_le_bytes()
        };
        let count = shape.iter().product::<usize>();
        let bytes: Vec<u8> = (0..count).flat_map(value).collect();
        (format!("transformer.{name}"), shape, bytes)
    });
    let tensors: Vec<_> = tensors.collect();
    let views = tensors.iter().map(|(name, shape, bytes)| {
        let view = safetensors::tensor::TensorView::new(Dtype::F32, shape.clone(), bytes);
        (name, view.expect("a tensor"))
    });
    safetensors::serialize_to_file(views, None, &dir.join(FILE)).expect("the weights are written");
    dir
}

/// A tensor's type, shape and bytes.
pub(crate) type Tensor = (Dtype, Vec<usize>, Vec<u8>);

/// All tensors in the files of `dir`.
pub(crate) fn tensors(dir: &Path) -> BTreeMap<String, Tensor> {
    let mut found = BTreeMap::new();
    for entry in std::fs::read_dir(dir).expect("a directory") {
        let path = entry.expect("an entry").path();
        if path.extension().is_none_or(|end| end != "safetensors") {
            continue;
        }
        let bytes = std::fs::read(&path).expect("a file");
        let file = SafeTensors::deserialize(&bytes).expect("a file of safetensors");
        for (name, view) in file.tensors() {
            let tensor = (view.dtype(), view.shape().to_vec(), view.data().to_vec());
            assert!(found.insert(name.clone(), tensor).is_none(), "{name} twice");
        }
    }
    assert!(!found.is_empty(), "no tensors in {}", dir.display());
    found
}

/// Numbers of an fp32 tensor.
pub(crate) fn numbers(tensor: &Tensor) -> Vec<f32> {
    assert_eq!(tensor.0, Dtype::F32);
    let each = tensor.2.chunks_exact(4);
    each.map(|bytes| f32::from_le_bytes(bytes.try_into().unwrap()))
        .collect()
}

/// Run of the model in `dir` whose steps change nothing, so that an export equals the input.
pub(crate) fn still_run(harness: &Harness, name: &str, dir: &Path) -> Run {
    moving_run(harness, name, dir).with(&[
        "optimizer.params.lr=0.0",
        "optimizer.params.weight_decay=0.0",
    ])
}

/// A run of two steps of the model in `dir`.
pub(crate) fn moving_run(harness: &Harness, name: &str, dir: &Path) -> Run {
    let path = format!("model={{path = \"{}\"}}", dir.display());
    harness.run(name, &["train.steps=2", "scheduler={}", &path])
}

/// `trainer export` of a run to a directory of the test.
fn export_command(run: &Run, out: &Path, more: &[&str]) -> Command {
    let mut export = run.program();
    export.arg("export").arg(&run.dir).arg("--out").arg(out);
    export.args(more);
    export
}

/// Exports and expects success.
pub(crate) fn export(run: &Run, out: &Path, more: &[&str]) -> String {
    succeed(export_command(run, out, more))
}

/// Exports and expects an error that leaves no files.
pub(crate) fn export_refused(run: &Run, out: &Path, more: &[&str]) -> String {
    let text = fail(export_command(run, out, more));
    let partial = out.with_extension("partial");
    assert!(!partial.exists(), "{} was not removed", partial.display());
    text
}
