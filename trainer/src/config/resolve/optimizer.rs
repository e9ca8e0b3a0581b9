//! DeepSpeed's optimizer and scheduler tables.

use super::{not_negative, share, value, word};
use crate::config::toml::{OptimizerParamsToml, OptimizerToml, SchedulerToml};
use crate::config::{Decaying, LrSchedule, OptimizerSettings, SettingsError, Warmup};
use crate::model::{ModelConfig, unit_layouts};

pub(super) fn optimizer(optimizer: &OptimizerToml) -> Result<OptimizerSettings, SettingsError> {
    let params = &optimizer.params;
    let weight_decay = params.weight_decay.unwrap_or(0.0);
    let kind = optimizer.kind.as_deref().unwrap_or("AdamW");
    match kind.to_ascii_lowercase().as_str() {
        "adamw" => {}
        // DeepSpeed's Adam decouples the decay unless told otherwise.
        "adam" if params.adam_w_mode.unwrap_or(true) || weight_decay == 0.0 => {}
        "adam" => {
            return Err(value(
                "optimizer.params.adam_w_mode",
                "weight decay inside the gradient (adam_w_mode = false) is not supported: use AdamW or weight_decay = 0",
            ));
        }
        _ => {
            return Err(value(
                "optimizer.type",
                format!("\"{kind}\" is not supported: use \"AdamW\" or \"Adam\""),
            ));
        }
    }
    let settings = OptimizerSettings {
        lr: params.lr.unwrap_or(1e-3),
        betas: params.betas.unwrap_or([0.9, 0.999]),
        eps: params.eps.unwrap_or(1e-8),
        weight_decay,
        decay: decaying(params)?,
    };
    not_negative("optimizer.params.lr", settings.lr)?;
    not_negative("optimizer.params.weight_decay", settings.weight_decay)?;
    if settings.betas.iter().any(|beta| !(0.0..1.0).contains(beta)) {
        return Err(value(
            "optimizer.params.betas",
            "each must be at least 0 and less than 1",
        ));
    }
    if !(settings.eps.is_finite() && settings.eps > 0.0) {
        return Err(value("optimizer.params.eps", "must be more than 0"));
    }
    Ok(settings)
}

/// Which parameters decay: a word, or all but those with a text in their name, as PyTorch people group them.
fn decaying(params: &OptimizerParamsToml) -> Result<Decaying, SettingsError> {
    let Some(patterns) = &params.no_decay else {
        return word(
            "optimizer.params.decay",
            params.decay.as_deref(),
            &[("matrices", Decaying::Matrices), ("all", Decaying::All)],
        );
    };
    if params.decay.as_deref().is_some_and(|word| word != "all") {
        return Err(value(
            "optimizer.params.decay",
            "contradicts optimizer.params.no_decay, which names what of all parameters does not decay: leave one of them out",
        ));
    }
    if patterns.iter().any(String::is_empty) {
        return Err(value(
            "optimizer.params.no_decay",
            "\"\" is in every parameter's name: use weight_decay = 0 for no decay at all",
        ));
    }
    Ok(Decaying::AllBut(patterns.clone()))
}

/// Names what of `no_decay` is in no parameter's name: people carry their list from model to model, so it is no error.
pub(super) fn note_unmatched(decay: &Decaying, model: &ModelConfig, notes: &mut Vec<String>) {
    let Decaying::AllBut(patterns) = decay else {
        return;
    };
    let units = unit_layouts(model);
    for pattern in patterns {
        let mut names = units.iter().flat_map(|unit| &unit.params);
        if !names.any(|param| param.name.contains(pattern)) {
            notes.push(format!(
                "optimizer.params.no_decay: \"{pattern}\" is in no parameter's name; they are as {}",
                units[1].params[0].name
            ));
        }
    }
}

pub(super) fn scheduler(
    scheduler: &SchedulerToml,
    lr: f64,
    steps: u64,
    notes: &mut Vec<String>,
) -> Result<LrSchedule, SettingsError> {
    let params = &scheduler.params;
    let Some(kind) = scheduler.kind.as_deref() else {
        return Ok(LrSchedule::Constant { lr });
    };
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
    let warmup_steps = params.warmup_num_steps.unwrap_or(1000);
    let total_steps = params.total_num_steps.unwrap_or(steps);
    if total_steps != steps {
        notes.push(format!(
            "scheduler.params.total_num_steps is {total_steps}, the run has {steps} steps"
        ));
    }
    let decays = kind != "WarmupLR";
    if decays && warmup_steps >= total_steps {
        return Err(value(
            "scheduler.params.warmup_num_steps",
            format!(
                "{warmup_steps} leaves no step of {total_steps} (total_num_steps) to go down: make it smaller"
            ),
        ));
    }
    for (key, number) in [
        ("scheduler.params.warmup_min_lr", params.warmup_min_lr),
        ("scheduler.params.warmup_max_lr", params.warmup_max_lr),
    ] {
        not_negative(key, number.unwrap_or(0.0))?;
    }
    let warmup = match kind {
        "WarmupLR" | "WarmupDecayLR" => Warmup {
            min_lr: params.warmup_min_lr.unwrap_or(0.0),
            max_lr: params.warmup_max_lr.unwrap_or(lr),
            steps: warmup_steps,
            logarithmic,
        },
        "WarmupCosineLR" => {
            if params.warmup_min_lr.is_some() || params.warmup_max_lr.is_some() {
                return Err(value(
                    "scheduler.params",
                    "WarmupCosineLR scales optimizer.params.lr: it has warmup_min_ratio and cos_min_ratio, no warmup_min_lr or warmup_max_lr",
                ));
            }
            let ratio = share(
                "scheduler.params.warmup_min_ratio",
                params.warmup_min_ratio.unwrap_or(0.0),
            )?;
            Warmup {
                min_lr: lr * ratio.get(),
                max_lr: lr,
                steps: warmup_steps,
                logarithmic,
            }
        }
        _ => {
            return Err(value(
                "scheduler.type",
                format!(
                    "\"{kind}\" is not supported: use WarmupLR, WarmupDecayLR or WarmupCosineLR"
                ),
            ));
        }
    };
    Ok(match kind {
        "WarmupLR" => LrSchedule::Warmup(warmup),
        "WarmupDecayLR" => LrSchedule::WarmupDecay {
            warmup,
            total_steps,
        },
        _ => {
            let min_ratio = share(
                "scheduler.params.cos_min_ratio",
                params.cos_min_ratio.unwrap_or(1e-4),
            )?
            .get();
            LrSchedule::WarmupCosine {
                warmup,
                total_steps,
                min_ratio,
            }
        }
    })
}
