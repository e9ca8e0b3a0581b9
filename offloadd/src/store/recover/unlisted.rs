//! Finds devices that the settings forget: those that the store's catalog lists and that were not opened.

use crate::blocks::Blocks;
use crate::store::StoreError;
use crate::store::catalog::DeviceEntry;
use crate::store::dual_copy::Reader;
use crate::store::superblock::StoreId;

/// A device of the store that the settings do not list.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UnlistedDevice {
    store: StoreId,
    entry: DeviceEntry,
}

impl UnlistedDevice {
    /// Path in the catalog.
    pub fn path(&self) -> &str {
        &self.entry.path
    }

    /// Whether the device at `position` is this one, by its superblock.
    pub fn is_at(&self, blocks: &mut impl Blocks, position: usize) -> bool {
        let found = reader(blocks).superblock(position);
        found.is_ok_and(|superblock| {
            (superblock.store, superblock.number, superblock.id)
                == (self.store, self.entry.number, self.entry.id)
                && !superblock.drained
        })
    }
}

impl std::fmt::Display for UnlistedDevice {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let DeviceEntry { number, path, .. } = &self.entry;
        write!(
            f,
            "{path} is device {number} of the store and not in the list `devices` of the settings; it is opened, as the store's \
             catalog names it"
        )
    }
}

/// Returns the devices that the catalog lists besides those of `blocks`, with the catalog's paths. Returns none when a device
/// of `blocks` is not at the catalog's path: after a store was copied or moved, these paths lead to the devices of the
/// original.
///
/// # Errors
/// [`StoreError`], as recovery will return it.
pub fn unlisted(blocks: &mut impl Blocks) -> Result<Vec<UnlistedDevice>, StoreError> {
    let mut reader = reader(blocks);
    let found = reader.superblocks()?;
    let (_, catalog, _) = reader.newest_catalog(&found)?;
    let mut missing = Vec::new();
    for entry in catalog.devices {
        let known = found.iter().find(|(_, superblock)| {
            (superblock.number, superblock.id) == (entry.number, entry.id) && !superblock.drained
        });
        match known {
            Some((position, _)) if blocks.path(*position) != entry.path => return Ok(Vec::new()),
            Some(_) => {}
            None if entry.path.is_empty() => {}
            None => missing.push(UnlistedDevice {
                store: catalog.store,
                entry,
            }),
        }
    }
    Ok(missing)
}

fn reader<B: Blocks>(blocks: &mut B) -> Reader<'_, B> {
    Reader {
        blocks,
        notes: Vec::new(),
        repairs: Vec::new(),
    }
}
