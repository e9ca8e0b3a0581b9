//! What outlives the daemon: given out when everything has come to rest, and taken up by the next one if it fits its store.
//!
//! Nothing of it is believed: each job is held against what the devices say (its id, where its tiles lie, its newest
//! generation and who wrote that), each session against the settings of this life. What does not fit is left out with the
//! reason; a job's sessions come all or none, as without one of them its generation could not be completed.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};

use offload_api::fault::{Fault, FaultKind};
use offload_api::geometry::{Geometry, SlotClass};
use offload_api::ids::{DeviceIndex, Epoch, Generation, Rank, SessionToken};
use test_hooks::safeguard::{Safeguard, is_disabled};

use super::io::free_extent;
use super::job::{Job, JobKey, Stored};
use super::scratch::ScratchTile;
use super::session::{Session, Stage, ring_entries};
use super::{Core, Peer, Reply};
use crate::handover::message::{self, NO_DEVICE};
use crate::io::SessionId;
use crate::store::definition::JobName;
use crate::store::manifest::{LOCAL_RANKS_MAX, Version};
use crate::store::tile_table::Extent;

/// A session that goes on.
#[derive(Clone, Debug)]
pub struct Adopted {
    /// In this life.
    pub session: SessionId,
    /// Where it stands in the state.
    pub index: usize,
    /// Whose it is.
    pub peer: Peer,
    /// With the peer's uid it names the job.
    pub job: JobName,
    /// Its key.
    pub token: SessionToken,
    /// Of its arena.
    pub geometry: Geometry,
    /// Of each ring.
    pub ring_entries: u32,
}

/// A session of the state whose fields make sense.
struct Checked {
    index: usize,
    rank: Rank,
    peer: Peer,
    token: SessionToken,
    geometry: Geometry,
    iodepth: u32,
    resumed: bool,
    scratch: Vec<ScratchTile>,
}

/// What becomes of a job's tiles.
struct CheckedTiles {
    committed: Option<Vec<Option<Version>>>,
    /// By index: what was written since, and whether the last write failed.
    working: Vec<(usize, Option<Version>, bool)>,
    touched: Vec<bool>,
}

impl Core {
    /// The life that messages must name.
    pub fn epoch(&self) -> Epoch {
        self.epoch
    }

    /// Nothing is in flight, nothing is written, nothing waits for either. Sessions whose memory is still being made may be
    /// there: they are not handed over, and nobody waits for them.
    pub fn is_quiet(&self) -> bool {
        let store_access = |session: &Session| {
            let here = !matches!(session.stage, Stage::Ending { .. });
            session.inflight_count == 0 && here
        };
        self.operations.is_empty()
            && self.scripts.is_empty()
            && self.catalog.is_idle()
            && self.mover.batch.is_none()
            && self.sessions.values().all(store_access)
    }

    /// Everything that the next daemon cannot read from the devices. Calls that still wait for other ranks are not in it:
    /// their processes call again.
    pub fn hand_over(&self) -> message::State {
        assert!(self.is_quiet(), "handed over at rest");
        let used: Vec<(&JobKey, &Job)> = (self.jobs.iter())
            .filter(|(_, job)| !job.members.is_empty() && job.broken.is_none())
            .collect();
        let place = |key: &JobKey| used.iter().position(|(other, _)| *other == key);
        let live = (self.sessions.iter()).filter(|(_, session)| session.stage == Stage::Live);
        let sessions = live.filter_map(|(id, session)| {
            Some(message::Session {
                number: id.0,
                job: place(&session.key)? as u32,
                rank: session.rank.0,
                pid: session.pid,
                token: session.token.0.to_vec(),
                classes: (session.geometry.classes())
                    .map(|class| message::Class {
                        slot_bytes: class.slot_bytes,
                        slot_count: class.slot_count,
                    })
                    .collect(),
                iodepth: session.iodepth,
                resumed: session.resumed,
                submission_head: 0,
                completion_tail: 0,
                scratch: (session.scratch.iter())
                    .map(|tile| message::Scratch {
                        device: self.number_of(tile.extent.device),
                        offset: tile.extent.offset,
                        bytes: tile.bytes() as u32,
                        written: (tile.content).map(|version| self.written(version, tile.extent)),
                    })
                    .collect(),
            })
        });
        message::State {
            store: self.catalog.catalog.store.0.to_vec(),
            epoch: self.epoch.0,
            devices: (self.devices.iter())
                .map(|device| device.phase.map_or(NO_DEVICE, |_| device.superblock.number))
                .collect(),
            sessions: sessions.collect(),
            jobs: used
                .iter()
                .map(|(key, job)| self.job_state(key, job))
                .collect(),
            handover: 0,
            catalog: self.catalog.catalog.sequence,
            catalog_unsure: self.catalog.is_unsure(),
        }
    }

