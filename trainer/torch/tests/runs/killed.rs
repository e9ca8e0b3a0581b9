//! A run that is killed repeatedly, compared after each kill with a run that is not killed.

use std::collections::HashMap;
use std::process::Command;

use training_state::run::{CheckpointName, Checkpoints};

use crate::harness::{Harness, Run, succeed};
use crate::random::Random;

/// A run that is not killed, with every step kept, and the comparison with runs that are.
pub(crate) struct KilledRuns {
    pub(crate) harness: Harness,
    whole: Run,
    fingerprints: HashMap<u64, String>,
    sets: Vec<String>,
    ranks: u32,
    steps_count: u64,
    commit_every: u64,
    pub(crate) random: Random,
}

/// Newest state seen of one run.
#[derive(Default)]
pub(crate) struct NewestState {
    /// Whether anything was committed, even the initial weights.
    pub(crate) begun: bool,
    committed: u64,
    saved: u64,
    told: u64,
}

impl KilledRuns {
    /// Makes the reference run with this number of ranks and steps. It has the settings `of_all`, those that are killed also `sets`.
    pub(crate) fn new(
        ranks: u32,
        steps_count: u64,
        commit_every: u64,
        of_all: &[&str],
        sets: &[&str],
        seed: u64,
    ) -> Self {
        let harness = Harness::new();
        let steps = format!("train.steps={steps_count}");
        let whole = harness.run(
            "whole",
            &[
                &steps,
                "train.checkpoint_every=1",
                "train.checkpoints_kept=0",
            ],
        );
        let whole = whole.with(of_all);
        succeed(command(&whole, ranks));
        let mut all = harness.nvme();
        all.extend([
            steps,
            "train.checkpoint_every=2".into(),
            "train.checkpoints_kept=2".into(),
            format!("offload.commit_every={commit_every}"),
        ]);
        all.extend(of_all.iter().chain(sets).map(|set| (*set).to_owned()));
        Self {
            harness,
            whole,
            fingerprints: HashMap::new(),
            sets: all,
            ranks,
            steps_count,
            commit_every,
            random: Random::from_seed(seed),
        }
    }

    pub(crate) fn run(&self, number: u64) -> Run {
        let run = self.harness.run(&format!("killed-{number}"), &[]);
        run.with(&self.sets)
    }

    /// Command that starts or resumes `run`.
    pub(crate) fn command(&self, run: &Run) -> Command {
        command(run, self.ranks)
    }

    /// Compares a fingerprint with the reference run's after the same step. Returns the step.
    fn compare(&mut self, fingerprint: &str, after: &str) -> u64 {
        let step = fingerprint
            .lines()
            .next()
            .and_then(|l| l.strip_prefix("step "));
        let step: u64 = step.expect("a fingerprint names its step").parse().unwrap();
        // There is no checkpoint of the initial weights.
        if step > 0 {
            let whole = &self.whole;
            let expected = self.fingerprints.entry(step);
            let expected =
                expected.or_insert_with(|| whole.fingerprint_of(Some(CheckpointName::Step(step))));
            assert_eq!(fingerprint, expected, "{after}");
        }
        step
    }

    /// Checks the state of `run` after a kill: it must not be older than the state in `seen`.
    pub(crate) fn check_resumable(&mut self, run: &Run, seen: &mut NewestState, after: &str) {
        seen.told = seen.told.max(run.steps_written());
        let Some(fingerprint) = run.fingerprint_if_any(None) else {
            // It had not been opened.
            assert!(
                !seen.begun && seen.told == 0,
                "{after}: the committed state is lost"
            );
            return;
        };
        seen.begun = true;
        let step = self.compare(&fingerprint, after);
        let before = seen.committed;
        assert!(
            step >= before,
            "{after}: step {step}, but {before} was seen before"
        );
        // One commit may be in progress, and one waiting for it, while the next step is reported.
        let told = seen.told;
        assert!(
            step + 2 * self.commit_every >= told,
            "{after}: step {step}, but {told} steps were reported"
        );
        seen.committed = step;
    }

    /// Like [`KilledRuns::check_resumable`], for the newest checkpoint.
    pub(crate) fn look_at_checkpoint(&mut self, run: &Run, seen: &mut NewestState, after: &str) {
        let checkpoint = Checkpoints::in_run_dir(&run.dir).newest().unwrap();
        let saved = checkpoint.map_or(0, |checkpoint| {
            self.compare(
                &run.fingerprint_of(Some(CheckpointName::Dir(checkpoint))),
                after,
            )
        });
        let before = seen.saved;
        assert!(
            saved >= before,
            "{after}: checkpoint {saved}, but {before} was seen before"
        );
        seen.saved = saved;
    }

    /// Lets the run stop in order after its next step.
    pub(crate) fn stopped(&self, run: Run) -> Run {
        let stop = self.steps_count.min(run.steps_written() + 1);
        run.with(&[format!("train.stop_after={stop}")])
    }

    /// Lets `run` finish; its end must equal that of the reference run.
    pub(crate) fn end(&mut self, run: &Run, seen: &mut NewestState) {
        succeed(self.command(run));
        self.check_resumable(run, seen, "the end");
        self.look_at_checkpoint(run, seen, "the end");
        assert_eq!(
            (seen.committed, seen.saved),
            (self.steps_count, self.steps_count)
        );
        for key in ["loss", "grad_norm", "lr", "tokens"] {
            let name = run.dir.display();
            assert_eq!(self.whole.bits(key), run.bits(key), "{key} of {name}");
        }
    }
}

fn command(run: &Run, ranks: u32) -> Command {
    match ranks {
        1 => run.command("train"),
        _ => run.launch(ranks),
    }
}
