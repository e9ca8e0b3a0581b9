//! Groups of micro-batches: their size changes no bit of a run, wherever its state is and however many ranks it has.
//!
//! Errors that these tests find: a group's gradients are lost or added twice, weights of an earlier step or of another unit
//! are used in a later group, random numbers or the weight of a micro-batch depend on its group.
//!
//! `OFFLOADD_ALL_CASES=1 cargo test -p trainer-torch --test runs groups` tries every size of group.

use crate::harness::{Harness, Run, all_cases, succeed, text};

/// Micro-batches of a step; with groups of 3 the last one is smaller.
const MICRO_BATCHES: u64 = 4;

/// A run with dropout, a tied embedding, and more blocks than buffers.
const SETS: [&str; 7] = [
    "gradient_accumulation_steps=4",
    "train.steps=3",
    "train.eval_every=3",
    "data.validation_fraction=0.1",
    "model.num_hidden_layers=5",
    "model.attention_dropout=0.1",
    "model.tie_word_embeddings=true",
];

/// Makes a run whose micro-batches are processed in groups of `group`.
fn run(harness: &Harness, name: &str, sets: &[&str], group: u64) -> Run {
    let sets = [&SETS[..], sets].concat();
    let run = harness.run(name, &sets);
    run.with(&[format!("train.micro_batch_group={group}")])
}

/// What must not depend on the group. Numbers are written with all their digits, and as null if they are not finite.
fn result(run: &Run) -> (Vec<String>, String) {
    let metrics = run.metrics();
    let keys = ["loss", "grad_norm", "eval_loss", "skipped"];
    let lines = metrics.iter().map(|line| {
        let values = keys.map(|key| line[key].to_string());
        values.join(" ")
    });
    (lines.collect(), run.fingerprint())
}

/// Compares runs with groups of `sizes` with one that processes all micro-batches together, which is returned. In a push the
/// last size alone is compared.
fn compare(harness: &Harness, name: &str, sets: &[&str], ranks: u32, sizes: &[u64]) -> Run {
    let sizes = if all_cases() {
        sizes
    } else {
        &sizes[sizes.len() - 1..]
    };
    let trained = |group: u64| {
        let run = run(harness, &format!("{name}-{group}"), sets, group);
        match ranks {
            1 => drop(run.train()),
            ranks => drop(succeed(run.launch(ranks))),
        }
        run
    };
    let together = trained(MICRO_BATCHES);
    let expected = result(&together);
    for &group in sizes {
        let found = result(&trained(group));
        assert_eq!(found, expected, "{name}, groups of {group}");
    }
    together
}

#[test]
fn in_host_memory_every_size_of_group_gives_the_same_bits() {
    let harness = Harness::new();
    for (name, dtype) in [
        ("fp32", "bf16.enabled=false"),
        ("bf16", "bf16.enabled=true"),
    ] {
        compare(&harness, name, &[dtype], 1, &[1, 2, 3]);
    }
}

#[test]
fn on_drives_every_size_of_group_gives_the_same_bits_with_both_orders_of_updates() {
    let harness = Harness::new();
    let nvme = harness.nvme();
    let nvme: Vec<&str> = nvme.iter().map(String::as_str).collect();
    let mut results = Vec::new();
    for (order, sizes) in [("deferred", &[1, 2, 3][..]), ("immediate", &[3, 1])] {
        let step = format!("offload.optimizer_step={order}");
        let sets = [&nvme[..], &[step.as_str(), "bf16.enabled=true"]].concat();
        results.push(result(&compare(&harness, order, &sets, 1, sizes)));
    }
    let in_memory = run(&harness, "memory", &["bf16.enabled=true"], 2);
    in_memory.train();
    results.push(result(&in_memory));
    assert!(
        results.iter().all(|found| *found == results[0]),
        "{results:?}"
    );
}

#[test]
fn two_ranks_have_the_same_bits_in_every_stage_with_every_size_of_group() {
    let harness = Harness::new();
    for stage in 0..4 {
        let set = format!("zero_optimization.stage={stage}");
        let name = format!("stage-{stage}");
        compare(&harness, &name, &[&set, "bf16.enabled=true"], 2, &[1, 3]);
    }
    let nvme = harness.nvme();
    let nvme: Vec<&str> = nvme.iter().map(String::as_str).collect();
    compare(&harness, "drives", &nvme, 2, &[2]);
}

#[test]
fn an_overflow_in_one_group_skips_the_same_steps() {
    let harness = Harness::new();
    let sets = [
        "fp16.enabled=true",
        "fp16.initial_scale_power=22",
        "fp16.hysteresis=1",
        "train.steps=10",
    ];
    let together = compare(&harness, "fp16", &sets, 1, &[1, 3]);
    let skipped = together.metrics();
    let skipped = skipped.iter().filter(|line| line["skipped"] == true);
    assert!((1..10).contains(&skipped.count()));
}

#[test]
fn documents_of_different_lengths_weigh_the_same_in_every_size_of_group() {
    let harness = Harness::new();
    let words = text(20_000);
    let mut words = words.split_whitespace();
    let mut lines = String::new();
    for number in 0.. {
        // Some are shorter than half a window of 16 bytes, some longer than a window.
        let document: Vec<&str> = words.by_ref().take(1 + number % 5).collect();
        if document.is_empty() {
            break;
        }
        lines += &format!("{{\"text\": \"{}\"}}\n", document.join(" "));
    }
    let file = harness.path("documents.jsonl");
    std::fs::write(&file, lines).unwrap();
    let files = format!("data.files=[\"{}\"]", file.display());
    let sets = [
        files.as_str(),
        "data.packing=documents",
        "bf16.enabled=true",
    ];
    compare(&harness, "documents", &sets, 1, &[1, 3]);
}

#[test]
fn a_run_resumes_with_another_size_of_group() {
    let harness = Harness::new();
    let whole = run(&harness, "whole", &[], 1);
    whole.train();
    let parts = run(&harness, "parts", &[], 3);
    parts.with(&["train.stop_after=1"]).train();
    let parts = run(&harness, "parts", &[], 2);
    parts.train();
    assert_eq!(result(&parts), result(&whole));
}

#[test]
fn a_group_has_at_least_one_micro_batch_and_may_ask_for_more_than_there_are() {
    let harness = Harness::new();
    let said = run(&harness, "none", &[], 0).refused();
    assert!(said.contains("train.micro_batch_group"), "{said}");
    run(&harness, "many", &["train.steps=1"], 100).train();
}
