//! Options that reduce the memory of activations: block inputs in host memory or on drives, and the MLP in chunks.
//!
//! Errors that these tests find: an input is replaced by another one, read before its copy is complete, or
//! overwritten by a later one; all of these change losses. Without a GPU, inputs that are not on drives are in host memory
//! in any case, and a run reports it.

use kernels::gpu::Gpu;
use test_hooks::kill_point::Point;

use crate::daemon::Daemon;
use crate::harness::{Harness, Run, succeed};
use crate::points::killed;

/// A run with more blocks than buffers, and with inputs of 16 tiles each: more than pass through slots at a time.
const SETS: [&str; 6] = [
    "model.num_hidden_layers=5",
    "train.seq_len=128",
    "train_micro_batch_size_per_gpu=4",
    "train.steps=4",
    "train.eval_every=2",
    "data.validation_fraction=0.1",
];

/// Bytes of an input of [`SETS`] in fp32.
const INPUT_BYTES: u64 = 4 * 128 * 32 * 4;

/// Makes a run with its state on a drive, and with its inputs in `place`.
fn run(harness: &Harness, name: &str, place: &str, sets: &[&str]) -> Run {
    let run = harness.run(name, &[&SETS[..], sets].concat());
    let run = run.with(&harness.nvme());
    run.with(&[format!("offload.activations={place}")])
}

/// What must not depend on where inputs are.
fn result(run: &Run) -> (Vec<u64>, Vec<u64>, String) {
    (run.bits("loss"), run.bits("grad_norm"), run.fingerprint())
}

/// Bytes that each step read and wrote, more than in `other`.
fn moved(run: &Run, other: &Run) -> Vec<[i64; 2]> {
    let (run, other) = (run.metrics(), other.metrics());
    let steps = run.iter().zip(&other);
    let more = steps.map(|(run, other)| {
        ["device_read_bytes", "device_written_bytes"].map(|key| {
            let [run, other] = [run, other].map(|line| line[key].as_i64().expect("a number"));
            run - other
        })
    });
    more.collect()
}

#[test]
fn inputs_elsewhere_change_no_bit_on_a_gpu() {
    if let Err(error) = Gpu::open(0) {
        assert!(error.is_absent(), "{error}");
        println!("skipped: inputs_elsewhere_change_no_bit_on_a_gpu: {error}");
        return;
    }
    let harness = Harness::new();
    for keeps in ["full", "attention", "matmuls"] {
        let keeps = format!("train.activation_checkpointing={keeps}");
        let sets = ["train.device=gpu", "gradient_accumulation_steps=3", &keeps];
        let trained = |place: &str| {
            let run = run(&harness, &format!("{place}-{keeps}"), place, &sets);
            run.train();
            result(&run)
        };
        let expected = trained("gpu");
        for place in ["cpu", "nvme"] {
            assert_eq!(trained(place), expected, "{place}, {keeps}");
        }
    }
}

#[test]
fn inputs_on_drives_change_no_bit_and_every_step_moves_them_once() {
    let harness = Harness::new();
    let cases: [(&str, u32, u64, &[&str]); 3] = [
        ("one rank", 1, 1, &[]),
        (
            "groups, updates at once",
            1,
            3,
            &[
                "gradient_accumulation_steps=3",
                "train.micro_batch_group=2",
                "offload.optimizer_step=immediate",
                "offload.gradients=nvme",
                "offload.staging_bytes=200000",
            ],
        ),
        (
            "two ranks, state in host memory too",
            2,
            2,
            &[
                "gradient_accumulation_steps=2",
                "offload.resident_fraction=1.0",
                "offload.commit_every=1",
            ],
        ),
    ];
    for (name, ranks, micro_batches, sets) in cases {
        let trained = |place: &str| {
            let sets = [sets, &["train.device=cpu"]].concat();
            let run = run(&harness, &format!("{name}-{place}"), place, &sets);
            match ranks {
                1 => drop(run.train()),
                ranks => drop(succeed(run.launch(ranks))),
            }
            run
        };
        let (here, there) = (trained("gpu"), trained("nvme"));
        assert_eq!(result(&there), result(&here), "{name}");
        let bytes = (5 * INPUT_BYTES * micro_batches * u64::from(ranks)) as i64;
        let steps = moved(&there, &here);
        // A tile may stay in a staging slot for a step, which saves its read.
        let close = |read: i64| (read - bytes).abs() <= bytes / 2;
        assert!(
            steps.len() == 4
                && steps
                    .iter()
                    .all(|[read, written]| close(*read) && *written == bytes),
            "{name}: {steps:?} are not {bytes}"
        );
    }
}

