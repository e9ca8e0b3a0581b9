//! Where the state of a run of the package is.

use std::path::PathBuf;

use crate::error::SettingsError;
use crate::resolve::{tier, value, within};
use crate::toml::{OwnToml, ZeroToml};
use crate::values::Tier;

/// Where the state is, and the directories of its device files.
pub(super) struct Placement {
    pub(super) device: Tier,
    pub(super) parameters_stay: bool,
    pub(super) nvme: Vec<PathBuf>,
}

/// Finds where the tables of DeepSpeed's file put the state; with a `socket`, the daemon has the devices.
///
/// # Errors
/// A word or stage is unknown; a drive has no directory.
pub(super) fn placement(
    zero: &ZeroToml,
    own: &OwnToml,
    ranks: u32,
) -> Result<Placement, SettingsError> {
    const PATH: &str = "zero_optimization.offload_param.nvme_path";
    within("zero_optimization.stage", zero.stage.unwrap_or(3), 0, 3)?;
    let param = tier(
        "zero_optimization.offload_param.device",
        zero.offload_param.device.as_deref(),
    )?;
    let optimizer = tier(
        "zero_optimization.offload_optimizer.device",
        zero.offload_optimizer.device.as_deref(),
    )?;
    let device = [Tier::Nvme, Tier::Cpu, Tier::None]
        .into_iter()
        .find(|tier| [param, optimizer].contains(tier))
        .unwrap_or(Tier::None);
    // A file for stage 3 expects its parameters to be divided among the ranks: they need not fit into one GPU.
    let divided = zero.stage == Some(3) && ranks > 1 && device != Tier::None;
    let placed = |nvme| Placement {
        device,
        parameters_stay: param == Tier::None && !divided,
        nvme,
    };
    if device != Tier::Nvme || own.socket.is_some() {
        return Ok(placed(Vec::new()));
    }
    let of = |wanted: &dyn Fn(Tier) -> bool| {
        let tables = [
            (param, &zero.offload_param),
            (optimizer, &zero.offload_optimizer),
        ];
        let mut found: Vec<PathBuf> = Vec::new();
        for (_, table) in tables.into_iter().filter(|(tier, _)| wanted(*tier)) {
            for path in table.nvme_path.iter().flat_map(|paths| paths.list()) {
                if !path.as_os_str().is_empty() && !found.contains(&path) {
                    found.push(path);
                }
            }
        }
        found
    };
    // A path beside another device counts only if there is no other.
    let mut paths = of(&|tier| tier == Tier::Nvme);
    if paths.is_empty() {
        paths = of(&|_| true);
    }
    if paths.is_empty() {
        return Err(SettingsError::Missing {
            key: PATH,
            message: "name a directory on an NVMe drive, or several in a list",
        });
    }
    for path in &mut paths {
        if !path.is_dir() {
            let message = format!(
                "{} is not a directory: make it, or name another one",
                path.display()
            );
            return Err(value(PATH, message));
        }
        if let Ok(absolute) = std::path::absolute(&path) {
            *path = absolute;
        }
    }
    Ok(placed(paths))
}
