//! The learning rate of a step, a pure function of the step: nothing to save, nothing to resume.
//!
//! Steps are those that updated weights, counted from 1. DeepSpeed moves its schedulers after a step: the first step has the rate
//! that a scheduler begins with, step s that of its iteration i = s - 2. So with w warm-up steps of T:
//!
//! ```text
//!   s = 1    min, but WarmupCosineLR 0
//!   i < w    min + (max - min) * i/w            or, logarithmic, * ln(i+1)/ln(w)
//!   i >= w   WarmupLR        max
//!            WarmupDecayLR   min + (max - min) * (T-i)/(T-w), not below min
//!            WarmupCosineLR  max * (r + (1-r) * (1 + cos(pi * (i-w+1)/(T-w))) / 2), r the least ratio
//!   any s    linear          lr * (T-s+1)/T, as Hugging Face's Trainer
//!   any i    LRRangeTest     min * (1 + rate * (i+1)/size), with stairs rounded down
//!            OneCycle        min + (max - min) * h, h up from 0 to 1 and down again over i+1; later min / (1 + rate * (i+1-cycle)/size)
//! ```

use crate::config::{LrSchedule, MomentumCycle, OneCycle, Warmup};

/// DeepSpeed's cycle has this decay of the variance, whatever the optimizer's is.
const CYCLE_BETA2: f64 = 0.99;

/// The rate of step `step` (from 1).
pub fn learning_rate(schedule: &LrSchedule, step: u64) -> f64 {
    assert!(step >= 1, "steps count from 1");
    let iteration = step.checked_sub(2);
    match schedule {
        LrSchedule::Constant { lr } => *lr,
        LrSchedule::Linear { lr, total_steps } => {
            lr * (total_steps + 1).saturating_sub(step) as f64 / *total_steps as f64
        }
        LrSchedule::RangeTest(test) => {
            let intervals = (step - 1) as f64 / test.step_size as f64;
            let intervals = if test.staircase {
                intervals.floor()
            } else {
                intervals
            };
            test.min_lr * (1.0 + test.step_rate * intervals)
        }
        LrSchedule::OneCycle(cycle) => match Phase::of(cycle, step) {
            Phase::Cycle(height) => cycle.min_lr + (cycle.max_lr - cycle.min_lr) * height,
            Phase::Decay(intervals) => cycle.min_lr / (1.0 + cycle.decay_lr_rate * intervals),
        },
        LrSchedule::Warmup(warmup) => {
            let share = iteration.map_or(0.0, |at| rising(warmup, at).unwrap_or(1.0));
            between(warmup, share)
        }
        LrSchedule::WarmupDecay {
            warmup,
            total_steps,
        } => {
            let falling = |at: u64| {
                let left = total_steps.saturating_sub(at) as f64;
                left / total_steps.saturating_sub(warmup.steps).max(1) as f64
            };
            let share =
                iteration.map_or(0.0, |at| rising(warmup, at).unwrap_or_else(|| falling(at)));
            between(warmup, share)
        }
        LrSchedule::WarmupCosine {
            warmup,
            total_steps,
            min_ratio,
        } => {
            // The one that begins below its least ratio.
            let Some(at) = iteration else { return 0.0 };
            if let Some(share) = rising(warmup, at) {
                return between(warmup, share);
            }
            let gone = (at - warmup.steps + 1) as f64;
            let gone = gone / total_steps.saturating_sub(warmup.steps).max(1) as f64;
            let wave = (1.0 + (std::f64::consts::PI * gone.min(1.0)).cos()) / 2.0;
            warmup.max_lr * (min_ratio + (1.0 - min_ratio) * wave)
        }
    }
}

/// The decay of momentum and variance in step `step`, where the schedule has them.
pub fn betas(schedule: &LrSchedule, step: u64) -> Option<[f64; 2]> {
    let LrSchedule::OneCycle(cycle) = schedule else {
        return None;
    };
    let MomentumCycle {
        min,
        max,
        decay_rate,
    } = cycle.momentum?;
    // A cycle begins at the bottom of both, for one step.
    let momentum = match Phase::of(cycle, step) {
        Phase::Cycle(_) if step == 1 => min,
        Phase::Cycle(height) => max - (max - min) * height,
        Phase::Decay(intervals) => max * (1.0 + decay_rate * intervals),
    };
    Some([momentum, CYCLE_BETA2])
}

fn between(warmup: &Warmup, share: f64) -> f64 {
    warmup.min_lr + (warmup.max_lr - warmup.min_lr) * share
}

