//! Several ranks train like one, resume with any number of ranks, and end together.
//!
//! Errors that these tests find: a rank takes the wrong samples, gradients are weighted wrongly, a shard is
//! misplaced; three ranks cannot read what two wrote; after a rank has died or stopped, the others wait for
//! ever, or only some complete a commit; a second signal reaches ranks that one Ctrl-C should end in order;
//! different settings are not noticed.

use std::process::Child;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use training_state::run::{RunDir, RunId};

use crate::harness::{Harness, Run, all_cases, device_for, fail, finish, spawn, succeed, until};

/// Time for ranks to end. A dead rank is noticed at once, a stopped one after 5 s without an answer; the
/// launcher kills 8 s later. The rest is for a busy machine.
pub(crate) const END_WAIT: Duration = Duration::from_secs(30);

const FP32: [&str; 2] = ["train_batch_size=12", "train_micro_batch_size_per_gpu=1"];

fn none() -> Vec<String> {
    ["param", "optimizer"]
        .map(|what| format!("zero_optimization.offload_{what}.device=none"))
        .to_vec()
}

fn losses(run: &Run) -> Vec<f64> {
    let metrics = run.metrics();
    let loss = |line: &serde_json::Value| line["loss"].as_f64().expect("a number");
    metrics.iter().map(loss).collect()
}

fn assert_close(found: &[f64], expected: &[f64], what: &str) {
    assert_eq!(found.len(), expected.len(), "{what}");
    for (step, (found, expected)) in found.iter().zip(expected).enumerate() {
        assert!(
            ((found - expected) / expected).abs() < 1e-4,
            "{what}, step {}: {found}, not {expected}",
            step + 1
        );
    }
}

#[test]
fn one_two_three_and_four_ranks_learn_the_same() {
    let harness = Harness::new();
    let evaluated = [
        "train.steps=20",
        "data.validation_fraction=0.1",
        "train.eval_every=10",
    ];
    let sets = [&FP32[..], &evaluated].concat();
    let alone = harness.run("alone", &sets);
    alone.train();
    let expected = losses(&alone);
    let evaluations = |run: &Run| -> Vec<f64> {
        let metrics = run.metrics();
        let found = metrics.iter().filter_map(|line| line["eval_loss"].as_f64());
        found.collect()
    };
    assert_eq!(evaluations(&alone).len(), 2);
    assert!(expected[19] < expected[0] - 0.3, "it learns: {expected:?}");
    // stages.rs compares two with one, and resumes with four.
    // Of the second number, each divides a sequence.
    let counts = match all_cases() {
        true => &[(3, 1), (2, 2), (2, 1), (4, 1), (4, 2)][..],
        false => &[(3, 1), (2, 2)],
    };
    for &(ranks, sequence_ranks) in counts {
        let what = format!("{ranks} ranks, {sequence_ranks} for each sequence");
        let divided = format!("train.sequence_parallel={sequence_ranks}");
        let run = harness.run(&what, &sets).with(&[divided]);
        let said = succeed(run.launch(ranks));
        assert_close(&losses(&run), &expected, &what);
        assert_close(&evaluations(&run), &evaluations(&alone), &what);
        let done = said.lines().filter(|line| line.starts_with("done:"));
        assert_eq!(done.count(), 1, "only one rank prints: {said}");
    }
}

#[test]
fn the_place_of_tiles_changes_no_bit_with_several_ranks() {
    let harness = Harness::new();
    let memory = harness.run("memory", &FP32).with(&none());
    let store = harness.run("store", &FP32).with(&harness.nvme());
    let at_once = (harness.run("at-once", &FP32).with(&harness.nvme()))
        .with(&["offload.optimizer_step=immediate"]);
    for run in [&memory, &store, &at_once] {
        succeed(run.launch(2));
    }
    for run in [&store, &at_once] {
        assert_eq!(memory.bits("loss"), run.bits("loss"));
        assert_eq!(memory.bits("grad_norm"), run.bits("grad_norm"));
        assert_eq!(memory.fingerprint(), run.fingerprint());
    }
    // The reported bytes are the sum over the ranks.
    let alone = (harness.run("alone", &FP32).with(&harness.nvme()))
        .with(&["offload.optimizer_step=immediate"]);
    alone.train();
    let written = |run: &Run| run.bits("device_written_bytes");
    assert_eq!(written(&alone), written(&at_once));
}

