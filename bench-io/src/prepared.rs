//! Files, directories and the store of a job: made before it, removed after it.

use std::path::PathBuf;

use anyhow::{Context, Result, bail, ensure};

use crate::bench::{Bench, BenchPlan, TargetPlan};
use crate::drive;
use crate::job::{Job, Place};
use crate::load::StreamPlan;
use crate::place::{OwnDaemon, WorkDir, write_file};
use crate::progress::Progress;
use crate::targets::daemon::drop_left;
use crate::targets::device::{DeviceFiles, bytes_of};
use crate::units::Bytes;

/// Prepared target of a job. Dropping it removes everything that was made.
pub(crate) struct PreparedTarget {
    pub(crate) plan: BenchPlan,
    pub(crate) word: &'static str,
    /// Files for the engine alone.
    pub(crate) files: Vec<PathBuf>,
    /// Bytes used of each file or device.
    pub(crate) size: u64,
    /// Blocks of each job: of each file, or of all devices together.
    job_blocks: u64,
    pub(crate) to_fill: bool,
    _dirs: Vec<WorkDir>,
    _daemon: Option<OwnDaemon>,
}

impl PreparedTarget {
    /// Prepares `job`.
    ///
    /// # Errors
    /// Not enough space, a missing file or daemon, or sizes that do not fit together.
    pub(crate) fn new(job: &Job, progress: &Progress) -> Result<Self> {
        let (bs, jobs) = (u64::from(job.bs), u64::from(job.numjobs));
        let slot_bytes = slot_bytes(job)?;
        let mut dirs = Vec::new();
        let mut daemon = None;
        let mut files = Vec::new();
        // Files are read as they are, or written when they are made.
        let mut to_fill = true;
        let size = match &job.place {
            Place::Files(paths) => {
                to_fill = false;
                files.clone_from(paths);
                smallest_bytes(paths, job.size)?
            }
            _ => job.size.context("new files have a size")?,
        };
        match &job.place {
            Place::Files(_) | Place::Socket(_) => {}
            Place::NewFiles(parents) => {
                for parent in parents {
                    let dir = WorkDir::make(parent)?;
                    let path = dir.path().join("file");
                    progress.say("making files");
                    write_file(&path, size)?;
                    files.push(path);
                    dirs.push(dir);
                }
                // Already written, so a read-only open suffices.
                to_fill = false;
            }
            Place::Private(parents) => {
                progress.say("formatting a store");
                daemon = Some(OwnDaemon::start(
                    parents,
                    size,
                    slot_bytes,
                    job.iodepth,
                    &job.engine_word,
                )?);
            }
        }
        let socket = match (&job.place, &daemon) {
            (Place::Socket(socket), _) => Some(socket.clone()),
            (_, Some(daemon)) => Some(daemon.socket().to_owned()),
            _ => None,
        };
        let (target, job_blocks, depth) = match socket {
            Some(socket) => {
                let devices = match &daemon {
                    Some(daemon) => daemon.devices().len(),
                    None => {
                        drop_left(&socket)?;
                        let daemon = offload_client::Daemon::connect(&socket)?;
                        daemon.info().devices.len()
                    }
                };
                let tile_count = size / bs * devices as u64 / jobs;
                (
                    daemon_target(job, socket, tile_count)?,
                    tile_count,
                    job.iodepth,
                )
            }
            None => {
                let depth = depth_of_file(job, files.len()) * files.len() as u32;
                (device_target(job, &files), size / bs / jobs, depth)
            }
        };
        let least = 1 + u64::from(job.rw.reads() && job.rw.writes());
        ensure!(
            job_blocks >= least,
            "size = {size}: too small for {jobs} jobs with operations of {bs} bytes"
        );
        Ok(Self {
            word: match target {
                TargetPlan::Device { .. } => "device",
                TargetPlan::Daemon { gpu: false, .. } => "daemon",
                TargetPlan::Daemon { gpu: true, .. } => "gpu",
            },
            plan: BenchPlan {
                target,
                block_bytes: job.bs,
                depth,
                jobs: job.numjobs,
            },
            files,
            size,
            job_blocks,
            to_fill,
            _dirs: dirs,
            _daemon: daemon,
        })
    }

    /// The job's files, or the devices of the daemon.
    pub(crate) fn devices(&self, bench: &Bench) -> Vec<PathBuf> {
        let from_daemon = bench.devices().iter().map(|device| device.path.clone());
        self.files.iter().cloned().chain(from_daemon).collect()
    }

