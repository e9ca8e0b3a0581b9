//! Reads the tiles of a run that is not being trained, one after the other: from its store's newest commit,
//! or from a checkpoint.
//!
//! A checkpoint is streamed from its files, without a daemon and with memory for one tile.

use swapper::{Layout, TileVisitor};

use crate::config::{DeviceChoice, RunSettings};
use crate::model::UnitLayout;
use crate::open::{OpenRun, PreparedRun, RunError, Site, StartPoint, repair};
use training_state::run::{Checkpoint, CheckpointName, RunDir, RunState, resolved};
use training_state::update::TileFormats;

/// Reader of one state of a run.
pub(crate) struct RunStateReader {
    /// State of the run at that step.
    pub(crate) state: RunState,
    /// Units that the tiles belong to.
    pub(crate) units: Vec<UnitLayout>,
    /// Storage of the tiles' numbers.
    pub(crate) formats: TileFormats,
    tiles: Tiles,
}

enum Tiles {
    Store(Box<OpenRun>),
    Checkpoint(Box<OpenCheckpoint>),
}

struct OpenCheckpoint {
    checkpoint: Checkpoint,
    layout: Layout,
    /// Lock of the run's directory, so that the checkpoint is not removed while it is read; `None` for
    /// another run's checkpoint.
    _dir: Option<RunDir>,
}

impl RunStateReader {
    /// Opens the newest state of the run that `settings` describe, or the one that `checkpoint` names.
    ///
    /// # Errors
    /// There is no such state; the run cannot be opened.
    pub(crate) fn open(
        mut settings: RunSettings,
        checkpoint: Option<CheckpointName>,
    ) -> Result<Self, RunError> {
        // Tiles have the same bytes wherever they were kept, so no GPU is needed to read them.
        settings.train.device = DeviceChoice::Cpu;
        // One process reads what any number of ranks wrote.
        (settings.ranks, settings.local_ranks) = (1, 1);
        settings.batch.sequence_ranks = 1;
        let has_store = settings.placement.has_store();
        let start = checkpoint.map_or(StartPoint::GoOn, StartPoint::Checkpoint);
        repair(&settings, &mut |note| tracing::warn!("{note}"))?;
        let run_dir = resolved(&settings.train.run_dir);
        if has_store
            && start == StartPoint::GoOn
            && let Some(described) = RunDir::described(&run_dir)?
            && described.nodes > 1
        {
            let nodes = described.nodes;
            return Err(RunError::OnNodes { run_dir, nodes });
        }
        let prepared = PreparedRun::new(settings, &start, Site::alone(&run_dir)?)?;
        let plan = &prepared.plan;
        let (units, formats) = (plan.units.clone(), plan.formats.clone());
        if has_store && start == StartPoint::GoOn {
            let run = prepared.open_existing()?;
            return Ok(Self {
                state: run.state.clone(),
                units,
                formats,
                tiles: Tiles::Store(Box::new(run)),
            });
        }
        let layout = prepared.plan.swapper.cut()?;
        let (path, dir) = prepared.existing_checkpoint()?;
        let checkpoint = Checkpoint::open(&path, 0)?;
        let blob = serde_json::to_vec(&checkpoint.description.state).expect("plain data");
        Ok(Self {
            state: RunState::decode(&blob)?,
            units,
            formats,
            tiles: Tiles::Checkpoint(Box::new(OpenCheckpoint {
                checkpoint,
                layout,
                _dir: dir,
            })),
        })
    }

    /// Calls `see` with the parameters and optimizer state of each range, in the order of units and elements.
    ///
    /// # Errors
    /// A tile is damaged or cannot be read.
    pub(crate) fn visit(&mut self, see: &mut TileVisitor) -> Result<(), RunError> {
        match &mut self.tiles {
            Tiles::Store(run) => Ok(run.backend.visit(see)?),
            Tiles::Checkpoint(saved) => Ok(saved.checkpoint.visit(&saved.layout, see)?),
        }
    }

    /// Bytes of all tiles.
    pub(crate) fn bytes(&self) -> u64 {
        match &self.tiles {
            Tiles::Store(run) => run.plan.memory.all_bytes,
            Tiles::Checkpoint(saved) => saved.checkpoint.description.bytes(),
        }
    }

    /// Closes the run.
    ///
    /// # Errors
    /// The backend fails.
    pub(crate) fn close(self) -> Result<(), RunError> {
        match self.tiles {
            Tiles::Store(run) => run.close(),
            Tiles::Checkpoint(_) => Ok(()),
        }
    }
}
