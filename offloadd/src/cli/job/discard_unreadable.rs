//! `offloadd job discard-unreadable`: lets a job resume without a record that its device cannot read or that was overwritten.
//!
//! The record may be the newest. Then the previous generation was being overwritten when the daemon ended, so its tiles are
//! compared with their checksums first.

use anyhow::{Result, bail};
use offload_api::proto;
use offload_support::outln;
use offload_support::progress::{Audience, Progress, Unit};

use super::WhichJob;
use crate::cli::connection::{Daemon, refusal, runtime};
use crate::cli::rate::SCRUB_BYTES_PER_S;
use crate::cli::store_access::{WhichStore, serving};

/// `bytes_per_s` limits what the daemon reads to compare.
pub(super) fn run(
    which: &WhichJob,
    force: bool,
    bytes_per_s: Option<u64>,
    store: &WhichStore,
) -> Result<()> {
    let (job, newest) = runtime()?.block_on(async {
        let mut daemon = serving(store).await?;
        let jobs = daemon.jobs().await?;
        // The daemon refuses a job that is not there, and one of another user.
        let found = which.find_any(&jobs)?;
        if let Some(found) = found.filter(|found| !force && !found.unreadable.is_empty()) {
            compare(&mut daemon, found, bytes_per_s).await?;
        }
        let job = found.map_or(&which.job, |found| &found.job).clone();
        let request = proto::DiscardUnreadableRequest {
            job: job.clone(),
            uid: which.uid,
        };
        let reply = daemon.ask(async |client| client.discard_unreadable(request).await);
        anyhow::Ok((job, reply.await?.newest_generation))
    })?;
    match (newest, force) {
        (0, _) => outln!(
            "job {job} has no complete generation left: delete it, or start it again from the beginning"
        ),
        (newest, false) => outln!(
            "job {job} resumes from generation {newest}, the newest that can be read; its tiles match their checksums"
        ),
        (newest, true) => outln!(
            "job {job} resumes from generation {newest}; its tiles were not compared: run `offloadd verify`"
        ),
    }
    Ok(())
}

/// Compares the remaining tiles of a job that has an unreadable record. The daemon refuses any other.
async fn compare(
    daemon: &mut Daemon,
    of: &proto::JobContent,
    bytes_per_s: Option<u64>,
) -> Result<()> {
    let asked = |uid, job: &str| uid == of.uid && job == of.job;
    let request = proto::ScrubRequest {
        bytes_per_s: bytes_per_s.unwrap_or(SCRUB_BYTES_PER_S),
        job: of.job.clone(),
    };
    let scrub = daemon.work(async |client| client.scrub(request).await);
    let mut answers = scrub.await?;
    let socket = &daemon.socket;
    let failed = |status: tonic::Status| refusal(socket, &status);
    let mut work = Progress::new(
        "comparing the remaining tiles",
        Unit::Bytes,
        Audience::Person,
    );
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
            "the daemon at {} ended before all remaining tiles were compared; no record was discarded",
            socket.display()
        );
    }
    let left = (last.undecided_jobs.iter()).find(|one| asked(one.uid, &one.job));
    left.map_or(Ok(()), |left| {
        let wrong_count = left.differing_count + damaged_count + last.unread_count;
        judge(&of.job, left.generation, wrong_count)
    })
}

/// Refuses if tiles of `generation`, from which the job would resume, are not what it wrote.
fn judge(job: &str, generation: u64, wrong_count: u64) -> Result<()> {
    if wrong_count == 0 {
        return Ok(());
    }
    bail!(
        "generation {generation} of job {job} is incomplete: {wrong_count} of its tiles were overwritten by a later generation, \
         are damaged or could not be read. No record was discarded. Restart the daemon, as the device may be able to read the \
         record then; or delete the job; or discard the record all the same with --force"
    );
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_incomplete_generation_is_refused() {
        assert!(judge("tiny", 4, 0).is_ok());
        let refused = judge("tiny", 4, 3).unwrap_err().to_string();
        for word in [
            "generation 4 of job tiny",
            "3 of its tiles",
            "No record was discarded",
            "--force",
        ] {
            assert!(refused.contains(word), "{word}: {refused}");
        }
    }
}
