//! Restarts the daemon during a run. Errors that this finds: the run ends, waits for ever, or continues with
//! other bits.

use std::process::Child;

use crate::daemon::Daemon;
use crate::harness::{Harness, finish, spawn, until};

const NVME: &str = "zero_optimization.offload_optimizer.device=nvme";

/// Number of restarts.
const RESTARTS: u64 = 3;

/// More steps than the restarts need, so that the run continues meanwhile.
const STEPS: &str = "train.steps=40";

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
