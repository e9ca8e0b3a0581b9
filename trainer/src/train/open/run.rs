//! An open run: its tiles, where it stands, how it begins and is closed.

use std::path::Path;
use std::sync::Arc;

use kernels::adamw::init_tile;
use kernels::gpu::Registration;
use rayon::prelude::*;
use serde_json::Value;
use swapper::UninitTile;
use swapper::private::PrivateDaemon;
use test_hooks::kill_point::{Point, reach};

use super::super::TrainError;
use super::first::First;
use crate::backend::TileBackend;
use crate::checkpoint_tap::CheckpointTap;
use crate::plan::Plan;
use crate::ranks::Ranks;
use crate::run::{Checkpoint, RunDir, RunState};
use offload_support::progress::{Audience, Progress, Unit};

/// An open run. Fields are dropped in this order: the swapper before the daemon it talks to.
pub(crate) struct OpenRun {
    pub(crate) backend: TileBackend,
    /// The slots, pinned for the GPU.
    pub(super) _pinned: Option<Registration>,
    pub(crate) opened: swapper::Opened,
    pub(crate) state: RunState,
    /// What a fresh run's weights were, for people.
    pub(crate) started_with: String,
    pub(crate) plan: Plan,
    /// Where updated tiles are offered.
    pub(crate) checkpoint_tap: CheckpointTap,
    /// As the run's directory says.
    pub(crate) layout: Value,
    pub(crate) dir: RunDir,
    /// The first rank's, for all.
    pub(super) _daemon: Option<PrivateDaemon>,
    pub(super) ranks: Arc<Ranks>,
}

impl OpenRun {
    /// Goes to what the checkpoint in `dir` holds. Everything of it is checked before a tile is changed; `on_checked` is done
    /// between, by the first rank.
    ///
    /// # Errors
    /// The checkpoint cannot be read or is damaged; the tiles' place fails.
    pub(super) fn restore(
        &mut self,
        dir: &Path,
        on_checked: &mut dyn FnMut() -> Result<(), TrainError>,
        say: &mut dyn FnMut(String),
    ) -> Result<(), TrainError> {
        let ranks = self.ranks.clone();
        let mut checkpoint = ranks.together("reading the checkpoint", || {
            let mut checkpoint = Checkpoint::open(dir, ranks.rank())?;
            let layout = self.plan.swapper.cut()?;
            let mut work = self.progress("checking the checkpoint");
            checkpoint.check(layout.ranges(), &mut |bytes| work.add(bytes))?;
            Ok(checkpoint)
        })?;
        ranks.together("going back to the checkpoint", || match ranks.is_first() {
            true => on_checked(),
            false => Ok(()),
        })?;
        ranks.together("filling the tiles", || {
            let blob = serde_json::to_vec(&checkpoint.description.state).expect("plain data");
            self.state = resume(&self.state, &blob, say)?;
            let mut work = self.progress("reading the checkpoint");
            let fill = |blanks: &mut [UninitTile]| {
                for blank in blanks {
                    checkpoint.tile(blank.range, blank.param, blank.state)?;
                    work.add(bytes_of(blank));
                }
                Ok::<(), TrainError>(())
            };
            self.backend.initialize(fill, self.state.encode())
        })
    }

    /// First weights into every tile; commits them as step 0.
    pub(super) fn initialize(&mut self, first: &First) -> Result<(), TrainError> {
        let (units, master) = (&self.plan.units, self.plan.master);
        self.started_with = first.words();
        let mut work = self.progress("filling the tiles");
        // A weight's value follows from its place alone, so tiles may be filled side by side.
        let fill = |blanks: &mut [UninitTile]| {
            blanks.par_iter_mut().try_for_each(|blank| {
                let UninitTile {
                    range,
                    param,
                    state,
                } = blank;
                param.fill(0);
                state.fill(0);
                let elems = range.elems.start as usize..range.elems.end as usize;
                let mut masters = vec![0f32; elems.len()];
                first.fill(&units[range.unit], range.unit, elems, &mut masters)?;
                init_tile(master, &masters, param, state);
                reach(Point::Filling);
                Ok::<(), TrainError>(())
            })?;
            work.add(blanks.iter().map(bytes_of).sum());
            Ok::<(), TrainError>(())
        };
        self.backend.initialize(fill, self.state.encode())
    }

    /// Progress over all tiles of this rank, shown by the first rank. Other ranks have about as many bytes.
    fn progress(&self, what: &str) -> Progress {
        let bytes = self.plan.memory.table_bytes / u64::from(self.plan.swapper.ranks);
        let audience = match self.ranks.is_first() {
            true => Audience::Person,
            false => Audience::Nobody,
        };
        Progress::new(what, Unit::Bytes, audience).with_total(bytes)
    }

    /// Ranges that this rank writes into a checkpoint: none where the first one has all that it has.
    pub(crate) fn saved_ranges(&self) -> Result<Option<usize>, TrainError> {
        if self.ranks.rank() >= self.plan.swapper.ranks {
            return Ok(None);
        }
        // The plan counts those of the first rank, which owns most.
        Ok(Some(self.plan.swapper.cut()?.ranges().len()))
    }

    /// Ends in order; everything that should last was drained or saved before. The daemon ends after all ranks' sessions.
    ///
    /// # Errors
    /// What the tiles' place says.
    pub(crate) fn close(self) -> Result<(), TrainError> {
        let backend = self.backend;
        (self.ranks).together("closing the run", || Ok(backend.close()?))
    }
}

/// Bytes of a range's param and state.
fn bytes_of(blank: &UninitTile) -> u64 {
    (blank.param.len() + blank.state.len()) as u64
}

/// The state in `blob`. Differences to what the run would now be trained with are said, not refused: a run may go on with
/// another rate or more text. What was not known then (a run without steps has no text) is no difference.
pub(super) fn resume(
    fresh: &RunState,
    blob: &[u8],
    say: &mut dyn FnMut(String),
) -> Result<RunState, TrainError> {
    let mut state = RunState::decode(blob)?;
    let changes = crate::run::differences(&state.trained_with, &fresh.trained_with);
    for change in changes.iter().filter(|change| change.was != "null") {
        say(format!(
            "note: {} was {} until step {}, is {} from here on",
            change.what, change.was, state.step, change.now
        ));
    }
    state.trained_with = fresh.trained_with.clone();
    state.seed = fresh.seed;
    Ok(state)
}
