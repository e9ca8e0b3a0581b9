//! A run that is killed again and again, beside one that nobody kills: what a test looks at after each kill.

use std::collections::HashMap;
use std::process::Command;

use training_state::run::{CheckpointName, Checkpoints};

use crate::harness::{Harness, Run, succeed};
use crate::random::Random;

/// A run that nobody kills, each of its steps kept, and one that is.
pub(crate) struct Killed {
    pub(crate) harness: Harness,
    whole: Run,
    fingerprints: HashMap<u64, String>,
    sets: Vec<String>,
    ranks: u32,
    steps_count: u64,
    commit_every: u64,
    pub(crate) random: Random,
}

/// The newest of one run that was seen.
#[derive(Default)]
pub(crate) struct Seen {
    /// Something was committed, be it first weights.
    pub(crate) begun: bool,
    committed: u64,
    saved: u64,
    told: u64,
}

impl Killed {
    /// Of so many ranks and steps each.
    pub(crate) fn new(
        ranks: u32,
        steps_count: u64,
        commit_every: u64,
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
        succeed(command(&whole, ranks));
        let mut all = harness.nvme();
        all.extend([
            steps,
            "train.checkpoint_every=2".into(),
            "train.checkpoints_kept=2".into(),
            format!("offload.commit_every={commit_every}"),
        ]);
        all.extend(sets.iter().map(|set| (*set).to_owned()));
        Self {
            harness,
            whole,
            fingerprints: HashMap::new(),
            sets: all,
            ranks,
            steps_count,
            commit_every,
            random: Random::of(seed),
        }
    }

    pub(crate) fn run(&self, number: u64) -> Run {
        let run = self.harness.run(&format!("killed-{number}"), &[]);
        run.with(&self.sets)
    }

    /// Starts `run`, or goes on with it.
    pub(crate) fn command(&self, run: &Run) -> Command {
        command(run, self.ranks)
    }

    /// What a fingerprint says must be what the run that nobody killed had after that step, which is answered.
    fn compare(&mut self, fingerprint: &str, after: &str) -> u64 {
        let step = fingerprint
            .lines()
            .next()
            .and_then(|l| l.strip_prefix("step "));
        let step: u64 = step.expect("a fingerprint names its step").parse().unwrap();
        // Of first weights there is no checkpoint.
        if step > 0 {
            let whole = &self.whole;
            let expected = self.fingerprints.entry(step);
            let expected =
                expected.or_insert_with(|| whole.fingerprint_of(Some(CheckpointName::Step(step))));
            assert_eq!(fingerprint, expected, "{after}");
        }
        step
    }

    /// What `run` holds after a kill, and that it is no older than what was `seen`.
    pub(crate) fn look(&mut self, run: &Run, seen: &mut Seen, after: &str) {
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

    /// The same of its newest checkpoint.
    pub(crate) fn look_at_checkpoint(&mut self, run: &Run, seen: &mut Seen, after: &str) {
        let checkpoint = Checkpoints::of(&run.dir).newest().unwrap();
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

    /// The same run, stopped in order after its next step.
    pub(crate) fn stopped(&self, run: Run) -> Run {
        let stop = self.steps_count.min(run.steps_written() + 1);
        run.with(&[format!("train.stop_after={stop}")])
    }

    /// Lets `run` come to its end, which must be that of the one that nobody killed.
    pub(crate) fn end(&mut self, run: &Run, seen: &mut Seen) {
        succeed(self.command(run));
        self.look(run, seen, "the end");
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
