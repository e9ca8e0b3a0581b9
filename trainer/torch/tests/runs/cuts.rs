//! Resumes whole trainings from the contents of two drives after a power cut.
//!
//! Errors that these tests find: a commit was acknowledged although a drive had not flushed its tiles, so
//! that the run resumes from mixed tiles, from an older step, or not at all; files of the run directory,
//! which are not synced, are missed. The run's daemon keeps what it has not flushed and, instead of one of
//! its operations on devices, reverts an arbitrary part of those sectors and dies (`OFFLOADD_FAULT=cut@N`,
//! test builds only). From each resulting image a run trains to the end and is compared with a run without
//! power cuts.
//!
//! `OFFLOADD_POWER_TRAININGS=50 cargo test -p trainer-torch --test runs crash_image` tries that many images.

use std::process::Output;

use crate::harness::{Harness, Run, finish, spawn};
use crate::random::Random;

const STEPS: u64 = 12;

/// Trainings with power cuts.
struct Cuts {
    harness: Harness,
    whole: Run,
    fingerprint: String,
    random: Random,
    /// Range from which the number of the cut operation is drawn: about as many as a start has.
    operations: u64,
}

/// Result of one image.
#[derive(Debug)]
enum Outcome {
    /// The start ended before the operation.
    NotCut,
    /// Resumed at this step; the metrics had this many steps.
    WentOn { step: u64, steps_written: u64 },
    /// The run was refused, or trained differently from the run without cuts.
    Wrong(String),
}

impl Cuts {
    fn new(seed: u64) -> Self {
        let harness = Harness::new();
        let whole = harness.run("whole", &[&format!("train.steps={STEPS}")]);
        whole.train();
        let fingerprint = whole.fingerprint();
        Self {
            harness,
            whole,
            fingerprint,
            random: Random::from_seed(seed),
            operations: 400,
        }
    }

    /// Makes a run on two drives; every other run has the other schedule.
    fn run(&self, image: u64) -> Run {
        let dirs = ["drive", "other"].map(|name| {
            let dir = self.harness.path(&format!("{name}-{image}"));
            std::fs::create_dir(&dir).unwrap();
            format!("\"{}\"", dir.display())
        });
        let places = dirs.join(", ");
        let store = ["param", "optimizer"].map(|what| {
            format!(
                "zero_optimization.offload_{what}={{device = \"nvme\", nvme_path = [{places}]}}"
            )
        });
        let schedule = ["deferred", "immediate"][image as usize % 2];
        let sets = [
            format!("train.steps={STEPS}"),
            format!("offload.optimizer_step={schedule}"),
        ];
        let run = self.harness.run(&format!("cut-{image}"), &[]);
        run.with(&sets).with(&store)
    }

    /// Makes one image and trains from it.
    fn image(&mut self, image: u64, removed: &str) -> Outcome {
        let run = self.run(image);
        // Most images are of stores with some history: a new store is mostly cut while it is created.
        let lived = self.random.below(4);
        if lived > 0 {
            let until = [format!("train.stop_after={lived}")];
            let begun = self.harness.run(&format!("cut-{image}"), &[]);
            begun.with(run.sets()).with(&until).train();
        }
        let operation = self.random.below(self.operations);
        let output = self.cut(&run, operation, removed);
        if output.status.success() {
            // The operation does not exist, because the machine is slower than before.
            self.operations = (self.operations * 3 / 4).max(50);
            return Outcome::NotCut;
        }
        let said = String::from_utf8_lossy(&output.stderr);
        let of_its_daemon = ["private offloadd", "offloadd.sock"].map(|name| said.contains(name));
        assert!(of_its_daemon.contains(&true), "not a power cut: {said}");
        let steps_written = run.steps_written();
        self.forget_unflushed(&run);
        let output = finish(spawn(run.command("train")));
        let [out, err] = [output.stdout, output.stderr]
            .map(|words| String::from_utf8(words).expect("output is text"));
        if !output.status.success() {
            return Outcome::Wrong(err);
        }
        let step = out.lines().find_map(|l| l.strip_prefix("resumed at step "));
        let step = step.map_or(0, |step| step.parse().unwrap());
        // The commit of a step may still be in progress while the next step's line is written, but not
        // longer.
        if step + 2 < steps_written {
            let why = format!("step {step}, but {steps_written} steps are in the metrics");
            return Outcome::Wrong(why);
        }
        if run.fingerprint() != self.fingerprint {
            return Outcome::Wrong(format!("from step {step} on it trains differently"));
        }
        self.compare_metrics(&run);
        Outcome::WentOn {
            step,
            steps_written,
        }
    }

