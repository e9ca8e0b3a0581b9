//! Opens a run that was prepared: to train it, or only to read it.

use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Serialize};
use serde_json::Value;
use swapper::private::PrivateDaemon;
use swapper::{Backing, ScratchSettings};
use test_hooks::kill_point::{Point, reach};

use super::describe::SHARED_STORE;
use super::first::{InitialWeights, StagedWeights};
use super::run::resume;
use super::{CopyWeights, OpenRun, PreparedRun, RunError, StartPoint};
use crate::config::RunSettings;
use crate::model::ModelConfig;
use crate::weights::WeightsError;
use training_state::checkpoint_tap::CheckpointTap;
use training_state::metrics::{MetricsFile, StepMetrics};
use training_state::ranks::Ranks;
use training_state::run::{
    Checkpoint, INCOMPLETE, ModelFiles, RunDescription, RunDir, RunId, RunState, daemon_dir,
    resolved,
};
use training_state::store::{
    OtherJob, StoreError, StoreFiles, file_name, other_job, remove_files, start_private,
};

/// Results of the start of a node's first rank that its other ranks need.
#[derive(Serialize, Deserialize)]
struct FirstRankStart {
    /// Steps in the metrics of an earlier start.
    steps: u64,
    /// Socket of the private daemon.
    socket: Option<PathBuf>,
    /// Step of the checkpoint that a run without a store resumes from.
    newest: Option<u64>,
}

impl PreparedRun {
    /// Opens the run at its newest state or creates it, together with all ranks. Returns the run and whether
    /// it was resumed. If the run begins with another run's weights, `copy_weights` copies them.
    ///
    /// # Errors
    /// The directory, the store, the daemon or the checkpoint fails; the nodes' stores do not belong together;
    /// another rank failed or is gone.
    pub fn open(
        self,
        start: &StartPoint,
        copy_weights: CopyWeights<'_>,
        say: &mut dyn FnMut(String),
    ) -> Result<(OpenRun, bool), RunError> {
        let ranks = self.ranks.clone();
        if ranks.nodes() > 1 && self.site.each_node.is_none() && self.makes_checkpoints() {
            self.site.check_shared()?;
        }
        if self.renews_store {
            self.check_checkpoint()?;
        }
        let mut kept = None;
        let FirstRankStart { socket, .. } =
            ranks.by_first_of_node("opening the run's directory and store", || {
                let (dir, daemon, started) = self.start(start, say)?;
                kept = Some((dir, daemon, (started.steps, started.newest)));
                Ok::<_, RunError>(started)
            })?;
        // The first node has the run's metrics and checkpoints.
        let ((steps, newest), now_unix_ms) =
            ranks.by_first::<_, RunError>("looking for the newest state", || {
                let found = kept.as_ref().expect("the first rank has started").2;
                Ok((found, after(self.site.found.begun_unix_ms)))
            })?;
        let newest = newest
            .map(|step| self.site.checkpoints().at(step))
            .transpose();
        let checkpoint = self.from.clone().or(newest?);
        let (mut run, committed) = ranks.on_all_ranks("opening the run", || {
            let (dir, daemon) = match kept {
                Some((dir, daemon, _)) => (dir, daemon),
                None => (RunDir::joined(&self.run_dir, &self.id), None),
            };
            self.open_at(dir, daemon, socket)
        })?;
        let resumed = committed.is_some() || checkpoint.is_some();
        let begun_unix_ms = match (&checkpoint, &committed) {
            (None, Some(_)) => run.dir.earlier().map_or(0, |earlier| earlier.begun_unix_ms),
            _ => now_unix_ms,
        };
        if !resumed && steps > 0 && self.settings.placement.has_store() {
            let devices = run.opened.devices.iter();
            return Err(self.lost(steps, devices.map(|device| device.path.clone()).collect()));
        }
        match (checkpoint, committed) {
            (Some(checkpoint), _) => {
                let mut notes = Vec::new();
                let mut on_checked = || self.go_back(start, &checkpoint, &mut notes);
                run.restore(&checkpoint, &mut on_checked, say)?;
                notes.into_iter().for_each(&mut *say);
            }
            (None, Some(blob)) => {
                run.state = resume(&run.state, &blob, say)?;
                let last = MetricsFile::last(run.dir.path());
                let older = last.and_then(|last| older_than(&last, &run));
                older.into_iter().for_each(&mut *say);
            }
            (None, None) => {}
        }
        let staged = StagedWeights::in_run_dir(run.dir.path());
        let first = if resumed {
            let was = run.dir.earlier().map(|earlier| earlier.first_weights);
            let note = self
                .first
                .ok()
                .and_then(|first| first.note(&was.unwrap_or_default()));
            note.into_iter().for_each(&mut *say);
            None
        } else {
            let model = &self.settings.model;
            Some(weights(self.first, &staged, model, &ranks, copy_weights)?)
        };
        let lost_steps = if resumed { 0 } else { steps };
        let description = RunDescription {
            begun_unix_ms,
            ..self.description
        };
        ranks.on_all_ranks("describing the run", || match ranks.is_first_of_node() {
            true => record(
                &run.dir,
                description,
                ranks.is_first().then_some(&self.settings),
                first.as_ref(),
                lost_steps,
                say,
            ),
            false => Ok(()),
        })?;
        self.site.share_files()?;
        if let Some(first) = first {
            ranks.on_all_ranks("filling the tiles", || run.initialize(&first))?;
            // Also removes files left by a start that was killed.
            ranks.on_all_ranks("removing the copy of the first weights", || {
                match ranks.is_first_of_node() {
                    true => Ok::<(), RunError>(staged.remove()?),
                    false => Ok(()),
                }
            })?;
        }
        reach(Point::Opened);
        Ok((run, resumed))
    }

