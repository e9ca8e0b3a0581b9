//! Restarts the daemon during a run. Errors that this finds: the run ends, waits for ever, or continues with
//! other bits.

use std::path::Path;
use std::process::Child;

use crate::daemon::Daemon;
use crate::harness::{Harness, fail, finish, spawn, succeed, until};

const NVME: &str = "zero_optimization.offload_optimizer.device=nvme";

/// Number of restarts.
const RESTARTS: u64 = 3;

/// More steps than the restarts need, so that the run continues meanwhile.
const STEPS: &str = "train.steps=40";

#[test]
fn a_run_whose_shared_store_is_lost_goes_on_from_its_newest_checkpoint() {
    let (first, second) = (Harness::new(), Harness::new());
    let sets = [
        "train.steps=4",
        "train.checkpoint_every=1",
        "zero_optimization.offload_param.device=nvme",
    ];
    let run = |daemon: &Daemon| first.run("run", &sets).with(&[NVME]).with(&daemon.socket());
    run(&Daemon::start(&first))
        .with(&["train.stop_after=2"])
        .train();
    // Another store, as after a drive was lost and the devices were formatted again.
    let daemon = Daemon::start(&second);
    assert!(run(&daemon).refused().contains("has no generation of job"));
    let mut command = run(&daemon).command("train");
    command.args(["--resume-from", "newest"]);
    let said = succeed(command);
    assert!(said.contains("resumed at step 2"), "{said}");
}

#[test]
fn a_fresh_start_that_a_shared_store_has_no_room_for_deletes_nothing() {
    let harness = Harness::new();
    let daemon = Daemon::start(&harness);
    let sets = ["zero_optimization.offload_param.device=nvme", NVME];
    let run = || harness.run("run", &sets).with(&daemon.socket());
    run().with(&["train.stop_after=2"]).train();
    let large = run().with(&["model.hidden_size=1024", "model.intermediate_size=4096"]);
    let mut command = large.command("train");
    command.arg("--fresh");
    let output = finish(spawn(command));
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(
        said.contains("offload.socket: the daemon leaves this user "),
        "{said}"
    );
    // The plan counts the job's own space as free, too.
    let planned = finish(spawn(large.command("plan")));
    let planned = String::from_utf8_lossy(&planned.stdout).into_owned();
    let free = said.split_once("leaves this user ").unwrap().1;
    let free = free.split_once(" on its devices").unwrap().0;
    let left = format!("on its devices, but offloadd lets this user have {free} now");
    assert!(planned.contains(&left), "{left} in {planned}");
    assert!(run().train().contains("resumed at step 2"));
    init_makes_a_run_file_for_a_shared_daemon_that_trains(&harness, &daemon);
}

fn init_makes_a_run_file_for_a_shared_daemon_that_trains(harness: &Harness, daemon: &Daemon) {
    let fixture = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/fixtures/hf/llama");
    let file = harness.path("shared.toml");
    let init = |model: &str, more: &[&str]| {
        let mut command = harness.run("any", &[]).program();
        command.arg("init").arg(model).arg(harness.path("text"));
        command.arg("--out").arg(&file).args(more);
        for set in daemon.socket() {
            command.arg("--set").arg(set);
        }
        command
    };
    let refused = fail(init(fixture, &["--nvme", "."]));
    assert!(refused.contains("--nvme and offload.socket"), "{refused}");
    let large = harness.path("large.json");
    let config = std::fs::read_to_string(Path::new(fixture).join("config.json")).unwrap();
    let mut config: serde_json::Value = serde_json::from_str(&config).unwrap();
    config["intermediate_size"] = (1 << 18).into();
    std::fs::write(&large, config.to_string()).unwrap();
    let large = init(large.to_str().unwrap(), &["--set", "data.tokenizer=bytes"]);
    let refused = fail(large);
    let no_room = "on its devices, but offloadd lets this user have";
    assert!(refused.contains(no_room), "{refused}");

    succeed(init(fixture, &[]));
    let written = std::fs::read_to_string(&file).unwrap();
    assert!(!written.contains("nvme_path"), "{written}");
    let mut train = harness.run("any", &[]).program();
    train.arg("train").arg(&file);
    for set in ["train.seq_len=16", "train.steps=1", "train.threads=1"] {
        train.arg("--set").arg(set);
    }
    let run_dir = format!("train.run_dir={}", harness.path("runs/shared").display());
    train.arg("--set").arg(run_dir);
    let said = succeed(train);
    assert!(said.contains("started with the weights in "), "{said}");
}

#[test]
fn three_restarts_of_the_daemon_change_no_bit_of_a_run() {
    let harness = Harness::new();
    let sets = [
        STEPS,
        "offload.commit_every=1",
        "zero_optimization.offload_param.device=nvme",
    ];
    let plain = harness.run("plain", &[STEPS]);
    plain.train();

    let daemon = Daemon::supervised(&harness);
    let run = harness
        .run("restarted", &sets)
        .with(&[NVME])
        .with(&daemon.socket());
    let mut child: Child = spawn(run.command("train"));
    for nth in 0..RESTARTS {
        let steps = 2 + 4 * nth;
        child = until(child, &format!("step {steps}"), || {
            run.steps_written() >= steps
        });
        daemon.restart();
    }
    let output = finish(child);
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{said}");
    let log = std::fs::read_to_string(harness.path("offloadd.log")).unwrap();
    let taken_up = log.matches("session of the previous daemon").count();
    // If the machine runs only the trainer for a while, the last restarts may come after its end.
    assert!(
        (1..=RESTARTS).contains(&(taken_up as u64)),
        "in the middle of the run: {log}"
    );
    assert_eq!(run.bits("loss"), plain.bits("loss"));
    assert_eq!(run.fingerprint(), plain.fingerprint());
}
