//! Resolves DeepSpeed's precision tables: the type that a run computes in, and what happens to a step that
//! overflows.

use super::model;
use crate::config::toml::{ConfigToml, Switch};
use crate::config::{FirstWeights, OverflowPolicy, Remarks, SettingsError};
use crate::model::Dtype;
use training_settings::resolve::precision::{is_on, scaling};

/// Resolves the type that a run computes in. For "auto" it is the type of the checkpoint in the model's
/// directory.
pub(super) fn precision(
    config: &ConfigToml,
    model: Option<&model::ResolvedModel>,
    said: &mut Remarks,
) -> Result<(Dtype, OverflowPolicy), SettingsError> {
    let ConfigToml { bf16, fp16, .. } = config;
    let auto = |switch: Option<Switch>| matches!(switch, Some(Switch::Auto(_)));
    let stored = model.and_then(|model| model.stored);
    let any_auto = auto(bf16.enabled) || auto(fp16.enabled);
    let dtype = match is_on(bf16, fp16)? {
        (true, _) => Dtype::Bf16,
        (_, true) => Dtype::Fp16,
        _ => match stored {
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
