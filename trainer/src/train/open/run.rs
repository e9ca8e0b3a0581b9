//! An open run: its tiles, where it stands, how it is saved and closed.

use std::sync::Arc;

use kernels::adamw::init_tile;
use kernels::gpu::Registration;
use rayon::prelude::*;
use swapper::private::PrivateDaemon;
use swapper::{Backing, Blank};

use super::super::TrainError;
use crate::config::RunSettings;
use crate::home::Home;
use crate::long_work::LongWork;
use crate::model::init;
use crate::plan::Plan;
use crate::ranks::Ranks;
use crate::run::{Checkpoints, RunFolder, RunState};

/// An open run. Fields are dropped in this order: the swapper before the daemon it talks to.
pub(crate) struct OpenRun {
    pub(crate) home: Home,
    /// The slots, pinned for the GPU.
    pub(super) _pinned: Option<Registration>,
    pub(crate) opened: swapper::Opened,
    pub(crate) state: RunState,
    pub(crate) plan: Plan,
    pub(crate) checkpoints: Checkpoints,
    pub(crate) folder: RunFolder,
    /// The first rank's, for all.
    pub(super) _daemon: Option<PrivateDaemon>,
    pub(super) ranks: Arc<Ranks>,
}

impl OpenRun {
    /// Reads the newest checkpoint, for runs without a store. False when there is none.
    pub(super) fn restore(&mut self, say: &mut dyn FnMut(String)) -> Result<bool, TrainError> {
        if matches!(self.plan.swapper.backing, Backing::Store(_)) {
            return Ok(false);
        }
        let Some(mut checkpoint) = self.checkpoints.newest(self.ranks.rank())? else {
            return Ok(false);
        };
        self.state = resume(&self.state, &checkpoint.blob, say)?;
        let mut work = self.long_work("reading the checkpoint");
        let fill = |blanks: &mut [Blank]| {
            for blank in blanks {
                checkpoint.tile(blank.range, blank.param, blank.state)?;
                work.add(bytes_of(blank));
            }
            Ok::<(), TrainError>(())
        };
        self.home.initialize(fill, self.state.encode())?;
        Ok(true)
    }

    /// Fresh weights into every tile; commits them as step 0.
    pub(super) fn initialize(&mut self, settings: &RunSettings) -> Result<(), TrainError> {
        let (units, master, seed) = (&self.plan.units, self.plan.master, settings.train.seed);
        let mut work = self.long_work("filling the tiles");
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
            work.add(blanks.iter().map(bytes_of).sum());
            Ok::<(), TrainError>(())
        };
        self.home.initialize(fill, self.state.encode())
    }

    /// Writes all ranks' tiles and the state into the run folder. The first rank's file comes last: it makes the checkpoint.
    ///
    /// # Errors
    /// The drive is full or fails, here or on another rank; the checkpoint before stays.
    pub(crate) fn save(&mut self) -> Result<(), TrainError> {
        let writers = self.writers();
        let (home, state, ranks) = (&mut self.home, &self.state, &self.ranks);
        let checkpoints = &self.checkpoints;
        let blob = state.encode();
        let begun = ranks.together("saving its tiles", || {
            let writes = ranks.rank() < writers;
            let begun = writes.then(|| {
                checkpoints.begin(state.step, ranks.rank(), &blob, |take| {
                    home.visit(take).map_err(TrainError::from)
                })
            });
            begun.transpose()
        })?;
        let (first, part) = if ranks.is_first() {
            (begun, None)
        } else {
            (None, begun)
        };
        let own = ranks.together("finishing its part of the checkpoint", || {
            Ok(part.map_or(Ok(0), |part| part.finish(&[]))?)
        })?;
        let fingerprints = ranks.numbers(own)?;
        ranks.together("finishing the checkpoint", || {
            if let Some(first) = first {
                first.finish(&fingerprints[1..writers as usize])?;
                checkpoints.prune()?;
            }
            Ok(())
        })
    }

    /// What is done to all tiles of this rank, told by the first.
    fn long_work(&self, what: &str) -> LongWork {
        // The ranks have about as much each.
        let bytes = self.plan.memory.table_bytes / u64::from(self.plan.swapper.ranks);
        LongWork::new(what, bytes, self.ranks.is_first())
    }

    /// Ranks that write a part of a checkpoint: all that have tiles of their own. What every rank has the first one writes.
    fn writers(&self) -> u32 {
        self.plan.swapper.ranks
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

/// Bytes of a range's param and state.
fn bytes_of(blank: &Blank) -> u64 {
    (blank.param.len() + blank.state.len()) as u64
}

/// The state in `blob`. Differences to what the run would now be trained with are said, not refused: a run may go on with
/// another rate or more text.
pub(super) fn resume(
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
