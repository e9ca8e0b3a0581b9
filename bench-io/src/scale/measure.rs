//! The measuring itself: what beside what, in which order, and when drives keep their pace.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result};

use super::store::Store;
use super::{Load, Rounds, Row, ScalePlan, ScaleReport, Settings, caveats, control};
use crate::fio::{Fio, FioFigures, FioJob};
use crate::place::{WorkDir, write_file};
use crate::progress::Progress;
use crate::report::{DeviceReport, Figures, Head, warnings};
use crate::rounds::{median, rate_of};
use crate::targets::Way;
use crate::testdrives::{Drives, Pace};

/// For the negative control.
const CONTROL_TIME: Duration = Duration::from_secs(1);

/// fio's and the control's own files on one drive.
struct OwnFiles {
    _dir: WorkDir,
    read: PathBuf,
    write: PathBuf,
}

/// Measures all rows of `plan`; `testdrives` are the drives when they have a pace that can be taken away.
///
/// # Errors
/// A drive, the daemon or fio fails.
pub(crate) fn measure(
    plan: &ScalePlan,
    testdrives: Option<(&Drives, Pace)>,
    fio: Option<&Fio>,
    progress: &Progress,
) -> Result<ScaleReport> {
    let mut warnings = warnings::before();
    let measuring = Measuring::begin(plan, testdrives, fio, progress)?;
    let rows = measuring.rows()?;
    warnings.extend(caveats::of(&rows));
    if testdrives.is_none() {
        warnings.extend(warnings::of_one_drive(&plan.dirs));
        warnings.extend(warnings::of_drives(plan.dirs.iter().map(PathBuf::as_path)));
    }
    let settings = Settings {
        size: plan.size,
        fio_iodepth: plan.fio_depth(),
        ioengine: plan.engine.clone(),
        runtime_s: plan.runtime.as_secs_f64(),
        rounds: plan.rounds,
    };
    let devices = plan.dirs.iter().map(|dir| DeviceReport::of(dir));
    Ok(ScaleReport {
        head: Head::new(settings, devices.collect(), warnings),
        pace: testdrives.map(|(_, pace)| pace),
        fio_version: fio.map(|fio| fio.version.clone()),
        rows,
    })
}

/// All that is measured with.
struct Measuring<'a> {
    plan: &'a ScalePlan,
    testdrives: Option<(&'a Drives, Pace)>,
    fio: Option<&'a Fio>,
    progress: &'a Progress,
    /// Of each directory.
    files: Vec<OwnFiles>,
}

impl<'a> Measuring<'a> {
    /// Makes fio's and the control's files, as fast as the drives are.
    fn begin(
        plan: &'a ScalePlan,
        testdrives: Option<(&'a Drives, Pace)>,
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
        measuring.set_pace(false)?;
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

    /// All drives that there are.
    fn all(&self) -> usize {
        self.plan.dirs.len() / self.plan.parts
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
                let set_pace = |on| self.set_pace(on);
                let store = Store::new(self.plan, bs, drives, set_pace, self.progress)?;
                self.set_pace(true)?;
                for load in Load::ALL {
                    rows.push(self.row(&store, load, true)?);
                }
                if drives == last && self.testdrives.is_some() {
                    self.set_pace(false)?;
                    for load in Load::ALL {
                        rows.push(self.row(&store, load, false)?);
                    }
                }
            }
        }
        self.set_pace(true)?;
        Ok(rows)
    }

    fn row(&self, store: &Store, load: Load, is_paced: bool) -> Result<Row> {
        let mut measured = (0..self.plan.rounds)
            .map(|_| self.round(store, load, is_paced))
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
        let slow = self.plan.last_half && store.drives == self.all();
        let count = store.drives as f64 - if slow { 0.5 } else { 0.0 };
        let limit = self
            .testdrives
            .filter(|_| is_paced)
            .map(|(_, pace)| [pace.read, pace.write].map(|rate| rate as f64 * count));
        Ok(Row {
            drives: store.drives,
            load,
            bs: store.bs,
            iodepth: store.depth(load),
            testdrives: is_paced,
            limit_bytes_per_s: limit,
            daemon: daemon.daemon,
            fio: fio.map(|(median, _)| median),
            one_thread_bytes_per_s: one_thread.map(|(median, _)| median),
            rounds: (self.plan.rounds > 1).then_some(apart),
        })
    }

    /// Ours, fio, and one synchronous thread, one after the other.
    fn round(&self, store: &Store, load: Load, is_paced: bool) -> Result<Round> {
        let Self { plan, progress, .. } = *self;
        let unpaced = match is_paced || self.testdrives.is_none() {
            true => "",
            false => ", unpaced",
        };
        let what = format!("{} drives, {}{unpaced}", store.drives, load.word());
        let daemon = store.run(plan, load, progress, &what)?;
        progress.say(&format!("{what}: fio"));
        let own = &self.files[..store.drives * plan.parts];
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
                read_percent: None,
                jobs: 1,
                bs: store.bs,
                iodepth: plan.fio_depth(),
                size: plan.size,
                direct: true,
                ramp: plan.ramp,
                runtime: plan.runtime,
            })
        });
        let one_thread = match load {
            Load::Both => None,
            _ if !is_paced && self.testdrives.is_some() => None,
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

    /// All drives at their pace, or the last one at half of it; or all as fast as memory.
    fn set_pace(&self, on: bool) -> Result<()> {
        let Some((drives, _)) = self.testdrives else {
            return Ok(());
        };
        let pace = drives.state().pace;
        drives.set_pace(on.then_some(pace))?;
        if !on || !self.plan.last_half {
            return Ok(());
        }
        let devices = drives.state().devices.len();
        let half = Pace {
            read: (pace.read / 2).max(1),
            write: (pace.write / 2).max(1),
        };
        drives.set_pace_of(devices - self.plan.parts..devices, Some(half))
    }
}

/// What one round of a row found.
struct Round {
    daemon: Figures,
    fio: Option<FioFigures>,
    one_thread_bytes_per_s: Option<f64>,
}
