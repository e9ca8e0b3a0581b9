//! The tiles of a run while nobody trains it, read one after the other: what its store has committed, or a save.
//!
//! A save is streamed from its files: no daemon, and no memory beyond a tile.

use std::sync::Arc;

use kernels::adamw::Master;
use swapper::{Layout, See};

use crate::config::{DeviceChoice, RunSettings};
use crate::model::UnitLayout;
use crate::ranks::Ranks;
use crate::run::{RunFolder, RunState, Save, SaveName};
use crate::train::{OpenRun, Prepared, Start, TrainError, mend};

/// One state of a run.
pub(crate) struct AtRest {
    /// Where the run stood.
    pub(crate) state: RunState,
    /// What the tiles are of.
    pub(crate) units: Vec<UnitLayout>,
    /// How they are kept.
    pub(crate) master: Master,
    tiles: Tiles,
}

enum Tiles {
    Store(Box<OpenRun>),
    Save(Box<Saved>),
}

struct Saved {
    save: Save,
    layout: Layout,
    /// Locked, so that nobody removes the save meanwhile; not where it is another run's.
    _folder: Option<RunFolder>,
}

impl AtRest {
    /// The newest state of the run that `settings` describe, or the one that `save` names.
    ///
    /// # Errors
    /// There is none; what opening it says.
    pub(crate) fn open(
        mut settings: RunSettings,
        save: Option<SaveName>,
    ) -> Result<Self, TrainError> {
        // Tiles are the same bytes wherever they lived; to read them no GPU is needed.
        settings.train.device = DeviceChoice::Cpu;
        // One process reads what any number of them wrote.
        settings.ranks = 1;
        let has_store = settings.placement.has_store();
        let start = save.map_or(Start::GoOn, Start::Save);
        mend(&settings, &mut |note| tracing::warn!("{note}"))?;
        let prepared = Prepared::new(settings, &start, Arc::new(Ranks::alone()))?;
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
        let (path, folder) = prepared.existing_save()?;
        let save = Save::open(&path, 0)?;
        let blob = serde_json::to_vec(&save.description.state).expect("plain data");
        Ok(Self {
            state: RunState::decode(&blob)?,
            units,
            master,
            tiles: Tiles::Save(Box::new(Saved {
                save,
                layout,
                _folder: folder,
            })),
        })
    }

    /// Calls `see` with each range's param and state, units and elements in order.
    ///
    /// # Errors
    /// A tile cannot be read or is damaged.
    pub(crate) fn visit(&mut self, see: &mut See) -> Result<(), TrainError> {
        match &mut self.tiles {
            Tiles::Store(run) => Ok(run.home.visit(see)?),
            Tiles::Save(saved) => Ok(saved.save.visit(&saved.layout, see)?),
        }
    }

    /// Ends in order.
    ///
    /// # Errors
    /// What the tiles' place says.
    pub(crate) fn close(self) -> Result<(), TrainError> {
        match self.tiles {
            Tiles::Store(run) => run.close(),
            Tiles::Save(_) => Ok(()),
        }
    }
}
