//! Compares learning rates, momenta and loss scales of every step with DeepSpeed's. DeepSpeed itself computed
//! the expected values, by the scripts beside the fixtures in `tests/fixtures/deepspeed`.

use serde::Deserialize;
use serde_json::{Value, json};
use training_state::learning_rate::{betas, learning_rate};
use training_state::overflow::{Outcome, OverflowState};

use super::*;

const RATES: &str = include_str!("../../../../tests/fixtures/deepspeed/lr_schedules.json");

#[derive(Deserialize)]
struct RateCase {
    scheduler: Value,
    lr: Vec<f64>,
    betas: Vec<[f64; 2]>,
}

#[test]
fn every_scheduler_has_deepspeeds_rates_and_momenta() {
    let cases: Vec<RateCase> = serde_json::from_str(RATES).unwrap();
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
        let settings = check(tree, "test", Some(1)).unwrap();
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

const SCALES: &str = include_str!("../../../../tests/fixtures/deepspeed/loss_scales.json");

#[derive(Deserialize)]
struct ScaleCase {
    fp16: Value,
    overflows: Vec<bool>,
    scales: Vec<f64>,
    ends: bool,
}

fn overflow_rules(fp16: &Value) -> OverflowPolicy {
    let mut fp16 = fp16.clone();
    fp16["enabled"] = true.into();
    let tree = json!({
        "train_batch_size": 1, "fp16": fp16,
        "model": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4},
        "data": {"files": ["text"]}, "train": {"steps": 1, "seq_len": 32}
    });
    check(tree, "test", Some(1)).unwrap().overflow
}

#[test]
fn the_loss_scale_follows_deepspeeds_at_every_step() {
    let cases: Vec<ScaleCase> = serde_json::from_str(SCALES).unwrap();
    assert!(cases.iter().any(|case| case.ends) && cases.len() > 5);
    for case in cases {
        let rules = overflow_rules(&case.fp16);
        let mut state = OverflowState::new(&rules, None);
        let (mut ended, mut skipped) = (false, 0);
        for (step, (overflow, scale)) in case.overflows.iter().zip(&case.scales).enumerate() {
            assert_eq!(state.scale, *scale, "{}, step {step}", case.fp16);
            let outcome = state.step(&rules, !overflow);
            skipped += u64::from(outcome == Outcome::Skips);
            ended = outcome == Outcome::Ends;
            assert_eq!(outcome == Outcome::Updates, !overflow);
            // The state survives a restart.
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
