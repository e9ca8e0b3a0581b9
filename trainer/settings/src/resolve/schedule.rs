//! Resolves DeepSpeed's scheduler table. As in DeepSpeed, a parameter of another scheduler is refused.

use serde_json::Value;
use training_state::learning_rate::{
    DEEPSPEED_SCHEDULERS, LrSchedule, MomentumCycle, OneCycle, RangeTest, Warmup,
};

use super::{at_least, fraction, not_negative, value};
use crate::error::SettingsError;
use crate::rate::Rate;
use crate::reader::{Remarks, WrittenFor};
use crate::toml::{SchedulerParamsToml, SchedulerToml};

/// Hugging Face's schedules, each with the names of its parameters.
const HUGGING_FACE_SCHEDULERS: &[(&str, &[&str])] = &[
    (LINEAR, &["warmup_steps", "warmup_ratio", "total_num_steps"]),
    (COSINE, &["warmup_steps", "warmup_ratio", "total_num_steps"]),
    (CONSTANT, &["warmup_steps", "warmup_ratio"]),
];

const LINEAR: &str = "linear";
const COSINE: &str = "cosine";
const CONSTANT: &str = "constant";

/// Returns the schedule that is meant by another name of Hugging Face's Trainer or PyTorch, or nothing.
fn instead_of(kind: &str) -> &'static str {
    match kind {
        "constant_with_warmup" => "\"constant\", which has a warm-up too, or ",
        "cosine_with_min_lr" | "cosine_warmup_with_min_lr" => {
            "\"WarmupCosineLR\" with scheduler.params.cos_min_ratio, or "
        }
        "warmup_stable_decay" | "polynomial" | "inverse_sqrt" => "\"linear\" or \"cosine\", or ",
        _ => "",
    }
}

/// Resolves the schedule of a run with the optimizer's learning rate `lr`. `steps` is `None` where the run's length is the script's.
pub fn schedule(
    scheduler: &SchedulerToml,
    lr: f64,
    steps: Option<u64>,
    notes: &mut Vec<String>,
) -> Result<LrSchedule, SettingsError> {
    let params = &scheduler.params;
    let kind = scheduler.kind.as_deref().unwrap_or(CONSTANT);
    let schedulers = || HUGGING_FACE_SCHEDULERS.iter().chain(DEEPSPEED_SCHEDULERS);
    let Some((_, known)) = schedulers().find(|(name, _)| *name == kind) else {
        let names: Vec<&str> = schedulers().map(|(name, _)| *name).collect();
        return Err(value(
            "scheduler.type",
            format!(
                "\"{kind}\" is not supported: use {}one of {}",
                instead_of(kind),
                names.join(", ")
            ),
        ));
    };
    check_params(kind, known, params)?;
    match kind {
        "LRRangeTest" => range_test(params),
        "OneCycle" => one_cycle(params, steps),
        LINEAR | COSINE | CONSTANT => {
            let total_steps = match kind {
                CONSTANT => params.total_num_steps.unwrap_or(1),
                _ => end(params, steps)?,
            };
            at_least("scheduler.params.total_num_steps", total_steps, 1)?;
            let warmup_steps = warmup_steps(params, steps)?;
            Ok(match kind {
                LINEAR => LrSchedule::Linear {
                    lr,
                    warmup_steps,
                    total_steps,
                },
                COSINE => LrSchedule::Cosine {
                    lr,
                    warmup_steps,
                    total_steps,
                },
                _ => LrSchedule::Constant { lr, warmup_steps },
            })
        }
        _ => warmup(kind, params, lr, steps, notes),
    }
}

/// Schedule if none is set: Hugging Face's Trainer decays linearly, DeepSpeed keeps the rate. Without an
/// optimizer, the Trainer's choice applies.
pub fn left_out(
    optimizer_is_left_out: bool,
    lr: f64,
    steps: u64,
    written_for: WrittenFor,
    said: &mut Remarks,
) -> LrSchedule {
    let trainers = written_for == WrittenFor::Trainer || optimizer_is_left_out;
    if !trainers {
        if written_for == WrittenFor::DeepSpeed {
            said.warnings.push(format!(
                "no scheduler is set: the learning rate stays {}, as in DeepSpeed; set scheduler.type = \"{LINEAR}\" for a linear decay, as in Hugging Face's Trainer",
                Rate(lr)
            ));
        }
        return LrSchedule::Constant {
            lr,
            warmup_steps: 0,
        };
    }
    said.warnings.push(format!(
        "no scheduler is set: the learning rate decays linearly to 0 over the run without warm-up, as in Hugging Face's Trainer; set scheduler.type = \"{CONSTANT}\" to keep it constant"
    ));
    LrSchedule::Linear {
        lr,
        warmup_steps: 0,
        total_steps: steps,
    }
}