    /// Moves checkpoints newer than the requested one aside.
    fn go_back(
        &self,
        start: &StartPoint,
        checkpoint: &Path,
        notes: &mut Vec<String>,
    ) -> Result<(), RunError> {
        if !matches!(start, StartPoint::Checkpoint(_)) || !self.site.manages_checkpoints() {
            return Ok(());
        }
        let step = Checkpoint::open(checkpoint, 0)?.description.step;
        let metrics = MetricsFile::path(&self.site.whole_dir);
        if let Some(aside) = (self.site.checkpoints()).set_aside_after(step, &metrics)? {
            notes.push(format!(
                "note: checkpoints newer than step {step} and a copy of the metrics were moved to {}",
                aside.display()
            ));
        }
        Ok(())
    }

    /// Verifies the checkpoint to begin from, before the store that it replaces is removed.
    fn check_checkpoint(&self) -> Result<(), RunError> {
        let Some(dir) = &self.from else {
            return Ok(());
        };
        (self.ranks).on_all_ranks::<_, RunError>("checking the checkpoint", || {
            let layout = self.plan.swapper.cut()?;
            let mut checkpoint = Checkpoint::open(dir, self.ranks.rank())?;
            Ok(checkpoint.check(layout.ranges(), &mut |_| {})?)
        })
    }