/// The share of the rise at iteration `at`; `None` afterwards.
fn rising(warmup: &Warmup, at: u64) -> Option<f64> {
    assert!(warmup.steps >= 2, "the logarithm of one step is no divisor");
    (at < warmup.steps).then(|| {
        if warmup.logarithmic {
            ((at + 1) as f64).ln() / (warmup.steps as f64).ln()
        } else {
            at as f64 / warmup.steps as f64
        }
    })
}

/// Where a step is in a cycle.
enum Phase {
    /// How high, from 0 to 1.
    Cycle(f64),
    /// Intervals of decay after it.
    Decay(f64),
}

impl Phase {
    fn of(cycle: &OneCycle, step: u64) -> Self {
        let (first, second) = (cycle.first_steps as f64, cycle.second_steps as f64);
        let total = cycle.first_steps + cycle.second_steps;
        let gone = step - 1;
        if gone > total {
            let steps = match cycle.decay_steps {
                0 => return Self::Decay(0.0),
                steps => steps as f64,
            };
            return Self::Decay((gone - total) as f64 / steps);
        }
        let at = (gone % total) as f64;
        let (is_up, share) = if at <= first {
            (true, at / first)
        } else {
            (false, (total as f64 - at) / second)
        };
        let stairs = if is_up {
            cycle.first_stairs
        } else {
            cycle.second_stairs
        };
        if stairs == 0 {
            return Self::Cycle(share);
        }
        let stairs = stairs as f64;
        let position = if is_up {
            at * stairs / first
        } else {
            (total as f64 - at) * stairs / second
        };
        Self::Cycle(position.floor() / stairs)
    }
}

#[cfg(test)]
mod tests {
    //! What could go wrong: a formula, or a step's place in it, is not DeepSpeed's. The values come from DeepSpeed itself:
    //! `tests/fixtures/deepspeed/lr_schedules.py` wrote them.

    use serde::Deserialize;
    use serde_json::{Value, json};

    use super::*;

    const FIXTURE: &str = include_str!("../tests/fixtures/deepspeed/lr_schedules.json");

    #[derive(Deserialize)]
    struct Case {
        scheduler: Value,
        lr: Vec<f64>,
        betas: Vec<[f64; 2]>,
    }

    #[test]
    fn every_scheduler_has_deepspeeds_rates_and_momenta() {
        let cases: Vec<Case> = serde_json::from_str(FIXTURE).unwrap();
        let mut kinds = std::collections::BTreeSet::new();
        for case in cases {
            let tree = json!({
                "train_batch_size": 1,
                "optimizer": {"params": {"lr": 0.002, "betas": [0.85, 0.95]}},
                "scheduler": case.scheduler,
                "model": {
                    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4
                },
                "data": {"files": ["text"]},
                "train": {"steps": case.lr.len(), "seq_len": 32}
            });
            let settings = crate::config::check(tree, "test", Some(1)).unwrap();
            for (step, expected) in (1..).zip(&case.lr) {
                let found = learning_rate(&settings.lr, step);
                let off = (found - expected).abs();
                let what = &case.scheduler;
                assert!(
                    off <= 1e-12 * expected.abs() + 1e-18,
                    "{what}, step {step}: {found}, not {expected}"
                );
            }
            for (step, expected) in (1..).zip(&case.betas) {
                let found = betas(&settings.lr, step).unwrap_or(settings.optimizer.betas);
                let off = (found[0] - expected[0]).abs();
                let what = &case.scheduler;
                assert!(
                    off < 1e-12 && found[1] == expected[1],
                    "{what}, step {step}: {found:?}, not {expected:?}"
                );
            }
            kinds.insert(case.scheduler["type"].to_string());
        }
        assert_eq!(kinds.len(), 5);
    }

    #[test]
    fn a_constant_rate_stays() {
        let constant = LrSchedule::Constant { lr: 0.5 };
        assert_eq!(
            [1, 2, 1000].map(|step| learning_rate(&constant, step)),
            [0.5; 3]
        );
        assert_eq!(betas(&constant, 1), None);
    }

    #[test]
    fn a_linear_fall_begins_with_the_whole_rate_and_would_be_0_after_the_last_step() {
        let linear = LrSchedule::Linear {
            lr: 0.5,
            total_steps: 4,
        };
        assert_eq!(
            [1, 2, 3, 4, 5, 9].map(|step| learning_rate(&linear, step)),
            [0.5, 0.375, 0.25, 0.125, 0.0, 0.0]
        );
    }
}
