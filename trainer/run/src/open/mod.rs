//! Opens a run from its settings: checks everything first, then (`opening.rs`) opens directory, store and
//! swapper, and finds the step to resume from.

pub mod backend;
mod describe;
mod each_node;
mod error;
mod first;
mod moved;
mod opening;
mod probe;
mod repair;
mod run;
mod shared;
mod site;
#[cfg(test)]
mod tests;

use std::path::{Path, PathBuf};

use kernels::gpu::Gpu;
use serde_json::Value;
use swapper::{Backing, Daemon};

pub use each_node::EachNode;
pub use error::RunError;
pub use repair::repair;
pub use run::OpenRun;
pub use site::{ExistingRun, Site};

use crate::accelerator;
use crate::config::{
    ActivationsChoice, FirstWeights, Interval, RunSettings, SettingsError, ShardChoice,
};
use crate::data::Data;
use crate::plan::{Beginning, Hardware, InputsIn, Overrides, Plan, existing_file_bytes};
use crate::weights::WeightsError;
pub(crate) use describe::SHARED_STORE;
use describe::{describe, trained_with};
use first::InitialWeights;
use shared::elsewhere;
use training_state::ranks::Ranks;
use training_state::run::{
    Checkpoint, CheckpointName, RunDescription, RunDir, RunId, check_text, resolved,
};
use training_state::store::{
    StoreError, StoreFiles, check_daemon, check_mounted, job_at, remember_mounts,
};

/// Point from which a start begins.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum StartPoint {
    /// Resumes the run; begins with initial weights if there is none.
    GoOn,
    /// Begins with initial weights; removes an earlier run in the same directory.
    Fresh,
    /// Begins at a checkpoint of this run or of another one.
    Checkpoint(CheckpointName),
    /// Resumes the run, from its newest checkpoint if the nodes cannot resume from their stores.
    Newest,
}

impl std::str::FromStr for StartPoint {
    type Err = std::convert::Infallible;

    /// Parses the value of `--resume-from`.
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text {
            "newest" => Ok(Self::Newest),
            name => name.parse().map(Self::Checkpoint),
        }
    }
}

/// Function that writes the newest weights of the run in its first argument into the directory in its second,
/// as fp32 safetensors. Returns their step.
pub type CopyWeights<'a> = &'a dyn Fn(&Path, &Path) -> Result<u64, RunError>;

/// Run whose settings, directory and memory needs were checked. Nothing has been created yet.
pub struct PreparedRun {
    pub settings: RunSettings,
    pub plan: Plan,
    run_dir: PathBuf,
    /// Identity of this node's part of the run.
    id: RunId,
    site: Site,
    /// Whether the store begins anew: it has tiles of other nodes, or the nodes would have to agree on what it holds.
    renews_store: bool,
    /// Files of the private store, if the run has one.
    files: Option<StoreFiles>,
    description: RunDescription,
    /// Settings that may change between two starts; a change is reported.
    trained_with: Value,
    /// Whether the directory already holds the run.
    begun: bool,
    /// The checkpoint to begin from, if one was requested.
    from: Option<PathBuf>,
    /// Initial weights. An error matters only to a fresh run.
    first: Result<InitialWeights, WeightsError>,
    /// The GPU that computes; `None` for the processor.
    pub gpu: Option<Gpu>,
    ranks: Ranks,
}

/// Directories on drives that a run writes to.
fn drives(settings: &RunSettings) -> Vec<PathBuf> {
    let train = &settings.train;
    let private = match settings.offload.socket {
        None => settings.placement.nvme_paths.as_slice(),
        Some(_) => &[],
    };
    // The directory of an export must not exist; the one above it must.
    let export = train.export_to.as_deref().map(resolved);
    let export = export.and_then(|out| out.parent().map(Path::to_owned));
    let dirs = std::iter::once(&train.run_dir).chain(&train.checkpoint_dir);
    dirs.chain(&export)
        .chain(private)
        .map(|dir| resolved(dir))
        .collect()
}

