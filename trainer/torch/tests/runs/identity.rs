//! A run's identity is kept in its directory and does not depend on the path; the store of a deleted run is
//! found and removed.
//!
//! Errors that these tests find: a renamed run starts again beside its own store, or `export` does not find
//! its store; a copied directory overwrites the store of the original; a damaged record ends a run whose
//! weights are intact; the store of a deleted run stays for ever; a live run is deleted.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use crate::harness::{Harness, Run, fail, finish, spawn, succeed, until, words};

/// Makes a run of `harness` in the directory `runs/NAME`.
fn run(harness: &Harness, name: &str, until: u64) -> Run {
    harness
        .run(name, &[&format!("train.stop_after={until}")])
        .with(&harness.nvme())
}

fn verb(run: &Run, verb: &str, args: &[&Path]) -> std::process::Command {
    let mut command = run.program();
    command.arg(verb).args(args);
    command
}

fn rename(run: &Run, name: &str) -> PathBuf {
    let to = run.dir.with_file_name(name);
    std::fs::rename(&run.dir, &to).expect("renamed");
    to
}

#[test]
fn a_renamed_run_resumes_and_can_be_exported() {
    let harness = Harness::new();
    let whole = run(&harness, "whole", 6);
    whole.train();
    let first = run(&harness, "first", 3);
    first.train();
    let second = rename(&first, "second");
    let out = harness.path("out");
    let output = finish(spawn(verb(
        &first,
        "export",
        &[&second, Path::new("--out"), &out],
    )));
    let (said, err) = words(&output);
    assert!(
        output.status.success() && said.contains("exported step 3"),
        "{said}{err}"
    );
    let was = format!(
        "was moved from {}",
        std::fs::canonicalize(harness.path("runs"))
            .unwrap()
            .join("first")
            .display()
    );
    assert!(err.contains(&was), "{err}");
    let moved = run(&harness, "second", 6);
    assert!(moved.train().contains("resumed at step 3"));
    assert_eq!(moved.bits("loss"), whole.bits("loss"));
    assert_eq!(moved.fingerprint(), whole.fingerprint());
    assert_eq!(harness.store_files().len(), 2, "no other store was made");
    // Another run at the old path has its own store.
    run(&harness, "first", 1).train();
    assert_eq!(harness.store_files().len(), 3);
    assert_eq!(moved.fingerprint(), whole.fingerprint());
}

#[test]
fn a_copied_run_does_not_use_the_store_of_the_original() {
    let harness = Harness::new();
    let first = run(&harness, "first", 3);
    first.train();
    let fingerprint = first.fingerprint();
    let copy = run(&harness, "copy", 6);
    std::fs::create_dir(&copy.dir).unwrap();
    for name in ["job", "run.json", "metrics.jsonl"] {
        std::fs::copy(first.dir.join(name), copy.dir.join(name)).unwrap();
    }
    let text = copy.refused();
    assert!(text.contains("is a copy of the run in "), "{text}");
    let mut fresh = copy.command("train");
    fresh.arg("--fresh");
    succeed(fresh);
    assert_eq!(first.fingerprint(), fingerprint);
    succeed(verb(&copy, "remove", &[&copy.dir, Path::new("--yes")]));
    assert_eq!(first.fingerprint(), fingerprint);
}

#[test]
fn an_answer_of_no_deletes_nothing_and_says_so_in_the_exit_status() {
    if Command::new("script").arg("--version").output().is_err() {
        println!("skipped: no `script`, which makes a terminal: the question of remove");
        return;
    }
    let harness = Harness::new();
    let store = harness.path("offloadd-gone-1.tiles");
    std::fs::write(&store, "").unwrap();
    let remove = format!(
        "{} remove {}",
        crate::harness::trainer().display(),
        store.display()
    );
    for (answer, status) in [("n", 1), ("y", 0)] {
        let mut command = Command::new("script");
        command
            .args(["--quiet", "--return", "--command", &remove, "/dev/null"])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let mut stdin = child.stdin.take().unwrap();
        writeln!(stdin, "{answer}").unwrap();
        let output = child.wait_with_output().unwrap();
        assert_eq!(output.status.code(), Some(status), "{output:?}");
        assert_eq!(store.exists(), answer == "n", "{output:?}");
    }
}

#[test]
fn a_damaged_record_is_rebuilt_and_the_run_resumes_with_equal_bits() {
    let harness = Harness::new();
    let whole = run(&harness, "whole", 6);
    whole.train();
    let name = "damaged";
    run(&harness, name, 1).train();
    let record = run(&harness, name, 1).dir.join("run.json");
    let mut bytes = std::fs::read(&record).unwrap();
    let (at, past) = (bytes.len() / 2, bytes.len() / 2 + 16);
    bytes[at..past].fill(0);
    std::fs::write(&record, &bytes).unwrap();
    // A reader without the configuration cannot rebuild the record; its message says who can.
    let text = fail(verb(
        &whole,
        "export",
        &[
            record.parent().unwrap(),
            Path::new("--out"),
            &harness.path("out"),
        ],
    ));
    assert!(
        text.contains("`trainer train` with the run's configuration rebuilds it"),
        "{text}"
    );
    let said = run(&harness, name, 3).train();
    assert!(
        said.contains("run.json was damaged (") && said.contains("rebuilt from the store's record"),
        "{said}"
    );
    assert!(said.contains("resumed at step 1"), "{said}");
    assert_eq!(
        std::fs::read(record.with_extension("json.damaged")).unwrap(),
        bytes
    );
    // The tile size comes from the store, not from the settings.
    std::fs::remove_file(&record).unwrap();
    let other =
        run(&harness, name, 6).with(&["offload.tile_elems=8192", "offload.staging_bytes=400000"]);
    let text = other.refused();
    assert!(
        text.contains("tile_elems was 4096 and is now 8192"),
        "{text}"
    );
    let rest = run(&harness, name, 6);
    assert!(rest.train().contains("resumed at step 3"));
    assert_eq!(rest.bits("loss"), whole.bits("loss"));
    assert_eq!(rest.fingerprint(), whole.fingerprint());
}

