//! Changes of the catalog, one at a time: jobs are defined and deleted, devices added and removed.

use std::collections::VecDeque;
use std::sync::Arc;

use offload_api::fault::{Fault, FaultKind};
use offload_api::ids::DeviceIndex;
use offload_support::units::ApproxBytes;

use super::Admin;
use super::catalog_change::{CATALOG_STEPS, DeviceChange, QueuedChange, catalog_steps};
use crate::core::data::Data;
use crate::core::operations::{Operations, ScriptFailure, ScriptId, Step};
use crate::core::{CallId, JobKey, Reply};
use crate::io::AlignedBytes;
use crate::store::catalog::{Catalog, Entry, JOBS_MAX};
use crate::store::definition::JobDefinition;
use crate::store::manifest::{FIRST_SEQUENCE, voiding};
use crate::store::tile_table::TileTable;

/// Limit of changes that wait for the one being written.
pub(super) const QUEUE_MAX: usize = 256;

/// Steps of a definition's script before the catalog is written.
const STEPS_BEFORE_CATALOG: usize = 2;

pub(super) struct CatalogQueue {
    pub(super) catalog: Catalog,
    /// The change that is being written, with its script.
    writing: Option<(ScriptId, CatalogChange)>,
    waiting: VecDeque<QueuedChange>,
    /// Set when a write of the catalog failed: which catalog the devices hold is unknown until the next start.
    broken: Option<Fault>,
}

/// A change that is being written.
#[derive(Debug)]
pub(super) struct CatalogChange {
    catalog: Catalog,
    what: WrittenChange,
}

#[derive(Debug)]
enum WrittenChange {
    Define {
        key: JobKey,
        entry: Entry,
        table: TileTable,
    },
    Drop {
        key: JobKey,
        call: CallId,
    },
    Device(DeviceChange),
}

impl CatalogQueue {
    pub(super) fn new(catalog: Catalog) -> Self {
        Self {
            catalog,
            writing: None,
            waiting: VecDeque::new(),
            broken: None,
        }
    }

    /// Whether no change is written or waits.
    pub(super) fn is_idle(&self) -> bool {
        self.writing.is_none() && self.waiting.is_empty()
    }

    fn write(&mut self, change: CatalogChange, steps: Vec<Step>, ops: &mut Operations) {
        assert!(self.writing.is_none(), "one change at a time");
        self.writing = Some((ops.run_script(steps), change));
    }

    /// Returns the change that this script has written; `None` if the script is not the catalog's.
    pub(super) fn end_write(&mut self, script: ScriptId) -> Option<CatalogChange> {
        let (_, change) = self.writing.take_if(|(own, _)| *own == script)?;
        Some(change)
    }

    /// Refuses all changes in this incarnation.
    pub(super) fn refuse_all(&mut self, why: Fault) {
        self.broken = Some(why);
    }

    /// Fails if changes are refused.
    pub(super) fn check(&self) -> Result<(), Fault> {
        self.broken.clone().map_or(Ok(()), Err)
    }

    /// Whether the devices may hold a newer catalog, because its write failed.
    pub(super) fn is_unsure(&self) -> bool {
        self.broken.is_some()
    }
}

impl Admin {
    /// Returns the catalog that must be durable before this incarnation serves, and the position of the device to write it to.
    pub(in crate::core) fn first_catalog(&self) -> (usize, Catalog) {
        let metadata_device = self.devices.get(self.devices.metadata_device());
        (
            metadata_device.position,
            self.catalog.catalog.of_next_incarnation(),
        )
    }

    /// The first catalog of this incarnation is durable: state that was handed over earlier is refused from now on.
    pub(in crate::core) fn begin_incarnation(&mut self, first: Catalog) {
        assert!(self.catalog.is_idle(), "called before the first event");
        self.catalog.catalog = first;
    }

    /// Queues the definition of a job that `Member::define` reports as new.
    ///
    /// # Errors
    /// Changes of the catalog are refused, or too many wait.
    pub(in crate::core) fn define(
        &mut self,
        key: JobKey,
        definition: Arc<JobDefinition>,
        local_ranks: u32,
        data: &mut Data,
        ops: &mut Operations,
    ) -> Result<(), Fault> {
        let work = QueuedChange::Define {
            key: key.clone(),
            definition,
            local_ranks,
        };
        let queued = self.change_catalog(work, data, ops);
        if queued.is_err() {
            data.jobs.cancel_define(&key);
        }
        queued
    }

    /// Queues the deletion of a job that nobody has open.
    ///
    /// # Errors
    /// The job is open, or changes of the catalog are refused.
    pub(in crate::core) fn drop_job(
        &mut self,
        call: CallId,
        key: JobKey,
        data: &mut Data,
        ops: &mut Operations,
    ) -> Result<Option<Reply>, Fault> {
        data.jobs.check_closed(&key, &data.sessions.ending(&key))?;
        self.change_catalog(QueuedChange::Drop { key, call }, data, ops)?;
        Ok(None)
    }

