//! `offloadd give-up`: a job resumes without a record that its device cannot read, or that something has overwritten.
//!
//! The record may be the newest, and then the generation before it was being written over when the daemon ended: its tiles are
//! compared first, and only one that is whole is promised.

use std::path::Path;

use anyhow::{Result, anyhow, bail};
use offload_api::ids::Generation;
use offload_api::proto;
use offload_api::proto::offload_client::OffloadClient;
use offload_support::outln;
use offloadd::device::{Device, DeviceBlocks};
use offloadd::offline::Stopped;
use offloadd::store::definition::JobName;
use offloadd::store::verify::verify_one;
use tonic::transport::Channel;

use super::connection::{refusal, runtime};
use super::open_all;
use super::store_access::{At, Holder, holder};
use super::verify::SCRUB_BYTES_PER_S;
use offload_support::progress::{Audience, Progress, Unit};

/// What people may choose.
pub(crate) struct Choice {
    pub(crate) job: String,
    pub(crate) uid: Option<u32>,
    /// Without comparing what is left.
    pub(crate) force: bool,
    /// Read at most so much a second of a daemon's store.
    pub(crate) bytes_per_s: Option<u64>,
    pub(crate) at: At,
}

pub(crate) fn run(choice: Choice) -> Result<()> {
    let job = &choice.job;
    let newest = runtime()?.block_on(async {
        match holder(&choice.at).await? {
            Holder::Daemon(socket, mut client) => {
                if !choice.force {
                    compare(&socket, &mut client, &choice).await?;
                }
                let request = proto::DiscardUnreadableRequest {
                    job: job.clone(),
                    uid: choice.uid,
                };
                let answer = client.discard_unreadable(request).await;
                let reply = answer.map_err(|status| refusal(&socket, &status))?;
                Ok(Generation(reply.into_inner().newest_generation))
            }
            Holder::Nobody(config) => {
                let name = JobName::new(job.as_str()).map_err(|fault| anyhow!("{fault}"))?;
                let devices = open_all(&config)?;
                if !choice.force {
                    compare_stopped(&devices, &choice)?;
                }
                let mut stopped = Stopped::open_to_change(devices)?;
                (stopped.discard_unreadable(choice.owner(), name))
                    .map_err(|fault| anyhow!("{}", fault.message))
            }
        }
    })?;
    match (newest.0, choice.force) {
        (0, _) => outln!(
            "{job} goes on from nothing: the store has no other generation of it that is whole; drop it to start again"
        ),
        (newest, false) => outln!(
            "{job} goes on from generation {newest}, the newest that can be read: its tiles were compared"
        ),
        (newest, true) => outln!(
            "{job} goes on from generation {newest} if its tiles are whole: they were not compared, `offloadd verify` does that"
        ),
    }
    Ok(())
}

impl Choice {
    fn owner(&self) -> u32 {
        let own = rustix::process::geteuid().as_raw();
        self.uid.unwrap_or(own)
    }
}

/// Under the store's lock.
fn compare_stopped(devices: &[Device], choice: &Choice) -> Result<()> {
    let mut work = Progress::new("comparing what is left", Unit::Bytes, Audience::Person);
    let mut blocks = DeviceBlocks(devices);
    let watch = &mut |done, total| work.set(done, total);
    let report = verify_one(&mut blocks, choice.owner(), &choice.job, watch)?;
    drop(work);
    for one in report.undecided_jobs {
        let wrong_count = one.differing_count + report.damaged_tiles.len() as u64;
        judge(&choice.job, one.generation.0, wrong_count)?;
    }
    Ok(())
}

/// By the daemon, beside its work. A job without such a record is the daemon's to refuse.
async fn compare(
    socket: &Path,
    client: &mut OffloadClient<Channel>,
    choice: &Choice,
) -> Result<()> {
    let failed = |status: tonic::Status| refusal(socket, &status);
    let stored = client.inspect(proto::InspectRequest {}).await;
    let stored = stored.map_err(failed)?.into_inner().jobs;
    let asked = |uid, job: &str| uid == choice.owner() && job == choice.job;
    if !(stored.iter()).any(|job| asked(job.uid, &job.job) && !job.unreadable.is_empty()) {
        return Ok(());
    }
    let request = proto::ScrubRequest {
        bytes_per_s: choice.bytes_per_s.unwrap_or(SCRUB_BYTES_PER_S),
        job: choice.job.clone(),
    };
    let mut answers = client.scrub(request).await.map_err(failed)?.into_inner();
    let mut work = Progress::new("comparing what is left", Unit::Bytes, Audience::Person);
    let mut damaged_count = 0;
    let mut last = proto::ScrubProgress::default();
    while let Some(reply) = answers.message().await.map_err(failed)? {
        match reply.what {
            Some(proto::scrub_reply::What::Damaged(tile)) if asked(tile.uid, &tile.job) => {
                damaged_count += 1;
            }
            Some(proto::scrub_reply::What::Progress(progress)) => {
                work.set(progress.done_bytes, progress.total_bytes);
                last = progress;
            }
            _ => {}
        }
    }
    drop(work);
    if !last.ended {
        bail!(
            "the daemon at {} stopped before all that is left was compared: nothing was given up",
            socket.display()
        );
    }
    let left = (last.undecided_jobs.iter()).find(|one| asked(one.uid, &one.job));
    left.map_or(Ok(()), |left| {
        let wrong_count = left.differing_count + damaged_count + last.unread_count;
        judge(&choice.job, left.generation, wrong_count)
    })
}

/// Whether `generation` of `job` is there to go on from.
fn judge(job: &str, generation: u64, wrong_count: u64) -> Result<()> {
    if wrong_count == 0 {
        return Ok(());
    }
    bail!(
        "generation {generation} of job {job} is not whole: {wrong_count} of its tiles were written over by a later one, are \
         damaged or could not be read. Nothing was given up. Start the daemon again, the device may give the record then; drop \
         the job to start from nothing; or give the record up all the same with --force"
    );
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_is_whole_is_promised() {
        assert!(judge("tiny", 4, 0).is_ok());
        let refused = judge("tiny", 4, 3).unwrap_err().to_string();
        for word in [
            "generation 4 of job tiny",
            "3 of its tiles",
            "Nothing was given up",
            "--force",
        ] {
            assert!(refused.contains(word), "{word}: {refused}");
        }
    }
}
