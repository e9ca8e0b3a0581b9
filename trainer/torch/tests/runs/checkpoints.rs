//! Checkpoints made during training: each contains the bits of its step, and a run can return to any of them.
//!
//! Errors that these tests find: a checkpoint has tiles of two steps, or lacks some; checkpoints change the
//! training; returning to a checkpoint leaves metrics, tiles or checkpoints of later steps; other ranks or
//! another device read other bits; a kill leaves an incomplete checkpoint that is accepted; a full drive ends
//! the training or is not reported; old checkpoints are kept, or new ones removed.
//!
//! `OFFLOADD_ALL_CASES=1 cargo test -p trainer-torch --test runs checkpoints` makes more kills, and tries other ranks from memory too.

use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::Duration;

use rustix::process::{Pid, Resource, Rlimit, prlimit};
use training_state::run::{CheckpointName, Checkpoints};

use crate::harness::{Harness, Run, all_cases, fail, finish, spawn, succeed, until};
use crate::random::Random;

const STEPS: &str = "train.steps=9";

/// `trainer train --resume-from CHECKPOINT`.
fn from(run: &Run, checkpoint: &str) -> Command {
    let mut command = run.command("train");
    command.args(["--resume-from", checkpoint]);
    command
}

/// Names in the directory of checkpoints, or in one of its subdirectories.
fn names(run: &Run, below: &str) -> Vec<String> {
    let entries = std::fs::read_dir(run.dir.join("checkpoints").join(below)).expect("checkpoints");
    let mut names: Vec<String> = entries
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    names
}

/// A run without checkpoints, and its fingerprints after each of `steps`, of which 9 is the last.
fn whole(harness: &Harness, steps: &[u64]) -> (Run, Vec<(u64, String)>) {
    let whole = harness.run("whole", &[STEPS]);
    let after = |step: &u64| {
        let part = harness.run("whole", &[STEPS, &format!("train.stop_after={step}")]);
        part.train();
        (*step, part.fingerprint())
    };
    (whole, steps.iter().map(after).collect())
}

fn assert_same(one: &Run, other: &Run) {
    for key in ["step", "loss", "grad_norm", "lr", "tokens"] {
        assert_eq!(one.bits(key), other.bits(key), "{key}");
    }
    assert_eq!(one.fingerprint(), other.fingerprint());
}

#[test]
fn checkpoints_hold_the_bits_of_their_steps_and_change_none() {
    let harness = Harness::new();
    let (whole, fingerprints) = whole(&harness, &[3, 6, 9]);
    let nvme = harness.nvme();
    let places = [
        ("host", Vec::new()),
        ("at-once", {
            let mut sets = nvme.clone();
            sets.push("offload.optimizer_step=immediate".into());
            sets
        }),
        ("mixed", {
            let mut sets = nvme;
            sets.push("offload.resident_fraction=0.5".into());
            sets.push("offload.commit_every=4".into());
            sets
        }),
    ];
    for (name, sets) in places {
        let run = harness.run(
            name,
            &[
                STEPS,
                "train.checkpoint_every=3",
                "train.checkpoints_kept=0",
            ],
        );
        let run = run.with(&sets);
        let said = run.train();
        assert_eq!(
            said.matches("checkpoint of step ").count(),
            3,
            "{name}: {said}"
        );
        assert_eq!(
            names(&run, ""),
            ["step-00000003", "step-00000006", "step-00000009"],
            "{name}"
        );
        for (step, fingerprint) in &fingerprints {
            let saved = run.fingerprint_of(Some(CheckpointName::Step(*step)));
            assert_eq!(*fingerprint, saved, "{name}, step {step}");
        }
        assert_same(&whole, &run);
    }
}

#[test]
fn the_newest_checkpoints_are_kept_and_the_others_removed() {
    let harness = Harness::new();
    let run = harness.run(
        "run",
        &[
            STEPS,
            "train.checkpoint_every=2",
            "train.checkpoints_kept=3",
        ],
    );
    run.train();
    // The last checkpoint is made at the end of the run.
    let kept = ["step-00000006", "step-00000008", "step-00000009"];
    assert_eq!(names(&run, ""), kept);
    let on_store = harness.run("store", &[STEPS, "train.checkpoint_every=4"]);
    let on_store = on_store.with(&harness.nvme());
    on_store.train();
    assert_eq!(names(&on_store, ""), ["step-00000004", "step-00000008"]);
    let checkpoint = on_store
        .dir
        .join("checkpoints/step-00000008/checkpoint.json");
    let checkpoint: serde_json::Value =
        serde_json::from_slice(&std::fs::read(checkpoint).unwrap()).expect("JSON");
    let loss = &on_store.metrics()[7]["loss"];
    assert_eq!(checkpoint["save"]["state"]["last"]["loss"], *loss);
}

