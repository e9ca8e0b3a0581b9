//! What a run has trained is kept, or its user is told in time that it is not.
//!
//! Errors that these tests find: a crash, a closed terminal or a full disk loses steps without a word before; a store that was moved, or
//! whose drive is not mounted, is taken for another run or for none; words of `runs` and `export` promise a state that does not exist.

use std::fs::File;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use rustix::process::{Pid, Resource, Rlimit, Signal, kill_process, prlimit};
use training_state::run::Checkpoints;

use crate::harness::{Harness, Run, fail, finish, spawn, succeed, until, where_mounted, words};

const LONG: [&str; 2] = ["train.steps=100000", "scheduler={}"];

fn signal(child: &Child, signal: Signal) {
    kill_process(Pid::from_raw(child.id() as i32).unwrap(), signal).expect("the process runs");
}

/// `command`, started by the program and arguments in `starter`.
fn below(starter: &[&str], command: &Command) -> Command {
    let mut below = Command::new(starter[0]);
    below.args(&starter[1..]).arg(command.get_program());
    below.args(command.get_args());
    below.env("XDG_STATE_HOME", "/dev/null");
    below.stdout(Stdio::piped()).stderr(Stdio::piped());
    below
}

/// Output of `trainer VERB ARGS...`.
fn verb(run: &Run, verb: &str, args: &[&str]) -> Command {
    let mut command = run.program();
    command.arg(verb).args(args);
    command
}

fn has_checkpoint(run: &Run) -> bool {
    Checkpoints::in_run_dir(&run.dir)
        .list()
        .is_ok_and(|checkpoints| !checkpoints.is_empty())
}

fn text(path: &Path) -> String {
    path.to_str().unwrap().to_owned()
}

#[test]
fn a_state_in_memory_is_kept_by_time_and_on_signals_and_otherwise_warned_about() {
    let harness = Harness::new();
    let run = harness.run("run", &LONG);
    let out = harness.path("out");
    let mut command = run.command("train");
    command.stdout(File::create(&out).unwrap());
    let mut child = until(spawn(command), "three steps", || run.steps_written() >= 3);
    let said = std::fs::read_to_string(&out).unwrap();
    assert!(
        said.contains("warning: a crash, `kill -9` or a power cut loses all steps of this start: ")
            && said.contains("Set train.checkpoint_every, for example \"30min\""),
        "{said}"
    );
    let dir = text(&run.dir);
    let list = succeed(verb(&run, "runs", &[&dir]));
    assert!(
        list.contains("kept nothing: there is no checkpoint, and steps 1 to ")
            && list.contains(" are only in the memory of the running trainer"),
        "{list}"
    );
    let exported = text(&harness.path("exported"));
    let refused = fail(verb(&run, "export", &[&dir, "--out", &exported]));
    assert!(
        refused.contains("has no checkpoint yet") && refused.contains("SIGUSR1"),
        "{refused}"
    );
    signal(&child, Signal::USR1);
    child = until(child, "a checkpoint", || has_checkpoint(&run));
    child.kill().unwrap();
    child.wait().unwrap();
    let list = succeed(verb(&run, "runs", &[&dir]));
    assert!(
        list.contains("kept the checkpoint of step ") && list.contains(" lost"),
        "{list}"
    );
    // A closing terminal sends several.
    let timed = harness
        .run("run", &LONG)
        .with(&["train.checkpoint_every=1s"]);
    let before = Checkpoints::in_run_dir(&run.dir).newest().unwrap();
    // The tests themselves may run below `nohup`.
    let hearing = below(&["env", "--default-signal=HUP"], &timed.command("train"));
    let child = until(spawn(hearing), "a second checkpoint", || {
        Checkpoints::in_run_dir(&run.dir).newest().unwrap() != before
    });
    signal(&child, Signal::HUP);
    signal(&child, Signal::HUP);
    let output = finish(child);
    let (said, error) = words(&output);
    assert_eq!(output.status.code(), Some(129), "{said}\n{error}");
    assert!(
        said.contains("resumed at step ") && !said.contains("warning: a crash"),
        "{said}"
    );
    assert!(
        said.contains("stopped as asked: ") && said.contains("all of it in the checkpoint"),
        "{said}"
    );
    let list = succeed(verb(&run, "runs", &[&dir]));
    assert!(
        list.contains("kept all, in the checkpoint of step "),
        "{list}"
    );
    // As `nohup` starts it.
    let deaf = ["sh", "-c", "trap '' HUP; exec \"$@\"", "sh"];
    let mut ignoring = below(&deaf, &run.command("train"));
    ignoring.stdout(File::create(&out).unwrap());
    let steps = run.steps_written();
    let child = until(spawn(ignoring), "a step", || run.steps_written() > steps);
    signal(&child, Signal::HUP);
    let steps = run.steps_written();
    let child = until(child, "more steps", || run.steps_written() > steps + 3);
    signal(&child, Signal::TERM);
    assert_eq!(finish(child).status.code(), Some(143));
}

