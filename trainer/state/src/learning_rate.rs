//! Learning rate schedules under DeepSpeed's names. The rate is a pure function of the step, so a schedule
//! has no state to save.
//!
//! Steps that updated weights are counted from 1. DeepSpeed advances its schedulers after a step: the first
//! step has the initial rate of the scheduler, and step s has the rate of iteration i = s - 2. With w warm-up
//! steps of T:
//!
//! ```text
//!   s = 1    min; WarmupCosineLR 0
//!   i < w    min + (max - min) * i/w            or, logarithmic, * ln(i+1)/ln(w)
//!   i >= w   WarmupLR        max
//!            WarmupDecayLR   min + (max - min) * (T-i)/(T-w), not below min
//!            WarmupCosineLR  max * (r + (1-r) * (1 + cos(pi * (i-w+1)/(T-w))) / 2), r the least ratio
//!   any i    LRRangeTest     min * (1 + rate * (i+1)/size), with stairs rounded down
//!            OneCycle        min + (max - min) * h, h rises from 0 to 1 and falls again over i+1; later min / (1 + rate * (i+1-cycle)/size)
//! ```
//!
//! Hugging Face's "linear", "cosine" and "constant" have the rates of its Trainer. With k = s - 1:
//!
//! ```text
//!   k < w    lr * k/w
//!   k >= w   constant        lr
//!            linear          lr * (T-k)/(T-w)
//!            cosine          lr * (1 + cos(pi * (k-w)/(T-w))) / 2
//! ```

use serde::{Deserialize, Serialize};

/// The second beta in DeepSpeed's cycle, independent of the optimizer's.
const CYCLE_BETA2: f64 = 0.99;

/// DeepSpeed's schedulers, each with the names of its parameters.
pub const DEEPSPEED_SCHEDULERS: &[(&str, &[&str])] = &[
    (
        "LRRangeTest",
        &[
            "lr_range_test_min_lr",
            "lr_range_test_step_size",
            "lr_range_test_step_rate",
            "lr_range_test_staircase",
        ],
    ),
    (
        "OneCycle",
        &[
            "cycle_min_lr",
            "cycle_max_lr",
            "decay_lr_rate",
            "cycle_first_step_size",
            "cycle_second_step_size",
            "cycle_first_stair_count",
            "cycle_second_stair_count",
            "decay_step_size",
            "cycle_momentum",
            "cycle_min_mom",
            "cycle_max_mom",
            "decay_mom_rate",
        ],
    ),
    (
        "WarmupLR",
        &[
            "warmup_min_lr",
            "warmup_max_lr",
            "warmup_num_steps",
            "warmup_type",
        ],
    ),
    (
        "WarmupDecayLR",
        &[
            "total_num_steps",
            "warmup_min_lr",
            "warmup_max_lr",
            "warmup_num_steps",
            "warmup_type",
        ],
    ),
    (
        "WarmupCosineLR",
        &[
            "total_num_steps",
            "warmup_min_ratio",
            "warmup_num_steps",
            "cos_min_ratio",
            "warmup_type",
        ],
    ),
];

/// Checked schedule.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LrSchedule {
    /// Hugging Face's "constant": rises linearly from 0 to `lr` in `warmup_steps`, then stays.
    Constant { lr: f64, warmup_steps: u64 },
    /// Hugging Face's "linear": rises as `Constant`, then falls linearly to 0 after `total_steps`.
    Linear {
        lr: f64,
        warmup_steps: u64,
        total_steps: u64,
    },
    /// Hugging Face's "cosine": rises as `Constant`, then falls along half a cosine to 0 after `total_steps`.
    Cosine {
        lr: f64,
        warmup_steps: u64,
        total_steps: u64,
    },
    /// Rises without limit, to find the rate at which training diverges.
    RangeTest(RangeTest),
    /// Rises and falls once while the momentum falls and rises; optionally decays afterwards.
    OneCycle(OneCycle),
    /// Rises, then is constant.
    Warmup(Warmup),
    /// Rises, then falls linearly to `min_lr` at `total_steps`.
    WarmupDecay { warmup: Warmup, total_steps: u64 },
    /// Rises, then falls along half a cosine to `min_ratio` of the maximum at `total_steps`.
    WarmupCosine {
        warmup: Warmup,
        total_steps: u64,
        min_ratio: f64,
    },
}

/// Rise from `min_lr` to `max_lr` in `steps` steps (at least two), linear or logarithmic in the step.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Warmup {
    pub min_lr: f64,
    pub max_lr: f64,
    pub steps: u64,
    pub logarithmic: bool,
}

/// LRRangeTest: starts at `min_lr` and adds `step_rate` times that every `step_size` steps, in stairs or
/// linearly.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct RangeTest {
    pub min_lr: f64,
    pub step_size: u64,
    pub step_rate: f64,
    pub staircase: bool,
}

/// One cycle of rate and momentum.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct OneCycle {
    pub min_lr: f64,
    pub max_lr: f64,
    /// Steps in which the rate rises.
    pub first_steps: u64,
    /// Steps in which the rate falls.
    pub second_steps: u64,
    /// Stairs in each half; 0: none.
    pub first_stairs: u64,
    pub second_stairs: u64,
    /// Steps after the cycle in which the rate's divisor grows by `decay_lr_rate`, and the momentum's factor
    /// by its own rate; 0: no decay.
    pub decay_steps: u64,
    pub decay_lr_rate: f64,
    /// `None`: the optimizer's momentum is not changed.
    pub momentum: Option<MomentumCycle>,
}

