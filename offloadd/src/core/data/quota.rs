//! Quotas of users and jobs. A request beyond a quota is refused, and the refusal names what is taken and by which jobs.
//! Granted resources are never taken back, so that a started job can continue.

use std::collections::BTreeMap;

use offload_api::IODEPTH_MIN;
use offload_api::fault::{Fault, FaultKind};
use offload_support::units::ApproxBytes;

use super::{Data, JobKey};
use crate::core::{OpenSession, Peer};
use crate::quota::{JOBS_A_USER_DEFAULT, Quota, WEIGHT_DEFAULT, Weights};
use crate::store::definition::JobName;

/// Limit of a user's sessions whose process has not fetched the descriptors. The ranks of a node open theirs at once, so processes ask again.
const UNCLAIMED_A_USER: usize = 4;

/// Jobs that a refusal names.
const NAMED_MAX: usize = 4;

/// Resources that a user or job has.
#[derive(Clone, Copy, Debug, Default)]
struct Held {
    host_bytes: u64,
    sessions: u32,
    inflight: u32,
}

/// Holder of a quota.
#[derive(Clone, Copy, Debug)]
enum Whose<'a> {
    User(u32),
    Job(&'a JobKey),
}

impl Whose<'_> {
    fn has(self, key: &JobKey) -> bool {
        match self {
            Self::User(uid) => key.uid == uid,
            Self::Job(job) => key == job,
        }
    }
}

impl std::fmt::Display for Whose<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::User(uid) => write!(f, "uid {uid}"),
            Self::Job(key) => write!(f, "job {} of uid {}", key.name, key.uid),
        }
    }
}

