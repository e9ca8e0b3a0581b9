//! Plans the configurations in the documents and in `configs/`.
//!
//! The error that these tests find: a key was renamed, or a value is refused, and a page or an example still
//! shows it. Each configuration is planned for a large machine, with placeholders for the model, the data and
//! the drive.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use serde_json::Value;

use crate::harness::{Harness, succeed};

/// Settings that complete a page's block that is only a part of a configuration.
const BASE: &str = r#"
train_micro_batch_size_per_gpu = 2
bf16.enabled = true
optimizer = { type = "AdamW", params = { lr = 1e-5 } }
model = { path = "Qwen3-8B" }
data = { files = ["chats.jsonl"] }
train = { steps = 10, seq_len = 4096 }
"#;

/// Makes a directory with everything that the documents refer to.
fn stand_ins() -> Harness {
    let harness = Harness::new();
    let root = docs_test::root();
    for name in [
        "configs", "offloadd", "client", "swapper", "kernels", "trainer",
    ] {
        std::os::unix::fs::symlink(root.join(name), harness.path(name)).expect("a link");
    }
    let model = harness.path("Qwen3-8B");
    std::fs::create_dir(&model).expect("a model directory");
    // A plan checks free space, so the model must fit on the drive with the target directory.
    let config = std::fs::read_to_string(root.join("configs/models/Qwen3-8B.json"));
    let mut config: Value = serde_json::from_str(&config.expect("a configuration")).expect("JSON");
    for (key, value) in [
        ("hidden_size", 64),
        ("intermediate_size", 128),
        ("num_hidden_layers", 2),
        ("num_attention_heads", 4),
        ("num_key_value_heads", 2),
        ("head_dim", 16),
        ("vocab_size", 1000),
    ] {
        assert!(config.get(key).is_some(), "the configuration has {key}");
        config[key] = value.into();
    }
    std::fs::write(model.join("config.json"), config.to_string()).expect("the configuration");
    // How long a run in epochs is depends on the tokenizer.
    let tokenizer = root.join("trainer/tests/fixtures/data/qwen");
    for name in [
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
    ] {
        std::fs::copy(tokenizer.join(name), model.join(name)).expect("a tokenizer");
    }
    // A plan does not read weights, but refuses a model directory without any.
    std::fs::write(model.join("model.safetensors"), b"")
        .expect("a file in the place of the weights");
    let chat = r#"{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}"#;
    std::fs::write(harness.path("chats.jsonl"), chat).expect("conversations");
    std::fs::create_dir(harness.path("more")).expect("a directory of data");
    std::fs::write(harness.path("more/more.jsonl"), chat).expect("conversations");
    std::fs::copy(
        root.join("configs/ds_config.json"),
        harness.path("ds_config.json"),
    )
    .expect("DeepSpeed's file");
    harness
}

/// Plans a configuration for a large machine.
fn plan(harness: &Harness, place: &str, file: &Path) {
    let text = std::fs::read_to_string(file).expect("a run file");
    let mut text = text;
    for drive in 0..4 {
        let path = format!("/mnt/nvme{drive}");
        let stand_in = harness.path(&format!("nvme{drive}"));
        std::fs::create_dir_all(&stand_in).expect("a directory for a drive");
        text = text.replace(&path, &stand_in.display().to_string());
    }
    let file = harness.path("planned.toml");
    std::fs::write(&file, text).expect("the run file");
    let mut command = Command::new(crate::harness::trainer());
    command
        .current_dir(harness.path("."))
        .arg("plan")
        .arg(&file)
        .args([
            "--gpu-memory",
            "139GiB",
            "--host-memory",
            "512GiB",
            "--cores",
            "16",
        ])
        .args(["--drives", "1x6.2GB/s:3.2GB/s"])
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    println!("{place}");
    let said = succeed(command);
    assert!(said.contains("step"), "{place}: {said}");
}

#[test]
fn every_run_file_in_configs_can_be_planned() {
    let harness = stand_ins();
    let configs = docs_test::root().join("configs");
    let mut files: Vec<PathBuf> = std::fs::read_dir(&configs)
        .expect("configs/")
        .map(|entry| entry.expect("an entry").path())
        .filter(|path| {
            path.extension()
                .is_some_and(|extension| extension == "toml")
        })
        .collect();
    files.sort();
    assert!(files.len() >= 4, "{files:?}");
    for file in files {
        plan(&harness, &file.display().to_string(), &file);
    }
}

#[test]
fn every_run_file_in_the_documents_can_be_planned() {
    let harness = stand_ins();
    let mut count = 0;
    for block in docs_test::blocks() {
        // The daemon's settings have their own test; a table of all keys is not a run.
        if block.language != "toml" || !block.tag.is_empty() {
            continue;
        }
        let mut run: toml::Table =
            (block.text.parse()).unwrap_or_else(|error| panic!("{}: {error}", block.place));
        let is_whole = run
            .get("train")
            .is_some_and(|train| train.get("steps").is_some());
        if !is_whole {
            merge(&mut run, BASE.parse().expect("the base"));
            // One of both says how long the run is.
            let train = run["train"].as_table_mut().expect("a table");
            if train.contains_key("epochs") {
                train.remove("steps");
            }
        }
        let file = harness.path("block.toml");
        std::fs::write(&file, run.to_string()).expect("the run file");
        plan(&harness, &block.place, &file);
        count += 1;
    }
    assert!(count >= 4, "{count}");
}

/// Adds values that `run` lacks.
fn merge(run: &mut toml::Table, base: toml::Table) {
    for (key, value) in base {
        match (run.get_mut(&key), value) {
            (None, value) => drop(run.insert(key, value)),
            (Some(toml::Value::Table(run)), toml::Value::Table(base)) => merge(run, base),
            (Some(_), _) => {}
        }
    }
}
