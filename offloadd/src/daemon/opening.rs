//! Opens the store at a start: locks its devices, recovers and repairs it, and moves its metadata if that is due.

use std::path::Path;

use anyhow::{Context, Result};
use offload_support::progress::{Audience, Progress, Unit};

use super::service_manager::{report_progress, say_status};
use crate::blocks::BlockError;
use crate::config::Config;
use crate::device::{Device, DeviceBlocks, Risk};
use crate::retry;
use crate::store::StoreError;
use crate::store::metadata_device::{self, MetadataMove};
use crate::store::recover::{self, RecoveredStore};
use crate::store_devices::StoreDevices;

pub(super) struct OpenedStore {
    /// All listed devices, in the settings' order, locked.
    pub(super) devices: Vec<Device>,
    pub(super) store: RecoveredStore,
    /// Error of a device on which the store could not be repaired; the store is then read-only.
    pub(super) unwritable: Option<BlockError>,
}

/// Opens the store of the settings at `file`. `sessions_wait`: the previous daemon handed over sessions.
pub(super) fn open(
    config: &Config,
    file: &Path,
    private: bool,
    sessions_wait: bool,
) -> Result<OpenedStore> {
    // Lock the devices before reading: the previous daemon may still be writing.
    let opened = StoreDevices::open(&config.devices)?;
    for unlisted in &opened.unlisted {
        tracing::warn!("device {unlisted}");
    }
    let to_write = opened.line_to_write();
    let StoreDevices { devices, .. } = opened;
    if private {
        devices.iter().try_for_each(Device::check_ours_alone)?;
    }
    for device in &devices {
        for Risk { what, fix } in device.risks() {
            tracing::warn!("device {}: {what}: {fix}", device.path());
        }
    }
    let (mut store, unwritable) = recover_store(&devices, sessions_wait)?;
    // After recovery, which fails if a device is missing: the line would lack that device.
    if let Some(line) = to_write {
        tracing::warn!("add to {}: {line}", file.display());
    }
    // Inherited sessions may have reserved space that the store does not know of.
    if unwritable.is_none() && !sessions_wait {
        settle_metadata(&devices, &mut store)?;
    }
    for note in &store.notes {
        tracing::warn!("{note}");
    }
    for foreign_device in &store.foreign_devices {
        tracing::warn!("device {foreign_device}");
    }
    Ok(OpenedStore {
        devices,
        store,
        unwritable,
    })
}

/// Moves the catalog and the records away from a drained device that holds no tiles any more.
fn settle_metadata(devices: &[Device], store: &mut RecoveredStore) -> Result<()> {
    let what = "moving the store's catalog and records";
    let mut work = Progress::new(what, Unit::Bytes, Audience::Service(report_progress));
    let moved =
        metadata_device::settle_watched(&mut DeviceBlocks(devices), store, &mut |done, total| {
            work.set(done, total);
        });
    drop(work);
    match moved? {
        MetadataMove::NotDue => {}
        MetadataMove::Moved { from, to } => {
            tracing::info!("moved the store's catalog and records from {from} to {to}");
        }
        MetadataMove::Failed(why) => {
            tracing::warn!("cannot move the store's catalog and records: {why}");
        }
    }
    Ok(())
}

/// Recovers and repairs the store. If a device fails a write of the repair, returns its error too, and the store is served
/// read-only. With sessions to adopt, that is an error instead: the next start may be able to adopt them.
fn recover_store(
    devices: &[Device],
    sessions_wait: bool,
) -> Result<(RecoveredStore, Option<BlockError>)> {
    say_status("recovering the store");
    let mut work = Progress::new(
        "recovering the store",
        Unit::Jobs,
        Audience::Service(report_progress),
    );
    let mut read = || {
        recover::read_watched(&mut DeviceBlocks(devices), &mut |done, total| {
            work.set(done, total);
        })
    };
    let mut store = read()?;
    let mut is_fresh = true;
    let waits = if sessions_wait {
        &[][..]
    } else {
        &retry::WAITS
    };
    let repaired = retry::retry(waits.iter().copied(), || {
        // After a failed flush, the state on the devices is unknown: read it again.
        if !std::mem::replace(&mut is_fresh, false) {
            store = read()?;
        }
        recover::repair(&mut DeviceBlocks(devices), &mut store).map_err(StoreError::from)
    });
    match repaired {
        Ok(()) => Ok((store, None)),
        Err(error) if sessions_wait => Err(error).context(
            "repairing the store; the sessions of the previous daemon remain for the next start",
        ),
        Err(StoreError::Device(error)) => Ok((store, Some(error))),
        Err(error) => Err(error.into()),
    }
}
