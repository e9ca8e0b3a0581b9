//! The tiles of a run while nobody trains it, read one after the other: what its store has committed, or a checkpoint.
//!
//! A checkpoint is streamed from its files: no daemon, and no memory beyond a tile.

use kernels::adamw::Master;
use swapper::{Layout, TileVisitor};

use crate::config::{DeviceChoice, RunSettings};
use crate::model::UnitLayout;
use crate::open::{OpenRun, Prepared, RunError, Start, repair};
use training_state::ranks::Ranks;
use training_state::run::{Checkpoint, CheckpointName, RunDir, RunState};

/// One state of a run.
pub(crate) struct RunStateReader {
    /// State of the run at that point.
    pub(crate) state: RunState,
    /// Units that the tiles belong to.
    pub(crate) units: Vec<UnitLayout>,
    /// Form of the master weights.
    pub(crate) master: Master,
    tiles: Tiles,
}

enum Tiles {
    Store(Box<OpenRun>),
    Checkpoint(Box<Saved>),
}

struct Saved {
    checkpoint: Checkpoint,
    layout: Layout,
    /// Locked, so that nobody removes the checkpoint meanwhile; not where it is another run's.
    _dir: Option<RunDir>,
}

impl RunStateReader {
    /// The newest state of the run that `settings` describe, or the one that `checkpoint` names.
    ///
    /// # Errors
    /// There is none; what opening it says.
    pub(crate) fn open(
        mut settings: RunSettings,
        checkpoint: Option<CheckpointName>,
    ) -> Result<Self, RunError> {
        // Tiles are the same bytes wherever they lived; to read them no GPU is needed.
        settings.train.device = DeviceChoice::Cpu;
        // One process reads what any number of them wrote.
        settings.ranks = 1;
        let has_store = settings.placement.has_store();
        let start = checkpoint.map_or(Start::GoOn, Start::Checkpoint);
        repair(&settings, &mut |note| tracing::warn!("{note}"))?;
        let prepared = Prepared::new(settings, &start, Ranks::alone())?;
        let (units, master) = (prepared.plan.units.clone(), prepared.plan.master);
        if has_store && start == Start::GoOn {
            let run = prepared.open_existing()?;
            return Ok(Self {
                state: run.state.clone(),
                units,
                master,
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
            master,
            tiles: Tiles::Checkpoint(Box::new(Saved {
                checkpoint,
                layout,
                _dir: dir,
            })),
        })
    }

    /// Calls `see` with each range's param and state, units and elements in order.
    ///
    /// # Errors
    /// A tile cannot be read or is damaged.
    pub(crate) fn visit(&mut self, see: &mut TileVisitor) -> Result<(), RunError> {
        match &mut self.tiles {
            Tiles::Store(run) => Ok(run.backend.visit(see)?),
            Tiles::Checkpoint(saved) => Ok(saved.checkpoint.visit(&saved.layout, see)?),
        }
    }

    /// Ends in order.
    ///
    /// # Errors
    /// An error of the backend.
    pub(crate) fn close(self) -> Result<(), RunError> {
        match self.tiles {
            Tiles::Store(run) => run.close(),
            Tiles::Checkpoint(_) => Ok(()),
        }
    }
}
