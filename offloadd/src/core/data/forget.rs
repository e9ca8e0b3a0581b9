//! Discards unreadable records. A record that could not be read at the start stays until an administrator decides: it may be
//! the newest one, and may name any extent of its job's tiles. If it was the newest, tiles of the previous generation may have
//! been overwritten since; the caller has compared them.

use offload_api::fault::{Fault, FaultKind};
use offload_api::ids::Generation;

use super::job::{Job, JobScriptPurpose};
use super::script::ScriptResult;
use crate::core::operations::{Operations, ScriptFailure, Step};
use crate::core::{CallId, Reply};
use crate::store::manifest::SlotContent;

impl Job {
    pub(super) fn discard_unreadable(
        &mut self,
        call: CallId,
        ops: &mut Operations,
    ) -> Result<Option<Reply>, Fault> {
        let stored = self.stored.as_mut().expect("it is closed");
        let unreadable = |slot: &usize| matches!(stored.slots[*slot], SlotContent::Unreadable(_));
        let slots: Vec<usize> = (0..stored.slots.len()).filter(unreadable).collect();
        let writes = stored.voiding(&slots);
        if writes.is_empty() {
            return Err(Fault::new(
                FaultKind::Invalid,
                format!(
                    "job {} has no unreadable record, so there is nothing to discard",
                    self.key.name
                ),
            ));
        }
        let steps = vec![
            Step::writes(ops.metadata_device(), writes),
            Step::flush([ops.metadata_device()]),
        ];
        self.run_script(JobScriptPurpose::Forget { call }, steps, ops);
        Ok(None)
    }

    pub(super) fn finish_forget(
        &mut self,
        call: CallId,
        result: Result<(), ScriptFailure>,
        ops: &mut Operations,
    ) -> ScriptResult {
        if let Err(ScriptFailure { fault, .. }) = result {
            let what = format!(
                "the record of job {} could not be overwritten ({}): it stays as it is; delete the job or repair the device",
                self.key.name, fault.message
            );
            ops.refuse(call, Fault::new(fault.kind, what));
            return ScriptResult::Done;
        }
        let stored = self.stored.as_mut().expect("it has records");
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
        ops.reply(call, Ok(Reply::DiscardUnreadable { newest_generation }));
        ScriptResult::Forgot
    }
}