    fn cut(&self, run: &Run, operation: u64, removed: &str) -> Output {
        let mut command = run.command("train");
        command
            .env("OFFLOADD_FAULT", format!("cut@{operation}"))
            .env("OFFLOADD_DISABLE", removed);
        finish(spawn(command))
    }

    /// Removes data that is not synced from an arbitrary position on: lines of metrics, and tokens.
    fn forget_unflushed(&mut self, run: &Run) {
        let metrics = run.dir.join("metrics.jsonl");
        if let Ok(text) = std::fs::read(&metrics) {
            let kept = self.random.below(text.len() as u64 + 1) as usize;
            std::fs::write(&metrics, &text[..kept]).unwrap();
        }
        let Ok(tokens) = std::fs::read_dir(run.dir.join("tokens")) else {
            return;
        };
        for file in tokens.map(|entry| entry.unwrap().path()) {
            let mut bytes = std::fs::read(&file).unwrap();
            let kept = self.random.below(2 * bytes.len() as u64) as usize;
            let lost = kept.min(bytes.len());
            bytes[lost..].fill(0);
            std::fs::write(&file, bytes).unwrap();
        }
    }

    /// Checks that the steps left in the metrics equal those of the run without cuts.
    fn compare_metrics(&self, run: &Run) {
        let whole = self.whole.metrics();
        let lines = run.metrics();
        assert_eq!(lines.last().unwrap()["step"], STEPS);
        for line in lines {
            let step = line["step"].as_u64().unwrap() as usize;
            for key in ["loss", "grad_norm", "lr", "tokens"] {
                assert_eq!(line[key], whole[step - 1][key], "{key} of step {step}");
            }
        }
    }
}

fn seed() -> u64 {
    Random::seed("operations and losses")
}

#[test]
fn a_training_resumes_from_any_crash_image_bit_for_bit() {
    let images = std::env::var("OFFLOADD_POWER_TRAININGS").map_or(5, |images| {
        images
            .parse()
            .expect("OFFLOADD_POWER_TRAININGS is a number")
    });
    let mut cuts = Cuts::new(seed());
    let (mut drawn, mut went_on, mut later) = (0, 0, 0);
    while went_on < images || later == 0 {
        assert!(drawn < 10 * images, "{went_on} of {drawn} were cut");
        match cuts.image(drawn, "") {
            Outcome::NotCut => {}
            Outcome::WentOn {
                step,
                steps_written,
            } => {
                println!(
                    "image {drawn}: resumed at step {step}, {steps_written} steps were written"
                );
                went_on += 1;
                later += u64::from(step > 0);
            }
            Outcome::Wrong(why) => panic!("image {drawn}: {why}"),
        }
        drawn += 1;
    }
    println!("{went_on} of {drawn} starts were cut and resumed, {later} of them after step 0");
}

#[test]
fn without_the_first_flush_a_crash_image_mixes_two_steps() {
    let mut cuts = Cuts::new(seed());
    for image in 0..20 {
        if let Outcome::Wrong(why) = cuts.image(image, "first-flush") {
            return println!("image {image}: {why}");
        }
    }
    panic!("the missing flush was not detected");
}
