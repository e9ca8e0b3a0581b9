//! Limits of the daemon, and quotas of users and jobs. A request beyond a quota is refused, and the refusal names what is taken and by which jobs.
//! Granted resources are never taken back, so that a started job can continue.

use std::collections::{BTreeMap, BTreeSet};

use offload_api::IODEPTH_MIN;
use offload_api::fault::{Fault, FaultKind};
use offload_api::geometry::Geometry;
use offload_support::units::ApproxBytes;

use super::JobKey;
use super::job::Job;
use super::jobs::JobTable;
use super::session::Session;
use super::sessions::SessionTable;
use super::snapshot::Viewer;
use crate::core::{OpenSession, Peer};
use crate::quota::{JOBS_A_USER_DEFAULT, Limits, Quota, Quotas, WEIGHT_DEFAULT};
use crate::store::manifest::LOCAL_RANKS_MAX;

/// Limits and quotas, and what they are compared with. Changes nothing.
pub(in crate::core) struct Admission<'a> {
    pub(super) limits: &'a Limits,
    pub(super) quotas: &'a Quotas,
    pub(super) jobs: &'a JobTable,
    pub(super) sessions: &'a SessionTable,
}

/// Limit of a user's sessions whose process has not fetched the descriptors. The ranks of a node open theirs at once, so processes ask again.
const UNCLAIMED_A_USER: usize = 4;

/// Jobs that a refusal names.
const NAMED_MAX: usize = 4;

/// Resources that a user or job has.
#[derive(Clone, Copy, Debug, Default)]
struct ResourceUse {
    host_bytes: u64,
    sessions: u32,
    inflight: u32,
}

/// What a user has, and may have.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct UserState {
    pub uid: u32,
    /// Weight in the drives' queues, beside other users.
    pub weight: u32,
    /// Host memory of the sessions.
    pub host_bytes: u64,
    /// Limit of `host_bytes`; `None`: the daemon's.
    pub host_bytes_max: Option<u64>,
    /// Space on all devices, of jobs and of the sessions' scratch tiles.
    pub device_bytes: u64,
    /// Limit of `device_bytes`; `None`: the devices' space.
    pub device_bytes_max: Option<u64>,
    pub session_count: u64,
    /// Limit of `session_count`.
    pub sessions_max: u64,
    /// Jobs in the store, open or not.
    pub job_count: u64,
    /// Limit of `job_count`.
    pub jobs_max: u64,
}

/// Holder of a quota.
#[derive(Clone, Copy, Debug)]
enum QuotaHolder<'a> {
    User(u32),
    Job(&'a JobKey),
}

impl QuotaHolder<'_> {
    fn has(self, key: &JobKey) -> bool {
        match self {
            Self::User(uid) => key.uid == uid,
            Self::Job(job) => key == job,
        }
    }
}

impl std::fmt::Display for QuotaHolder<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::User(uid) => write!(f, "uid {uid}"),
            Self::Job(key) => write!(f, "job {} of uid {}", key.name, key.uid),
        }
    }
}

