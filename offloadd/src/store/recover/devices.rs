//! Finds the devices of one store and its current catalog.

use super::{ForeignDevice, RecoveredDevice, Stale};
use crate::blocks::Blocks;
use crate::io::AlignedBytes;
use crate::store::catalog::{self, Catalog};
use crate::store::dual_copy::{Copy, Reader};
use crate::store::sealed::Unreadable;
use crate::store::superblock::{self, StoreId, Superblock};
use crate::store::{
    BLOCK, CATALOG_BYTES_MAX, CATALOG_OFFSETS, DATA_OFFSET, SUPERBLOCK_OFFSETS, StoreError,
};

/// Catalogs found on one device.
enum DeviceCatalogs {
    Nothing,
    /// Only part of a catalog: its arrival or departure was interrupted. If no other device has a catalog, it is the store's,
    /// damaged.
    CutOff(StoreError),
    Whole(Catalog),
}

impl<B: Blocks> Reader<'_, B> {
    /// Reads the superblock of each device that has one, by position. All must be of one store and different.
    pub(super) fn superblocks(&mut self) -> Result<Vec<(usize, Superblock)>, StoreError> {
        let mut found: Vec<(usize, Superblock)> = Vec::new();
        let mut blank = None;
        for position in 0..self.blocks.count() {
            match self.superblock(position) {
                Ok(superblock) => found.push((position, superblock)),
                Err(StoreError::NoStore { path }) => {
                    blank.get_or_insert(path);
                }
                Err(error) => return Err(error),
            }
        }
        let path = |position: usize| self.blocks.path(position).to_owned();
        let first = found.iter().find(|(_, superblock)| !superblock.drained);
        let &(first, Superblock { store, .. }) = match (first, &blank, found.first()) {
            (Some(first), ..) => first,
            (None, Some(_), _) => {
                let path = blank.expect("just seen");
                return Err(StoreError::NoStore { path });
            }
            (None, None, Some((position, _))) => {
                let path = path(*position);
                return Err(StoreError::Drained { path });
            }
            (None, None, None) => {
                return Err(StoreError::Invalid(
                    "a store has at least one device".into(),
                ));
            }
        };
        if let Some(path) = blank {
            let other_path = self.blocks.path(first).to_owned();
            return Err(match self.is_complete(&found, store) {
                true => StoreError::NotAdded { path, other_path },
                false => StoreError::Incomplete { path, other_path },
            });
        }
        let path = |position: usize| self.blocks.path(position).to_owned();
        for (index, (position, superblock)) in found.iter().enumerate() {
            if superblock.store != store && !superblock.drained {
                return Err(StoreError::Foreign {
                    path: path(*position),
                    found: superblock.store.to_string(),
                    other_path: path(first),
                    expected: store.to_string(),
                });
            }
            let found_bytes = self.blocks.size_bytes(*position);
            let expected_bytes = DATA_OFFSET + superblock.data_bytes;
            if found_bytes < expected_bytes && !superblock.drained {
                return Err(StoreError::Shrunk {
                    path: path(*position),
                    found_bytes,
                    expected_bytes,
                });
            }
            let same = |(_, other): &&(usize, Superblock)| {
                (other.store, other.number, other.id)
                    == (superblock.store, superblock.number, superblock.id)
            };
            if let Some((other, _)) = found[..index].iter().find(same) {
                return Err(StoreError::Duplicate {
                    path: path(*position),
                    other_path: path(*other),
                    number: superblock.number,
                });
            }
        }
        found.retain(|(_, superblock)| superblock.store == store || superblock.drained);
        Ok(found)
    }

    /// Whether all devices of `store` are among those `found`.
    fn is_complete(&mut self, found: &[(usize, Superblock)], store: StoreId) -> bool {
        let mut found = found.to_vec();
        found.retain(|(_, superblock)| superblock.store == store);
        let catalog = self.newest_catalog(&found);
        catalog.is_ok_and(|(_, catalog, _)| {
            catalog.devices.iter().all(|entry| {
                let mut superblocks = found.iter().map(|(_, superblock)| superblock);
                superblocks.any(|s| (s.number, s.id) == (entry.number, entry.id))
            })
        })
    }

    /// Returns the store's newest catalog, the position where it was found, and the positions of older or partial ones, which
    /// remain from earlier metadata devices.
    pub(super) fn newest_catalog(
        &mut self,
        found: &[(usize, Superblock)],
    ) -> Result<(usize, Catalog, Stale), StoreError> {
        let store = (found.iter().find(|(_, s)| !s.drained))
            .map(|(_, superblock)| superblock.store)
            .expect("a device of a store");
        let mut catalogs: Vec<(usize, Catalog)> = Vec::new();
        let mut cut_off = Vec::new();
        for &(position, superblock) in found {
            if superblock.drained {
                continue;
            }
            match self.catalog(position, store)? {
                DeviceCatalogs::Nothing => {}
                DeviceCatalogs::CutOff(error) => cut_off.push((position, error)),
                DeviceCatalogs::Whole(catalog) => catalogs.push((position, catalog)),
            }
        }
        // The first of equals.
        catalogs.sort_by_key(|(_, catalog)| std::cmp::Reverse(catalog.sequence));
        let mut catalogs = catalogs.into_iter();
        if let Some((position, newest)) = catalogs.next() {
            let stale = Stale {
                whole: catalogs.map(|(position, _)| position).collect(),
                parts: cut_off.into_iter().map(|(position, _)| position).collect(),
            };
            return Ok((position, newest, stale));
        }
        if let Some((_, error)) = cut_off.into_iter().next() {
            return Err(error);
        }
        let listed = found.iter().filter(|(_, s)| !s.drained);
        let listed: Vec<&str> = listed
            .map(|(position, _)| self.blocks.path(*position))
            .collect();
        Err(StoreError::NoCatalog {
            paths: listed.join(", "),
        })
    }

    /// Returns all devices that the catalog lists, by number, and those it does not list.
    pub(super) fn devices(
        &mut self,
        found: Vec<(usize, Superblock)>,
        catalog: &Catalog,
    ) -> Result<(Vec<RecoveredDevice>, Vec<ForeignDevice>), StoreError> {
        let mut devices = Vec::new();
        for entry in &catalog.devices {
            let listed = |(_, superblock): &&(usize, Superblock)| {
                (superblock.number, superblock.id) == (entry.number, entry.id)
                    && !superblock.drained
            };
            let Some(&(position, superblock)) = found.iter().find(listed) else {
                return Err(StoreError::Missing {
                    number: entry.number,
                    path: (!entry.path.is_empty()).then(|| entry.path.clone()),
                });
            };
            devices.push(RecoveredDevice {
                position,
                path: self.blocks.path(position).to_owned(),
                superblock,
                phase: Some(entry.phase),
            });
        }
        let listed = |position| devices.iter().any(|device| device.position == position);
        let foreign_devices = (found.iter())
            .filter(|(position, _)| !listed(*position))
            .map(|(position, superblock)| ForeignDevice {
                path: self.blocks.path(*position).to_owned(),
                drained: superblock.drained,
            })
            .collect();
        Ok((devices, foreign_devices))
    }

    pub(super) fn superblock(&mut self, position: usize) -> Result<Superblock, StoreError> {
        let path = self.blocks.path(position).to_owned();
        match self.blocks.size_bytes(position) {
            0 => return Err(StoreError::NoStore { path }),
            1..DATA_OFFSET => return Err(StoreError::NotOurs { path }),
            _ => {}
        }
        let copies = SUPERBLOCK_OFFSETS.map(|offset| {
            self.copy(
                position,
                offset,
                BLOCK,
                superblock::MAGIC,
                Superblock::decode,
            )
        });
        match &copies {
            [Err(Unreadable::Blank), Err(Unreadable::Blank)] => {
                return Err(StoreError::NoStore { path });
            }
            [
                Err(Unreadable::Blank | Unreadable::Foreign),
                Err(Unreadable::Blank | Unreadable::Foreign),
            ] => return Err(StoreError::NotOurs { path }),
            _ => {}
        }
        self.newest("superblock", position, SUPERBLOCK_OFFSETS, copies, |_| 0)
    }

    fn catalog(&mut self, position: usize, id: StoreId) -> Result<DeviceCatalogs, StoreError> {
        let copies = CATALOG_OFFSETS.map(|offset| {
            let decode = |blocks: &AlignedBytes| {
                let catalog = Catalog::decode(blocks)?;
                // Left by another store, on a device that is not the metadata device of this one.
                match catalog.store == id {
                    true => Ok(catalog),
                    false => Err(Unreadable::Foreign),
                }
            };
            self.copy(position, offset, CATALOG_BYTES_MAX, catalog::MAGIC, decode)
        });
        let nothing = |copy: &Copy<_>| matches!(copy, Err(Unreadable::Blank | Unreadable::Foreign));
        if copies.iter().all(nothing) {
            return Ok(DeviceCatalogs::Nothing);
        }
        // Catalogs are written, and zeroed, one copy after the other.
        let damaged = |copy: &Copy<_>| {
            let why = copy.as_ref().err();
            why.is_some_and(|why| {
                matches!(
                    why,
                    Unreadable::Torn { .. } | Unreadable::Damaged(_) | Unreadable::Device(_)
                )
            })
        };
        let cut_off = copies.iter().any(nothing) && copies.iter().any(damaged);
        let newest = self.newest("catalog", position, CATALOG_OFFSETS, copies, |catalog| {
            catalog.sequence
        });
        match newest {
            Ok(catalog) => Ok(DeviceCatalogs::Whole(catalog)),
            Err(error) if cut_off => Ok(DeviceCatalogs::CutOff(error)),
            Err(error) => Err(error),
        }
    }
}
