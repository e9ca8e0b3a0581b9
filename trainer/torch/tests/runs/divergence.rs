//! A run whose loss or gradients are not finite ends with an error and keeps the step before.
//!
//! Errors that these tests find: good steps are lost with the bad one; the message names a wrong step; the
//! kept state contains a part of the failed update. Fingerprints are compared with those of a run that
//! stopped at the same step.

use crate::harness::{Harness, Run};

/// The rate is so large that the second step computes with weights of about 1e38 and its loss is not finite.
const DIVERGES: [&str; 3] = ["optimizer.params.lr=1e38", "scheduler={}", "train.steps=4"];

/// Checks that a diverging run keeps the steps before and says so.
fn keeps_what_was_good(run: &Run, stopped: &Run) {
    let text = run.refused();
    let line = text
        .lines()
        .find(|line| line.contains("training diverged"))
        .unwrap_or_else(|| panic!("it must diverge: {text}"));
    let good = run.steps_written();
    assert!(
        line.contains(&format!("step {}: ", good + 1))
            && line.contains(&format!("The state of step {good} was kept")),
        "{line}"
    );
    stopped.train();
    let fingerprint = run.fingerprint();
    assert!(
        fingerprint.starts_with(&format!("step {good}\n")),
        "{fingerprint}"
    );
    assert_eq!(fingerprint, stopped.fingerprint());
    // Started again, it resumes and diverges at the same step.
    assert_eq!(
        run.refused().lines().last(),
        Some(line),
        "a resumed run reports the same"
    );
    assert_eq!(run.steps_written(), good);
}

#[test]
fn a_diverged_run_in_memory_keeps_the_steps_before() {
    let harness = Harness::new();
    let stopped = harness
        .run("stopped", &DIVERGES)
        .with(&["train.stop_after=1"]);
    keeps_what_was_good(&harness.run("run", &DIVERGES), &stopped);
}

#[test]
fn a_diverged_run_on_a_store_keeps_the_steps_before() {
    let harness = Harness::new();
    let stopped = harness
        .run("stopped", &DIVERGES)
        .with(&["train.stop_after=1"]);
    for schedule in ["deferred", "immediate"] {
        // Nothing is committed during training, so the end must commit.
        let run = harness
            .run(schedule, &DIVERGES)
            .with(&harness.nvme())
            .with(&[
                "offload.commit_every=0".to_owned(),
                format!("offload.optimizer_step={schedule}"),
            ]);
        keeps_what_was_good(&run, &stopped);
    }
}
