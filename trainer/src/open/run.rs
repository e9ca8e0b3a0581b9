//! An open run: its tiles, where it stands, how it begins and is closed.

use std::path::Path;

use kernels::adamw::init_tile;
use kernels::gpu::Registration;
use rayon::prelude::*;
use serde_json::Value;
use swapper::UninitTile;
use swapper::private::PrivateDaemon;
use test_hooks::kill_point::{Point, reach};

use super::RunError;
use super::first::First;
use crate::plan::Plan;
use offload_support::progress::{Audience, Progress, Unit};
use training_state::backend::TileBackend;
use training_state::checkpoint_tap::CheckpointTap;
use training_state::ranks::Ranks;
use training_state::run::{Checkpoint, RunDir, RunState};

/// An open run. Fields are dropped in this order: the swapper before the daemon it talks to.
///
/// `S` and `G` are what computes with its tiles, as in [`TileBackend`].
pub(crate) struct OpenRun<S = (), G = ()> {
    pub(crate) backend: TileBackend<S, G>,
    /// Registration of the slots as pinned memory of the GPU.
    pub(super) _pinned: Option<Registration>,
    pub(crate) opened: swapper::Opened,
    pub(crate) state: RunState,
    /// Origin of a fresh run's weights, for people.
    pub(crate) started_with: String,
    pub(crate) plan: Plan,
    /// Gets updated tiles.
    pub(crate) checkpoint_tap: CheckpointTap,
    /// As the run's directory says.
    pub(crate) layout: Value,
    pub(crate) dir: RunDir,
    /// The first rank's, for all.
    pub(super) _daemon: Option<PrivateDaemon>,
    pub(super) ranks: Ranks,
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
        on_checked: &mut dyn FnMut() -> Result<(), RunError>,
        say: &mut dyn FnMut(String),
    ) -> Result<(), RunError> {
        let ranks = self.ranks.clone();
        let mut checkpoint = ranks.together::<_, RunError>("reading the checkpoint", || {
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
                Ok::<(), RunError>(())
            };
            self.backend.initialize(fill, self.state.encode())
        })
    }

    /// First weights into every tile; commits them as step 0.
    pub(super) fn initialize(&mut self, first: &First) -> Result<(), RunError> {
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
                Ok::<(), RunError>(())
            })?;
            work.add(blanks.iter().map(bytes_of).sum());
            Ok::<(), RunError>(())
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

    /// The same run, with its tiles where `attach` puts what computes with them.
    pub(crate) fn with_backend<S, G>(
        self,
        attach: impl FnOnce(TileBackend) -> TileBackend<S, G>,
    ) -> OpenRun<S, G> {
        OpenRun {
            backend: attach(self.backend),
            _pinned: self._pinned,
            opened: self.opened,
            state: self.state,
            started_with: self.started_with,
            plan: self.plan,
            checkpoint_tap: self.checkpoint_tap,
            layout: self.layout,
            dir: self.dir,
            _daemon: self._daemon,
            ranks: self.ranks,
        }
    }
}

impl<S, G> OpenRun<S, G> {
    /// Ranges that this rank writes into a checkpoint: none where the first one has all that it has.
    pub(crate) fn saved_ranges(&self) -> Result<Option<usize>, RunError> {
        if self.ranks.rank() >= self.plan.swapper.ranks {
            return Ok(None);
        }
        // The plan counts those of the first rank, which owns most.
        Ok(Some(self.plan.swapper.cut()?.ranges().len()))
    }

    /// Ends in order; everything that should last was drained or saved before. The daemon ends after all ranks' sessions.
    ///
    /// # Errors
    /// An error of the backend.
    pub(crate) fn close(self) -> Result<(), RunError> {
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
) -> Result<RunState, RunError> {
    let mut state = RunState::decode(blob)?;
    let changes = training_state::run::differences(&state.trained_with, &fresh.trained_with);
    for change in changes.iter().filter(|change| change.was != "null") {
        say(format!(
            "note: {} was {} up to step {} and is {} from now on",
            change.what, change.was, state.step, change.now
        ));
    }
    state.trained_with = fresh.trained_with.clone();
    state.seed = fresh.seed;
    Ok(state)
}
