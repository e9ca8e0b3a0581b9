//! The trainer: the calls that `Swapper` would send, step after step.

use swapper::core::{Event, Op, Request};
use swapper::{Schedule, StepProgram, schedule};

use super::{Call, Incarnation};

impl Incarnation<'_> {
    pub(super) fn call_fill(&mut self) {
        let units = 0..self.job.units.len();
        let mut ops: Vec<Op> = units.clone().map(|unit| Op::Fill { unit }).collect();
        ops.push(Op::Commit);
        self.calls.push_back(Call::Plan(ops, Some(0)));
        for unit in units {
            self.serve(Op::Fill { unit });
        }
        let ops = Vec::new();
        self.calls
            .push_back(Call::Request(Request::Drain { ops }, None));
    }

    fn serve(&mut self, op: Op) {
        self.calls
            .push_back(Call::Request(Request::Serve(op), None));
    }

    fn plan_ops(&self, pending: &[usize], commit: bool, program: &StepProgram) -> Vec<Op> {
        match self.setup.schedule {
            Schedule::Immediate => schedule::immediate(pending, commit, program),
            Schedule::Deferred => schedule::deferred(pending, commit, program),
        }
    }

    /// Makes the trainer's next call; returns `false` at the end.
    pub(super) fn next_call(&mut self) -> bool {
        if self.calls.is_empty() && !self.call_more() {
            return false;
        }
        match self.calls.pop_front().unwrap() {
            Call::Plan(ops, blob) => {
                self.planned(blob);
                self.moves.passes += 1;
                self.sums.fill(0);
                self.event(Event::Plan(ops));
            }
            Call::Pass(ops, blob) => {
                self.planned(blob);
                self.moves.passes += 1;
                self.moves.further += 1;
                self.event(Event::Pass(ops));
            }
            Call::Rewrite(ops, blob) => {
                self.planned(blob);
                self.moves.passes += 1;
                self.sums.fill(0);
                self.generation_of.push(self.generation - 1);
                self.event(Event::Plan(ops));
            }
            Call::Begin(request, joins) => {
                self.waiting = true;
                self.moves.passes += 1;
                self.moves.begun += 1;
                if !joins {
                    self.hypers.push(self.step + 1);
                    self.generation_of.push(self.generation);
                }
                if !self.begun {
                    self.update_external(self.step + 1);
                }
                self.begun = true;
                self.event(Event::Request(request));
            }
            Call::Rewritten => {
                self.step += 1;
                return self.next_call();
            }
            Call::Request(request, blob) => {
                self.planned(blob);
                self.waiting = true;
                match &request {
                    Request::Serve(op) => self.asked = Some(*op),
                    Request::Finish { update, joins, .. } => {
                        self.step += 1;
                        self.sums.fill(0);
                        self.moves.passes += 1;
                        if *update && !self.begun {
                            self.update_external(self.step);
                        }
                        if !std::mem::take(&mut self.begun) {
                            self.generation_of
                                .push(self.generation - u64::from(blob.is_some()));
                        }
                        if *update && !joins {
                            self.hypers.push(self.step);
                        }
                    }
                    Request::Drain { .. } | Request::Settle => self.moves.passes += 1,
                }
                self.event(Event::Request(request));
            }
        }
        true
    }

    /// Records that a call that plans a commit ends the working generation.
    fn planned(&mut self, blob: Option<u64>) {
        if let Some(step) = blob {
            self.generation += 1;
            if self.job.durable {
                self.blobs.push_back(step);
            }
        }
    }

    /// Queues the calls of the next step, evaluation or end; `false` when there are none.
    fn call_more(&mut self) -> bool {
        let steps = self.job.skipped.len() as u64;
        if self.ending {
            return false;
        }
        if self.step == steps {
            self.call_end();
            return true;
        }
        let evaluates = self.job.evaluate_every > 0
            && (self.step as usize).is_multiple_of(self.job.evaluate_every);
        if evaluates {
            self.call_evaluation();
        }
        let rewrites = self.job.rewrites[self.step as usize].clone();
        if !rewrites.is_empty() {
            self.call_rewrites(rewrites);
            return true;
        }
        let program = self.job.program.clone();
        let update = !self.job.skipped[self.step as usize];
        // Where gradients are added up, those of a unit are complete only in the last pass.
        let revises = self.job.revised_units();
        let begins = update && self.job.passes[self.step as usize] == 1 && revises.is_empty();
        let passes = self.job.passes[self.step as usize];
        let (mut pending, mut begun) = (self.pending.clone(), Vec::new());
        let settle = || Call::Request(Request::Settle, None);
        for pass in 0..passes {
            let program = match pass + 1 == passes {
                true => self.with_revisions(&revises),
                false => program.clone(),
            };
            let ops = self.plan_ops(&pending, false, &program);
            self.calls.push_back(match pass {
                0 => Call::Plan(ops, None),
                _ => Call::Pass(ops, None),
            });
            for (at, &op) in self.job.program.ops().iter().enumerate() {
                if self.rng.chance(self.setup.revisions) {
                    let rest = StepProgram::new(program.ops()[at..].to_vec()).unwrap();
                    let ops = self.plan_ops(&pending, false, &rest);
                    self.calls.push_back(Call::Pass(ops, None));
                }
                self.serve(op);
                if begins && matches!(op, Op::Scatter { .. }) && self.rng.chance(self.setup.begins)
                {
                    let joins = !begun.is_empty();
                    self.calls.extend((!joins).then(settle));
                    begun = scattered(&program.ops()[..=at]);
                    self.call_begin(&begun, joins, &StepProgram::default());
                    pending.clone_from(&begun);
                    let rest = StepProgram::new(program.ops()[at + 1..].to_vec()).unwrap();
                    let ops = self.plan_ops(&pending, false, &rest);
                    self.calls.push_back(Call::Pass(ops, None));
                }
            }
        }

        if update {
            begun.extend(self.call_revisions(&revises));
        }
        let mut updated = if update {
            scattered(program.ops())
        } else {
            Vec::new()
        };
        let joins = !begun.is_empty() && self.rng.chance(50);
        self.moves.joined += u64::from(joins);
        if !joins {
            updated.retain(|unit| !begun.contains(unit));
        }
        self.calls.extend((update && begun.is_empty()).then(settle));
        self.uncommitted += 1;
        let commit = self.setup.commit_every > 0 && self.uncommitted >= self.setup.commit_every;
        // Units that begin to be updated as they are revised need no later blob.
        let late = joins || begins && !begun.is_empty() || self.rng.chance(self.setup.late_blobs);
        let updated = self.with_copied(updated, commit);
        let program = self.with_revisions(&revises);
        let ops = self.plan_ops(&updated, commit && !late, &program);
        let wait = self.setup.schedule == Schedule::Immediate;
        let blob = commit.then_some(self.step + 1);
        let finish = Request::Finish {
            ops,
            update,
            wait,
            settled: late,
            joins,
        };
        self.calls
            .push_back(Call::Request(finish, blob.filter(|_| !late)));
        if commit && late {
            let ops = self.plan_ops(&updated, true, &program);
            self.calls.push_back(match wait {
                true => Call::Request(Request::Drain { ops }, blob),
                false => Call::Pass(ops, blob),
            });
        }
        if commit {
            self.uncommitted = 0;
        }
        self.pending = updated;
        true
    }

    fn call_end(&mut self) {
        self.ending = true;
        self.call_drain();
        let units = 0..self.job.units.len();
        let ops = units.clone().map(|unit| Op::Visit { unit }).collect();
        self.calls.push_back(Call::Plan(ops, None));
        units.for_each(|unit| self.serve(Op::Visit { unit }));
    }

    fn call_evaluation(&mut self) {
        self.call_drain();
        let program = StepProgram::reading(0..self.job.units.len());
        let ops = self.plan_ops(&[], false, &program);
        self.calls.push_back(Call::Plan(ops, None));
        program.ops().iter().for_each(|&op| self.serve(op));
    }

    fn call_rewrites(&mut self, rewrites: Vec<usize>) {
        self.call_drain();
        let mut ops: Vec<Op> = (rewrites.iter())
            .map(|&unit| Op::Rewrite { unit })
            .collect();
        ops.push(Op::Commit);
        self.calls
            .push_back(Call::Rewrite(ops, Some(self.step + 1)));
        for unit in rewrites {
            self.serve(Op::Rewrite { unit });
        }
        self.calls.push_back(Call::Rewritten);
        let ops = Vec::new();
        self.calls
            .push_back(Call::Request(Request::Drain { ops }, None));
    }

    /// The job's program with the revision of units after it.
    fn with_revisions(&self, units: &[usize]) -> StepProgram {
        let mut ops = self.job.program.ops().to_vec();
        ops.extend(revisions(units));
        StepProgram::new(ops).unwrap()
    }

    /// Queues the revision of `units`, and that some of them begin to be updated. Returns these.
    fn call_revisions(&mut self, units: &[usize]) -> Vec<usize> {
        let mut begun = Vec::new();
        if !units.is_empty() {
            let settle = Call::Request(Request::Settle, None);
            let all = StepProgram::new(revisions(units).collect()).unwrap();
            let ops = self.plan_ops(&[], false, &all);
            self.calls.extend([settle, Call::Pass(ops, None)]);
        }
        for (at, &unit) in units.iter().enumerate() {
            revisions(&[unit]).for_each(|op| self.serve(op));
            if self.rng.chance(self.setup.begins) {
                let joins = !begun.is_empty();
                begun.push(unit);
                let rest = StepProgram::new(revisions(&units[at + 1..]).collect()).unwrap();
                self.call_begin(&begun, joins, &rest);
            }
        }
        begun
    }

    /// Queues that updates of units begin before the step's end, of which `rest` is to come.
    fn call_begin(&mut self, units: &[usize], joins: bool, rest: &StepProgram) {
        let begin = Request::Finish {
            ops: schedule::immediate(units, false, rest),
            update: true,
            wait: false,
            settled: true,
            joins,
        };
        self.calls.push_back(Call::Begin(begin, joins));
    }

    /// Adds the external units to pending ones, if there is a commit.
    fn with_copied(&self, mut pending: Vec<usize>, commit: bool) -> Vec<usize> {
        let external = |unit: &usize| {
            let first = self.job.units[*unit].start as usize;
            commit && self.setup.external[first] && !pending.contains(unit)
        };
        let more: Vec<usize> = (0..self.job.units.len()).filter(external).collect();
        pending.extend(more);
        pending
    }

    fn call_drain(&mut self) {
        let commit = self.uncommitted > 0;
        let pending = self.with_copied(self.pending.clone(), commit);
        let ops = schedule::immediate(&pending, commit, &StepProgram::default());
        let blob = commit.then_some(self.step);
        self.calls
            .push_back(Call::Request(Request::Drain { ops }, blob));
        self.uncommitted = 0;
        self.pending.clear();
    }
}

/// Operations that revise `units`.
fn revisions(units: &[usize]) -> impl Iterator<Item = Op> + '_ {
    let ops = |&unit: &usize| [Op::Revise { unit }, Op::Scatter { unit }];
    units.iter().flat_map(ops)
}

/// Units that `ops` scatter.
fn scattered(ops: &[Op]) -> Vec<usize> {
    let unit = |op: &Op| match op {
        Op::Scatter { unit } => Some(*unit),
        _ => None,
    };
    ops.iter().filter_map(unit).collect()
}
