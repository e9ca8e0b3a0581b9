//! Compares steps on drives of known speed with the bound (section "The bound of a step" of
//! `swapper::bound`).
//!
//! Errors that this finds: reads wait for writes, updates for reads, or backward for slots that hold
//! unwritten tiles; staging does not carry tiles from one step to the next. Such errors do not change losses,
//! only times. So the drives have an exact rate limit (`OFFLOADD_RATE_LIMIT`, test builds), low enough to limit the
//! step, and steps are compared with the formula, which is repeated here. A step also uses the processor; its
//! metrics say how long. This is a separate test program, so that no other test uses the processor at the
//! same time.

#[allow(dead_code, reason = "the tests of `runs` use more of it")]
#[path = "runs/harness.rs"]
mod harness;
#[allow(dead_code, reason = "the tests of `runs` use more of it")]
#[path = "runs/random.rs"]
mod random;

use std::path::PathBuf;

use serde_json::Value;

use harness::{Harness, succeed};

/// Number of drives, and the rates of each in bytes per second: so slow that a tenth of a second, which a step takes on two
/// slow cores beside its drives, is less than a tenth of it.
const DRIVES: usize = 4;
const READ: f64 = 12e6;
const WRITE: f64 = 6e6;

/// Steps of a run; the first ones have nothing prefetched and nothing to write.
const STEPS: usize = 8;
const WARM_STEPS: usize = 3;

/// Largest ratio of a step's time to its bound. A step that could not carry tiles in staging would take 1.24 times the bound of
/// the larger staging.
const NEAR: f64 = 1.2;

/// Attempts to get close to the bound: on a busy machine a step may take any time, and one undisturbed run shows what the
/// schedule can do.
const TRIES: usize = 4;

/// Medians of times and means of bytes over a run's later steps.
#[derive(Debug)]
struct Step {
    step_s: f64,
    forward_s: f64,
    backward_s: f64,
    update_s: f64,
    bound_s: f64,
    written_bytes: f64,
}

impl Step {
    /// The bound of a deferred step with `staging` bytes. In fp32 a parameter has 4 bytes and its state 8:
    /// all are written and read in forward, and the parameters are read once more in backward.
    fn deferred_bound_s(&self, staging: f64) -> f64 {
        let (read, write) = (READ * DRIVES as f64, WRITE * DRIVES as f64);
        let written = self.written_bytes;
        let forward = [
            self.forward_s,
            self.update_s,
            (written - staging) / write,
            (written - staging) / read,
        ];
        let forward_s = forward.into_iter().fold(0.0, f64::max);
        (written / write)
            .max(written * 4.0 / 3.0 / read)
            .max(self.backward_s + forward_s)
    }
}

/// Directory for device files: in memory if that supports direct I/O, so that only the rate limit counts;
/// otherwise on the test's drive.
struct Drives {
    _dir: tempfile::TempDir,
    paths: Vec<PathBuf>,
}

impl Drives {
    fn new(harness: &Harness) -> Self {
        let memory = tempfile::tempdir_in("/dev/shm").ok().filter(|dir| {
            let file = dir.path().join("file");
            training_state::store::check_dirs(&[file], 1 << 20).is_ok()
        });
        let dir = memory.unwrap_or_else(|| {
            tempfile::tempdir_in(harness.path("drive")).expect("a directory for the drives")
        });
        let paths: Vec<PathBuf> = (0..DRIVES)
            .map(|drive| dir.path().join(format!("drive{drive}")))
            .collect();
        for path in &paths {
            std::fs::create_dir(path).expect("a directory for a drive");
        }
        Self { _dir: dir, paths }
    }
}