#[test]
fn a_run_that_returns_to_a_checkpoint_reaches_the_same_end() {
    let harness = Harness::new();
    let (whole, fingerprints) = whole(&harness, &[6, 9]);
    let sets = [
        STEPS,
        "train.checkpoint_every=3",
        "train.checkpoints_kept=0",
    ];
    for (name, nvme) in [("store", harness.nvme()), ("host", Vec::new())] {
        let run = harness.run(name, &sets).with(&nvme);
        run.train();
        let said = succeed(from(&run, "3"));
        assert!(said.contains("resumed at step 3"), "{said}");
        let says = "note: checkpoints newer than step 3 and a copy of the metrics were moved to ";
        assert!(said.contains(says), "{said}");
        assert_same(&whole, &run);
        let left = ["metrics.jsonl", "step-00000006", "step-00000009"];
        assert_eq!(names(&run, "aside-1"), left);
        let aside = run.dir.join("checkpoints/aside-1");
        let text = std::fs::read_to_string(aside.join("metrics.jsonl")).unwrap();
        assert_eq!(text.lines().count(), 9);
        let aside = CheckpointName::Dir(aside.join("step-00000006"));
        assert_eq!(run.fingerprint_of(Some(aside)), fingerprints[0].1);
        assert_eq!(names(&run, "").len(), 4, "checkpoints were made again");
    }
}

#[test]
fn a_checkpoint_moves_between_devices_and_runs() {
    let harness = Harness::new();
    let (whole, _) = whole(&harness, &[9]);
    let sets = [
        STEPS,
        "train.checkpoint_every=3",
        "train.checkpoints_kept=0",
    ];
    let on_store = |extra: &[&str]| harness.run("run", &sets).with(extra).with(&harness.nvme());
    let on_host = |extra: &[&str]| harness.run("run", &sets).with(extra);
    on_store(&["train.stop_after=4"]).train();
    let text = on_host(&[]).refused();
    assert!(
        text.contains("keeps its state in ") && text.contains("--to-checkpoint"),
        "{text}"
    );
    let said = succeed(from(&on_host(&["train.stop_after=7"]), "3"));
    assert!(said.contains("resumed at step 3"), "{said}");
    // The store still exists, with a step after the checkpoint.
    assert_eq!(harness.store_files().len(), 1);
    let said = succeed(from(&on_store(&[]), "6"));
    assert!(said.contains("resumed at step 6"), "{said}");
    assert_same(&whole, &on_store(&[]));
    // Another run begins from this run's checkpoint, and its metrics begin there.
    let other = harness.run("other", &sets);
    let checkpoint = on_store(&[]).dir.join("checkpoints/step-00000006");
    let stopped = harness.run("other", &sets).with(&["train.stop_after=7"]);
    succeed(from(&stopped, &checkpoint.display().to_string()));
    // It has its own copy of the checkpoint, which does not depend on the other run's.
    assert!(names(&other, "").contains(&"step-00000006".into()));
    other.train();
    assert_eq!(other.bits("step"), whole.bits("step")[5..]);
    assert_eq!(other.bits("loss"), whole.bits("loss")[5..]);
    assert_eq!(other.fingerprint(), whole.fingerprint());
    let mut fresh = on_host(&["train.stop_after=1"]).command("train");
    fresh.arg("--fresh");
    succeed(fresh);
    assert!(
        harness.store_files().is_empty(),
        "--fresh finds the earlier store"
    );
}

