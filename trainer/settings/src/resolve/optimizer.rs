//! Resolves DeepSpeed's optimizer table.

use super::{Faults, not_negative, value, word};
use crate::error::SettingsError;
use crate::reader::{Reader, Remarks};
use crate::toml::{Bf16Toml, OptimizerParamsToml, OptimizerToml, ParamGroupToml, Switch};
use crate::values::{
    AdjustLr, Decaying, MasterType, MomentsType, MuonSettings, OptimizerKind, OptimizerSettings,
    ParamGroupSettings,
};

/// Learning rate that Hugging Face's Trainer uses by default.
const TRAINER_LR: f64 = 5e-5;
/// Learning rate that PyTorch's Adam uses by default.
const ADAM_LR: f64 = 1e-3;
/// Weight decay that torch.optim.AdamW uses by default.
const TORCH_ADAMW_DECAY: f64 = 0.01;
/// Learning rate that Lion's authors use by default.
const LION_LR: f64 = 1e-4;

/// Decay of Muon's momentum, steps and coefficients of its iteration: torch.optim.Muon's.
const MUON_MOMENTUM: f64 = 0.95;
const NS_STEPS: u64 = 5;
const NS_COEFFICIENTS: [f64; 3] = [3.4445, -4.775, 2.0315];
/// torch.optim.Muon refuses 100.
const NS_STEPS_MAX: u64 = 99;

/// Path of the groups.
pub const GROUPS: &str = "optimizer.groups";

/// Returns whether the settings name neither the optimizer's type nor its learning rate.
pub fn is_left_out(optimizer: &OptimizerToml) -> bool {
    optimizer.kind.is_none() && optimizer.params.lr.is_none()
}

/// The weight decay of an optimizer that sets none. DeepSpeed's optimizers have none, but with `torch_adam` it takes
/// torch.optim.AdamW, with that class's own default.
fn default_decay(name: &str, params: &OptimizerParamsToml) -> f64 {
    let decoupled = name.eq_ignore_ascii_case("AdamW")
        || name.eq_ignore_ascii_case("Adam") && params.adam_w_mode.unwrap_or(true);
    match decoupled && params.torch_adam == Some(true) {
        true => TORCH_ADAMW_DECAY,
        false => 0.0,
    }
}

