//! What a run writes is its user's alone, whatever umask it was started with.

use crate::harness::{Harness, succeed};

#[test]
fn nobody_else_can_read_what_a_run_writes() {
    let harness = Harness::new();
    let sets = ["train.stop_after=2", "train.checkpoint_every=1"];
    let run = harness.run("run", &sets).with(&harness.nvme());
    let mut train = std::process::Command::new("sh");
    let command = run.command("train");
    train
        .args(["-c", "umask 0022 && exec \"$@\"", "sh"])
        .arg(command.get_program())
        .args(command.get_args())
        .stdout(std::process::Stdio::piped())
        .stderr(std::process::Stdio::piped());
    for (name, value) in command.get_envs() {
        match value {
            Some(value) => train.env(name, value),
            None => train.env_remove(name),
        };
    }
    succeed(train);
    let open = |name: &str| {
        let found = std::process::Command::new("find")
            .arg(harness.path(name))
            .args(["-mindepth", "1", "(", "-type", "f", "-o", "-type", "d", ")"])
            .args(["-perm", "/077"])
            .output()
            .expect("find");
        String::from_utf8(found.stdout).expect("paths")
    };
    assert!(run.dir.join("checkpoints").is_dir() && run.dir.join("metrics.jsonl").is_file());
    // The directory for the store was there before.
    assert_eq!(open("runs") + &open("drive"), "");
}