    /// Does the part of a node's first rank: locks the directory, removes an earlier run if asked to, starts a
    /// private daemon.
    fn start(
        &self,
        start: &StartPoint,
        say: &mut dyn FnMut(String),
    ) -> Result<(RunDir, Option<PrivateDaemon>, FirstRankStart), RunError> {
        let dir = RunDir::open(&self.run_dir, &self.id)?;
        if matches!(start, StartPoint::Fresh) {
            self.forget(&dir, say)?;
            if self.site.each_node.is_some() && !self.ranks.is_first() {
                // The copies on this node.
                RunDir::joined(&self.site.whole_dir, &self.site.found.id).forget()?;
            }
        }
        let mut newest = None;
        if self.site.manages_checkpoints() {
            let checkpoints = self.site.checkpoints();
            checkpoints.clean()?;
            if self.from.is_none() && !self.settings.placement.has_store() {
                newest = checkpoints.list()?.pop().map(|checkpoint| checkpoint.step);
            }
        }
        if self.renews_store {
            self.renew_store(&dir)?;
        }
        let steps = MetricsFile::last_step(dir.path());
        let has_checkpoint = self.from.is_some() || newest.is_some();
        // Checked before a private daemon creates its files anew or a shared one reserves space for a new
        // job.
        if steps > 0 && !has_checkpoint && !self.store_has_job()? {
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
        let daemon = self.private_daemon(&dir)?;
        if let Some(daemon) = daemon.as_ref().filter(|_| self.ranks.nodes() > 1) {
            self.check_private_store(daemon)?;
        }
        reach(Point::Opening);
        let started = FirstRankStart {
            steps,
            socket: daemon.as_ref().map(|daemon| daemon.socket().to_path_buf()),
            newest,
        };
        Ok((dir, daemon, started))
    }

    /// Removes the run's earlier store; its state comes from a checkpoint. The record of the nodes is changed
    /// first: a start that dies before the state is complete leaves a run that says what it needs.
    fn renew_store(&self, dir: &RunDir) -> Result<(), RunError> {
        if let Some(mut earlier) = dir.earlier() {
            earlier.nodes = INCOMPLETE;
            dir.describe(&earlier)?;
        }
        self.remove_store(dir)
    }

    /// Removes the files of the run's private store, or its job in a shared one.
    fn remove_store(&self, dir: &RunDir) -> Result<(), RunError> {
        let own = self.files.iter().flat_map(StoreFiles::paths);
        let mut files: Vec<PathBuf> = own.map(|path| resolved(path)).collect();
        if let Some(earlier) = &dir.earlier() {
            // The directory may be a copy and name another run's files; those are not removed.
            let name = file_name(dir.job_name());
            let ours = |path: &&PathBuf| path.file_name().is_some_and(|found| *found == *name);
            files.extend(earlier.files.iter().filter(ours).cloned());
        }
        remove_files(&files)?;
        if self.settings.offload.socket.is_some()
            && self.store_has_job()?
            && let Some(daemon) = self.shared_daemon()?
        {
            daemon
                .drop_job(dir.job_name())
                .map_err(StoreError::Daemon)?;
        }
        Ok(())
    }

    /// Checks that the private store behind `daemon` does not hold the part of another node or run.
    fn check_private_store(&self, daemon: &PrivateDaemon) -> Result<(), RunError> {
        match other_job(daemon, &self.id.job)? {
            None => Ok(()),
            Some(OtherJob { job, devices }) => Err(RunError::OtherStore {
                node: self.ranks.node(),
                devices,
                found: RunId::describe_job(&job),
                expected: RunId::describe_job(&self.id.job),
            }),
        }
    }

    fn lost(&self, steps: u64, devices: Vec<String>) -> RunError {
        RunError::StoreLost {
            run_dir: self.run_dir.clone(),
            steps,
            devices: devices.join(", "),
            job: self.id.job.clone(),
            copy: self
                .site
                .found
                .copy_of
                .as_ref()
                .map_or(String::new(), |of| {
                    format!(
                        "{} is a copy of the run in {}; the store still belongs to that run. ",
                        self.run_dir.display(),
                        of.display()
                    )
                }),
        }
    }

    /// Opens a run with a committed state in its store, to read it.
    ///
    /// # Errors
    /// A store file is missing; nothing was committed yet; the directory, the store or the daemon fails.
    pub fn open_existing(mut self) -> Result<OpenRun, RunError> {
        // Nobody computes.
        self.plan.swapper.scratch = ScratchSettings::default();
        let files = self.files.iter().flat_map(StoreFiles::paths);
        let missing = files.filter(|file| !file.exists());
        let missing: Vec<String> = missing.map(|file| file.display().to_string()).collect();
        if self.begun && !missing.is_empty() {
            return Err(RunError::StoreMissing {
                run_dir: self.run_dir,
                files: missing.join(", "),
            });
        }
        if self.begun && self.store_has_job()? {
            let dir = RunDir::open(&self.run_dir, &self.id)?;
            let daemon = self.private_daemon(&dir)?;
            let socket = daemon.as_ref().map(|daemon| daemon.socket().to_path_buf());
            if let (mut run, Some(blob)) = self.open_at(dir, daemon, socket)? {
                // As it was committed: a reader knows nothing of the settings that it was trained with.
                run.state = RunState::decode(&blob)?;
                return Ok(run);
            }
        }
        Err(RunError::NothingCommitted {
            run_dir: self.run_dir,
        })
    }

    /// Returns the requested checkpoint, or the newest one of a run without a store. If the checkpoint is in
    /// the run's directory, the locked directory is returned too.
    ///
    /// # Errors
    /// There is no checkpoint yet; the directory fails.
    pub fn existing_checkpoint(self) -> Result<(PathBuf, Option<RunDir>), RunError> {
        if let Some(checkpoint) = &self.from
            && !checkpoint.starts_with(&self.run_dir)
        {
            return Ok((checkpoint.clone(), None));
        }
        let steps = MetricsFile::last_step(&self.run_dir);
        let has_checkpoint = self.from.is_some() || self.site.checkpoints().newest()?.is_some();
        if !has_checkpoint && steps > 0 {
            let run_dir = self.run_dir;
            return Err(match RunDir::is_used(&run_dir) {
                true => RunError::OnlyInMemory { run_dir, steps },
                false => RunError::NothingKept { run_dir, steps },
            });
        }
        if self.begun {
            let dir = RunDir::open(&self.run_dir, &self.id)?;
            if let Some(checkpoint) = self.from.map_or_else(
                || self.site.checkpoints().newest(),
                |checkpoint| Ok(Some(checkpoint)),
            )? {
                return Ok((checkpoint, Some(dir)));
            }
        }
        Err(RunError::NothingCommitted {
            run_dir: self.run_dir,
        })
    }

    /// Opens this rank's part of the run and returns the blob of the store's newest generation, if any.
    /// `socket` belongs to the private daemon.
    fn open_at(
        &self,
        dir: RunDir,
        daemon: Option<PrivateDaemon>,
        socket: Option<PathBuf>,
    ) -> Result<(OpenRun, Option<Vec<u8>>), RunError> {
        let mut plan = self.plan.clone();
        if let Backing::Store(store) = &mut plan.swapper.backing {
            store.job = dir.job_name().to_owned();
            store.socket = socket.unwrap_or(std::mem::take(&mut store.socket));
        }
        plan.swapper.layout = serde_json::to_vec(&self.description.layout).expect("plain data");
        let checkpoint_tap = CheckpointTap::default();
        let (mut backend, mut opened) = self.open_backend(&plan, &checkpoint_tap)?;
        let pinned = match (&self.gpu, &opened.arena) {
            (Some(gpu), Some(arena)) => {
                let keep = Box::new(arena.clone());
                Some(gpu.register(arena.address(), arena.bytes(), keep)?)
            }
            _ => None,
        };
        let state = RunState::new(self.settings.train.seed, self.trained_with.clone());
        let committed = opened.resumed.take();
        if committed.is_some() {
            backend.load()?;
        }
        let run = OpenRun {
            backend,
            _pinned: pinned,
            opened,
            state,
            started_with: String::new(),
            plan,
            checkpoint_tap,
            layout: self.description.layout.clone(),
            dir,
            checkpoints: (self.site.checkpoints())
                .or_in(self.settings.checkpoints_elsewhere(&self.site.found.id.job)),
            node_dirs: (self.site.each_node.as_ref()).map(|each_node| each_node.dirs.clone()),
            _daemon: daemon,
            ranks: self.ranks.clone(),
        };
        Ok((run, committed))
    }

    /// Removes an earlier run of the same directory, here and in the stores it used.
    fn forget(&self, dir: &RunDir, say: &mut dyn FnMut(String)) -> Result<(), RunError> {
        self.remove_store(dir)?;
        let was_shared =
            (dir.earlier()).is_some_and(|earlier| earlier.store.starts_with(SHARED_STORE));
        if self.settings.offload.socket.is_none() && was_shared {
            say(format!(
                "note: job {} of the earlier run is still in the store of the daemon it used; delete it there with `offloadd job delete`",
                dir.job_name()
            ));
        }
        Ok(dir.forget()?)
    }

    /// Starts the run's private daemon, if it uses one.
    fn private_daemon(&self, dir: &RunDir) -> Result<Option<PrivateDaemon>, RunError> {
        // A shared daemon needs no start.
        let Some(files) = &self.files else {
            return Ok(None);
        };
        files.link_run(dir.path())?;
        let daemon = start_private(
            files,
            &daemon_dir(dir.path()),
            self.plan.swapper.local_arena_bytes()?,
            self.plan.swapper.session_iodepth(),
            &self.settings.offload.engine,
        )?;
        Ok(Some(daemon))
    }
}

/// Returns the time in milliseconds since 1970, but more than `before` also where this machine's clock is slow.
fn after(before: Option<u64>) -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    let now_unix_ms = since.map_or(0, |since| since.as_millis() as u64);
    before.map_or(now_unix_ms, |before| now_unix_ms.max(before + 1))
}