    /// Queues a change.
    ///
    /// # Errors
    /// Too many changes wait, or a write of the catalog failed.
    pub(super) fn change_catalog(
        &mut self,
        work: QueuedChange,
        data: &mut Data,
        ops: &mut Operations,
    ) -> Result<(), Fault> {
        self.catalog.check()?;
        if self.catalog.waiting.len() == QUEUE_MAX {
            return Err(Fault::new(
                FaultKind::TooMany,
                format!("{QUEUE_MAX} changes of the store's catalog already wait: try again"),
            ));
        }
        self.catalog.waiting.push_back(work);
        self.next_change(data, ops);
        Ok(())
    }

    /// Starts the next change. The deletion of a job whose tiles move waits: their copies must not land in space that is freed.
    pub(super) fn next_change(&mut self, data: &mut Data, ops: &mut Operations) {
        while self.catalog.writing.is_none() {
            if let Some(QueuedChange::Drop { key, .. }) = self.catalog.waiting.front()
                && self.mover.is_at(key)
            {
                return;
            }
            let Some(work) = self.catalog.waiting.pop_front() else {
                return;
            };
            if let Some(fault) = self.catalog.broken.clone() {
                self.refuse_work(&work, &fault, data, ops);
                continue;
            }
            match work {
                QueuedChange::Define {
                    key,
                    definition,
                    local_ranks,
                } => self.start_define(key, definition, local_ranks, data, ops),
                QueuedChange::Drop { key, call } => self.start_drop(key, call, data, ops),
                QueuedChange::Device(change) => self.start_device_change(change, ops),
            }
        }
    }

    fn start_define(
        &mut self,
        key: JobKey,
        definition: Arc<JobDefinition>,
        local_ranks: u32,
        data: &mut Data,
        ops: &mut Operations,
    ) {
        if self.catalog.catalog.entries.len() == JOBS_MAX {
            let fault = Fault::new(
                FaultKind::NoSpace,
                format!(
                    "the store has {JOBS_MAX} jobs, which is the limit: delete one (`offloadd job delete`)"
                ),
            );
            return data.jobs.answer_define(&key, &Err(fault), ops);
        }
        let mine = self.catalog.catalog.entries.iter();
        let held = mine.filter(|entry| entry.uid == key.uid).count();
        if let Err(fault) = data.admission().admit_job(&key, held) {
            return data.jobs.answer_define(&key, &Err(fault), ops);
        }
        let reservation = match self.devices.space.reserve(&definition, local_ranks) {
            Ok(reservation) => reservation,
            Err(no_room) => {
                let path = self.devices.path(self.devices.metadata_device());
                let (no_area, instead) = match no_room.no_area {
                    Some((needed, largest)) => (
                        format!(
                            "; {} of them, for its records, must be contiguous on {path}, where the largest free range has {}",
                            ApproxBytes(needed),
                            ApproxBytes(largest)
                        ),
                        format!(
                            "drain {path} (`offloadd device drain`): the records then lie on another device from the next start on"
                        ),
                    ),
                    None => (String::new(), "add a device".to_owned()),
                };
                let fault = Fault::new(
                    FaultKind::NoSpace,
                    format!(
                        "job {} needs {} (all extents of its tiles and its records){no_area}; free: {}; delete a job (`offloadd job delete`) or {instead}",
                        key.name,
                        ApproxBytes(no_room.needed_bytes),
                        self.devices.free_room(&no_room.free_bytes)
                    ),
                );
                return data.jobs.answer_define(&key, &Err(fault), ops);
            }
        };
        // Checked now, after earlier changes have reserved their bytes.
        let admitted = (data.admission()).admit_device_bytes(&key, reservation.bytes);
        if let Err(fault) = admitted {
            self.devices
                .space
                .release(&definition, &reservation.area, &reservation.extents);
            return data.jobs.answer_define(&key, &Err(fault), ops);
        }
        data.jobs.reserve(&key, reservation.bytes);
        let mut catalog = self.catalog.catalog.clone();
        let job_id = catalog.next_job_id;
        catalog.next_job_id += 1;
        catalog.sequence += 1;
        let table = TileTable {
            definition,
            extents: reservation.extents,
            revision: 0,
        };
        let blocks = table.encode(job_id, &self.devices.numbers());
        let entry = Entry {
            job_id,
            uid: key.uid,
            name: key.name.clone(),
            area: reservation.area,
            definition_crc: crate::store::sealed::crc_of(&blocks),
            reserved_bytes: reservation.bytes,
        };
        catalog.entries.push(entry.clone());
        let metadata_device = self.devices.metadata_device();
        let mut steps = vec![
            first_writes(metadata_device, &entry, blocks),
            Step::flush([metadata_device]),
        ];
        assert_eq!(steps.len(), STEPS_BEFORE_CATALOG);
        steps.extend(catalog_steps(metadata_device, &catalog));
        let what = WrittenChange::Define { key, entry, table };
        (self.catalog).write(CatalogChange { catalog, what }, steps, ops);
    }

