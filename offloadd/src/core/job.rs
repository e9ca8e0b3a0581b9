//! A job in memory: its tiles, its members, and where it goes on from.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use offload_api::fault::{Fault, FaultKind};
use offload_api::ids::{DeviceIndex, Generation, Rank, TileIndex};
use offload_api::removable::{Mechanism, removed};

use super::catalog_queue::Work;
use super::commit::Round;
use super::io::ParkedWrite;
use super::script::{Failed, Purpose, ScriptId, Step};
use super::{Action, CallId, Core, GenerationRecord, JobRecord, Reply, SessionId, next, refuse};
use crate::blocks::AlignedBytes;
use crate::store::BLOCK;
use crate::store::catalog::Entry;
use crate::store::definition::{Durability, JobDefinition, JobName};
use crate::store::manifest::{
    Mark, Marked, Record, SlotContent, Version, record_bytes_max, resumable,
};
use crate::store::recover::RecoveredJob;
use crate::store::tile_table::TileTable;

/// A job's name in the whole store.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct JobKey {
    pub(super) uid: u32,
    pub(super) name: JobName,
}

impl JobKey {
    pub(super) fn new(uid: u32, name: JobName) -> Self {
        Self { uid, name }
    }
}

pub(super) struct Job {
    /// Absent before its definition is in the catalog.
    pub(super) stored: Option<Stored>,
    pub(super) defining: Option<Defining>,
    /// Its catalog entry is being removed, or may be gone.
    pub(super) dropping: bool,
    pub(super) local_ranks: u32,
    /// Ended sessions stay until their last operation.
    pub(super) members: BTreeMap<Rank, SessionId>,
    pub(super) script: Option<ScriptId>,
    /// Where the members went on from.
    pub(super) resumed: Option<Generation>,
    pub(super) working: Generation,
    /// The newest generation is prepared here, not yet everywhere.
    pub(super) awaiting_confirm: bool,
    /// A flush or a record failed: nothing is durable any more.
    pub(super) poison: Option<Fault>,
    /// A member went: the working generation cannot be completed.
    pub(super) gone: Option<Fault>,
    pub(super) round: Option<Round>,
    pub(super) resume_waiters: Vec<(CallId, SessionId)>,
    pub(super) confirm_waiters: Vec<CallId>,
    /// Devices written to since the last commit.
    pub(super) touched: Vec<bool>,
    pub(super) writes_inflight_count: u32,
    /// Writes that wait for the overwriting mark.
    pub(super) parked: VecDeque<ParkedWrite>,
}

pub(super) struct Defining {
    definition: Arc<JobDefinition>,
    pub(super) waiters: Vec<CallId>,
}

/// What the devices know of a job.
pub(super) struct Stored {
    pub(super) entry: Entry,
    pub(super) table: TileTable,
    pub(super) slots: [SlotContent; 2],
    pub(super) tiles: Vec<TileState>,
    /// Tiles whose last write failed.
    pub(super) failed_count: usize,
}

#[derive(Clone, Copy, Debug, Default)]
pub(super) struct TileState {
    /// In the generation gone on from, or the last commit.
    pub(super) committed: Option<Version>,
    /// Written since.
    pub(super) working: Option<Version>,
    pub(super) activity: Activity,
    /// The last write failed: neither version is what the job thinks it is.
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

impl TileState {
    pub(super) fn newest(&self) -> Option<Version> {
        self.working.or(self.committed)
    }
}

impl Stored {
    pub(super) fn new(entry: Entry, table: TileTable, slots: [SlotContent; 2]) -> Self {
        let tiles = vec![TileState::default(); table.extents.len()];
        Self {
            entry,
            table,
            slots,
            tiles,
            failed_count: 0,
        }
    }

    pub(super) fn durability(&self) -> Durability {
        self.table.definition.durability()
    }

    /// 0 = none yet.
    pub(super) fn newest(&self) -> Generation {
        resumable(&self.slots)
            .last()
            .map_or(Generation(0), |marked| marked.record.generation)
    }

    pub(super) fn newest_marked(&self) -> Option<&Marked> {
        resumable(&self.slots).last().copied()
    }

    /// The content of the slot of `generation`.
    pub(super) fn slot_of(&mut self, generation: Generation) -> &mut SlotContent {
        &mut self.slots[Record::slot(generation)]
    }

    fn clean(&self) -> bool {
        let newest = self.newest_marked();
        newest.is_none_or(|marked| marked.mark != Some(Mark::Overwriting))
    }

    pub(super) fn to_job_record(&self) -> JobRecord {
        let generation = |marked: &Marked| GenerationRecord {
            generation: marked.record.generation,
            confirmed: marked.confirmed(),
            blobs: marked.record.blobs.to_vec(),
        };
        JobRecord {
            definition: self.table.definition.clone(),
            generations: resumable(&self.slots).into_iter().map(generation).collect(),
            clean: self.clean(),
        }
    }

