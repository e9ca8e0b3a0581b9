//! Blocks' inputs wait in host memory where a GPU is too small for them, or where it is asked for.
//!
//! What could go wrong: an input comes back as another's, or before it is there, or a later one is written over it: other losses
//! on a GPU. Without a GPU they are in host memory anyway, and a run says so.

use kernels::gpu::Gpu;

use crate::lab::Lab;

#[test]
fn inputs_in_host_memory_change_no_bit_on_a_gpu() {
    if let Err(error) = Gpu::open(0) {
        assert!(error.is_absent(), "{error}");
        println!("skipped: inputs_in_host_memory_change_no_bit_on_a_gpu: {error}");
        return;
    }
    let lab = Lab::new();
    let on_gpu = ["train.device=gpu", "gradient_accumulation_steps=3"];
    let trained = |place: &str| {
        let run = lab
            .run(place, &on_gpu)
            .with(&[format!("train.activations={place}")]);
        run.train();
        (run.bits("loss"), run.bits("grad_norm"), run.digest())
    };
    assert_eq!(trained("device"), trained("host"));
}

#[test]
fn without_a_gpu_they_are_in_host_memory_anyway_and_the_run_says_so() {
    let lab = Lab::new();
    let sets = ["train.device=cpu"];
    let plain = lab.run("plain", &sets);
    plain.train();
    let asked = lab.run("asked", &sets).with(&["train.activations=host"]);
    let said = asked.train();
    assert!(
        said.contains("train.activations = \"host\" has no effect"),
        "{said}"
    );
    assert_eq!(plain.bits("loss"), asked.bits("loss"));
    let wrong = lab.run("wrong", &["train.activations=away"]).refused();
    assert!(wrong.contains("train.activations"), "{wrong}");
}
