//! A job in memory: its members (sessions), its working generation, and its state on the devices.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use offload_api::fault::{Fault, FaultKind};
use offload_api::ids::{Generation, Rank};

use super::JobKey;
use super::stored::StoredJob;
use super::tile_io::ParkedWrite;
use crate::core::CallId;
use crate::core::operations::ScriptId;
use crate::store::definition::JobDefinition;
use crate::store::manifest::Record;
use crate::store::recover::RecoveredJob;

pub(in crate::core) struct Job {
    pub(super) key: JobKey,
    /// State on the devices; `None` before the definition is in the catalog.
    pub(super) stored: Option<StoredJob>,
    /// Definition that is being written to the catalog.
    pub(super) definition: Option<PendingDefinition>,
    /// Whether the catalog entry is being removed, or may be gone.
    pub(super) dropping: bool,
    pub(super) local_ranks: u32,
    /// Ranks that have a session. An ended session counts until its last operation has ended.
    pub(super) members: BTreeMap<Rank, RankState>,
    pub(super) script: Option<JobScript>,
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
    pub(super) round: Option<CommitRound>,
    pub(super) resume_waiters: Vec<(CallId, Rank)>,
    pub(super) confirm_waiters: Vec<CallId>,
    /// By device: whether the job has written to it since the last commit.
    pub(super) unflushed: Vec<bool>,
    pub(super) writes_inflight_count: u32,
    /// Writes that wait until the job is marked as being overwritten.
    pub(super) parked: Vec<ParkedWrite>,
}

/// A rank that has a session, and its progress.
#[derive(Clone, Copy, Debug)]
pub(super) struct RankState {
    /// Process number, for messages; 0 if the process is in another PID namespace.
    pub(super) pid: u32,
    /// Whether it has resumed, so that its session can read and write tiles.
    pub(super) resumed: bool,
}

/// A definition that is being written to the catalog.
pub(super) struct PendingDefinition {
    pub(super) definition: Arc<JobDefinition>,
    /// Bytes reserved on devices, counted from when the definition is being written.
    pub(super) reserved_bytes: u64,
    pub(super) waiters: Vec<CallId>,
}

/// The calls of one commit.
#[derive(Debug, Default)]
pub(super) struct CommitRound {
    /// Call and blob of each rank.
    pub(super) calls: BTreeMap<Rank, (CallId, Vec<u8>)>,
    /// Whether the flushes and the record are in progress.
    pub(super) running: bool,
}

/// A job's script that is under way.
#[derive(Debug)]
pub(super) struct JobScript {
    pub(super) id: ScriptId,
    pub(super) purpose: JobScriptPurpose,
}

/// Purpose of a job's script, with the values that its end needs.
#[derive(Debug)]
pub(super) enum JobScriptPurpose {
    /// Discards later generations.
    Resume {
        generation: Generation,
    },
    Commit {
        record: Record,
    },
    /// Withdraws the record of a failed commit.
    Withdraw {
        generation: Generation,
        fault: Fault,
    },
    Confirm,
    /// Marks the newest record: its tiles are being overwritten.
    Overwrite,
    /// Discards unreadable records.
    Forget {
        call: CallId,
    },
}

impl Job {
    pub(super) fn new(key: JobKey, device_count: usize) -> Self {
        Self {
            key,
            stored: None,
            definition: None,
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
            parked: Vec::new(),
        }
    }

    pub(super) fn recovered(recovered: RecoveredJob, device_count: usize) -> Self {
        let RecoveredJob {
            entry,
            table,
            slots,
            sequence,
        } = recovered;
        let key = JobKey::new(entry.uid, entry.name.clone());
        Self {
            stored: Some(StoredJob::new(entry, table, slots, sequence)),
            ..Self::new(key, device_count)
        }
    }

    /// Bytes reserved on devices, including those of a definition that is being written.
    pub(super) fn reserved_bytes(&self) -> u64 {
        let stored = self.stored.as_ref().map(|s| s.entry.reserved_bytes);
        let pending = self.definition.as_ref().map(|d| d.reserved_bytes);
        stored.or(pending).unwrap_or(0)
    }

    /// Returns the reason why nothing can be written or committed.
    pub(super) fn unusable(&self) -> Option<&Fault> {
        self.poison.as_ref().or(self.gone.as_ref())
    }

    /// Returns the processes that have it open, by rank.
    pub(super) fn pids(&self) -> Vec<u32> {
        self.members.values().map(|rank| rank.pid).collect()
    }

    /// Names the processes that have it open, for messages.
    pub(super) fn processes(&self) -> String {
        processes(&self.pids(), self.key.uid)
    }

    /// Number of local ranks that may still join; 0 for a job that cannot continue.
    pub(super) fn ranks_to_come(&self) -> u32 {
        match self.unusable().or(self.broken.as_ref()) {
            None => (self.local_ranks).saturating_sub(self.members.len() as u32),
            Some(_) => 0,
        }
    }

    /// Number of the job's tiles; 0 before they are defined.
    pub(super) fn tile_count(&self) -> usize {
        let stored = self.stored.as_ref();
        stored.map_or(0, |stored| stored.tiles.len())
    }

    /// Whether a rank has resumed.
    pub(super) fn has_resumed(&self, rank: Rank) -> bool {
        self.members.get(&rank).is_some_and(|state| state.resumed)
    }

    /// Checks that a rank may join. The sessions of the ranks `ending` wait for their last operations only.
    pub(super) fn check_member(
        &self,
        rank: Rank,
        local_ranks: u32,
        ending: &BTreeSet<Rank>,
    ) -> Result<(), Fault> {
        let name = &self.key.name;
        let busy = |why: String| Err(Fault::new(FaultKind::Busy, why));
        let soon = |why: String| Err(still_ending(why));
        if let Some(fault) = &self.broken {
            return Err(fault.clone());
        }
        if self.dropping {
            return busy(format!("job {name} is being deleted"));
        }
        if let Some(state) = self.members.get(&rank) {
            let process = processes(&[state.pid], self.key.uid);
            return match ending.contains(&rank) {
                true => soon(format!(
                    "the last operations of rank {rank} of job {name} in {process} are still ending"
                )),
                false => busy(format!(
                    "rank {rank} of job {name} is open already in {process}: end it first"
                )),
            };
        }
        if self.members.is_empty() {
            if self.script.is_some() {
                return soon(format!("the last commit of job {name} is still ending"));
            }
            return Ok(());
        }
        if self.members.keys().all(|member| ending.contains(member)) {
            return soon(format!("the other ranks of job {name} are still ending"));
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
                "all {local_ranks} local ranks of job {name} are open already in {}: end them first",
                self.processes()
            ));
        }
        Ok(())
    }
}

/// Refuses what is possible in a moment.
pub(super) fn still_ending(why: String) -> Fault {
    let what =
        format!("{why}; if this takes long, `offloadd top` shows the device that does not answer");
    Fault::new(FaultKind::Ending, what)
}

/// Names processes of a user, for messages.
fn processes(pids: &[u32], uid: u32) -> String {
    const NAMED_MAX: usize = 8;
    let mut names: Vec<String> = pids.iter().take(NAMED_MAX).map(u32::to_string).collect();
    if pids.len() > NAMED_MAX {
        names.push(format!("{} more", pids.len() - NAMED_MAX));
    }
    match pids {
        [0] => format!("a process of uid {uid} in another PID namespace"),
        [_] => format!("process {} of uid {uid}", names[0]),
        _ => format!("processes {} of uid {uid}", names.join(", ")),
    }
}