/// Checks that the drives of a run's directories are mounted, and that their paths are text. Writes nothing.
///
/// # Errors
/// The first directory of which that is not true.
pub fn check_drives(settings: &RunSettings) -> Result<(), RunError> {
    drives(settings).iter().try_for_each(|dir| {
        check_text(dir)?;
        Ok(check_mounted(dir)?)
    })
}

/// Remembers where the drives of a run's directories are mounted, for [`check_drives`] of later starts.
pub fn remember_drives(settings: &RunSettings) {
    remember_mounts(drives(settings).iter().map(PathBuf::as_path));
}

/// Plans the part of this rank.
fn plan_of(settings: &RunSettings, hardware: Hardware, site: &Site) -> Result<Plan, RunError> {
    let mut plan = Plan::new(settings, hardware)?;
    let ranks = &site.ranks;
    if settings.placement.stage.divides_state() {
        plan.swapper.rank = ranks.rank();
        let local = plan.swapper.node_ranks.as_mut();
        local.into_iter().for_each(|local| *local = ranks.local());
        // Refuses a node without tiles.
        plan.swapper.cut()?;
    }
    if let Backing::Store(store) = &mut plan.swapper.backing {
        store.nodes = site.nodes.clone();
    }
    Ok(plan)
}

impl PreparedRun {
    /// Plans the run. With [`StartPoint::Fresh`], an earlier run in the directory is ignored.
    ///
    /// # Errors
    /// The settings contradict each other, the run in the directory, or the requested checkpoint.
    pub fn new(
        mut settings: RunSettings,
        start: &StartPoint,
        site: Site,
    ) -> Result<Self, RunError> {
        let ranks = site.ranks.clone();
        assert_eq!(settings.ranks, ranks.count(), "settings for these ranks");
        let run_dir = resolved(&settings.train.run_dir);
        let id = site.found.id.of_node(ranks.node(), &run_dir);
        let fresh = matches!(start, StartPoint::Fresh);
        let has_store = settings.placement.has_store();
        site.check_dirs(&run_dir, *start == StartPoint::GoOn && has_store)?;
        let mut from = match start {
            StartPoint::Checkpoint(name) => Some(name.find(&site.whole_dir)?),
            _ => None,
        };
        if *start == StartPoint::GoOn && has_store && ranks.nodes() == 1 {
            from = moved::checkpoint_of_memory(&run_dir)?;
        }
        let from = from
            .map(|dir| Checkpoint::open(&dir, ranks.rank()))
            .transpose()?;
        if !fresh && settings.offload.tile_elems.is_none() {
            // The tile size chosen for an existing run stays, even if a new run would get another one.
            settings.offload.tile_elems = match &from {
                Some(checkpoint) => checkpoint.description.layout["tile_elems"].as_u64(),
                None => site.found.tile_elems,
            };
        }
        // Opened first because creating the GPU's context takes a while; the plan then finds it ready.
        let gpu = accelerator::open(
            settings.train.device,
            ranks.local_rank(),
            settings.local_ranks,
            site.torch,
        )?;
        let mut renews_store = from.is_some() && has_store && ranks.nodes() > 1;
        let mut hardware = Hardware::new(&settings, &Overrides::default(), site.torch);
        let earlier = match &from {
            Some(_) => RunDir::described(&run_dir)?,
            None => None,
        };
        if let Some(earlier) = &earlier {
            renews_store |= has_store && earlier.nodes != 1;
        }
        hardware.store_file_bytes = match fresh || renews_store {
            true => None,
            false => existing_file_bytes(&settings, &id.job),
        };
        let plan = plan_of(&settings, hardware, &site)?;
        let trained_with = trained_with(&settings, gpu.is_some());
        let mut description = describe(&settings, &plan);
        description.nodes = if has_store { ranks.nodes() } else { 1 };
        let begun = match &from {
            None if fresh => false,
            None => {
                let begun = RunDir::check_layout(&run_dir, &description)?;
                moved::check(&settings, &run_dir, &id.job, &description.store)?;
                begun
            }
            // Everything comes from the checkpoint, so only the layout must match, not where the state was kept.
            Some(checkpoint) => {
                checkpoint.check_layout(&description.layout)?;
                RunDir::check_layout(&run_dir, &description)?
            }
        };
        // An error even if the run would resume: the settings ask for a new run.
        if settings.first_weights == FirstWeights::Run(site.whole_dir.clone()) {
            return Err(RunError::FromItself { dir: run_dir });
        }
        let first = match InitialWeights::find(&settings) {
            Err(error) if !begun && from.is_none() => return Err(error.into()),
            first => first,
        };
        let files = plan.store_files(&settings, &id.job);
        let paths = files.as_ref().map_or(&[][..], StoreFiles::paths);
        description.files = paths.iter().map(|path| resolved(path)).collect();
        if let Some(earlier) = earlier {
            // Files of a store that the run moves away from are kept until --fresh.
            let files = &mut description.files;
            let left = earlier.files.into_iter();
            let left: Vec<PathBuf> = left.filter(|file| !files.contains(file)).collect();
            files.extend(left);
        }
        Ok(Self {
            settings,
            plan,
            run_dir,
            id,
            site,
            renews_store,
            files,
            description,
            trained_with,
            begun,
            from: from.map(|checkpoint| checkpoint.path().to_owned()),
            first,
            gpu,
            ranks,
        })
    }

