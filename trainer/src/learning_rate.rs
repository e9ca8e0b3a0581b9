//! The learning rate of a step, a pure function of the step: nothing to save, nothing to resume.
//!
//! Steps count from 1. With w warm-up steps of T, DeepSpeed's names and shapes, shifted by one: a straight rise moves at the
//! first step already, a logarithmic one is still at min there.
//!
//! ```text
//!   t <= w   min + (max - min) * t/w            or, logarithmic, * ln(t)/ln(w)
//!   t >  w   WarmupLR        max
//!            WarmupDecayLR   min + (max - min) * (T-t)/(T-w), not below min
//!            WarmupCosineLR  max * (r + (1-r) * (1 + cos(pi * (t-w)/(T-w))) / 2), r the least ratio
//! ```

use crate::config::{LrSchedule, Warmup};

/// The rate of step `step` (from 1).
pub fn learning_rate(schedule: &LrSchedule, step: u64) -> f64 {
    assert!(step >= 1, "steps count from 1");
    match schedule {
        LrSchedule::Constant { lr } => *lr,
        LrSchedule::Warmup(warmup) => rising(warmup, step).unwrap_or(warmup.max_lr),
        LrSchedule::WarmupDecay {
            warmup,
            total_steps,
        } => rising(warmup, step).unwrap_or_else(|| {
            let left =
                total_steps.saturating_sub(step) as f64 / (total_steps - warmup.steps) as f64;
            warmup.min_lr + (warmup.max_lr - warmup.min_lr) * left
        }),
        LrSchedule::WarmupCosine {
            warmup,
            total_steps,
            min_ratio,
        } => rising(warmup, step).unwrap_or_else(|| {
            let gone =
                ((step - warmup.steps) as f64 / (total_steps - warmup.steps) as f64).min(1.0);
            let wave = (1.0 + (std::f64::consts::PI * gone).cos()) / 2.0;
            warmup.max_lr * (min_ratio + (1.0 - min_ratio) * wave)
        }),
    }
}

/// The rate while it rises; `None` afterwards.
fn rising(warmup: &Warmup, step: u64) -> Option<f64> {
    (step <= warmup.steps).then(|| {
        let share = match (warmup.logarithmic, warmup.steps) {
            (true, 2..) => (step as f64).ln() / (warmup.steps as f64).ln(),
            _ => step as f64 / warmup.steps as f64,
        };
        warmup.min_lr + (warmup.max_lr - warmup.min_lr) * share
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn warmup(steps: u64, logarithmic: bool) -> Warmup {
        Warmup {
            min_lr: 0.0,
            max_lr: 2.0,
            steps,
            logarithmic,
        }
    }

    #[test]
    fn the_rate_rises_to_its_maximum_and_falls_to_its_minimum() {
        let decay = LrSchedule::WarmupDecay {
            warmup: warmup(4, false),
            total_steps: 12,
        };
        assert_eq!(
            [1, 2, 4, 8, 12, 20].map(|t| learning_rate(&decay, t)),
            [0.5, 1.0, 2.0, 1.0, 0.0, 0.0]
        );
        let cosine = LrSchedule::WarmupCosine {
            warmup: warmup(4, false),
            total_steps: 12,
            min_ratio: 0.1,
        };
        assert_eq!(learning_rate(&cosine, 4), 2.0);
        assert!((learning_rate(&cosine, 8) - 1.1).abs() < 1e-12);
        assert!((learning_rate(&cosine, 12) - 0.2).abs() < 1e-12);
        assert!((learning_rate(&cosine, 99) - 0.2).abs() < 1e-12);
    }

    #[test]
    fn a_logarithmic_rise_ends_where_a_straight_one_does() {
        let log = LrSchedule::Warmup(warmup(8, true));
        assert_eq!(learning_rate(&log, 1), 0.0);
        assert!(learning_rate(&log, 2) > learning_rate(&LrSchedule::Warmup(warmup(8, false)), 2));
        assert_eq!(learning_rate(&log, 8), 2.0);
        assert_eq!(learning_rate(&log, 9), 2.0);
    }

    #[test]
    fn without_warm_up_the_first_step_has_the_whole_rate() {
        for steps in [0, 1] {
            assert_eq!(
                learning_rate(&LrSchedule::Warmup(warmup(steps, true)), 1),
                2.0
            );
        }
    }
}