    fn job_state(&self, key: &JobKey, job: &Job) -> message::Job {
        let touched = job
            .touched
            .iter()
            .enumerate()
            .filter(|(device, touched)| **touched && self.devices[*device].phase.is_some());
        let tiles = job.stored.iter().flat_map(|stored| {
            let written = (stored.tiles.iter().enumerate())
                .filter(|(_, tile)| tile.working.is_some() || tile.failed);
            written.map(|(index, tile)| message::Tile {
                index: index as u32,
                written: tile.working.map(|version| {
                    let extents = &stored.table.extents[index];
                    self.written(version, extents[usize::from(version.which)])
                }),
                failed: tile.failed,
            })
        });
        message::Job {
            uid: key.uid,
            name: key.name.as_str().into(),
            stored: job.stored.as_ref().map(status),
            local_ranks: job.local_ranks,
            resumed: job.resumed.map(|generation| generation.0),
            working: job.working.0,
            awaiting_confirm: job.awaiting_confirm,
            poison: job.poison.as_ref().map(fault_state),
            gone: job.gone.as_ref().map(fault_state),
            touched: touched
                .map(|(device, _)| self.number_of(DeviceIndex(device as u32)))
                .collect(),
            tiles: tiles.collect(),
        }
    }

    fn written(&self, version: Version, extent: Extent) -> message::Written {
        message::Written {
            which: version.which.into(),
            checksum: version.checksum,
            generation: version.generation.0,
            device: self.number_of(extent.device),
            offset: extent.offset,
        }
    }

    fn number_of(&self, device: DeviceIndex) -> u32 {
        self.devices[device.0 as usize].superblock.number
    }

    fn device_of(&self, number: u32) -> Result<DeviceIndex, String> {
        let found = (self.devices.iter()).position(|d| d.superblock.number == number);
        found
            .map(|index| DeviceIndex(index as u32))
            .ok_or_else(|| format!("the store has no device {number}"))
    }

