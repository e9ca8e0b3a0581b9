//! Interface of jobs for the administration, by values: returns the extents of tiles and which of them can move, stops commits,
//! and exchanges extents.

use offload_api::ids::{DeviceIndex, Generation};

use super::job::Job;
use super::jobs::JobTable;
use super::stored::{Holds, StoredJob};
use super::{Data, JobKey};
use crate::io::AlignedBytes;
use crate::store::catalog::Entry;
use crate::store::manifest::{MarkedRecord, SlotContent, resumable};
use crate::store::tile_table::{Extent, TileTable};

/// Extents of the tiles of a job.
#[derive(Clone, Copy)]
pub(in crate::core) struct Layout<'a> {
    pub(in crate::core) key: &'a JobKey,
    pub(in crate::core) entry: &'a Entry,
    pub(in crate::core) table: &'a TileTable,
}

/// Whether tiles of a job can move now.
pub(in crate::core) enum Movable<'a> {
    /// The job is gone or being deleted, or it is unknown which table the devices hold.
    Never,
    /// A record is unreadable, so the extents that it names are unknown.
    Unreadable(&'a str),
    Later,
    Now(MovableJob<'a>),
}

/// A job whose tiles can move.
pub(in crate::core) struct MovableJob<'a> {
    pub(in crate::core) layout: Layout<'a>,
    /// Working generation, if a session has resumed.
    pub(in crate::core) in_session: Option<Generation>,
    stored: &'a StoredJob,
    recorded: Vec<&'a MarkedRecord>,
}

/// A new extent for a tile.
#[derive(Clone, Copy, Debug)]
pub(in crate::core) struct NewExtent {
    pub(in crate::core) tile: u32,
    pub(in crate::core) which: u8,
    pub(in crate::core) to: Extent,
}

/// Torn records, and the writes that clear them.
pub(in crate::core) struct TornRecords {
    pub(in crate::core) slots: Vec<usize>,
    pub(in crate::core) writes: Vec<(u64, AlignedBytes)>,
}

impl Layout<'_> {
    /// Returns the number of extents of a tile.
    pub(in crate::core) fn copies(&self, tile: usize) -> usize {
        let definition = &self.table.definition;
        definition.extents(&definition.tiles()[tile])
    }

    pub(in crate::core) fn tile_bytes(&self, tile: usize) -> u64 {
        u64::from(self.table.definition.tiles()[tile].tile_bytes)
    }
}

impl MovableJob<'_> {
    pub(in crate::core) fn holds(&self, tile: u32, which: u8) -> Holds {
        self.stored.holds(&self.recorded, tile as usize, which)
    }
}

impl JobTable {
    /// Returns the jobs in the store, by owner and name.
    pub(in crate::core) fn layouts(&self) -> impl Iterator<Item = Layout<'_>> {
        (self.iter()).filter_map(|job| Some(layout(&job.key, job.stored.as_ref()?)))
    }

    /// Bytes of the jobs' areas on the metadata device.
    pub(in crate::core) fn area_bytes(&self) -> u64 {
        self.layouts().map(|layout| layout.entry.area.bytes()).sum()
    }

    /// Returns the job if it still has this id.
    pub(in crate::core) fn layout(&self, key: &JobKey, job_id: u64) -> Option<Layout<'_>> {
        let job = self.get(key)?;
        let stored = job.stored.as_ref()?;
        (stored.entry.job_id == job_id).then(|| layout(&job.key, stored))
    }

    /// Returns whether tiles of this job can move now.
    pub(in crate::core) fn movable(&self, key: &JobKey, job_id: u64) -> Movable<'_> {
        let job = self.get(key);
        job.map_or(Movable::Never, |job| job.movable(job_id))
    }
}

