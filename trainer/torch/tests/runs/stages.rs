//! ZeRO's stages learn the same, and each moves and holds what its definition says.
//!
//! Errors that these tests find: a stage changes nothing; weights that stay from forward to backward are
//! replaced by another unit's; gradients that wait are summed twice, or not over all ranks; ranks that each
//! hold everything diverge, or write a checkpoint that others cannot read; a run resumes in another stage
//! from other bits.

use crate::harness::{Harness, Run, all_cases, fail, succeed};

const SETS: [&str; 5] = [
    "train_batch_size=8",
    "train_micro_batch_size_per_gpu=2",
    "train.steps=20",
    "data.validation_fraction=0.1",
    "train.eval_every=10",
];

fn stage(number: u64) -> String {
    format!("zero_optimization.stage={number}")
}

fn numbers(run: &Run, key: &str) -> Vec<f64> {
    let metrics = run.metrics();
    metrics
        .iter()
        .filter_map(|line| line[key].as_f64())
        .collect()
}

fn assert_close(found: &Run, expected: &Run, what: &str) {
    for key in ["loss", "grad_norm", "eval_loss"] {
        let (found, expected) = (numbers(found, key), numbers(expected, key));
        assert_eq!(found.len(), expected.len(), "{what}: {key}");
        for (found, expected) in found.iter().zip(&expected) {
            let off = ((found - expected) / expected).abs();
            assert!(off < 1e-4, "{what}: {key} {found}, not {expected}");
        }
    }
}

#[test]
fn two_ranks_learn_the_same_in_every_stage_and_move_and_hold_what_it_says() {
    let harness = Harness::new();
    let alone = harness.run("alone", &SETS);
    alone.train();
    let losses = numbers(&alone, "loss");
    assert!(losses[19] < losses[0] - 0.3, "it learns: {losses:?}");
    let of = |number: u64| {
        let run = harness.run(&format!("stage-{number}"), &SETS);
        let run = run.with(&[stage(number)]);
        succeed(run.launch(2));
        assert_close(&run, &alone, &format!("stage {number}"));
        let waited = numbers(&run, "exchange_s");
        assert!(waited.iter().all(|seconds| *seconds > 0.0), "{waited:?}");
        let first = |key| numbers(&run, key)[0] as u64;
        let exchanged = [first("gathered_bytes"), first("reduced_bytes")];
        (exchanged, first("grads_held_bytes"))
    };
    let [zero, one, two, three] = [0, 1, 2, 3].map(of);
    // Blocks are gathered twice in stage 3, embedding and head once.
    let ([weights, grads], whole) = one;
    assert!(
        weights > 0 && grads == weights,
        "fp32 with equal padding: {one:?}"
    );
    assert_eq!(two.0, one.0);
    assert!(three.0[0] > weights * 5 / 4 && three.0[1] == grads);
    // Stage 0 moves no weights, and every rank gets every sum.
    assert_eq!(zero.0, [0, 2 * grads]);
    assert_eq!(zero.1, whole);
    assert!(
        whole <= weights,
        "less by only the padding of shards: {one:?}"
    );
    for (stage, held) in [(2, two.1), (3, three.1)] {
        assert!(held < whole, "stage {stage}: {held} of {whole}");
    }
}

#[test]
fn one_rank_has_the_same_bits_in_every_stage() {
    let harness = Harness::new();
    let all = ["bf16.enabled=true", "bf16.enabled=false"];
    for &dtype in &all[..if all_cases() { 2 } else { 1 }] {
        let sets = [&SETS[..], &["train.steps=4", "train.eval_every=2", dtype]].concat();
        let expected = harness.run("three", &sets);
        succeed_fresh(&expected);
        for number in [0, 1, 2] {
            let run = harness.run(&format!("stage-{number}"), &sets);
            let run = run.with(&[stage(number)]);
            succeed_fresh(&run);
            assert_eq!(run.bits("loss"), expected.bits("loss"));
            assert_eq!(run.bits("grad_norm"), expected.bits("grad_norm"));
            assert_eq!(run.fingerprint(), expected.fingerprint());
        }
    }
}

fn succeed_fresh(run: &Run) {
    let mut command = run.command("train");
    command.arg("--fresh");
    succeed(command);
}

#[test]
fn a_run_resumes_in_another_stage_and_with_other_ranks() {
    let harness = Harness::new();
    let sets = [&SETS[..], &["train.steps=10"]].concat();
    let alone = harness.run("alone", &sets);
    alone.train();
    let part = |until: u64, number: u64| {
        let run = harness.run("run", &sets).with(&[stage(number)]);
        run.with(&[format!("train.stop_after={until}")])
    };
    succeed(part(2, 0).launch(2));
    let fingerprint = part(2, 0).fingerprint();
    assert!(fingerprint.starts_with("step 2\n"), "{fingerprint}");
    // State that every rank holds is written once.
    assert_eq!(fingerprint, part(2, 3).fingerprint());
    let said = succeed(part(4, 1).launch(2));
    assert!(said.contains("resumed at step 2"), "{said}");
    assert!(
        said.contains("note: zero_optimization.stage was 0 up to step 2 and is 1"),
        "{said}"
    );
    succeed(part(6, 3).launch(4));
    part(8, 0).train();
    succeed(part(10, 2).launch(2));
    assert_close(&part(10, 2), &alone, "in turn");
}

#[test]
fn a_store_needs_stage_3_and_the_error_says_so() {
    let harness = Harness::new();
    let run = harness.run("run", &[]).with(&harness.nvme());
    run.with(&["train.stop_after=1"]).train();
    let text = harness.run("run", &[]).with(&[stage(1)]).refused();
    assert!(
        text.contains("keeps its state in ") && text.contains("keep it in the run directory"),
        "{text}"
    );
    let both = harness
        .run("other", &[])
        .with(&harness.nvme())
        .with(&[stage(2)]);
    let text = fail(both.launch(2));
    assert!(
        text.contains("zero_optimization.stage: 2 keeps parameters") && text.lines().count() == 1,
        "{text}"
    );
}