/// Momentum in a cycle: falls from `max` while the rate rises.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct MomentumCycle {
    pub min: f64,
    pub max: f64,
    pub decay_rate: f64,
}

/// Learning rate of step `step`, counted from 1.
pub fn learning_rate(schedule: &LrSchedule, step: u64) -> f64 {
    assert!(step >= 1, "steps count from 1");
    let iteration = step.checked_sub(2);
    match schedule {
        LrSchedule::Constant { lr, warmup_steps } => {
            lr * warmed(*warmup_steps, step).unwrap_or(1.0)
        }
        LrSchedule::Linear {
            lr,
            warmup_steps,
            total_steps,
        } => {
            let falling = || 1.0 - gone(*warmup_steps, *total_steps, step);
            lr * warmed(*warmup_steps, step).unwrap_or_else(falling)
        }
        LrSchedule::Cosine {
            lr,
            warmup_steps,
            total_steps,
        } => {
            let angle = || std::f64::consts::PI * gone(*warmup_steps, *total_steps, step);
            lr * warmed(*warmup_steps, step).unwrap_or_else(|| (1.0 + angle().cos()) / 2.0)
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
        LrSchedule::OneCycle(cycle) => match Phase::at_step(cycle, step) {
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
            // The only schedule that begins below its minimum.
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

/// Betas of step `step`, counted from 1, if the schedule determines them.
pub fn betas(schedule: &LrSchedule, step: u64) -> Option<[f64; 2]> {
    let LrSchedule::OneCycle(cycle) = schedule else {
        return None;
    };
    let MomentumCycle {
        min,
        max,
        decay_rate,
    } = cycle.momentum?;
    // In its first step, a cycle has the minimum of both.
    let momentum = match Phase::at_step(cycle, step) {
        Phase::Cycle(_) if step == 1 => min,
        Phase::Cycle(height) => max - (max - min) * height,
        Phase::Decay(intervals) => max * (1.0 + decay_rate * intervals),
    };
    Some([momentum, CYCLE_BETA2])
}

/// Fraction of Hugging Face's warm-up reached at `step`; `None` afterwards.
fn warmed(warmup_steps: u64, step: u64) -> Option<f64> {
    let at = step - 1;
    (at < warmup_steps).then(|| at as f64 / warmup_steps as f64)
}

/// Fraction of Hugging Face's decay that is over at `step`.
fn gone(warmup_steps: u64, total_steps: u64, step: u64) -> f64 {
    let decay_steps = total_steps.saturating_sub(warmup_steps).max(1);
    ((step - 1 - warmup_steps) as f64 / decay_steps as f64).min(1.0)
}

fn between(warmup: &Warmup, share: f64) -> f64 {
    warmup.min_lr + (warmup.max_lr - warmup.min_lr) * share
}

/// Fraction of the warm-up reached at iteration `at`; `None` afterwards.
fn rising(warmup: &Warmup, at: u64) -> Option<f64> {
    assert!(warmup.steps >= 2, "a logarithmic warm-up needs two steps");
    (at < warmup.steps).then(|| {
        if warmup.logarithmic {
            ((at + 1) as f64).ln() / (warmup.steps as f64).ln()
        } else {
            at as f64 / warmup.steps as f64
        }
    })
}

/// Position of a step in a cycle.
enum Phase {
    /// Height in the cycle, from 0 to 1.
    Cycle(f64),
    /// Intervals of decay after the cycle.
    Decay(f64),
}

impl Phase {
    fn at_step(cycle: &OneCycle, step: u64) -> Self {
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
    use super::*;

    /// Rates of `transformers.get_scheduler` at the first 11 steps, by schedule and steps of warm-up, for a rate of 1 and 10
    /// steps.
    #[rustfmt::skip]
    const HUGGING_FACE: &[(&str, u64, [f64; 11])] = &[
        ("constant", 0, [1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]),
        ("constant", 4, [0.0, 0.25, 0.5, 0.75, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]),
        ("linear", 0, [1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1, 0.0]),
        ("linear", 4, [0.0, 0.25, 0.5, 0.75, 1.0, 0.8333333333333334, 0.6666666666666666, 0.5, 0.3333333333333333, 0.16666666666666666, 0.0]),
        ("cosine", 0, [1.0, 0.9755282581475768, 0.9045084971874737, 0.7938926261462366, 0.6545084971874737, 0.5, 0.34549150281252633, 0.2061073738537635, 0.09549150281252633, 0.024471741852423234, 0.0]),
        ("cosine", 4, [0.0, 0.25, 0.5, 0.75, 1.0, 0.9330127018922194, 0.75, 0.5, 0.2500000000000001, 0.06698729810778065, 0.0]),
    ];

    #[test]
    fn hugging_faces_schedules_have_the_rates_of_its_trainer() {
        let (lr, total_steps) = (1.0, 10);
        for &(name, warmup_steps, expected) in HUGGING_FACE {
            let schedule = match name {
                "constant" => LrSchedule::Constant { lr, warmup_steps },
                "linear" => LrSchedule::Linear {
                    lr,
                    warmup_steps,
                    total_steps,
                },
                _ => LrSchedule::Cosine {
                    lr,
                    warmup_steps,
                    total_steps,
                },
            };
            for (step, expected) in (1..).zip(expected) {
                let rate = learning_rate(&schedule, step);
                let what = format!("{schedule:?}, step {step}");
                assert!(
                    (rate - expected).abs() < 1e-12,
                    "{what}: {rate}, not {expected}"
                );
            }
            assert_eq!(betas(&schedule, 1), None);
        }
    }
}