    /// Takes up what the daemon before handed over, at a start and before anything else: the sessions that go on, and one
    /// line for each job that does not. `has_descriptors`: of the session with this place in the state.
    ///
    /// # Errors
    /// All of it belongs to another store, or to this one before another daemon served it, or with other devices.
    pub fn adopt(
        &mut self,
        state: &message::State,
        has_descriptors: impl Fn(usize) -> bool,
    ) -> Result<(Vec<Adopted>, Vec<String>), String> {
        assert!(self.sessions.is_empty(), "before anybody has come");
        if state.store != self.catalog.catalog.store.0 {
            return Err(format!(
                "it belongs to another store than {}",
                self.catalog.catalog.store
            ));
        }
        let found = self.catalog.catalog.sequence;
        let since = found.checked_sub(state.catalog);
        let none_since = since == Some(0) || (state.catalog_unsure && since == Some(1));
        if !none_since && !is_disabled(Safeguard::Lives) {
            return Err(format!(
                "another daemon has served the store since, or devices were added or drained: its catalog has number {found}, \
                 {} was handed over",
                state.catalog
            ));
        }
        // Completions name devices by their place in the list that the process was given. Behind one that left in the last
        // life the others move up: then they would name another one.
        let numbers = self.numbers();
        let mut told = state.devices.iter().enumerate();
        if told.any(|(index, number)| *number != NO_DEVICE && numbers.get(index) != Some(number)) {
            return Err(format!(
                "it knows the devices {:?} in this order, the store has {:?}",
                state.devices, numbers
            ));
        }
        if state.epoch == 0 {
            return Err("its epoch is 0".into());
        }
        let mut sessions: BTreeMap<usize, Vec<usize>> = BTreeMap::new();
        for (index, session) in state.sessions.iter().enumerate() {
            sessions
                .entry(session.job as usize)
                .or_default()
                .push(index);
        }
        let (mut adopted, mut left_out) = (Vec::new(), Vec::new());
        let same = |job: &message::Job| {
            let named = |other: &&message::Job| (other.uid, &other.name) == (job.uid, &job.name);
            state.jobs.iter().filter(named).count()
        };
        for (place, indices) in sessions {
            let Some(job) = state.jobs.get(place) else {
                left_out.push(format!("{} sessions of no job", indices.len()));
                continue;
            };
            let space = self.space.clone();
            let done = if same(job) > 1 {
                Err("it stands there twice".into())
            } else if indices.iter().all(|index| has_descriptors(*index)) {
                self.adopt_job(state, job, &indices, adopted.len())
            } else {
                Err("descriptors of its sessions are missing".into())
            };
            match done {
                Ok(mut sessions) => adopted.append(&mut sessions),
                Err(why) => {
                    self.space = space;
                    left_out.push(format!("job {} of uid {}: {why}", job.name, job.uid));
                }
            }
        }
        if !adopted.is_empty() {
            self.epoch = Epoch(state.epoch);
        }
        Ok((adopted, left_out))
    }

    /// Changes nothing but the space when it fails.
    fn adopt_job(
        &mut self,
        state: &message::State,
        job: &message::Job,
        indices: &[usize],
        already: usize,
    ) -> Result<Vec<Adopted>, String> {
        let name = JobName::new(job.name.clone()).map_err(|fault| fault.message)?;
        let key = JobKey::new(job.uid, name);
        let tiles = self.check_tiles(&key, job)?;
        let poison = job.poison.as_ref().map(checked_fault).transpose()?;
        let gone = job.gone.as_ref().map(checked_fault).transpose()?;
        if job.local_ranks == 0
            || job.local_ranks > LOCAL_RANKS_MAX
            || indices.len() > job.local_ranks as usize
        {
            return Err(format!(
                "{} sessions of {} local ranks",
                indices.len(),
                job.local_ranks
            ));
        }
        if indices.len() + already > self.limits.sessions_max as usize {
            return Err(format!(
                "the settings allow {} sessions",
                self.limits.sessions_max
            ));
        }
        let mut checked = Vec::new();
        for &index in indices {
            let session = self.check_session(&key, job, index, &state.sessions[index])?;
            checked.push(session);
        }
        let ranks: BTreeSet<Rank> = checked.iter().map(|session| session.rank).collect();
        let tokens: HashSet<SessionToken> = checked.iter().map(|session| session.token).collect();
        if ranks.len() < checked.len() || tokens.len() < checked.len() {
            return Err("two of its sessions have one rank or one token".into());
        }
        if tokens.iter().any(|token| self.tokens.contains_key(token)) {
            return Err("another job's session has a token of its".into());
        }
        let asked: u64 = checked.iter().map(|s| s.geometry.arena_bytes()).sum();
        if asked > self.arena_free_bytes() {
            return Err(format!(
                "its sessions have {asked} bytes of host memory, the settings leave {}",
                self.arena_free_bytes()
            ));
        }

        let device_count = self.devices.len();
        let into = (self.jobs.entry(key.clone())).or_insert_with(|| Job::new(device_count));
        into.local_ranks = job.local_ranks;
        into.resumed = job.resumed.map(Generation);
        into.working = Generation(job.working);
        into.awaiting_confirm = job.awaiting_confirm;
        into.poison = poison;
        into.gone = gone;
        into.touched = tiles.touched;
        if let Some(stored) = &mut into.stored {
            if let Some(committed) = tiles.committed {
                for (tile, version) in stored.tiles.iter_mut().zip(committed) {
                    tile.committed = version;
                }
            }
            for (index, working, failed) in tiles.working {
                let tile = &mut stored.tiles[index];
                (tile.working, tile.failed) = (working, failed);
                stored.failed_count += usize::from(failed);
            }
        }
        let begin = |checked| self.begin_again(&key, checked);
        Ok(checked.into_iter().map(begin).collect())
    }

