//! Resolves DeepSpeed's precision tables: the type that a run computes in, and what happens to a step that
//! overflows.

use super::model;
use super::{at_least, value, within};
use crate::config::toml::{ConfigToml, Fp16Toml, Switch};
use crate::config::{DynamicScale, FirstWeights, OverflowPolicy, Said, SettingsError};
use crate::model::Dtype;

/// Highest power of the first loss scale. Apex started with 2^32; a larger scale only costs skipped steps.
const SCALE_POWER_MAX: u64 = 32;

/// Resolves the type that a run computes in. For "auto" it is the type of the checkpoint in the model's
/// directory.
pub(super) fn precision(
    config: &ConfigToml,
    model: Option<&model::Resolved>,
    said: &mut Said,
) -> Result<(Dtype, OverflowPolicy), SettingsError> {
    let ConfigToml { bf16, fp16, .. } = config;
    let on = |switch: Option<Switch>| switch == Some(Switch::Said(true));
    let auto = |switch: Option<Switch>| matches!(switch, Some(Switch::Auto(_)));
    let stored = model.and_then(|model| model.stored);
    let any_auto = auto(bf16.enabled) || auto(fp16.enabled);
    let dtype = match (on(bf16.enabled), on(fp16.enabled)) {
        (true, true) => {
            return Err(value(
                "fp16.enabled",
                "bf16.enabled is true too: leave one of them out",
            ));
        }
        (true, false) => Dtype::Bf16,
        (false, true) => Dtype::Fp16,
        (false, false) => match stored {
            Some(Dtype::Bf16) if auto(bf16.enabled) => Dtype::Bf16,
            Some(Dtype::Fp16) if auto(fp16.enabled) => Dtype::Fp16,
            _ => {
                if any_auto && stored.is_none() {
                    said.warnings.push(
                        "the precision is \"auto\" and no checkpoint determines it: using fp32, as Hugging Face's Trainer does; bf16.enabled = true trains in bf16".into(),
                    );
                }
                Dtype::Fp32
            }
        },
    };
    for (key, switch, own) in [
        ("bf16.enabled", bf16.enabled, Dtype::Bf16),
        ("fp16.enabled", fp16.enabled, Dtype::Fp16),
    ] {
        if auto(switch) {
            let of = match stored {
                Some(stored) => format!("the checkpoint is in {}", stored.name()),
                None => "no checkpoint determines it".into(),
            };
            (said.notes).push(format!("{key} is \"auto\": {}, because {of}", dtype == own));
        }
    }
    let from_it = model.is_some_and(|model| model.first_weights != FirstWeights::Random);
    // Who switches the checkpoint's type off knows it.
    let is_off = match stored {
        Some(Dtype::Bf16) => bf16.enabled == Some(Switch::Said(false)),
        Some(Dtype::Fp16) => fp16.enabled == Some(Switch::Said(false)),
        _ => false,
    };
    if let Some(stored) = stored
        && stored != dtype
        && from_it
        && (!is_off || any_auto)
    {
        let (name, stored) = (dtype.name(), stored.name());
        let why = match dtype {
            Dtype::Fp32 => format!(
                "this takes more memory and time than {stored}; set {stored}.enabled = true to use that"
            ),
            Dtype::Bf16 | Dtype::Fp16 => format!("weights are rounded to {name} to compute"),
        };
        said.warnings.push(format!(
            "the run computes in {name}, but the checkpoint is in {stored}: {why}"
        ));
    }
    let overflow = match dtype {
        Dtype::Bf16 if bf16.check_grad_overflow == Some(true) => OverflowPolicy::Skips,
        Dtype::Bf16 | Dtype::Fp32 => OverflowPolicy::Stops,
        Dtype::Fp16 => scaling(fp16)?,
    };
    Ok((dtype, overflow))
}

fn scaling(fp16: &Fp16Toml) -> Result<OverflowPolicy, SettingsError> {
    let scale = fp16.loss_scale.unwrap_or(0.0);
    if !(scale.is_finite() && scale >= 0.0) {
        return Err(value(
            "fp16.loss_scale",
            format!("{scale}: must be 0 for an adaptive scale, or a positive number"),
        ));
    }
    if scale > 0.0 {
        return Ok(OverflowPolicy::Scaled { scale });
    }
    let power = fp16.initial_scale_power.unwrap_or(16);
    within("fp16.initial_scale_power", power, 0, SCALE_POWER_MAX)?;
    let min = fp16.min_loss_scale.unwrap_or(1.0);
    if !(min.is_finite() && min > 0.0) {
        return Err(value(
            "fp16.min_loss_scale",
            format!("{min}: must be above 0"),
        ));
    }
    let dynamic = DynamicScale {
        initial: (power as f64).exp2(),
        window: fp16.loss_scale_window.unwrap_or(1000),
        hysteresis: fp16.hysteresis.unwrap_or(2),
        consecutive_hysteresis: fp16.consecutive_hysteresis.unwrap_or(false),
        min,
    };
    at_least("fp16.loss_scale_window", dynamic.window, 1)?;
    at_least("fp16.hysteresis", dynamic.hysteresis, 1)?;
    if dynamic.initial < min {
        return Err(value(
            "fp16.min_loss_scale",
            format!(
                "{min} is more than the first scale, 2^{power} = {} (fp16.initial_scale_power)",
                dynamic.initial
            ),
        ));
    }
    Ok(OverflowPolicy::Scales(dynamic))
}
