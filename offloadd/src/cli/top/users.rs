//! The fraction of the moved bytes that each user and each job had between two snapshots.
//!
//! A user's fraction is of the bytes of all users, so that every caller sees the same number; a job's is of its user's bytes.

use std::collections::BTreeMap;

use offloadd::metrics::Snapshot;
use serde::Serialize;

use super::between::{TransferRates, before_of_device, before_of_job};

#[derive(Serialize)]
pub(super) struct UserLine {
    pub(super) uid: u32,
    pub(super) weight: u32,
    pub(super) session_count: u64,
    pub(super) read_bytes_per_s: f64,
    pub(super) written_bytes_per_s: f64,
    /// `None` if no bytes were moved.
    pub(super) actual: Option<f64>,
}

/// Users of the visible jobs, ordered by user ID.
pub(super) fn users(before: Option<&Snapshot>, now: &Snapshot, seconds: f64) -> Vec<UserLine> {
    let devices = now.devices.iter().map(|device| {
        let earlier = before_of_device(before, device);
        TransferRates::between(earlier.map(|d| &d.counts), &device.counts, seconds).bytes_per_s()
    });
    let all_bytes_per_s: f64 = devices.sum();
    let mut users = BTreeMap::new();
    for job in &now.jobs {
        let earlier = before_of_job(before, job);
        let moved = TransferRates::between(earlier.map(|j| &j.counts), &job.counts, seconds);
        let uid = job.state.uid;
        let user = users.entry(uid).or_insert(UserLine {
            uid,
            weight: job.state.weights.user,
            session_count: 0,
            read_bytes_per_s: 0.0,
            written_bytes_per_s: 0.0,
            actual: None,
        });
        user.session_count += job.state.session_count;
        user.read_bytes_per_s += moved.read_bytes_per_s;
        user.written_bytes_per_s += moved.written_bytes_per_s;
        user.actual = fraction(
            user.read_bytes_per_s + user.written_bytes_per_s,
            all_bytes_per_s,
        );
    }
    users.into_values().collect()
}

/// Fraction of its user's bytes that a job moved.
pub(super) fn fraction_of(users: &[UserLine], uid: u32, moved: &TransferRates) -> Option<f64> {
    let user = users.iter().find(|user| user.uid == uid)?;
    let all = user.read_bytes_per_s + user.written_bytes_per_s;
    fraction(moved.bytes_per_s(), all)
}

fn fraction(of: f64, all: f64) -> Option<f64> {
    // The sum of all lacks a device that was removed in between, so the quotient may exceed 1.
    (all > 0.0).then(|| (of / all).min(1.0))
}
