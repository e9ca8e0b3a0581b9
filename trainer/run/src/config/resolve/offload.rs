//! Resolves the table `offload`.

use swapper::{
    ENGINES, IODEPTH_DEFAULT, IODEPTH_MAX, IODEPTH_MIN, TILE_ELEMS_MAX, TILE_ELEMS_STEP,
};

use super::{Faults, bytes, value, within, word};
use crate::config::toml::{ConfigToml, OffloadToml};
use crate::config::{
    ActivationsChoice, DeviceChoice, Durability, GradientsChoice, OffloadSettings, OptimizerDevice,
    OptimizerStep, Placement, SettingsError, ShardChoice,
};

/// Resolves the table `offload`, except for what belongs to the placement of state.
pub(super) fn offload(
    config: &ConfigToml,
    placement: Option<&Placement>,
    device: Option<DeviceChoice>,
    notes: &mut Vec<String>,
    faults: &mut Faults,
) -> Option<OffloadSettings> {
    let offload = &config.offload;
    let optimizer_device = optimizer_device(offload, device, faults);
    let optimizer_step = faults.collect(word(
        "offload.optimizer_step",
        offload.optimizer_step.as_deref(),
        &[
            ("deferred", OptimizerStep::Deferred),
            ("immediate", OptimizerStep::Immediate),
        ],
    ));
    let has_no_store = placement.is_some_and(|placement| !placement.has_store());
    let activations = activations(config, device, notes, faults);
    let gradients = faults.collect(word(
        "offload.gradients",
        offload.gradients.as_deref(),
        &[
            ("auto", GradientsChoice::Auto),
            ("cpu", GradientsChoice::Cpu),
            ("nvme", GradientsChoice::Nvme),
        ],
    ));
    for (key, is_nvme) in [
        (
            "offload.activations",
            activations == Some(ActivationsChoice::Nvme),
        ),
        (
            "offload.gradients",
            gradients == Some(GradientsChoice::Nvme),
        ),
    ] {
        if is_nvme && has_no_store {
            faults.0.push(value(
                key,
                "\"nvme\" needs a device, but this run keeps nothing else on nvme: set zero_optimization.offload_optimizer.device = \"nvme\", or leave it out",
            ));
        }
    }
    let shard = faults.collect(word(
        "offload.shard",
        offload.shard.as_deref(),
        &[("auto", ShardChoice::Auto), ("all", ShardChoice::All)],
    ));
    let durability = faults.collect(word(
        "offload.durability",
        offload.durability.as_deref(),
        &[("full", Durability::Full), ("none", Durability::None)],
    ));
    let engines = ENGINES.map(|engine| (engine, engine));
    let engine = faults.collect(word("offload.engine", offload.engine.as_deref(), &engines));
    if offload.engine.is_some() && offload.socket.is_some() {
        faults.0.push(value(
            "offload.engine",
            "is a setting of the daemon behind offload.socket: leave it out",
        ));
    }
    if has_no_store {
        refuse_store_keys(offload, faults);
    }
    let tile_elems = offload.tile_elems;
    if let Some(elems) = tile_elems
        && (elems == 0 || elems % TILE_ELEMS_STEP != 0 || elems > TILE_ELEMS_MAX)
    {
        faults.0.push(value(
            "offload.tile_elems",
            format!("{elems}: must be a multiple of {TILE_ELEMS_STEP}, at most {TILE_ELEMS_MAX}"),
        ));
    }
    let staging_bytes = faults.collect(bytes(
        "offload.staging_bytes",
        offload.staging_bytes.as_ref(),
    ));
    let host_memory_bytes = faults.collect(bytes(
        "offload.host_memory_bytes",
        offload.host_memory_bytes.as_ref(),
    ));
    let iodepth = faults.collect(iodepth(config));
    Some(OffloadSettings {
        socket: offload.socket.clone(),
        optimizer_step: optimizer_step?,
        commit_every: offload.commit_every,
        host_memory_bytes: host_memory_bytes?,
        optimizer_device: optimizer_device?,
        activations: activations?,
        gradients: gradients?,
        shard: shard?,
        tile_elems,
        staging_bytes: staging_bytes?,
        iodepth: iodepth? as u32,
        durability: durability?,
        engine: engine?.to_owned(),
    })
}

fn optimizer_device(
    offload: &OffloadToml,
    device: Option<DeviceChoice>,
    faults: &mut Faults,
) -> Option<OptimizerDevice> {
    let optimizer_device = faults.collect(word(
        "offload.optimizer_device",
        offload.optimizer_device.as_deref(),
        &OptimizerDevice::NAMES,
    ));
    if device == Some(DeviceChoice::Cpu)
        && matches!(
            optimizer_device,
            Some(OptimizerDevice::Gpu | OptimizerDevice::Shared)
        )
    {
        faults.0.push(value(
            "offload.optimizer_device",
            "needs a GPU, and train.device is \"cpu\": leave one of them out",
        ));
    }
    optimizer_device
}

fn activations(
    config: &ConfigToml,
    device: Option<DeviceChoice>,
    notes: &mut Vec<String>,
    faults: &mut Faults,
) -> Option<ActivationsChoice> {
    // DeepSpeed's key applies if this program's own key is absent.
    let asked = config.activation_checkpointing.cpu_checkpointing == Some(true);
    let activations = faults.collect(word(
        "offload.activations",
        (config.offload.activations.as_deref()).or(asked.then_some("cpu")),
        &[
            ("auto", ActivationsChoice::Auto),
            ("gpu", ActivationsChoice::Gpu),
            ("cpu", ActivationsChoice::Cpu),
            ("nvme", ActivationsChoice::Nvme),
        ],
    ));
    if activations == Some(ActivationsChoice::Cpu) && device == Some(DeviceChoice::Cpu) {
        notes.push(
            "offload.activations = \"cpu\" has no effect: train.device is \"cpu\", so they are in host memory anyway".into(),
        );
    }
    activations
}

/// Refuses keys of a store in a run that has none.
fn refuse_store_keys(offload: &OffloadToml, faults: &mut Faults) {
    for (key, given) in [
        ("offload.engine", offload.engine.is_some()),
        ("offload.durability", offload.durability.is_some()),
        ("offload.commit_every", offload.commit_every.is_some()),
    ] {
        if given {
            faults.0.push(value(
                key,
                "this run keeps nothing on nvme: leave it out, or set a device to \"nvme\"",
            ));
        }
    }
}

/// Queue depth from `offload.iodepth`, or DeepSpeed's `queue_depth` in either of its two usual places.
fn iodepth(config: &ConfigToml) -> Result<u64, SettingsError> {
    let mut found: Option<(&'static str, u64)> = None;
    for (key, given) in [
        ("offload.iodepth", config.offload.iodepth),
        ("aio.queue_depth", config.aio.queue_depth),
        (
            "zero_optimization.aio.queue_depth",
            config.zero_optimization.aio.queue_depth,
        ),
    ] {
        let Some(depth) = given else { continue };
        within(key, depth, IODEPTH_MIN.into(), IODEPTH_MAX.into())?;
        match found {
            Some((other, first)) if first != depth => {
                return Err(value(
                    key,
                    format!("{depth} contradicts {other} = {first}: leave one of them out"),
                ));
            }
            _ => found = Some((key, depth)),
        }
    }
    Ok(found.map_or(IODEPTH_DEFAULT.into(), |(_, depth)| depth))
}
