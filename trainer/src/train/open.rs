//! From settings to a run that can step: everything checked first, then folder, store, swapper, and where the run stands.

use std::path::{Path, PathBuf};

use kernels::adamw::{Hyper, init_tile};
use kernels::gpu::{Gpu, Registration, TileUpdater};
use rayon::prelude::*;
use serde_json::{Value, json};
use swapper::private::PrivateDaemon;
use swapper::{Backing, Blank, Daemon, Opened, Optimizer, Swapper};

use super::TrainError;
use crate::accelerator;
use crate::config::{Durability, RunSettings, Tier, UpdatePlace};
use crate::data::Data;
use crate::home::{GpuHome, Home};
use crate::metrics::MetricsFile;
use crate::model::init;
use crate::plan::{Hardware, Overrides, Plan};
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

/// Slots start at blocks and classes may be padded: a private daemon may give a little more than the slots' sum.
const ARENA_SLACK_BYTES: u64 = 16 << 20;

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
    _daemon: Option<PrivateDaemon>,
}

impl Prepared {
    /// Plans the run. With `fresh`, what an earlier run left in its folder does not count.
    ///
    /// # Errors
    /// Settings that contradict each other or the run that the folder holds.
    pub(crate) fn new(
        settings: RunSettings,
        text: Option<&Data>,
        fresh: bool,
    ) -> Result<Self, TrainError> {
        // First: the plan's look at the GPU then finds its context made, which takes a while.
        let gpu = accelerator::open(settings.train.device, 0)?;
        let hardware = Hardware::new(&settings, &Overrides::default());
        let plan = Plan::new(
            &settings,
            hardware,
            text.map_or(0, |text| text.bytes() as u64),
        )?;
        let trained_with = trained_with(&settings, text);
        let run_folder = resolved(&settings.train.run_folder);
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
        })
    }

    /// Checks that there is room for the run: folders of a private store, or the daemon of a shared one, then memory.
    /// Touches nothing.
    ///
    /// # Errors
    /// What is missing.
    pub(crate) fn check_room(&self) -> Result<(), TrainError> {
        if let Some(files) = &self.files {
            files.check()?;
        }
        self.shared_daemon()?;
        Ok(self.plan.check()?)
    }

    /// Opens the run where it stands, or makes it. Returns it and whether it was resumed.
    ///
    /// # Errors
    /// Folder, store, daemon or checkpoint.
    pub(crate) fn open(
        self,
        fresh: bool,
        say: &mut dyn FnMut(String),
    ) -> Result<(OpenRun, bool), TrainError> {
        let folder = RunFolder::open(&self.run_folder)?;
        if fresh {
            self.forget(&folder, say)?;
        }
        let steps = MetricsFile::last_step(folder.path());
        let lost = |devices: Vec<String>| TrainError::StoreLost {
            run_folder: self.run_folder.clone(),
            steps,
            devices: devices.join(", "),
            job: job_name(&self.run_folder),
        };
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
            return Err(lost(files.unwrap_or_else(|| socket().collect())));
        }
        let (mut run, resumed) = self.open_at(folder, say)?;
        if !resumed && steps > 0 {
            if self.settings.placement.has_store() {
                let devices = run.opened.devices.iter();
                return Err(lost(devices.map(|device| device.path.clone()).collect()));
            }
            let old = MetricsFile::set_aside(run.folder.path())?;
            say(format!(
                "note: nothing was saved of the {steps} steps in metrics.jsonl, which is {} now: starting again (train.save_every saves as it goes)",
                old.display()
            ));
        }
        run.folder.describe(&self.description)?;
        if !resumed {
            run.initialize(&self.settings)?;
        }
        Ok((run, resumed))
    }

    /// Opens a run that has something committed, to read it.
    ///
    /// # Errors
    /// Nothing was committed yet; folder, store, daemon or checkpoint.
    pub(crate) fn open_existing(self) -> Result<OpenRun, TrainError> {
        if self.begun && self.store_has_job()? {
            let folder = RunFolder::open(&self.run_folder)?;
            if let (run, true) = self.open_at(folder, &mut |_| {})? {
                return Ok(run);
            }
        }
        Err(TrainError::NothingCommitted {
            run_folder: self.run_folder,
        })
    }

    /// Opens the run at its newest generation or checkpoint; whether there was one comes with it.
    fn open_at(
        &self,
        folder: RunFolder,
        say: &mut dyn FnMut(String),
    ) -> Result<(OpenRun, bool), TrainError> {
        let mut plan = self.plan.clone();
        let daemon = self.connect(&mut plan, &folder)?;
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

    /// Whether all tiles live in the memory of the GPU that computes.
    pub(crate) fn lives_in_gpu(&self) -> bool {
        let placement = &self.settings.placement;
        self.gpu.is_some() && placement.param == Tier::None && placement.optimizer == Tier::None
    }

    /// Takes the tiles' memory, opens their store.
    fn open_home(&self, plan: &Plan) -> Result<(Home, Opened), TrainError> {
        let decay = Decay::new(&plan.units);
        if let Some(gpu) = self.gpu.as_ref().filter(|_| self.lives_in_gpu()) {
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

    /// Names the daemon in the plan: the one behind the socket, or a private one that is started here.
    fn connect(
        &self,
        plan: &mut Plan,
        folder: &RunFolder,
    ) -> Result<Option<PrivateDaemon>, TrainError> {
        let Backing::Store(store) = &mut plan.swapper.backing else {
            return Ok(None);
        };
        store.job = folder.job_name().to_owned();
        // A shared one was asked before, and is asked again when the job is opened.
        let Some(files) = &self.files else {
            return Ok(None);
        };
        let arena_bytes_max = self.plan.memory.host_bytes() + ARENA_SLACK_BYTES;
        let daemon = start_private(
            files,
            &daemon_folder(folder.path()),
            arena_bytes_max,
            &self.settings.offload.engine,
        )?;
        store.socket = daemon.socket().to_path_buf();
        Ok(Some(daemon))
    }
}

impl OpenRun {
    /// Reads the newest checkpoint, for runs without a store. False when there is none.
    fn restore(&mut self, say: &mut dyn FnMut(String)) -> Result<bool, TrainError> {
        if matches!(self.plan.swapper.backing, Backing::Store(_)) {
            return Ok(false);
        }
        let Some(mut checkpoint) = self.checkpoints.newest(0)? else {
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

    /// Writes all tiles and the state into the run folder.
    pub(crate) fn save(&mut self) -> Result<(), TrainError> {
        let (home, state) = (&mut self.home, &self.state);
        let blob = state.encode();
        let begun = (self.checkpoints).begin(state.step, 0, &blob, |take| {
            home.visit(take).map_err(TrainError::from)
        })?;
        begun.finish(&[])?;
        Ok(self.checkpoints.prune()?)
    }

    /// Ends in order; everything that should last was drained or saved before.
    pub(crate) fn close(self) -> Result<(), TrainError> {
        Ok(self.home.close()?)
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
