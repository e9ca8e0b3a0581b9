//! From settings to a run that can step: everything checked first, then folder, store, swapper, and where the run stands.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use kernels::adamw::{Hyper, init_tile};
use kernels::gpu::{Gpu, Registration, TileUpdater};
use rayon::prelude::*;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use swapper::private::PrivateDaemon;
use swapper::{Backing, Blank, Daemon, Opened, Optimizer, Swapper};

use super::TrainError;
use crate::accelerator;
use crate::config::{Durability, RunSettings, UpdatePlace};
use crate::data::Data;
use crate::home::{GpuHome, Home};
use crate::metrics::MetricsFile;
use crate::model::init;
use crate::plan::{Hardware, Overrides, Plan};
use crate::ranks::Ranks;
use crate::run::{
    Checkpoints, RunDescription, RunFolder, RunState, daemon_folder, job_name, resolved,
};
use crate::store::{StoreError, StoreFiles, file_name, remove_files, start_private};
use crate::update::{CpuUpdate, Decay, GpuUpdate};

/// Threads that stream tiles through the GPU: one's copy up, one's kernel and one's copy down at a time.
const GPU_UPDATERS: usize = 3;

/// Threads that hand tiles to the processor's pool: while one waits for the last cores of its tile, the others have the
/// next one's.
const CPU_UPDATERS: usize = 2;

/// Version of the description that a store keeps with a job.
const LAYOUT_VERSION: u32 = 1;

/// Where the state of a run with a shared daemon is, in `run.json`.
const SHARED_STORE: &str = "with the daemon of offload.socket";

/// A run whose settings, folders and memory were checked; nothing was made yet.
pub(crate) struct Prepared {
    pub(crate) settings: RunSettings,
    pub(crate) plan: Plan,
    run_folder: PathBuf,
    /// Files of a private store, if the run has one.
    files: Option<StoreFiles>,
    description: RunDescription,
    /// What may change between two starts, and is shown when it does.
    trained_with: Value,
    /// Whether the folder holds the run already.
    begun: bool,
    /// What computes, if it is not the processor.
    pub(crate) gpu: Option<Gpu>,
    ranks: Arc<Ranks>,
}

/// What the first rank found and started, told to the others.
#[derive(Serialize, Deserialize)]
struct Started {
    /// Steps in the metrics of an earlier start.
    steps: u64,
    /// Of the private daemon, if the run has one.
    socket: Option<PathBuf>,
}

/// An open run. Fields are dropped in this order: the swapper before the daemon it talks to.
pub(crate) struct OpenRun {
    pub(crate) home: Home,
    /// The slots, pinned for the GPU.
    _pinned: Option<Registration>,
    pub(crate) opened: swapper::Opened,
    pub(crate) state: RunState,
    pub(crate) plan: Plan,
    pub(crate) checkpoints: Checkpoints,
    pub(crate) folder: RunFolder,
    /// The first rank's, for all.
    _daemon: Option<PrivateDaemon>,
    ranks: Arc<Ranks>,
}

impl Prepared {
    /// Plans the run. With `fresh`, what an earlier run left in its folder does not count.
    ///
    /// # Errors
    /// Settings that contradict each other or the run that the folder holds.
    pub(crate) fn new(
        mut settings: RunSettings,
        text: Option<&Data>,
        fresh: bool,
        ranks: Arc<Ranks>,
    ) -> Result<Self, TrainError> {
        assert_eq!(settings.ranks, ranks.count(), "settings for these ranks");
        let run_folder = resolved(&settings.train.run_folder);
        if !fresh && settings.offload.tile_elems.is_none() {
            // What was chosen for a run stays with it, whatever would be chosen now.
            settings.offload.tile_elems = tile_elems_of(&run_folder)?;
        }
        // First: the plan's look at the GPU then finds its context made, which takes a while.
        let gpu = accelerator::open(settings.train.device, ranks.rank())?;
        let hardware = Hardware::new(&settings, &Overrides::default());
        let mut plan = Plan::new(
            &settings,
            hardware,
            text.map_or(0, |text| text.bytes() as u64),
        )?;
        plan.swapper.rank = ranks.rank();
        let trained_with = trained_with(&settings, text);
        let mut description = describe(&settings, &plan);
        let begun = !fresh && RunFolder::check(&run_folder, &description)?;
        let private = settings.placement.has_store() && settings.offload.socket.is_none();
        let files = private.then(|| {
            let folders = &settings.placement.nvme_paths;
            StoreFiles::new(
                folders,
                &job_name(&run_folder),
                plan.device_file_bytes(folders.len() as u64),
            )
        });
        let paths = files.as_ref().map_or(&[][..], StoreFiles::paths);
        description.files = paths.iter().map(|path| resolved(path)).collect();
        Ok(Self {
            settings,
            plan,
            run_folder,
            files,
            description,
            trained_with,
            begun,
            gpu,
            ranks,
        })
    }

