//! The order of the measurements, and when the drives' rate limits are on.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result};

use super::store::Store;
use super::{Load, Rounds, Row, ScalePlan, ScaleReport, ScaleSettings, caveats, control};
use crate::figures::Figures;
use crate::fio::{Fio, FioFigures, FioJob};
use crate::place::{WorkDir, write_file};
use crate::progress::Progress;
use crate::report::{About, DeviceReport, warnings};
use crate::rounds::{median, rate_of};
use crate::targets::Way;
use crate::testdrives::{Drives, RateLimit};

/// Duration of the negative control.
const CONTROL_TIME: Duration = Duration::from_secs(1);

/// Files of fio and of the control on one drive.
struct OwnFiles {
    _dir: WorkDir,
    read: PathBuf,
    write: PathBuf,
}

/// Measures all rows of `plan`; `testdrives` are the drives whose rate limit can be lifted.
pub(crate) fn measure(
    plan: &ScalePlan,
    testdrives: Option<(&Drives, RateLimit)>,
    fio: Option<&Fio>,
    progress: &Progress,
) -> Result<ScaleReport> {
    let mut warnings = warnings::before();
    let measuring = Measuring::begin(plan, testdrives, fio, progress)?;
    let rows = measuring.rows()?;
    warnings.extend(caveats::find(&rows));
    if testdrives.is_none() {
        warnings.extend(warnings::of_one_drive(&plan.dirs));
        warnings.extend(warnings::of_drives(plan.dirs.iter().map(PathBuf::as_path)));
    }
    let settings = ScaleSettings {
        size: plan.size,
        fio_iodepth: plan.fio_depth(),
        ioengine: plan.engine.clone(),
        runtime_s: plan.runtime.as_secs_f64(),
        rounds: plan.rounds,
    };
    let devices = plan.dirs.iter().map(|dir| DeviceReport::describe(dir));
    Ok(ScaleReport {
        about: About::new(settings, devices.collect(), warnings),
        limit: testdrives.map(|(_, limit)| limit),
        fio_version: fio.map(|fio| fio.version.clone()),
        rows,
    })
}

struct Measuring<'a> {
    plan: &'a ScalePlan,
    testdrives: Option<(&'a Drives, RateLimit)>,
    fio: Option<&'a Fio>,
    progress: &'a Progress,
    /// Files in each directory.
    files: Vec<OwnFiles>,
}

