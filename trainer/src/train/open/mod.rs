//! From settings to a run that can step: everything checked first, then folder, store, swapper, and where the run stands.

mod describe;
mod first;
mod home;
mod mend;
mod room;
mod run;
mod shared;

use std::path::{Path, PathBuf};
use std::sync::Arc;

use kernels::gpu::Gpu;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use swapper::kill_point::{Point, reach};
use swapper::private::PrivateDaemon;
use swapper::{Backing, Daemon};

pub(crate) use mend::mend;
pub(crate) use run::OpenRun;

use super::{Start, TrainError};
use crate::accelerator;
use crate::config::{FirstWeights, RunSettings};
use crate::copies::Copies;
use crate::data::Data;
use crate::metrics::{MetricsFile, StepMetrics};
use crate::plan::{Hardware, Overrides, Plan};
use crate::ranks::Ranks;
use crate::run::{
    ModelFiles, Origin, RunDescription, RunFolder, RunId, RunState, Save, Saves, daemon_folder,
    resolved,
};
use crate::store::{StoreError, StoreFiles, file_name, remove_files, start_private};
use crate::weights::WeightsError;
pub(crate) use describe::{IN_PLACE, SHARED_STORE, STORE_IN_FOLDER};
use describe::{describe, tile_elems_of, trained_with};
use first::{First, Staged};
use run::resume;
use shared::elsewhere;

/// A run whose settings, folders and memory were checked; nothing was made yet.
pub(crate) struct Prepared {
    pub(crate) settings: RunSettings,
    pub(crate) plan: Plan,
    run_folder: PathBuf,
    id: RunId,
    /// The run whose folder was copied to make this one's, if one was.
    copy_of: Option<PathBuf>,
    /// Files of a private store, if the run has one.
    files: Option<StoreFiles>,
    description: RunDescription,
    /// What may change between two starts, and is shown when it does.
    trained_with: Value,
    /// Whether the folder holds the run already.
    begun: bool,
    /// The save that is asked for.
    from: Option<PathBuf>,
    /// What a fresh run's tiles are filled with; why it cannot be had matters to a fresh run only.
    first: Result<First, WeightsError>,
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
    /// What the run begins from, if not from its store's newest generation.
    save: Option<PathBuf>,
    /// As the first rank found or chose it.
    id: RunId,
}

impl Prepared {
    /// Plans the run. With [`Start::Fresh`], what an earlier run left in its folder does not count.
    ///
    /// # Errors
    /// Settings that contradict each other, the run that the folder holds, or the save that is asked for.
    pub(crate) fn new(
        mut settings: RunSettings,
        start: &Start,
        ranks: Arc<Ranks>,
    ) -> Result<Self, TrainError> {
        assert_eq!(settings.ranks, ranks.count(), "settings for these ranks");
        let run_folder = resolved(&settings.train.run_folder);
        let (id, origin) = RunId::of(&run_folder);
        let fresh = matches!(start, Start::Fresh);
        let from = match start {
            Start::Save(name) => Some(name.find(&run_folder)?),
            _ => None,
        };
        let from = from
            .map(|folder| Save::open(&folder, ranks.rank()))
            .transpose()?;
        if !fresh && settings.offload.tile_elems.is_none() {
            // What was chosen for a run stays with it, whatever would be chosen now.
            settings.offload.tile_elems = match &from {
                Some(save) => save.description.layout["tile_elems"].as_u64(),
                None => tile_elems_of(&run_folder)?,
            };
        }
        // First: the plan's look at the GPU then finds its context made, which takes a while.
        let gpu = accelerator::open(settings.train.device, ranks.rank(), ranks.count())?;
        let hardware = Hardware::new(&settings, &Overrides::default());
        let mut plan = Plan::new(&settings, hardware)?;
        if settings.placement.stage.divides_state() {
            plan.swapper.rank = ranks.rank();
        }
        let trained_with = trained_with(&settings);
        let mut description = describe(&settings, &plan);
        let begun = match &from {
            None => !fresh && RunFolder::check(&run_folder, &description)?,
            // Its place may be another one than the folder's run had: there is nothing to bring from there.
            Some(save) => {
                save.check_layout(&description.layout)?;
                RunFolder::check_layout(&run_folder, &description)?
            }
        };
        // Also where it would go on: a new run was asked for.
        if settings.first_weights == FirstWeights::Run(run_folder.clone()) {
            return Err(TrainError::FromItself { folder: run_folder });
        }
        let first = match First::look(&settings) {
            Err(error) if !begun && from.is_none() => return Err(error.into()),
            first => first,
        };
        let private = settings.placement.has_store() && settings.offload.socket.is_none();
        let files = private.then(|| {
            let folders = &settings.placement.nvme_paths;
            StoreFiles::new(
                folders,
                &id.job,
                plan.device_file_bytes(folders.len() as u64),
            )
        });
        let paths = files.as_ref().map_or(&[][..], StoreFiles::paths);
        description.files = paths.iter().map(|path| resolved(path)).collect();
        if from.is_some()
            && let Some(earlier) = RunFolder::described(&run_folder)?
        {
            // A store that the run leaves stays until --fresh.
            let files = &mut description.files;
            let left = earlier.files.into_iter();
            let left: Vec<PathBuf> = left.filter(|file| !files.contains(file)).collect();
            files.extend(left);
        }
        Ok(Self {
            settings,
            plan,
            run_folder,
            id,
            copy_of: match origin {
                Origin::CopyOf(of) => Some(of),
                _ => None,
            },
            files,
            description,
            trained_with,
            begun,
            from: from.map(|save| save.path().to_owned()),
            first,
            gpu,
            ranks,
        })
    }

