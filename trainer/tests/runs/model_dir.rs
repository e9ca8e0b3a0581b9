//! Model directories for tests: fixtures saved by Hugging Face's library, copies of them to be damaged, and
//! their tensors.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;

use safetensors::{Dtype, SafeTensors};

use crate::harness::{Harness, Run, fail, succeed};

/// A model of each architecture.
pub(crate) const ALL: [&str; 7] = [
    "gpt2",
    "llama",
    "llama3",
    "llama_linear",
    "mistral",
    "qwen2",
    "qwen3",
];

pub(crate) const FILE: &str = "model.safetensors";

pub(crate) fn fixture(name: &str) -> PathBuf {
    let fixtures = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/hf");
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
pub(crate) fn export_command(run: &Run, out: &Path, more: &[&str]) -> Command {
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