#[test]
fn another_number_of_ranks_resumes_from_a_checkpoint() {
    let harness = Harness::new();
    let sets = ["train.steps=6", "train.checkpoint_every=2"];
    let all = [("store", harness.nvme()), ("host", Vec::new())];
    for (name, nvme) in &all[..if all_cases() { 2 } else { 1 }] {
        let run = harness.run(name, &sets).with(nvme);
        succeed(run.launch(2));
        let checkpoint = run.dir.join("checkpoints/step-00000004");
        assert!(checkpoint.join("tiles.0").exists() && checkpoint.join("tiles.1").exists());
        // Reference: two ranks that ended after the same step.
        let ended = harness.run(&format!("{name}-ended"), &sets).with(nvme);
        let part = harness.run(&format!("{name}-ended"), &sets).with(nvme);
        succeed(part.with(&["train.stop_after=4"]).launch(2));
        assert_eq!(
            run.fingerprint_of(Some(CheckpointName::Step(4))),
            ended.fingerprint()
        );
        // One rank starts with the same bits; its later sums have another order.
        let begun = harness.run(name, &sets).with(nvme);
        let begun = begun.with(&["train.stop_after=4"]);
        succeed(from(&begun, "4"));
        assert_eq!(begun.fingerprint(), ended.fingerprint());
        ended.train();
        let said = succeed(from(&run, "4"));
        assert!(said.contains("resumed at step 4"), "{said}");
        assert_same(&ended, &run);
        // And from one rank to two.
        let mut two = run.launch(2);
        two.args(["--resume-from", "4"]);
        let said = succeed(two);
        assert!(said.contains("resumed at step 4"), "{said}");
        assert_eq!(run.metrics().len(), 6);
    }
}

#[test]
fn an_unusable_checkpoint_is_named_and_nothing_changes() {
    let harness = Harness::new();
    let sets = ["train.checkpoint_every=2", "train.checkpoints_kept=0"];
    let run = harness.run("run", &sets).with(&harness.nvme());
    run.train();
    let fingerprint = run.fingerprint();
    let refused = |checkpoint: &str, says: &str| {
        let text = fail(from(&run, checkpoint));
        assert!(text.contains(says), "{says:?} is not in {text}");
    };
    refused(
        "3",
        "step-00000003: the run has checkpoints of step 2, 4, 6",
    );
    refused("/nowhere", "there is no checkpoint in /nowhere");
    let tiles = run.dir.join("checkpoints/step-00000002/tiles.0");
    let good = std::fs::read(&tiles).unwrap();
    let mut bad = good.clone();
    let last = bad.len() - 20;
    bad[last] ^= 4;
    std::fs::write(&tiles, bad).unwrap();
    refused(
        "2",
        "step-00000002/tiles.0 is damaged: expected fingerprint ",
    );
    std::fs::write(&tiles, &good[..good.len() - 1]).unwrap();
    refused("2", "tiles.0 is damaged: ");
    let wide = harness.run("wide", &["model.hidden_size=64"]);
    let checkpoint = run
        .dir
        .join("checkpoints/step-00000004")
        .display()
        .to_string();
    let text = fail(from(&wide, &checkpoint));
    let says = "cannot be resumed by this run: model.hidden_size is 32 there and 64 here";
    assert!(text.contains(says), "{text}");
    let kept = ["step-00000002", "step-00000004", "step-00000006"];
    assert_eq!(names(&run, ""), kept);
    assert_eq!((run.fingerprint(), run.metrics().len()), (fingerprint, 6));
}

#[test]
fn a_skipped_step_has_its_checkpoint_too() {
    let harness = Harness::new();
    // The initial scale is too large, so the first steps overflow.
    let fp16 = [
        "fp16.enabled=true",
        "fp16.initial_scale_power=22",
        "fp16.hysteresis=1",
        "offload.staging_bytes=150000",
        "train.steps=12",
    ];
    let whole = harness.run("whole", &fp16);
    whole.train();
    for (name, nvme) in [("store", harness.nvme()), ("host", Vec::new())] {
        let run = harness.run(name, &fp16).with(&nvme);
        let run = run.with(&["train.checkpoint_every=1", "train.checkpoints_kept=0"]);
        run.train();
        assert_eq!(run.metrics()[1]["skipped"], true, "{name}");
        assert_eq!(names(&run, "").len(), 12, "{name}");
        let tiles = |step| {
            let fingerprint = run.fingerprint_of(Some(CheckpointName::Step(step)));
            fingerprint.split_once('\n').expect("lines").1.to_owned()
        };
        assert_eq!(tiles(1), tiles(2), "{name}: not a bit changed");
        assert_ne!(tiles(2), tiles(12), "{name}");
        succeed(from(&run, "2"));
        assert_eq!(run.fingerprint(), whole.fingerprint(), "{name}");
    }
}