#[test]
fn one_and_three_ranks_resume_what_two_committed() {
    goes_on_with_other_ranks(|harness| harness.nvme(), 1);
}

#[test]
fn one_and_three_ranks_resume_what_two_saved() {
    goes_on_with_other_ranks(|_| none(), 2);
}

/// Trains with two ranks, then one, then three, then two, and compares with a run of one rank. Of two, `sequence_ranks` divide each sequence.
fn goes_on_with_other_ranks(devices: impl Fn(&Harness) -> Vec<String>, sequence_ranks: u32) {
    let harness = Harness::new();
    let sets = [&FP32[..], &["train.steps=8"]].concat();
    let alone = harness.run("alone", &sets);
    alone.train();
    let until = |step: u64| {
        let stop_after = [format!("train.stop_after={step}")];
        let run = harness.run("run", &sets).with(&stop_after);
        run.with(&devices(&harness))
    };
    let divided = format!("train.sequence_parallel={sequence_ranks}");
    let with_two = |step| until(step).with(&[&divided]).launch(2);
    succeed(with_two(2));
    let two_ranks = until(2).fingerprint();
    assert!(two_ranks.starts_with("step 2\n"), "{two_ranks}");
    let said = until(4).train();
    assert!(said.contains("resumed at step 2"), "{said}");
    assert!(
        said.contains("note: the number of ranks was 2 up to step 2 and is 1"),
        "{said}"
    );
    if sequence_ranks > 1 {
        let note = "train.sequence_parallel was 2 up to step 2 and is the default";
        assert!(said.contains(note), "{said}");
    }
    // Three ranks read what one committed without changing it: they stop before their first step.
    let before = until(4).fingerprint();
    let said = succeed(until(4).launch(3));
    assert!(said.contains("resumed at step 4"), "{said}");
    assert_eq!(before, until(4).fingerprint(), "reading changes nothing");
    let said = succeed(until(6).launch(3));
    assert!(said.contains("resumed at step 4"), "{said}");
    let said = succeed(with_two(8));
    assert!(said.contains("resumed at step 6"), "{said}");
    assert_close(&losses(&until(8)), &losses(&alone), "2, 1, 3, 2 ranks");
}

#[test]
fn a_killed_rank_ends_the_others_and_the_run_resumes() {
    let harness = Harness::new();
    for (name, devices, ranks, victims) in [
        ("store", harness.nvme(), 3, [1, 0]),
        ("sequence", harness.nvme(), 2, [1, 0]),
        ("memory", none(), 3, [0, 1]),
    ] {
        let divided = match name {
            "sequence" => "train.sequence_parallel=2",
            _ => "train.sequence_parallel=1",
        };
        let long = ["train.steps=100000", "scheduler={}", divided];
        let run = harness.run(name, &long).with(&devices);
        for &victim in &victims[..if all_cases() { 2 } else { 1 }] {
            let begun = run.steps_written();
            let child = until(spawn(run.launch(ranks)), "three steps", || {
                run.steps_written() >= begun + 3
            });
            kill_process(rank_of(&child, victim), Signal::KILL).unwrap();
            let since = Instant::now();
            let output = finish(child);
            let took = since.elapsed();
            let err = String::from_utf8_lossy(&output.stderr);
            assert!(took < END_WAIT, "{took:?}: {err}");
            assert_eq!(output.status.code(), Some(128 + 9), "{err}");
            assert!(
                err.contains(&format!("trainer: rank {victim} (process "))
                    && err.contains("was killed by signal 9 (SIGKILL)"),
                "{err}"
            );
            assert!(err.contains(&format!("rank {victim}")), "{err}");
            let committed = run.steps_written();
            if name != "memory" {
                let fingerprint = run.fingerprint();
                let step = fingerprint.lines().next().unwrap().strip_prefix("step ");
                let step: u64 = step.unwrap().parse().unwrap();
                assert!(
                    step + 2 >= committed && step <= committed + 1,
                    "{step} of {committed}"
                );
            }
        }
        let stop_after = [format!("train.stop_after={}", run.steps_written() + 3)];
        let rest = harness.run(name, &long).with(&devices).with(&stop_after);
        succeed(rest.launch(2));
    }
}

