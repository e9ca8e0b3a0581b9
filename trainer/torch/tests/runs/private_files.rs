//! Files of a run are accessible to their owner only, with any umask.

use std::path::Path;
use std::process::{Command, Stdio};

use rustix::process::{Pid, Signal, kill_process};

use crate::harness::{Harness, finish, spawn, succeed, until, words};

/// Runs `command` with the usual umask.
fn with_usual_umask(command: &Command) -> Command {
    let mut inside = Command::new("sh");
    inside
        .args(["-c", "umask 0022 && exec \"$@\"", "sh"])
        .arg(command.get_program())
        .args(command.get_args())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    for (name, value) in command.get_envs() {
        match value {
            Some(value) => inside.env(name, value),
            None => inside.env_remove(name),
        };
    }
    inside
}

/// Lists directories, files and sockets below `dir` that other users can enter, read or write.
fn open_to_others(dir: &Path) -> String {
    let found = Command::new("find")
        .arg(dir)
        .args(["-mindepth", "1", "!", "-type", "l", "-perm", "/077"])
        .output()
        .expect("find");
    String::from_utf8(found.stdout).expect("paths")
}

#[test]
fn nobody_else_can_read_what_a_run_writes() {
    let harness = Harness::new();
    let sets = ["train.stop_after=2", "train.checkpoint_every=1"];
    let run = harness.run("run", &sets).with(&harness.nvme());
    succeed(with_usual_umask(&run.command("train")));
    let open = |name: &str| open_to_others(&harness.path(name));
    assert!(run.dir.join("checkpoints").is_dir() && run.dir.join("metrics.jsonl").is_file());
    // The test created the directory for the store itself.
    assert_eq!(open("runs") + &open("drive"), "");
}

#[test]
fn nobody_else_can_read_what_the_ranks_of_a_launch_share() {
    let harness = Harness::new();
    let run = harness.run("run", &["train.steps=100000", "scheduler={}"]);
    let run = run.with(&harness.nvme());
    let shared = harness.path("shared");
    std::fs::create_dir(&shared).unwrap();
    let mut command = with_usual_umask(&run.launch(2));
    command.env("TMPDIR", &shared);
    command.env("XDG_RUNTIME_DIR", &shared);
    let child = until(spawn(command), "two steps", || run.steps_written() >= 2);
    let found = Command::new("find").arg(&shared).output().expect("find");
    let found = String::from_utf8(found.stdout).expect("paths");
    let open = open_to_others(&shared);
    kill_process(Pid::from_child(&child), Signal::TERM).unwrap();
    let output = finish(child);
    let (_, said) = words(&output);
    assert_eq!(output.status.code(), Some(143), "{said}");
    // The rendezvous directory is among them.
    for name in ["/offloadd-launch-", "beat-1"] {
        assert!(found.contains(name), "{name}: {found}");
    }
    assert_eq!(open, "");
    assert_eq!(open_to_others(&harness.path("runs")), "");
    assert_eq!(open_to_others(&harness.path("drive")), "");
}
