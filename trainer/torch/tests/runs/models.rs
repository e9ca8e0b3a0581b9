//! Runs of every architecture.
//!
//! Errors that these tests find: a form of block works in its own test but not in a run (tiles do not expect
//! a parameter of a unit, rounding to bf16 loses the gradient of a bias); dropout differs when a block is
//! recomputed, when a run resumes, when tiles are kept elsewhere, or with other ranks; evaluation applies
//! dropout.

use serde_json::{Value, json};

use crate::harness::{Harness, Run, succeed};

/// Models of all architectures, as in configurations. Windows are shorter than the sequence.
fn models() -> Vec<(&'static str, Value)> {
    let sized = |more: Value| {
        let mut model = json!({"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
            "num_attention_heads": 4, "num_key_value_heads": 2});
        let table = model.as_object_mut().expect("a table");
        table.extend(more.as_object().expect("a table").clone());
        model
    };
    let yarn = json!({"rope_type": "yarn", "factor": 8.0, "beta_fast": 4.0, "original_max_position_embeddings": 16});
    vec![
        ("gpt2", gpt2(0.0)),
        (
            "llama",
            sized(
                json!({"rope_scaling": yarn, "attention_bias": true, "mlp_bias": true,
                "attention_dropout": 0.1, "tie_word_embeddings": true}),
            ),
        ),
        (
            "mistral",
            sized(json!({"model_type": "mistral", "sliding_window": 9, "head_dim": 16})),
        ),
        (
            "qwen2",
            sized(
                json!({"model_type": "qwen2", "use_sliding_window": true, "sliding_window": 9,
                "max_window_layers": 1, "tie_word_embeddings": true}),
            ),
        ),
        (
            "qwen3",
            sized(json!({"model_type": "qwen3", "head_dim": 16})),
        ),
    ]
}

fn gpt2(left_out: f64) -> Value {
    json!({"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32,
        "embd_pdrop": left_out, "resid_pdrop": left_out, "attn_pdrop": left_out})
}

fn run(harness: &Harness, name: &str, model: &Value, sets: &[&str]) -> Run {
    let settings = json!({
        "train_batch_size": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1}},
        "model": model,
        "data": {"files": [harness.path("text")], "validation_fraction": 0.1},
        "train": {"steps": 8, "seq_len": 32, "seed": 5, "run_dir": harness.path(&format!("runs/{name}")), "threads": 1},
        "offload": {"tile_elems": 4096, "staging_bytes": 300_000}
    });
    harness.run_of_json(name, &settings).with(sets)
}

fn numbers(run: &Run, key: &str) -> Vec<f64> {
    let metrics = run.metrics();
    let found = metrics.iter().filter_map(|line| line[key].as_f64());
    found.collect()
}

#[test]
fn every_architecture_learns_in_bf16() {
    let harness = Harness::new();
    std::thread::scope(|scope| {
        for (name, model) in models() {
            let harness = &harness;
            scope.spawn(move || {
                let run = run(harness, name, &model, &["bf16.enabled=true"]);
                run.train();
                let losses = numbers(&run, "loss");
                assert!(losses[7] < losses[0] - 1.0, "{name} learns: {losses:?}");
            });
        }
    });
}

/// Bits of a run: losses, norms, and the run's fingerprints.
fn bits(run: &Run) -> (Vec<u64>, Vec<u64>, String) {
    (run.bits("loss"), run.bits("grad_norm"), run.fingerprint())
}

#[test]
fn dropout_of_a_gpt2_does_not_depend_on_the_place_of_tiles_or_on_resuming() {
    let harness = Harness::new();
    let model = gpt2(0.2);
    let common = ["bf16.enabled=true", "gradient_accumulation_steps=2"];
    let of = |name: &str, sets: &[&str]| run(&harness, name, &model, &common).with(sets);
    let plain = of("plain", &[]);
    plain.train();
    let expected = bits(&plain);
    let elsewhere = |name: &str, sets: &[&str]| {
        let run = of(name, sets).with(&harness.nvme());
        run.train();
        run
    };
    let immediate = elsewhere("immediate", &["offload.optimizer_step=immediate"]);
    assert_eq!(bits(&immediate), expected, "immediate");
    let deferred = "offload.optimizer_step=deferred";
    elsewhere("deferred", &[deferred, "train.stop_after=3"]);
    let resumed = elsewhere("deferred", &[deferred]);
    assert_eq!(bits(&resumed), expected, "deferred and resumed");
    let without = run(&harness, "without", &gpt2(0.0), &common);
    without.train();
    assert_ne!(bits(&without).0, expected.0, "dropout changes the losses");
}

#[test]
fn dropout_of_a_gpt2_does_not_depend_on_ranks() {
    let harness = Harness::new();
    let model = gpt2(0.2);
    let sets = ["train.eval_every=4", "train_micro_batch_size_per_gpu=2"];
    let one = run(&harness, "one", &model, &sets);
    one.train();
    let two = run(&harness, "two", &model, &sets);
    succeed(two.launch(2));
    for key in ["loss", "grad_norm", "eval_loss"] {
        let (one, two) = (numbers(&one, key), numbers(&two, key));
        assert_eq!(one.len(), two.len());
        for (a, b) in one.iter().zip(&two) {
            assert!((a / b - 1.0).abs() < 1e-4, "{key}: {a} and {b}");
        }
    }
}