/// Resolves the optimizer. Without any `optimizer`, Hugging Face's Trainer's default applies; with an
/// optimizer but no rate, PyTorch's.
pub fn optimizer(
    optimizer: &OptimizerToml,
    bf16: &Bf16Toml,
    reader: Reader,
    said: &mut Remarks,
    faults: &mut Faults,
) -> Option<OptimizerSettings> {
    let params = &optimizer.params;
    let name = optimizer.kind.as_deref().unwrap_or("AdamW");
    let weight_decay = params.weight_decay.unwrap_or(default_decay(name, params));
    let mut kind = OptimizerKind::AdamW;
    match name.to_ascii_lowercase().as_str() {
        "adamw" => {}
        "lion" => kind = OptimizerKind::Lion,
        "muon" => kind = OptimizerKind::Muon,
        // DeepSpeed's Adam decouples weight decay by default.
        "adam" if params.adam_w_mode.unwrap_or(true) || weight_decay == 0.0 => {}
        "adam" => faults.0.push(value(
            "optimizer.params.adam_w_mode",
            "weight decay inside the gradient (adam_w_mode = false) is not supported: use AdamW or weight_decay = 0",
        )),
        _ => faults.0.push(value(
            "optimizer.type",
            format!("\"{name}\" is not supported: {}", instead_of(name, reader)),
        )),
    }
    let is_muon = kind == OptimizerKind::Muon;
    let lr = match params.lr {
        Some(lr) => lr,
        None if is_muon && params.muon_lr.is_some() && params.adam_lr.is_some() => f64::NAN,
        None if is_left_out(optimizer) => {
            said.warnings.push(format!(
                "no optimizer is set: using AdamW with a learning rate of {TRAINER_LR:e}, as Hugging Face's Trainer does; set optimizer.params.lr to change it"
            ));
            TRAINER_LR
        }
        None => {
            let (lr, whose) = match kind {
                OptimizerKind::AdamW | OptimizerKind::Muon => (ADAM_LR, "PyTorch's"),
                OptimizerKind::Lion => (LION_LR, "its authors'"),
            };
            said.warnings.push(format!(
                "optimizer.params.lr is not set: using {lr:e}, as {whose} {name} does; fine-tuning usually needs a lower rate"
            ));
            lr
        }
    };
    let betas = match kind {
        OptimizerKind::AdamW | OptimizerKind::Muon => [0.9, 0.999],
        OptimizerKind::Lion => [0.9, 0.99],
    };
    if kind == OptimizerKind::Lion && params.eps.is_some() {
        (said.warnings).push("optimizer.params.eps has no effect: Lion has none".into());
    }
    let decay = faults.collect(decaying(params));
    let moments = faults.collect(moments("optimizer.moments", &optimizer.moments, bf16));
    let master = faults.collect(master("optimizer.master", &optimizer.master, bf16));
    let muon = faults.collect(muon(params, kind, lr));
    let lr = params.muon_lr.filter(|_| is_muon).unwrap_or(lr);
    check_muon_formats(kind, optimizer, bf16, faults);
    let groups = optimizer.groups.iter().flatten();
    let groups = groups.map(|group| faults.collect(param_group(group, lr)));
    let groups: Option<Vec<_>> = groups.collect();
    let settings = OptimizerSettings {
        kind,
        lr,
        betas: params.betas.unwrap_or(betas),
        eps: params.eps.unwrap_or(1e-8),
        weight_decay,
        decay: decay?,
        groups: groups?,
        moments: moments?,
        master: master?,
        muon: muon?,
    };
    faults.collect(not_negative("optimizer.params.lr", settings.lr));
    faults.collect(not_negative(
        "optimizer.params.weight_decay",
        settings.weight_decay,
    ));
    if settings.betas.iter().any(|beta| !(0.0..1.0).contains(beta)) {
        faults.0.push(value(
            "optimizer.params.betas",
            "each must be at least 0 and less than 1",
        ));
    }
    if !(settings.eps.is_finite() && settings.eps > 0.0) {
        faults
            .0
            .push(value("optimizer.params.eps", "must be more than 0"));
    }
    Some(settings)
}

/// Resolves Muon's own parameters, which other optimizers do not have. `lr` is that of `optimizer.params.lr`.
fn muon(
    params: &OptimizerParamsToml,
    kind: OptimizerKind,
    lr: f64,
) -> Result<Option<MuonSettings>, SettingsError> {
    let own = [
        ("optimizer.params.muon_lr", params.muon_lr.is_some()),
        ("optimizer.params.adam_lr", params.adam_lr.is_some()),
        ("optimizer.params.momentum", params.momentum.is_some()),
        ("optimizer.params.nesterov", params.nesterov.is_some()),
        ("optimizer.params.ns_steps", params.ns_steps.is_some()),
        (
            "optimizer.params.ns_coefficients",
            params.ns_coefficients.is_some(),
        ),
        (
            "optimizer.params.adjust_lr_fn",
            params.adjust_lr_fn.is_some(),
        ),
    ];
    if kind != OptimizerKind::Muon {
        return match own.iter().find(|(_, is_set)| *is_set) {
            Some((key, _)) => Err(value(
                key,
                format!(
                    "is Muon's, and optimizer.type is \"{}\": leave it out",
                    kind.word()
                ),
            )),
            None => Ok(None),
        };
    }
    let words = [AdjustLr::Original, AdjustLr::MatchRmsAdamw].map(|rule| (rule.word(), rule));
    let settings = MuonSettings {
        adam_lr: params.adam_lr.unwrap_or(lr),
        momentum: params.momentum.unwrap_or(MUON_MOMENTUM),
        nesterov: params.nesterov.unwrap_or(true),
        ns_steps: params.ns_steps.unwrap_or(NS_STEPS),
        ns_coefficients: params.ns_coefficients.unwrap_or(NS_COEFFICIENTS),
        adjust_lr_fn: word(
            "optimizer.params.adjust_lr_fn",
            params.adjust_lr_fn.as_deref(),
            &words,
        )?,
    };
    for (key, number) in [
        ("optimizer.params.muon_lr", params.muon_lr.unwrap_or(0.0)),
        ("optimizer.params.adam_lr", settings.adam_lr),
    ] {
        not_negative(key, number)?;
    }
    if settings.adam_lr > 0.0 && params.muon_lr.unwrap_or(lr) == 0.0 {
        return Err(value(
            "optimizer.params.adam_lr",
            "needs a rate of matrices above 0: the schedule of the learning rate is scaled by their ratio",
        ));
    }
    if !(0.0..1.0).contains(&settings.momentum) {
        return Err(value(
            "optimizer.params.momentum",
            "must be at least 0 and less than 1",
        ));
    }
    if !(1..=NS_STEPS_MAX).contains(&settings.ns_steps) {
        return Err(value(
            "optimizer.params.ns_steps",
            format!("must be 1 to {NS_STEPS_MAX}"),
        ));
    }
    if settings.ns_coefficients.iter().any(|one| !one.is_finite()) {
        return Err(value(
            "optimizer.params.ns_coefficients",
            "must be three numbers",
        ));
    }
    Ok(Some(settings))
}