#[test]
fn a_stopped_rank_ends_the_others_which_report_it() {
    let harness = Harness::new();
    // With deferred updates, rank 0 waits in a collective operation; with immediate ones on a slow drive, in
    // a commit.
    for schedule in ["deferred", "immediate"] {
        let schedule = format!("offload.optimizer_step={schedule}");
        let long = ["train.steps=100000", "scheduler={}", &schedule];
        let run = harness.run(&schedule, &long).with(&harness.nvme());
        let first = harness.run(&schedule, &long).with(&harness.nvme());
        succeed(first.with(&["train.stop_after=1"]).launch(2));
        let mut command = run.launch(2);
        // A step then writes for 0.4 s. If the daemon is not a test build, a wait in the commit is not
        // guaranteed.
        command.env("OFFLOADD_RATE_LIMIT", "1000000000,1000000");
        let child = until(spawn(command), "a step", || run.steps_written() >= 2);
        std::thread::sleep(Duration::from_millis(250));
        kill_process(rank_of(&child, 1), Signal::STOP).unwrap();
        let since = Instant::now();
        let output = finish(child);
        let took = since.elapsed();
        let err = String::from_utf8_lossy(&output.stderr);
        assert!(took < END_WAIT, "{schedule}, {took:?}: {err}");
        assert_eq!(output.status.code(), Some(1), "{schedule}: {err}");
        assert!(
            err.contains("trainer: rank 0: rank 1 has not answered for"),
            "{schedule}: {err}"
        );
        assert!(run.fingerprint().starts_with("step "));
    }
}

#[test]
fn one_signal_to_the_launcher_ends_all_ranks_in_order() {
    use std::os::unix::process::CommandExt;
    let harness = Harness::new();
    let long = ["train.steps=100000", "scheduler={}"];
    let run = harness.run("run", &long).with(&harness.nvme());
    // Sent to the whole group, like a terminal's Ctrl-C.
    let mut command = run.launch(2);
    command.process_group(0);
    let child = until(spawn(command), "three steps", || run.steps_written() >= 3);
    let group = Pid::from_child(&child);
    rustix::process::kill_process_group(group, Signal::INT).unwrap();
    let output = finish(child);
    let err = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(130), "{err}");
    assert!(!err.contains("ended with status"), "{err}");
    let steps = run.metrics().len();
    assert!(
        run.fingerprint().starts_with(&format!("step {steps}\n")),
        "all {steps} steps are committed"
    );
}

#[test]
fn ranks_whose_launcher_is_killed_end_in_order() {
    let harness = Harness::new();
    let long = ["train.steps=100000", "scheduler={}"];
    let run = harness.run("run", &long).with(&none());
    let child = until(spawn(run.launch(2)), "three steps", || {
        run.steps_written() >= 3
    });
    let ranks = [rank_of(&child, 0), rank_of(&child, 1)];
    kill_process(Pid::from_child(&child), Signal::KILL).unwrap();
    let since = Instant::now();
    while ranks
        .iter()
        .any(|rank| rustix::process::test_kill_process(*rank).is_ok())
    {
        assert!(since.elapsed() < END_WAIT, "a rank outlived its launcher");
        std::thread::sleep(Duration::from_millis(10));
    }
    finish(child);
    let steps = run.metrics().len();
    assert!(
        run.fingerprint().starts_with(&format!("step {steps}\n")),
        "all {steps} steps are saved"
    );
}

#[test]
fn an_error_of_a_launch_is_reported_once() {
    let harness = Harness::new();
    let run = harness.run("run", &["train_batch_size=7"]);
    let err = fail(run.launch(2));
    assert!(
        err.contains("7 is not a multiple of train_micro_batch_size_per_gpu = 2 * 2 ranks"),
        "{err}"
    );
    assert_eq!(err.lines().count(), 1, "{err}");
    // Only the first rank examines the drive; the others refer to its message.
    let missing = format!(
        "zero_optimization.offload_optimizer={{device = \"nvme\", nvme_path = \"{}\"}}",
        harness.path("missing").display()
    );
    let err = fail(harness.run("run", &[&missing]).launch(2));
    assert!(
        err.contains("trainer: rank 0: nvme_path: ") && err.contains("missing does not exist"),
        "{err}"
    );
    assert!(
        err.contains("trainer: rank 1: rank 0 failed while checking the room for the run"),
        "{err}"
    );
}