#[test]
fn a_state_in_memory_waits_for_space_for_its_checkpoint() {
    let harness = Harness::new();
    let whole = harness.run("whole", &[]);
    whole.train();
    for how in ["waits", "ends", "ends with room"] {
        let run = harness.run(how, &[]);
        // No file may become larger than 100 KiB, as if its drive were full.
        let plain = run.command("train");
        let mut limited = Command::new("bash");
        limited.args(["-c", "ulimit -S -f 100; exec \"$@\"", "bash"]);
        limited.arg(plain.get_program()).args(plain.get_args());
        let out = harness.path("out");
        limited.stdout(File::create(&out).unwrap());
        limited.stderr(std::process::Stdio::piped());
        let child = until(spawn(limited), "it waits", || {
            std::fs::read_to_string(&out)
                .unwrap()
                .contains("is kept in memory")
        });
        let said = std::fs::read_to_string(&out).unwrap();
        assert!(
            said.contains("the state of step 6 is kept in memory, because its checkpoint could not be written: ")
                && said.contains(" bytes: File too large")
                && said.contains(&format!("kill -USR1 {}", child.id()))
                && said.contains("without room it loses all of its steps"),
            "{said}"
        );
        if how == "ends" {
            signal(&child, Signal::TERM);
            let output = finish(child);
            assert_eq!(output.status.code(), Some(1));
            let (_, error) = words(&output);
            assert!(error.contains("1 checkpoint could not be made"), "{error}");
            let said = std::fs::read_to_string(&out).unwrap();
            assert!(
                said.contains(
                    "done: at step 6 of 6, and all of it is lost: there is no checkpoint; "
                ),
                "{said}"
            );
            assert!(!has_checkpoint(&run));
            continue;
        }
        let limit = Rlimit {
            current: None,
            maximum: None,
        };
        let pid = Pid::from_raw(child.id() as i32);
        prlimit(pid, Resource::Fsize, limit).expect("a limit");
        let told = match how {
            "waits" => Signal::USR1,
            _ => Signal::TERM,
        };
        signal(&child, told);
        let output = finish(child);
        let (said, error) = words(&output);
        assert!(output.status.success(), "{how}: {said}\n{error}");
        assert_eq!(run.fingerprint(), whole.fingerprint());
    }
}

