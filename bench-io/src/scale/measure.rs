//! The measuring itself: which store, which files, in which order, and when drives keep their pace.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use offloadd::api::IODEPTH_MAX;

use super::{Load, Rounds, Row, ScalePlan, ScaleReport, Settings, control, doubts};
use crate::bench::{Bench, BenchPlan, TargetPlan};
use crate::drive;
use crate::fio::{Fio, FioFigures, FioJob};
use crate::load::{StreamPlan, Timing};
use crate::machine::Machine;
use crate::paced::{Drives, Pace};
use crate::place::{OwnDaemon, WorkFolder, write_file};
use crate::progress::Progress;
use crate::report::{Figures, REPORT_VERSION, warnings};
use crate::rounds::{median, rate_of};
use crate::target::Way;

/// For the negative control.
const CONTROL_TIME: Duration = Duration::from_secs(1);

/// fio's and the control's own files on one drive.
struct OwnFiles {
    _folder: WorkFolder,
    read: PathBuf,
    write: PathBuf,
}

/// Measures all rows of `plan`; `paced` are the drives when they have a pace that can be taken away.
///
/// # Errors
/// A drive, the daemon or fio fails.
pub(crate) fn measure(
    plan: &ScalePlan,
    paced: Option<(&Drives, Pace)>,
    fio: Option<&Fio>,
    progress: &Progress,
) -> Result<ScaleReport> {
    let mut warnings = warnings::before();
    let set_pace = |on: bool| match paced {
        Some((drives, _)) => pace_drives(plan, drives, on),
        None => Ok(()),
    };
    set_pace(false)?;
    progress.say("making files");
    let files = plan
        .folders
        .iter()
        .map(|folder| {
            let folder = WorkFolder::make(folder)?;
            let (read, write) = (folder.path().join("read"), folder.path().join("write"));
            write_file(&read, plan.size)?;
            write_file(&write, plan.size)?;
            Ok(OwnFiles {
                _folder: folder,
                read,
                write,
            })
        })
        .collect::<Result<Vec<_>>>()?;
    let all = plan.folders.len() / plan.parts;
    let counts = match plan.drives.is_empty() {
        true => (1..=all).collect(),
        false => plan.drives.clone(),
    };
    let last = counts.last().copied().context("at least one drive")?;
    let mut rows = Vec::new();
    for &bs in &plan.blocks_bytes {
        for &drives in &counts {
            let folders = drives * plan.parts;
            let store = Store::new(plan, bs, folders, set_pace, progress)?;
            let one_round = |load: Load, is_paced: bool| -> Result<Round> {
                let paced_word = if is_paced || paced.is_none() {
                    ""
                } else {
                    ", unpaced"
                };
                let what = format!("{drives} drives, {}{paced_word}", load.word());
                let daemon = store.run(plan, load, progress, &what)?;
                progress.say(&format!("{what}: fio"));
                let own = &files[..folders];
                let [read, write] = [
                    own.iter().map(|one| one.read.clone()).collect::<Vec<_>>(),
                    own.iter().map(|one| one.write.clone()).collect(),
                ];
                let fio = fio.map(|fio| {
                    fio.run(&FioJob {
                        streams: &[
                            ("read", if load.reads() { &read } else { &[] }),
                            ("write", if load.writes() { &write } else { &[] }),
                        ],
                        read_percent: None,
                        jobs: 1,
                        bs,
                        iodepth: plan.fio_depth(),
                        size: plan.size,
                        direct: true,
                        ramp: plan.ramp,
                        runtime: plan.runtime,
                    })
                });
                let one_thread = match load {
                    Load::Both => None,
                    _ if !is_paced && paced.is_some() => None,
                    Load::Read => Some((Way::Read, &read)),
                    Load::Write => Some((Way::Write, &write)),
                };
                let one_thread = one_thread.map(|(way, files)| {
                    progress.say(&format!("{what}: one synchronous thread"));
                    control::run(files, way, bs, plan.size, CONTROL_TIME.min(plan.runtime))
                });
                Ok(Round {
                    daemon,
                    fio: fio.transpose()?,
                    one_thread_bytes_per_s: one_thread.transpose()?,
                })
            };
            let one_row = |load: Load, is_paced: bool| -> Result<Row> {
                let mut measured = (0..plan.rounds)
                    .map(|_| one_round(load, is_paced))
                    .collect::<Result<Vec<_>>>()?;
                let fio = measured.iter_mut().filter_map(|round| round.fio.take());
                let fio = median(fio.collect(), FioFigures::bytes_per_s);
                let one_thread = measured
                    .iter()
                    .filter_map(|round| round.one_thread_bytes_per_s);
                let one_thread = median(one_thread.collect(), |rate| *rate);
                let (daemon, range) = median(measured, |round| rate_of(&round.daemon))
                    .context("at least one round")?;
                let apart = Rounds {
                    daemon: range,
                    fio: fio.as_ref().map(|(_, range)| *range),
                };
                let slow = plan.last_half && drives == all;
                let count = drives as f64 - if slow { 0.5 } else { 0.0 };
                let limit = paced
                    .filter(|_| is_paced)
                    .map(|(_, pace)| [pace.read, pace.write].map(|rate| rate as f64 * count));
                Ok(Row {
                    drives,
                    load,
                    bs,
                    iodepth: store.depth(load),
                    paced: is_paced,
                    limit_bytes_per_s: limit,
                    daemon: daemon.daemon,
                    fio: fio.map(|(median, _)| median),
                    one_thread_bytes_per_s: one_thread.map(|(median, _)| median),
                    rounds: (plan.rounds > 1).then_some(apart),
                })
            };
            set_pace(true)?;
            for load in Load::ALL {
                rows.push(one_row(load, true)?);
            }
            if drives == last && paced.is_some() {
                set_pace(false)?;
                for load in Load::ALL {
                    rows.push(one_row(load, false)?);
                }
            }
        }
    }
    set_pace(true)?;
    warnings.extend(doubts::of(&rows));
    if paced.is_none() {
        warnings.extend(warnings::of_drives(
            plan.folders.iter().map(PathBuf::as_path),
        ));
    }
    Ok(ScaleReport {
        version: REPORT_VERSION,
        command: std::env::args().collect::<Vec<_>>().join(" "),
        machine: Machine::here(),
        drives: plan
            .folders
            .iter()
            .map(|folder| format!("{}: {}", folder.display(), drive::under(folder)))
            .collect(),
        pace: paced.map(|(_, pace)| pace),
        fio_version: fio.map(|fio| fio.version.clone()),
        runtime_s: plan.runtime.as_secs_f64(),
        settings: Settings {
            size: plan.size,
            fio_iodepth: plan.fio_depth(),
            ioengine: plan.engine.clone(),
            rounds: plan.rounds,
        },
        rows,
        warnings,
    })
}

