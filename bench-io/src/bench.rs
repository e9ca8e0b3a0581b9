//! Parallel jobs: one thread per job, with a target that stays open between measurements.
//!
//! ```text
//!   Bench::open ──▶ thread: DeviceTarget or DaemonTarget        (engines and sessions belong to one thread)
//!   fill, run ── Order ──▶ load::run ── Outcome ──▶ Figures, with the CPU time of the same seconds
//! ```

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow};
use offload_client::DeviceInfo;
use offloadd::engine::EngineChoice;

use crate::drive::Drive;
use crate::figures::Figures;
use crate::load::{self, Outcome, Stream, StreamPlan, Timing};
use crate::progress::Progress;
use crate::targets::Target;
use crate::targets::daemon::{DaemonTarget, job_name};
use crate::targets::device::{Claim, DeviceFiles, DeviceTarget};
use crate::watch::{SampleSources, Watch};

/// Delay between an order and its start, so that all threads begin together.
const START_DELAY: Duration = Duration::from_millis(5);

/// Targets and settings of every job.
#[derive(Clone, Debug)]
pub(crate) struct BenchPlan {
    pub(crate) target: TargetPlan,
    pub(crate) block_bytes: u32,
    /// Operations in flight of one job, over all its streams.
    pub(crate) depth: u32,
    pub(crate) jobs: u32,
}

/// Other end of the transfers.
#[derive(Clone, Debug)]
pub(crate) enum TargetPlan {
    Device {
        files: DeviceFiles,
        choice: EngineChoice,
    },
    Daemon {
        socket: PathBuf,
        /// Tiles of each job.
        tile_count: u32,
        /// Whether tiles continue to a GPU.
        gpu: bool,
    },
}

/// Open targets, one per job.
pub(crate) struct Bench {
    plan: BenchPlan,
    workers: Vec<Worker>,
    ended: Receiver<Result<Outcome>>,
    about: String,
    devices: Vec<DeviceInfo>,
    daemon_pid: Option<u32>,
    drives: Vec<Drive>,
    /// Keeps other programs away from the files that jobs write.
    _claim: Option<Claim>,
}

struct Worker {
    orders: Option<Sender<Order>>,
    thread: Option<JoinHandle<()>>,
}

struct Order {
    streams: Vec<Stream>,
    start: Instant,
    timing: Timing,
    moved: Arc<[AtomicU64; 2]>,
    /// Set when a job failed: the others stop.
    failed: Arc<AtomicBool>,
}

/// A target's answer after opening.
struct TargetInfo {
    about: String,
    devices: Vec<DeviceInfo>,
}

impl Bench {
    /// Opens a target for every job.
    pub(crate) fn open(plan: BenchPlan) -> Result<Self> {
        let claim = match &plan.target {
            TargetPlan::Device { files, .. } => Some(files.claim()?),
            TargetPlan::Daemon { .. } => None,
        };
        let (say_ended, ended) = channel();
        let (say_opened, opened) = channel();
        let mut workers = Vec::new();
        for index in 0..plan.jobs {
            let (orders, to_do) = channel::<Order>();
            let (plan, say_opened, say_ended) =
                (plan.clone(), say_opened.clone(), say_ended.clone());
            let thread = std::thread::Builder::new()
                .name(format!("job-{index}"))
                .spawn(move || {
                    let worked = || work(&plan, index, &say_opened, &to_do, &say_ended);
                    // The other threads keep their senders, so that a panic is noticed only through a message.
                    if catch_unwind(AssertUnwindSafe(worked)).is_err() {
                        let panicked = || anyhow!("the thread of job {index} panicked");
                        let _ = say_opened.send(Err(panicked()));
                        let _ = say_ended.send(Err(panicked()));
                    }
                })
                .context("starting a thread")?;
            workers.push(Worker {
                orders: Some(orders),
                thread: Some(thread),
            });
        }
        drop(say_opened);
        let mut bench = Self {
            daemon_pid: match &plan.target {
                TargetPlan::Daemon { socket, .. } => peer_pid(socket),
                TargetPlan::Device { .. } => None,
            },
            plan,
            workers,
            ended,
            about: String::new(),
            devices: Vec::new(),
            drives: Vec::new(),
            _claim: claim,
        };
        for _ in 0..bench.plan.jobs {
            let one = opened.recv().context("a job's thread ended")??;
            (bench.about, bench.devices) = (one.about, one.devices);
        }
        bench.drives = drives_below(match &bench.plan.target {
            TargetPlan::Device { files, .. } => files.paths.iter().collect(),
            TargetPlan::Daemon { .. } => bench.devices.iter().map(|device| &device.path).collect(),
        });
        Ok(bench)
    }

    /// Devices of the daemon; empty without one.
    pub(crate) fn devices(&self) -> &[DeviceInfo] {
        &self.devices
    }

    /// Writes everything once without measuring; through a daemon twice, because a tile has two extents.
    pub(crate) fn fill(&self, streams: &[Vec<StreamPlan>], progress: &Progress) -> Result<()> {
        let all_written = |plan: &StreamPlan| StreamPlan {
            reads: false,
            writes: true,
            random: false,
            ..plan.clone()
        };
        let streams: Vec<Vec<StreamPlan>> = streams
            .iter()
            .map(|job| job.iter().map(all_written).collect())
            .collect();
        let timing = Timing {
            ramp: Duration::ZERO,
            runtime: Duration::ZERO,
        };
        let passes = match self.plan.target {
            TargetPlan::Device { .. } => 1,
            TargetPlan::Daemon { .. } => 2,
        };
        for _ in 0..passes {
            self.run(&streams, timing, progress, "filling")?;
        }
        Ok(())
    }