impl Job {
    fn movable(&self, job_id: u64) -> Movable<'_> {
        let stored = self.stored.as_ref();
        let Some(stored) = stored.filter(|stored| stored.entry.job_id == job_id) else {
            return Movable::Never;
        };
        if self.dropping || self.broken.is_some() {
            return Movable::Never;
        }
        if let Some(why) = stored.unreadable() {
            return Movable::Unreadable(why);
        }
        if !self.may_move(stored) {
            return Movable::Later;
        }
        Movable::Now(MovableJob {
            layout: layout(&self.key, stored),
            in_session: self.resumed.map(|_| self.working),
            stored,
            recorded: resumable(&stored.slots),
        })
    }

    /// Whether no record that failed, or that ended sessions are still writing, may name an extent that seems free.
    fn may_move(&self, stored: &StoredJob) -> bool {
        if self.members.is_empty() {
            return self.script.is_none();
        }
        self.poison.is_none() && unknown_slots(stored).is_empty()
    }

    /// Freezes the job if it has torn records to clear, because a commit writes to their slots too. Torn records may name the
    /// extents that become free. If a rank has resumed since the tiles began to move, it has cleared them.
    pub(in crate::core) fn freeze_to_clear(&mut self) -> TornRecords {
        let free = self.members.is_empty() && self.script.is_none();
        let stored = self.stored.as_mut().expect("it has tiles");
        let slots = match free {
            true => unknown_slots(stored),
            false => Vec::new(),
        };
        let writes = stored.voiding(&slots);
        self.frozen |= !writes.is_empty();
        TornRecords { slots, writes }
    }

    /// Notes that torn records are durably cleared.
    pub(in crate::core) fn clear(&mut self, slots: &[usize]) {
        let stored = self.stored.as_mut().expect("it has tiles");
        for &slot in slots {
            if let SlotContent::Unknown = stored.slots[slot] {
                stored.slots[slot] = SlotContent::Empty;
            }
        }
    }

    /// Returns the content of each extent if the job's table may be written. `None` if a record that failed may be found at the
    /// next start and name an extent that seems free.
    pub(in crate::core) fn exchangeable(
        &self,
        extents: impl Iterator<Item = (u32, u8)>,
    ) -> Option<Vec<Holds>> {
        let stored = self.stored.as_ref().expect("it has tiles");
        if self.poison.is_some() || !unknown_slots(stored).is_empty() {
            return None;
        }
        let recorded = resumable(&stored.slots);
        let holds = |(tile, which)| stored.holds(&recorded, tile as usize, which);
        Some(extents.map(holds).collect())
    }

    /// Directs writes to the new extents and freezes the job until the table that names them is durable. Returns the offsets
    /// and the bytes of the table to write; `None` if its revision cannot be raised any more.
    pub(in crate::core) fn replace_extents(
        &mut self,
        extents: impl Iterator<Item = NewExtent>,
        numbers: &[u32],
    ) -> Option<([u64; 2], AlignedBytes)> {
        let stored = self.stored.as_mut().expect("it has tiles");
        stored.table.revision = stored.table.revision.checked_add(1)?;
        let definition = stored.table.definition.clone();
        for NewExtent { tile, which, to } in extents {
            let extents = &mut stored.table.extents[tile as usize];
            extents[usize::from(which)] = to;
            if definition.extents(&definition.tiles()[tile as usize]) == 1 {
                *extents = [to; 2];
            }
        }
        let blocks = stored.table.encode(stored.entry.job_id, numbers);
        let copies = stored.entry.area.definitions();
        self.frozen = true;
        Some((copies, blocks))
    }
}

impl Data {
    /// Returns the extents that operations in flight use.
    pub(in crate::core) fn extents_in_use(&self) -> impl Iterator<Item = Extent> + '_ {
        self.inflight.values().map(|tile| tile.extent)
    }

    /// Whether a job has written bytes to `device` that no flush covers.
    pub(in crate::core) fn has_unflushed(&self, device: DeviceIndex) -> bool {
        let mut sessions = self.sessions.iter();
        (self.jobs.iter()).any(|job| job.unflushed[device.0 as usize])
            || sessions.any(|session| session.has_scratch_on(device))
    }
}

fn layout<'a>(key: &'a JobKey, stored: &'a StoredJob) -> Layout<'a> {
    Layout {
        key,
        entry: &stored.entry,
        table: &stored.table,
    }
}

fn unknown_slots(stored: &StoredJob) -> Vec<usize> {
    let slots = stored.slots.iter().enumerate();
    let unknown = slots.filter(|(_, slot)| matches!(slot, SlotContent::Unknown));
    unknown.map(|(slot, _)| slot).collect()
}