    /// Sets the length of the run from its data, and records the data so that the next start can report a change.
    ///
    /// # Errors
    /// A setting contradicts the number of steps.
    pub fn train_on(&mut self, data: &Data) -> Result<(), SettingsError> {
        self.settings.set_windows(data.windows())?;
        self.plan.steps = self.settings.train.steps;
        self.plan.epochs = Some(self.settings.epochs(data.windows()));
        // A token file that cannot be read is reported by the first step.
        let documents = data.sampled_documents().unwrap_or_default();
        self.plan.with_documents(&self.settings, documents);
        self.trained_with = trained_with(&self.settings, self.gpu.is_some());
        let (tokens, fingerprint) = (data.tokens(), data.fingerprint());
        let text = format!("{tokens} tokens, fingerprint {fingerprint:016x}");
        self.trained_with["text"] = text.into();
        Ok(())
    }

    /// Checks that there is room for the run: the private store's directories or the shared daemon, then
    /// memory, then the run directory. Changes nothing.
    ///
    /// # Errors
    /// The first shortage found.
    fn check_room(&self) -> Result<(), RunError> {
        // The plan covers all ranks of the node, so only the first one checks.
        if !self.ranks.is_first_of_node() {
            return Ok(());
        }
        let no_room = |error: StoreError| match self.plan.device_input_bytes() {
            input_bytes if input_bytes > 0 && error.is_of_space() => {
                RunError::NoRoomForInputs { error, input_bytes }
            }
            _ => error.into(),
        };
        if let Some(files) = &self.files {
            files.check().map_err(no_room)?;
        }
        if let Some(daemon) = self.shared_daemon()? {
            let devices = daemon.info().devices.iter();
            let devices: Vec<&Path> = devices.map(|device| device.path.as_path()).collect();
            for note in elsewhere(&self.settings.placement.nvme_paths, &devices) {
                tracing::warn!("{note}");
            }
            // Before an earlier job of the run is deleted, whose space it takes.
            check_daemon(&daemon, &self.id.job, self.plan.device_bytes()).map_err(no_room)?;
        }
        let mut plan = self.plan.clone();
        let beginning = match (&self.from, self.begun) {
            (Some(_), _) => Beginning::Checkpoint,
            (None, true) => Beginning::Resumed,
            (None, false) => Beginning::Fresh,
        };
        let mut settings = self.settings.clone();
        let has_checkpoints = self.site.manages_checkpoints();
        if !has_checkpoints {
            // Checkpoints are in the first node's directory.
            settings.train.checkpoint_every = Interval::Never;
            settings.train.checkpoint_best = false;
        }
        if (has_checkpoints || settings.placement.has_store())
            && let Some(warning) = plan.check_space(&settings, &self.site.whole_dir, beginning)?
        {
            tracing::warn!("{warning}");
        }
        Ok(plan.check()?)
    }

