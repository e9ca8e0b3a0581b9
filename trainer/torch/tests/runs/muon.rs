//! Whole runs whose matrices are updated by Muon.
//!
//! Errors that these tests find: a parameter that the wrong rule updates, or with the wrong rate or decay; a momentum that a step changes twice, or
//! loses when its step is not committed; a matrix that a tile or a rank sees in part; a state read with the layout of another tile.

use std::collections::BTreeMap;
use std::path::Path;

use serde_json::json;

use crate::bits::moved;
use crate::harness::{Harness, Run, succeed};
use crate::model_dir::{Tensor, export, fixture, numbers, tensors};
use crate::plan::plan;

/// Also of the killed runs of `points.rs`.
pub(crate) const MUON: &str =
    "optimizer={type=\"Muon\",params={muon_lr=2e-3,adam_lr=1e-3,weight_decay=0.1}}";

/// A run of the model and the settings with which `hf/make.py` made `hf/muon.safetensors`.
fn as_torch(harness: &Harness, name: &str) -> Run {
    let text = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/fixtures/text.txt");
    let settings = json!({
        "train_batch_size": 4,
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "Muon", "params": {
            "muon_lr": 1e-3, "adam_lr": 2e-3, "momentum": 0.9, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.1
        }},
        "model": {"path": fixture("llama")},
        "data": {"files": [text]},
        "train": {"steps": 5, "seq_len": 32, "seed": 77, "threads": 1, "run_dir": harness.path(name)}
    });
    harness.run_of_json(name, &settings)
}

/// The weights of a run's export.
fn exported(harness: &Harness, run: &Run, name: &str) -> BTreeMap<String, Tensor> {
    let out = harness.path(&format!("{name}-out"));
    export(run, &out, &[]);
    tensors(&out)
}

/// Asserts that no weight differs by more than 1e-6.
fn assert_near(found: &BTreeMap<String, Tensor>, expected: &BTreeMap<String, Tensor>) {
    assert_eq!(found.len(), expected.len());
    for (name, tensor) in expected {
        let pairs = numbers(tensor).into_iter().zip(numbers(&found[name]));
        let far = pairs.map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
        println!("{name}: {far:.1e}");
        assert!(far < 1e-6, "{name}: {far}");
    }
}

#[test]
fn weights_are_those_of_torchs_muon_and_adamw() {
    let harness = Harness::new();
    let run = as_torch(&harness, "run");
    run.train();
    assert_near(&exported(&harness, &run, "run"), &tensors(&fixture("muon")));
    // Directions follow backward, so no step is shorter than both.
    for line in run.metrics() {
        let s = |key: &str| line[key].as_f64().expect("seconds");
        assert!(s("directions_s") > 0.0, "{line}");
        let computed = s("forward_s") + s("backward_s") + s("directions_s");
        assert!(
            s("bound_s") > 0.999 * computed && s("step_s") > computed,
            "{line}"
        );
    }
}

#[test]
fn two_ranks_make_the_weights_of_one() {
    // A sum of two gradients has the same bits in either order. With more of them, directions differ by a bit of bf16.
    let harness = Harness::new();
    let of_two = ["train_batch_size=2", "offload.tile_elems=4096"];
    let one = as_torch(&harness, "one").with(&of_two);
    one.train();
    let expected = exported(&harness, &one, "one");
    // Each rank has all of the state, or a part.
    for stage in [0, 3] {
        let name = format!("stage-{stage}");
        let stage = format!("zero_optimization.stage={stage}");
        let two = as_torch(&harness, &name).with(&of_two).with(&[stage]);
        succeed(two.launch(2));
        assert_near(&exported(&harness, &two, &name), &expected);
    }
}

/// In this model the second rank keeps states of more sizes in host memory than the first one.
#[test]
fn a_later_rank_may_need_more_memory_of_the_daemon_than_the_first_one() {
    let harness = Harness::new();
    let sets = [
        MUON,
        "train.steps=2",
        "model.intermediate_size=48",
        "model.num_hidden_layers=3",
        "offload.resident_fraction=0.3",
        "offload.staging_bytes=300000",
        "zero_optimization.offload_param.device=cpu",
    ];
    let run = harness.run("run", &sets).with(&harness.nvme()[1..]);
    succeed(run.launch(2));
}

#[test]
fn places_and_tiles_change_no_bit_and_a_run_with_muon_resumes_as_no_other() {
    let harness = Harness::new();
    let sets = [MUON, "train.steps=6"];
    let memory = harness.run("memory", &sets);
    memory.train();
    let losses: Vec<f64> = (memory.bits("loss").into_iter())
        .map(f64::from_bits)
        .collect();
    assert!(losses[5] < losses[0] - 0.05, "{losses:?}");
    let drives = |name: &str, extra: &[&str]| {
        let run = harness.run(name, &sets).with(&harness.nvme());
        run.with(&["offload.tile_elems=4096", "offload.staging_bytes=200000"])
            .with(&["offload.gradients=nvme"])
            .with(extra)
    };
    let expected = exported(&harness, &memory, "memory");
    let checkpointed = |extra: &[&str]| harness.run("checkpointed", &sets).with(extra);
    checkpointed(&["train.stop_after=3"]).train();
    assert!(checkpointed(&[]).train().contains("resumed at step 3"));
    assert_eq!(checkpointed(&[]).fingerprint(), memory.fingerprint());
    for name in ["deferred", "immediate"] {
        let order = format!("offload.optimizer_step={name}");
        drives(name, &[&order, "train.stop_after=3"]).train();
        let text = drives(name, &["optimizer.type=AdamW", "optimizer.params={}"]).refused();
        assert!(text.contains("optimizer.type was Muon"), "{text}");
        let run = drives(name, &[&order]);
        assert!(run.train().contains("resumed at step 3"));
        assert_eq!(run.bits("loss"), memory.bits("loss"), "{name}");
        assert_eq!(run.bits("grad_norm"), memory.bits("grad_norm"), "{name}");
        assert!(exported(&harness, &run, name) == expected, "{name}");
    }
}

#[test]
fn steps_on_drives_write_what_the_plan_says_and_less_than_with_adamw() {
    // States of one moment that were written before their update too would be more than those of two. A block's states fit into staging.
    const STEPS: f64 = 10.0;
    let harness = Harness::new();
    let planned = |name: &str, optimizer: &str| {
        let sets = [
            optimizer,
            "train.steps=10",
            "model.hidden_size=128",
            "model.intermediate_size=512",
            "offload.tile_elems=4096",
            "offload.staging_bytes=4000000",
        ];
        let run = harness.run(name, &sets).with(&harness.nvme());
        let (report, _) = plan(&run, &[]);
        (
            run,
            report["step"]["written_bytes"].as_f64().expect("bytes"),
        )
    };
    let (_, of_adamw) = planned("adamw", "optimizer={type=\"AdamW\",params={lr=1e-3}}");
    let (run, of_a_step) = planned("muon", MUON);
    run.train();
    let written = moved(&run, "device_written_bytes") as f64;
    println!("{written} bytes in {STEPS} steps of {of_a_step}; {of_adamw} with AdamW");
    assert!(of_a_step < 0.75 * of_adamw);
    // The last writes of the last step come after it is counted.
    let counted = (STEPS - 1.0) * of_a_step..1.02 * STEPS * of_a_step;
    assert!(counted.contains(&written));
}
