//! Runs whose tiles are in GPU memory for some units, and in host memory for the others.
//!
//! Errors that these tests find: a unit that is read from the wrong place, updated twice or not at all; a checkpoint without the tiles
//! that only the GPU has, or with those of another step.

use kernels::gpu::Gpu;

use crate::harness::Harness;

const STEPS: &str = "train.steps=9";

#[test]
fn tiles_in_gpu_and_host_memory_change_no_bit_of_a_run_and_its_checkpoints() {
    if let Err(error) = Gpu::open(0) {
        assert!(error.is_absent(), "{error}");
        println!(
            "skipped: tiles_in_gpu_and_host_memory_change_no_bit_of_a_run_and_its_checkpoints: {error}"
        );
        return;
    }
    let harness = Harness::new();
    for update in ["deferred", "immediate"] {
        let run = |name: &str, fraction: &str| {
            harness.run(&format!("{name}-{update}"), &[STEPS]).with(&[
                "model.num_hidden_layers=6".to_owned(),
                "gradient_accumulation_steps=2".to_owned(),
                "zero_optimization.offload_param.device=cpu".to_owned(),
                "zero_optimization.offload_optimizer.device=cpu".to_owned(),
                format!("offload.optimizer_step={update}"),
                format!("offload.gpu_resident_fraction={fraction}"),
                "train.checkpoint_every=3".to_owned(),
                "train.checkpoints_kept=0".to_owned(),
            ])
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