    /// Whether `generation` can be gone on from.
    fn check_resume(&self, name: &JobName, generation: Generation) -> Result<(), Fault> {
        if !self.clean() {
            return Err(Fault::new(
                FaultKind::Unclean,
                format!(
                    "job {name} has durability none: its tiles are written in place, and it did not end in order, so they are of no one generation. Drop the job and start again, or use durability committed"
                ),
            ));
        }
        let list = resumable(&self.slots);
        let newest_unconfirmed = list.last().is_some_and(|marked| !marked.confirmed());
        let numbers: Vec<u64> = list.iter().map(|m| m.record.generation.0).collect();
        let known = match generation.0 {
            // From nothing: there is nothing, or only a first generation that other nodes do not have.
            0 => numbers.is_empty() || (numbers == [1] && newest_unconfirmed),
            _ => numbers.contains(&generation.0),
        };
        if !known {
            return Err(Fault::new(
                FaultKind::WrongGeneration,
                format!(
                    "job {name} cannot go on from generation {generation}: the store has {numbers:?} (drop the job to start from nothing)"
                ),
            ));
        }
        let in_place = self.durability() == Durability::None;
        if in_place && generation.0 > 0 && generation != self.newest() {
            return Err(Fault::new(
                FaultKind::Unclean,
                format!(
                    "job {name} has durability none: generation {generation} was written over by {}",
                    self.newest()
                ),
            ));
        }
        Ok(())
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
            resumed: None,
            working: Generation(0),
            awaiting_confirm: false,
            poison: None,
            gone: None,
            round: None,
            resume_waiters: Vec::new(),
            confirm_waiters: Vec::new(),
            touched: vec![false; device_count],
            writes_inflight_count: 0,
            parked: VecDeque::new(),
        }
    }

    pub(super) fn stored(recovered: RecoveredJob, device_count: usize) -> Self {
        let RecoveredJob {
            entry,
            table,
            slots,
        } = recovered;
        Self {
            stored: Some(Stored::new(entry, table, slots)),
            ..Self::new(device_count)
        }
    }

    /// Why nothing can be written or committed any more.
    pub(super) fn unusable(&self) -> Option<&Fault> {
        self.poison.as_ref().or(self.gone.as_ref())
    }

    /// Whether a new rank may come.
    pub(super) fn check_member(
        &self,
        name: &JobName,
        rank: Rank,
        local_ranks: u32,
    ) -> Result<(), Fault> {
        let busy = |why: String| Err(Fault::new(FaultKind::Busy, why));
        if self.dropping {
            return busy(format!("job {name} is being dropped"));
        }
        if self.members.contains_key(&rank) {
            return busy(format!(
                "rank {rank} of job {name} is open already, or its last operations are still ending: try again"
            ));
        }
        if self.members.is_empty() {
            if self.script.is_some() {
                return busy(format!("job {name} still ends its last commit: try again"));
            }
            return Ok(());
        }
        if local_ranks != self.local_ranks {
            return Err(Fault::new(
                FaultKind::Invalid,
                format!(
                    "rank {rank} of job {name} says {local_ranks} local ranks, the others said {}",
                    self.local_ranks
                ),
            ));
        }
        if self.members.len() >= self.local_ranks as usize {
            return busy(format!(
                "job {name} has its {local_ranks} local ranks already"
            ));
        }
        if let Some(fault) = self.unusable() {
            return busy(format!("{}: close the other ranks first", fault.message));
        }
        Ok(())
    }
}

impl Core {
    pub(super) fn define(
        &mut self,
        call: CallId,
        session: SessionId,
        definition: JobDefinition,
        actions: &mut Vec<Action>,
    ) -> Result<Option<Reply>, Fault> {
        let key = self.sessions[&session].key.clone();
        let job = self.jobs.get_mut(&key).expect("a session's job");
        let known = (job.stored.as_ref().map(|stored| &stored.table.definition))
            .or(job.defining.as_ref().map(|defining| &defining.definition));
        if known.is_some_and(|known| **known != definition) {
            return Err(Fault::new(
                FaultKind::LayoutChanged,
                format!(
                    "job {} exists with other tiles, layout, durability or nodes: use another name, or drop it",
                    key.name
                ),
            ));
        }
        if let Some(stored) = &job.stored {
            return Ok(Some(Reply::Define {
                reserved_bytes: stored.entry.reserved_bytes,
            }));
        }
        if let Some(defining) = &mut job.defining {
            // At most one a session waits usefully; more come from a peer that floods.
            if defining.waiters.len() >= 2 * job.local_ranks as usize {
                return Err(Fault::new(
                    FaultKind::TooMany,
                    "the definition is being written: wait for its answer",
                ));
            }
            defining.waiters.push(call);
            return Ok(None);
        }
        let definition = Arc::new(definition);
        job.defining = Some(Defining {
            definition: definition.clone(),
            waiters: vec![call],
        });
        let work = Work::Define {
            key: key.clone(),
            definition,
            local_ranks: job.local_ranks,
        };
        if let Err(fault) = self.change_catalog(work, actions) {
            let job = self.jobs.get_mut(&key).expect("a session's job");
            job.defining = None;
            return Err(fault);
        }
        Ok(None)
    }