    /// Checks that there is room for the run: folders of a private store, or the daemon of a shared one, then memory.
    /// Touches nothing.
    ///
    /// # Errors
    /// What is missing.
    pub(crate) fn check_room(&self) -> Result<(), TrainError> {
        // The plan counts all ranks of the node.
        if !self.ranks.is_first() {
            return Ok(());
        }
        if let Some(files) = &self.files {
            files.check()?;
        }
        self.shared_daemon()?;
        Ok(self.plan.check()?)
    }

    /// Opens the run where it stands, or makes it, with all ranks. Returns it and whether it was resumed.
    ///
    /// # Errors
    /// Folder, store, daemon or checkpoint; another rank failed or is gone.
    pub(crate) fn open(
        self,
        fresh: bool,
        say: &mut dyn FnMut(String),
    ) -> Result<(OpenRun, bool), TrainError> {
        let ranks = self.ranks.clone();
        let mut kept = None;
        let started = ranks.by_first("opening the run's folder and store", || {
            let (folder, daemon, started) = self.start(fresh, say)?;
            kept = Some((folder, daemon));
            Ok(started)
        })?;
        let (mut run, resumed) = ranks.together("opening the run", || {
            let (folder, daemon) =
                kept.unwrap_or_else(|| (RunFolder::joined(&self.run_folder), None));
            self.open_at(folder, daemon, started.socket, say)
        })?;
        let steps = started.steps;
        if !resumed && steps > 0 && self.settings.placement.has_store() {
            let devices = run.opened.devices.iter();
            return Err(self.lost(steps, devices.map(|device| device.path.clone()).collect()));
        }
        ranks.together("describing the run", || {
            if !ranks.is_first() {
                return Ok(());
            }
            if !resumed && steps > 0 {
                let old = MetricsFile::set_aside(run.folder.path())?;
                say(format!(
                    "note: nothing was saved of the {steps} steps in metrics.jsonl, which is {} now: starting again (train.save_every saves as it goes)",
                    old.display()
                ));
            }
            Ok(run.folder.describe(&self.description)?)
        })?;
        if !resumed {
            ranks.together("filling the tiles", || run.initialize(&self.settings))?;
        }
        Ok((run, resumed))
    }

    /// The first rank's part: locks the folder, forgets what is to be forgotten, starts a private daemon.
    fn start(
        &self,
        fresh: bool,
        say: &mut dyn FnMut(String),
    ) -> Result<(RunFolder, Option<PrivateDaemon>, Started), TrainError> {
        let folder = RunFolder::open(&self.run_folder)?;
        if fresh {
            self.forget(&folder, say)?;
        }
        let steps = MetricsFile::last_step(folder.path());
        // Asked before a private daemon makes its files anew, or a shared one makes room for a new job.
        if steps > 0 && !self.store_has_job()? {
            let files = self.files.as_ref().map(StoreFiles::names);
            let socket = || {
                self.settings
                    .offload
                    .socket
                    .iter()
                    .map(|path| path.display().to_string())
            };
            return Err(self.lost(steps, files.unwrap_or_else(|| socket().collect())));
        }
        let daemon = self.private_daemon(&folder)?;
        let socket = daemon.as_ref().map(|daemon| daemon.socket().to_path_buf());
        Ok((folder, daemon, Started { steps, socket }))
    }

    fn lost(&self, steps: u64, devices: Vec<String>) -> TrainError {
        TrainError::StoreLost {
            run_folder: self.run_folder.clone(),
            steps,
            devices: devices.join(", "),
            job: job_name(&self.run_folder),
        }
    }

    /// Opens a run that has something committed, to read it.
    ///
    /// # Errors
    /// Nothing was committed yet; folder, store, daemon or checkpoint.
    pub(crate) fn open_existing(self) -> Result<OpenRun, TrainError> {
        if self.begun && self.store_has_job()? {
            let folder = RunFolder::open(&self.run_folder)?;
            let daemon = self.private_daemon(&folder)?;
            let socket = daemon.as_ref().map(|daemon| daemon.socket().to_path_buf());
            if let (run, true) = self.open_at(folder, daemon, socket, &mut |_| {})? {
                return Ok(run);
            }
        }
        Err(TrainError::NothingCommitted {
            run_folder: self.run_folder,
        })
    }

