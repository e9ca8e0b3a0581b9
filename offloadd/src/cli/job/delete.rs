//! `offloadd job delete`: removes a job from the store and frees its space.

use anyhow::{Result, bail};
use offload_api::proto;
use offload_support::outln;
use offload_support::units::ApproxBytes;

use super::WhichJob;
use crate::cli::connection::runtime;
use crate::cli::store_access::{WhichStore, serving};

pub(super) fn run(which: &WhichJob, force: bool, store: &WhichStore) -> Result<()> {
    let (job, freed_bytes) = runtime()?.block_on(async {
        let mut daemon = serving(store).await?;
        let jobs = daemon.jobs().await?;
        let found = which.find(&jobs)?;
        check(found, force)?;
        let job = found.job.clone();
        let request = proto::DropJobRequest {
            job: job.clone(),
            uid: which.uid,
        };
        let reply = daemon.ask(async |client| client.drop_job(request).await);
        anyhow::Ok((job, reply.await?.freed_bytes))
    })?;
    outln!("deleted job {job}: {} freed", ApproxBytes(freed_bytes));
    Ok(())
}

/// Refuses a job that has a generation to resume from, unless `force` is set.
fn check(job: &proto::JobContent, force: bool) -> Result<()> {
    let Some(newest) = job.generations.last() else {
        return Ok(());
    };
    if !force {
        let step = newest.ranks.iter().find_map(|rank| rank.step);
        let step = step.map_or_else(String::new, |step| format!(" of step {step}"));
        bail!(
            "job {} can be resumed from generation {}{step} ({}); --force deletes it all the same",
            job.job,
            newest.generation,
            ApproxBytes(newest.bytes)
        );
    }
    Ok(())
}
