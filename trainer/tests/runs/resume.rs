//! Runs on a store go on where the last commit left them, bit for bit, however they ended.
//!
//! What could go wrong: a commit holds tiles of two steps; a blob belongs to another step than its tiles; the next sample or
//! the rate is off by one after a resume; a tile written after the commit surfaces; metrics have a step twice or not at all.
//! A run is killed with -9, trainer and daemon both, at random instants, and compared with one that nobody killed.

use std::io::{BufRead, BufReader};
use std::process::{Child, ChildStdout};
use std::time::Duration;

use crate::lab::{Lab, Run, finish, spawn};

#[test]
fn ten_steps_on_a_store_are_five_and_five_more() {
    let lab = Lab::new();
    let sets = ["train.steps=10"];
    let whole = lab.run("whole", &sets);
    whole.train();
    let parts = |extra: &[&str]| lab.run("parts", &sets).with(extra).with(&lab.nvme());
    parts(&["train.stop_after=5"]).train();
    assert_eq!(parts(&[]).metrics().len(), 5);
    assert!(parts(&[]).train().contains("resumed at step 5"));
    assert_eq!(whole.bits("loss"), parts(&[]).bits("loss"));
    assert_eq!(whole.bits("grad_norm"), parts(&[]).bits("grad_norm"));
    assert_eq!(whole.digest(), parts(&[]).digest());
}

#[test]
fn tiles_spread_over_several_folders_come_back() {
    let lab = Lab::new();
    let whole = lab.run("whole", &[]);
    whole.train();
    let other = lab.path("other");
    std::fs::create_dir(&other).unwrap();
    let both = format!(
        "zero_optimization.offload_optimizer={{device = \"nvme\", nvme_path = [\"{}\", \"{}\"]}}",
        lab.path("drive").display(),
        other.display()
    );
    let parts = |extra: &[&str]| lab.run("parts", &[&both]).with(extra);
    parts(&["train.stop_after=3"]).train();
    let files =
        [lab.path("drive"), other.clone()].map(|folder| std::fs::read_dir(folder).unwrap().count());
    assert_eq!(files, [1, 1], "a device file in each folder");
    parts(&[]).train();
    assert_eq!(whole.bits("loss"), parts(&[]).bits("loss"));
    assert_eq!(whole.digest(), parts(&[]).digest());
    std::fs::remove_dir_all(&other).unwrap();
    let text = parts(&[]).refused();
    assert!(text.contains("other does not exist"), "{text}");
}

#[test]
fn a_store_written_in_place_goes_on_after_an_orderly_end_only() {
    let lab = Lab::new();
    let whole = lab.run("whole", &["train.steps=40"]);
    whole.train();
    let sets = ["train.steps=40", "offload.durability=none"];
    let run = |extra: &[&str]| lab.run("in-place", &sets).with(extra).with(&lab.nvme());
    run(&["train.stop_after=3"]).train();
    assert!(
        run(&["train.stop_after=6"])
            .train()
            .contains("resumed at step 3")
    );
    assert_eq!(whole.bits("loss")[..6], run(&[]).bits("loss"));
    // Between commits: right after one the store is whole, whatever comes.
    kill_after(&run(&["offload.commit_every=0"]), 3, Duration::ZERO);
    let text = run(&[]).refused();
    assert!(
        text.contains("did not end in order") && text.contains("--fresh"),
        "{text}"
    );
    let mut fresh = run(&[]).command("train");
    fresh.arg("--fresh");
    crate::lab::succeed(fresh);
    assert_eq!(whole.digest(), run(&[]).digest());
}

#[test]
fn ctrl_c_ends_a_run_on_a_store_with_every_step_committed() {
    use std::os::unix::process::CommandExt;
    let lab = Lab::new();
    let run = lab
        .run("run", &["train.steps=100000", "scheduler={}"])
        .with(&lab.nvme());
    // A terminal sends the signal to the whole group, the private daemon included if it is in it.
    let mut command = run.command("train");
    command.process_group(0);
    let child = spawn(command);
    while run.steps_written() < 3 {
        std::thread::sleep(Duration::from_millis(5));
    }
    let group = rustix::process::Pid::from_child(&child);
    rustix::process::kill_process_group(group, rustix::process::Signal::INT).unwrap();
    let output = finish(child);
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    let steps = run.metrics().len();
    assert!(
        run.digest().starts_with(&format!("step {steps}\n")),
        "all {steps} steps are committed"
    );
}