    /// A note if fewer operations can be in flight than requested.
    pub(crate) fn too_shallow(&self, job: &Job) -> Option<String> {
        let streams = self.streams(job);
        let stream = streams.iter().flatten().next()?;
        let (_, blocks) = stream.blocks;
        (blocks < u64::from(stream.depth)).then(|| {
            format!(
                "only {blocks} operations of {} fit in the size of each job{}, so that many are in flight instead of {}: use a larger \
                 size or a smaller bs",
                Bytes(u64::from(job.bs)),
                if self.files.is_empty() { "" } else { " of a file" },
                stream.depth,
            )
        })
    }

    /// One stream per file and job; through the daemon, which places tiles itself, one per job.
    pub(crate) fn streams(&self, job: &Job) -> Vec<Vec<StreamPlan>> {
        let stream = |device, first, depth| StreamPlan {
            device,
            blocks: (first, self.job_blocks),
            reads: job.rw.reads(),
            writes: job.rw.writes(),
            read_percent: job.read_percent,
            random: job.rw.is_random(),
            depth,
        };
        let of_job = |index: u32| match self.plan.target {
            TargetPlan::Daemon { .. } => vec![stream(index, 0, job.iodepth)],
            TargetPlan::Device { .. } => {
                let depth = depth_of_file(job, self.files.len());
                let first = u64::from(index) * self.job_blocks;
                let devices = 0..self.files.len() as u32;
                devices.map(|device| stream(device, first, depth)).collect()
            }
        };
        (0..job.numjobs).map(of_job).collect()
    }
}

/// Bytes of the buffers of all jobs, which must fit in memory.
fn slot_bytes(job: &Job) -> Result<u64> {
    let bytes = u64::from(job.bs) * u64::from(job.iodepth) * u64::from(job.numjobs);
    let available_bytes = offload_support::memory::available_bytes().unwrap_or(u64::MAX);
    ensure!(
        bytes <= available_bytes,
        "bs x iodepth x numjobs = {}: only {} of memory are available",
        Bytes(bytes),
        Bytes(available_bytes)
    );
    Ok(bytes)
}

/// Bytes used of each of `paths`: `size`, which each must have, or those of the smallest one.
fn smallest_bytes(paths: &[PathBuf], size: Option<u64>) -> Result<u64> {
    if let Some((again, first)) = drive::named_twice(paths) {
        bail!(
            "filename = {}: it is the same file as {}; name each file once",
            again.display(),
            first.display()
        );
    }
    let mut smallest = size.unwrap_or(u64::MAX);
    for path in paths {
        let bytes = bytes_of(path)?;
        ensure!(
            size.is_none_or(|size| size <= bytes),
            "size = {}: {} has only {bytes} bytes",
            size.unwrap_or(0),
            path.display()
        );
        smallest = smallest.min(bytes);
    }
    Ok(smallest)
}

fn daemon_target(job: &Job, socket: PathBuf, tile_count: u64) -> Result<TargetPlan> {
    Ok(TargetPlan::Daemon {
        socket,
        tile_count: u32::try_from(tile_count).context("too many tiles; use a larger bs")?,
        gpu: job.gpu,
    })
}

fn device_target(job: &Job, files: &[PathBuf]) -> TargetPlan {
    TargetPlan::Device {
        files: DeviceFiles {
            paths: files.to_vec(),
            direct: job.direct,
            writes: job.rw.writes(),
        },
        choice: job.engine,
    }
}

/// Divides a job's depth among its files, at least one operation each.
fn depth_of_file(job: &Job, files: usize) -> u32 {
    (job.iodepth / files as u32).max(1)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use offloadd::engine::EngineChoice;

    use super::*;
    use crate::job::Access;

    #[test]
    fn jobs_of_one_daemon_have_numbers_so_that_each_others_tiles_are_told_apart() {
        let socket = PathBuf::from("/no/such/socket");
        let job = Job {
            name: None,
            rw: Access::Read,
            read_percent: 50,
            bs: 4096,
            iodepth: 1,
            numjobs: 3,
            runtime: Duration::ZERO,
            ramp: Duration::ZERO,
            engine: EngineChoice::Auto,
            engine_word: "auto".into(),
            size: Some(1 << 20),
            direct: true,
            place: Place::Socket(socket.clone()),
            gpu: false,
        };
        let prepared = PreparedTarget {
            plan: BenchPlan {
                target: TargetPlan::Daemon {
                    socket,
                    tile_count: 8,
                    gpu: false,
                },
                block_bytes: job.bs,
                depth: 1,
                jobs: job.numjobs,
            },
            word: "daemon",
            files: Vec::new(),
            size: 1 << 20,
            job_blocks: 8,
            to_fill: true,
            _dirs: Vec::new(),
            _daemon: None,
        };
        let streams = prepared.streams(&job);
        let devices = streams.iter().flatten().map(|stream| stream.device);
        assert_eq!(devices.collect::<Vec<_>>(), [0, 1, 2]);
    }
}