/// Refuses number formats that Muon's state does not have.
fn check_muon_formats(
    kind: OptimizerKind,
    optimizer: &OptimizerToml,
    bf16: &Bf16Toml,
    faults: &mut Faults,
) {
    let formats = [
        (
            "optimizer.moments",
            optimizer.moments.as_deref(),
            bf16.bf16_optimizer_states,
        ),
        (
            "optimizer.master",
            optimizer.master.as_deref(),
            bf16.bf16_master_weights_and_grads,
        ),
    ];
    for (key, given, switch) in formats {
        let is_other = given.is_some_and(|word| word != "fp32") || switch == Some(true);
        if kind == OptimizerKind::Muon && is_other {
            faults.0.push(value(
                key,
                "Muon's momentum and masters are fp32: leave it out, or use optimizer.type = \"AdamW\" or \"Lion\"",
            ));
        }
    }
}

/// Resolves how moments are stored: by our key, or by DeepSpeed's switch.
pub fn moments(
    key: &'static str,
    given: &Option<String>,
    bf16: &Bf16Toml,
) -> Result<MomentsType, SettingsError> {
    let switch = ("bf16_optimizer_states", bf16.bf16_optimizer_states);
    let words = [MomentsType::Fp32, MomentsType::Bf16, MomentsType::EightBit];
    let words = words.map(|moments| (moments.word(), moments));
    if switch.1 == Some(true) && bf16.bf16_master_weights_and_grads != Some(true) {
        return Err(value(
            "bf16.bf16_optimizer_states",
            format!(
                "needs bf16_master_weights_and_grads, as in DeepSpeed: set it to true too, or use {key} = \"bf16\", which needs nothing"
            ),
        ));
    }
    word(key, switched(key, given, bf16, switch)?, &words)
}

/// Resolves how masters of bf16 parameters are stored: by our key, or by DeepSpeed's switch.
pub fn master(
    key: &'static str,
    given: &Option<String>,
    bf16: &Bf16Toml,
) -> Result<MasterType, SettingsError> {
    let switch = (
        "bf16_master_weights_and_grads",
        bf16.bf16_master_weights_and_grads,
    );
    let words = [("fp32", MasterType::Fp32), ("bf16", MasterType::Bf16)];
    word(key, switched(key, given, bf16, switch)?, &words)
}

/// Returns the value of `key`, which is `given` or what a switch of DeepSpeed's table `bf16` stands for where that is enabled.
fn switched<'a>(
    key: &'static str,
    given: &'a Option<String>,
    bf16: &Bf16Toml,
    (switch, on): (&str, Option<bool>),
) -> Result<Option<&'a str>, SettingsError> {
    if on == Some(true) && bf16.enabled != Some(Switch::Said(true)) {
        return Err(value(
            key,
            format!(
                "bf16.{switch} is true and bf16.enabled is not: set bf16.enabled = true, or leave bf16.{switch} out"
            ),
        ));
    }
    match (given.as_deref(), on) {
        (None, Some(true)) => Ok(Some("bf16")),
        (Some(word @ ("fp32" | "8bit")), Some(true)) | (Some(word @ "bf16"), Some(false)) => {
            Err(value(
                key,
                format!("\"{word}\" contradicts bf16.{switch}: leave one of them out"),
            ))
        }
        (given, _) => Ok(given),
    }
}

