//! Hands jobs and sessions over to the next daemon when no operation is in flight, and adopts them from the previous one if
//! they fit the store.
//!
//! The state is not trusted: each job is compared with the devices (its id, its extents, its newest generation and that
//! generation's writer), each session with the settings. What does not fit is left out with a reason. The sessions of a job are
//! adopted all or none, because without one of them its generation could not be completed.

use std::collections::{BTreeSet, HashMap, HashSet};

use offload_api::fault::{Fault, FaultKind};
use offload_api::geometry::{Geometry, SlotClass};
use offload_api::ids::{DeviceIndex, Epoch, Generation, Rank, SessionToken};
use offload_support::units::ApproxBytes;

use super::job::{Job, RankState};
use super::quota::Admission;
use super::session::{ScratchTile, Session, Stage, ring_entries};
use super::stored::{StoredJob, free_extent};
use super::{Data, JobKey};
use crate::core::Peer;
use crate::core::operations::Operations;
use crate::handover::message;
use crate::io::SessionId;
use crate::store::definition::JobName;
use crate::store::manifest::{LOCAL_RANKS_MAX, Version};
use crate::store::tile_table::Extent;

/// An adopted session.
#[derive(Clone, Debug)]
pub struct AdoptedSession {
    /// Number in this incarnation.
    pub session: SessionId,
    /// Index in the handed-over state.
    pub index: usize,
    /// Process that has the session.
    pub peer: Peer,
    /// Name of the job among those of the peer's uid.
    pub job: JobName,
    pub token: SessionToken,
    /// Geometry of the arena.
    pub geometry: Geometry,
    /// Entries of each ring.
    pub ring_entries: u32,
}

/// A handed-over session whose fields are valid.
struct CheckedSession {
    index: usize,
    rank: Rank,
    peer: Peer,
    token: SessionToken,
    geometry: Geometry,
    iodepth: u32,
    resumed: bool,
    scratch: Vec<ScratchTile>,
}

/// State of a job's tiles.
struct CheckedTiles {
    committed: Option<Vec<Option<Version>>>,
    /// Tile index, version written since the last commit, and whether the last write failed.
    working: Vec<(usize, Option<Version>, bool)>,
    unflushed: Vec<bool>,
}

/// A job with its sessions, all of which fit the store; their space is not reserved yet.
pub(in crate::core) struct CheckedJob {
    key: JobKey,
    tiles: CheckedTiles,
    poison: Option<Fault>,
    gone: Option<Fault>,
    sessions: Vec<CheckedSession>,
}

/// Space of a session's own tiles, and its name in a refusal.
pub(in crate::core) struct KeptRoom {
    pub(in crate::core) extent: Extent,
    pub(in crate::core) bytes: u64,
    pub(in crate::core) name: String,
}

/// Numbers of the devices by index, as messages to the next daemon name them.
pub(in crate::core) struct DeviceNumbers {
    /// Number of each device, and whether it belongs to the store now.
    pub(in crate::core) numbers: Vec<(u32, bool)>,
}

impl DeviceNumbers {
    fn number(&self, device: DeviceIndex) -> u32 {
        self.numbers[device.0 as usize].0
    }

    fn index(&self, number: u32) -> Result<DeviceIndex, String> {
        let found = (self.numbers.iter()).position(|(other, _)| *other == number);
        found
            .map(|index| DeviceIndex(index as u32))
            .ok_or_else(|| format!("the store has no device {number}"))
    }

    fn written(&self, version: Version, extent: Extent) -> message::HandoverWrite {
        message::HandoverWrite {
            which: version.which.into(),
            checksum: version.checksum,
            generation: version.generation.0,
            device: self.number(extent.device),
            offset: extent.offset,
        }
    }

    fn extent(&self, written: &message::HandoverWrite) -> Result<Extent, String> {
        Ok(Extent {
            device: self.index(written.device)?,
            offset: written.offset,
        })
    }
}

impl CheckedJob {
    /// Lists the space that must be free for the job's sessions.
    pub(in crate::core) fn kept_room(&self) -> impl Iterator<Item = KeptRoom> + '_ {
        self.sessions.iter().flat_map(|session| {
            session.scratch.iter().map(|tile| KeptRoom {
                extent: tile.extent,
                bytes: tile.bytes(),
                name: format!("a scratch tile of rank {}", session.rank),
            })
        })
    }
}