/// All at their pace, or the last one at half of it; or all as fast as memory.
fn pace_drives(plan: &ScalePlan, drives: &Drives, on: bool) -> Result<()> {
    let pace = drives.state().pace;
    drives.set_pace(on.then_some(pace))?;
    if !on || !plan.last_half {
        return Ok(());
    }
    let devices = drives.state().devices.len();
    let half = Pace {
        read: (pace.read / 2).max(1),
        write: (pace.write / 2).max(1),
    };
    drives.set_pace_of(devices - plan.parts..devices, Some(half))
}

/// What one round of a row found.
struct Round {
    daemon: Figures,
    fio: Option<FioFigures>,
    one_thread_bytes_per_s: Option<f64>,
}

/// A store on some drives, filled, with a session open on it.
struct Store {
    /// Before the daemon.
    bench: Bench,
    _daemon: OwnDaemon,
    tile_count: u64,
    /// What a session may ask for, and a tile is moved once at a time: both bound these.
    one_way_depth: u32,
    depth: u32,
}

impl Store {
    /// Formats while drives keep their pace, as placement goes by what a format measures; fills as fast as it can.
    fn new(
        plan: &ScalePlan,
        bs: u32,
        folders: usize,
        set_pace: impl Fn(bool) -> Result<()>,
        progress: &Progress,
    ) -> Result<Self> {
        set_pace(true)?;
        progress.say("formatting a store");
        let tile_count = plan.size / u64::from(bs) * folders as u64;
        ensure!(
            tile_count >= 2,
            "size = {}: too small for operations of {bs} bytes",
            plan.size
        );
        let depth_max = u64::from(IODEPTH_MAX).min(tile_count);
        let one_way = plan.own_depth(bs, folders).min(depth_max) as u32;
        let depth = (2 * u64::from(one_way)).min(depth_max) as u32;
        let slot_bytes = u64::from(bs) * u64::from(depth);
        let daemon = OwnDaemon::start(
            &plan.folders[..folders],
            plan.size,
            slot_bytes,
            depth,
            &plan.engine,
        )?;
        let bench = Bench::open(BenchPlan {
            target: TargetPlan::Daemon {
                socket: daemon.socket().to_owned(),
                tile_count: u32::try_from(tile_count).context("too many tiles; use a larger bs")?,
                gpu: false,
            },
            block_bytes: bs,
            depth,
            jobs: 1,
            pattern: None,
        })?;
        let store = Self {
            bench,
            _daemon: daemon,
            tile_count,
            one_way_depth: one_way,
            depth,
        };
        set_pace(false)?;
        store.bench.fill(
            &[vec![store.stream(0, tile_count, Way::Write, depth)]],
            progress,
        )?;
        Ok(store)
    }

    fn depth(&self, load: Load) -> u32 {
        match load {
            Load::Both => self.depth,
            _ => self.one_way_depth,
        }
    }

    fn stream(&self, first: u64, count: u64, way: Way, depth: u32) -> StreamPlan {
        StreamPlan {
            device: 0,
            blocks: (first, count),
            reads: way == Way::Read,
            writes: way == Way::Write,
            read_percent: 50,
            random: false,
            depth,
        }
    }

    fn run(
        &self,
        plan: &ScalePlan,
        load: Load,
        progress: &Progress,
        what: &str,
    ) -> Result<Figures> {
        let (half, depth) = (self.tile_count / 2, self.depth(load));
        let rest = self.tile_count - half;
        let streams = match load {
            Load::Read => vec![self.stream(0, self.tile_count, Way::Read, depth)],
            Load::Write => vec![self.stream(0, self.tile_count, Way::Write, depth)],
            Load::Both => vec![
                self.stream(0, half, Way::Read, depth / 2),
                self.stream(half, rest, Way::Write, depth / 2),
            ],
        };
        let timing = Timing {
            ramp: plan.ramp,
            runtime: plan.runtime,
        };
        let (figures, _) = self.bench.run(&[streams], timing, progress, what)?;
        Ok(figures)
    }
}
