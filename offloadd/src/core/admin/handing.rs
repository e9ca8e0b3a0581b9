//! Hands state over to the next daemon when no operation is in flight, and adopts it from the previous one if it fits the store.
//!
//! The state is not trusted: store and devices are checked here, jobs and sessions by `Admission::check_adopted`. What does not
//! fit is left out with a reason. The sessions of a job are adopted all or none, because without one of them its generation
//! could not be completed.

use std::collections::BTreeMap;

use offload_api::ids::Epoch;
use test_hooks::safeguard::{Safeguard, is_disabled};

use super::Admin;
use crate::core::AdoptedSession;
use crate::core::data::Data;
use crate::core::operations::{Operations, Waiter};
use crate::handover::message;

impl Admin {
    /// Whether no change of the catalog is written or waits, and no tile moves.
    pub(in crate::core) fn is_quiet(&self) -> bool {
        self.catalog.is_idle() && self.mover.is_idle()
    }

    /// Returns the state that the next daemon cannot read from the devices.
    pub(in crate::core) fn hand_over(&self, data: &Data) -> message::HandoverState {
        let (sessions, jobs) = data.hand_over(&self.devices.numbers_for_hand_over());
        message::HandoverState {
            store: self.catalog.catalog.store.0.to_vec(),
            epoch: data.epoch().0,
            sessions,
            jobs,
            handover: 0,
            catalog: self.catalog.catalog.sequence,
            catalog_unsure: self.catalog.is_unsure(),
        }
    }

    /// Flushes what sessions have written, so that a flush that fails while the next daemon starts loses nothing of theirs. A
    /// failure poisons their jobs, and is handed over with them. Nothing else is in flight.
    pub(in crate::core) fn flush_for_hand_over(&self, data: &Data, ops: &mut Operations) {
        for (index, device) in self.devices.iter() {
            if device.phase.is_some() && data.has_unflushed(index) {
                ops.flush(index, Waiter::HandOver);
            }
        }
    }

    /// Checks that `state` belongs to this store, and that no daemon has served the store since.
    fn check_state(&self, state: &message::HandoverState) -> Result<(), String> {
        if state.store != self.catalog.catalog.store.0 {
            return Err(format!(
                "it belongs to another store, and this one is {}",
                self.catalog.catalog.store
            ));
        }
        let found = self.catalog.catalog.sequence;
        let since = found.checked_sub(state.catalog);
        let none_since = since == Some(0) || (state.catalog_unsure && since == Some(1));
        if !none_since && !is_disabled(Safeguard::Incarnations) {
            return Err(format!(
                "another daemon has served the store since, or a device was calibrated: its catalog has number {found}, \
                 {} was handed over",
                state.catalog
            ));
        }
        if state.epoch == 0 {
            return Err("its epoch is 0".into());
        }
        Ok(())
    }

    /// Adopts the sessions of `state` that fit. Returns them, and one line for each job that is not adopted.
    ///
    /// # Errors
    /// The state belongs to another store, or another daemon has served the store since.
    pub(in crate::core) fn adopt(
        &mut self,
        state: &message::HandoverState,
        has_descriptors: impl Fn(usize) -> bool,
        data: &mut Data,
        ops: &mut Operations,
    ) -> Result<(Vec<AdoptedSession>, Vec<String>), String> {
        assert!(data.sessions.len() == 0, "before anybody has come");
        self.check_state(state)?;
        let mut sessions: BTreeMap<usize, Vec<usize>> = BTreeMap::new();
        for (index, session) in state.sessions.iter().enumerate() {
            sessions
                .entry(session.job as usize)
                .or_default()
                .push(index);
        }
        let (mut adopted, mut left_out) = (Vec::new(), Vec::new());
        let same = |job: &message::HandoverJob| {
            let named =
                |other: &&message::HandoverJob| (other.uid, &other.name) == (job.uid, &job.name);
            state.jobs.iter().filter(named).count()
        };
        for (place, indices) in sessions {
            let Some(job) = state.jobs.get(place) else {
                left_out.push(format!("{} sessions of no job", indices.len()));
                continue;
            };
            let done = if same(job) > 1 {
                Err("it is listed twice".into())
            } else if indices.iter().all(|index| has_descriptors(*index)) {
                self.adopt_job(state, job, (&indices, adopted.len()), data, ops)
            } else {
                Err("descriptors of its sessions are missing".into())
            };
            match done {
                Ok(mut sessions) => adopted.append(&mut sessions),
                Err(why) => {
                    left_out.push(format!("job {} of uid {}: {why}", job.name, job.uid));
                }
            }
        }
        if !adopted.is_empty() {
            data.continue_epoch(Epoch(state.epoch));
        }
        Ok((adopted, left_out))
    }

    /// Reserves the space of the sessions' own tiles and adopts the sessions of a job. Changes nothing if it fails.
    fn adopt_job(
        &mut self,
        state: &message::HandoverState,
        job: &message::HandoverJob,
        (indices, already): (&[usize], usize),
        data: &mut Data,
        ops: &mut Operations,
    ) -> Result<Vec<AdoptedSession>, String> {
        let numbers = self.devices.numbers_for_hand_over();
        let admission = data.admission();
        let checked = admission.check_adopted(state, job, indices, already, &numbers)?;
        let mut space = self.devices.space.clone();
        for kept in checked.kept_room() {
            if !space.allocate(kept.extent, kept.bytes) {
                return Err(format!(
                    "{} of {} bytes at {} of {} is not free",
                    kept.name,
                    kept.bytes,
                    kept.extent.offset,
                    self.devices.path(kept.extent.device)
                ));
            }
        }
        self.devices.space = space;
        Ok(data.adopt(job, checked, ops))
    }
}
