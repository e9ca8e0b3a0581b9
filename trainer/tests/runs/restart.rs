//! The daemon restarted under a run, and a run that is suspended with its daemon. What could go wrong: the run ends, waits for
//! ever, or trains on with other bits.

use std::process::Child;
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};

use crate::daemon::Daemon;
use crate::harness::{Harness, children, finish, spawn, until};

const NVME: &str = "zero_optimization.offload_optimizer.device=nvme";

/// Restarts in the middle of so many steps.
const RESTARTS: u64 = 3;

/// Many more than the restarts need, so that the run goes on beside them.
const STEPS: &str = "train.steps=40";

#[test]
fn a_run_whose_daemon_is_restarted_three_times_is_the_unbroken_one() {
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
    let taken_up = log.matches("sessions of the previous daemon").count();
    // Where the machine runs the trainer alone for a while, the last ones may come after its end.
    assert!(
        (1..=RESTARTS).contains(&(taken_up as u64)),
        "in the middle of the run: {log}"
    );
    assert_eq!(run.bits("loss"), plain.bits("loss"));
    assert_eq!(run.fingerprint(), plain.fingerprint());
}

#[test]
fn a_run_suspended_with_its_daemon_for_longer_than_tiles_may_stall_goes_on_with_the_same_bits() {
    let harness = Harness::new();
    let steps = ["train.steps=5"];
    let plain = harness.run("plain", &steps);
    plain.train();

    let run = harness.run("suspended", &steps).with(&harness.nvme());
    let mut command = run.command("train");
    command.env("OFFLOADD_STALL_LIMIT_MS", "4000");
    // A step writes for a tenth of a second: operations are under way whenever the daemon is suspended.
    command.env("OFFLOADD_PACE", "1000000000,5000000");
    let child = until(spawn(command), "a step", || run.steps_written() >= 2);
    let trainer = Pid::from_child(&child);
    let [daemon] = children(child.id())[..] else {
        panic!("one private daemon: {:?}", children(child.id()));
    };
    // The daemon first, and the trainer waits for its tiles.
    for process in [daemon, trainer] {
        kill_process(process, Signal::STOP).unwrap();
        std::thread::sleep(Duration::from_millis(300));
    }
    std::thread::sleep(Duration::from_secs(5));
    // The trainer first: it judges before anything has moved.
    for process in [trainer, daemon] {
        kill_process(process, Signal::CONT).unwrap();
        std::thread::sleep(Duration::from_millis(300));
    }
    let output = finish(child);
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{said}");
    assert_eq!(run.bits("loss"), plain.bits("loss"));
    assert_eq!(run.fingerprint(), plain.fingerprint());
}
