//! `offloadd job`: the jobs of a store, through the daemon that serves it or on its devices.

mod content;
mod delete;
mod discard_unreadable;
mod list;

use anyhow::{Result, anyhow, bail};
use clap::{Args, Subcommand};
use offload_api::proto;
use offload_support::job_name::is_of_run;
use offloadd::core::UserState;
use offloadd::store::definition::JobName;

use super::connection::runtime;
use super::open_all;
use super::store_access::{Holder, WhichStore, holder};

pub(super) use content::kind_name;

#[derive(Subcommand)]
pub(crate) enum JobCommand {
    /// List your jobs, or all jobs for root, with owner, newest generation, space and processes, and each user's quotas
    #[command(after_help = "Examples:
  offloadd job list                                           # the service's store
  offloadd job list --config runs/mine/offloadd/offloadd.toml # a run with a private daemon, running or not
  offloadd job list --json | jq '.jobs[].generations'")]
    List {
        #[command(flatten)]
        store: WhichStore,
        /// Print JSON, with everything that `job show` prints
        #[arg(long)]
        json: bool,
    },
    /// Show one job in detail: its tiles, its generations and the processes that have it open
    #[command(after_help = "Examples:
  offloadd job show qwen
  offloadd job show qwen --uid 1000                           # another user's job, as root
  offloadd job show qwen --json | jq .generations")]
    Show {
        #[command(flatten)]
        which: WhichJob,
        #[command(flatten)]
        store: WhichStore,
        /// Print JSON
        #[arg(long)]
        json: bool,
    },
    /// Delete a job and free its space; refuses a job that can still be resumed unless --force is given
    #[command(after_help = "Examples:
  offloadd job delete qwen
  offloadd job delete qwen --force                            # with its generations
  offloadd job delete qwen --uid 1000 --force                 # another user's job, as root or as the daemon's user
  offloadd job delete qwen --config runs/mine/offloadd/offloadd.toml

The daemon that serves the store deletes the job; for the store of a run that is not running, start one first with
`offloadd serve --config FILE`. A job that a process has open cannot be deleted.")]
    Delete {
        #[command(flatten)]
        which: WhichJob,
        /// Delete a job that can still be resumed
        #[arg(long)]
        force: bool,
        #[command(flatten)]
        store: WhichStore,
    },
    /// Discard the commit records of a job that cannot be read, so that it can be resumed from an older generation
    #[command(after_help = "Examples:
  offloadd job discard-unreadable qwen
  offloadd job discard-unreadable qwen --rate 1GB/s           # compares tiles faster than the default of 200 MB/s
  offloadd job discard-unreadable qwen --uid 1000             # another user's job, as root or as the daemon's user
  offloadd job discard-unreadable qwen --config runs/mine/offloadd/offloadd.toml

A job with an unreadable record cannot be resumed, because the record may be the newest generation. Restart the daemon first: the
device may be able to read the record then. Parts of the previous generation may have been overwritten since, so its tiles are
compared with their checksums before the record is discarded. If any differ, the command refuses; --force discards the record
without the comparison, and the job may then have no complete generation left. The daemon that serves the store does all this; for
the store of a run that is not running, start one first with `offloadd serve --config FILE`.")]
    DiscardUnreadable {
        #[command(flatten)]
        which: WhichJob,
        /// Discard the records without comparing the remaining tiles
        #[arg(long)]
        force: bool,
        /// Compare at most this many bytes per second, for example 200MB/s
        #[arg(long, value_name = "RATE", value_parser = super::rate::rate)]
        rate: Option<u64>,
        #[command(flatten)]
        store: WhichStore,
    },
}

// A doc comment on a flattened struct would replace the command's own.
#[derive(Args)]
pub(crate) struct WhichJob {
    /// Name of the job, or of a run of `trainer` without the digits at the job's end
    #[arg(value_name = "JOB")]
    job: String,
    /// User ID of the job's owner; default: yours
    #[arg(long)]
    uid: Option<u32>,
}

impl WhichJob {
    fn owner(&self) -> u32 {
        let own = rustix::process::geteuid().as_raw();
        self.uid.unwrap_or(own)
    }

    /// Returns the owner's job of this name, else the one job of the run of this name; `None` if there is neither.
    ///
    /// # Errors
    /// If several runs have this name.
    fn find_any<'a>(&self, jobs: &'a [proto::JobContent]) -> Result<Option<&'a proto::JobContent>> {
        let uid = self.owner();
        let own = || jobs.iter().filter(|job| job.uid == uid);
        if let Some(found) = own().find(|job| job.job == self.job) {
            return Ok(Some(found));
        }
        let is_of_run = |job: &&proto::JobContent| is_of_run(&job.job, &self.job);
        let of_run: Vec<_> = own().filter(is_of_run).collect();
        if let [found] = of_run[..] {
            return Ok(Some(found));
        }
        if !of_run.is_empty() {
            let names: Vec<_> = of_run.iter().map(|job| job.job.as_str()).collect();
            bail!(
                "uid {uid} has {} jobs of runs named {}: give the whole name: {}",
                names.len(),
                self.job,
                names.join(", ")
            );
        }
        Ok(None)
    }

    /// Like [`Self::find_any`], for a job that must exist.
    fn find<'a>(&self, jobs: &'a [proto::JobContent]) -> Result<&'a proto::JobContent> {
        JobName::new(self.job.as_str()).map_err(|fault| anyhow!("{fault}"))?;
        if let Some(found) = self.find_any(jobs)? {
            return Ok(found);
        }
        let uid = self.owner();
        let is_of_run = |job: &&proto::JobContent| is_of_run(&job.job, &self.job);
        let others = jobs
            .iter()
            .filter(|job| job.job == self.job || is_of_run(job));
        let others: Vec<_> = others
            .map(|job| format!("{} has {}", job.uid, job.job))
            .collect();
        match others.is_empty() {
            true => bail!(
                "uid {uid} has no job {} in this store; `offloadd job list` lists the jobs, --uid selects another owner",
                self.job
            ),
            false => bail!(
                "uid {uid} has no job {} in this store, but uid {}: select the owner with --uid",
                self.job,
                others.join(", ")
            ),
        }
    }
}

pub(crate) fn run(command: JobCommand) -> Result<()> {
    match command {
        JobCommand::List { store, json } => {
            let (jobs, users) = jobs_and_users(&store)?;
            super::print(&match json {
                true => format!("{}\n", content::jobs_to_json(&jobs, &users)),
                false => list::table(&jobs, &users),
            })
        }
        JobCommand::Show { which, store, json } => {
            let (jobs, _) = jobs_and_users(&store)?;
            let job = which.find(&jobs)?;
            super::print(&match json {
                true => format!("{}\n", content::to_json(job)),
                false => content::text(job),
            })
        }
        JobCommand::Delete {
            which,
            force,
            store,
        } => delete::run(&which, force, &store),
        JobCommand::DiscardUnreadable {
            which,
            force,
            rate,
            store,
        } => discard_unreadable::run(&which, force, rate, &store),
    }
}

/// Jobs of the store that the caller may see, and their users; no users without a daemon.
fn jobs_and_users(store: &WhichStore) -> Result<(Vec<proto::JobContent>, Vec<UserState>)> {
    runtime()?.block_on(async {
        match holder(store).await? {
            Holder::Daemon(mut daemon) => {
                Ok((daemon.jobs().await?, daemon.snapshot().await?.users))
            }
            Holder::Nobody(config) => Ok((content::read(&open_all(&config)?)?, Vec::new())),
        }
    })
}
