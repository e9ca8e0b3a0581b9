//! Several ranks, each on its own GPU, compute the same as one GPU. Needs at least two GPUs, and NCCL or
//! RCCL.
//!
//! Errors that these tests find: a shard is gathered before it is ready, gradients leave before they are
//! summed or are overwritten before they have left, an update uses another rank's shard, a GPU waits for ever
//! for a rank that is gone. Each shows as different bits, or as a run that hangs.

use std::time::{Duration, Instant};

use kernels::gpu::Gpu;
use rustix::process::{Signal, kill_process};

use crate::harness::{Harness, Run, fail, finish, spawn, succeed, until};
use crate::ranks::rank_of;

const SETS: [&str; 3] = [
    "train_batch_size=12",
    "train_micro_batch_size_per_gpu=1",
    "train.device=gpu",
];

/// Number of GPUs to use, if there are several.
fn gpus(test: &str) -> Option<u32> {
    match Gpu::count() {
        Ok(count) if count > 1 => return Some(count.min(4)),
        Ok(_) => println!("skipped: {test}: there is only one GPU"),
        Err(error) => println!("skipped: {test}: {error}"),
    }
    None
}

fn tier(name: &str) -> Vec<String> {
    ["param", "optimizer"]
        .map(|what| format!("zero_optimization.offload_{what}.device={name}"))
        .to_vec()
}

#[test]
fn ranks_on_gpus_learn_like_one_and_the_place_of_tiles_changes_no_bit() {
    let Some(count) = gpus("ranks_on_gpus_learn_like_one_and_the_place_of_tiles_changes_no_bit")
    else {
        return;
    };
    let harness = Harness::new();
    let alone = harness.run("alone", &SETS).with(&tier("none"));
    alone.train();
    let losses = |run: &Run| -> Vec<f64> {
        let metrics = run.metrics();
        let of = |line: &serde_json::Value| line["loss"].as_f64().expect("a number");
        metrics.iter().map(of).collect()
    };
    for ranks in 2..=count {
        let name = |what: &str| format!("{what}-{ranks}");
        let on_gpu = harness.run(&name("on-gpu"), &SETS).with(&tier("none"));
        let on_host = harness.run(&name("on-host"), &SETS).with(&tier("cpu"));
        let on_drive = harness.run(&name("on-drive"), &SETS).with(&harness.nvme());
        let at_once = (harness.run(&name("at-once"), &SETS).with(&harness.nvme()))
            .with(&["offload.optimizer_step=immediate"]);
        for run in [&on_gpu, &on_host, &on_drive, &at_once] {
            succeed(run.launch(ranks));
        }
        for run in [&on_host, &on_drive, &at_once] {
            assert_eq!(on_gpu.bits("loss"), run.bits("loss"), "{ranks} ranks");
            assert_eq!(on_gpu.bits("grad_norm"), run.bits("grad_norm"));
            assert_eq!(on_gpu.fingerprint(), run.fingerprint(), "{ranks} ranks");
        }
        let (found, expected) = (losses(&on_gpu), losses(&alone));
        assert_eq!(found.len(), expected.len());
        for (found, expected) in found.iter().zip(&expected) {
            assert!(
                ((found - expected) / expected).abs() < 1e-4,
                "{ranks} ranks: {found}, not {expected}"
            );
        }
    }
}