#[test]
fn a_store_that_was_moved_is_the_same_run() {
    let harness = Harness::new();
    let whole = harness.run("whole", &[]).with(&harness.nvme());
    whole.train();
    let dirs = ["second", "third"].map(|name| harness.path(name));
    dirs.iter()
        .for_each(|dir| std::fs::create_dir(dir).unwrap());
    let on = |dir: &Path, stop: &str| {
        let paths = ["offload_param", "offload_optimizer"].map(|what| {
            format!(
                "zero_optimization.{what}={{device = \"nvme\", nvme_path = \"{}\"}}",
                dir.display()
            )
        });
        harness.run("run", &[stop]).with(&paths)
    };
    let first = harness.path("drive");
    on(&first, "train.stop_after=1").train();
    let run = on(&first, "train.stop_after=2");
    let job = run.dir.join("job");
    let job: serde_json::Value = serde_json::from_slice(&std::fs::read(job).unwrap()).unwrap();
    let name = format!("offloadd-{}.tiles", job["job"].as_str().unwrap());
    // The new directory is empty: nothing may begin there.
    let text_of = on(&dirs[0], "train.stop_after=2").refused();
    assert!(
        text_of.contains(&format!(
            "trainer move {} --nvme {}",
            run.dir.display(),
            dirs[0].display()
        )) && !text_of.contains("--fresh"),
        "{text_of}"
    );
    assert_eq!(std::fs::read_dir(&dirs[0]).unwrap().count(), 0);
    // Moved by hand.
    std::fs::rename(first.join(&name), dirs[0].join(&name)).unwrap();
    let said = on(&dirs[0], "train.stop_after=2").train();
    assert!(said.contains("resumed at step 1\n"), "{said}");
    // Moved by the program.
    let moved = verb(&run, "move", &[&text(&run.dir), "--nvme", &text(&dirs[1])]);
    let said = succeed(moved);
    assert!(said.contains("set nvme_path = "), "{said}");
    assert!(!dirs[0].join(&name).exists() && dirs[1].join(&name).exists());
    let said = on(&dirs[1], "train.stop_after=3").train();
    assert!(said.contains("resumed at step 2\n"), "{said}");
    // Into a checkpoint, on in memory, and back to a drive.
    let in_memory = |stop: &str| harness.run("run", &[stop]);
    let text_of = in_memory("train.stop_after=4").refused();
    assert!(
        text_of.contains("--to-checkpoint") && !text_of.contains("--fresh"),
        "{text_of}"
    );
    succeed(verb(&run, "move", &[&text(&run.dir), "--to-checkpoint"]));
    assert!(!dirs[1].join(&name).exists());
    let said = in_memory("train.stop_after=4").train();
    assert!(said.contains("resumed at step 3\n"), "{said}");
    let said = on(&first, "train.stop_after=6").train();
    assert!(said.contains("resumed at step 4\n"), "{said}");
    assert_eq!(run.fingerprint_of(None), whole.fingerprint());
    assert_eq!(run.bits("loss"), whole.bits("loss"));
}

#[test]
fn a_drive_that_is_not_mounted_is_not_replaced_by_the_disk_below() {
    let harness = Harness::new();
    let drive = harness.path("drive");
    let state = harness.path("state");
    let nvme = harness
        .run("nvme", &["train.stop_after=1"])
        .with(&harness.nvme());
    let dir = drive.join("runs/dir");
    let dir = harness
        .run("dir", &["train.stop_after=1"])
        .with(&[format!("train.run_dir={}", dir.display())]);
    for run in [&nvme, &dir] {
        let with_state = |mut command: Command| {
            command.env("XDG_STATE_HOME", &state);
            command
        };
        let mount = format!("mount -t tmpfs tmpfs {}", drive.display());
        let Some(mounted) = where_mounted(&mount, &run.command("train")) else {
            println!("skipped: no mount namespaces");
            return;
        };
        let mut mounted = with_state(mounted);
        // tmpfs may have no direct I/O; then only the directory of the run is tried.
        let output = mounted.output().unwrap();
        if !output.status.success() && std::ptr::eq(run, &nvme) {
            println!("skipped in part: {}", words(&output).1);
            continue;
        }
        assert!(output.status.success(), "{:?}", words(&output));
        if std::ptr::eq(run, &nvme) {
            let warned = words(&output).0;
            let warned = warned.contains(
                " keeps its files in memory: a power cut or a restart of the machine loses the run",
            );
            assert!(warned, "{:?}", words(&output));
        }
        let refused = fail(with_state(run.command("train")));
        assert!(
            refused.contains("is on a drive that is not mounted: ")
                && refused.contains("Nothing was written"),
            "{refused}"
        );
        assert_eq!(std::fs::read_dir(&drive).unwrap().count(), 0, "{refused}");
    }
}