#[test]
fn runs_are_listed_with_their_checkpoints_and_damage() {
    let harness = Harness::new();
    let sets = ["train.checkpoint_every=2", "train.checkpoints_kept=0"];
    let good = harness.run("good", &sets).with(&harness.nvme());
    good.train();
    harness.run("hurt", &["train.stop_after=1"]).train();
    for name in ["broken", "else/deep"] {
        std::fs::create_dir_all(harness.path(&format!("runs/{name}"))).unwrap();
    }
    std::fs::write(harness.path("runs/broken/run.json"), "{").unwrap();
    let hurt = harness.path("runs/hurt/checkpoints/step-00000001/tiles.0");
    std::fs::File::options()
        .write(true)
        .open(hurt)
        .unwrap()
        .set_len(100)
        .unwrap();
    std::fs::remove_file(&harness.store_files()[0]).unwrap();
    let runs = |more: &[&str]| {
        let mut command = Command::new(crate::harness::trainer());
        command
            .arg("runs")
            .args(more)
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        command
            .env("GOMP_SPINCOUNT", "20000")
            .env("CUBLAS_WORKSPACE_CONFIG", ":4096:8");
        command
    };
    let dir = harness.path("runs").display().to_string();
    let said = succeed(runs(&[&dir]));
    for says in [
        "/good\n  finished, ",
        " on disk\n  0.03 M parameters (2 layers of 32, fp32), step 6 of 6, loss ",
        "/hurt\n  stopped, ",
        "step 1 of 6, loss ",
        "\n  state in ",
        ".tiles is missing\n  checkpoint at step 2: 20",
        "\n  checkpoint at step 6: 20",
        " KiB, loss ",
        "/broken\n  damaged: ",
        "tiles.0 is damaged: ",
        " bytes, found 100",
        "\n3 runs, ",
    ] {
        assert!(said.contains(says), "{says:?} is not in {said}");
    }
    // As a trainer locks it.
    let lock = std::fs::File::open(good.dir.join(".lock")).unwrap();
    lock.lock().unwrap();
    let said = succeed(runs(&[&format!("{dir}/good")]));
    assert!(said.contains("/good\n  running, "), "{said}");
    drop(lock);
    let said = succeed(runs(&[&format!("{dir}/good"), "--json"]));
    let list: serde_json::Value = serde_json::from_str(&said).expect("JSON");
    let run = &list["runs"][0];
    assert_eq!(
        (list["runs"].as_array().unwrap().len(), run["step"].as_u64()),
        (1, Some(6))
    );
    assert_eq!(run["loss"], good.metrics()[5]["loss"]);
    let checkpoint = &run["checkpoints"][1];
    assert_eq!(
        (checkpoint["step"].as_u64(), &checkpoint["damaged"]),
        (Some(4), &serde_json::Value::Null)
    );
    assert_eq!(checkpoint["loss"], good.metrics()[3]["loss"]);
    let tiles = good.dir.join("checkpoints/step-00000004/tiles.0");
    assert_eq!(checkpoint["bytes"], std::fs::metadata(tiles).unwrap().len());
    let text = fail(runs(&["/nowhere"]));
    assert!(text.contains("cannot list /nowhere"), "{text}");
}

