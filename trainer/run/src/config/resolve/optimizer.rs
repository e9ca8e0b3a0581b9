//! Checks the optimizer's table against the model: names of parameters, and the format of masters.

use training_settings::resolve::optimizer::{GROUPS, quoted};

use super::{Faults, value};
use crate::config::{Decaying, MasterType, OptimizerSettings};
use crate::model::{Dtype, ModelConfig, UnitLayout, unit_layouts};

/// Checks the optimizer against the model and its precision, as far as they are known.
pub(super) fn check(
    optimizer: &OptimizerSettings,
    model: Option<&ModelConfig>,
    dtype: Option<Dtype>,
    notes: &mut Vec<String>,
    faults: &mut Faults,
) {
    if let Some(model) = model {
        note_unmatched(&optimizer.decay, model, notes);
        check_groups(optimizer, model, faults);
    }
    if let Some(dtype) = dtype {
        check_master(optimizer.master, dtype, faults);
        if optimizer.muon.is_some() && dtype == Dtype::Fp16 {
            faults.0.push(value(
                "optimizer.type",
                "\"Muon\" with fp16, whose range is too small for what is made orthogonal: use bf16.enabled = true",
            ));
        }
    }
}

/// Refuses a group that no parameter belongs to: its settings would apply nowhere.
fn check_groups(optimizer: &OptimizerSettings, model: &ModelConfig, faults: &mut Faults) {
    let units = unit_layouts(model);
    let params = || units.iter().flat_map(|unit| &unit.params);
    for group in &optimizer.groups {
        let is_own = |name: &str| optimizer.group_of(name) == Some(group);
        if params().any(|param| is_own(&param.name)) {
            continue;
        }
        let name = quoted(&group.params);
        faults.0.push(value(
            GROUPS,
            match params().any(|param| group.includes(&param.name)) {
                true => format!(
                    "every parameter of {name} is in an earlier group: put this group first"
                ),
                false => format!(
                    "no parameter's name contains {name}; names are like {}",
                    example(&units)
                ),
            },
        ));
    }
}

/// Refuses masters in bf16 beside parameters of another type.
fn check_master(master: MasterType, dtype: Dtype, faults: &mut Faults) {
    if master == MasterType::Bf16 && dtype != Dtype::Bf16 {
        faults.0.push(value(
            "optimizer.master",
            format!(
                "\"bf16\" is for parameters in bf16, and this run's are {}: set bf16.enabled = true, or leave optimizer.master out",
                dtype.name()
            ),
        ));
    }
}

/// Returns the name of a parameter of the first block.
fn example(units: &[UnitLayout]) -> &str {
    &units[1].params[0].name
}

/// Notes texts of `no_decay` that occur in no parameter's name. Not an error: the same list is often used for
/// many models.
fn note_unmatched(decay: &Decaying, model: &ModelConfig, notes: &mut Vec<String>) {
    let Decaying::AllBut(patterns) = decay else {
        return;
    };
    let units = unit_layouts(model);
    for pattern in patterns {
        let mut names = units.iter().flat_map(|unit| &unit.params);
        if !names.any(|param| param.name.contains(pattern)) {
            notes.push(format!(
                "optimizer.params.no_decay: no parameter's name contains \"{pattern}\"; names are like {}",
                example(&units)
            ));
        }
    }
}
