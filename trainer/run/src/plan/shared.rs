//! Compares a run with what the daemon behind `offload.socket` lets its user have: quotas, and what others have left.

use offload_support::units::{ApproxBytes, CountOf};
use swapper::Daemon;
use training_state::store::{device_free_bytes, job_at};

use super::problems::{Problem, ProblemKind};
use super::{Plan, PlanError};

impl Plan {
    /// Adds what `job` needs of the daemon and its user may not have to the problems.
    ///
    /// # Errors
    /// The daemon does not answer, or the run's memory cannot be planned.
    pub fn check_daemon(&mut self, daemon: &Daemon, job: &str) -> Result<(), PlanError> {
        let known = job_at(daemon, job)?;
        if known.as_ref().is_some_and(|known| known.open) {
            // It has what it needs.
            return Ok(());
        }
        let info = daemon.info();
        let ranks = self.local_ranks;
        let host_bytes = self.swapper.local_arena_bytes()?;
        let device_bytes = self.device_bytes();
        let free_bytes = device_free_bytes(daemon, known.as_ref());
        let quota = |key: &str| {
            format!(
                "end or delete other jobs, or have the administrator of offloadd raise `{key}` of the quota"
            )
        };
        let short = |needed: u64, free: u64, what: &str| {
            format!(
                "the run needs {} {what}, but offloadd lets this user have {} now",
                ApproxBytes(needed),
                ApproxBytes(free)
            )
        };
        let mut found = Vec::new();
        if host_bytes > info.arena_free_bytes {
            found.push(Problem::new(
                ProblemKind::HostMemory,
                short(host_bytes, info.arena_free_bytes, "of its host memory"),
                quota("host_bytes_max"),
            ));
        }
        if device_bytes > free_bytes {
            found.push(Problem::new(
                ProblemKind::DeviceSpace,
                short(device_bytes, free_bytes, "on its devices"),
                quota("device_bytes_max"),
            ));
        }
        if ranks > info.session_free_count {
            found.push(Problem::new(
                ProblemKind::Settings,
                format!(
                    "the run has {} on this node, but offloadd lets this user open {} now",
                    CountOf(ranks, "rank"),
                    CountOf(info.session_free_count, "session")
                ),
                quota("sessions_max"),
            ));
        }
        self.problems.extend(found);
        Ok(())
    }
}
