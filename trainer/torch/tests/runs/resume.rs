//! Runs resume from their last commit or checkpoint, bit for bit, however they ended.
//!
//! Errors that these tests find: a commit contains tiles of two steps; a blob belongs to another step than
//! its tiles; the next sample or the rate is off by one after resuming; a tile written after the commit is
//! used; metrics have a step twice or lack one; an incomplete new store is taken for complete; a trainer
//! continues, or hangs, without its daemon. Runs are killed with SIGKILL at random moments from their start
//! on (the trainer, its daemon, or both), daemons also at a random one of their operations on devices, and
//! compared with a run that was not killed.
//!
//! `OFFLOADD_KILLS=500 cargo test -p trainer-torch --test runs killed_at_any` kills each kind of run that often.

use std::process::{Child, Output};
use std::time::{Duration, Instant};

use crate::harness::{Harness, Run, children, finish, spawn, store_files_in, succeed, until};
use crate::random::Random;

#[test]
fn ten_steps_are_five_and_five_more() {
    let harness = Harness::new();
    let sets = ["train.steps=10"];
    let whole = harness.run("whole", &sets);
    whole.train();
    let none = ["param", "optimizer"]
        .map(|what| format!("zero_optimization.offload_{what}.device=none"))
        .to_vec();
    let cpu = vec!["zero_optimization.offload_optimizer.device=cpu".to_owned()];
    for (name, device) in [("none", none), ("cpu", cpu), ("store", harness.nvme())] {
        let parts = |extra: &[&str]| harness.run(name, &sets).with(extra).with(&device);
        parts(&["train.stop_after=5"]).train();
        assert_eq!(parts(&[]).metrics().len(), 5);
        assert!(parts(&[]).train().contains("resumed at step 5"));
        assert_eq!(whole.bits("loss"), parts(&[]).bits("loss"));
        assert_eq!(whole.bits("grad_norm"), parts(&[]).bits("grad_norm"));
        assert_eq!(whole.fingerprint(), parts(&[]).fingerprint());
    }
}

#[test]
fn a_run_keeps_its_tile_size_if_the_setting_is_auto() {
    let harness = Harness::new();
    let whole = harness.run("whole", &[]);
    whole.train();
    let parts = |extra: &[&str]| harness.run("parts", extra).with(&harness.nvme());
    parts(&["train.stop_after=3"]).train();
    // A new run with "auto" would get another size than the configuration's 4096.
    let said = parts(&["offload.tile_elems=auto", "offload.staging_bytes=auto"]).train();
    assert!(said.contains("resumed at step 3"), "{said}");
    let settings = parts(&[]).settings();
    assert!(settings.contains("tiles of 4096 elements"), "{settings}");
    assert_eq!(whole.fingerprint(), parts(&[]).fingerprint());
    let text = parts(&["offload.tile_elems=8192", "offload.staging_bytes=auto"]).refused();
    assert!(
        text.contains("offload.tile_elems was 4096 and is now 8192"),
        "{text}"
    );
}

#[test]
fn a_run_with_another_scaling_of_positions_is_refused() {
    let harness = Harness::new();
    let run = |factor: &str| {
        let scaling = format!(
            "model.rope_scaling={{rope_type = \"yarn\", factor = {factor}, original_max_position_embeddings = 16}}"
        );
        harness.run("scaled", &["train.stop_after=1", &scaling])
    };
    run("4.0").train();
    let text = run("8.0").refused();
    assert!(
        text.contains("model.rope_scaling.factor was 4.0 and is now 8.0"),
        "{text}"
    );
}

#[test]
fn tiles_in_several_directories_are_read_back() {
    let harness = Harness::new();
    let whole = harness.run("whole", &[]);
    whole.train();
    let other = harness.path("other");
    std::fs::create_dir(&other).unwrap();
    let both = format!(
        "zero_optimization.offload_optimizer={{device = \"nvme\", nvme_path = [\"{}\", \"{}\"]}}",
        harness.path("drive").display(),
        other.display()
    );
    let parts = |extra: &[&str]| harness.run("parts", &[&both]).with(extra);
    parts(&["train.stop_after=3"]).train();
    let files = [harness.path("drive"), other.clone()].map(|dir| store_files_in(&dir).len());
    assert_eq!(files, [1, 1], "a device file in each directory");
    parts(&[]).train();
    assert_eq!(whole.bits("loss"), parts(&[]).bits("loss"));
    assert_eq!(whole.fingerprint(), parts(&[]).fingerprint());
    std::fs::remove_dir_all(&other).unwrap();
    let text = parts(&[]).refused();
    assert!(text.contains("other does not exist"), "{text}");
}