    fn start_drop(&mut self, key: JobKey, call: CallId, data: &mut Data, ops: &mut Operations) {
        // Sessions may have come while this waited.
        let ending = data.sessions.ending(&key);
        let job_id = match data.jobs.begin_drop(&key, &ending) {
            Ok(job_id) => job_id,
            Err(fault) => return ops.refuse(call, fault),
        };
        let mut catalog = self.catalog.catalog.clone();
        catalog.sequence += 1;
        catalog.entries.retain(|entry| entry.job_id != job_id);
        let steps = catalog_steps(self.devices.metadata_device(), &catalog);
        let what = WrittenChange::Drop { key, call };
        (self.catalog).write(CatalogChange { catalog, what }, steps, ops);
    }

    fn start_device_change(&mut self, change: DeviceChange, ops: &mut Operations) {
        let mut catalog = self.catalog.catalog.clone();
        catalog.sequence += 1;
        if let Some(steps) = self.device_steps(&change, &mut catalog, ops) {
            let what = WrittenChange::Device(change);
            (self.catalog).write(CatalogChange { catalog, what }, steps, ops);
        }
    }

    pub(super) fn finish_catalog(
        &mut self,
        change: CatalogChange,
        result: Result<(), ScriptFailure>,
        data: &mut Data,
        ops: &mut Operations,
    ) {
        let before = match &change.what {
            WrittenChange::Define { .. } => STEPS_BEFORE_CATALOG,
            WrittenChange::Drop { .. } => 0,
            WrittenChange::Device(change) => change.steps_before_catalog(),
        };
        // After the catalog, only the superblock of a device that leaves is written, which decides nothing.
        let result = result.or_else(|failed| match failed.steps_done < before + CATALOG_STEPS {
            true => Err(failed),
            false => Ok(()),
        });
        if let Err(failed) = &result {
            if failed.steps_done >= before {
                self.catalog.broken = Some(Fault::new(
                    FaultKind::Poisoned,
                    format!(
                        "the store's catalog could not be written ({}): no job can be defined or deleted until offloadd is restarted on sound devices",
                        failed.fault
                    ),
                ));
            }
        } else {
            self.catalog.catalog = change.catalog;
        }
        match change.what {
            WrittenChange::Define { key, entry, table } => {
                self.finish_define(&key, entry, table, result, data, ops);
            }
            WrittenChange::Drop { key, call } => self.finish_drop(&key, call, result, data, ops),
            WrittenChange::Device(change) => self.finish_device_change(change, result, data, ops),
        }
    }

    fn finish_define(
        &mut self,
        key: &JobKey,
        entry: Entry,
        table: TileTable,
        result: Result<(), ScriptFailure>,
        data: &mut Data,
        ops: &mut Operations,
    ) {
        let answer = match result {
            Ok(()) => {
                let reserved_bytes = entry.reserved_bytes;
                data.jobs.store(key, entry, table, self.devices.len());
                Ok(reserved_bytes)
            }
            Err(failed) => {
                // Space that a catalog may name stays reserved until the next start.
                if self.catalog.broken.is_none() {
                    self.devices
                        .space
                        .release(&table.definition, &entry.area, &table.extents);
                }
                Err(failed.fault)
            }
        };
        data.jobs.answer_define(key, &answer, ops);
    }

    fn finish_drop(
        &mut self,
        key: &JobKey,
        call: CallId,
        result: Result<(), ScriptFailure>,
        data: &mut Data,
        ops: &mut Operations,
    ) {
        if let Err(failed) = result {
            // The job may be gone from the devices: `dropping` stays set, so nobody opens it in this incarnation.
            return ops.refuse(call, failed.fault);
        }
        let (entry, table) = data.jobs.remove(key);
        (self.devices.space).release(&table.definition, &entry.area, &table.extents);
        let freed_bytes = entry.reserved_bytes;
        ops.reply(call, Ok(Reply::DropJob { freed_bytes }));
    }

    fn refuse_work(
        &mut self,
        work: &QueuedChange,
        fault: &Fault,
        data: &mut Data,
        ops: &mut Operations,
    ) {
        match work {
            QueuedChange::Define { key, .. } => {
                data.jobs.answer_define(key, &Err(fault.clone()), ops)
            }
            QueuedChange::Drop { call, .. } => ops.refuse(*call, fault.clone()),
            QueuedChange::Device(change) => {
                if let Some(call) = change.call() {
                    ops.refuse(call, fault.clone());
                }
            }
        }
    }
}

/// Writes both copies of the definition, and voids into the record slots. What was there belonged to another job; anything else
/// found there later was written by a faulty drive.
fn first_writes(metadata_device: DeviceIndex, entry: &Entry, definition: AlignedBytes) -> Step {
    let Entry { area, job_id, .. } = entry;
    let definitions = area
        .definitions()
        .map(|offset| (offset, definition.clone()));
    let slots = (0..2).flat_map(|slot| voiding(area, *job_id, slot, FIRST_SEQUENCE));
    Step::writes(metadata_device, definitions.into_iter().chain(slots))
}
