//! Validation, epochs and the end of a run.
//!
//! Errors that these tests find: an evaluation that was interrupted is lost or counted twice; the best weights are removed or
//! not exported; a run stops too early or never; a run of epochs has the wrong length.

use std::os::unix::process::ExitStatusExt;

use training_state::run::Checkpoints;

use crate::harness::{Harness, Run, finish, spawn, succeed};

/// Steps whose checkpoints exist.
fn checkpoints(run: &Run) -> Vec<u64> {
    let list = Checkpoints::in_run_dir(&run.dir)
        .list()
        .expect("the checkpoints");
    list.iter().map(|checkpoint| checkpoint.step).collect()
}

/// Step and bits of every evaluation.
fn evaluations(run: &Run) -> Vec<(u64, u64)> {
    let metrics = run.metrics();
    let evaluated = metrics.iter().filter_map(|line| {
        let loss = line["eval_loss"].as_f64()?;
        let perplexity = line["eval_perplexity"].as_f64().expect("a perplexity");
        assert_eq!(perplexity.to_bits(), loss.exp().to_bits());
        Some((line["step"].as_u64().unwrap(), loss.to_bits()))
    });
    evaluated.collect()
}

#[test]
fn a_run_of_epochs_says_where_it_ends_with_more_ranks() {
    let harness = Harness::new();
    let sets = ["train.epochs=2", "train.seq_len=512"];
    let run = |more: &[&str]| {
        let run = harness.run("run", &sets).with(&harness.nvme());
        run.with(more).without_steps()
    };
    let said = run(&["train.stop_after=10"]).train();
    assert!(!said.contains("warning: the run ends at epoch"), "{said}");
    let said = succeed(run(&[]).launch(2));
    assert!(
        said.contains("warning: the run ends at epoch 1.")
            && said.contains(", not at 2: its 10 steps so far took"),
        "{said}"
    );
}

#[test]
fn a_run_of_epochs_ends_with_its_data_and_evaluates_after_each_epoch() {
    let harness = Harness::new();
    let sets = [
        "train.epochs=2",
        "train.seq_len=512",
        "data.validation_fraction=0.1",
        "train.eval_every=\"epoch\"",
    ];
    let run = harness.run("run", &sets).without_steps();
    let said = run.train();
    let metrics = run.metrics();
    let epochs: Vec<f64> = metrics
        .iter()
        .map(|line| line["epoch"].as_f64().unwrap())
        .collect();
    // A step has two windows, so the last one may begin the next epoch.
    let per_step = epochs[0];
    assert!(
        (2.0..2.0 + per_step).contains(epochs.last().unwrap()),
        "{epochs:?}"
    );
    let steps = metrics.len() as u64;
    let ends: Vec<u64> = evaluations(&run).iter().map(|(step, _)| *step).collect();
    assert_eq!(ends, [steps.div_ceil(2), steps], "{epochs:?}");
    assert!(run.settings().contains(&format!("train.steps = {steps}\n")));
    assert!(
        said.contains("  epoch 2.0") && said.contains(", perplexity "),
        "{said}"
    );
    // The schedule ends with the data too.
    assert!(
        said.contains(&format!("down to 0 at step {steps}")),
        "{said}"
    );

    let much = harness.run(
        "much",
        &["train.epochs=5", "train.seq_len=2048", "train.stop_after=1"],
    );
    let said = much.without_steps().train();
    assert!(
        said.contains("warning: the run passes over its data 5.") && !said.contains("data 2."),
        "{said}"
    );
}

/// Settings of a run whose loss rises after its first steps.
const RISING: [&str; 5] = [
    "train.steps=30",
    "train.eval_every=1",
    "train.eval_batches=3",
    "data.validation_fraction=0.1",
    "optimizer.params.lr=0.5",
];

#[test]
fn losses_of_other_validation_data_do_not_end_a_run() {
    let harness = Harness::new();
    let begun = harness.run("run", &RISING).with(&["train.stop_after=10"]);
    begun.train();
    let more = [
        "train.early_stopping_patience=3",
        "data.validation_fraction=0.2",
    ];
    let said = harness.run("run", &RISING).with(&more).train();
    let note = "note: the validation data changed after the evaluation at step 10";
    assert!(said.contains(note), "{said}");
    let ended = said.split("finished (early stopping): at step ").nth(1);
    let step = ended.and_then(|rest| rest.split(' ').next()?.parse::<u64>().ok());
    // The first evaluation of the new data is the lowest one of it, and three more are not.
    assert!(step.is_none_or(|step| step >= 14), "{said}");
}