    /// Makes the choices alike that all ranks must make alike, since machines differ in memory and rates. Then checks on all ranks that
    /// there is room for what they agreed on. Changes nothing on drives.
    ///
    /// # Errors
    /// A rank is gone, or has no room; the first shortage found.
    pub fn agree(&mut self) -> Result<(), RunError> {
        // Each group gathers all units from all ranks. From here on the group is given, so that no later choice changes it.
        let groups = self.ranks.numbers([self.plan.micro_batch_group as u64])?;
        let groups = groups.iter().map(|[group]| *group as usize);
        let group = groups.min().expect("there is a rank");
        self.settings.train.micro_batch_group = Some(group);
        // The others wait in the exchanges below, so an error of this rank is kept until all are told.
        let mut planned = Ok(());
        if group < self.plan.micro_batch_group {
            planned = self.plan_again();
        }
        // The first rank's plan sizes the store that all processes of a node use.
        let is_on_drives = self.plan.inputs_in == InputsIn::Drives;
        let on_drives = self.ranks.numbers([u64::from(is_on_drives)])?;
        if on_drives.contains(&[1]) {
            self.settings.offload.activations = ActivationsChoice::Nvme;
            if !is_on_drives {
                planned = planned.and_then(|()| self.plan_again());
            }
        }
        let whys = self.ranks.messages(self.plan.why_no_copy().into())?;
        let without = whys.iter().position(|why| !why.is_empty());
        if let Some(rank) = without.filter(|_| self.plan.copy_bytes > 0) {
            self.settings.offload.shard = ShardChoice::All;
            planned = planned.and_then(|()| self.plan_again());
            let node = self.ranks.node_of(rank as u32);
            let why = String::from_utf8_lossy(&whys[rank]);
            self.plan.choose_no_copy(format!("node {node}: {why}"));
        }
        let every = self.plan.swapper.commit_every;
        let [every] = self.ranks.numbers([every])?[0];
        self.plan.swapper.commit_every = every;
        (self.ranks).on_all_ranks("checking the room for the run", || {
            planned?;
            self.check_room()
        })
    }

    fn plan_again(&mut self) -> Result<(), RunError> {
        self.plan = plan_of(&self.settings, self.plan.hardware.clone(), &self.site)?;
        self.files = self.plan.store_files(&self.settings, &self.id.job);
        Ok(())
    }

    /// Whether the run makes checkpoints, which all nodes write into one directory.
    fn makes_checkpoints(&self) -> bool {
        self.settings.makes_checkpoints() || self.from.is_some()
    }

    /// Reads the initial weights of a fresh run once, to reject unusable values before anything is created.
    ///
    /// # Errors
    /// The first value that cannot be trained; a file cannot be read.
    pub fn check_weights(&self) -> Result<(), RunError> {
        let fresh = !self.begun && self.from.is_none();
        // The other ranks wait, so the first one may use their threads too.
        let threads = self.settings.train.threads * self.settings.local_ranks as usize;
        match &self.first {
            Ok(InitialWeights::Files(weights)) if fresh => Ok(weights.check(threads)?),
            _ => Ok(()),
        }
    }

    /// Returns whether the store may hold the run's job. True for runs without a store.
    fn store_has_job(&self) -> Result<bool, RunError> {
        if let Some(files) = &self.files {
            return Ok(files.exist());
        }
        let Some(daemon) = self.shared_daemon()? else {
            return Ok(true);
        };
        Ok(job_at(&daemon, &self.id.job)?.is_some())
    }

    /// Connects to the daemon behind `offload.socket`, if the run has its store there.
    fn shared_daemon(&self) -> Result<Option<Daemon>, StoreError> {
        let Some(socket) = &self.settings.offload.socket else {
            return Ok(None);
        };
        let daemon = Daemon::connect(socket).map_err(StoreError::Daemon)?;
        Ok(Some(daemon))
    }
}
