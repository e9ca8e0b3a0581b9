//! Copies of all parameters that the ranks of each node keep together.
//!
//! Errors that these tests find: a copy changes a bit; it is made but not used, so parameters cross the network twice; it
//! is used after the unit was updated; nodes decide differently, and wait for each other.

use serde_json::Value;
use training_state::run::CheckpointName;

use crate::harness::{Harness, Run, all_cases, finish, spawn, words};
use crate::model_dir::random_model;
use crate::nodes::{OnNodes, on_nodes};

/// More blocks than buffers, of which several ranks have three.
const LAYERS: usize = 5;

const STEPS: usize = 6;

/// Micro-batches in every step, and an evaluation after every second one.
fn nodes<'a>(harness: &'a Harness, name: &'a str, counts: &[u32]) -> OnNodes<'a> {
    if !harness.path("model").exists() {
        random_model(harness, "model", LAYERS);
    }
    let sets = ["data.validation_fraction=0.1", "train.eval_every=2"];
    on_nodes(harness, name, counts).with(&sets)
}

/// Bits of each step's loss, gradient norm and validation loss, and the last state.
fn results(run: &Run) -> (Vec<[Option<u64>; 3]>, String) {
    let bits = |line: &Value| {
        ["loss", "grad_norm", "eval_loss"].map(|key| line[key].as_f64().map(f64::to_bits))
    };
    let lines = run.metrics().iter().map(bits).collect();
    let last = CheckpointName::Step(STEPS as u64);
    (lines, run.fingerprint_of(Some(last)))
}

/// Bytes that were gathered from all ranks in each step.
fn gathered(run: &Run) -> Vec<u64> {
    let lines = run.metrics();
    let bytes = lines.iter().map(|line| &line["gathered_bytes"]);
    bytes.map(|bytes| bytes.as_u64().unwrap()).collect()
}

#[test]
fn copies_change_no_bit_and_each_update_is_gathered_from_all_nodes_once() {
    let harness = Harness::new();
    // Nodes of equal sizes are a special case of nodes of different sizes.
    let all: [&[u32]; 3] = [&[1, 2], &[1, 1], &[2, 2]];
    let counts = if all_cases() { &all[..] } else { &all[..1] };
    for (number, &counts) in counts.iter().enumerate() {
        let [with, without] = ["with", "without"].map(|name| format!("{name}-{number}"));
        let with = nodes(&harness, &with, counts);
        let said = with.train(&[]);
        let line = "network   each node keeps a copy of all parameters in host memory, ";
        assert!(said.contains(line), "{counts:?}: {said}");
        let without = nodes(&harness, &without, counts).with(&["offload.shard=all"]);
        let said = without.train(&[]);
        let line = "network   the parameters are divided over all nodes (offload.shard)";
        assert!(said.contains(line), "{counts:?}: {said}");
        let [with, without] = [with, without].map(|nodes| nodes.run(0));
        assert_eq!(results(&with), results(&without), "{counts:?}");
        // Backward gathers the blocks again, but not the embedding and the head.
        let twice = gathered(&without);
        let once = gathered(&with)[0];
        assert_eq!(twice, [twice[0]; STEPS], "{counts:?}");
        assert!(
            (1.5..2.0).contains(&(twice[0] as f64 / once as f64)),
            "{counts:?}: {once} and {twice:?}"
        );
        // The evaluation after every second step has gathered what the next step uses.
        assert_eq!(
            gathered(&with),
            [once, once, 0, once, 0, once],
            "{counts:?}"
        );
    }
}

#[test]
fn groups_of_micro_batches_use_the_copy_and_change_no_bit() {
    let harness = Harness::new();
    let of = |name, group| {
        let nodes = nodes(&harness, name, &[1, 1]).with(&[group]);
        nodes.train(&[]);
        nodes.run(0)
    };
    let together = of("together", "train.micro_batch_group=6");
    let grouped = of("grouped", "train.micro_batch_group=4");
    assert_eq!(results(&grouped), results(&together));
    assert_eq!(gathered(&grouped), gathered(&together));
    // Without copies, the second group gathers the blocks twice more.
    let all = nodes(&harness, "divided", &[1, 1]);
    let all = all.with(&["train.micro_batch_group=4", "offload.shard=all"]);
    all.train(&[]);
    assert_eq!(results(&all.run(0)), results(&together));
    let ratio = gathered(&all.run(0))[0] as f64 / gathered(&together)[0] as f64;
    assert!((2.5..4.0).contains(&ratio), "{ratio}");
}

#[test]
fn a_copy_that_is_used_after_an_update_gives_other_losses() {
    let harness = Harness::new();
    let expected = nodes(&harness, "expected", &[1, 1]);
    expected.train(&[]);
    let stale = nodes(&harness, "stale", &[1, 1]);
    let mut commands = stale.commands(&[]);
    for command in &mut commands {
        command.env("OFFLOADD_DISABLE", "copy-invalidation");
    }
    let ranks: Vec<_> = commands.into_iter().map(spawn).collect();
    for output in ranks.into_iter().map(finish) {
        assert!(output.status.success(), "{:?}", words(&output));
    }
    let [expected, stale] = [expected, stale].map(|nodes| nodes.run(0).bits("loss"));
    assert_eq!(expected[0], stale[0]);
    // The learning rates of the first steps are 0.
    assert_ne!(expected, stale);
}

#[test]
fn no_node_keeps_a_copy_if_one_has_no_room_for_it() {
    let harness = Harness::new();
    let sets = [
        "offload.gradients=cpu",
        "offload.resident_fraction=0.0",
        "train.device=cpu",
    ];
    let nodes = nodes(&harness, "run", &[1, 1]).with(&sets);
    let mut plan = nodes.run(0).command("plan");
    plan.args(["--nodes", "2", "--gpus", "1", "--json"]);
    let plan = finish(spawn(plan));
    let plan: Value = serde_json::from_slice(&plan.stdout).unwrap();
    let [all, copy] =
        ["process_bytes", "node_copy_bytes"].map(|key| plan["host"][key].as_u64().unwrap());
    assert!(copy > 0, "{plan}");
    let mut commands = nodes.commands(&[]);
    let limit = format!("offload.host_memory_bytes={}", all - copy / 2);
    commands[1].args(["--set", &limit]);
    let ranks: Vec<_> = commands.into_iter().map(spawn).collect();
    let outputs: Vec<_> = ranks.into_iter().map(|rank| words(&finish(rank))).collect();
    let line = "network   the parameters are divided over all nodes (node 1: host memory has no room for a copy of all parameters on each node, ";
    assert!(outputs[0].0.contains(line), "{outputs:?}");
    assert!(outputs[0].0.contains("done:"), "{outputs:?}");
    let bytes = gathered(&nodes.run(0));
    assert_eq!(bytes, [bytes[0]; STEPS]);
}
