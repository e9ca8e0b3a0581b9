//! A job in memory: its tiles, its members (sessions) and its definition.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;

use offload_api::fault::{Fault, FaultKind};
use offload_api::ids::{Generation, Rank, TileIndex};

use super::commit::Round;
use super::tiles::{ParkedWrite, free_extent};
use super::{Data, JobKey};
use crate::core::operations::{Operations, ScriptId};
use crate::core::{CallId, GenerationRecord, JobRecord, Reply};
use crate::io::{AlignedBytes, SessionId};
use crate::store::catalog::Entry;
use crate::store::definition::{Durability, JobDefinition, JobName};
use crate::store::manifest::{
    FIRST_SEQUENCE, Mark, Marked, Record, SlotContent, Version, resumable, voiding,
};
use crate::store::recover::RecoveredJob;
use crate::store::tile_table::TileTable;

pub(super) struct Job {
    /// State on the devices; `None` before the definition is in the catalog.
    pub(super) stored: Option<Stored>,
    pub(super) defining: Option<Defining>,
    /// Whether the catalog entry is being removed, or may be gone.
    pub(super) dropping: bool,
    pub(super) local_ranks: u32,
    /// Sessions by rank. An ended session stays until its last operation has ended.
    pub(super) members: BTreeMap<Rank, SessionId>,
    pub(super) script: Option<ScriptId>,
    /// Whether commits wait because the definition is being written.
    pub(super) frozen: bool,
    /// Reason why it is unknown, until the next start, which definition the devices hold.
    pub(super) broken: Option<Fault>,
    /// Generation that the members resumed from.
    pub(super) resumed: Option<Generation>,
    pub(super) working: Generation,
    /// Whether the newest generation is prepared on this node and not yet confirmed.
    pub(super) awaiting_confirm: bool,
    /// Failure of a flush or a record after which nothing can be made durable.
    pub(super) poison: Option<Fault>,
    /// Reason why the working generation cannot be completed: a member ended.
    pub(super) gone: Option<Fault>,
    pub(super) round: Option<Round>,
    pub(super) resume_waiters: Vec<(CallId, SessionId)>,
    pub(super) confirm_waiters: Vec<CallId>,
    /// By device: whether the job has written to it since the last commit.
    pub(super) unflushed: Vec<bool>,
    pub(super) writes_inflight_count: u32,
    /// Writes that wait until the job is marked as being overwritten.
    pub(super) parked: VecDeque<ParkedWrite>,
}

pub(super) struct Defining {
    definition: Arc<JobDefinition>,
    /// Bytes reserved on devices, counted from when the definition is being written.
    pub(super) reserved_bytes: u64,
    pub(super) waiters: Vec<CallId>,
}

/// State of a job on the devices.
pub(super) struct Stored {
    pub(super) entry: Entry,
    pub(super) table: TileTable,
    pub(super) slots: [SlotContent; 2],
    /// Highest sequence number written to the record slots.
    sequence: u64,
    pub(super) tiles: Vec<TileState>,
    /// Tiles whose last write failed.
    pub(super) failed_count: usize,
    /// Extents, by tile and which of its two, whose damage a process reported. A write of the extent removes it.
    pub(super) damaged: BTreeSet<(TileIndex, u8)>,
}

#[derive(Clone, Copy, Debug, Default)]
pub(super) struct TileState {
    /// Version in the generation that was resumed or committed last.
    pub(super) committed: Option<Version>,
    /// Version written since the last commit.
    pub(super) working: Option<Version>,
    pub(super) activity: Activity,
    /// Whether the last write failed, so that the content is unknown.
    pub(super) failed: bool,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Activity {
    #[default]
    Idle,
    Reading {
        count: u32,
    },
    Writing,
}

/// Content of an extent of a tile.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::core) enum Holds {
    /// Nothing that will be read.
    Nothing,
    /// Bytes that a record names, with their checksum if it is known.
    Bytes(Option<u32>),
    /// Bytes that are being written, or were written since the last commit.
    Moving,
}

impl TileState {
    pub(super) fn newest(&self) -> Option<Version> {
        self.working.or(self.committed)
    }
}