#[test]
fn a_full_drive_is_reported_and_training_continues() {
    let harness = Harness::new();
    let sets = [
        "train.steps=60",
        "train.checkpoint_every=2",
        "train.checkpoints_kept=0",
    ];
    // `kept` has a state in memory, which waits for space at its end.
    let name = "store";
    {
        let run = harness.run(name, &sets).with(&harness.nvme());
        let child = spawn(run.command("train"));
        let child = until(child, "three steps", || run.steps_written() >= 3);
        // From now on the drive behaves as if it had space for 100 KiB in any file.
        let limit = Rlimit {
            current: Some(100 << 10),
            maximum: Some(100 << 10),
        };
        let pid = Pid::from_raw(child.id() as i32);
        prlimit(pid, Resource::Fsize, limit).expect("a limit");
        let output = finish(child);
        let [out, err] =
            [&output.stdout, &output.stderr].map(|words| String::from_utf8_lossy(words));
        assert_eq!(output.status.code(), Some(1), "{name}: {out}\n{err}");
        for says in [
            "step-00000060.partial/tiles.0 after its first ",
            " bytes: File too large",
            "; earlier checkpoints are kept",
            " could not be made; the first error: ",
        ] {
            assert!(err.contains(says), "{name}: {says:?} is not in {err}");
        }
        assert_eq!(run.metrics().len(), 60, "{name}");
        let whole = Checkpoints::in_run_dir(&run.dir).list().unwrap();
        let newest = whole.last().expect("one was made before").step;
        assert!(
            newest < 60 && names(&run, "").len() == whole.len(),
            "{whole:?}"
        );
        for checkpoint in whole {
            run.fingerprint_of(Some(CheckpointName::Step(checkpoint.step)));
        }
        // With space again, the run resumes.
        let said = run.train();
        assert!(said.contains("resumed at step 60\n"), "{name}: {said}");
        assert!(names(&run, "").contains(&"step-00000060".into()));
    }
}

#[test]
fn kills_leave_only_complete_checkpoints() {
    let kills_min = if all_cases() { 12 } else { 3 };
    for name in ["store", "host"] {
        let harness = Harness::new();
        let sets = [
            "train.steps=100000",
            "train.checkpoint_every=1",
            "train.checkpoints_kept=3",
            "scheduler={}",
        ];
        let nvme = if name == "store" {
            harness.nvme()
        } else {
            Vec::new()
        };
        let run = harness.run(name, &sets).with(&nvme);
        let seed = Random::seed("instants");
        let mut random = Random::from_seed(seed);
        let (mut kills, mut hit, mut seen): (_, _, Vec<(u64, String)>) = (0, 0, Vec::new());
        while kills < kills_min || hit == 0 {
            assert!(
                kills < 10 * kills_min,
                "no kill came while a checkpoint was made, seed {seed}"
            );
            kills += 1;
            let begun = run.steps_written();
            let child = spawn(run.command("train"));
            let mut child = until(child, "two steps", || run.steps_written() >= begun + 2);
            std::thread::sleep(Duration::from_micros(random.below(30_000)));
            child.kill().expect("killed");
            child.wait().expect("it ended");
            let dir = run.dir.join("checkpoints");
            let cut_off = |path: PathBuf| path.extension().is_some();
            hit += std::fs::read_dir(&dir)
                .unwrap()
                .any(|entry| cut_off(entry.unwrap().path())) as usize;
            let checkpoints = Checkpoints::in_run_dir(&run.dir).list().unwrap();
            assert!(
                (1..=4).contains(&checkpoints.len()),
                "{name}, seed {seed}: {checkpoints:?}"
            );
            for checkpoint in checkpoints {
                let fingerprint = run.fingerprint_of(Some(CheckpointName::Step(checkpoint.step)));
                assert!(fingerprint.starts_with(&format!("step {}\n", checkpoint.step)));
                // Whenever the step is repeated, it has the same bits.
                match seen.iter().find(|(step, _)| *step == checkpoint.step) {
                    Some((_, before)) => assert_eq!(*before, fingerprint, "{name}, seed {seed}"),
                    None => seen.push((checkpoint.step, fingerprint)),
                }
            }
        }
        println!("{name}: {hit} of {kills} kills came while a checkpoint was made");
        let last = run.steps_written() + 2;
        let stop_after = format!("train.stop_after={last}");
        harness
            .run(name, &sets)
            .with(&nvme)
            .with(&[&stop_after])
            .train();
        assert!(!names(&run, "").iter().any(|name| name.contains('.')));
        // A run that is not killed has the same bits at these steps.
        let plain = harness.run("plain", &sets);
        let kept_all = plain.with(&[stop_after.as_str(), "train.checkpoints_kept=0"]);
        kept_all.train();
        for (step, fingerprint) in seen {
            let whole = kept_all.fingerprint_of(Some(CheckpointName::Step(step)));
            assert_eq!(fingerprint, whole, "{name}, step {step}, seed {seed}");
        }
    }
}
