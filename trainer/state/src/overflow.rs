//! Steps whose gradients are not finite, and the loss scale that keeps fp16 gradients in range.
//!
//! ```text
//!   overflow       hysteresis above 1: it falls by one        otherwise: the scale halves, not below its minimum
//!   no overflow    `window` steps since the last overflow: the scale doubles, hysteresis is reset
//! ```
//!
//! An overflow changes no weight. The state is committed with each step, so a resumed run continues with the
//! same scale. The scale of each step equals DeepSpeed's (trainer/tests/fixtures/deepspeed/loss_scales.py).

use serde::{Deserialize, Serialize};

/// Reaction to a step whose gradients are not finite.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum OverflowPolicy {
    /// Ends the run; the state of the step before is kept.
    Stops,
    /// Changes no weight; training continues.
    Skips,
    /// Like `Skips`; the loss is multiplied by a fixed scale, and its gradients are divided by it.
    Scaled { scale: f64 },
    /// Like `Scaled`, with a scale that falls after overflows and rises again.
    Scales(DynamicScale),
}

/// Parameters of an adaptive loss scale, under DeepSpeed's names.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct DynamicScale {
    pub initial: f64,
    /// Steps without overflow after which the scale doubles.
    pub window: u64,
    /// Number of overflows before the scale halves.
    pub hysteresis: u64,
    /// Whether a step without overflow resets hysteresis; otherwise only a doubling does.
    pub consecutive_hysteresis: bool,
    pub min: f64,
}

/// Skipped steps and loss scale of a run.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct OverflowState {
    /// Number of steps that changed no weight. The optimizer and the learning rate do not count them.
    pub skipped: u64,
    /// Loss scale of the next step.
    pub scale: f64,
    /// Overflows left before the scale halves; 0 if the scale is fixed.
    hysteresis: u64,
    /// Steps since the last overflow.
    steady: u64,
}

/// Effect of a step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Outcome {
    /// Updates the weights.
    Updates,
    /// Changes no weight.
    Skips,
    /// Ends the run: the gradients are not finite, and the scale cannot be lowered.
    Ends,
}

impl OverflowState {
    /// Makes the state of a new run, or of one that resumes from `kept`, possibly with another policy.
    pub fn new(rules: &OverflowPolicy, kept: Option<Self>) -> Self {
        let fresh = Self {
            skipped: kept.map_or(0, |kept| kept.skipped),
            scale: 1.0,
            hysteresis: 0,
            steady: 0,
        };
        match rules {
            OverflowPolicy::Stops | OverflowPolicy::Skips => fresh,
            OverflowPolicy::Scaled { scale } => Self {
                scale: *scale,
                ..fresh
            },
            OverflowPolicy::Scales(dynamic) => match kept.filter(|kept| kept.hysteresis > 0) {
                Some(kept) => Self {
                    scale: kept.scale.max(dynamic.min),
                    hysteresis: kept.hysteresis.min(dynamic.hysteresis),
                    ..kept
                },
                None => Self {
                    scale: dynamic.initial,
                    hysteresis: dynamic.hysteresis,
                    ..fresh
                },
            },
        }
    }

    /// Records a step; `finite` says whether its loss and gradients are finite.
    pub fn step(&mut self, rules: &OverflowPolicy, finite: bool) -> Outcome {
        let may_go_on = match rules {
            OverflowPolicy::Stops => finite,
            OverflowPolicy::Skips | OverflowPolicy::Scaled { .. } => true,
            OverflowPolicy::Scales(dynamic) if finite => {
                self.rise(dynamic);
                true
            }
            OverflowPolicy::Scales(dynamic) => self.fall(dynamic),
        };
        if !may_go_on {
            return Outcome::Ends;
        }
        if finite {
            return Outcome::Updates;
        }
        self.skipped += 1;
        Outcome::Skips
    }

    fn rise(&mut self, dynamic: &DynamicScale) {
        if dynamic.consecutive_hysteresis {
            self.hysteresis = dynamic.hysteresis;
        }
        if self.steady > 0 && self.steady.is_multiple_of(dynamic.window) {
            self.hysteresis = dynamic.hysteresis;
            self.scale *= 2.0;
        }
        self.steady += 1;
    }

    /// Lowers hysteresis or the scale. Returns false if neither can be lowered.
    fn fall(&mut self, dynamic: &DynamicScale) -> bool {
        self.steady = 0;
        if self.hysteresis > 1 {
            self.hysteresis -= 1;
            return true;
        }
        let lowered = self.scale > dynamic.min;
        self.scale = (self.scale / 2.0).max(dynamic.min);
        lowered
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn dynamic(initial: f64) -> OverflowPolicy {
        OverflowPolicy::Scales(DynamicScale {
            initial,
            window: 1000,
            hysteresis: 2,
            consecutive_hysteresis: false,
            min: 1.0,
        })
    }

    #[test]
    fn a_fixed_scale_skips_overflows_and_does_not_change() {
        let rules = OverflowPolicy::Scaled { scale: 128.0 };
        let mut state = OverflowState::new(&rules, None);
        for finite in [false, true, false, false] {
            let expected = [Outcome::Skips, Outcome::Updates][usize::from(finite)];
            assert_eq!(state.step(&rules, finite), expected);
            assert_eq!(state.scale, 128.0);
        }
        assert_eq!(state.skipped, 3);
    }

    #[test]
    fn without_a_scale_an_overflow_ends_the_run_or_is_skipped_by_policy() {
        let mut state = OverflowState::new(&OverflowPolicy::Stops, None);
        assert_eq!(state.step(&OverflowPolicy::Stops, true), Outcome::Updates);
        assert_eq!(state.step(&OverflowPolicy::Stops, false), Outcome::Ends);
        assert_eq!(state.step(&OverflowPolicy::Skips, false), Outcome::Skips);
        assert_eq!((state.scale, state.skipped), (1.0, 1));
    }

    #[test]
    fn another_policy_resets_everything_except_the_skipped_steps() {
        let dynamic = dynamic(16.0);
        let mut state = OverflowState::new(&dynamic, None);
        assert_eq!(state.step(&dynamic, false), Outcome::Skips);
        let stays = OverflowState::new(&OverflowPolicy::Scaled { scale: 2.0 }, Some(state));
        assert_eq!((stays.scale, stays.skipped), (2.0, 1));
        let again = OverflowState::new(&dynamic, Some(stays));
        assert_eq!((again.scale, again.skipped), (16.0, 1));
    }
}