#[test]
fn a_store_written_in_place_resumes_only_after_an_orderly_end() {
    let harness = Harness::new();
    let whole = harness.run("whole", &["train.steps=40"]);
    whole.train();
    let sets = ["train.steps=40", "offload.durability=none"];
    let run = |extra: &[&str]| {
        harness
            .run("in-place", &sets)
            .with(extra)
            .with(&harness.nvme())
    };
    run(&["train.stop_after=3"]).train();
    assert!(
        run(&["train.stop_after=6"])
            .train()
            .contains("resumed at step 3")
    );
    assert_eq!(whole.bits("loss")[..6], run(&[]).bits("loss"));
    // Killed between commits: right after one, the store would be complete.
    let rarely = run(&["offload.commit_every=0"]);
    let begun = rarely.steps_written();
    let child = until(spawn(rarely.command("train")), "three steps", || {
        rarely.steps_written() >= begun + 3
    });
    let (output, _) = kill_after(child, Duration::ZERO, Victim::Both);
    assert!(output.status.code().is_none(), "killed: {output:?}");
    let text = run(&[]).refused();
    assert!(
        text.contains("did not end in order") && text.contains("--fresh"),
        "{text}"
    );
    let mut fresh = run(&[]).command("train");
    fresh.arg("--fresh");
    succeed(fresh);
    assert_eq!(whole.fingerprint(), run(&[]).fingerprint());
}