/// Step at which a decay ends: the given one, or the run's last.
fn end(params: &SchedulerParamsToml, steps: Option<u64>) -> Result<u64, SettingsError> {
    params
        .total_num_steps
        .or(steps)
        .ok_or(SettingsError::Missing {
            key: "scheduler.params.total_num_steps",
            message: "the rate falls until this step: set it to the number of steps of the run",
        })
}

/// Resolves the warm-up of Hugging Face's schedules in a run of `steps` steps.
fn warmup_steps(params: &SchedulerParamsToml, steps: Option<u64>) -> Result<u64, SettingsError> {
    const STEPS: &str = "scheduler.params.warmup_steps";
    const RATIO: &str = "scheduler.params.warmup_ratio";
    let warmup_steps = match (params.warmup_steps, params.warmup_ratio) {
        (Some(_), Some(_)) => {
            return Err(value(
                RATIO,
                "contradicts scheduler.params.warmup_steps: leave one of them out",
            ));
        }
        (Some(count), None) => count,
        // Rounded up, as in Hugging Face's Trainer.
        (None, Some(ratio)) => {
            let steps = match steps {
                Some(steps) => steps,
                None => end(params, None)?,
            };
            (fraction(RATIO, ratio)?.get() * steps as f64).ceil() as u64
        }
        (None, None) => 0,
    };
    if let Some(steps) = steps
        && warmup_steps > steps
    {
        return Err(value(
            STEPS,
            format!("{warmup_steps} is more than the {steps} steps of the run"),
        ));
    }
    Ok(warmup_steps)
}

/// Refuses parameters that the scheduler does not have.
fn check_params(
    kind: &str,
    known: &[&str],
    params: &SchedulerParamsToml,
) -> Result<(), SettingsError> {
    let Ok(Value::Object(table)) = serde_json::to_value(params) else {
        unreachable!("the settings are plain data")
    };
    let mut given = table.iter().filter(|(_, value)| !value.is_null());
    match given.find(|(name, _)| !known.contains(&name.as_str())) {
        None => Ok(()),
        Some((name, _)) => Err(value(
            "scheduler.params",
            format!(
                "{kind} has no parameter {name}; its parameters are {}",
                known.join(", ")
            ),
        )),
    }
}

fn range_test(params: &SchedulerParamsToml) -> Result<LrSchedule, SettingsError> {
    let test = RangeTest {
        min_lr: params.lr_range_test_min_lr.unwrap_or(1e-3),
        step_size: params.lr_range_test_step_size.unwrap_or(2000),
        step_rate: params.lr_range_test_step_rate.unwrap_or(1.0),
        staircase: params.lr_range_test_staircase.unwrap_or(false),
    };
    not_negative("scheduler.params.lr_range_test_min_lr", test.min_lr)?;
    at_least(
        "scheduler.params.lr_range_test_step_size",
        test.step_size,
        1,
    )?;
    not_negative("scheduler.params.lr_range_test_step_rate", test.step_rate)?;
    Ok(LrSchedule::RangeTest(test))
}

fn one_cycle(
    params: &SchedulerParamsToml,
    steps: Option<u64>,
) -> Result<LrSchedule, SettingsError> {
    let bound = |key: &'static str, given: Option<f64>| {
        let missing = SettingsError::Missing {
            key,
            message: "a OneCycle needs both ends of its learning rate",
        };
        let lr = given.ok_or(missing)?;
        not_negative(key, lr).map(|()| lr)
    };
    let first_steps = params.cycle_first_step_size.unwrap_or(2000);
    at_least("scheduler.params.cycle_first_step_size", first_steps, 1)?;
    let first_stairs = params.cycle_first_stair_count.unwrap_or(0);
    let decay_lr_rate = params.decay_lr_rate.unwrap_or(0.0);
    not_negative("scheduler.params.decay_lr_rate", decay_lr_rate)?;
    let cycle = OneCycle {
        min_lr: bound("scheduler.params.cycle_min_lr", params.cycle_min_lr)?,
        max_lr: bound("scheduler.params.cycle_max_lr", params.cycle_max_lr)?,
        first_steps,
        second_steps: params.cycle_second_step_size.unwrap_or(first_steps),
        first_stairs,
        second_stairs: params.cycle_second_stair_count.unwrap_or(first_stairs),
        decay_steps: params.decay_step_size.unwrap_or(0),
        decay_lr_rate,
        momentum: momentum(params)?,
    };
    // A decay that grows with every step must stay positive until the end.
    let schedule = LrSchedule::OneCycle(cycle);
    if let Some(steps) = steps
        && let Some([last, _]) = training_state::learning_rate::betas(&schedule, steps)
        && last >= 1.0
    {
        return Err(value(
            "scheduler.params.decay_mom_rate",
            format!(
                "the momentum reaches {last:.3} at step {steps}, but must stay below 1: lower the rate, or raise decay_step_size"
            ),
        ));
    }
    Ok(schedule)
}