    /// Notes what the run is trained on, to tell a difference at the next start.
    pub(crate) fn train_on(&mut self, data: &Data) {
        let (tokens, fingerprint) = (data.tokens(), data.fingerprint());
        let text = format!("{tokens} tokens, fingerprint {fingerprint:016x}");
        self.trained_with["text"] = text.into();
    }

    /// Checks that there is room for the run: folders of a private store, or the daemon of a shared one, then memory,
    /// then the checkpoints that it will make. Touches nothing.
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
        if let Some(daemon) = self.shared_daemon()? {
            let devices = daemon.info().devices.iter();
            let devices: Vec<&Path> = devices.map(|device| device.path.as_path()).collect();
            for note in elsewhere(&self.settings.placement.nvme_paths, &devices) {
                tracing::warn!("{note}");
            }
        }
        self.plan.check()?;
        if let Some(warning) = room::check(
            &self.settings,
            &self.plan,
            &self.run_folder,
            self.begun,
            self.from.is_some(),
        )? {
            tracing::warn!("{warning}");
        }
        Ok(())
    }

    /// Reads the weights that a fresh run starts with, once, to find what cannot be trained before anything is made.
    ///
    /// # Errors
    /// The first that cannot; a file cannot be read.
    pub(crate) fn check_weights(&self) -> Result<(), TrainError> {
        let fresh = !self.begun && self.from.is_none();
        // Other ranks wait: all the node's share of threads is the first one's.
        let threads = self.settings.train.threads * self.settings.ranks as usize;
        match &self.first {
            Ok(First::Files(weights)) if fresh => Ok(weights.check(threads)?),
            _ => Ok(()),
        }
    }

    /// Opens the run where it stands, or makes it, with all ranks. Returns it and whether it was resumed.
    ///
    /// # Errors
    /// Folder, store, daemon or save; another rank failed or is gone.
    pub(crate) fn open(
        self,
        start: &Start,
        say: &mut dyn FnMut(String),
    ) -> Result<(OpenRun, bool), TrainError> {
        let ranks = self.ranks.clone();
        let mut kept = None;
        let started = ranks.by_first("opening the run's folder and store", || {
            let (folder, daemon, started) = self.start(start, say)?;
            kept = Some((folder, daemon));
            Ok(started)
        })?;
        let (mut run, committed) = ranks.together("opening the run", || {
            let (folder, daemon) =
                kept.unwrap_or_else(|| (RunFolder::joined(&self.run_folder, &started.id), None));
            self.open_at(folder, daemon, started.socket)
        })?;
        let (steps, resumed) = (started.steps, committed.is_some() || started.save.is_some());
        if !resumed && steps > 0 && self.settings.placement.has_store() {
            let devices = run.opened.devices.iter();
            return Err(self.lost(steps, devices.map(|device| device.path.clone()).collect()));
        }
        match (started.save, committed) {
            (Some(save), _) => {
                let folder = run.folder.path().to_owned();
                let mut notes = Vec::new();
                let mut on_checked = || self.go_back(start, &save, &folder, &mut notes);
                run.restore(&save, &mut on_checked, say)?;
                notes.into_iter().for_each(&mut *say);
            }
            (None, Some(blob)) => {
                run.state = resume(&run.state, &blob, say)?;
                let last = MetricsFile::last(run.folder.path());
                let older = last.and_then(|last| older_than(&last, &run));
                older.into_iter().for_each(&mut *say);
            }
            (None, None) => {}
        }
        let mut description = self.description;
        let staged = Staged::of(run.folder.path());
        let first = if resumed {
            let was = run.folder.earlier().map(|earlier| earlier.first_weights);
            let note = self
                .first
                .ok()
                .and_then(|first| first.note(&was.unwrap_or_default()));
            note.into_iter().for_each(&mut *say);
            None
        } else {
            let mut first = ranks.together("looking for its first weights", || Ok(self.first?))?;
            if let First::Run { from, read } = &mut first {
                let step =
                    ranks.by_first("reading the other run's weights", || staged.fill(from))?;
                let model = &self.settings.model;
                let weights =
                    ranks.together(
                        "opening the other run's weights",
                        || Ok(staged.open(model)?),
                    )?;
                *read = Some((step, weights));
            }
            Some(first)
        };
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
            description.id = Some(run.folder.id().clone());
            description.first_weights = match &first {
                Some(first) => first.identity(),
                None => run.folder.earlier().map_or(Value::Null, |earlier| earlier.first_weights),
            };
            // Before the run's record: with it they are there.
            if first.is_some() {
                let tokenizer = tokenizer_folder(&self.settings);
                let model = self.settings.model_folder.as_deref();
                ModelFiles::of(run.folder.path()).keep(model, tokenizer)?;
            }
            reach(Point::Describing);
            Ok(run.folder.describe(&description)?)
        })?;
        if let Some(first) = first {
            ranks.together("filling the tiles", || run.initialize(&first))?;
            // Also what a start left that was killed.
            ranks.together("removing what it started with", || match ranks.is_first() {
                true => Ok(staged.remove()?),
                false => Ok(()),
            })?;
        }
        reach(Point::Opened);
        Ok((run, resumed))
    }

    /// A whole save was asked for: saves newer than it are put aside.
    fn go_back(
        &self,
        start: &Start,
        save: &Path,
        run_folder: &Path,
        notes: &mut Vec<String>,
    ) -> Result<(), TrainError> {
        if !matches!(start, Start::Save(_)) {
            return Ok(());
        }
        let step = Save::open(save, 0)?.description.step;
        let metrics = MetricsFile::path(run_folder);
        if let Some(aside) = Saves::of(run_folder).set_aside_after(step, &metrics)? {
            notes.push(format!(
                "note: saves newer than step {step} and a copy of the metrics are in {} now",
                aside.display()
            ));
        }
        Ok(())
    }

    /// The first rank's part: locks the folder, forgets what is to be forgotten, starts a private daemon.
    fn start(
        &self,
        start: &Start,
        say: &mut dyn FnMut(String),
    ) -> Result<(RunFolder, Option<PrivateDaemon>, Started), TrainError> {
        let folder = RunFolder::open(&self.run_folder, &self.id)?;
        if matches!(start, Start::Fresh) {
            self.forget(&folder, say)?;
        }
        let saves = folder.saves();
        saves.clean()?;
        let save = match &self.from {
            Some(save) => Some(save.clone()),
            None if self.settings.placement.has_store() => None,
            None => saves.newest()?,
        };
        let steps = MetricsFile::last_step(folder.path());
        // Asked before a private daemon makes its files anew, or a shared one makes room for a new job.
        if steps > 0 && save.is_none() && !self.store_has_job()? {
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
        reach(Point::Opening);
        let socket = daemon.as_ref().map(|daemon| daemon.socket().to_path_buf());
        let started = Started {
            steps,
            socket,
            save,
            id: folder.id().clone(),
        };
        Ok((folder, daemon, started))
    }

    fn lost(&self, steps: u64, devices: Vec<String>) -> TrainError {
        TrainError::StoreLost {
            run_folder: self.run_folder.clone(),
            steps,
            devices: devices.join(", "),
            job: self.id.job.clone(),
            copy: self.copy_of.as_ref().map_or(String::new(), |of| {
                format!(
                    "{} is a copy of the run in {}, whose store stays that run's. ",
                    self.run_folder.display(),
                    of.display()
                )
            }),
        }
    }

    /// Opens a run that has something committed in its store, to read it.
    ///
    /// # Errors
    /// Nothing was committed yet; folder, store or daemon.
    pub(crate) fn open_existing(self) -> Result<OpenRun, TrainError> {
        if self.begun && self.store_has_job()? {
            let folder = RunFolder::open(&self.run_folder, &self.id)?;
            let daemon = self.private_daemon(&folder)?;
            let socket = daemon.as_ref().map(|daemon| daemon.socket().to_path_buf());
            if let (mut run, Some(blob)) = self.open_at(folder, daemon, socket)? {
                run.state = resume(&run.state, &blob, &mut |_| {})?;
                return Ok(run);
            }
        }
        Err(TrainError::NothingCommitted {
            run_folder: self.run_folder,
        })
    }

    /// The save that is asked for, or the newest of a run without a store; the run's folder, locked, if the save is in it.
    ///
    /// # Errors
    /// Nothing was saved yet; the folder.
    pub(crate) fn existing_save(self) -> Result<(PathBuf, Option<RunFolder>), TrainError> {
        if let Some(save) = &self.from
            && !save.starts_with(&self.run_folder)
        {
            return Ok((save.clone(), None));
        }
        if self.begun {
            let folder = RunFolder::open(&self.run_folder, &self.id)?;
            if let Some(save) = self
                .from
                .map_or_else(|| folder.saves().newest(), |save| Ok(Some(save)))?
            {
                return Ok((save, Some(folder)));
            }
        }
        Err(TrainError::NothingCommitted {
            run_folder: self.run_folder,
        })
    }

    /// Opens this rank's part of the run, and the blob of its store's newest generation if there is one. `socket` is the
    /// private daemon's.
    fn open_at(
        &self,
        folder: RunFolder,
        daemon: Option<PrivateDaemon>,
        socket: Option<PathBuf>,
    ) -> Result<(OpenRun, Option<Vec<u8>>), TrainError> {
        let mut plan = self.plan.clone();
        if let Backing::Store(store) = &mut plan.swapper.backing {
            store.job = folder.job_name().to_owned();
            store.socket = socket.unwrap_or(std::mem::take(&mut store.socket));
        }
        plan.swapper.layout = serde_json::to_vec(&self.description.layout).expect("plain data");
        let copies = Copies::default();
        let (home, mut opened) = self.open_home(&plan, &copies)?;
        let pinned = match (&self.gpu, &opened.arena) {
            (Some(gpu), Some(arena)) => {
                let keep = Box::new(arena.clone());
                Some(gpu.register(arena.address(), arena.bytes(), keep)?)
            }
            _ => None,
        };
        let state = RunState::new(self.settings.train.seed, self.trained_with.clone());
        let committed = opened.resumed.take();
        let run = OpenRun {
            home,
            _pinned: pinned,
            opened,
            state,
            started_with: String::new(),
            plan,
            copies,
            layout: self.description.layout.clone(),
            folder,
            _daemon: daemon,
            ranks: self.ranks.clone(),
        };
        Ok((run, committed))
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
        Ok(daemon
            .jobs()
            .map_err(StoreError::Daemon)?
            .iter()
            .any(|job| job.job == self.id.job))
    }

    /// The daemon behind `offload.socket`, if the run has its store there.
    fn shared_daemon(&self) -> Result<Option<Daemon>, StoreError> {
        let Some(socket) = &self.settings.offload.socket else {
            return Ok(None);
        };
        let daemon = Daemon::connect(socket).map_err(StoreError::Daemon)?;
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
        files.link_run(folder.path())?;
        let daemon = start_private(
            files,
            &daemon_folder(folder.path()),
            rank_bytes * u64::from(self.ranks.count()),
            self.plan.swapper.iodepth,
            &self.settings.offload.engine,
        )?;
        Ok(Some(daemon))
    }
}