#[test]
fn ctrl_c_ends_a_run_on_a_store_with_every_step_committed() {
    use std::os::unix::process::CommandExt;
    let harness = Harness::new();
    let run = harness
        .run("run", &["train.steps=100000", "scheduler={}"])
        .with(&harness.nvme());
    // A terminal sends the signal to the whole process group, including a private daemon if it is in it.
    let mut command = run.command("train");
    command.process_group(0);
    let child = until(spawn(command), "three steps", || run.steps_written() >= 3);
    let group = rustix::process::Pid::from_child(&child);
    rustix::process::kill_process_group(group, rustix::process::Signal::INT).unwrap();
    let output = finish(child);
    assert_eq!(
        output.status.code(),
        Some(130),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    let steps = run.metrics().len();
    assert!(
        run.fingerprint().starts_with(&format!("step {steps}\n")),
        "all {steps} steps are committed"
    );
}

#[test]
fn a_run_killed_at_any_instant_resumes_bit_for_bit() {
    // One commit may be in progress, and one waiting for it, while the next step is reported.
    let rarely = ["offload.resident_fraction=0.5", "offload.commit_every=3"];
    let hit = std::thread::scope(|scope| {
        let deferred =
            scope.spawn(|| Kills::new("offload.optimizer_step=deferred", &[], 2).hit(kills()));
        let at_once = Kills::new("offload.optimizer_step=immediate", &rarely, 6).hit(kills());
        at_once + deferred.join().unwrap_or(0)
    });
    assert!(
        hit >= 2 * kills(),
        "{hit} kills hit a run, or one of the runs failed"
    );
}

/// Number of kills that must hit each of the runs.
fn kills() -> usize {
    std::env::var("OFFLOADD_KILLS").map_or(5, |kills| kills.parse().expect("a number of kills"))
}

#[test]
fn a_run_without_a_store_resumes_from_its_checkpoint_bit_for_bit() {
    // A checkpoint is complete before the next one begins.
    let hit = Kills::new("train.checkpoint_every=4", &[], 8).hit(kills());
    assert!(hit >= kills(), "{hit} kills hit a run");
}

/// Processes to kill.
#[derive(Clone, Copy, Debug)]
enum Victim {
    Trainer,
    Daemon,
    Both,
    /// The daemon, at this operation on a device.
    Operation(u64),
}

/// Runs that are killed, and the reference run.
struct Kills {
    harness: Harness,
    whole: Run,
    fingerprint: String,
    on_store: bool,
    /// Largest number of steps between the last reported step and the one resumed from.
    steps_lost_max: u64,
    sets: Vec<String>,
}

/// Steps of each run: enough for a few kills, few enough that many kills hit new stores.
const STEPS: u64 = 40;

/// Kills tried for each one that must hit: others come before the run has begun or after its end.
const DRAWN_PER_HIT: usize = 10;

impl Kills {
    /// Makes runs with `set` and `sets`; on a store if they contain an offload setting.
    fn new(set: &str, sets: &[&str], steps_lost_max: u64) -> Self {
        let harness = Harness::new();
        let steps = format!("train.steps={STEPS}");
        let plain = [
            &steps,
            "data.validation_fraction=0.1",
            "train.eval_every=6",
            "train.eval_batches=1",
        ];
        let whole = harness.run("whole", &plain);
        whole.train();
        let on_store = set.starts_with("offload.");
        let mut all: Vec<String> = plain.iter().map(|set| (*set).to_owned()).collect();
        all.push(set.to_owned());
        all.extend(sets.iter().map(|set| (*set).to_owned()));
        if on_store {
            all.extend(harness.nvme());
        }
        let fingerprint = whole.fingerprint();
        Self {
            harness,
            whole,
            fingerprint,
            on_store,
            steps_lost_max,
            sets: all,
        }
    }

    /// Kills starts at moments counted from their spawn, or from their beginning, until `hits` kills have hit
    /// a run that had begun; at least one must hit only a daemon, if there is one. Compares every run that
    /// finishes with the reference run. Returns the number of hits.
    #[expect(
        clippy::too_many_lines,
        reason = "the steps of one loop over the same counts"
    )]
    fn hit(&self, hits: usize) -> usize {
        let seed = Random::seed("victims and shares of the time that a run takes");
        // Runs of different kinds draw different moments.
        let mut random = Random::from_seed(seed.wrapping_add(self.sets.len() as u64));
        let mut draw = |below: u64| random.below(below);
        let (mut load, mut train) = self.times();
        let (mut hit, mut daemons_alone) = (0, 0);
        let (mut drawn, mut done) = (0, 0);
        let mut run = self.run(done);
        // Steps reported by this run, even if later starts truncated its metrics.
        let mut told = 0;
        while hit < hits || self.on_store && daemons_alone == 0 {
            if run.steps_written() == STEPS {
                run.train();
                self.compare(&run, seed);
                done += 1;
                run = self.run(done);
                told = 0;
            }
            drawn += 1;
            assert!(
                drawn <= DRAWN_PER_HIT * hits,
                "{hit} of {drawn} kills hit a run, {hits} should have: seed {seed}"
            );
            let victim = match (self.on_store, draw(4)) {
                (false, _) | (true, 0) => Victim::Trainer,
                (true, 1) => Victim::Daemon,
                (true, 2) => Victim::Both,
                // While libtorch loads.
                (true, _) => {
                    let below = draw(10) * draw(100) + 1;
                    Victim::Operation(draw(below))
                }
            };
            let (output, alive) = match victim {
                Victim::Operation(number) => self.kill_at_operation(&run, number),
                _ => {
                    // Between the start of the daemon, if there is one, and the expected end of the run. A
                    // run without a daemon gives no sign of its start, so some kills come early.
                    let left = (1.0 - run.steps_written() as f64 / STEPS as f64).max(0.25);
                    let later = train.mul_f64(left * draw(1000) as f64 / 1000.0);
                    let mut child = spawn(run.command("train"));
                    let instant = if self.on_store && draw(8) > 0 {
                        let id = child.id();
                        child = until(child, "its daemon was started", || !children(id).is_empty());
                        later
                    } else {
                        load.mul_f64(0.8) + later
                    };
                    kill_after(child, instant, victim)
                }
            };
            println!(
                "{victim:?}: {alive} daemons, {}, {} steps",
                output.status,
                run.steps_written()
            );
            let [out, err] =
                [&output.stdout, &output.stderr].map(|words| String::from_utf8_lossy(words));
            if let Some(step) = went_on_from(&out) {
                assert!(
                    step + self.steps_lost_max >= told,
                    "step {step}, but {told} steps were reported, seed {seed}"
                );
            }
            told = told.max(run.steps_written());
            match (victim, output.status.code()) {
                (Victim::Operation(_), Some(0)) => {
                    self.compare(&run, seed);
                    done += 1;
                    run = self.run(done);
                    told = 0;
                }
                (_, Some(0)) => {
                    // It finished before the kill: the machine is faster than when the times were measured.
                    (load, train) = (load.mul_f64(0.9), train.mul_f64(0.75));
                    self.compare(&run, seed);
                    done += 1;
                    run = self.run(done);
                    told = 0;
                }
                // If only its daemon was killed, the trainer may have ended by itself already.
                (Victim::Daemon | Victim::Both | Victim::Operation(_), Some(code)) if alive > 0 => {
                    assert_eq!(code, 1, "after the daemon's death, seed {seed}: {err}");
                    let says = err.starts_with("trainer: ")
                        && (err.contains("private offloadd: ") || err.contains("offloadd.sock"));
                    assert!(says, "what happened to the daemon? seed {seed}: {err}");
                    (hit, daemons_alone) = (hit + 1, daemons_alone + 1);
                }
                (_, Some(code)) => panic!("it ended with {code} by itself, seed {seed}: {err}"),
                (_, None) => {
                    let trains = ["resumed at step ", "started with random weights"]
                        .iter()
                        .any(|says| out.contains(says));
                    if alive > 0 || !self.on_store && trains {
                        hit += 1;
                    } else if run.steps_written() < STEPS {
                        // It had not begun: the machine is slower than when the times were measured.
                        load = load.mul_f64(1.25);
                    } else {
                        train = train.mul_f64(0.75);
                    }
                }
            }
        }
        println!(
            "{hit} of {drawn} kills hit, {daemons_alone} of them the daemon alone; {done} runs came to their end"
        );
        run.train();
        self.compare(&run, seed);
        hit
    }

    /// Lets the daemon die at an operation, if it is a test build; the trainer then ends by itself.
    fn kill_at_operation(&self, run: &Run, number: u64) -> (Output, usize) {
        let mut command = run.command("train");
        command.env("OFFLOADD_FAULT", format!("kill@{number}"));
        (finish(spawn(command)), 1)
    }

    fn run(&self, number: usize) -> Run {
        self.harness
            .run(&format!("killed-{number}"), &[])
            .with(&self.sets)
    }

    /// Measures the time of an undisturbed run until there is something to kill, and from there to its end.
    fn times(&self) -> (Duration, Duration) {
        let run = self.harness.run("timed", &[]).with(&self.sets);
        let started = Instant::now();
        let mut child = spawn(run.command("train"));
        let (on_store, dir) = (self.on_store, run.dir.clone());
        let id = child.id();
        child = until(child, "the run started", || {
            if on_store {
                !children(id).is_empty()
            } else {
                dir.exists()
            }
        });
        let load = started.elapsed();
        let output = finish(child);
        assert!(output.status.success(), "{output:?}");
        self.compare(&run, 0);
        (load, started.elapsed().saturating_sub(load))
    }

    fn compare(&self, run: &Run, seed: u64) {
        let whole = &self.whole;
        for key in ["loss", "grad_norm", "lr", "tokens"] {
            assert_eq!(whole.bits(key), run.bits(key), "{key}, seed {seed}");
        }
        assert_eq!(evaluations(whole), evaluations(run), "seed {seed}");
        assert_eq!(self.fingerprint, run.fingerprint(), "seed {seed}");
    }
}

