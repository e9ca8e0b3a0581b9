//! Interface of jobs for the administration, by values: returns the extents of tiles and which of them can move, stops commits,
//! and exchanges extents.

use offload_api::fault::Fault;
use offload_api::ids::{DeviceIndex, Generation};

use super::job::{Holds, Job, Stored};
use super::members::poison;
use super::{Data, JobKey};
use crate::io::AlignedBytes;
use crate::store::catalog::Entry;
use crate::store::manifest::{Marked, SlotContent, resumable};
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
    stored: &'a Stored,
    recorded: Vec<&'a Marked>,
}

/// A new extent for a tile.
#[derive(Clone, Copy, Debug)]
pub(in crate::core) struct NewExtent {
    pub(in crate::core) tile: u32,
    pub(in crate::core) which: u8,
    pub(in crate::core) to: Extent,
}

/// Torn records, and the writes that clear them.
pub(in crate::core) struct Clearing {
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

impl Data {
    /// Returns the jobs in the store, by owner and name.
    pub(in crate::core) fn layouts(&self) -> impl Iterator<Item = Layout<'_>> {
        (self.jobs.iter()).filter_map(|(key, job)| Some(layout(key, job.stored.as_ref()?)))
    }

    /// Returns the job if it still has this id.
    pub(in crate::core) fn layout(&self, key: &JobKey, job_id: u64) -> Option<Layout<'_>> {
        let (key, job) = self.jobs.get_key_value(key)?;
        let stored = job.stored.as_ref()?;
        (stored.entry.job_id == job_id).then(|| layout(key, stored))
    }

    pub(in crate::core) fn movable(&self, key: &JobKey, job_id: u64) -> Movable<'_> {
        let Some((key, job)) = self.jobs.get_key_value(key) else {
            return Movable::Never;
        };
        let Some(stored) = (job.stored.as_ref()).filter(|stored| stored.entry.job_id == job_id)
        else {
            return Movable::Never;
        };
        if job.dropping || job.broken.is_some() {
            return Movable::Never;
        }
        if let Some(why) = stored.unreadable() {
            return Movable::Unreadable(why);
        }
        if !may_move(job, stored) {
            return Movable::Later;
        }
        Movable::Now(MovableJob {
            layout: layout(key, stored),
            in_session: job.resumed.map(|_| job.working),
            stored,
            recorded: resumable(&stored.slots),
        })
    }

    /// Returns the extents that operations in flight use.
    pub(in crate::core) fn extents_in_use(&self) -> impl Iterator<Item = Extent> + '_ {
        self.inflight.values().map(|tile| tile.extent)
    }

    /// Freezes the job if it has torn records to clear, because a commit writes to their slots too. Torn records may name the
    /// extents that become free. If a rank has resumed since the tiles began to move, it has cleared them.
    pub(in crate::core) fn freeze_to_clear(&mut self, key: &JobKey) -> Clearing {
        let job = self.moving(key);
        let free = job.members.is_empty() && job.script.is_none();
        let stored = job.stored.as_mut().expect("it has tiles");
        let slots = match free {
            true => unknown_slots(stored),
            false => Vec::new(),
        };
        let writes = stored.voiding(&slots);
        if !writes.is_empty() {
            job.freeze();
        }
        Clearing { slots, writes }
    }

    /// Notes that torn records are durably cleared.
    pub(in crate::core) fn clear(&mut self, key: &JobKey, slots: &[usize]) {
        let stored = self.moving(key).stored.as_mut().expect("it has tiles");
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
        key: &JobKey,
        extents: impl Iterator<Item = (u32, u8)>,
    ) -> Option<Vec<Holds>> {
        let job = &self.jobs[key];
        let stored = job.stored.as_ref().expect("it has tiles");
        if job.poison.is_some() || !unknown_slots(stored).is_empty() {
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
        key: &JobKey,
        extents: impl Iterator<Item = NewExtent>,
        numbers: &[u32],
    ) -> Option<([u64; 2], AlignedBytes)> {
        let job = self.moving(key);
        let stored = job.stored.as_mut().expect("it has tiles");
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
        job.freeze();
        Some((copies, blocks))
    }

    /// Lets the job commit again.
    pub(in crate::core) fn thaw(&mut self, key: &JobKey) {
        self.moving(key).thaw();
    }

    /// Notes that it is unknown, until the next start, which table the devices hold.
    pub(in crate::core) fn lose_table(&mut self, key: &JobKey, broken: Fault, cause: &Fault) {
        let poison = poison(&key.name, "moving its tiles", cause);
        self.moving(key).lose_table(broken, poison);
    }

    /// Adds a device to those that jobs may write to.
    pub(in crate::core) fn add_device(&mut self) {
        for job in self.jobs.values_mut() {
            job.unflushed.push(false);
        }
    }

    /// Notes that a device is empty: uncommitted tiles have moved off it and were flushed.
    pub(in crate::core) fn leave_device(&mut self, device: DeviceIndex) {
        for job in self.jobs.values_mut() {
            job.leave_device(device);
        }
    }

    /// Whether a job has written bytes to `device` that no flush covers.
    pub(in crate::core) fn has_unflushed(&self, device: DeviceIndex) -> bool {
        let wrote = |job: &Job| job.unflushed[device.0 as usize];
        let mut sessions = self.sessions.values();
        self.jobs.values().any(wrote) || sessions.any(|session| session.has_scratch_on(device))
    }

    fn moving(&mut self, key: &JobKey) -> &mut Job {
        (self.jobs.get_mut(key)).expect("dropped only when no tile moves")
    }
}

fn layout<'a>(key: &'a JobKey, stored: &'a Stored) -> Layout<'a> {
    Layout {
        key,
        entry: &stored.entry,
        table: &stored.table,
    }
}

fn unknown_slots(stored: &Stored) -> Vec<usize> {
    let slots = stored.slots.iter().enumerate();
    let unknown = slots.filter(|(_, slot)| matches!(slot, SlotContent::Unknown));
    unknown.map(|(slot, _)| slot).collect()
}

/// Whether no record that failed, or that ended sessions are still writing, may name an extent that seems free.
fn may_move(job: &Job, stored: &Stored) -> bool {
    if job.members.is_empty() {
        return job.script.is_none();
    }
    job.poison.is_none() && unknown_slots(stored).is_empty()
}