#[test]
fn a_run_with_inputs_on_drives_that_was_killed_in_backward_resumes_with_the_same_bits() {
    let harness = Harness::new();
    let cpu = ["train.device=cpu"];
    let whole = run(&harness, "whole", "gpu", &cpu);
    whole.train();
    // Its files are made with an area, which the second start does not use.
    for (place, step) in [("nvme", 1), ("gpu", 2)] {
        let stop = format!("train.stop_after={step}");
        run(&harness, "killed", place, &[cpu[0], &stop]).train();
    }
    let parts = run(&harness, "killed", "nvme", &cpu);
    // In the second step after the first one's three inputs were used.
    assert!(killed(parts.command("train"), Point::Backward, 5 + 3));
    let resumed = parts.train();
    assert!(resumed.contains("resumed at step "), "{resumed}");
    assert_eq!(parts.fingerprint(), whole.fingerprint());
    let (found, expected) = (parts.bits("loss"), whole.bits("loss"));
    assert_eq!(found[found.len() - 2..], expected[expected.len() - 2..]);
}

#[test]
fn inputs_that_have_no_place_on_drives_are_refused_by_name() {
    let harness = Harness::new();
    let nowhere = harness.run("nowhere", &["offload.activations=nvme"]);
    let said = nowhere.refused();
    assert!(
        said.contains("offload.activations: \"nvme\" needs a device"),
        "{said}"
    );
    let wrong = harness
        .run("wrong", &["offload.activations=away"])
        .refused();
    assert!(wrong.contains("offload.activations"), "{wrong}");
    // A store keeps the size that it was made with.
    let stop = ["train.device=cpu", "train.stop_after=1"];
    run(&harness, "begun", "gpu", &stop).train();
    let larger = ["train.device=cpu", "train_micro_batch_size_per_gpu=256"];
    let begun = run(&harness, "begun", "nvme", &larger);
    let said = begun.refused();
    for part in [
        "the store of this run was made without room for its block inputs",
        "set offload.activations = \"cpu\" or \"gpu\"",
        "--to-checkpoint",
    ] {
        assert!(said.contains(part), "{said}");
    }
    // 160 inputs of 2 MiB, and a store of 256 MiB.
    let daemon = Daemon::start(&harness);
    let sets = ["train.seq_len=8192", "model.num_hidden_layers=160"];
    let sets = [
        &sets[..],
        &["train_micro_batch_size_per_gpu=2", "train.eval_every=0"],
    ]
    .concat();
    let large = run(&harness, "large", "nvme", &sets).with(&daemon.socket());
    let said = large.refused();
    for part in [
        "offload.socket: the daemon leaves this user 255.0 MiB on its devices",
        "350.3 MiB of this are for block inputs (offload.activations",
    ] {
        assert!(said.contains(part), "{said}");
    }
}

#[test]
fn without_a_gpu_offloading_activations_to_host_memory_has_no_effect_and_the_run_says_so() {
    let harness = Harness::new();
    let sets = ["train.device=cpu"];
    let plain = harness.run("plain", &sets);
    plain.train();
    let asked = harness
        .run("asked", &sets)
        .with(&["offload.activations=cpu"]);
    let said = asked.train();
    assert!(
        said.contains("offload.activations = \"cpu\" has no effect"),
        "{said}"
    );
    assert_eq!(plain.bits("loss"), asked.bits("loss"));
}

#[test]
fn an_mlp_in_chunks_trains_to_the_same_loss() {
    let harness = Harness::new();
    for kind in ["bf16.enabled=false", "bf16.enabled=true"] {
        let run = |name: &str, tiling: &str| {
            let run = harness.run(&format!("{name}-{kind}"), &[kind]);
            let run = run.with(&[format!("train.mlp_chunks={tiling}")]);
            run.train();
            let losses = run.bits("loss").into_iter().map(f64::from_bits);
            losses.collect::<Vec<f64>>()
        };
        let (whole, sliced) = (run("whole", "1"), run("sliced", "4"));
        // Sums have another order, so in bf16 some values are rounded differently.
        let most = if kind.ends_with("false") { 1e-5 } else { 2e-3 };
        for (whole, sliced) in whole.iter().zip(&sliced) {
            assert!(
                (whole - sliced).abs() < most * whole,
                "{kind}: {whole}, {sliced}"
            );
        }
        assert_ne!(whole.len(), 0);
    }
    let wrong = harness.run("wrong", &["train.mlp_chunks=0"]).refused();
    assert!(wrong.contains("train.mlp_chunks"), "{wrong}");
    let wrong = harness.run("wrong", &["train.mlp_chunks=257"]).refused();
    assert!(wrong.contains("train.mlp_chunks"), "{wrong}");
}