    pub(super) fn drop_job(
        &mut self,
        call: CallId,
        key: JobKey,
        actions: &mut Vec<Action>,
    ) -> Result<Option<Reply>, Fault> {
        self.droppable(&key)?;
        self.change_catalog(Work::Drop { key, call }, actions)?;
        Ok(None)
    }

    pub(super) fn droppable(&self, key: &JobKey) -> Result<&Stored, Fault> {
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
                format!("job {} is open or being dropped: end it first", key.name),
            ));
        }
        Ok(stored)
    }

    pub(super) fn resume(
        &mut self,
        call: CallId,
        session: SessionId,
        generation: Generation,
        actions: &mut Vec<Action>,
    ) -> Result<Option<Reply>, Fault> {
        let key = self.sessions[&session].key.clone();
        let already = self.sessions[&session].resumed;
        let job = self.jobs.get_mut(&key).expect("a session's job");
        if let Some(fault) = job.unusable() {
            return Err(fault.clone());
        }
        let waits = (job.resume_waiters.iter()).any(|(_, waiter)| *waiter == session);
        if already || waits {
            return Err(Fault::new(
                FaultKind::Invalid,
                "the session has resumed already: open a new one to go back",
            ));
        }
        let Some(stored) = &mut job.stored else {
            return Err(Fault::new(
                FaultKind::NotFound,
                format!("job {} has no tiles yet: define them first", key.name),
            ));
        };
        if let Some(chosen) = job.resumed {
            if chosen != generation {
                return Err(Fault::new(
                    FaultKind::WrongGeneration,
                    format!(
                        "another rank of job {} goes on from generation {chosen}, this one wants {generation}",
                        key.name
                    ),
                ));
            }
            job.resume_waiters.push((call, session));
            if job.script.is_none() {
                self.answer_resume(&key, &Ok(()), actions);
            }
            return Ok(None);
        }
        stored.check_resume(&key.name, generation)?;
        let steps = give_up_steps(stored, generation);
        job.resumed = Some(generation);
        job.working = next(generation);
        job.resume_waiters.push((call, session));
        let purpose = Purpose::GiveUp { key, generation };
        self.run_script(purpose, steps, actions);
        Ok(None)
    }

    /// Later generations are gone for good, and the one chosen counts as confirmed.
    pub(super) fn finish_give_up(
        &mut self,
        key: &JobKey,
        generation: Generation,
        result: Result<(), Failed>,
        actions: &mut Vec<Action>,
    ) {
        let job = self.jobs.get_mut(key).expect("a script's job");
        let stored = job.stored.as_mut().expect("it resumes");
        for slot in &mut stored.slots {
            if is_given_up(slot, generation) {
                *slot = match result {
                    Ok(()) => SlotContent::Empty,
                    Err(_) => SlotContent::Unknown,
                };
            }
        }
        let answer = match result {
            Ok(()) => {
                let mut versions = None;
                if let (SlotContent::Sound(marked), true) =
                    (stored.slot_of(generation), generation.0 > 0)
                {
                    if !marked.confirmed() {
                        marked.mark = Some(Mark::Confirmed);
                    }
                    versions = Some(marked.record.versions.clone());
                }
                for (index, tile) in stored.tiles.iter_mut().enumerate() {
                    tile.committed = versions.as_ref().and_then(|versions| versions[index]);
                }
                Ok(())
            }
            Err(failed) => {
                let fault = poison(&key.name, "giving up later generations", &failed.fault);
                job.poison = Some(fault.clone());
                Err(fault)
            }
        };
        self.answer_resume(key, &answer, actions);
    }

    fn answer_resume(
        &mut self,
        key: &JobKey,
        answer: &Result<(), Fault>,
        actions: &mut Vec<Action>,
    ) {
        let job = self.jobs.get_mut(key).expect("a session's job");
        let working_generation = next(job.resumed.expect("it resumes"));
        for (call, session) in std::mem::take(&mut job.resume_waiters) {
            let reply = match answer {
                Ok(()) => Ok(Reply::Resume { working_generation }),
                Err(fault) => Err(fault.clone()),
            };
            if let (Ok(_), Some(session)) = (&reply, self.sessions.get_mut(&session)) {
                session.resumed = true;
            }
            actions.push(Action::Reply { call, reply });
        }
    }

    /// A member ended: what the job was about to make durable cannot be completed.
    pub(super) fn lose_member(&mut self, id: SessionId, actions: &mut Vec<Action>) {
        let session = &self.sessions[&id];
        let (key, rank) = (session.key.clone(), session.rank);
        let job = self.jobs.get_mut(&key).expect("a session's job");
        if job.resumed.is_none() {
            return;
        }
        let fault = Fault::new(
            FaultKind::Poisoned,
            format!(
                "rank {rank} of job {} is gone: generation {} cannot be completed; close all ranks and resume",
                key.name, job.working
            ),
        );
        job.gone.get_or_insert_with(|| fault.clone());
        // A round whose record is being written goes on: it is complete.
        if job.round.as_ref().is_some_and(|round| !round.running) {
            let round = job.round.take().expect("just seen");
            for (call, _) in round.calls.into_values() {
                refuse(call, fault.clone(), actions);
            }
        }
        let (dead, kept): (VecDeque<_>, VecDeque<_>) = std::mem::take(&mut job.parked)
            .into_iter()
            .partition(|parked| parked.session == id);
        job.parked = kept;
        for parked in dead {
            self.unstart_write(&parked);
        }
    }

    /// A job whose last session and script have ended forgets what was not committed.
    pub(super) fn settle(&mut self, key: &JobKey) {
        let Some(job) = self.jobs.get_mut(key) else {
            return;
        };
        if !job.members.is_empty() || job.script.is_some() {
            return;
        }
        let device_count = job.touched.len();
        let fresh = Job {
            stored: job.stored.take(),
            defining: job.defining.take(),
            dropping: job.dropping,
            ..Job::new(device_count)
        };
        assert!(job.writes_inflight_count == 0 || removed(Mechanism::ReclaimAfterIo));
        *job = fresh;
        if let Some(stored) = &mut job.stored {
            stored.failed_count = 0;
            stored.tiles.fill(TileState::default());
        } else if job.defining.is_none() {
            self.jobs.remove(key);
        }
    }

    /// A flush of `device` failed: no job may believe that what it wrote there is still to be flushed.
    pub(super) fn poison_writers_of(&mut self, device: DeviceIndex, fault: &Fault) {
        for (key, job) in &mut self.jobs {
            if job.touched[device.0 as usize] {
                job.poison
                    .get_or_insert_with(|| poison(&key.name, "a flush", fault));
            }
        }
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

/// The fault of a job that can make nothing durable any more.
pub(super) fn poison(name: &JobName, doing: &str, cause: &Fault) -> Fault {
    Fault::new(
        FaultKind::Poisoned,
        format!(
            "job {name}: {doing} failed ({}); its working generation is abandoned. Mend the device, close all ranks and resume from the last commit",
            cause.message
        ),
    )
}

/// Room for blobs of this many ranks was reserved.
pub(super) fn blob_room_ranks(stored: &Stored) -> u32 {
    let tile_count = stored.tiles.len();
    let room = stored.entry.area.record_bytes_max - record_bytes_max(tile_count, 0);
    let a_rank = offload_api::BLOB_BYTES_MAX as u64 + 8;
    (room.div_ceil(a_rank)) as u32
}

fn is_given_up(slot: &SlotContent, generation: Generation) -> bool {
    match slot {
        SlotContent::Empty => false,
        SlotContent::Unknown => true,
        SlotContent::Sound(marked) => marked.record.generation > generation,
    }
}

/// Before a write is accepted: whatever claims to be later than `generation` is overwritten, and `generation` itself is
/// marked, because the one before it is written over from now on.
fn give_up_steps(stored: &Stored, generation: Generation) -> Vec<Step> {
    let area = &stored.entry.area;
    let mut writes = Vec::new();
    for (slot, content) in stored.slots.iter().enumerate() {
        if is_given_up(content, generation) {
            let places = area.records(slot).into_iter().chain(area.marks(slot));
            writes.extend(places.map(|offset| (offset, AlignedBytes::zeroed(BLOCK as usize))));
        }
    }
    if let Some(marked) = (stored.slots.iter().filter_map(SlotContent::sound))
        .find(|marked| marked.record.generation == generation && !marked.confirmed())
    {
        let mark = marked.record.encode_mark(Mark::Confirmed);
        let places = area.marks(Record::slot(generation));
        writes.extend(places.map(|offset| (offset, mark.clone())));
    }
    if writes.is_empty() {
        return Vec::new();
    }
    vec![Step::writes(writes), Step::flush([DeviceIndex(0)])]
}
