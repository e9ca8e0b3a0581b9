//! Options that reduce the memory of activations: block inputs in host memory, and the MLP in chunks.
//!
//! Errors that these tests find: an input is replaced by another one, read before its copy is complete, or
//! overwritten by a later one; all of these change losses on a GPU. Without a GPU, inputs are in host memory
//! in any case, and a run reports it.

use kernels::gpu::Gpu;

use crate::harness::Harness;

#[test]
fn inputs_in_host_memory_change_no_bit_on_a_gpu() {
    if let Err(error) = Gpu::open(0) {
        assert!(error.is_absent(), "{error}");
        println!("skipped: inputs_in_host_memory_change_no_bit_on_a_gpu: {error}");
        return;
    }
    let harness = Harness::new();
    let on_gpu = ["train.device=gpu", "gradient_accumulation_steps=3"];
    let trained = |place: &str| {
        let run = harness
            .run(place, &on_gpu)
            .with(&[format!("offload.activations={place}")]);
        run.train();
        (run.bits("loss"), run.bits("grad_norm"), run.fingerprint())
    };
    assert_eq!(trained("gpu"), trained("cpu"));
}

#[test]
fn without_a_gpu_offloading_activations_has_no_effect_and_the_run_says_so() {
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
    let wrong = harness
        .run("wrong", &["offload.activations=away"])
        .refused();
    assert!(wrong.contains("offload.activations"), "{wrong}");
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
