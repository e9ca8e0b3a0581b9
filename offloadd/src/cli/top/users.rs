//! Who got which part of what the drives moved between two looks, beside the shares of the settings.
//!
//! A user's part is one of all bytes, so that it is the same for whoever looks; a job's is one of its user's. Who wants less than
//! his share gets less: the rest is the others'.

use std::collections::BTreeMap;

use offloadd::metrics::Snapshot;
use serde_json::{Value, json};

use super::between::{Moved, before_of_device, before_of_job};
use super::fit::Part;
use super::table::{got, rate};

/// A user who has jobs.
pub(super) struct User {
    uid: u32,
    share: u32,
    session_count: u64,
    read_bytes_per_s: f64,
    written_bytes_per_s: f64,
    /// `None`: nothing was moved.
    got: Option<f64>,
}

impl User {
    pub(super) fn json(&self) -> Value {
        json!({
            "uid": self.uid,
            "share": self.share,
            "got": self.got,
            "session_count": self.session_count,
            "read_bytes_per_s": self.read_bytes_per_s,
            "written_bytes_per_s": self.written_bytes_per_s,
        })
    }
}

/// All whose jobs are seen, by number.
pub(super) fn users(before: Option<&Snapshot>, now: &Snapshot, seconds: f64) -> Vec<User> {
    let devices = now.devices.iter().map(|device| {
        let earlier = before_of_device(before, device);
        Moved::between(earlier.map(|d| &d.counts), &device.counts, seconds).bytes_per_s()
    });
    let all_bytes_per_s: f64 = devices.sum();
    let mut users = BTreeMap::new();
    for job in &now.jobs {
        let earlier = before_of_job(before, job);
        let moved = Moved::between(earlier.map(|j| &j.counts), &job.counts, seconds);
        let uid = job.state.uid;
        let user = users.entry(uid).or_insert(User {
            uid,
            share: job.state.shares.user,
            session_count: 0,
            read_bytes_per_s: 0.0,
            written_bytes_per_s: 0.0,
            got: None,
        });
        user.session_count += job.state.session_count;
        user.read_bytes_per_s += moved.read_bytes_per_s;
        user.written_bytes_per_s += moved.written_bytes_per_s;
        user.got = part(
            user.read_bytes_per_s + user.written_bytes_per_s,
            all_bytes_per_s,
        );
    }
    users.into_values().collect()
}

/// What a job got of what its user's jobs did.
pub(super) fn part_of(users: &[User], uid: u32, moved: &Moved) -> Option<f64> {
    let user = users.iter().find(|user| user.uid == uid)?;
    let all = user.read_bytes_per_s + user.written_bytes_per_s;
    part(moved.bytes_per_s(), all)
}

fn part(of: f64, all: f64) -> Option<f64> {
    // A device that left meanwhile is not among all.
    (all > 0.0).then(|| (of / all).min(1.0))
}

/// A table, where there are several with processes: of a single one the jobs say all.
pub(super) fn table(users: &[User]) -> Option<Part> {
    let shown: Vec<_> = users.iter().filter(|user| user.session_count > 0).collect();
    if shown.len() < 2 {
        return None;
    }
    let mut part = Part::under(format!(
        "{:<32} {:>9} {:>9} {:>5} {:>4} {:>9}",
        "user", "read", "write", "share", "got", "sessions"
    ));
    for user in shown {
        let line = format!(
            "{:<32} {:>9} {:>9} {:>5} {:>4} {:>9}",
            format!("uid {}", user.uid),
            rate(user.read_bytes_per_s),
            rate(user.written_bytes_per_s),
            user.share,
            got(user.got),
            user.session_count
        );
        part.push(&line, user.read_bytes_per_s + user.written_bytes_per_s);
    }
    Some(part)
}
