//! The table of jobs: which exist, and the changes of it that the catalog's changes bring about.

use std::collections::{BTreeMap, BTreeSet};

use offload_api::fault::{Fault, FaultKind};
use offload_api::ids::{DeviceIndex, Rank};

use super::JobKey;
use super::job::{Job, still_ending};
use super::stored::StoredJob;
use crate::core::operations::{Operations, ScriptId};
use crate::store::catalog::Entry;
use crate::store::manifest::{FIRST_SEQUENCE, SlotContent};
use crate::store::recover::RecoveredJob;
use crate::store::tile_table::TileTable;

/// Jobs by owner and name.
pub(in crate::core) struct JobTable(BTreeMap<JobKey, Job>);

impl JobTable {
    pub(super) fn new(jobs: Vec<RecoveredJob>, device_count: usize) -> Self {
        let jobs = jobs.into_iter().map(|recovered| {
            let job = Job::recovered(recovered, device_count);
            (job.key.clone(), job)
        });
        Self(jobs.collect())
    }

    pub(super) fn get(&self, key: &JobKey) -> Option<&Job> {
        self.0.get(key)
    }

    pub(super) fn get_mut(&mut self, key: &JobKey) -> Option<&mut Job> {
        self.0.get_mut(key)
    }

    /// Returns a job that exists: it stays in the table until its last session, script and move have ended.
    pub(in crate::core) fn existing(&mut self, key: &JobKey) -> &mut Job {
        self.0.get_mut(key).expect("a job that exists")
    }

    /// Returns the jobs by owner and name.
    pub(super) fn iter(&self) -> impl Iterator<Item = &Job> {
        self.0.values()
    }

    pub(super) fn iter_mut(&mut self) -> impl Iterator<Item = &mut Job> {
        self.0.values_mut()
    }

    /// Returns the job, or a new one without tiles.
    pub(super) fn get_or_new(&mut self, key: &JobKey, device_count: usize) -> &mut Job {
        let new = || Job::new(key.clone(), device_count);
        self.0.entry(key.clone()).or_insert_with(new)
    }

    /// Returns the job whose script this is.
    pub(super) fn running(&mut self, script: ScriptId) -> Option<&mut Job> {
        let mut jobs = self.0.values_mut();
        jobs.find(|job| job.script.as_ref().is_some_and(|own| own.id == script))
    }

    /// Forgets what was not committed, if the job's last session and script have ended.
    pub(super) fn settle(&mut self, key: &JobKey) {
        let Some(job) = self.0.get_mut(key) else {
            return;
        };
        if !job.members.is_empty() || job.script.is_some() {
            return;
        }
        job.forget_uncommitted();
        if job.stored.is_none() && job.definition.is_none() {
            self.0.remove(key);
        }
    }

    /// Cancels a definition that the catalog refused.
    pub(in crate::core) fn cancel_define(&mut self, key: &JobKey) {
        if let Some(job) = self.0.get_mut(key) {
            job.definition = None;
        }
    }

    /// Notes the bytes on devices of a job whose definition is being written.
    pub(in crate::core) fn reserve(&mut self, key: &JobKey, bytes: u64) {
        if let Some(definition) = self.0.get_mut(key).and_then(|job| job.definition.as_mut()) {
            definition.reserved_bytes = bytes;
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
        let slots = [SlotContent::Empty, SlotContent::Empty];
        let stored = StoredJob::new(entry, table, slots, FIRST_SEQUENCE);
        self.get_or_new(key, device_count).stored = Some(stored);
    }

    /// Answers all calls that wait for the definition of a job.
    pub(in crate::core) fn answer_define(
        &mut self,
        key: &JobKey,
        answer: &Result<u64, Fault>,
        ops: &mut Operations,
    ) {
        if let Some(job) = self.0.get_mut(key) {
            job.answer_define(answer, ops);
            self.settle(key);
        }
    }

    /// Returns the id of a job that has no sessions. Those of the ranks `ending` wait for their last operations only.
    ///
    /// # Errors
    /// The job does not exist, is open, or is being deleted.
    pub(in crate::core) fn check_closed(
        &self,
        key: &JobKey,
        ending: &BTreeSet<Rank>,
    ) -> Result<u64, Fault> {
        let stored = closed(self.0.get(key), key, ending)?;
        Ok(stored.entry.job_id)
    }

    /// Returns a job that has no sessions, to change it.
    ///
    /// # Errors
    /// As of [`Self::check_closed`].
    pub(super) fn closed_mut(
        &mut self,
        key: &JobKey,
        ending: &BTreeSet<Rank>,
    ) -> Result<&mut Job, Fault> {
        self.check_closed(key, ending)?;
        Ok(self.existing(key))
    }

    /// Marks a job that has no sessions as being deleted: it cannot be opened any more in this incarnation, even if the deletion
    /// fails. Returns its id.
    ///
    /// # Errors
    /// As of [`Self::check_closed`].
    pub(in crate::core) fn begin_drop(
        &mut self,
        key: &JobKey,
        ending: &BTreeSet<Rank>,
    ) -> Result<u64, Fault> {
        let job_id = self.check_closed(key, ending)?;
        self.existing(key).dropping = true;
        Ok(job_id)
    }

    /// Removes a job that the catalog does not name any more. Returns its entry and extents.
    pub(in crate::core) fn remove(&mut self, key: &JobKey) -> (Entry, TileTable) {
        let job = self.0.remove(key).expect("it is being deleted");
        let stored = job.stored.expect("it is being deleted");
        (stored.entry, stored.table)
    }

    /// Adds a device to those that jobs may write to.
    pub(in crate::core) fn add_device(&mut self) {
        for job in self.0.values_mut() {
            job.unflushed.push(false);
        }
    }

    /// Notes that a device is empty: uncommitted tiles have moved off it and were flushed.
    pub(in crate::core) fn leave_device(&mut self, device: DeviceIndex) {
        for job in self.0.values_mut() {
            job.unflushed[device.0 as usize] = false;
        }
    }
}

/// Checks that a job has no sessions. Returns its state on devices.
fn closed<'a>(
    job: Option<&'a Job>,
    key: &JobKey,
    ending: &BTreeSet<Rank>,
) -> Result<&'a StoredJob, Fault> {
    let Some((job, stored)) = job.and_then(|job| Some((job, job.stored.as_ref()?))) else {
        return Err(Fault::new(
            FaultKind::NotFound,
            format!("uid {} has no job {}", key.uid, key.name),
        ));
    };
    let busy = |why| Err(Fault::new(FaultKind::Busy, why));
    if !job.members.is_empty() {
        let (name, processes) = (&key.name, job.processes());
        return match job.members.keys().all(|rank| ending.contains(rank)) {
            true => Err(still_ending(format!(
                "the last operations of job {name} in {processes} are still ending"
            ))),
            false => busy(format!("job {name} is open in {processes}: end it first")),
        };
    }
    if job.script.is_some() {
        let what = format!("a record of job {} is being written", key.name);
        return Err(still_ending(what));
    }
    if job.dropping {
        return busy(format!("job {} is being deleted", key.name));
    }
    Ok(stored)
}