impl Data {
    /// Returns the quotas of the user and of the job.
    fn quotas_of<'a>(&self, key: &'a JobKey) -> [(Whose<'a>, Quota); 2] {
        [
            (Whose::User(key.uid), self.quotas.of(key.uid)),
            (Whose::Job(key), self.quotas.of_job(key.uid, &key.name)),
        ]
    }

    fn held(&self, whose: Whose<'_>) -> Held {
        let sessions = self
            .sessions
            .values()
            .filter(|session| whose.has(&session.key));
        sessions.fold(Held::default(), |held, session| Held {
            host_bytes: held.host_bytes + session.geometry.arena_bytes(),
            sessions: held.sessions + 1,
            inflight: held.inflight + session.iodepth,
        })
    }

    /// Bytes on all devices, of jobs and of sessions' own tiles.
    fn held_on_devices(&self, whose: Whose<'_>) -> u64 {
        let jobs = self.jobs.iter().filter(|(key, _)| whose.has(key));
        let reserved = jobs.map(|(_, job)| job.reserved_bytes());
        let sessions = self
            .sessions
            .values()
            .filter(|session| whose.has(&session.key));
        reserved.sum::<u64>() + sessions.map(|session| session.scratch_bytes()).sum::<u64>()
    }

    /// Returns the weights of a job and its user in the drives' queues.
    pub(super) fn weights_of(&self, uid: u32, name: &JobName) -> Weights {
        let user = self.quotas.of(uid).weight;
        let job = self.quotas.of_job(uid, name).weight;
        let [user, job] = [user, job].map(|weight| weight.unwrap_or(WEIGHT_DEFAULT));
        Weights { user, job }
    }

    /// Bytes of host memory that `peer` may still take for a session.
    pub(in crate::core) fn arena_free_bytes_of(&self, peer: Peer) -> u64 {
        let free = self.arena_free_bytes();
        let whose = Whose::User(peer.uid);
        match self.quotas.of(peer.uid).host_bytes_max {
            Some(max) => free.min(max.saturating_sub(self.held(whose).host_bytes)),
            None => free,
        }
    }

    /// Bytes that a new job of `peer` may reserve where the devices have `free_bytes`.
    pub(in crate::core) fn device_free_bytes_of(&self, peer: Peer, free_bytes: u64) -> u64 {
        let held_bytes = || self.held_on_devices(Whose::User(peer.uid));
        match self.quotas.of(peer.uid).device_bytes_max {
            Some(max) => free_bytes.min(max.saturating_sub(held_bytes())),
            None => free_bytes,
        }
    }

    /// Sessions that `peer` may still open.
    pub(in crate::core) fn session_free_count_of(&self, peer: Peer) -> u32 {
        let free = (self.limits.sessions_max).saturating_sub(self.sessions.len() as u32);
        let held = self.held(Whose::User(peer.uid)).sessions;
        free.min(self.sessions_max_of(peer.uid).saturating_sub(held))
    }

    /// Limit of a user's sessions.
    fn sessions_max_of(&self, uid: u32) -> u32 {
        let quota = self.quotas.of(uid).sessions_max;
        quota.unwrap_or(self.limits.sessions_a_user())
    }

    /// Number of local ranks of a job that have not joined, including the one that is joining.
    fn ranks_to_come(&self, key: &JobKey, local_ranks: u32) -> u32 {
        let here = (self.jobs.get(key)).map_or(0, |job| job.members.len() as u32);
        local_ranks.saturating_sub(here).max(1)
    }

    /// Operations in flight that ranks still to join need, of the user's other jobs that have begun.
    fn promised_inflight(&self, whose: Whose<'_>, opening: &JobKey) -> u32 {
        let Whose::User(_) = whose else {
            return 0;
        };
        let begun = (self.jobs.iter())
            .filter(|(key, job)| whose.has(key) && *key != opening && !job.members.is_empty());
        let to_come = begun.map(|(_, job)| job.ranks_to_come());
        to_come.sum::<u32>().saturating_mul(IODEPTH_MIN)
    }

    /// Checks that not too many of a user's sessions wait for their process to fetch the descriptors: each has memory and a place that others
    /// lack, and a process that never comes keeps them for seconds.
    pub(super) fn check_unclaimed(&self, uid: u32) -> Result<(), Fault> {
        let sessions = self.sessions.values();
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

    /// Checks that a session with an arena of `arena_bytes` is allowed. Returns its limit of operations in flight.
    pub(super) fn admit_session(
        &self,
        key: &JobKey,
        open: &OpenSession,
        arena_bytes: u64,
    ) -> Result<u32, Fault> {
        let mut iodepth = open.iodepth.min(self.limits.iodepth_max);
        for (whose, quota) in self.quotas_of(key) {
            let held = self.held(whose);
            let sessions_max = match whose {
                Whose::User(uid) => Some(self.sessions_max_of(uid)),
                Whose::Job(_) => quota.sessions_max,
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
        let max = (self.quotas.of(key.uid).jobs_max).unwrap_or(JOBS_A_USER_DEFAULT);
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

    /// Reserves `bytes` on devices for a job whose definition is being written.
    ///
    /// # Errors
    /// The quota of the job or of its user is exceeded.
    pub(in crate::core) fn reserve(&mut self, key: &JobKey, bytes: u64) -> Result<(), Fault> {
        self.admit_device_bytes(key, bytes)?;
        if let Some(defining) = (self.jobs.get_mut(key)).and_then(|job| job.defining.as_mut()) {
            defining.reserved_bytes = bytes;
        }
        Ok(())
    }

    /// Checks that `bytes` more on devices may be reserved.
    pub(super) fn admit_device_bytes(&self, key: &JobKey, bytes: u64) -> Result<(), Fault> {
        for (whose, quota) in self.quotas_of(key) {
            let Some(max) = quota.device_bytes_max else {
                continue;
            };
            let held = self.held_on_devices(whose);
            if held.saturating_add(bytes) > max {
                let what = format!(
                    "job {} needs {} on devices; {whose} {}",
                    key.name,
                    ApproxBytes(bytes),
                    lacking(bytes, max, held)
                );
                let held_by = |(other, job): (&JobKey, &super::job::Job)| {
                    let bytes = job.reserved_bytes();
                    (whose.has(other) && bytes > 0).then(|| (other.name.to_string(), bytes))
                };
                let holders = self.jobs.iter().filter_map(held_by).collect();
                let what = format!("{what}{}", named(holders, true));
                return Err(advised(FaultKind::NoSpace, what, "device_bytes_max"));
            }
        }
        Ok(())
    }

    fn refused(&self, kind: FaultKind, whose: Whose<'_>, what: String, setting: &str) -> Fault {
        let mut holders: BTreeMap<String, u64> = BTreeMap::new();
        for session in self
            .sessions
            .values()
            .filter(|session| whose.has(&session.key))
        {
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
