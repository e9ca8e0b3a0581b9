//! What the settings let be handed out: by the daemon in all, and to each user and job.

use std::collections::BTreeMap;

use crate::store::catalog::JOBS_MAX;
use crate::store::definition::JobName;

/// Weight of a user among users, and of a job among its user's jobs, if the settings do not set one.
pub const WEIGHT_DEFAULT: u32 = 100;

/// Jobs of a user where the settings say nothing: a quarter of what a store has places for, so that one user keeps nobody out.
pub const JOBS_A_USER_DEFAULT: u32 = JOBS_MAX as u32 / 4;

/// The largest: a hundred times the usual one. The smallest is 1, a hundredth of it.
pub const WEIGHT_MAX: u32 = 10_000;

/// What the core may hand out, from the settings.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Host memory of all arenas together.
    pub arena_bytes_max: u64,
    /// Sessions at a time.
    pub sessions_max: u32,
    /// Operations in flight of one session, at most `IODEPTH_MAX`.
    pub iodepth_max: u32,
    /// What may be copied a second while tiles move, where nobody says otherwise for a move; `None`: as much as goes.
    pub rebalance_bytes_per_s_max: Option<u64>,
}

/// Limits; `None` is none.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Quota {
    /// Host memory of all its sessions.
    pub host_bytes_max: Option<u64>,
    /// On all devices, with what sessions keep for themselves.
    pub device_bytes_max: Option<u64>,
    /// Jobs in the store, open or not; of a user only. `None`: [`JOBS_A_USER_DEFAULT`].
    pub jobs_max: Option<u32>,
    /// Sessions at a time.
    pub sessions_max: Option<u32>,
    /// Operations in flight of all its sessions: as much as their iodepths together.
    pub inflight_max: Option<u32>,
    /// What a drive moves is divided in this proportion among users who want more than they get, and a user's part so among
    /// his jobs. `None`: [`WEIGHT_DEFAULT`].
    pub weight: Option<u32>,
}

impl Quota {
    /// This one, and where it says nothing what `other` says.
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
    /// Of each user, where his own says nothing.
    pub default: Quota,
    /// Of each job, where its own says nothing.
    pub job: Quota,
    /// Of these users.
    pub uids: BTreeMap<u32, Quota>,
    /// Of these jobs, by user.
    pub jobs: BTreeMap<u32, BTreeMap<JobName, Quota>>,
}

/// What turns at a drive weigh.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Weights {
    /// Of a user beside others.
    pub user: u32,
    /// Of a job beside its user's others.
    pub job: u32,
}

impl Quotas {
    /// What holds for a user.
    pub fn of(&self, uid: u32) -> Quota {
        let own = self.uids.get(&uid).copied().unwrap_or_default();
        own.or(self.default)
    }

    /// What holds for a job.
    pub fn of_job(&self, uid: u32, name: &JobName) -> Quota {
        let own = self.jobs.get(&uid).and_then(|jobs| jobs.get(name));
        own.copied().unwrap_or_default().or(self.job)
    }
}