impl Stored {
    pub(super) fn new(
        entry: Entry,
        table: TileTable,
        slots: [SlotContent; 2],
        sequence: u64,
    ) -> Self {
        let tiles = vec![TileState::default(); table.extents.len()];
        Self {
            entry,
            table,
            slots,
            sequence,
            tiles,
            failed_count: 0,
            damaged: BTreeSet::new(),
        }
    }

    pub(super) fn durability(&self) -> Durability {
        self.table.definition.durability()
    }

    /// Newest committed generation; 0 if there is none.
    pub(super) fn newest(&self) -> Generation {
        resumable(&self.slots)
            .last()
            .map_or(Generation(0), |marked| marked.record.generation)
    }

    pub(super) fn newest_marked(&self) -> Option<&Marked> {
        resumable(&self.slots).last().copied()
    }

    /// Returns the content of the record slot of `generation`.
    pub(super) fn slot_of(&mut self, generation: Generation) -> &mut SlotContent {
        &mut self.slots[Record::slot(generation)]
    }

    /// Returns the sequence number of the next write to a record slot.
    pub(super) fn next_sequence(&mut self) -> u64 {
        self.sequence += 1;
        self.sequence
    }

    /// Returns the writes that make `slots` empty.
    pub(super) fn voiding(&mut self, slots: &[usize]) -> Vec<(u64, AlignedBytes)> {
        let sequence = self.next_sequence();
        let Entry { area, job_id, .. } = &self.entry;
        let of_slot = |slot: &usize| voiding(area, *job_id, *slot, sequence);
        slots.iter().flat_map(of_slot).collect()
    }

    pub(super) fn clean(&self) -> bool {
        let newest = self.newest_marked();
        newest.is_none_or(|marked| marked.mark != Some(Mark::Overwriting))
    }

    /// Reason why the job's tiles do not move and it cannot be resumed: a record is unreadable.
    pub(super) fn unreadable(&self) -> Option<&str> {
        self.slots.iter().find_map(|slot| match slot {
            SlotContent::Unreadable(why) => Some(why.as_str()),
            SlotContent::Empty | SlotContent::Unknown | SlotContent::Sound(_) => None,
        })
    }

    /// Returns the content of the first or second extent of a tile. `recorded` are the generations that can be resumed. If a
    /// slot is [`SlotContent::Unknown`], a record that cannot be read now is not considered.
    pub(super) fn holds(&self, recorded: &[&Marked], tile: usize, which: u8) -> Holds {
        let state = &self.tiles[tile];
        let newest = recorded.last();
        let clean = newest.is_none_or(|marked| marked.mark != Some(Mark::Overwriting));
        let mut recorded = (recorded.iter()).filter_map(|marked| marked.record.versions[tile]);
        if self.durability() == Durability::None {
            let newest = state.newest().or(recorded.next_back());
            return match (state.activity, newest) {
                (Activity::Writing, _) => Holds::Moving,
                (_, None) => Holds::Nothing,
                (_, Some(version)) => {
                    // Written in place by a process that did not end in order: the bytes belong to no single generation.
                    let known = (clean || state.newest().is_some()) && !state.failed;
                    Holds::Bytes(known.then_some(version.checksum))
                }
            };
        }
        let writing = state.activity == Activity::Writing
            && free_extent(self.durability(), state.committed) == which;
        let written = state.working.is_some_and(|version| version.which == which);
        if writing || written {
            return Holds::Moving;
        }
        (recorded.chain(state.committed))
            .find(|version| version.which == which)
            .map_or(Holds::Nothing, |version| {
                Holds::Bytes(Some(version.checksum))
            })
    }

    pub(super) fn to_job_record(&self) -> JobRecord {
        let generation = |marked: &Marked| GenerationRecord {
            generation: marked.record.generation,
            confirmed: marked.confirmed(),
            blobs: marked.record.blobs.clone(),
        };
        JobRecord {
            definition: self.table.definition.clone(),
            generations: resumable(&self.slots).into_iter().map(generation).collect(),
            clean: self.clean(),
        }
    }
}