fn momentum(params: &SchedulerParamsToml) -> Result<Option<MomentumCycle>, SettingsError> {
    let momentum = MomentumCycle {
        min: params.cycle_min_mom.unwrap_or(0.8),
        max: params.cycle_max_mom.unwrap_or(0.9),
        decay_rate: params.decay_mom_rate.unwrap_or(0.0),
    };
    for (key, number) in [
        ("scheduler.params.cycle_min_mom", momentum.min),
        ("scheduler.params.cycle_max_mom", momentum.max),
    ] {
        if !(0.0..1.0).contains(&number) {
            return Err(value(
                key,
                format!("{number}: must be at least 0 and less than 1"),
            ));
        }
    }
    not_negative("scheduler.params.decay_mom_rate", momentum.decay_rate)?;
    Ok(params.cycle_momentum.unwrap_or(true).then_some(momentum))
}

fn warmup(
    kind: &str,
    params: &SchedulerParamsToml,
    lr: f64,
    steps: Option<u64>,
    notes: &mut Vec<String>,
) -> Result<LrSchedule, SettingsError> {
    let logarithmic = match params.warmup_type.as_deref() {
        None | Some("log") => true,
        Some("linear") => false,
        Some(other) => {
            return Err(value(
                "scheduler.params.warmup_type",
                format!("\"{other}\": use \"log\" or \"linear\""),
            ));
        }
    };
    for (key, number) in [
        ("scheduler.params.warmup_min_lr", params.warmup_min_lr),
        ("scheduler.params.warmup_max_lr", params.warmup_max_lr),
    ] {
        not_negative(key, number.unwrap_or(0.0))?;
    }
    let ratio = |key: &'static str, given: Option<f64>, default: f64| {
        fraction(key, given.unwrap_or(default)).map(|fraction| fraction.get())
    };
    let given_steps = params.warmup_num_steps.unwrap_or(1000);
    let total_steps = match kind {
        "WarmupLR" => 0,
        _ => end(params, steps)?,
    };
    let mut note = |text: String| notes.push(text);
    if given_steps < 2 {
        note(format!(
            "scheduler.params.warmup_num_steps is {given_steps}: using 2, as DeepSpeed does"
        ));
    }
    if let Some(steps) = steps
        && kind != "WarmupLR"
        && total_steps != steps
    {
        note(format!(
            "scheduler.params.total_num_steps is {total_steps}, but the run has {steps} steps"
        ));
    }
    if let Some(steps) = steps
        && given_steps >= steps
    {
        note(format!(
            "scheduler.params.warmup_num_steps is {given_steps}, but the run has {steps} steps: the learning rate will not reach its maximum"
        ));
    }
    let mut warmup = Warmup {
        min_lr: params.warmup_min_lr.unwrap_or(0.0),
        max_lr: params.warmup_max_lr.unwrap_or(lr),
        steps: given_steps.max(2),
        logarithmic,
    };
    Ok(match kind {
        "WarmupLR" => LrSchedule::Warmup(warmup),
        "WarmupDecayLR" => {
            if params.warmup_max_lr.is_none() && lr != DECAY_MAX_LR {
                note(format!(
                    "scheduler.params.warmup_max_lr is not set: using the optimizer's rate, {} (DeepSpeed's WarmupDecayLR uses {})",
                    Rate(lr),
                    Rate(DECAY_MAX_LR)
                ));
            }
            LrSchedule::WarmupDecay {
                warmup,
                total_steps,
            }
        }
        _ => {
            const MIN: &str = "scheduler.params.warmup_min_ratio";
            const END: &str = "scheduler.params.cos_min_ratio";
            warmup.min_lr = lr * ratio(MIN, params.warmup_min_ratio, 0.0)?;
            LrSchedule::WarmupCosine {
                warmup,
                total_steps,
                min_ratio: ratio(END, params.cos_min_ratio, 1e-4)?,
            }
        }
    })
}

/// Rate that DeepSpeed's WarmupDecayLR reaches by default, regardless of the optimizer's.
const DECAY_MAX_LR: f64 = 1e-3;