impl<'a> Measuring<'a> {
    /// Makes the files of fio and the control, without rate limits.
    fn begin(
        plan: &'a ScalePlan,
        testdrives: Option<(&'a Drives, RateLimit)>,
        fio: Option<&'a Fio>,
        progress: &'a Progress,
    ) -> Result<Self> {
        let mut measuring = Self {
            plan,
            testdrives,
            fio,
            progress,
            files: Vec::new(),
        };
        measuring.set_limit(false)?;
        progress.say("making files");
        let files = plan.dirs.iter().map(|dir| {
            let dir = WorkDir::make(dir)?;
            let (read, write) = (dir.path().join("read"), dir.path().join("write"));
            write_file(&read, plan.size)?;
            write_file(&write, plan.size)?;
            Ok(OwnFiles {
                _dir: dir,
                read,
                write,
            })
        });
        measuring.files = files.collect::<Result<_>>()?;
        Ok(measuring)
    }

    /// Number of all drives.
    fn all(&self) -> usize {
        self.plan.dirs.len() / self.plan.dirs_per_drive
    }

    fn rows(&self) -> Result<Vec<Row>> {
        let counts = match self.plan.drives.is_empty() {
            true => (1..=self.all()).collect(),
            false => self.plan.drives.clone(),
        };
        let last = counts.last().copied().context("at least one drive")?;
        let mut rows = Vec::new();
        for &bs in &self.plan.blocks_bytes {
            for &drives in &counts {
                let set_limit = |on| self.set_limit(on);
                let store = Store::new(self.plan, bs, drives, set_limit, self.progress)?;
                self.set_limit(true)?;
                for load in Load::ALL {
                    rows.push(self.row(&store, load, false)?);
                }
                if drives == last && self.testdrives.is_some() {
                    self.set_limit(false)?;
                    for load in Load::ALL {
                        rows.push(self.row(&store, load, true)?);
                    }
                }
            }
        }
        self.set_limit(true)?;
        Ok(rows)
    }

    fn row(&self, store: &Store, load: Load, unlimited: bool) -> Result<Row> {
        let mut measured = (0..self.plan.rounds)
            .map(|_| self.round(store, load, unlimited))
            .collect::<Result<Vec<_>>>()?;
        let fio = measured.iter_mut().filter_map(|round| round.fio.take());
        let fio = median(fio.collect(), FioFigures::bytes_per_s);
        let one_thread = measured
            .iter()
            .filter_map(|round| round.one_thread_bytes_per_s);
        let one_thread = median(one_thread.collect(), |rate| *rate);
        let (daemon, range) =
            median(measured, |round| rate_of(&round.daemon)).context("at least one round")?;
        let apart = Rounds {
            daemon: range,
            fio: fio.as_ref().map(|(_, range)| *range),
        };
        let slow = self.plan.slow_last && store.drives == self.all();
        let count = store.drives as f64 - if slow { 0.5 } else { 0.0 };
        let limit = self
            .testdrives
            .filter(|_| !unlimited)
            .map(|(_, limit)| [limit.read, limit.write].map(|rate| rate as f64 * count));
        Ok(Row {
            drives: store.drives,
            load,
            bs: store.bs,
            iodepth: store.depth(load),
            unlimited,
            limit_bytes_per_s: limit,
            daemon: daemon.daemon,
            fio: fio.map(|(median, _)| median),
            one_thread_bytes_per_s: one_thread.map(|(median, _)| median),
            rounds: (self.plan.rounds > 1).then_some(apart),
        })
    }

    /// Measures through the daemon, by fio, and by one synchronous thread, one after the other.
    fn round(&self, store: &Store, load: Load, unlimited: bool) -> Result<Round> {
        let Self { plan, progress, .. } = *self;
        let suffix = if unlimited { ", unlimited" } else { "" };
        let what = format!("{} drives, {}{suffix}", store.drives, load.word());
        let daemon = store.run(plan, load, progress, &what)?;
        progress.say(&format!("{what}: fio"));
        let own = &self.files[..store.drives * plan.dirs_per_drive];
        let [read, write] = [
            own.iter().map(|one| one.read.clone()).collect::<Vec<_>>(),
            own.iter().map(|one| one.write.clone()).collect(),
        ];
        let fio = self.fio.map(|fio| {
            fio.run(&FioJob {
                streams: &[
                    ("read", if load.reads() { &read } else { &[] }),
                    ("write", if load.writes() { &write } else { &[] }),
                ],
                bs: store.bs,
                iodepth: plan.fio_depth(),
                size: plan.size,
                ramp: plan.ramp,
                runtime: plan.runtime,
            })
        });
        let one_thread = match load {
            Load::Both => None,
            _ if unlimited => None,
            Load::Read => Some((Way::Read, &read)),
            Load::Write => Some((Way::Write, &write)),
        };
        let one_thread = one_thread.map(|(way, files)| {
            progress.say(&format!("{what}: one synchronous thread"));
            let runtime = CONTROL_TIME.min(plan.runtime);
            control::run(files, way, store.bs, plan.size, runtime)
        });
        Ok(Round {
            daemon,
            fio: fio.transpose()?,
            one_thread_bytes_per_s: one_thread.transpose()?,
        })
    }

    /// Limits all drives, with `slow_last` the last one to half the rate; or lifts every limit.
    fn set_limit(&self, on: bool) -> Result<()> {
        let Some((drives, _)) = self.testdrives else {
            return Ok(());
        };
        let limit = drives.state().limit;
        drives.set_limit(on.then_some(limit))?;
        if !on || !self.plan.slow_last {
            return Ok(());
        }
        let devices = drives.state().devices.len();
        let half = RateLimit {
            read: (limit.read / 2).max(1),
            write: (limit.write / 2).max(1),
        };
        drives.set_limit_of(devices - self.plan.dirs_per_drive..devices, Some(half))
    }
}

/// Results of one round of a row.
struct Round {
    daemon: Figures,
    fio: Option<FioFigures>,
    one_thread_bytes_per_s: Option<f64>,
}