    /// Opens this rank's part of the run at its newest generation or checkpoint; whether there was one comes with it.
    /// `socket` is the private daemon's.
    fn open_at(
        &self,
        folder: RunFolder,
        daemon: Option<PrivateDaemon>,
        socket: Option<PathBuf>,
        say: &mut dyn FnMut(String),
    ) -> Result<(OpenRun, bool), TrainError> {
        let mut plan = self.plan.clone();
        if let Backing::Store(store) = &mut plan.swapper.backing {
            store.job = folder.job_name().to_owned();
            store.socket = socket.unwrap_or(std::mem::take(&mut store.socket));
        }
        plan.swapper.layout = serde_json::to_vec(&self.description.layout).expect("plain data");
        let (home, opened) = self.open_home(&plan)?;
        let pinned = match (&self.gpu, &opened.arena) {
            (Some(gpu), Some(arena)) => {
                let keep = Box::new(arena.clone());
                Some(gpu.register(arena.address(), arena.bytes(), keep)?)
            }
            _ => None,
        };
        let state = RunState::new(self.settings.train.seed, self.trained_with.clone());
        let checkpoints = Checkpoints::new(folder.checkpoint_folder());
        let mut run = OpenRun {
            home,
            _pinned: pinned,
            opened,
            state,
            plan,
            checkpoints,
            folder,
            _daemon: daemon,
            ranks: self.ranks.clone(),
        };
        let resumed = match run.opened.resumed.take() {
            Some(blob) => {
                run.state = resume(&run.state, &blob, say)?;
                true
            }
            None => run.restore(say)?,
        };
        Ok((run, resumed))
    }

    /// Takes the tiles' memory, opens their store.
    fn open_home(&self, plan: &Plan) -> Result<(Home, Opened), TrainError> {
        let decay = Decay::new(&plan.units);
        if let Some(gpu) = self.gpu.as_ref().filter(|_| plan.lives_in_gpu) {
            let layout = plan.swapper.cut()?;
            let home = GpuHome::new(gpu, layout, plan.master, decay)?;
            let opened = Opened {
                resumed: None,
                generation: 0,
                memory: plan.memory.clone(),
                arena: None,
                iodepth: 0,
                engine: "GPU memory".into(),
                devices: Vec::new(),
                notes: Vec::new(),
            };
            return Ok((Home::Gpu(Box::new(home)), opened));
        }
        let opened = Swapper::open(plan.swapper.clone(), self.optimizers(plan, &decay)?);
        let (swapper, opened) = match self.settings.offload.durability {
            Durability::Full => opened?,
            Durability::None => opened.map_err(TrainError::InPlace)?,
        };
        Ok((Home::Swapper(Box::new(swapper)), opened))
    }

    /// What updates tiles: the processor, the GPU, or both, each tile by who is free.
    fn optimizers(
        &self,
        plan: &Plan,
        decay: &Decay,
    ) -> Result<Vec<Box<dyn Optimizer<Hyper>>>, TrainError> {
        let mut optimizers: Vec<Box<dyn Optimizer<Hyper>>> = Vec::new();
        let gpu = self
            .gpu
            .as_ref()
            .filter(|_| plan.update != UpdatePlace::Cpu);
        if let Some(gpu) = gpu {
            for _ in 0..GPU_UPDATERS {
                optimizers.push(Box::new(GpuUpdate {
                    master: plan.master,
                    decay: decay.clone(),
                    updater: TileUpdater::new(gpu, plan.master, plan.swapper.tile_elems as usize)?,
                }));
            }
        }
        if gpu.is_none() || plan.update == UpdatePlace::Shared {
            for _ in 0..CPU_UPDATERS {
                optimizers.push(Box::new(CpuUpdate {
                    master: plan.master,
                    decay: decay.clone(),
                }));
            }
        }
        Ok(optimizers)
    }

    /// Removes what an earlier run of the same folder left, here and in the store, the one it had then included.
    fn forget(&self, folder: &RunFolder, say: &mut dyn FnMut(String)) -> Result<(), TrainError> {
        let earlier = folder.earlier();
        let mut files = self.description.files.clone();
        if let Some(earlier) = &earlier {
            // A copy of another run's folder names that run's files, which are not this run's to remove.
            let name = file_name(folder.job_name());
            let ours = |path: &&PathBuf| path.file_name().is_some_and(|found| *found == *name);
            files.extend(earlier.files.iter().filter(ours).cloned());
        }
        remove_files(&files)?;
        if self.settings.offload.socket.is_some() {
            if self.store_has_job()?
                && let Some(daemon) = self.shared_daemon()?
            {
                daemon
                    .drop_job(folder.job_name())
                    .map_err(StoreError::Daemon)?;
            }
        } else if earlier.is_some_and(|earlier| earlier.store.starts_with(SHARED_STORE)) {
            say(format!(
                "note: job {} of the earlier run stays with the daemon it used: --fresh with its offload.socket would have dropped it",
                folder.job_name()
            ));
        }
        Ok(folder.forget()?)
    }

