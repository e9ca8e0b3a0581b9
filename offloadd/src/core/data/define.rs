//! Definition of a job's tiles: the first session of a new job defines them, the others must have the same.

use std::sync::Arc;

use offload_api::fault::{Fault, FaultKind};

use super::JobKey;
use super::job::{Job, PendingDefinition};
use super::members::Member;
use crate::core::operations::Operations;
use crate::core::{CallId, Reply};
use crate::store::definition::JobDefinition;

/// Result of a definition.
pub(in crate::core) enum DefineOutcome {
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

impl Member<'_> {
    /// # Errors
    /// The job has other tiles, or too many calls wait.
    pub(in crate::core) fn define(
        self,
        call: CallId,
        definition: JobDefinition,
    ) -> Result<DefineOutcome, Fault> {
        let job = self.job;
        let known = (job.stored.as_ref().map(|stored| &stored.table.definition))
            .or(job.definition.as_ref().map(|pending| &pending.definition));
        if known.is_some_and(|known| **known != definition) {
            return Err(Fault::new(
                FaultKind::LayoutChanged,
                format!(
                    "job {} exists with other tiles, layout, durability or nodes: use another name, or delete it",
                    job.key.name
                ),
            ));
        }
        if let Some(stored) = &job.stored {
            return Ok(DefineOutcome::Known(stored.entry.reserved_bytes));
        }
        if let Some(pending) = &mut job.definition {
            // At most one call per session can be useful; more come from a process that floods.
            if pending.waiters.len() >= 2 * job.local_ranks as usize {
                return Err(Fault::new(
                    FaultKind::TooMany,
                    "the definition is being written: wait for its answer",
                ));
            }
            pending.waiters.push(call);
            return Ok(DefineOutcome::Waits);
        }
        let definition = Arc::new(definition);
        job.definition = Some(PendingDefinition {
            definition: definition.clone(),
            reserved_bytes: 0,
            waiters: vec![call],
        });
        Ok(DefineOutcome::New {
            key: job.key.clone(),
            definition,
            local_ranks: job.local_ranks,
        })
    }
}

impl Job {
    /// Answers all calls that wait for the definition.
    pub(super) fn answer_define(&mut self, answer: &Result<u64, Fault>, ops: &mut Operations) {
        for call in self
            .definition
            .take()
            .map(|d| d.waiters)
            .unwrap_or_default()
        {
            let reply = match answer {
                Ok(reserved_bytes) => Ok(Reply::Define {
                    reserved_bytes: *reserved_bytes,
                }),
                Err(fault) => Err(fault.clone()),
            };
            ops.reply(call, reply);
        }
    }
}
