//! Runs whose tiles are in GPU memory for some units, and in host memory or on drives for the others.
//!
//! Errors that these tests find: a unit that is read from the wrong place, updated twice or not at all; a checkpoint without the tiles
//! that only the GPU has, or with those of another step.

use kernels::gpu::Gpu;
use test_hooks::kill_point::Point;

use crate::harness::{Harness, succeed};
use crate::points::killed;

const STEPS: &str = "train.steps=9";

/// GPUs of this machine; says which test needs more of them.
fn has_gpus(wanted: u32, test: &str) -> bool {
    let found = match Gpu::count() {
        Ok(count) => count,
        Err(error) if error.is_absent() => 0,
        Err(error) => panic!("{error}"),
    };
    if found < wanted {
        println!("skipped: {test}: needs {wanted} GPUs, and {found} are here");
    }
    found >= wanted
}

fn with_state_in_host_memory(update: &str, fraction: &str) -> [String; 7] {
    [
        "model.num_hidden_layers=6".to_owned(),
        "gradient_accumulation_steps=2".to_owned(),
        "zero_optimization.offload_param.device=cpu".to_owned(),
        "zero_optimization.offload_optimizer.device=cpu".to_owned(),
        format!("offload.optimizer_step={update}"),
        format!("offload.gpu_resident_fraction={fraction}"),
        "train.checkpoint_every=3".to_owned(),
    ]
}

#[test]
fn each_of_two_ranks_has_tiles_in_both_places_and_the_bits_of_two_that_have_not() {
    if !has_gpus(
        2,
        "each_of_two_ranks_has_tiles_in_both_places_and_the_bits_of_two_that_have_not",
    ) {
        return;
    }
    let harness = Harness::new();
    for (update, groups) in [("deferred", "2"), ("immediate", "1")] {
        let run = |name: &str, fraction: &str| {
            let run = harness.run(&format!("{name}-{fraction}-{update}"), &[STEPS]);
            run.with(&with_state_in_host_memory(update, fraction))
                .with(&[format!("train.micro_batch_group={groups}")])
        };
        let host = run("host", "0");
        succeed(host.launch(2));
        for fraction in ["0.4", "0.8", "1", "auto"] {
            let stopped = run("parts", fraction).with(&["train.stop_after=5"]);
            succeed(stopped.launch(2));
            let resumed = stopped.with(&[
                "train.stop_after=9".to_owned(),
                "offload.gpu_resident_fraction=0.6".to_owned(),
            ]);
            succeed(resumed.launch(2));
            assert_eq!(resumed.bits("loss"), host.bits("loss"), "{fraction}");
            assert_eq!(resumed.fingerprint(), host.fingerprint(), "{fraction}");
        }
    }
}

/// Settings of a run with its state on drives, which has the file of its tiles in `drive`.
fn with_state_on_drives(drive: &[String], update: &str, fraction: &str) -> Vec<String> {
    let settings = [
        "model.num_hidden_layers=6".to_owned(),
        "gradient_accumulation_steps=2".to_owned(),
        format!("offload.optimizer_step={update}"),
        format!("offload.gpu_resident_fraction={fraction}"),
        "offload.commit_every=2".to_owned(),
        "train.checkpoint_every=3".to_owned(),
        "train.checkpoints_kept=0".to_owned(),
    ];
    [drive, &settings].concat()
}

#[test]
fn units_in_gpu_memory_change_no_bit_of_a_run_on_drives_and_come_back_after_a_kill() {
    if !has_gpus(
        1,
        "units_in_gpu_memory_change_no_bit_of_a_run_on_drives_and_come_back_after_a_kill",
    ) {
        return;
    }
    let harness = Harness::new();
    for update in ["deferred", "immediate"] {
        let run = |name: &str, fraction: &str| {
            let run = harness.run(&format!("{name}-{update}"), &[STEPS]);
            run.with(&with_state_on_drives(&harness.nvme(), update, fraction))
        };
        let none = run("none", "0");
        none.train();
        for fraction in ["0.5", "1", "auto"] {
            let whole = run(&format!("whole-{fraction}"), fraction);
            whole.train();
            assert_eq!(whole.bits("loss"), none.bits("loss"), "{fraction}");
            assert_eq!(whole.fingerprint(), none.fingerprint(), "{fraction}");
            // Killed before a commit, and while one is made; the rest with other units there.
            for (point, number) in [(Point::Updated, 9), (Point::Committing, 3)] {
                let name = format!("killed-{fraction}-{}", point.name());
                let cut = run(&name, fraction);
                assert!(killed(cut.command("train"), point, number), "{name}");
                let rest = cut.with(&["offload.gpu_resident_fraction=0.3"]);
                rest.train();
                assert_eq!(rest.bits("loss"), none.bits("loss"), "{name}");
                assert_eq!(rest.fingerprint(), none.fingerprint(), "{name}");
            }
        }
    }
}

#[test]
fn tiles_in_gpu_and_host_memory_change_no_bit_of_a_run_and_its_checkpoints() {
    if !has_gpus(
        1,
        "tiles_in_gpu_and_host_memory_change_no_bit_of_a_run_and_its_checkpoints",
    ) {
        return;
    }
    let harness = Harness::new();
    for update in ["deferred", "immediate"] {
        let run = |name: &str, fraction: &str| {
            harness
                .run(&format!("{name}-{update}"), &[STEPS])
                .with(&with_state_in_host_memory(update, fraction))
                .with(&["train.checkpoints_kept=0"])
        };
        let host = run("host", "0");
        host.train();
        for fraction in ["0.4", "0.8", "1", "auto"] {
            let whole = run(&format!("whole-{fraction}"), fraction);
            whole.train();
            assert_eq!(whole.bits("loss"), host.bits("loss"), "{fraction}");
            assert_eq!(whole.fingerprint(), host.fingerprint(), "{fraction}");
            let stopped = run(&format!("stopped-{fraction}"), fraction);
            let stopped = stopped.with(&["train.stop_after=5"]);
            stopped.train();
            // The rest with the tiles elsewhere, from a checkpoint in the middle.
            let resumed = stopped.with(&[
                "train.stop_after=9".to_owned(),
                "offload.gpu_resident_fraction=0.6".to_owned(),
            ]);
            resumed.train();
            assert_eq!(resumed.bits("loss"), host.bits("loss"), "{fraction}");
            assert_eq!(resumed.fingerprint(), host.fingerprint(), "{fraction}");
        }
    }
}
