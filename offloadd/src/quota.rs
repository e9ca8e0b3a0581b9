//! Limits from the settings: of the daemon in total, and of each user and job.

use std::collections::BTreeMap;

use offload_support::job_name::is_of_run;

use crate::store::catalog::JOBS_MAX;
use crate::store::definition::JobName;

/// Weight of a user among users, and of a job among its user's jobs, if the settings do not set one.
pub const WEIGHT_DEFAULT: u32 = 100;

/// Default limit of a user's jobs: a quarter of the places in a store, so that one user cannot exclude the others.
pub const JOBS_A_USER_DEFAULT: u32 = JOBS_MAX as u32 / 4;

/// Largest weight: a hundred times the default. The smallest is 1, a hundredth of the default.
pub const WEIGHT_MAX: u32 = 10_000;

/// Limits of the daemon in total.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Bytes of host memory of all arenas together.
    pub arena_bytes_max: u64,
    /// Concurrent sessions.
    pub sessions_max: u32,
    /// Operations in flight per session, at most `IODEPTH_MAX`.
    pub iodepth_max: u32,
    /// Bytes copied per second while tiles move, for moves without a rate of their own; `None`: no limit.
    pub rebalance_bytes_per_s_max: Option<u64>,
}

impl Limits {
    /// Default limit of a user's sessions: half of all, so that one user cannot exclude the others.
    pub fn sessions_a_user(&self) -> u32 {
        self.sessions_max.div_ceil(2)
    }
}

/// Quota of a user or job; `None` means no limit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Quota {
    /// Host memory of all sessions.
    pub host_bytes_max: Option<u64>,
    /// Space on all devices, including the sessions' scratch tiles.
    pub device_bytes_max: Option<u64>,
    /// Jobs in the store, open or not; for users only. `None`: [`JOBS_A_USER_DEFAULT`].
    pub jobs_max: Option<u32>,
    /// Concurrent sessions. `None`: no limit for a job, [`Limits::sessions_a_user`] for a user.
    pub sessions_max: Option<u32>,
    /// Operations in flight of all sessions: the sum of their iodepths.
    pub inflight_max: Option<u32>,
    /// Bandwidth of a drive relative to other users, or to the user's other jobs, while several want more than they get. `None`: [`WEIGHT_DEFAULT`].
    pub weight: Option<u32>,
}

impl Quota {
    /// Returns this quota, with the values of `other` where this one has none.
    #[must_use]
    pub fn or(self, other: Self) -> Self {
        Self {
            host_bytes_max: self.host_bytes_max.or(other.host_bytes_max),
            device_bytes_max: self.device_bytes_max.or(other.device_bytes_max),
            jobs_max: self.jobs_max.or(other.jobs_max),
            sessions_max: self.sessions_max.or(other.sessions_max),
            inflight_max: self.inflight_max.or(other.inflight_max),
            weight: self.weight.or(other.weight),
        }
    }
}

/// All quotas, from the settings.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Quotas {
    /// Quota of each user; a user's own values replace it.
    pub default: Quota,
    /// Quota of each job; a job's own values replace it.
    pub job: Quota,
    /// Quotas of single users.
    pub uids: BTreeMap<u32, Quota>,
    /// Quotas of single jobs, by user.
    pub jobs: BTreeMap<u32, BTreeMap<JobName, Quota>>,
}

/// Weights of a job's turns at a drive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Weights {
    /// Weight of the user beside other users.
    pub user: u32,
    /// Weight of the job beside its user's other jobs.
    pub job: u32,
}

impl Default for Weights {
    fn default() -> Self {
        Self {
            user: WEIGHT_DEFAULT,
            job: WEIGHT_DEFAULT,
        }
    }
}

impl Quotas {
    /// Returns the quota that applies to a user.
    pub fn for_user(&self, uid: u32) -> Quota {
        let own = self.uids.get(&uid).copied().unwrap_or_default();
        own.or(self.default)
    }

    /// Returns the quota that applies to a job: of its name, else of its run's name.
    pub fn of_job(&self, uid: u32, name: &JobName) -> Quota {
        let own = self.jobs.get(&uid).and_then(|jobs| {
            let of_run = || {
                jobs.iter()
                    .find(|(run, _)| is_of_run(name.as_str(), run.as_str()))
            };
            jobs.get(name).or_else(|| Some(of_run()?.1))
        });
        own.copied().unwrap_or_default().or(self.job)
    }

    /// Returns the quotas of single jobs that apply to none of `jobs`, as the settings name them.
    pub fn without_job<'a>(&self, jobs: impl Iterator<Item = (u32, &'a JobName)>) -> Vec<String> {
        let jobs: Vec<(u32, &JobName)> = jobs.collect();
        let all = self
            .jobs
            .iter()
            .flat_map(|(uid, jobs)| jobs.keys().map(move |name| (*uid, name)));
        let applies = |uid: u32, name: &JobName, of: u32, job: &JobName| {
            uid == of && (job == name || is_of_run(job.as_str(), name.as_str()))
        };
        let unused =
            all.filter(|(uid, name)| !jobs.iter().any(|(of, job)| applies(*uid, name, *of, job)));
        unused
            .map(|(uid, name)| format!("quota.uid.{uid}.job.{name}"))
            .collect()
    }

    /// Returns the weights of a job and its user in the drives' queues.
    pub fn weights(&self, uid: u32, name: &JobName) -> Weights {
        let default = Weights::default();
        Weights {
            user: self.for_user(uid).weight.unwrap_or(default.user),
            job: self.of_job(uid, name).weight.unwrap_or(default.job),
        }
    }
}
