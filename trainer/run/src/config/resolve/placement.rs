//! Resolves where parameters and optimizer state are kept: DeepSpeed's stage and offload tables, and their
//! valid combinations.

use std::path::PathBuf;

use training_settings::resolve::{fraction, tier, value};

use crate::config::toml::{FractionOrAuto, OffloadToml, ZeroToml};
use crate::config::{Fraction, Placement, ResidentFraction, SettingsError, Stage, Tier};
use training_state::run::resolved;

pub(super) fn placement(
    zero: &ZeroToml,
    offload: &OffloadToml,
    notes: &mut Vec<String>,
) -> Result<Placement, SettingsError> {
    let has_socket = offload.socket.is_some();
    const PARAM: &str = "zero_optimization.offload_param.device";
    const OPTIMIZER: &str = "zero_optimization.offload_optimizer.device";
    let param = tier(PARAM, zero.offload_param.device.as_deref())?;
    let optimizer = tier(OPTIMIZER, zero.offload_optimizer.device.as_deref())?;
    let has_store = param == Tier::Nvme || optimizer == Tier::Nvme;
    let stage = stage(zero.stage, param, optimizer)?;
    if param == Tier::Nvme && optimizer == Tier::None {
        return Err(value(
            OPTIMIZER,
            "\"none\" is not possible with parameters on nvme, because the optimizer state is five times as large: use \"nvme\" or \"cpu\"",
        ));
    }
    // Two spellings of one directory are one directory, with one device file.
    let mut nvme_paths: Vec<PathBuf> = Vec::new();
    for (key, device, path) in [
        (
            "zero_optimization.offload_param.nvme_path",
            param,
            &zero.offload_param.nvme_path,
        ),
        (
            "zero_optimization.offload_optimizer.nvme_path",
            optimizer,
            &zero.offload_optimizer.nvme_path,
        ),
    ] {
        match (device, path) {
            (Tier::Nvme, Some(paths)) => {
                let paths = paths.list();
                if paths.is_empty() || paths.iter().any(|path| path.as_os_str().is_empty()) {
                    return Err(value(key, "contains no directory"));
                }
                for path in paths {
                    let same = |other: &PathBuf| resolved(other) == resolved(&path);
                    if !nvme_paths.iter().any(same) {
                        nvme_paths.push(path);
                    }
                }
            }
            (Tier::Nvme, None) if !has_socket => {
                return Err(SettingsError::Missing {
                    key,
                    message: "device \"nvme\" needs a directory on the drive, or the socket of a running offloadd in offload.socket",
                });
            }
            (Tier::None | Tier::Cpu, Some(_)) => notes.push(format!(
                "{key} has no effect: device is \"{}\"",
                device.word()
            )),
            _ => {}
        }
    }
    if has_socket && !has_store {
        return Err(value(
            "offload.socket",
            "this run keeps nothing on nvme: leave the socket out, or set a device to \"nvme\"",
        ));
    }
    if offload.resident_fraction.is_some() && !has_store {
        return Err(value(
            "offload.resident_fraction",
            "everything is in host memory already: leave it out, or set a device to \"nvme\"",
        ));
    }
    // Without being asked, state on drives stays nowhere else: a crash then loses one step at most.
    let gpu_default = match (param, optimizer) {
        (Tier::None, Tier::None) => None,
        _ if has_store => Some(ResidentFraction::Fixed(Fraction::NONE)),
        _ => Some(ResidentFraction::Auto),
    };
    Ok(Placement {
        stage,
        param,
        optimizer,
        nvme_paths,
        resident_fraction: resident_fraction(offload)?,
        gpu_resident_fraction: gpu_resident_fraction(offload, gpu_default)?,
    })
}

/// The default is 3: DeepSpeed's default of 0 would contradict every offload.
fn stage(number: Option<u64>, param: Tier, optimizer: Tier) -> Result<Stage, SettingsError> {
    const KEY: &str = "zero_optimization.stage";
    let Some(number) = number else {
        return Ok(Stage::default());
    };
    let stage = Stage::from_number(number)
        .ok_or_else(|| value(KEY, format!("{number}: there are stages 0 to 3")))?;
    if param != Tier::None && !stage.divides_parameters() {
        let device = param.word();
        return Err(value(
            KEY,
            format!(
                "{number} keeps parameters where they are computed with, and offload_param.device \"{device}\" needs stage 3: set stage = 3, or leave offload_param out"
            ),
        ));
    }
    match optimizer {
        Tier::Nvme if !stage.divides_parameters() => Err(value(
            KEY,
            format!(
                "{number} does not support offload_optimizer.device \"nvme\" (DeepSpeed accepts it and silently uses host memory): set stage = 3, or device \"cpu\""
            ),
        )),
        Tier::Cpu if !stage.divides_state() => Err(value(
            KEY,
            format!(
                "{number} keeps the optimizer state where parameters are computed with: set stage 1, 2 or 3 for offload_optimizer.device \"cpu\""
            ),
        )),
        _ => Ok(stage),
    }
}

/// The default is 0, or "auto" if a budget of host memory is set.
fn resident_fraction(offload: &OffloadToml) -> Result<ResidentFraction, SettingsError> {
    let given = given_fraction("offload.resident_fraction", &offload.resident_fraction)?;
    Ok(given.unwrap_or(match offload.host_memory_bytes {
        Some(_) => ResidentFraction::Auto,
        None => ResidentFraction::Fixed(Fraction::NONE),
    }))
}

/// What is set, else `default`; it is `None` if all of the state is in GPU memory.
fn gpu_resident_fraction(
    offload: &OffloadToml,
    default: Option<ResidentFraction>,
) -> Result<ResidentFraction, SettingsError> {
    const KEY: &str = "offload.gpu_resident_fraction";
    let given = given_fraction(KEY, &offload.gpu_resident_fraction)?;
    if let Some(default) = default {
        return Ok(given.unwrap_or(default));
    }
    match given {
        Some(ResidentFraction::Fixed(fraction)) if fraction != Fraction::NONE => Err(value(
            KEY,
            "with both devices \"none\" all of the state is in GPU memory: leave it out, or set a device to \"cpu\" or \"nvme\"",
        )),
        _ => Ok(ResidentFraction::Fixed(Fraction::NONE)),
    }
}

/// Returns the value of `key`, if it has one.
fn given_fraction(
    key: &'static str,
    given: &Option<FractionOrAuto>,
) -> Result<Option<ResidentFraction>, SettingsError> {
    match given {
        None => Ok(None),
        Some(FractionOrAuto::Fraction(number)) => {
            Ok(Some(ResidentFraction::Fixed(fraction(key, *number)?)))
        }
        Some(FractionOrAuto::Word(word)) if word == "auto" => Ok(Some(ResidentFraction::Auto)),
        Some(FractionOrAuto::Word(word)) => Err(value(
            key,
            format!("\"{word}\": use a fraction from 0 to 1, or \"auto\""),
        )),
    }
}