impl Admission<'_> {
    /// Returns the quotas of the user and of the job.
    fn quotas_of<'a>(&self, key: &'a JobKey) -> [(QuotaHolder<'a>, Quota); 2] {
        [
            (QuotaHolder::User(key.uid), self.quotas.for_user(key.uid)),
            (
                QuotaHolder::Job(key),
                self.quotas.of_job(key.uid, &key.name),
            ),
        ]
    }

    fn sessions_of<'s>(&'s self, whose: QuotaHolder<'s>) -> impl Iterator<Item = &'s Session> {
        let sessions = self.sessions.iter();
        sessions.filter(move |session| whose.has(&session.key))
    }

    fn usage(&self, whose: QuotaHolder<'_>) -> ResourceUse {
        self.sessions_of(whose)
            .fold(ResourceUse::default(), |held, session| ResourceUse {
                host_bytes: held.host_bytes + session.geometry.arena_bytes(),
                sessions: held.sessions + 1,
                inflight: held.inflight + session.iodepth,
            })
    }

    /// Bytes on all devices, of jobs and of sessions' own tiles.
    fn usage_on_devices(&self, whose: QuotaHolder<'_>) -> u64 {
        let jobs = self.jobs.iter().filter(|job| whose.has(&job.key));
        let reserved = jobs.map(Job::reserved_bytes);
        let scratch = self.sessions_of(whose).map(Session::scratch_bytes);
        reserved.sum::<u64>() + scratch.sum::<u64>()
    }

    /// Bytes of host memory that are free.
    pub(super) fn arena_free_bytes(&self) -> u64 {
        // After the limit was lowered, more than the limit may be in use.
        (self.limits.arena_bytes_max).saturating_sub(self.sessions.arena_bytes())
    }

    /// Bytes of host memory that `peer` may still take for a session.
    pub(in crate::core) fn arena_free_bytes_of(&self, peer: Peer) -> u64 {
        let free = self.arena_free_bytes();
        let whose = QuotaHolder::User(peer.uid);
        match self.quotas.for_user(peer.uid).host_bytes_max {
            Some(max) => free.min(max.saturating_sub(self.usage(whose).host_bytes)),
            None => free,
        }
    }

    /// Bytes that a new job of `peer` may reserve where the devices have `free_bytes`.
    pub(in crate::core) fn device_free_bytes_of(&self, peer: Peer, free_bytes: u64) -> u64 {
        let held_bytes = || self.usage_on_devices(QuotaHolder::User(peer.uid));
        match self.quotas.for_user(peer.uid).device_bytes_max {
            Some(max) => free_bytes.min(max.saturating_sub(held_bytes())),
            None => free_bytes,
        }
    }

    /// Sessions that `peer` may still open.
    pub(in crate::core) fn session_free_count_of(&self, peer: Peer) -> u32 {
        let free = (self.limits.sessions_max).saturating_sub(self.sessions.len() as u32);
        let held = self.usage(QuotaHolder::User(peer.uid)).sessions;
        free.min(self.sessions_max_of(peer.uid).saturating_sub(held))
    }

    /// Limit of a user's sessions.
    fn sessions_max_of(&self, uid: u32) -> u32 {
        let quota = self.quotas.for_user(uid).sessions_max;
        quota.unwrap_or(self.limits.sessions_a_user())
    }

    /// Limit of a user's jobs in the store.
    fn jobs_max_of(&self, uid: u32) -> u32 {
        let quota = self.quotas.for_user(uid).jobs_max;
        quota.unwrap_or(JOBS_A_USER_DEFAULT)
    }

    /// Returns the users of the jobs that `viewer` may see, by user ID.
    pub(in crate::core) fn user_states(&self, viewer: Viewer) -> Vec<UserState> {
        let seen = self.jobs.iter().filter(|job| viewer.sees(&job.key));
        let uids: BTreeSet<u32> = seen.map(|job| job.key.uid).collect();
        let states = uids.into_iter().map(|uid| {
            let whose = QuotaHolder::User(uid);
            let held = self.usage(whose);
            let quota = self.quotas.for_user(uid);
            let jobs = self.jobs.iter().filter(|job| whose.has(&job.key));
            UserState {
                uid,
                weight: quota.weight.unwrap_or(WEIGHT_DEFAULT),
                host_bytes: held.host_bytes,
                host_bytes_max: quota.host_bytes_max,
                device_bytes: self.usage_on_devices(whose),
                device_bytes_max: quota.device_bytes_max,
                session_count: held.sessions.into(),
                sessions_max: self.sessions_max_of(uid).into(),
                job_count: jobs.filter(|job| job.stored.is_some()).count() as u64,
                jobs_max: self.jobs_max_of(uid).into(),
            }
        });
        states.collect()
    }

    /// Number of local ranks of a job that have not joined, including the one that is joining.
    fn ranks_to_come(&self, key: &JobKey, local_ranks: u32) -> u32 {
        let here = (self.jobs.get(key)).map_or(0, |job| job.members.len() as u32);
        local_ranks.saturating_sub(here).max(1)
    }

    /// Operations in flight that ranks still to join need, of the user's other jobs that have begun.
    fn promised_inflight(&self, whose: QuotaHolder<'_>, opening: &JobKey) -> u32 {
        let QuotaHolder::User(_) = whose else {
            return 0;
        };
        let begun = (self.jobs.iter())
            .filter(|job| whose.has(&job.key) && job.key != *opening && !job.members.is_empty());
        let to_come = begun.map(Job::ranks_to_come);
        to_come.sum::<u32>().saturating_mul(IODEPTH_MIN)
    }

    /// Checks that not too many of a user's sessions wait for their process to fetch the descriptors: each has memory and a place that others
    /// lack, and a process that never comes keeps them for seconds.
    pub(super) fn check_unclaimed(&self, uid: u32) -> Result<(), Fault> {
        let sessions = self.sessions.iter();
        let unclaimed = sessions.filter(|session| session.uid == uid && !session.claimed);
        if unclaimed.count() < UNCLAIMED_A_USER {
            return Ok(());
        }
        Err(Fault::new(
            FaultKind::Queued,
            format!(
                "{UNCLAIMED_A_USER} new sessions of uid {uid} wait for their processes to fetch the descriptors: open this one again when one has done so"
            ),
        ))
    }

    /// Checks that a session may be opened, except for quotas. Returns the geometry of its arena.
    pub(super) fn check_open(&self, key: &JobKey, open: &OpenSession) -> Result<Geometry, Fault> {
        let fault = |kind, message| Err(Fault::new(kind, message));
        let (name, rank) = (&key.name, open.rank);
        if self.sessions.has_token(&open.token) {
            return fault(FaultKind::Invalid, "the token is in use".into());
        }
        if open.local_ranks == 0 || open.local_ranks > LOCAL_RANKS_MAX || open.iodepth == 0 {
            return fault(
                FaultKind::Invalid,
                format!(
                    "{} local ranks with iodepth {}: expected 1 to {LOCAL_RANKS_MAX} local ranks and an iodepth of at least 1",
                    open.local_ranks, open.iodepth
                ),
            );
        }
        if let Some(job) = self.jobs.get(key) {
            job.check_member(rank, open.local_ranks, &self.sessions.ending(key))?;
        }
        // After that: a process that follows another on a job waits for its session to end, which may be the last that there can be.
        if self.sessions.len() >= self.limits.sessions_max as usize {
            return fault(
                FaultKind::TooMany,
                format!(
                    "{} sessions are open, which is the limit",
                    self.sessions.len()
                ),
            );
        }
        let geometry = Geometry::new(&open.classes)
            .map_err(|error| Fault::new(FaultKind::Invalid, error.to_string()))?;
        if geometry.arena_bytes() > self.arena_free_bytes() {
            return fault(
                FaultKind::NoMemory,
                format!(
                    "rank {rank} of job {name} asks for {} of host memory, {} of {} are free, {} too few: ask for less, or raise arena_bytes_max",
                    ApproxBytes(geometry.arena_bytes()),
                    ApproxBytes(self.arena_free_bytes()),
                    ApproxBytes(self.limits.arena_bytes_max),
                    ApproxBytes(geometry.arena_bytes() - self.arena_free_bytes())
                ),
            );
        }
        Ok(geometry)
    }

    /// Checks that a session with an arena of `arena_bytes` is allowed. Returns its limit of operations in flight.
    pub(super) fn admit_session(
        &self,
        key: &JobKey,
        open: &OpenSession,
        arena_bytes: u64,
    ) -> Result<u32, Fault> {
        let mut iodepth = open.iodepth.min(self.limits.iodepth_max);
        for (whose, quota) in self.quotas_of(key) {
            let held = self.usage(whose);
            let sessions_max = match whose {
                QuotaHolder::User(uid) => Some(self.sessions_max_of(uid)),
                QuotaHolder::Job(_) => quota.sessions_max,
            };
            if let Some(max) = sessions_max
                && held.sessions >= max
            {
                let what = format!("{whose} may have {max} sessions and has {}", held.sessions);
                return Err(self.refused(FaultKind::TooMany, whose, what, "sessions_max"));
            }
            if let Some(max) = quota.host_bytes_max
                && held.host_bytes.saturating_add(arena_bytes) > max
            {
                let what = format!(
                    "rank {} of job {} asks for {} of host memory; {whose} {}",
                    open.rank,
                    key.name,
                    ApproxBytes(arena_bytes),
                    lacking(arena_bytes, max, held.host_bytes)
                );
                return Err(self.refused(FaultKind::NoMemory, whose, what, "host_bytes_max"));
            }
            if let Some(max) = quota.inflight_max {
                // A grant of less than was asked for is allowed, but not less than the minimum. Otherwise the first rank would
                // take what the others need.
                let to_come = self.ranks_to_come(key, open.local_ranks);
                let promised = self.promised_inflight(whose, key);
                let taken = held.inflight.saturating_add(promised);
                iodepth = iodepth.min(max.saturating_sub(taken) / to_come);
                if iodepth < IODEPTH_MIN.min(open.iodepth) || iodepth == 0 {
                    let what = format!(
                        "{whose} may have {max} operations in flight and has {}; ranks of other jobs that have not joined yet need {promised}, and {to_come} ranks of job {} need at least {IODEPTH_MIN} each",
                        held.inflight, key.name
                    );
                    return Err(self.refused(FaultKind::TooMany, whose, what, "inflight_max"));
                }
            }
        }
        Ok(iodepth)
    }

    /// Checks that a user with `held` jobs in the catalog may have one more.
    pub(in crate::core) fn admit_job(&self, key: &JobKey, held: usize) -> Result<(), Fault> {
        let max = self.jobs_max_of(key.uid);
        if held < max as usize {
            return Ok(());
        }
        let what = format!("uid {} may have {max} jobs and has {held}", key.uid);
        Err(Fault::new(
            FaultKind::TooMany,
            format!(
                "{what}: delete one (`offloadd job delete`), or have the administrator raise `jobs_max` of this user's quota"
            ),
        ))
    }

    /// Checks that `bytes` more on devices may be reserved.
    ///
    /// # Errors
    /// The quota of the job or of its user is exceeded.
    pub(in crate::core) fn admit_device_bytes(
        &self,
        key: &JobKey,
        bytes: u64,
    ) -> Result<(), Fault> {
        for (whose, quota) in self.quotas_of(key) {
            let Some(max) = quota.device_bytes_max else {
                continue;
            };
            let held = self.usage_on_devices(whose);
            if held.saturating_add(bytes) > max {
                let what = format!(
                    "job {} needs {} on devices; {whose} {}",
                    key.name,
                    ApproxBytes(bytes),
                    lacking(bytes, max, held)
                );
                let held_by = |job: &Job| {
                    let (other, bytes) = (&job.key, job.reserved_bytes());
                    (whose.has(other) && bytes > 0).then(|| (other.name.to_string(), bytes))
                };
                let holders = self.jobs.iter().filter_map(held_by).collect();
                let what = format!("{what}{}", named(holders, true));
                return Err(advised(FaultKind::NoSpace, what, "device_bytes_max"));
            }
        }
        Ok(())
    }

    fn refused(
        &self,
        kind: FaultKind,
        whose: QuotaHolder<'_>,
        what: String,
        setting: &str,
    ) -> Fault {
        let mut holders: BTreeMap<String, u64> = BTreeMap::new();
        for session in self.sessions_of(whose) {
            *holders.entry(session.key.name.to_string()).or_default() += match kind {
                FaultKind::NoMemory => session.geometry.arena_bytes(),
                _ if setting == "inflight_max" => u64::from(session.iodepth),
                _ => 1,
            };
        }
        let in_bytes = kind == FaultKind::NoMemory;
        let what = format!("{what}{}", named(holders.into_iter().collect(), in_bytes));
        advised(kind, what, setting)
    }
}