impl Data {
    /// Whether no tile is in flight and no ended session waits for its last operation. Sessions whose arena is still being made
    /// may exist; they are not handed over.
    pub(in crate::core) fn is_quiet(&self) -> bool {
        let quiet = |session: &Session| {
            let here = !matches!(session.stage, Stage::Ending { .. });
            session.inflight_count == 0 && here
        };
        self.inflight.is_empty() && self.sessions.iter().all(quiet)
    }

    /// Returns the state that the next daemon cannot read from the devices. It does not contain calls that wait for other
    /// ranks: their processes call again.
    pub(in crate::core) fn hand_over(
        &self,
        devices: &DeviceNumbers,
    ) -> (Vec<message::HandoverSession>, Vec<message::HandoverJob>) {
        let used: Vec<&Job> = (self.jobs.iter())
            .filter(|job| !job.members.is_empty() && job.broken.is_none())
            .collect();
        let place = |key: &JobKey| used.iter().position(|job| job.key == *key);
        let live = (self.sessions.iter()).filter(|session| session.stage == Stage::Live);
        let sessions = live.filter_map(|session| {
            let place = place(&session.key)?;
            let rank = used[place].members.get(&session.rank)?;
            Some(session_state(session, place as u32, *rank, devices))
        });
        let jobs = used.iter().map(|job| job_state(job, devices));
        (sessions.collect(), jobs.collect())
    }

    /// Adopts a checked job whose space is reserved.
    pub(in crate::core) fn adopt(
        &mut self,
        job: &message::HandoverJob,
        checked: CheckedJob,
        ops: &mut Operations,
    ) -> Vec<AdoptedSession> {
        let CheckedJob {
            key,
            tiles,
            poison,
            gone,
            sessions,
        } = checked;
        let adopting = self.jobs.get_or_new(&key, ops.device_count());
        adopting.adopt(job, [poison, gone], tiles);
        let begin = |checked| self.begin_again(&key, checked, ops);
        sessions.into_iter().map(begin).collect()
    }

    /// Uses the epoch of the previous daemon, which adopted sessions know.
    pub(in crate::core) fn continue_epoch(&mut self, epoch: Epoch) {
        self.incarnation.epoch = epoch;
    }

    fn begin_again(
        &mut self,
        key: &JobKey,
        checked: CheckedSession,
        ops: &mut Operations,
    ) -> AdoptedSession {
        let id = SessionId(ops.number());
        let adopted = AdoptedSession {
            session: id,
            index: checked.index,
            peer: checked.peer,
            job: key.name.clone(),
            token: checked.token,
            geometry: checked.geometry.clone(),
            ring_entries: ring_entries(checked.iodepth),
        };
        let job = self.jobs.existing(key);
        let state = RankState {
            pid: checked.peer.pid,
            resumed: checked.resumed,
        };
        job.members.insert(checked.rank, state);
        self.sessions.insert(Session {
            id,
            key: key.clone(),
            rank: checked.rank,
            uid: checked.peer.uid,
            token: checked.token,
            geometry: checked.geometry,
            iodepth: checked.iodepth,
            ring_entries: adopted.ring_entries,
            stage: Stage::Live,
            claimed: true,
            busy_slots: HashSet::new(),
            inflight_count: 0,
            tickets: HashMap::new(),
            scratch: checked.scratch,
        });
        adopted
    }
}