    /// Runs `streams`, one list per job, and measures. `what` is shown as progress.
    ///
    /// # Errors
    /// An operation fails, or a signal arrived.
    pub(crate) fn run(
        &self,
        streams: &[Vec<StreamPlan>],
        timing: Timing,
        progress: &Progress,
        what: &str,
    ) -> Result<Figures> {
        assert_eq!(streams.len(), self.workers.len(), "streams for every job");
        let moved = Arc::new([AtomicU64::new(0), AtomicU64::new(0)]);
        let failed = Arc::new(AtomicBool::new(false));
        let start = Instant::now() + START_DELAY;
        for (worker, streams) in self.workers.iter().zip(streams) {
            let order = Order {
                streams: streams.iter().map(Stream::new).collect(),
                start,
                timing,
                moved: Arc::clone(&moved),
                failed: Arc::clone(&failed),
            };
            let orders = worker.orders.as_ref().expect("taken in drop only");
            orders.send(order).ok().context("a job's thread ended")?;
        }
        let watched = SampleSources {
            daemon_pid: self.daemon_pid,
            block_bytes: self.plan.block_bytes,
            drives: self.drives.clone(),
        };
        let mut watch = Watch::new(watched, progress, what, start, timing, moved);
        let (mut outcome, mut failure) = (Outcome::new(), None);
        let mut missing = self.workers.len();
        while missing > 0 {
            match self.ended.recv_timeout(watch.sleep()) {
                Ok(ended) => {
                    missing -= 1;
                    match ended {
                        Ok(ended) => outcome.add(&ended),
                        Err(error) => {
                            failed.store(true, Ordering::Relaxed);
                            failure = failure.or(Some(error));
                        }
                    }
                }
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => anyhow::bail!("a job's thread ended"),
            }
            watch.sample();
        }
        if let Some(error) = failure {
            return Err(error);
        }
        let cpu = watch.used();
        let about = self.about.clone();
        Ok(Figures::new(&outcome, self.plan.block_bytes, cpu, about))
    }
}

impl Drop for Bench {
    fn drop(&mut self) {
        for worker in &mut self.workers {
            drop(worker.orders.take());
        }
        for worker in &mut self.workers {
            if let Some(thread) = worker.thread.take() {
                // The thread has printed its panic.
                let _ = thread.join();
            }
        }
    }
}

fn work(
    plan: &BenchPlan,
    index: u32,
    opened: &Sender<Result<TargetInfo>>,
    orders: &Receiver<Order>,
    ended: &Sender<Result<Outcome>>,
) {
    let mut target = match open(plan, index) {
        Ok((target, about)) => {
            let _ = opened.send(Ok(about));
            target
        }
        Err(error) => {
            let _ = opened.send(Err(error));
            return;
        }
    };
    while let Ok(mut order) = orders.recv() {
        std::thread::sleep(order.start.saturating_duration_since(Instant::now()));
        let outcome = load::run(
            &mut *target,
            &mut order.streams,
            order.start,
            order.timing,
            &order.moved,
            &order.failed,
        );
        let failed = outcome.is_err();
        if ended.send(outcome).is_err() || failed {
            return;
        }
    }
}

fn open(plan: &BenchPlan, index: u32) -> Result<(Box<dyn Target>, TargetInfo)> {
    Ok(match &plan.target {
        TargetPlan::Device { files, choice } => {
            let target = DeviceTarget::open(files, *choice, plan.block_bytes, plan.depth)?;
            let about = TargetInfo {
                about: target.about().to_owned(),
                devices: Vec::new(),
            };
            (Box::new(target), about)
        }
        TargetPlan::Daemon {
            socket,
            tile_count,
            gpu,
        } => {
            let job = job_name(index);
            let target = DaemonTarget::open(
                socket,
                &job,
                plan.block_bytes,
                *tile_count,
                plan.depth,
                *gpu,
            )?;
            let gpu = target.gpu().map(|gpu| format!("; {gpu}"));
            let gpu = gpu.unwrap_or_default();
            let info = target.info();
            let note = match info.memory_locked {
                true => String::new(),
                false => format!("; {}", info.memory_note),
            };
            let about = TargetInfo {
                about: format!("{} ({}){note}{gpu}", info.engine, info.engine_reason),
                devices: (info.devices.iter())
                    .filter(|device| !device.left)
                    .cloned()
                    .collect(),
            };
            (Box::new(target), about)
        }
    })
}

/// Drives below the paths, each once.
fn drives_below(paths: Vec<&PathBuf>) -> Vec<Drive> {
    let mut found = Vec::new();
    for drive in paths.into_iter().flat_map(|path| Drive::below(path)) {
        if !found.contains(&drive) {
            found.push(drive);
        }
    }
    found
}

/// Process that listens at `socket`.
fn peer_pid(socket: &std::path::Path) -> Option<u32> {
    let stream = std::os::unix::net::UnixStream::connect(socket).ok()?;
    let peer = rustix::net::sockopt::socket_peercred(&stream).ok()?;
    u32::try_from(peer.pid.as_raw_nonzero().get()).ok()
}