/// Where the files of the run's tokenizer are; none where bytes are its tokens.
fn tokenizer_folder(settings: &RunSettings) -> Option<&Path> {
    match settings.data.tokenizer.as_deref() {
        None => settings.model_folder.as_deref(),
        Some(folder) if folder.is_dir() => Some(folder),
        Some(file) => file.parent().filter(|_| file.is_file()),
    }
}

/// What to say when the store lacks generations that the metrics know to be committed: an older copy of it was brought back, or
/// its newest record was discarded.
fn older_than(last: &StepMetrics, run: &OpenRun) -> Option<String> {
    let (step, generation) = (run.state.step, run.opened.generation);
    (generation < last.generation).then(|| {
        let devices = run.opened.devices.iter();
        let devices: Vec<String> = devices.map(|device| device.path.clone()).collect();
        format!(
            "warning: metrics.jsonl has steps up to {}, when generation {} was committed, but the store on {} is at step {step}, \
             generation {generation}: it is an older copy, or lost its newest generation. Training goes on from step {step}, and \
             the lines after it are dropped. If that is not meant, stop it now and bring back the newer store with the run \
             folder, or take a save with --resume-from STEP (`trainer runs` lists them)",
            last.step,
            last.generation,
            devices.join(", "),
        )
    })
}