impl Admission<'_> {
    /// Compares a handed-over job with the devices, and its sessions with the settings. Changes nothing.
    ///
    /// # Errors
    /// The reason why the sessions cannot be adopted.
    pub(in crate::core) fn check_adopted(
        &self,
        state: &message::HandoverState,
        job: &message::HandoverJob,
        indices: &[usize],
        already: usize,
        devices: &DeviceNumbers,
    ) -> Result<CheckedJob, String> {
        let name = JobName::new(job.name.clone()).map_err(|fault| fault.message)?;
        let key = JobKey::new(job.uid, name);
        let stored = self.jobs.get(&key).and_then(|job| job.stored.as_ref());
        let tiles = check_tiles(stored, job, devices)?;
        let poison = job.poison.as_ref().map(checked_fault).transpose()?;
        let gone = job.gone.as_ref().map(checked_fault).transpose()?;
        if job.local_ranks == 0
            || job.local_ranks > LOCAL_RANKS_MAX
            || indices.len() > job.local_ranks as usize
        {
            return Err(format!(
                "it has {} sessions for {} local ranks",
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
            let session =
                self.check_session(&key, job, (index, &state.sessions[index]), devices)?;
            checked.push(session);
        }
        let ranks: BTreeSet<Rank> = checked.iter().map(|session| session.rank).collect();
        let tokens: HashSet<SessionToken> = checked.iter().map(|session| session.token).collect();
        if ranks.len() < checked.len() || tokens.len() < checked.len() {
            return Err("two of its sessions have the same rank or token".into());
        }
        if tokens.iter().any(|token| self.sessions.has_token(token)) {
            return Err("another job's session has the token of one of its sessions".into());
        }
        let asked: u64 = checked.iter().map(|s| s.geometry.arena_bytes()).sum();
        let free_bytes = self.arena_free_bytes();
        if asked > free_bytes {
            return Err(format!(
                "its sessions have {} of host memory, but the settings leave only {}",
                ApproxBytes(asked),
                ApproxBytes(free_bytes)
            ));
        }
        Ok(CheckedJob {
            key,
            tiles,
            poison,
            gone,
            sessions: checked,
        })
    }

    fn check_session(
        &self,
        key: &JobKey,
        job: &message::HandoverJob,
        (index, session): (usize, &message::HandoverSession),
        devices: &DeviceNumbers,
    ) -> Result<CheckedSession, String> {
        let rank = Rank(session.rank);
        let wrong = |what: String| Err(format!("rank {rank}: {what}"));
        let Some(token) = SessionToken::from_bytes(&session.token) else {
            return wrong(format!("a token of {} bytes", session.token.len()));
        };
        if session.iodepth == 0 || session.iodepth > self.limits.iodepth_max {
            return wrong(format!(
                "it may have {} operations in flight, but the settings allow {}",
                session.iodepth, self.limits.iodepth_max
            ));
        }
        if session.resumed && job.resumed.is_none() {
            return wrong("it has resumed, but its job has not".into());
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
            return wrong("it has scratch tiles, but its job has no tiles".into());
        }
        let mut scratch = Vec::with_capacity(session.scratch.len());
        for tile in &session.scratch {
            let extent = Extent {
                device: devices.index(tile.device)?,
                offset: tile.offset,
            };
            let block = u64::from(offload_api::BLOCK_BYTES);
            let aligned =
                extent.offset.is_multiple_of(block) && u64::from(tile.bytes).is_multiple_of(block);
            if !aligned {
                return wrong(format!(
                    "a scratch tile of {} bytes at {} of device {} is not aligned",
                    tile.bytes, tile.offset, tile.device
                ));
            }
            let content = match &tile.written {
                None => None,
                Some(written) if devices.extent(written)? == extent && written.which == 0 => {
                    Some(Version {
                        generation: Generation(written.generation),
                        checksum: written.checksum,
                        which: 0,
                    })
                }
                Some(_) => {
                    return wrong("a scratch tile was written elsewhere than it lies".into());
                }
            };
            scratch.push(ScratchTile::new(extent, tile.bytes, content));
        }
        Ok(CheckedSession {
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
}

impl Job {
    /// Continues the job as the previous daemon handed it over.
    fn adopt(
        &mut self,
        job: &message::HandoverJob,
        [poison, gone]: [Option<Fault>; 2],
        tiles: CheckedTiles,
    ) {
        self.local_ranks = job.local_ranks;
        self.resumed = job.resumed.map(Generation);
        self.working = Generation(job.working);
        self.awaiting_confirm = job.awaiting_confirm;
        self.poison = poison;
        self.gone = gone;
        self.unflushed = tiles.unflushed;
        let Some(stored) = &mut self.stored else {
            return;
        };
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
}

/// Compares the tiles of a handed-over job with its state on the devices.
fn check_tiles(
    stored: Option<&StoredJob>,
    job: &message::HandoverJob,
    devices: &DeviceNumbers,
) -> Result<CheckedTiles, String> {
    let mut unflushed = vec![false; devices.numbers.len()];
    for number in &job.touched {
        unflushed[devices.index(*number)?.0 as usize] = true;
    }
    let mut checked = CheckedTiles {
        committed: None,
        working: Vec::new(),
        unflushed,
    };
    let found = stored.map(status);
    if found != job.stored {
        let words = |status: Option<message::HandoverJobState>| match status {
            None => "no tiles".to_owned(),
            Some(status) => format!(
                "id {}, revision {}, generation {} written by {:x}",
                status.job_id, status.revision, status.newest, status.newest_epoch
            ),
        };
        return Err(format!(
            "the devices have {}, but {} was handed over",
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
                "its tile {index} is out of order or does not exist"
            ));
        }
        last = Some(index);
        let before = committed.and_then(|versions| versions[index]);
        let which = free_extent(stored.durability(), before);
        let version = match &tile.written {
            None => None,
            Some(written) => {
                let expected = stored.table.extents[index][usize::from(which)];
                if devices.extent(written)? != expected
                    || written.which != u32::from(which)
                    || written.generation != job.working
                {
                    return Err(format!(
                        "its tile {index} was written elsewhere than the devices have it"
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

fn session_state(
    session: &Session,
    job: u32,
    rank: RankState,
    devices: &DeviceNumbers,
) -> message::HandoverSession {
    let classes = session
        .geometry
        .classes()
        .map(|class| message::HandoverClass {
            slot_bytes: class.slot_bytes,
            slot_count: class.slot_count,
        });
    let scratch = session.scratch.iter().map(|tile| message::Scratch {
        device: devices.number(tile.extent.device),
        offset: tile.extent.offset,
        bytes: tile.bytes() as u32,
        written: (tile.content).map(|version| devices.written(version, tile.extent)),
    });
    message::HandoverSession {
        number: session.id.0,
        job,
        rank: session.rank.0,
        pid: rank.pid,
        token: session.token.0.to_vec(),
        classes: classes.collect(),
        iodepth: session.iodepth,
        resumed: rank.resumed,
        submission_head: 0,
        completion_tail: 0,
        scratch: scratch.collect(),
    }
}

fn job_state(job: &Job, devices: &DeviceNumbers) -> message::HandoverJob {
    let unflushed = (job.unflushed.iter().enumerate())
        .filter(|(device, unflushed)| **unflushed && devices.numbers[*device].1);
    let tiles = job.stored.iter().flat_map(|stored| {
        let written = (stored.tiles.iter().enumerate())
            .filter(|(_, tile)| tile.working.is_some() || tile.failed);
        written.map(|(index, tile)| message::HandoverTile {
            index: index as u32,
            written: tile.working.map(|version| {
                let extents = &stored.table.extents[index];
                devices.written(version, extents[usize::from(version.which)])
            }),
            failed: tile.failed,
        })
    });
    message::HandoverJob {
        uid: job.key.uid,
        name: job.key.name.as_str().into(),
        stored: job.stored.as_ref().map(status),
        local_ranks: job.local_ranks,
        resumed: job.resumed.map(|generation| generation.0),
        working: job.working.0,
        awaiting_confirm: job.awaiting_confirm,
        poison: job.poison.as_ref().map(fault_state),
        gone: job.gone.as_ref().map(fault_state),
        touched: unflushed
            .map(|(device, _)| devices.number(DeviceIndex(device as u32)))
            .collect(),
        tiles: tiles.collect(),
    }
}

fn status(stored: &StoredJob) -> message::HandoverJobState {
    let newest = stored.newest_marked().map(|marked| &marked.record);
    message::HandoverJobState {
        job_id: stored.entry.job_id,
        revision: stored.table.revision,
        newest: newest.map_or(0, |record| record.generation.0),
        newest_epoch: newest.map_or(0, |record| record.epoch.0),
    }
}

fn fault_state(fault: &Fault) -> message::HandoverFault {
    message::HandoverFault {
        kind: fault.kind as u32,
        message: fault.message.clone(),
    }
}

fn checked_fault(fault: &message::HandoverFault) -> Result<Fault, String> {
    let kind = FaultKind::from_number(fault.kind)
        .ok_or_else(|| format!("a fault of the unknown kind {}", fault.kind))?;
    Ok(Fault::new(kind, fault.message.clone()))
}