    fn begin_again(&mut self, key: &JobKey, checked: Checked) -> Adopted {
        let id = SessionId(self.number());
        let adopted = Adopted {
            session: id,
            index: checked.index,
            peer: checked.peer,
            job: key.name.clone(),
            token: checked.token,
            geometry: checked.geometry.clone(),
            ring_entries: ring_entries(checked.iodepth),
        };
        self.arena_used_bytes += checked.geometry.arena_bytes();
        self.tokens.insert(checked.token, id);
        let job = self.jobs.get_mut(key).expect("just made");
        job.members.insert(checked.rank, id);
        let session = Session {
            key: key.clone(),
            rank: checked.rank,
            uid: checked.peer.uid,
            pid: checked.peer.pid,
            token: checked.token,
            geometry: checked.geometry,
            iodepth: checked.iodepth,
            ring_entries: adopted.ring_entries,
            stage: Stage::Live,
            busy_slots: HashSet::new(),
            inflight_count: 0,
            tickets: HashMap::new(),
            resumed: checked.resumed,
            scratch: checked.scratch,
        };
        self.sessions.insert(id, session);
        adopted
    }

    fn check_tiles(&self, key: &JobKey, job: &message::Job) -> Result<CheckedTiles, String> {
        let mut touched = vec![false; self.devices.len()];
        for number in &job.touched {
            touched[self.device_of(*number)?.0 as usize] = true;
        }
        let mut checked = CheckedTiles {
            committed: None,
            working: Vec::new(),
            touched,
        };
        let stored = self.jobs.get(key).and_then(|job| job.stored.as_ref());
        let found = stored.map(status);
        if found != job.stored {
            let words = |status: Option<message::Stored>| match status {
                None => "no tiles".to_owned(),
                Some(status) => format!(
                    "id {}, revision {}, generation {} written by {:x}",
                    status.job_id, status.revision, status.newest, status.newest_epoch
                ),
            };
            return Err(format!(
                "the devices have {}, it was handed over with {}",
                words(found),
                words(job.stored)
            ));
        }
        let Some(stored) = stored else {
            return match (job.resumed, job.tiles.is_empty()) {
                (None, true) => Ok(checked),
                _ => Err("it has resumed without tiles".into()),
            };
        };
        if let Some(why) = stored.unreadable() {
            return Err(format!("{why}: it may be its newest generation"));
        }
        if job.resumed.is_none() {
            return match (job.working, job.tiles.is_empty()) {
                (0, true) => Ok(checked),
                _ => Err("something was written before it resumed".into()),
            };
        }
        let newest = stored.newest();
        if job.working != newest.0 + 1 {
            return Err(format!(
                "it works on generation {}, the newest one is {newest}",
                job.working
            ));
        }
        let committed = stored.newest_marked().map(|marked| &marked.record.versions);
        let mut last = None;
        for tile in &job.tiles {
            let index = tile.index as usize;
            if index >= stored.tiles.len() || last.is_some_and(|last| last >= index) {
                return Err(format!(
                    "its tile {index} is out of order, or it has none such"
                ));
            }
            last = Some(index);
            let before = committed.and_then(|versions| versions[index]);
            let which = free_extent(stored.durability(), before);
            let version = match &tile.written {
                None => None,
                Some(written) => {
                    let expected = stored.table.extents[index][usize::from(which)];
                    if self.extent_of(written)? != expected
                        || written.which != u32::from(which)
                        || written.generation != job.working
                    {
                        return Err(format!(
                            "what was written to its tile {index} does not lie where the devices have it"
                        ));
                    }
                    Some(Version {
                        generation: Generation(written.generation),
                        checksum: written.checksum,
                        which,
                    })
                }
            };
            checked.working.push((index, version, tile.failed));
        }
        checked.committed = committed.map(|versions| versions.to_vec());
        Ok(checked)
    }

