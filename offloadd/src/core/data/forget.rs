//! Discards unreadable records. A record that could not be read at the start stays until an administrator decides: it may be
//! the newest one, and may name any extent of its job's tiles. If it was the newest, tiles of the previous generation may have
//! been overwritten since; the caller has compared them.

use offload_api::fault::{Fault, FaultKind};
use offload_api::ids::Generation;

use super::{Data, JobKey, Note, Purpose};
use crate::core::operations::{Failed, Operations, Step};
use crate::core::{CallId, Reply};
use crate::store::manifest::SlotContent;

impl Data {
    pub(in crate::core) fn discard_unreadable(
        &mut self,
        call: CallId,
        key: JobKey,
        ops: &mut Operations,
    ) -> Result<Option<Reply>, Fault> {
        self.check_writing()?;
        let stored = self.closed(&key)?;
        let unreadable = |slot: &usize| matches!(stored.slots[*slot], SlotContent::Unreadable(_));
        let slots: Vec<usize> = (0..stored.slots.len()).filter(unreadable).collect();
        let stored = self.jobs.get_mut(&key).and_then(|job| job.stored.as_mut());
        let writes = stored.expect("just seen").voiding(&slots);
        if writes.is_empty() {
            return Err(Fault::new(
                FaultKind::Invalid,
                format!(
                    "job {} has no unreadable record, so there is nothing to discard",
                    key.name
                ),
            ));
        }
        let steps = vec![
            Step::writes(ops.metadata_device(), writes),
            Step::flush([ops.metadata_device()]),
        ];
        self.run_script(&key, Purpose::Forget { call }, steps, ops);
        Ok(None)
    }

    pub(super) fn finish_forget(
        &mut self,
        key: &JobKey,
        call: CallId,
        result: Result<(), Failed>,
        ops: &mut Operations,
    ) {
        if let Err(Failed { fault, .. }) = result {
            let what = format!(
                "the record of job {} could not be overwritten ({}): it stays as it is; delete the job or repair the device",
                key.name, fault.message
            );
            return ops.refuse(call, Fault::new(fault.kind, what));
        }
        let job = self.jobs.get_mut(key).expect("a script's job");
        let stored = job.stored.as_mut().expect("it has records");
        for slot in &mut stored.slots {
            if let SlotContent::Unreadable(_) = slot {
                *slot = SlotContent::Empty;
            }
        }
        let newest_generation = match stored.clean() {
            true => stored.newest(),
            // Tiles are written in place, so the generation that the record names does not exist any more.
            false => Generation(0),
        };
        // The record kept the job's tiles from moving.
        self.notes.push_back(Note::Forgotten);
        ops.reply(call, Ok(Reply::DiscardUnreadable { newest_generation }));
    }
}