#[test]
fn a_run_stops_when_its_validation_loss_stalls_and_exports_its_best_weights() {
    let harness = Harness::new();
    let out = harness.path("best");
    let export = format!("train.export_to=\"{}\"", out.display());
    let sets = [
        "train.early_stopping_patience=3",
        "train.checkpoint_best=true",
        "train.checkpoints_kept=1",
        "train.checkpoint_every=1",
    ];
    let run = harness.run("run", &RISING).with(&sets).with(&[&export]);
    let said = run.train();
    let evaluations = evaluations(&run);
    let losses = evaluations
        .iter()
        .map(|(step, bits)| (f64::from_bits(*bits), *step));
    let (_, best) = losses.min_by(|a, b| a.0.total_cmp(&b.0)).unwrap();
    assert_eq!(evaluations.len() as u64, best + 3, "{evaluations:?}");
    assert!(said.contains(&format!("lowest at step {best} ")), "{said}");
    let ended = format!("finished (early stopping): at step {} of 30", best + 3);
    assert!(said.contains(&ended), "{said}");
    let mut command = run.program();
    command.arg("runs").arg(&run.dir);
    let said = succeed(command);
    assert!(said.contains("\n  finished (early stopping), "), "{said}");
    assert_eq!(checkpoints(&run), [best, best + 3]);

    let mut command = run.program();
    command
        .arg("export")
        .arg(&run.dir)
        .args(["--checkpoint", &best.to_string()]);
    command.arg("--out").arg(harness.path("again"));
    succeed(command);
    let weights = |dir: &str| std::fs::read(harness.path(dir).join("model.safetensors")).unwrap();
    assert_eq!(weights("best"), weights("again"));

    // A complete run is not trained further, and its export does not stand in its way.
    let again = harness.run("run", &RISING).with(&sets).with(&[&export]);
    assert!(again.train().contains("lowest at step"));
    assert_eq!(run.metrics().len(), evaluations.len());
    // A new run must not find the directory taken when it is complete.
    let other = harness.run("other", &RISING).with(&[&export]);
    let text = other.refused();
    assert!(
        text.contains("train.export_to: ") && text.contains("already exists"),
        "{text}"
    );
    assert!(!other.dir.join("metrics.jsonl").exists());
}

#[test]
fn a_run_killed_in_an_evaluation_evaluates_again_and_keeps_the_same_checkpoints() {
    let harness = Harness::new();
    let run = |name: &str| {
        let sets = [
            "train.early_stopping_patience=4",
            "train.checkpoint_best=true",
        ];
        harness.run(name, &RISING).with(&sets).with(&harness.nvme())
    };
    let whole = run("whole");
    whole.train();
    let killed = run("killed");
    // Each of the two blocks computes forward once a step and once in the evaluation after it.
    for forwards in [3, 3, 4] {
        let mut command = killed.command("train");
        command.env("OFFLOADD_KILL", format!("forward@{forwards}"));
        let output = finish(spawn(command));
        assert_eq!(output.status.signal(), Some(9), "{output:?}");
    }
    killed.train();
    assert_eq!(evaluations(&whole), evaluations(&killed));
    assert_eq!(whole.bits("loss"), killed.bits("loss"));
    assert_eq!(checkpoints(&whole), checkpoints(&killed));
    assert_eq!(whole.fingerprint(), killed.fingerprint());
}

#[test]
fn at_most_twenty_five_lines_precede_the_first_step() {
    let harness = Harness::new();
    let run = harness
        .run("run", &["train.log_every=1"])
        .with(&harness.nvme());
    let said = run.train();
    let before = said.lines().position(|line| line.contains("  step 1/6  "));
    let before = before.unwrap_or_else(|| panic!("no first step in {said}"));
    assert!((8..=25).contains(&before), "{said}");
    for part in [
        "bottleneck: ",
        "  I/O efficiency ",
        " s/step  ",
        "next      trainer export ",
    ] {
        assert!(said.contains(part), "{part}: {said}");
    }
    // The rest is in a file that is a run file itself.
    let settings = run.settings();
    assert!(
        settings.contains("# terms ") && settings.contains("train.seq_len = 16\n"),
        "{settings}"
    );
    let mut command = run.program();
    succeed({
        command.arg("plan").arg(run.dir.join("settings.toml"));
        command
    });
}
