//! State of an earlier start is resumed, moved aside or removed, and never lost silently.
//!
//! Errors that these tests find: a run that was killed before it saved anything overwrites its metrics;
//! `--fresh` forgets the earlier store and leaves its files on the drive. Each test examines the files.

use std::path::Path;

use crate::daemon::Daemon;
use crate::harness::{Harness, Run, spawn, succeed, until};

/// Trains, and kills the trainer with SIGKILL after it has written `steps` lines of metrics.
fn killed_after(run: &Run, steps: u64) {
    let child = spawn(run.command("train"));
    let mut child = until(child, "its steps", || run.steps_written() >= steps);
    child.kill().expect("killed");
    child.wait().expect("it ended");
}

fn lines(path: &Path) -> usize {
    let text =
        std::fs::read_to_string(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    text.lines().count()
}

#[test]
fn a_killed_run_without_saved_state_starts_again_and_says_so() {
    let harness = Harness::new();
    let long = ["train.steps=100000", "scheduler={}"];
    let run = |extra: &[&str]| harness.run("run", &long).with(extra);
    killed_after(&run(&[]), 3);
    let steps = run(&[]).metrics().len();
    let said = run(&["train.stop_after=2"]).train();
    assert!(
        said.contains(&format!(
            "note: no checkpoint was made of the {steps} steps in metrics.jsonl"
        )) && said.contains("train.checkpoint_every"),
        "{said}"
    );
    assert!(said.contains("started with random weights"), "{said}");
    let old = run(&[]).dir.join("metrics.jsonl.old");
    assert_eq!(lines(&old), steps, "the metrics of the killed run are kept");
    assert_eq!(run(&[]).metrics().len(), 2);
    // Reported only once: the second start can resume.
    let said = run(&["train.stop_after=2"]).train();
    assert!(!said.contains("no checkpoint was made"), "{said}");
    let mut fresh = run(&["train.stop_after=2"]).command("train");
    fresh.arg("--fresh");
    succeed(fresh);
    assert!(!old.exists(), "--fresh removes it too");
}

#[test]
fn a_run_whose_only_checkpoint_was_removed_starts_again_and_says_so() {
    let harness = Harness::new();
    let run = harness.run("run", &["train.checkpoint_every=0"]);
    run.train();
    let checkpoint = run.dir.join("checkpoints/step-00000006");
    let tiles = checkpoint.join("tiles.0");
    let mut bytes = std::fs::read(&tiles).unwrap();
    bytes[100] ^= 1;
    std::fs::write(&tiles, bytes).unwrap();
    assert!(run.refused().contains("step-00000006/tiles.0 is damaged"));
    std::fs::remove_dir_all(&checkpoint).unwrap();
    let said = run.train();
    assert!(
        said.contains("no checkpoint was made of the 6 steps in metrics.jsonl"),
        "{said}"
    );
    assert_eq!(lines(&run.dir.join("metrics.jsonl.old")), 6);
    assert_eq!(run.metrics().len(), 6);
}

#[test]
fn a_metrics_line_lost_in_a_crash_is_written_again() {
    let harness = Harness::new();
    let run = harness
        .run("run", &["train.stop_after=3"])
        .with(&harness.nvme());
    run.train();
    let whole = run.metrics();
    // As after a crash just after the commit of step 3.
    let path = run.dir.join("metrics.jsonl");
    let text = std::fs::read_to_string(&path).unwrap();
    let last = text.trim_end().rfind('\n').expect("three lines") + 1;
    std::fs::write(&path, &text[..last]).unwrap();
    assert!(run.train().contains("resumed at step 3"));
    let (before, after) = (&whole[2], &run.metrics()[2]);
    for key in ["step", "loss", "grad_norm", "lr", "tokens", "host_bytes"] {
        assert_eq!(before[key], after[key], "{key}");
    }
    for key in ["device_read_bytes", "device_written_bytes"] {
        let (before, after) = (before[key].as_f64().unwrap(), after[key].as_f64().unwrap());
        assert!(
            after > before / 2.0 && after < before * 2.0,
            "{key}: {before}, written again as {after}"
        );
    }
    let bound_s = |line: &serde_json::Value| line["bound_s"].as_f64().unwrap();
    assert!(
        bound_s(before) > 0.0 && bound_s(after) > 0.0,
        "{before} {after}"
    );
}

#[test]
fn fresh_removes_the_store_at_its_earlier_place() {
    let harness = Harness::new();
    let other = harness.path("other");
    std::fs::create_dir(&other).unwrap();
    let on_other = format!(
        "zero_optimization.offload_optimizer={{device = \"nvme\", nvme_path = \"{}\"}}",
        other.display()
    );
    let fresh = |run: Run| {
        let mut command = run.command("train");
        command.arg("--fresh");
        succeed(command)
    };
    let files_on_other = || {
        let entries = std::fs::read_dir(&other).unwrap();
        let paths = entries.map(|entry| entry.unwrap().path());
        paths
            .filter(|path| path.extension().is_some_and(|ending| ending == "tiles"))
            .count()
    };
    let run = || harness.run("run", &["train.stop_after=1"]);
    run().with(&harness.nvme()).train();
    assert_eq!((harness.store_files().len(), files_on_other()), (1, 0));
    fresh(run().with(&[&on_other]));
    assert_eq!((harness.store_files().len(), files_on_other()), (0, 1));
    // A copied directory is another run and does not affect the original's store.
    let copy = harness.run("copy", &["train.stop_after=1"]);
    std::fs::create_dir(&copy.dir).unwrap();
    std::fs::copy(run().dir.join("run.json"), copy.dir.join("run.json")).unwrap();
    fresh(copy);
    assert_eq!(files_on_other(), 1);
    fresh(run());
    assert_eq!((harness.store_files().len(), files_on_other()), (0, 0));
}

#[test]
fn fresh_reports_a_job_left_with_a_shared_daemon() {
    let harness = Harness::new();
    let daemon = Daemon::start(&harness);
    let nvme = "zero_optimization.offload_optimizer.device=nvme";
    let run = |sets: &[&str]| harness.run("run", sets).with(&["train.stop_after=1"]);
    run(&[nvme]).with(&daemon.socket()).train();
    let mut moved = run(&[]).command("train");
    moved.arg("--fresh");
    let said = succeed(moved);
    assert!(
        said.contains("note: job run-")
            && said.contains("is still in the store of the daemon it used"),
        "{said}"
    );
}