    fn extent_of(&self, written: &message::Written) -> Result<Extent, String> {
        Ok(Extent {
            device: self.device_of(written.device)?,
            offset: written.offset,
        })
    }

    /// Takes the space of its own tiles.
    fn check_session(
        &mut self,
        key: &JobKey,
        job: &message::Job,
        index: usize,
        session: &message::Session,
    ) -> Result<Checked, String> {
        let rank = Rank(session.rank);
        let wrong = |what: String| Err(format!("rank {rank}: {what}"));
        let Some(token) = SessionToken::from_bytes(&session.token) else {
            return wrong(format!("a token of {} bytes", session.token.len()));
        };
        if session.iodepth == 0 || session.iodepth > self.limits.iodepth_max {
            return wrong(format!(
                "{} operations in flight; the settings allow {}",
                session.iodepth, self.limits.iodepth_max
            ));
        }
        if session.resumed && job.resumed.is_none() {
            return wrong("it has resumed and its job has not".into());
        }
        let classes = session.classes.iter().map(|class| SlotClass {
            slot_bytes: class.slot_bytes,
            slot_count: class.slot_count,
        });
        let geometry = match Geometry::new(&classes.collect::<Vec<_>>()) {
            Ok(geometry) => geometry,
            Err(error) => return wrong(error.to_string()),
        };
        if !session.scratch.is_empty() && job.stored.is_none() {
            return wrong("tiles of its own, and its job has none".into());
        }
        let mut scratch = Vec::with_capacity(session.scratch.len());
        for tile in &session.scratch {
            let extent = Extent {
                device: self.device_of(tile.device)?,
                offset: tile.offset,
            };
            let block = u64::from(offload_api::BLOCK_BYTES);
            let aligned =
                extent.offset.is_multiple_of(block) && u64::from(tile.bytes).is_multiple_of(block);
            if !aligned || !self.space.take(extent, tile.bytes.into()) {
                return wrong(format!(
                    "a tile of its own of {} bytes at {} of device {} is not free",
                    tile.bytes, tile.offset, tile.device
                ));
            }
            let content = match &tile.written {
                None => None,
                Some(written) if self.extent_of(written)? == extent && written.which == 0 => {
                    Some(Version {
                        generation: Generation(written.generation),
                        checksum: written.checksum,
                        which: 0,
                    })
                }
                Some(_) => return wrong("a tile of its own lies elsewhere".into()),
            };
            scratch.push(ScratchTile::new(extent, tile.bytes, content));
        }
        Ok(Checked {
            index,
            rank,
            peer: Peer {
                uid: key.uid,
                pid: session.pid,
            },
            token,
            geometry,
            iodepth: session.iodepth,
            resumed: session.resumed,
            scratch,
        })
    }

    pub(super) fn reattach(&self, id: SessionId) -> Reply {
        let session = &self.sessions[&id];
        let job = &self.jobs[&session.key];
        Reply::Reattach {
            epoch: self.epoch,
            working: session.resumed.then_some(job.working),
            confirmed: !job.awaiting_confirm,
            scratch_count: session.scratch.len() as u32,
        }
    }
}

fn status(stored: &Stored) -> message::Stored {
    let newest = stored.newest_marked().map(|marked| &marked.record);
    message::Stored {
        job_id: stored.entry.job_id,
        revision: stored.table.revision,
        newest: newest.map_or(0, |record| record.generation.0),
        newest_epoch: newest.map_or(0, |record| record.epoch.0),
    }
}

fn fault_state(fault: &Fault) -> message::Fault {
    message::Fault {
        kind: fault.kind as u32,
        message: fault.message.clone(),
    }
}

fn checked_fault(fault: &message::Fault) -> Result<Fault, String> {
    let kind = FaultKind::from_number(fault.kind)
        .ok_or_else(|| format!("a fault of the unknown kind {}", fault.kind))?;
    Ok(Fault::new(kind, fault.message.clone()))
}
