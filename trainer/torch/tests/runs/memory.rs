//! Runs without a store, which save checkpoints in the run directory and resume from them.
//!
//! Errors that these tests find: a stopped and resumed run differs from an uninterrupted one; a signal loses
//! work; an evaluation changes the training; accumulation is wrong. Losses and fingerprints are compared bit
//! by bit.

use std::process::{Command, Stdio};

use crate::harness::{Harness, fail, finish, spawn, succeed, until, where_mounted};

#[test]
fn a_finished_run_started_again_changes_nothing_and_fresh_starts_over() {
    let harness = Harness::new();
    let run = harness.run("run", &[]);
    run.train();
    let (losses, fingerprint) = (run.bits("loss"), run.fingerprint());
    assert!(run.train().contains("resumed at step 6"));
    assert_eq!(
        (run.bits("loss"), run.fingerprint()),
        (losses.clone(), fingerprint.clone())
    );
    let mut again = run.command("train");
    again.arg("--fresh");
    assert!(crate::harness::succeed(again).contains("started with random weights"));
    assert_eq!((run.bits("loss"), run.fingerprint()), (losses, fingerprint));
}

#[test]
fn a_run_without_space_for_its_checkpoint_is_refused_before_its_first_step() {
    let harness = Harness::new();
    let run = harness.run("run", &[]);
    std::fs::create_dir_all(&run.dir).unwrap();
    let mount = format!("mount -t tmpfs -o size=256k none '{}'", run.dir.display());
    for verb in ["plan", "train"] {
        let Some(inside) = where_mounted(&mount, &run.command(verb)) else {
            println!(
                "skipped: a_run_without_space_for_its_checkpoint_is_refused_before_its_first_step: mounting a tmpfs needs root"
            );
            return;
        };
        let text = fail(inside);
        assert!(
            text.contains("is kept only in checkpoints there") && text.contains("train.run_dir"),
            "{verb}: {text}"
        );
        assert!(!text.contains("step 1"), "{text}");
    }
    // The weights of another run are copied into the run directory when it starts.
    let from = [format!(
        "model={{from = \"{}\"}}",
        harness.run("first", &[]).dir.display()
    )];
    harness.run("first", &["train.stop_after=1"]).train();
    let run = harness.run("run", &[]).with(&harness.nvme()).with(&from);
    let inside = where_mounted(&mount, &run.command("train")).expect("it was mounted before");
    let text = fail(inside);
    assert!(
        text.contains("model.from: the file system of ")
            && text.contains("a copy of the other run's weights takes "),
        "{text}"
    );
    assert!(harness.store_files().is_empty(), "no store was created");
}

#[test]
fn a_signal_ends_the_run_after_its_step_with_everything_saved() {
    let harness = Harness::new();
    let sets = ["train.steps=100000", "scheduler={}", "train.log_every=1"];
    let run = harness.run("run", &sets);
    let child = spawn(run.command("train"));
    let child = until(child, "three steps", || run.steps_written() >= 3);
    rustix::process::kill_process(
        rustix::process::Pid::from_child(&child),
        rustix::process::Signal::TERM,
    )
    .unwrap();
    let output = finish(child);
    // Like a program that the signal ended; a finished run has status 0.
    assert_eq!(output.status.code(), Some(143), "{output:?}");
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(
        said.contains("\nnext      the same command resumes the run"),
        "{said}"
    );
    let steps = run.metrics().len();
    assert!(
        run.fingerprint().starts_with(&format!("step {steps}\n")),
        "all {steps} steps are saved"
    );
}

#[test]
fn evaluation_appears_and_changes_nothing() {
    let harness = Harness::new();
    let plain = harness.run("plain", &["data.validation_fraction=0.1"]);
    let evaluated = harness.run(
        "evaluated",
        &["data.validation_fraction=0.1", "train.eval_every=3"],
    );
    plain.train();
    evaluated.train();
    assert_eq!(plain.bits("loss"), evaluated.bits("loss"));
    assert_eq!(plain.fingerprint(), evaluated.fingerprint());
    let steps: Vec<u64> = evaluated
        .metrics()
        .iter()
        .filter(|line| line["eval_loss"].is_number())
        .map(|line| line["step"].as_u64().expect("a step"))
        .collect();
    assert_eq!(steps, [3, 6]);
    for line in evaluated.metrics() {
        let mut keys: Vec<&str> = line
            .as_object()
            .expect("an object")
            .keys()
            .map(String::as_str)
            .collect();
        keys.retain(|key| !key.starts_with("eval_"));
        let expected = [
            "backward_s",
            "bound_s",
            "device_grad_read_bytes",
            "device_grad_written_bytes",
            "device_read_bytes",
            "device_written_bytes",
            "epoch",
            "exchange_s",
            "forward_s",
            "gathered_bytes",
            "grad_norm",
            "grads_held_bytes",
            "host_bytes",
            "loss",
            "lr",
            "reduced_bytes",
            "step",
            "step_s",
            "tokens",
            "unix_s",
            "update_s",
            "waited_s",
        ];
        keys.sort_unstable();
        assert_eq!(keys, expected);
    }
}