/// Says what to use instead of an optimizer that is not supported.
fn instead_of(kind: &str, reader: Reader) -> &'static str {
    let kind = kind.to_ascii_lowercase();
    if reader == Reader::Package {
        return if kind.contains("muon") {
            "use \"Muon\""
        } else if kind.contains("lion") {
            "use \"Lion\", with offloadd.moments = \"bf16\" or \"8bit\" for less memory"
        } else if kind.contains("8bit") || kind.contains("paged") {
            "use \"AdamW\", with offloadd.moments = \"8bit\" for moments as bitsandbytes has them, 2 bytes a parameter; zero_optimization.offload_optimizer.device = \"cpu\" or \"nvme\" keeps them out of GPU memory"
        } else {
            "use \"AdamW\", \"Adam\" or \"Lion\""
        };
    }
    if kind.contains("muon") {
        "use \"Muon\""
    } else if kind == "adafactor" {
        "its factored second moments need whole matrices, and tiles are parts of them; use \"Lion\", or \"AdamW\" with optimizer.moments = \"bf16\", whose state is small too"
    } else if kind.starts_with("onebit") || kind.starts_with("zeroone") {
        "it compresses gradients between GPUs, which this program sends whole; use \"AdamW\" with its lr, betas, eps and weight_decay, and leave out what configures the compression"
    } else if kind.contains("lion") {
        "use \"Lion\", with optimizer.moments = \"bf16\" or \"8bit\" for less memory"
    } else if kind.contains("8bit") || kind.contains("paged") {
        "use \"AdamW\", with optimizer.moments = \"8bit\" for moments as bitsandbytes has them, 2 bytes a parameter; zero_optimization.offload_optimizer.device = \"cpu\" or \"nvme\" keeps them out of GPU memory"
    } else if kind.starts_with("adamw") {
        "use \"AdamW\""
    } else {
        "use \"AdamW\", \"Adam\", \"Lion\" or \"Muon\"; other optimizers need PyTorch and a model that fits in memory, because neither this trainer nor its PyTorch package has them; for a smaller state use \"Lion\" and optimizer.moments = \"bf16\""
    }
}

/// Resolves which parameters decay: a keyword, or all except those whose name contains a given text, as is
/// usual with PyTorch.
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
            "contradicts optimizer.params.no_decay, which excludes parameters from weight decay: leave one of them out",
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

/// Checks a group of parameters. `lr` is the rate of parameters in no group.
fn param_group(group: &ParamGroupToml, lr: f64) -> Result<ParamGroupSettings, SettingsError> {
    let fault = |message: String| Err(value(GROUPS, message));
    if group.params.is_empty() || group.params.iter().any(String::is_empty) {
        return fault(
            "params must be texts in parameters' names, for example [\"lm_head\"]".into(),
        );
    }
    let name = quoted(&group.params);
    for (key, number) in [("lr", group.lr), ("weight_decay", group.weight_decay)] {
        if let Some(number) = number.filter(|number| !(number.is_finite() && *number >= 0.0)) {
            return fault(format!("{key} of {name}: {number}: must not be negative"));
        }
    }
    match (group.lr, group.weight_decay) {
        (None, None) => fault(format!("{name} sets neither lr nor weight_decay")),
        (Some(_), _) if lr == 0.0 => fault(format!(
            "lr of {name} needs optimizer.params.lr above 0: the schedule of the learning rate is scaled by their ratio"
        )),
        _ => Ok(ParamGroupSettings {
            params: group.params.clone(),
            lr: group.lr,
            weight_decay: group.weight_decay,
        }),
    }
}

/// Texts in quotes.
pub fn quoted(texts: &[String]) -> String {
    let texts: Vec<String> = texts.iter().map(|text| format!("\"{text}\"")).collect();
    texts.join(", ")
}