/// Returns the initial weights of a fresh run; reads them first if they are another run's.
fn weights(
    first: Result<InitialWeights, WeightsError>,
    staged: &StagedWeights,
    model: &ModelConfig,
    ranks: &Ranks,
    copy_weights: CopyWeights<'_>,
) -> Result<InitialWeights, RunError> {
    let mut first =
        ranks.on_all_ranks::<_, RunError>("looking for the first weights", || Ok(first?))?;
    if let InitialWeights::Run { from, read } = &mut first {
        // One node after the other: reading a run locks its directory, which nodes may share.
        let mut copied = None;
        for node in 0..ranks.nodes() {
            ranks.on_all_ranks("reading the other run's weights", || {
                if ranks.is_first_of_node() && ranks.node() == node {
                    copied = Some(staged.fill(from, copy_weights)?);
                }
                Ok::<(), RunError>(())
            })?;
        }
        let step = ranks.by_first_of_node::<_, RunError>(
            "telling the step of the other run's weights",
            || Ok(copied.expect("the first rank of the node has copied them")),
        )?;
        let opened = ranks.on_all_ranks::<_, RunError>("opening the other run's weights", || {
            Ok(staged.open(model)?)
        });
        *read = Some((step, opened?));
    }
    Ok(first)
}

/// Writes the run's record and, with `settings` and if the run starts with `first`, its model's files. Moves
/// aside metrics of `lost_steps` steps whose state was not kept.
fn record(
    dir: &RunDir,
    mut description: RunDescription,
    settings: Option<&RunSettings>,
    first: Option<&InitialWeights>,
    lost_steps: u64,
    say: &mut dyn FnMut(String),
) -> Result<(), RunError> {
    if lost_steps > 0 && settings.is_some() {
        let old = MetricsFile::set_aside(dir.path())?;
        say(format!(
            "note: no checkpoint was made of the {lost_steps} steps in metrics.jsonl; the file was renamed to {} and the run starts again (set train.checkpoint_every to make checkpoints during training)",
            old.display()
        ));
    }
    description.id = Some(dir.id().clone());
    description.first_weights = match first {
        Some(first) => first.identity(),
        None => dir
            .earlier()
            .map_or(Value::Null, |earlier| earlier.first_weights),
    };
    // Written before the run's record: a record implies that they are there.
    if let (Some(settings), Some(_)) = (settings, first) {
        let tokenizer = settings.tokenizer_dir();
        let model = settings.model_dir.as_deref();
        ModelFiles::in_run_dir(dir.path()).keep(model, tokenizer)?;
    }
    reach(Point::Describing);
    Ok(dir.describe(&description)?)
}

/// Returns a warning when the store is older than the metrics.
fn older_than(last: &StepMetrics, run: &OpenRun) -> Option<String> {
    let devices = run.opened.devices.iter();
    let devices: Vec<String> = devices.map(|device| device.path.clone()).collect();
    let warning = last.of_newer_store(run.state.step, run.opened.generation, &devices)?;
    Some(format!(
        "{warning}, or take a checkpoint with --resume-from STEP (`trainer runs` lists them)"
    ))
}
