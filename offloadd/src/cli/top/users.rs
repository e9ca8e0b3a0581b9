//! What each user has of its quota, and the fraction of the moved bytes that each user and each job had between two snapshots.
//!
//! A user's fraction is of the bytes of all users, so that every caller sees the same number; a job's is of its user's bytes.

use offload_support::units::ApproxBytes;
use offloadd::core::UserState;
use offloadd::metrics::Snapshot;

use super::between::{TransferRates, before_of_device, before_of_job};

pub(super) struct UserLine<'a> {
    pub(super) state: &'a UserState,
    pub(super) read_bytes_per_s: f64,
    pub(super) written_bytes_per_s: f64,
    /// `None` if no bytes were moved.
    pub(super) actual: Option<f64>,
}

/// Users of the visible jobs, ordered by user ID.
pub(super) fn users<'a>(
    before: Option<&Snapshot>,
    now: &'a Snapshot,
    seconds: f64,
) -> Vec<UserLine<'a>> {
    let devices = now.devices.iter().map(|device| {
        let earlier = before_of_device(before, device);
        TransferRates::between(earlier.map(|d| &d.counts), &device.counts, seconds).bytes_per_s()
    });
    let all_bytes_per_s: f64 = devices.sum();
    let line = |state: &'a UserState| {
        let jobs = now.jobs.iter().filter(|job| job.state.uid == state.uid);
        let [mut read_bytes_per_s, mut written_bytes_per_s] = [0.0; 2];
        for job in jobs {
            let earlier = before_of_job(before, job);
            let moved = TransferRates::between(earlier.map(|j| &j.counts), &job.counts, seconds);
            read_bytes_per_s += moved.read_bytes_per_s;
            written_bytes_per_s += moved.written_bytes_per_s;
        }
        UserLine {
            state,
            read_bytes_per_s,
            written_bytes_per_s,
            actual: fraction(read_bytes_per_s + written_bytes_per_s, all_bytes_per_s),
        }
    };
    now.users.iter().map(line).collect()
}

/// Fraction of its user's bytes that a job moved.
pub(super) fn fraction_of(users: &[UserLine], uid: u32, moved: &TransferRates) -> Option<f64> {
    let user = users.iter().find(|user| user.state.uid == uid)?;
    let all = user.read_bytes_per_s + user.written_bytes_per_s;
    fraction(moved.bytes_per_s(), all)
}

fn fraction(of: f64, all: f64) -> Option<f64> {
    // The sum of all lacks a device that was removed in between, so the quotient may exceed 1.
    (all > 0.0).then(|| (of / all).min(1.0))
}

/// Titles of [`quota_columns`].
pub(in crate::cli) fn quota_titles() -> String {
    columns([
        "sessions".into(),
        "jobs".into(),
        "host memory".into(),
        "on devices".into(),
    ])
}

/// What a user has, and may have by its quota: "1/32", "4.0 GiB/32.0 GiB"; without a quota what it has alone.
pub(in crate::cli) fn quota_columns(user: &UserState) -> String {
    let bytes = |used, max: Option<u64>| match max {
        Some(max) => format!("{}/{}", ApproxBytes(used), ApproxBytes(max)),
        None => ApproxBytes(used).to_string(),
    };
    columns([
        format!("{}/{}", user.session_count, user.sessions_max),
        format!("{}/{}", user.job_count, user.jobs_max),
        bytes(user.host_bytes, user.host_bytes_max),
        bytes(user.device_bytes, user.device_bytes_max),
    ])
}

fn columns([sessions, jobs, host, devices]: [String; 4]) -> String {
    format!("{sessions:>9} {jobs:>9} {host:>19} {devices:>19}")
}
