//! `offloadd job list`: one line per job, and one per user with what it has of its quota.

use offload_api::proto;
use offload_support::units::ApproxBytes;
use offloadd::core::UserState;

use super::content::{state, steps};
use crate::cli::top::{quota_columns, quota_titles};

/// `users` is empty without a daemon, which has the quotas.
pub(super) fn table(jobs: &[proto::JobContent], users: &[UserState]) -> String {
    let width = jobs
        .iter()
        .map(|job| job.job.len())
        .max()
        .unwrap_or(0)
        .max(16);
    let mut text = format!(
        "{:<width$}  {:>10}  {:>10}  {:>10}  {:>10}  {:>10}  {:>10}  state\n",
        "job", "uid", "generation", "step", "committed", "reserved", "open in"
    );
    for job in jobs {
        let newest = job.generations.last();
        let [generation, step, bytes] = newest.map_or(["-", "-", "-"].map(String::from), |one| {
            [
                one.generation.to_string(),
                steps(&one.ranks),
                ApproxBytes(one.bytes).to_string(),
            ]
        });
        text += &format!(
            "{:<width$}  {:>10}  {generation:>10}  {step:>10}  {bytes:>10}  {:>10}  {:>10}  {}\n",
            job.job,
            job.uid,
            ApproxBytes(job.reserved_bytes),
            open_in(&job.pids),
            match (job.unreadable.is_empty(), newest) {
                (false, _) => "DAMAGED: see `offloadd job show`",
                (true, Some(newest)) => state(newest),
                (true, None) => "nothing committed",
            }
        );
    }
    if !users.is_empty() {
        text += &format!("\n{:<width$}  {}\n", "user", quota_titles());
    }
    for user in users {
        let name = format!("uid {}", user.uid);
        text += &format!("{name:<width$}  {}\n", quota_columns(user));
    }
    text
}

/// "-", "4711", "4711 +7": the first process that has a job open, and how many others have.
fn open_in(pids: &[u32]) -> String {
    match pids {
        [] => "-".into(),
        [pid] => pid.to_string(),
        [pid, others @ ..] => format!("{pid} +{}", others.len()),
    }
}
