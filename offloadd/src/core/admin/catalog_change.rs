//! Changes of the catalog: what they are, and the steps that write it.

use std::sync::Arc;

use offload_api::ids::DeviceIndex;

use crate::core::operations::{Step, in_turn};
use crate::core::{CallId, JobKey};
use crate::store::CATALOG_OFFSETS;
use crate::store::catalog::Catalog;
use crate::store::definition::JobDefinition;

/// Steps that write the catalog.
pub(super) const CATALOG_STEPS: usize = 4;

/// A change that waits until the one before it is written.
#[derive(Debug)]
pub(super) enum QueuedChange {
    Define {
        key: JobKey,
        definition: Arc<JobDefinition>,
        local_ranks: u32,
    },
    Drop {
        key: JobKey,
        call: CallId,
    },
    Device(DeviceChange),
}

/// A change of the catalog's list of devices.
#[derive(Clone, Debug)]
pub(super) enum DeviceChange {
    Add {
        call: CallId,
        device: DeviceIndex,
    },
    Drain {
        call: CallId,
        device: DeviceIndex,
    },
    /// The device has its share of the tiles.
    Settle {
        device: DeviceIndex,
    },
    /// The device is empty.
    Remove {
        device: DeviceIndex,
    },
}

impl DeviceChange {
    /// Call that waits for the change.
    pub(super) fn call(&self) -> Option<CallId> {
        match self {
            Self::Add { call, .. } | Self::Drain { call, .. } => Some(*call),
            Self::Settle { .. } | Self::Remove { .. } => None,
        }
    }

    /// Steps of its script before the catalog is written.
    pub(super) fn steps_before_catalog(&self) -> usize {
        match self {
            Self::Add { .. } => 2,
            Self::Drain { .. } | Self::Settle { .. } | Self::Remove { .. } => 0,
        }
    }
}

/// Writes one copy, then the other, so that a power cut leaves a whole one.
pub(super) fn catalog_steps(metadata_device: DeviceIndex, catalog: &Catalog) -> Vec<Step> {
    let steps = in_turn(metadata_device, CATALOG_OFFSETS, catalog.encode());
    assert_eq!(steps.len(), CATALOG_STEPS);
    steps
}