impl Job {
    pub(super) fn new(device_count: usize) -> Self {
        Self {
            stored: None,
            defining: None,
            dropping: false,
            local_ranks: 0,
            members: BTreeMap::new(),
            script: None,
            frozen: false,
            broken: None,
            resumed: None,
            working: Generation(0),
            awaiting_confirm: false,
            poison: None,
            gone: None,
            round: None,
            resume_waiters: Vec::new(),
            confirm_waiters: Vec::new(),
            unflushed: vec![false; device_count],
            writes_inflight_count: 0,
            parked: VecDeque::new(),
        }
    }

    pub(super) fn stored(recovered: RecoveredJob, device_count: usize) -> Self {
        let RecoveredJob {
            entry,
            table,
            slots,
            sequence,
        } = recovered;
        Self {
            stored: Some(Stored::new(entry, table, slots, sequence)),
            ..Self::new(device_count)
        }
    }

    /// Bytes reserved on devices, including those of a definition that is being written.
    pub(super) fn reserved_bytes(&self) -> u64 {
        let stored = self.stored.as_ref().map(|s| s.entry.reserved_bytes);
        let defining = self.defining.as_ref().map(|d| d.reserved_bytes);
        stored.or(defining).unwrap_or(0)
    }

    /// Returns the reason why nothing can be written or committed.
    pub(super) fn unusable(&self) -> Option<&Fault> {
        self.poison.as_ref().or(self.gone.as_ref())
    }

    /// Number of local ranks that may still join; 0 for a job that cannot continue.
    pub(super) fn ranks_to_come(&self) -> u32 {
        match self.unusable().or(self.broken.as_ref()) {
            None => (self.local_ranks).saturating_sub(self.members.len() as u32),
            Some(_) => 0,
        }
    }

    /// Checks that a rank may join.
    pub(super) fn check_member(
        &self,
        name: &JobName,
        rank: Rank,
        local_ranks: u32,
    ) -> Result<(), Fault> {
        let busy = |why: String| Err(Fault::new(FaultKind::Busy, why));
        if let Some(fault) = &self.broken {
            return Err(fault.clone());
        }
        if self.dropping {
            return busy(format!("job {name} is being deleted"));
        }
        if self.members.contains_key(&rank) {
            return busy(format!(
                "rank {rank} of job {name} is open already, or its last operations are still ending: try again"
            ));
        }
        if self.members.is_empty() {
            if self.script.is_some() {
                return busy(format!(
                    "the last commit of job {name} is still ending: try again"
                ));
            }
            return Ok(());
        }
        // Before their number is compared: these ranks are ending, and another number may follow them.
        if let Some(fault) = self.unusable() {
            return busy(format!("{}: close the other ranks first", fault.message));
        }
        if local_ranks != self.local_ranks {
            return Err(Fault::new(
                FaultKind::Invalid,
                format!(
                    "rank {rank} of job {name} was started with {local_ranks} local ranks, the others with {}",
                    self.local_ranks
                ),
            ));
        }
        if self.members.len() >= self.local_ranks as usize {
            return busy(format!(
                "all {local_ranks} local ranks of job {name} are open already"
            ));
        }
        Ok(())
    }
}

/// Result of a definition.
pub(in crate::core) enum Define {
    /// The job has these tiles already; they take this many bytes on all devices.
    Known(u64),
    /// The definition is being written: the call waits with the others.
    Waits,
    /// The job is new: its definition has to be added to the catalog.
    New {
        key: JobKey,
        definition: Arc<JobDefinition>,
        local_ranks: u32,
    },
}

impl Data {
    /// # Errors
    /// The job has other tiles, or too many calls wait.
    pub(in crate::core) fn define(
        &mut self,
        call: CallId,
        session: SessionId,
        definition: JobDefinition,
    ) -> Result<Define, Fault> {
        let key = self.sessions[&session].key.clone();
        let job = self.jobs.get_mut(&key).expect("a session's job");
        let known = (job.stored.as_ref().map(|stored| &stored.table.definition))
            .or(job.defining.as_ref().map(|defining| &defining.definition));
        if known.is_some_and(|known| **known != definition) {
            return Err(Fault::new(
                FaultKind::LayoutChanged,
                format!(
                    "job {} exists with other tiles, layout, durability or nodes: use another name, or delete it",
                    key.name
                ),
            ));
        }
        if let Some(stored) = &job.stored {
            return Ok(Define::Known(stored.entry.reserved_bytes));
        }
        if let Some(defining) = &mut job.defining {
            // At most one call per session can be useful; more come from a process that floods.
            if defining.waiters.len() >= 2 * job.local_ranks as usize {
                return Err(Fault::new(
                    FaultKind::TooMany,
                    "the definition is being written: wait for its answer",
                ));
            }
            defining.waiters.push(call);
            return Ok(Define::Waits);
        }
        let definition = Arc::new(definition);
        job.defining = Some(Defining {
            definition: definition.clone(),
            reserved_bytes: 0,
            waiters: vec![call],
        });
        let local_ranks = job.local_ranks;
        Ok(Define::New {
            key,
            definition,
            local_ranks,
        })
    }

