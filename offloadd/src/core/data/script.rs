//! Scripts of jobs: a job has at most one.

use super::Incarnation;
use super::job::{Job, JobScript, JobScriptPurpose};
use super::tile_io::ParkedWrite;
use crate::core::operations::{Operations, ScriptFailure, Step};

/// What is left to do outside of the job when its script has ended.
pub(super) enum ScriptResult {
    Done,
    /// The job is marked: these writes start.
    Overwrites(Vec<ParkedWrite>),
    /// The job could not be marked: these writes are refused.
    CannotOverwrite(Vec<ParkedWrite>),
    /// Unreadable records were discarded.
    Forgot,
}

impl Job {
    /// Runs a script; a job has at most one.
    pub(super) fn run_script(
        &mut self,
        purpose: JobScriptPurpose,
        steps: Vec<Step>,
        ops: &mut Operations,
    ) {
        assert!(self.script.is_none(), "one script a job");
        let id = ops.run_script(steps);
        self.script = Some(JobScript { id, purpose });
    }

    /// Handles the end of the job's script.
    pub(super) fn on_script_end(
        &mut self,
        result: Result<(), ScriptFailure>,
        incarnation: &Incarnation,
        ops: &mut Operations,
    ) -> ScriptResult {
        let script = self.script.take().expect("a script under way");
        match script.purpose {
            JobScriptPurpose::Resume { generation } => {
                self.finish_resume(generation, result, incarnation, ops);
            }
            JobScriptPurpose::Commit { record } => self.finish_commit(record, result, ops),
            JobScriptPurpose::Withdraw { generation, fault } => {
                self.finish_withdraw(generation, fault, result, ops);
            }
            JobScriptPurpose::Confirm => self.finish_confirm(result, ops),
            JobScriptPurpose::Overwrite => return self.finish_overwrite(result),
            JobScriptPurpose::Forget { call } => return self.finish_forget(call, result, ops),
        }
        ScriptResult::Done
    }
}