    /// Whether the run's job can be in its store. True for runs without a store.
    fn store_has_job(&self) -> Result<bool, TrainError> {
        if let Some(files) = &self.files {
            return Ok(files.exist());
        }
        let Some(daemon) = self.shared_daemon()? else {
            return Ok(true);
        };
        let name = job_name(&self.run_folder);
        Ok(daemon
            .jobs()
            .map_err(StoreError::Daemon)?
            .iter()
            .any(|job| job.job == name))
    }

    /// The daemon behind `offload.socket`, if the run has its store there; every `nvme_path` that is named is of its store.
    fn shared_daemon(&self) -> Result<Option<Daemon>, StoreError> {
        let Some(socket) = &self.settings.offload.socket else {
            return Ok(None);
        };
        let daemon = Daemon::connect(socket).map_err(StoreError::Daemon)?;
        let devices = daemon.info().devices.iter();
        let devices: Vec<&Path> = devices.map(|device| device.path.as_path()).collect();
        check_paths(&self.settings.placement.nvme_paths, &devices)?;
        Ok(Some(daemon))
    }

    /// Starts the run's private daemon, if it is to have one.
    fn private_daemon(&self, folder: &RunFolder) -> Result<Option<PrivateDaemon>, TrainError> {
        // A shared one was asked before, and is asked again when the job is opened.
        let Some(files) = &self.files else {
            return Ok(None);
        };
        // Planned for the first rank, which owns most.
        let rank_bytes = self.plan.memory.arena_bytes()?;
        let daemon = start_private(
            files,
            &daemon_folder(folder.path()),
            rank_bytes * u64::from(self.ranks.count()),
            &self.settings.offload.engine,
        )?;
        Ok(Some(daemon))
    }
}

impl OpenRun {
    /// Reads the newest checkpoint, for runs without a store. False when there is none.
    fn restore(&mut self, say: &mut dyn FnMut(String)) -> Result<bool, TrainError> {
        if matches!(self.plan.swapper.backing, Backing::Store(_)) {
            return Ok(false);
        }
        let Some(mut checkpoint) = self.checkpoints.newest(self.ranks.rank())? else {
            return Ok(false);
        };
        self.state = resume(&self.state, &checkpoint.blob, say)?;
        let fill = |blanks: &mut [Blank]| {
            for blank in blanks {
                checkpoint.tile(blank.range, blank.param, blank.state)?;
            }
            Ok::<(), TrainError>(())
        };
        self.home.initialize(fill, self.state.encode())?;
        Ok(true)
    }

    /// Fresh weights into every tile; commits them as step 0.
    fn initialize(&mut self, settings: &RunSettings) -> Result<(), TrainError> {
        let (units, master, seed) = (&self.plan.units, self.plan.master, settings.train.seed);
        // A weight's value follows from its place alone, so tiles may be filled side by side.
        let fill = |blanks: &mut [Blank]| {
            blanks.par_iter_mut().for_each(|blank| {
                let Blank {
                    range,
                    param,
                    state,
                } = blank;
                param.fill(0);
                state.fill(0);
                let elems = range.elems.start as usize..range.elems.end as usize;
                let mut masters = vec![0f32; elems.len()];
                init::fill(
                    &units[range.unit],
                    range.unit,
                    seed,
                    settings.model.initializer_range,
                    elems,
                    &mut masters,
                );
                init_tile(master, &masters, param, state);
            });
            Ok::<(), TrainError>(())
        };
        self.home.initialize(fill, self.state.encode())
    }

    /// Writes all ranks' tiles and the state into the run folder. The first rank's file comes last: it makes the checkpoint.
    ///
    /// # Errors
    /// The drive is full or fails, here or on another rank; the checkpoint before stays.
    pub(crate) fn save(&mut self) -> Result<(), TrainError> {
        let (home, state, ranks) = (&mut self.home, &self.state, &self.ranks);
        let checkpoints = &self.checkpoints;
        let blob = state.encode();
        let begun = ranks.together("saving its tiles", || {
            checkpoints.begin(state.step, ranks.rank(), &blob, |take| {
                home.visit(take).map_err(TrainError::from)
            })
        })?;
        let (first, part) = if ranks.is_first() {
            (Some(begun), None)
        } else {
            (None, Some(begun))
        };
        let own = ranks.together("finishing its part of the checkpoint", || {
            Ok(part.map_or(Ok(0), |part| part.finish(&[]))?)
        })?;
        let fingerprints = ranks.numbers(own)?;
        ranks.together("finishing the checkpoint", || {
            if let Some(first) = first {
                first.finish(&fingerprints[1..])?;
                checkpoints.prune()?;
            }
            Ok(())
        })
    }