#[test]
fn two_gpus_learn_the_same_in_every_stage() {
    if gpus("two_gpus_learn_the_same_in_every_stage").is_none() {
        return;
    }
    let harness = Harness::new();
    let alone = harness.run("alone", &SETS).with(&tier("none"));
    alone.train();
    let number = |run: &Run, step: usize, key: &str| {
        let metrics = run.metrics();
        metrics[step][key].as_f64().expect("a number")
    };
    for micro_batches in [1, 3] {
        let micro_batch = format!("train_micro_batch_size_per_gpu={}", 6 / micro_batches);
        for (stage, devices) in [
            (0, "none"),
            (1, "none"),
            (2, "none"),
            (3, "none"),
            (1, "cpu"),
            (2, "cpu"),
        ] {
            let name = format!("stage-{stage}-{devices}-{micro_batches}");
            let stage = format!("zero_optimization.stage={stage}");
            let optimizer = format!("zero_optimization.offload_optimizer.device={devices}");
            let run = harness.run(&name, &SETS);
            let run = run.with(&[&stage, &optimizer, &micro_batch]);
            succeed(run.launch(2));
            for (step, key) in [(0, "loss"), (5, "loss"), (5, "grad_norm")] {
                let (found, expected) = (number(&run, step, key), number(&alone, step, key));
                let off = ((found - expected) / expected).abs();
                assert!(off < 1e-4, "{name}: {key} {found}, not {expected}");
            }
        }
    }
}

#[test]
fn two_gpus_that_divide_each_sequence_learn_like_one() {
    if gpus("two_gpus_that_divide_each_sequence_learn_like_one").is_none() {
        return;
    }
    let harness = Harness::new();
    let losses = |run: &Run| -> Vec<f64> {
        let metrics = run.metrics();
        let of = |line: &serde_json::Value| line["loss"].as_f64().expect("a number");
        metrics.iter().map(of).collect()
    };
    for (dtype, tolerance) in [("bf16.enabled=false", 1e-4), ("bf16.enabled=true", 2e-2)] {
        let sets = [&SETS[..], &["train.steps=12", dtype]].concat();
        let alone = harness
            .run(&format!("alone-{dtype}"), &sets)
            .with(&tier("none"));
        alone.train();
        let expected = losses(&alone);
        for (name, devices, more) in [
            ("full", tier("none"), "train.activation_checkpointing=full"),
            (
                "attention",
                tier("cpu"),
                "train.activation_checkpointing=attention",
            ),
            (
                "matmuls",
                harness.nvme(),
                "train.activation_checkpointing=matmuls",
            ),
            ("away", tier("cpu"), "offload.activations=cpu"),
            ("chunks", tier("cpu"), "train.mlp_chunks=2"),
            ("groups", tier("none"), "train.micro_batch_group=2"),
        ] {
            let name = format!("{name}-{dtype}");
            let run = harness.run(&name, &sets).with(&devices);
            let run = run.with(&["train.sequence_parallel=2", more]);
            succeed(run.launch(2));
            let found = losses(&run);
            assert_eq!(found.len(), expected.len());
            for (found, expected) in found.iter().zip(&expected) {
                let off = ((found - expected) / expected).abs();
                assert!(off < tolerance, "{name}: {found}, not {expected}");
            }
        }
    }
}

#[test]
fn more_ranks_than_gpus_are_refused_by_all_of_them() {
    let count = match Gpu::count() {
        Ok(count) if count > 0 => count,
        _ => {
            println!("skipped: more_ranks_than_gpus_are_refused_by_all_of_them: no GPU");
            return;
        }
    };
    let harness = Harness::new();
    let said = fail(
        harness
            .run("crowded", &["train.device=auto"])
            .launch(count + 1),
    );
    assert!(said.contains(&format!("--nproc {count}")), "{said}");
}

#[test]
fn a_killed_rank_ends_the_others_on_their_gpus() {
    if gpus("a_killed_rank_ends_the_others_on_their_gpus").is_none() {
        return;
    }
    let harness = Harness::new();
    let long = ["train.steps=100000", "scheduler={}"];
    for (name, devices) in [("on-gpu", tier("none")), ("on-drive", harness.nvme())] {
        let run = harness
            .run(name, &[&SETS[..], &long].concat())
            .with(&devices);
        let child = until(spawn(run.launch(2)), "three steps", || {
            run.steps_written() >= 3
        });
        kill_process(rank_of(&child, 1), Signal::KILL).unwrap();
        let since = Instant::now();
        let output = finish(child);
        let err = String::from_utf8_lossy(&output.stderr);
        assert!(since.elapsed() < Duration::from_secs(30), "{err}");
        assert!(err.contains("rank 1"), "{err}");
    }
}