/// Step from which a start resumed, if it got that far.
fn went_on_from(out: &str) -> Option<u64> {
    out.lines().find_map(|line| {
        let fresh = line.starts_with("started with random weights");
        let step = line.strip_prefix("resumed at step ");
        step.map(|step| step.parse().expect("a step"))
            .or(fresh.then_some(0))
    })
}

/// Each step with the bits of its evaluation, if any.
fn evaluations(run: &Run) -> Vec<(u64, Option<u64>)> {
    let bits = |line: &serde_json::Value| line["eval_loss"].as_f64().map(f64::to_bits);
    run.metrics()
        .iter()
        .map(|line| (line["step"].as_u64().unwrap(), bits(line)))
        .collect()
}

/// Kills with SIGKILL after `instant`. Returns how the trainer ended, and how many daemons it had. A trainer
/// without a daemon is killed itself.
fn kill_after(mut child: Child, instant: Duration, victim: Victim) -> (Output, usize) {
    std::thread::sleep(instant);
    let over = child.try_wait().expect("it can be asked").is_some();
    let daemons = if over {
        Vec::new()
    } else {
        children(child.id())
    };
    if !matches!(victim, Victim::Trainer) {
        for pid in &daemons {
            // It may have ended with the run.
            let _ = rustix::process::kill_process(*pid, rustix::process::Signal::KILL);
        }
    }
    if !matches!(victim, Victim::Daemon) || daemons.is_empty() {
        // It may have ended by itself.
        let _ = child.kill();
    }
    (finish(child), daemons.len())
}