#[test]
fn a_damaged_record_of_a_run_in_memory_is_rebuilt_from_its_newest_checkpoint() {
    let harness = Harness::new();
    let run = |until: u64| harness.run("run", &[&format!("train.stop_after={until}")]);
    run(2).train();
    std::fs::write(run(2).dir.join("run.json"), "{").unwrap();
    let said = run(4).train();
    assert!(
        said.contains("rebuilt from the newest checkpoint"),
        "{said}"
    );
    assert!(said.contains("resumed at step 2"), "{said}");
}

#[test]
fn the_store_of_a_run_of_the_python_package_is_not_taken_for_a_deleted_runs() {
    let harness = Harness::new();
    let own = run(&harness, "own", 1);
    own.train();
    let (store, dir) = (
        harness.path("drive/offloadd-x.tiles"),
        harness.path("script"),
    );
    std::fs::write(&store, "tiles").unwrap();
    std::fs::create_dir(&dir).unwrap();
    std::os::unix::fs::symlink(&dir, store.with_extension("run")).unwrap();
    let list = || succeed(verb(&own, "runs", &[&harness.path("drive")]));
    for (text, is_listed) in [(r#"{"job": "y"}"#, true), (r#"{"job": "x"}"#, false)] {
        std::fs::write(dir.join("store.json"), text).unwrap();
        let said = list();
        assert_eq!(said.contains("store without a run"), is_listed, "{said}");
    }
    let text = fail(verb(&own, "remove", &[&store, Path::new("--yes")]));
    assert!(text.contains("belongs to the run in "), "{text}");
    assert!(store.exists());
}

#[test]
fn the_store_of_a_deleted_run_is_listed_and_removed() {
    let harness = Harness::new();
    let [gone, there] = ["gone", "there"].map(|name| run(&harness, name, 1));
    gone.train();
    let store = harness.store_files().remove(0);
    there.train();
    let list = |dir: &str| succeed(verb(&there, "runs", &[&harness.path(dir)]));
    assert!(!list("runs").contains("store without a run"));
    let text = fail(verb(&there, "remove", &[&store, Path::new("--yes")]));
    assert!(text.contains("belongs to the run in "), "{text}");
    std::fs::remove_dir_all(&gone.dir).unwrap();
    for dir in ["runs", "drive"] {
        let said = list(dir);
        let named = format!(
            "trainer remove {}",
            std::fs::canonicalize(&store).unwrap().display()
        );
        assert!(
            said.matches("store without a run").count() == 1 && said.contains(&named),
            "{said}"
        );
    }
    succeed(verb(&there, "remove", &[&store, Path::new("--yes")]));
    assert!(!list("drive").contains("store without a run"));
    assert_eq!(
        std::fs::read_dir(harness.path("drive")).unwrap().count(),
        2,
        "a store and its link"
    );
    there.fingerprint();
}

#[test]
fn a_run_is_removed_with_its_store_unless_it_is_being_trained() {
    let harness = Harness::new();
    let run = harness
        .run("run", &["train.steps=100000", "scheduler={}"])
        .with(&harness.nvme());
    let mut child = until(spawn(run.command("train")), "a step", || {
        run.steps_written() >= 1
    });
    let remove = |args: &[&Path]| verb(&run, "remove", args);
    let yes = Path::new("--yes");
    assert!(fail(remove(&[&run.dir, yes])).contains("another trainer is using"));
    child.kill().expect("killed");
    child.wait().expect("it ended");
    let text = fail(remove(&[&run.dir]));
    assert!(text.contains("--yes"), "{text}");
    assert!(run.dir.exists() && harness.store_files().len() == 1);
    std::fs::write(run.dir.join("notes.txt"), "mine").unwrap();
    let said = succeed(remove(&[&run.dir, yes]));
    assert!(
        said.contains(".tiles") && said.contains("contains other files"),
        "{said}"
    );
    assert_eq!(std::fs::read_dir(harness.path("drive")).unwrap().count(), 0);
    let left: Vec<_> = std::fs::read_dir(&run.dir).unwrap().collect();
    assert_eq!(left.len(), 1, "{left:?}");
    std::fs::remove_file(run.dir.join("notes.txt")).unwrap();
    assert!(fail(remove(&[&run.dir, yes])).contains("there is no run in"));
}
