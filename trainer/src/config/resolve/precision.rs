//! DeepSpeed's tables of precision: in which kind of number a run computes, and what becomes of a step that overflows.

use super::{at_least, value, within};
use crate::compute::Dtype;
use crate::config::toml::{ConfigToml, Fp16Toml};
use crate::config::{DynamicScale, Overflow, SettingsError};

/// 2^32 is what apex began with; a first scale beyond it only costs skipped steps.
const SCALE_POWER_MAX: u64 = 32;

pub(super) fn precision(config: &ConfigToml) -> Result<(Dtype, Overflow), SettingsError> {
    let ConfigToml { bf16, fp16, .. } = config;
    match (bf16.enabled.unwrap_or(false), fp16.enabled.unwrap_or(false)) {
        (true, true) => Err(value(
            "fp16.enabled",
            "bf16.enabled is true, too: leave one of them out",
        )),
        (true, false) if bf16.check_grad_overflow == Some(true) => {
            Ok((Dtype::Bf16, Overflow::Skips))
        }
        (true, false) => Ok((Dtype::Bf16, Overflow::Stops)),
        (false, true) => Ok((Dtype::Fp16, scaling(fp16)?)),
        (false, false) => Ok((Dtype::Fp32, Overflow::Stops)),
    }
}

fn scaling(fp16: &Fp16Toml) -> Result<Overflow, SettingsError> {
    let scale = fp16.loss_scale.unwrap_or(0.0);
    if !(scale.is_finite() && scale >= 0.0) {
        return Err(value(
            "fp16.loss_scale",
            format!("{scale}: must be 0 for a scale that adapts, or a number above"),
        ));
    }
    if scale > 0.0 {
        return Ok(Overflow::Scaled { scale });
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
    Ok(Overflow::Scales(dynamic))
}
