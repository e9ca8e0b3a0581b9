//! Resolves DeepSpeed's loss scale of fp16.

use training_state::overflow::{DynamicScale, OverflowPolicy};

use super::{at_least, value, within};
use crate::error::SettingsError;
use crate::toml::{Bf16Toml, Fp16Toml, Switch};

/// Highest power of the first loss scale. Apex started with 2^32; a larger scale only costs skipped steps.
const SCALE_POWER_MAX: u64 = 32;

/// Whether bf16 and fp16 are switched on.
///
/// # Errors
/// Both are.
pub fn is_on(bf16: &Bf16Toml, fp16: &Fp16Toml) -> Result<(bool, bool), SettingsError> {
    let on = |switch: Option<Switch>| switch == Some(Switch::Said(true));
    match (on(bf16.enabled), on(fp16.enabled)) {
        (true, true) => Err(value(
            "fp16.enabled",
            "bf16.enabled is true too: leave one of them out",
        )),
        found => Ok(found),
    }
}

/// Resolves the scale of the loss.
pub fn scaling(fp16: &Fp16Toml) -> Result<OverflowPolicy, SettingsError> {
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
