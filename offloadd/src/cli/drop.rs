//! `offloadd drop`: a job's room is given back, and what it holds is lost.

use anyhow::{Context, Result, anyhow, bail};
use offload_api::proto;
use offload_support::outln;
use offload_support::units::ApproxBytes;
use offloadd::offline::Stopped;
use offloadd::store::definition::JobName;

use super::connection::{refusal, runtime};
use super::store_access::{At, Holder, holder};
use super::{inspect, open_all};

/// What people may choose.
pub(crate) struct Choice {
    pub(crate) job: String,
    pub(crate) uid: Option<u32>,
    /// Whatever it holds.
    pub(crate) force: bool,
    pub(crate) at: At,
}

pub(crate) fn run(choice: Choice) -> Result<()> {
    let name = JobName::new(choice.job.as_str()).map_err(|fault| anyhow!("{fault}"))?;
    let own = rustix::process::geteuid().as_raw();
    let uid = choice.uid.unwrap_or(own);
    let freed_bytes = runtime()?.block_on(async {
        match holder(&choice.at).await? {
            Holder::Daemon(socket, mut client) => {
                let content = client.inspect(proto::InspectRequest {}).await;
                let content = content.map_err(|status| refusal(&socket, &status))?;
                check(&content.into_inner().jobs, uid, &choice)?;
                let request = proto::DropJobRequest {
                    job: choice.job.clone(),
                    uid: choice.uid,
                };
                let answer = client.drop_job(request).await;
                let reply = answer.map_err(|status| refusal(&socket, &status))?;
                Ok(reply.into_inner().freed_bytes)
            }
            Holder::Nobody(config) => {
                let devices = open_all(&config)?;
                check(&inspect::read(&devices)?.jobs, uid, &choice)?;
                let mut stopped = Stopped::open_to_change(devices)?;
                (stopped.drop_job(uid, name)).map_err(|fault| anyhow!("{}", fault.message))
            }
        }
    })?;
    outln!(
        "{} dropped: {} are free",
        choice.job,
        ApproxBytes(freed_bytes)
    );
    Ok(())
}

/// Training that could be gone on from is not lost by a wrong name.
fn check(jobs: &[proto::JobContent], uid: u32, choice: &Choice) -> Result<()> {
    let job = &choice.job;
    let found = jobs.iter().find(|one| one.uid == uid && one.job == *job);
    let found = found.with_context(|| {
        format!("uid {uid} has no job {job} here; `offloadd inspect` names those there are, --uid says whose is meant")
    })?;
    let Some(newest) = found.generations.last() else {
        return Ok(());
    };
    if !choice.force {
        let step = newest.ranks.iter().find_map(|rank| rank.step);
        let step = step.map_or_else(String::new, |step| format!(" of step {step}"));
        bail!(
            "{job} holds generation {}{step}, {}, which nobody could go on from any more: --force drops it",
            newest.generation,
            ApproxBytes(newest.bytes)
        );
    }
    Ok(())
}