#[test]
fn two_micro_batches_are_close_to_one_of_twice_the_size() {
    let harness = Harness::new();
    let one = harness.run("one", &["train_micro_batch_size_per_gpu=4"]);
    let two = harness.run("two", &["gradient_accumulation_steps=2"]);
    one.train();
    two.train();
    for (one, two) in one.metrics().iter().zip(two.metrics()) {
        for key in ["loss", "grad_norm"] {
            let (one, two) = (one[key].as_f64().unwrap(), two[key].as_f64().unwrap());
            assert!((one - two).abs() < 1e-4 * one, "{key}: {one} and {two}");
        }
        assert_eq!(one["tokens"], two["tokens"]);
    }
}

#[test]
fn a_tied_head_trains_too() {
    let harness = Harness::new();
    let run = harness.run(
        "tied",
        &[
            "model.tie_word_embeddings=true",
            "train.steps=30",
            "scheduler={}",
        ],
    );
    run.train();
    let losses: Vec<f64> = run
        .metrics()
        .iter()
        .map(|line| line["loss"].as_f64().unwrap())
        .collect();
    assert!(losses[29] < losses[0] - 0.5, "{losses:?}");
}

#[test]
fn a_damaged_checkpoint_is_named_and_the_one_before_kept() {
    let harness = Harness::new();
    let run = harness.run("run", &["train.checkpoint_every=3"]);
    run.train();
    let newest = run.dir.join("checkpoints/step-00000006/tiles.0");
    let mut bytes = std::fs::read(&newest).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    std::fs::write(&newest, bytes).unwrap();
    let fingerprint_before = {
        let text = run.refused();
        let says = "step-00000006/tiles.0 is damaged";
        assert!(text.contains(says), "{text}");
        std::fs::remove_dir_all(newest.parent().unwrap()).unwrap();
        run.fingerprint()
    };
    assert!(fingerprint_before.starts_with("step 3\n"));
    assert!(run.train().contains("resumed at step 3"));
    assert_eq!(run.metrics().len(), 6);
}

#[test]
fn new_directories_are_synced_before_the_first_checkpoint_is_complete() {
    let harness = Harness::new();
    let run = harness.run("new", &["train.stop_after=1"]);
    let trace = harness.path("trace");
    let plain = run.command("train");
    let mut traced = Command::new("strace");
    let calls = "trace=mkdir,mkdirat,fsync,rename,renameat,renameat2";
    traced
        .args(["-f", "-y", "-s", "4096", "-e", calls, "-o"])
        .arg(&trace)
        .arg(plain.get_program())
        .args(plain.get_args())
        .env("GOMP_SPINCOUNT", "20000")
        .env("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    if Command::new("strace")
        .args(["-o", "/dev/null", "true"])
        .output()
        .is_ok_and(|probe| probe.status.success())
    {
        succeed(traced);
    } else {
        println!(
            "skipped: new_directories_are_synced_before_the_first_checkpoint_is_complete: strace is missing or not permitted"
        );
        return;
    }
    let trace = std::fs::read_to_string(trace).unwrap();
    let lines: Vec<&str> = trace.lines().collect();
    let named = lines
        .iter()
        .position(|line| line.contains("rename") && line.contains("step-00000001.partial"))
        .expect("the checkpoint was renamed");
    for (dir, above) in [
        (run.dir.join("checkpoints"), run.dir.clone()),
        (run.dir.clone(), harness.path("runs")),
        (harness.path("runs"), harness.path("")),
    ] {
        let made = format!("\"{}\", 0", dir.display());
        let made = lines
            .iter()
            .position(|line| {
                line.contains("mkdir") && line.contains(&made) && line.ends_with("= 0")
            })
            .unwrap_or_else(|| panic!("{} was not created: {trace}", dir.display()));
        let above = above.canonicalize().unwrap();
        let flushed = format!("<{}>", above.display());
        assert!(
            lines[made..named]
                .iter()
                .any(|line| line.contains("fsync(") && line.contains(&flushed)),
            "{} was not synced: {trace}",
            above.display()
        );
    }
}
