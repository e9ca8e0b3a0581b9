//! `offloadd job list`: one line per job.

use offload_api::proto;
use offload_support::units::ApproxBytes;

use super::content::{state, steps};

pub(super) fn table(jobs: &[proto::JobContent]) -> String {
    let width = jobs
        .iter()
        .map(|job| job.job.len())
        .max()
        .unwrap_or(0)
        .max(16);
    let mut text = format!(
        "{:<width$}  {:>10}  {:>10}  {:>10}  {:>10}  {:>10}  state\n",
        "job", "uid", "generation", "step", "committed", "reserved"
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
            "{:<width$}  {:>10}  {generation:>10}  {step:>10}  {bytes:>10}  {:>10}  {}\n",
            job.job,
            job.uid,
            ApproxBytes(job.reserved_bytes),
            match (job.unreadable.is_empty(), newest) {
                (false, _) => "DAMAGED: see `offloadd job show`",
                (true, Some(newest)) => state(newest),
                (true, None) => "nothing committed",
            }
        );
    }
    text
}