#[test]
fn a_directory_in_use_is_refused_by_all_ranks() {
    let harness = Harness::new();
    let run = harness.run("run", &[]);
    let taken = RunDir::open(&run.dir, &RunId::for_dir(&run.dir).0).unwrap();
    let err = fail(run.launch(3));
    assert!(
        err.contains("trainer: rank 0: train.run_dir: another trainer is using"),
        "{err}"
    );
    for rank in [1, 2] {
        let says = format!("trainer: rank {rank}: rank 0 failed while opening the run's directory");
        assert!(err.contains(&says), "{err}");
    }
    drop(taken);
    succeed(run.launch(3));
}

#[test]
fn an_environment_that_contradicts_itself_is_refused() {
    let harness = Harness::new();
    let run = harness.run("run", &[]);
    for (variables, words) in [
        (
            &[
                ("RANK", "2"),
                ("WORLD_SIZE", "2"),
                ("LOCAL_RANK", "0"),
                ("LOCAL_WORLD_SIZE", "2"),
            ][..],
            "RANK=\"2\" is not below WORLD_SIZE, 2",
        ),
        (&[("WORLD_SIZE", "2")], "RANK is not set"),
        (
            &[
                ("RANK", "0"),
                ("WORLD_SIZE", "2"),
                ("LOCAL_RANK", "0"),
                ("LOCAL_WORLD_SIZE", "2"),
            ],
            "MASTER_ADDR is not set",
        ),
    ] {
        let mut command = run.command("train");
        command.envs(variables.iter().copied());
        let err = fail(command);
        assert!(err.contains(words), "{variables:?}: {err}");
    }
    assert!(!run.dir.exists(), "nothing was created");
}

#[test]
fn ranks_with_torchruns_environment_connect_and_different_settings_are_refused() {
    let harness = Harness::new();
    let rank = |rank: u32, sets: &[&str]| {
        let mut command = harness.run("run", sets).command("train");
        for (name, value) in [
            ("RANK", rank.to_string()),
            ("LOCAL_RANK", rank.to_string()),
            ("WORLD_SIZE", "2".into()),
            ("LOCAL_WORLD_SIZE", "2".into()),
            ("MASTER_ADDR", "127.0.0.1".into()),
            ("MASTER_PORT", harness.port.number().to_string()),
        ] {
            command.env(name, value);
        }
        command.args(device_for(2));
        command
    };
    let other = spawn(rank(1, &["optimizer.params.lr=0.5"]));
    let err = fail(rank(0, &[]));
    assert!(
        err.contains("the ranks have different settings: optimizer.params.lr is 0.003 on rank 0 and 0.5 on rank 1: start all ranks"),
        "{err}"
    );
    assert_eq!(finish(other).status.code(), Some(1));
    let other = spawn(rank(1, &[]));
    succeed(rank(0, &[]));
    assert!(finish(other).status.success());
    assert!(
        harness
            .run("run", &[])
            .fingerprint()
            .starts_with("step 6\n")
    );
}

/// Process of one of a launcher's ranks.
pub(crate) fn rank_of(launcher: &Child, rank: u32) -> Pid {
    let launcher = launcher.id();
    let children = std::fs::read_to_string(format!("/proc/{launcher}/task/{launcher}/children"));
    let is_rank = |pid: &&str| {
        let environment = std::fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
        let named = format!("RANK={rank}");
        environment
            .split(|&byte| byte == 0)
            .any(|variable| variable == named.as_bytes())
    };
    let children = children.expect("the launcher's children");
    let pid = children.split_whitespace().find(is_rank);
    let pid = pid.unwrap_or_else(|| panic!("rank {rank} among {children}"));
    Pid::from_raw(pid.parse().expect("a number")).expect("not 0")
}