fn advised(kind: FaultKind, what: String, setting: &str) -> Fault {
    Fault::new(
        kind,
        format!(
            "{what}: ask for less, end or delete a job, or have the administrator raise `{setting}` of the quota"
        ),
    )
}

/// Says what a holder of a quota has of it, and how much is missing for a request of `asked_bytes`.
fn lacking(asked_bytes: u64, max_bytes: u64, held_bytes: u64) -> String {
    let free_bytes = max_bytes.saturating_sub(held_bytes);
    format!(
        "may have {} and has {}, so {} are free, {} too few",
        ApproxBytes(max_bytes),
        ApproxBytes(held_bytes),
        ApproxBytes(free_bytes),
        ApproxBytes(asked_bytes.saturating_sub(free_bytes))
    )
}

/// Formats holders as " (tiny 5, large 7)", the largest first. They are jobs of the user who reads this.
fn named(mut holders: Vec<(String, u64)>, in_bytes: bool) -> String {
    if holders.is_empty() {
        return String::new();
    }
    holders.sort_by_key(|(_, held)| std::cmp::Reverse(*held));
    let more = holders.len().saturating_sub(NAMED_MAX);
    let mut words: Vec<_> = (holders.iter().take(NAMED_MAX))
        .map(|(name, held)| match in_bytes {
            true => format!("{name} {}", ApproxBytes(*held)),
            false => format!("{name} {held}"),
        })
        .collect();
    if more > 0 {
        words.push(format!("{more} more"));
    }
    format!(" ({})", words.join(", "))
}