#[test]
fn no_command_writes_below_a_mount_point_whose_drive_is_gone() {
    let harness = Harness::new();
    let [gone, state] = ["gone", "state"].map(|name| harness.path(name));
    let remembered = state.join("offloadd");
    [&gone, &remembered]
        .iter()
        .for_each(|dir| std::fs::create_dir_all(dir).unwrap());
    std::fs::write(
        remembered.join("mount-points"),
        format!("{}\n", gone.display()),
    )
    .unwrap();
    let run = harness
        .run("run", &["train.stop_after=1"])
        .with(&harness.nvme());
    run.train();
    let stored = harness.store_files();
    assert!(!stored.is_empty());
    let [dir, there, below, toml] = [
        &run.dir,
        &gone,
        &gone.join("weights"),
        &harness.path("new.toml"),
    ]
    .map(|path| text(path));
    let model = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/fixtures/hf/llama");
    let data = text(&harness.path("text"));
    let exports = harness.run("other", &[&format!("train.export_to={below}")]);
    for mut command in [
        verb(&run, "move", &[&dir, "--nvme", &there]),
        verb(&run, "export", &[&dir, "--out", &below]),
        verb(
            &run,
            "init",
            &[model, &data, "--nvme", &there, "--out", &toml],
        ),
        exports.command("train"),
    ] {
        command.env("XDG_STATE_HOME", &state);
        let refused = fail(command);
        assert!(
            refused.contains("is on a drive that is not mounted: ")
                && refused.contains("Nothing was written"),
            "{refused}"
        );
    }
    assert_eq!(std::fs::read_dir(&gone).unwrap().count(), 0);
    assert!(!Path::new(&toml).exists());
    assert_eq!(harness.store_files(), stored);
    let none = text(&harness.path("none"));
    let refused = fail(verb(&run, "init", &[model, &data, "--nvme", &none]));
    assert!(
        refused.contains("does not exist: create the directory"),
        "{refused}"
    );
    let list = succeed(verb(&run, "runs", &[&dir]));
    assert!(list.contains(", committed after every step"), "{list}");
}

#[test]
fn a_finished_run_that_is_extended_exports_again() {
    let harness = Harness::new();
    let out = harness.path("exported");
    let to = format!("train.export_to={}", out.display());
    let run = |steps: &str| harness.run("run", &[&to, steps]).with(&["scheduler={}"]);
    run("train.steps=2").train();
    let said = run("train.steps=4").train();
    assert!(said.contains("resumed at step 2\n"), "{said}");
    let before = PathBuf::from(format!("{}-step-2", out.display()));
    for dir in [&out, &before] {
        assert!(dir.join("model.safetensors").exists(), "{}", dir.display());
    }
    let said = run("train.steps=3").train();
    assert!(
        said.contains("done: the run is at step 4, beyond the 3 steps that the settings ask for"),
        "{said}"
    );
    // Another directory of this name is not the run's own.
    let other = harness.run("other", &[&to, "train.steps=2"]);
    assert!(other.refused().contains("already exists"));
}

#[test]
fn a_directory_that_is_not_text_is_refused() {
    let harness = Harness::new();
    let dir = harness
        .path("")
        .join(std::ffi::OsStr::from_bytes(b"bad-\xff"));
    std::fs::create_dir(&dir).unwrap();
    let run = harness.run("run", &["train.run_dir=here"]);
    let mut command = run.command("train");
    command.current_dir(&dir);
    let refused = fail(command);
    assert!(refused.contains("is not UTF-8 text"), "{refused}");
    let mut command = verb(&run, "export", &["--out", "x"]);
    command.arg(&dir).current_dir(&dir);
    assert!(fail(command).contains("is not UTF-8 text"));
    // One that was moved there, or is named so later, is listed all the same.
    let ok = harness.run("ok", &["train.stop_after=1"]);
    ok.train();
    std::fs::rename(&ok.dir, dir.join("ok")).unwrap();
    std::fs::create_dir(dir.join("empty")).unwrap();
    let mut command = verb(&run, "runs", &["--json"]);
    command.arg(&dir);
    let list: serde_json::Value = serde_json::from_str(&succeed(command)).expect("JSON");
    let named = |value: &serde_json::Value| value.as_str().unwrap().contains("bad-\u{fffd}/");
    assert!(
        named(&list["runs"][0]["dir"]) && named(&list["no_runs"][0]),
        "{list}"
    );
    assert!(named(&list["runs"][0]["checkpoints"][0]["dir"]), "{list}");
}
