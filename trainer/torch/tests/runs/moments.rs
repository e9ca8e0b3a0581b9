//! Whole runs whose optimizer keeps its moments in bf16 or 8 bits, or has one moment.
//!
//! Errors that these tests find: random bits or blocks that depend on the tile or on the start of the process; a state tile read with
//! the layout of another format, on export or when a run is resumed.

use crate::harness::{Harness, Run};
use crate::model_dir::{export, numbers, tensors};

const BF16: [&str; 2] = ["optimizer.moments=bf16", "train.steps=8"];

#[test]
fn moments_in_bf16_are_rounded_alike_on_drives_in_other_tiles_and_after_a_resume() {
    assert_rounded_alike(&BF16, 1e-3);
}

#[test]
fn moments_in_8_bits_are_rounded_alike_on_drives_in_other_tiles_and_after_a_resume() {
    // The momentum of a weight has 1 to 7 bits.
    assert_rounded_alike(&["optimizer.moments=8bit", "train.steps=8"], 1e-2);
}

/// Asserts that a run with the `settings` has the same bits wherever its state is, and losses within a fraction `far` of fp32 moments.
fn assert_rounded_alike(settings: &[&str], far_max: f64) {
    let harness = Harness::new();
    let memory = harness.run("memory", settings);
    memory.train();
    let wide = harness.run("wide", &["train.steps=8"]);
    wide.train();
    let near = memory.bits("loss").into_iter().zip(wide.bits("loss"));
    let near: Vec<[f64; 2]> = near.map(|(a, b)| [a, b].map(f64::from_bits)).collect();
    assert!(near.iter().any(|[a, b]| a != b), "nothing was rounded");
    assert!(
        near.iter().all(|[a, b]| (a / b - 1.0).abs() < far_max),
        "{near:?}"
    );
    let drives = |extra: &[&str]| {
        let run = harness.run("drives", settings).with(&harness.nvme());
        run.with(&["offload.tile_elems=8192", "offload.staging_bytes=200000"])
            .with(extra)
    };
    drives(&["train.stop_after=3"]).train();
    assert!(drives(&[]).train().contains("resumed at step 3"));
    assert_eq!(drives(&[]).bits("loss"), memory.bits("loss"));
    assert_eq!(drives(&[]).bits("grad_norm"), memory.bits("grad_norm"));
    let exported = |run: &Run, name: &str| {
        export(run, &harness.path(name), &[]);
        tensors(&harness.path(name))
    };
    let [one, other] =
        [(&memory, "one"), (&drives(&[]), "other")].map(|(run, name)| exported(run, name));
    assert!(one == other);
    let wide = exported(&wide, "wide-out");
    for (name, tensor) in &one {
        let pairs = numbers(tensor).into_iter().zip(numbers(&wide[name]));
        let far = pairs.map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
        println!("{name}: {far}");
        assert!(
            f64::from(far) < far_max,
            "{name}: {far} from the weights with fp32 moments"
        );
    }
}

#[test]
fn a_checkpoint_with_moments_in_bf16_resumes_and_is_refused_with_fp32() {
    let harness = Harness::new();
    let run = |extra: &[&str]| harness.run("run", &BF16).with(extra);
    let whole = harness.run("whole", &BF16);
    whole.train();
    run(&["train.stop_after=5"]).train();
    let text = run(&["optimizer.moments=fp32"]).refused();
    assert!(
        text.contains("optimizer.moments was bf16 and is now the default"),
        "{text}"
    );
    assert!(run(&[]).train().contains("resumed at step 5"));
    assert_eq!(run(&[]).fingerprint(), whole.fingerprint());
}

#[test]
fn lion_learns_alike_on_drives_in_other_tiles_and_after_a_resume_and_resumes_no_other_run() {
    const LION: [&str; 4] = [
        "optimizer={type=\"lion\",params={lr=1e-3,weight_decay=0.1}}",
        "optimizer.moments=bf16",
        "bf16.enabled=true",
        "train.steps=8",
    ];
    let harness = Harness::new();
    let memory = harness.run("memory", &LION);
    memory.train();
    let losses: Vec<f64> = memory
        .bits("loss")
        .into_iter()
        .map(f64::from_bits)
        .collect();
    assert!(losses[7] < losses[0] - 0.1, "{losses:?}");
    let drives = |extra: &[&str]| {
        let run = harness.run("drives", &LION).with(&harness.nvme());
        run.with(&["offload.tile_elems=8192", "offload.staging_bytes=200000"])
            .with(extra)
    };
    drives(&["train.stop_after=3"]).train();
    let text = drives(&["optimizer.type=AdamW"]).refused();
    assert!(
        text.contains("optimizer.type was Lion and is now the default"),
        "{text}"
    );
    assert!(drives(&[]).train().contains("resumed at step 3"));
    assert_eq!(drives(&[]).bits("loss"), memory.bits("loss"));
    let exported = |run: &Run, name: &str| {
        export(run, &harness.path(name), &[]);
        tensors(&harness.path(name))
    };
    assert!(exported(&memory, "one") == exported(&drives(&[]), "other"));
}