/// Trains from random weights. Returns `None` if the daemon does not support rate limits.
fn train(harness: &Harness, schedule: &str, staging: u64) -> Option<Step> {
    let drives = Drives::new(harness);
    let paths: Vec<String> = drives
        .paths
        .iter()
        .map(|path| format!("{:?}", path.display()))
        .collect();
    let place = |what: &str| {
        format!(
            "zero_optimization.offload_{what}={{device = \"nvme\", nvme_path = [{}]}}",
            paths.join(", ")
        )
    };
    let sets = [
        "model.hidden_size=128".to_owned(),
        "model.intermediate_size=352".into(),
        "model.num_hidden_layers=12".into(),
        "train_micro_batch_size_per_gpu=4".into(),
        "train.seq_len=96".into(),
        "scheduler={}".into(),
        format!("train.steps={STEPS}"),
        "offload.tile_elems=16384".into(),
        format!("offload.optimizer_step={schedule}"),
        format!("offload.staging_bytes={staging}"),
        "offload.commit_every=1".into(),
        place("param"),
        place("optimizer"),
    ];
    let run = harness
        .run(&format!("{schedule}-{staging}"), &[])
        .with(&sets);
    let mut command = run.command("train");
    command
        .arg("--fresh")
        .env("OFFLOADD_RATE_LIMIT", format!("{READ},{WRITE}"));
    succeed(command);
    let log = std::fs::read_to_string(run.dir.join("offloadd/offloadd.log"));
    if !log.expect("the daemon's log").contains("RateLimit {") {
        return None;
    }
    assert_eq!(run.metrics().len(), STEPS);
    Some(steady(&run.metrics()[WARM_STEPS..]))
}

fn steady(lines: &[Value]) -> Step {
    let median = |key: &str| {
        let mut values: Vec<f64> = lines
            .iter()
            .map(|line| line[key].as_f64().expect("a number"))
            .collect();
        values.sort_by(f64::total_cmp);
        values[values.len() / 2]
    };
    let sum = |key: &str| -> f64 {
        let values = lines.iter().map(|line| line[key].as_f64());
        values.map(|value| value.expect("a number")).sum()
    };
    Step {
        step_s: median("step_s"),
        forward_s: median("forward_s"),
        backward_s: median("backward_s"),
        update_s: median("update_s"),
        bound_s: median("bound_s"),
        // Some writes of a step may be counted in the next one, so bytes are averaged.
        written_bytes: sum("device_written_bytes") / lines.len() as f64,
    }
}

/// Bytes of all tiles: 12 for each of 2.28 million parameters, padded to blocks.
const WRITTEN_BYTES: f64 = 27.5e6;

#[test]
fn deferred_steps_approach_the_bound_and_immediate_steps_take_the_sum() {
    let harness = Harness::new();
    let mut near = Vec::new();
    for share in [0.10, 0.75] {
        let staging = WRITTEN_BYTES * share;
        let mut tries = Vec::new();
        let best = loop {
            let Some(step) = train(&harness, "deferred", staging as u64) else {
                println!(
                    "skipped: deferred_steps_approach_the_bound_and_immediate_steps_take_the_sum: this offloadd was built without the test hooks; `cargo test` of the workspace builds it with them"
                );
                return;
            };
            let bound_s = step.deferred_bound_s(staging);
            let written = step.written_bytes / WRITTEN_BYTES;
            assert!((0.9..1.1).contains(&written), "{step:?}");
            // The trainer's own bound uses measured rates and planned bytes.
            assert!(
                (step.bound_s / bound_s - 1.0).abs() < 0.1,
                "{bound_s}: {step:?}"
            );
            // A faster step would mean that there was no rate limit.
            assert!(step.step_s > 0.9 * bound_s, "{bound_s}: {step:?}");
            println!(
                "staging of {:.0} %: {:.3} s a step, bound {bound_s:.3}",
                100.0 * share,
                step.step_s
            );
            if step.step_s < NEAR * bound_s {
                break step;
            }
            tries.push((bound_s, step));
            assert!(tries.len() < TRIES, "staging of {share}: {tries:#?}");
        };
        near.push(best);
    }
    let once = train(&harness, "immediate", (WRITTEN_BYTES * 0.75) as u64)
        .expect("the rate limit worked before");
    // Writes begin after all gradients are complete and end before the step does.
    let sum_s = once.forward_s + once.backward_s + once.written_bytes / (WRITE * DRIVES as f64);
    println!("immediate: {:.3} s a step, sum {sum_s:.3}", once.step_s);
    assert!(once.step_s > 0.95 * sum_s, "{sum_s}: {once:?}");
    assert!(
        once.step_s > 1.15 * near[1].step_s,
        "{once:?} against {near:?}"
    );
}