#[test]
fn a_run_killed_at_any_instant_goes_on_bit_for_bit() {
    killed_runs_equal_whole_ones(20, 3, &["offload.schedule=deferred"]);
}

#[test]
fn a_run_that_commits_rarely_and_keeps_half_at_home_goes_on_bit_for_bit() {
    let sets = [
        "offload.schedule=at_once",
        "offload.resident_share=0.5",
        "offload.commit_every=3",
    ];
    killed_runs_equal_whole_ones(4, 12, &sets);
}

/// Kills a run `kills` times, each after up to `steps_most` steps and then a moment, and compares it with a whole one.
fn killed_runs_equal_whole_ones(kills: usize, steps_most: u64, offload: &[&str]) {
    let seed = std::env::var("TRAINER_SEED").map_or_else(
        |_| u64::from(std::process::id()),
        |seed| seed.parse().unwrap(),
    );
    println!("TRAINER_SEED={seed} repeats the instants of this run");
    let lab = Lab::new();
    let sets = [
        "train.steps=54",
        "data.holdout_share=0.1",
        "train.eval_every=6",
        "train.eval_batches=1",
    ];
    let whole = lab.run("whole", &sets);
    whole.train();
    let killed = lab.run("killed", &sets).with(offload).with(&lab.nvme());
    let mut random = seed;
    let mut draw = |most: u64| {
        random = random
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (random >> 33) % (most + 1)
    };
    let mut steps_seen = Vec::new();
    for _ in 0..kills {
        kill_after(
            &killed,
            draw(steps_most),
            Duration::from_micros(draw(30_000)),
        );
        steps_seen.push(killed.steps_written());
    }
    println!("steps in metrics.jsonl at the kills: {steps_seen:?}");
    killed.train();
    for key in ["loss", "grad_norm", "lr", "tokens"] {
        assert_eq!(whole.bits(key), killed.bits(key), "{key}, seed {seed}");
    }
    assert_eq!(evaluations(&whole), evaluations(&killed), "seed {seed}");
    assert_eq!(whole.digest(), killed.digest(), "seed {seed}");
}

/// Each step, and the bits of its evaluation if it has one.
fn evaluations(run: &Run) -> Vec<(u64, Option<u64>)> {
    let bits = |line: &serde_json::Value| line["eval_loss"].as_f64().map(f64::to_bits);
    run.metrics()
        .iter()
        .map(|line| (line["step"].as_u64().unwrap(), bits(line)))
        .collect()
}

/// Starts the run, waits until it trains, for `steps` steps more and for `instant`, and kills trainer and daemon with -9.
fn kill_after(run: &Run, steps: u64, instant: Duration) {
    let mut child = spawn(run.command("train"));
    let mut lines = BufReader::new(child.stdout.take().expect("a pipe")).lines();
    let trains = |lines: &mut std::io::Lines<BufReader<ChildStdout>>| {
        lines
            .map_while(Result::ok)
            .any(|line| line.starts_with("resumed") || line.starts_with("started"))
    };
    if !trains(&mut lines) {
        let output = child.wait_with_output().expect("its words");
        panic!(
            "it did not start: {}",
            String::from_utf8_lossy(&output.stderr)
        );
    }
    let begun = run.steps_written();
    while run.steps_written() < begun + steps && child.try_wait().expect("asked").is_none() {
        std::thread::sleep(Duration::from_millis(1));
    }
    std::thread::sleep(instant);
    let daemons = children(&child);
    if daemons.is_empty() {
        // The run was done before the instant came, and its daemon with it.
        assert!(
            finish(child).status.success(),
            "a private daemon runs beside a run that goes on"
        );
        return;
    }
    for pid in daemons {
        // It may have ended with the run.
        let _ = rustix::process::kill_process(pid, rustix::process::Signal::KILL);
    }
    let _ = child.kill();
    child.wait().expect("it ends");
}

/// Child processes of all its threads.
fn children(parent: &Child) -> Vec<rustix::process::Pid> {
    let Ok(tasks) = std::fs::read_dir(format!("/proc/{}/task", parent.id())) else {
        return Vec::new();
    };
    tasks
        .filter_map(|task| std::fs::read_to_string(task.ok()?.path().join("children")).ok())
        .flat_map(|pids| {
            pids.split_whitespace()
                .map(str::to_owned)
                .collect::<Vec<_>>()
        })
        .filter_map(|pid| rustix::process::Pid::from_raw(pid.parse().ok()?))
        .collect()
}
