//! Steps whose gradients are not finite, and the scale of the loss that keeps fp16's gradients within their range.
//!
//! ```text
//!   overflow       hysteresis above 1: one less        otherwise: the scale halves, not below its least
//!   no overflow    `window` steps since the last one: the scale doubles, hysteresis is whole again
//! ```
//!
//! Either way an overflow changes no weight. What is kept here is committed with each step, so a run that was killed goes on with
//! the same scale. Step for step it is DeepSpeed's (tests/fixtures/deepspeed/loss_scales.py).

use serde::{Deserialize, Serialize};

use crate::config::{DynamicScale, OverflowPolicy};

/// Where a run stands with its overflows.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct OverflowState {
    /// Steps that changed no weight: the optimizer and the learning rate have not counted them.
    pub skipped: u64,
    /// What the next step's loss is multiplied with.
    pub scale: f64,
    /// Overflows left before the scale halves; 0 where it does not adapt.
    hysteresis: u64,
    /// Steps since the last overflow.
    steady: u64,
}

/// What becomes of a step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Outcome {
    /// Weights are updated.
    Updates,
    /// They stay as they are.
    Skips,
    /// The run ends: nothing finite came, and there is no more to try.
    Ends,
}

impl OverflowState {
    /// Of a run that begins, or goes on from `kept` with perhaps other rules.
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

    /// After a step whose loss and gradients were `finite`, or not.
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

    /// Whether there was anything left to lower.
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
    use serde_json::json;

    const FIXTURE: &str = include_str!("../tests/fixtures/deepspeed/loss_scales.json");

    #[derive(Deserialize)]
    struct Case {
        fp16: serde_json::Value,
        overflows: Vec<bool>,
        scales: Vec<f64>,
        ends: bool,
    }

    fn rules(fp16: &serde_json::Value) -> OverflowPolicy {
        let mut fp16 = fp16.clone();
        fp16["enabled"] = true.into();
        let tree = json!({
            "train_batch_size": 1, "fp16": fp16,
            "model": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4},
            "data": {"files": ["text"]}, "train": {"steps": 1, "seq_len": 32}
        });
        crate::config::check(tree, "test", Some(1))
            .unwrap()
            .overflow
    }

    #[test]
    fn the_scale_goes_as_deepspeeds_does() {
        let cases: Vec<Case> = serde_json::from_str(FIXTURE).unwrap();
        assert!(cases.iter().any(|case| case.ends) && cases.len() > 5);
        for case in cases {
            let rules = rules(&case.fp16);
            let mut state = OverflowState::new(&rules, None);
            let (mut ended, mut skipped) = (false, 0);
            for (step, (overflow, scale)) in case.overflows.iter().zip(&case.scales).enumerate() {
                assert_eq!(state.scale, *scale, "{}, step {step}", case.fp16);
                let outcome = state.step(&rules, !overflow);
                skipped += u64::from(outcome == Outcome::Skips);
                ended = outcome == Outcome::Ends;
                assert_eq!(outcome == Outcome::Updates, !overflow);
                // As after a restart.
                let text = serde_json::to_string(&state).unwrap();
                let kept: OverflowState = serde_json::from_str(&text).unwrap();
                assert_eq!(OverflowState::new(&rules, Some(kept)), state);
            }
            assert_eq!(
                (ended, state.skipped),
                (case.ends, skipped),
                "{}",
                case.fp16
            );
        }
    }

    #[test]
    fn a_scale_that_stays_skips_and_stays() {
        let rules = rules(&json!({"loss_scale": 128}));
        let mut state = OverflowState::new(&rules, None);
        for finite in [false, true, false, false] {
            let expected = [Outcome::Skips, Outcome::Updates][usize::from(finite)];
            assert_eq!(state.step(&rules, finite), expected);
            assert_eq!(state.scale, 128.0);
        }
        assert_eq!(state.skipped, 3);
    }

    #[test]
    fn without_a_scale_an_overflow_ends_the_run_or_is_skipped_as_asked() {
        let mut state = OverflowState::new(&OverflowPolicy::Stops, None);
        assert_eq!(state.step(&OverflowPolicy::Stops, true), Outcome::Updates);
        assert_eq!(state.step(&OverflowPolicy::Stops, false), Outcome::Ends);
        assert_eq!(state.step(&OverflowPolicy::Skips, false), Outcome::Skips);
        assert_eq!((state.scale, state.skipped), (1.0, 1));
    }

    #[test]
    fn other_rules_begin_anew_but_for_what_was_skipped() {
        let dynamic = rules(&json!({"initial_scale_power": 4}));
        let mut state = OverflowState::new(&dynamic, None);
        assert_eq!(state.step(&dynamic, false), Outcome::Skips);
        let stays = OverflowState::new(&OverflowPolicy::Scaled { scale: 2.0 }, Some(state));
        assert_eq!((stays.scale, stays.skipped), (2.0, 1));
        let again = OverflowState::new(&dynamic, Some(stays));
        assert_eq!((again.scale, again.skipped), (16.0, 1));
    }
}