    /// Ends in order; everything that should last was drained or saved before. The daemon ends after all ranks' sessions.
    ///
    /// # Errors
    /// What the tiles' place says.
    pub(crate) fn close(self) -> Result<(), TrainError> {
        let home = self.home;
        (self.ranks).together("closing the run", || Ok(home.close()?))
    }
}

/// The state in `blob`. Differences to what the run would now be trained with are said, not refused: a run may go on with
/// another rate or more text.
fn resume(
    fresh: &RunState,
    blob: &[u8],
    say: &mut dyn FnMut(String),
) -> Result<RunState, TrainError> {
    let mut state = RunState::decode(blob)?;
    for change in crate::run::differences(&state.trained_with, &fresh.trained_with) {
        say(format!(
            "note: {} was {} until step {}, is {} from here on",
            change.what, change.was, state.step, change.now
        ));
    }
    state.trained_with = fresh.trained_with.clone();
    state.seed = fresh.seed;
    Ok(state)
}

/// Elements of a tile in the run that the folder holds, if it holds one.
fn tile_elems_of(run_folder: &Path) -> Result<Option<u64>, TrainError> {
    let earlier = RunFolder::described(run_folder)?;
    Ok(earlier.and_then(|earlier| earlier.layout["tile_elems"].as_u64()))
}

/// What a run is for its whole life.
fn describe(settings: &RunSettings, plan: &Plan) -> RunDescription {
    let lines: Value = serde_json::to_value(settings).expect("plain data");
    let mut store = match (&settings.offload.socket, settings.placement.has_store()) {
        (_, false) => "in the run folder".to_owned(),
        (Some(_), true) => SHARED_STORE.to_owned(),
        (None, true) => {
            let folders = settings.placement.nvme_paths.iter();
            let folders: Vec<String> = folders
                .map(|path| resolved(path).display().to_string())
                .collect();
            format!("in {}", folders.join(", "))
        }
    };
    if settings.placement.has_store() && settings.offload.durability == Durability::None {
        store += ", written in place";
    }
    RunDescription {
        layout: json!({
            "version": LAYOUT_VERSION,
            "model": settings.model,
            "dtype": lines["dtype"],
            "tile_elems": plan.swapper.tile_elems,
        }),
        store,
        files: Vec::new(),
    }
}

/// What may change between two starts of a run. Without `text` it is only read, not trained.
fn trained_with(settings: &RunSettings, text: Option<&Data>) -> Value {
    let lines = serde_json::to_value(settings).expect("plain data");
    json!({
        "batch": lines["batch"],
        "ranks": lines["ranks"],
        "gradient_clipping": lines["gradient_clipping"],
        "optimizer": lines["optimizer"],
        "lr": lines["lr"],
        "text": text.map(|text| format!("{} bytes, fingerprint {:016x}", text.bytes(), text.fingerprint())),
        "holdout_share": lines["data"]["holdout_share"],
        "seed": settings.train.seed,
    })
}

/// Each of `paths` must be a folder in which the store has a device, or a device itself.
fn check_paths(paths: &[PathBuf], devices: &[&Path]) -> Result<(), StoreError> {
    for path in paths {
        let folder = resolved(path);
        let holds = |device: &&Path| resolved(device).starts_with(&folder);
        if !devices.iter().any(holds) {
            let devices: Vec<String> = devices
                .iter()
                .map(|device| device.display().to_string())
                .collect();
            return Err(StoreError::NotOfTheStore {
                path: path.clone(),
                devices: devices.join(", "),
            });
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nvme_path_must_be_of_the_shared_store() {
        let folder = tempfile::tempdir().unwrap();
        let device = folder.path().join("drive.tiles");
        std::fs::write(&device, "").unwrap();
        check_paths(&[folder.path().into()], &[&device]).unwrap();
        check_paths(&[], &[&device]).unwrap();
        let other = tempfile::tempdir().unwrap();
        let text = check_paths(&[other.path().into()], &[&device])
            .unwrap_err()
            .to_string();
        assert!(
            text.contains("is not a folder of the store behind offload.socket")
                && text.contains("drive.tiles"),
            "{text}"
        );
    }
}
