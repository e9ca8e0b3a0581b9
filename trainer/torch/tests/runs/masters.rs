//! Whole runs whose bf16 parameters are their own masters, rounded stochastically.
//!
//! Errors that these tests find: random bits that depend on tiles, groups of micro-batches, ranks or the start of the process; a step that is skipped and
//! rounds; a tile read with the layout of another master, on export or when a run is resumed.

use std::os::unix::process::ExitStatusExt;

use test_hooks::kill_point::Point;

use crate::harness::{Harness, Run, finish, spawn, succeed};
use crate::model_dir::{export, numbers, tensors};

const SPLIT: [&str; 4] = [
    "bf16.enabled=true",
    "train.steps=8",
    "train_batch_size=4",
    "train_micro_batch_size_per_gpu=1",
];

/// Six bytes of state a parameter.
const MASTERS: [&str; 2] = ["optimizer.master=bf16", "optimizer.moments=bf16"];

fn losses(run: &Run) -> Vec<f64> {
    run.bits("loss").into_iter().map(f64::from_bits).collect()
}

/// Asserts that losses differ from those of a run with fp32 masters, and not by more than one in a thousand.
fn assert_near(found: &[f64], split: &[f64]) {
    assert!(found != split, "nothing was rounded");
    for (found, split) in found.iter().zip(split) {
        assert!((found / split - 1.0).abs() < 1e-3, "{found}, not {split}");
    }
}

#[test]
fn masters_in_bf16_are_rounded_alike_on_drives_in_other_tiles_and_groups_and_after_a_kill() {
    let harness = Harness::new();
    let sets = [&SPLIT[..], &MASTERS].concat();
    let memory = harness.run("memory", &sets);
    let said = memory.train();
    assert!(said.contains(", masters in bf16"), "{said}");
    let split = harness.run("split", &SPLIT);
    split.train();
    assert_near(&losses(&memory), &losses(&split));
    let drives = harness.run("drives", &sets).with(&harness.nvme()).with(&[
        "offload.tile_elems=8192",
        "offload.staging_bytes=200000",
        "train.micro_batch_group=3",
    ]);
    let mut command = drives.command("train");
    command.env("OFFLOADD_KILL", format!("{}@20", Point::Updated.name()));
    let killed = finish(spawn(command));
    assert_eq!(killed.status.signal(), Some(9), "{killed:?}");
    assert!(drives.train().contains("resumed at step"));
    assert_eq!(drives.bits("loss"), memory.bits("loss"));
    assert_eq!(drives.bits("grad_norm"), memory.bits("grad_norm"));
    let exported = |run: &Run, name: &str| {
        export(run, &harness.path(name), &["--dtype", "fp32"]);
        tensors(&harness.path(name))
    };
    let (one, other) = (exported(&memory, "one"), exported(&drives, "other"));
    assert!(one == other);
    for tensor in one.values() {
        let mut numbers = numbers(tensor).into_iter();
        assert!(numbers.all(|x| x.to_bits() & 0xFFFF == 0), "all are bf16");
    }
}

#[test]
fn two_ranks_round_as_one() {
    let harness = Harness::new();
    // All sequences are the same, so that the sum of their gradients is rounded alike wherever it is made.
    std::fs::write(harness.path("text"), vec![b'a'; 20_000]).expect("the text is written");
    let sets = [&SPLIT[..], &MASTERS, &["train_batch_size=2"]].concat();
    let one = harness.run("one", &sets);
    one.train();
    let two = harness.run("two", &sets).with(&harness.nvme());
    succeed(two.launch(2));
    let losses = losses(&one);
    assert!(losses[7] < losses[0], "it learns: {losses:?}");
    assert_eq!(two.bits("loss"), one.bits("loss"));
    assert_eq!(two.fingerprint(), one.fingerprint());
}

#[test]
fn a_checkpoint_with_masters_in_bf16_resumes_and_is_refused_with_fp32() {
    let harness = Harness::new();
    let sets = [&SPLIT[..], &MASTERS].concat();
    let run = |extra: &[&str]| harness.run("run", &sets).with(extra);
    let whole = harness.run("whole", &sets);
    whole.train();
    run(&["train.stop_after=5"]).train();
    let text = run(&["optimizer.master=fp32"]).refused();
    assert!(
        text.contains("optimizer.master was bf16 and is now the default"),
        "{text}"
    );
    assert!(run(&[]).train().contains("resumed at step 5"));
    assert_eq!(run(&[]).fingerprint(), whole.fingerprint());
}

#[test]
fn a_step_that_is_skipped_rounds_nothing() {
    let harness = Harness::new();
    let wild = [
        "optimizer.params.lr=1e38",
        "scheduler={}",
        "gradient_clipping=0",
        "bf16.check_grad_overflow=true",
    ];
    let sets = [&SPLIT[..], &MASTERS, &wild].concat();
    let until = |step: u64| {
        let run = harness.run("run", &sets);
        let run = run.with(&[format!("train.stop_after={step}")]);
        run.train();
        let skipped: Vec<bool> = run
            .metrics()
            .iter()
            .map(|line| line["skipped"] == true)
            .collect();
        let tiles = run
            .fingerprint()
            .lines()
            .skip(1)
            .collect::<Vec<_>>()
            .join("\n");
        (skipped, tiles)
    };
    let (first, after_first) = until(1);
    let (all, after_all) = until(4);
    assert_eq!(first, [false]);
    assert_eq!(all, [false, true, true, true]);
    assert_eq!(after_first, after_all, "not a bit changed");
}