    /// Cancels a definition that the catalog refused.
    pub(in crate::core) fn cancel_define(&mut self, key: &JobKey) {
        if let Some(job) = self.jobs.get_mut(key) {
            job.defining = None;
        }
    }

    /// Stores the definition after the catalog names the job, so that its tiles can be used. [`Self::answer_define`] follows.
    pub(in crate::core) fn store(
        &mut self,
        key: &JobKey,
        entry: Entry,
        table: TileTable,
        device_count: usize,
    ) {
        let job = (self.jobs.entry(key.clone())).or_insert_with(|| Job::new(device_count));
        job.stored = Some(Stored::new(
            entry,
            table,
            [SlotContent::Empty, SlotContent::Empty],
            FIRST_SEQUENCE,
        ));
    }

    /// Answers all calls that wait for the definition of a job.
    pub(in crate::core) fn answer_define(
        &mut self,
        key: &JobKey,
        answer: &Result<u64, Fault>,
        ops: &mut Operations,
    ) {
        let Some(job) = self.jobs.get_mut(key) else {
            return;
        };
        for call in job.defining.take().map(|d| d.waiters).unwrap_or_default() {
            let reply = match answer {
                Ok(reserved_bytes) => Ok(Reply::Define {
                    reserved_bytes: *reserved_bytes,
                }),
                Err(fault) => Err(fault.clone()),
            };
            ops.reply(call, reply);
        }
        self.settle(key);
    }

    /// Returns the id of a job that has no sessions.
    ///
    /// # Errors
    /// The job does not exist, is open, or is being deleted.
    pub(in crate::core) fn check_closed(&self, key: &JobKey) -> Result<u64, Fault> {
        self.closed(key).map(|stored| stored.entry.job_id)
    }

    /// Marks the job as being deleted: it cannot be opened any more in this incarnation, even if the deletion fails.
    pub(in crate::core) fn begin_drop(&mut self, key: &JobKey) {
        self.jobs.get_mut(key).expect("it is stored").begin_drop();
    }

    /// Removes a job that the catalog does not name any more. Returns its entry and extents.
    pub(in crate::core) fn drop_job(&mut self, key: &JobKey) -> (Entry, TileTable) {
        let job = self.jobs.remove(key).expect("it is being deleted");
        let stored = job.stored.expect("it is being deleted");
        (stored.entry, stored.table)
    }

    /// Returns the state on devices of a job that has no sessions.
    pub(super) fn closed(&self, key: &JobKey) -> Result<&Stored, Fault> {
        let job = self.jobs.get(key);
        let Some((job, stored)) = job.and_then(|job| Some((job, job.stored.as_ref()?))) else {
            return Err(Fault::new(
                FaultKind::NotFound,
                format!("uid {} has no job {}", key.uid, key.name),
            ));
        };
        if !job.members.is_empty() || job.script.is_some() || job.dropping {
            return Err(Fault::new(
                FaultKind::Busy,
                format!("job {} is open or being deleted: end it first", key.name),
            ));
        }
        Ok(stored)
    }

    pub(super) fn tile_count(&self, key: &JobKey) -> usize {
        let stored = self.jobs[key].stored.as_ref();
        stored.map_or(0, |stored| stored.tiles.len())
    }

    pub(super) fn tile_mut(&mut self, key: &JobKey, tile: TileIndex) -> Option<&mut TileState> {
        let stored = self.jobs.get_mut(key)?.stored.as_mut()?;
        stored.tiles.get_mut(tile.0 as usize)
    }
}
