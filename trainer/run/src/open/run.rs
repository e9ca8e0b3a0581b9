//! An open run: its tiles, its current step, how it is initialized, restored and closed.

use std::path::Path;

use kernels::adamw::init_tile;
use kernels::gpu::Registration;
use rayon::prelude::*;
use serde_json::Value;
use swapper::UninitTile;
use swapper::private::PrivateDaemon;
use test_hooks::kill_point::{Point, reach};

use super::RunError;
use super::first::InitialWeights;
use crate::config::summary_of_schedule;
use crate::plan::Plan;
use offload_support::progress::{Audience, Progress, Unit};
use training_state::backend::TileBackend;
use training_state::checkpoint_tap::CheckpointTap;
use training_state::ranks::Ranks;
use training_state::run::{Checkpoint, Checkpoints, Difference, NodeDirs, RunDir, RunState};

/// Open run. Fields are dropped in order: the swapper before the daemon it talks to.
///
/// `S` and `G` are the buffers that compute with the tiles, as in [`TileBackend`].
pub struct OpenRun<S = (), G = ()> {
    pub backend: TileBackend<S, G>,
    /// Registration of the slots as pinned memory of the GPU.
    pub(super) _pinned: Option<Registration>,
    pub opened: swapper::OpenReport,
    pub state: RunState,
    /// Origin of a fresh run's weights, shown on the console.
    pub started_with: String,
    pub plan: Plan,
    /// Receives updated tiles while a checkpoint is being written.
    pub checkpoint_tap: CheckpointTap,
    /// Layout from the run's description.
    pub layout: Value,
    /// Directory of this node's part of the run.
    pub dir: RunDir,
    /// The run's checkpoints.
    pub checkpoints: Checkpoints,
    /// The nodes' directories, if every node keeps the checkpoints in its own.
    pub node_dirs: Option<NodeDirs>,
    /// Private daemon; only the first rank of a node holds one, for all its ranks.
    pub(super) _daemon: Option<PrivateDaemon>,
    pub(super) ranks: Ranks,
}

impl OpenRun {
    /// Restores the checkpoint in `dir`. Verifies all of it before any tile changes, and calls `on_checked` in between.
    ///
    /// # Errors
    /// The checkpoint cannot be read or is damaged; the backend fails.
    pub(super) fn restore(
        &mut self,
        dir: &Path,
        on_checked: &mut dyn FnMut() -> Result<(), RunError>,
        say: &mut dyn FnMut(String),
    ) -> Result<(), RunError> {
        let ranks = self.ranks.clone();
        let mut checkpoint = ranks.on_all_ranks::<_, RunError>("reading the checkpoint", || {
            let mut checkpoint = Checkpoint::open(dir, ranks.rank())?;
            let layout = self.plan.swapper.cut()?;
            let mut work = self.progress("checking the checkpoint");
            checkpoint.check(layout.ranges(), &mut |bytes| work.add(bytes))?;
            Ok(checkpoint)
        })?;
        ranks.on_all_ranks("going back to the checkpoint", on_checked)?;
        ranks.on_all_ranks("filling the tiles", || {
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

    /// Fills every tile with its initial weights and commits them as step 0.
    pub(super) fn initialize(&mut self, first: &InitialWeights) -> Result<(), RunError> {
        let (units, formats) = (&self.plan.units, self.plan.formats.clone());
        self.started_with = first.words();
        let mut work = self.progress("filling the tiles");
        // A weight's value depends only on its position, so tiles may be filled in parallel.
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
                init_tile(formats.of_tile(range), &masters, param, state);
                reach(Point::Filling);
                Ok::<(), RunError>(())
            })?;
            work.add(blanks.iter().map(bytes_of).sum());
            Ok::<(), RunError>(())
        };
        self.backend.initialize(fill, self.state.encode())
    }

    /// Returns the progress over all tiles of this rank, shown by the first rank. Other ranks have about as
    /// many bytes.
    fn progress(&self, what: &str) -> Progress {
        let local = self.plan.swapper.local();
        let bytes = self.plan.memory.table_bytes / local.len() as u64;
        let audience = match self.ranks.is_first() {
            true => Audience::Person,
            false => Audience::Nobody,
        };
        Progress::new(what, Unit::Bytes, audience).with_total(bytes)
    }

    /// Replaces the buffers that compute with the tiles by those that `attach` returns.
    pub fn with_backend<S, G>(
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
            checkpoints: self.checkpoints,
            node_dirs: self.node_dirs,
            _daemon: self._daemon,
            ranks: self.ranks,
        }
    }
}

impl<S, G> OpenRun<S, G> {
    /// Returns the number of ranges that this rank writes into a checkpoint; `None` if the first rank holds
    /// all of them.
    pub fn saved_ranges(&self) -> Result<Option<usize>, RunError> {
        if self.ranks.rank() >= self.plan.swapper.ranks {
            return Ok(None);
        }
        // The plan describes the first rank, whose part is the largest.
        Ok(Some(self.plan.swapper.cut()?.ranges().len()))
    }

    /// Closes the run. The caller has already drained or saved what must last. The daemon ends after all
    /// ranks' sessions.
    ///
    /// # Errors
    /// The backend fails.
    pub fn close(self) -> Result<(), RunError> {
        let backend = self.backend;
        (self.ranks).on_all_ranks("closing the run", || Ok(backend.close()?))
    }
}

/// Bytes of a range's parameters and optimizer state.
fn bytes_of(blank: &UninitTile) -> u64 {
    (blank.param.len() + blank.state.len()) as u64
}

/// Parses the state in `blob`. Reports differences from the present settings but does not refuse them: a run
/// may resume with another learning rate or more text. The first text of a run without steps is not a difference.
pub(super) fn resume(
    fresh: &RunState,
    blob: &[u8],
    say: &mut dyn FnMut(String),
) -> Result<RunState, RunError> {
    let mut state = RunState::decode(blob)?;
    if let Some(text @ Value::Null) = state.trained_with.get_mut("text") {
        *text = fresh.trained_with["text"].clone();
    }
    // Runs that are older than these notes did not keep them, and a start on a GPU has no threads to compare.
    for key in ["dropout", "threads"] {
        let lacks = |with: &Value| with.get(key).is_none();
        if lacks(&state.trained_with) || lacks(&fresh.trained_with) {
            state.trained_with[key] = fresh.trained_with[key].clone();
        }
    }
    let [was, now] =
        [&state.trained_with, &fresh.trained_with].map(|with| schedule_of(&with["lr"]));
    if was != now {
        say(format!(
            "note: the learning rate was {was} up to step {}, and is {now} from now on",
            state.step
        ));
    }
    let is_shown = |change: &Difference| !(change.what == "lr" || change.what.starts_with("lr."));
    let changes = training_state::run::differences(&state.trained_with, &fresh.trained_with);
    let mut divides_anew = false;
    for change in changes.into_iter().filter(is_shown) {
        divides_anew |= WINDOWS.contains(&change.what.as_str());
        say(format!(
            "note: {} was {} up to step {} and is {} from now on",
            change.what, change.was, state.step, change.now
        ));
    }
    if divides_anew && state.step > 0 {
        say(format!(
            "note: the data is divided into other windows: the run resumes at window {} of them, which may repeat or leave out text",
            state.next_sample
        ));
    }
    state.trained_with = fresh.trained_with.clone();
    state.seed = fresh.seed;
    Ok(state)
}

/// What a run's division of its data into windows depends on, by the names in notes.
const WINDOWS: [&str; 3] = ["train.seq_len", "the data", "data.validation_fraction"];

/// Formats a kept schedule of learning rates.
fn schedule_of(lr: &Value) -> String {
    let schedule = serde_json::from_value(lr.clone());
    schedule.map_or_else(|_| lr.to_string(), |lr| summary_of_schedule(&lr))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn threads_are_compared_only_if_a_cpu_computed_before_and_computes_now() {
        let notes = |before: Value, now: Value| {
            let [before, now] = [before, now].map(|with| RunState::new(1, with));
            let mut notes = Vec::new();
            let resumed = resume(&now, &before.encode(), &mut |note| notes.push(note));
            assert_eq!(resumed.unwrap().trained_with, now.trained_with);
            notes
        };
        let with =
            |threads: Value| json!({"dropout": "none", "text": "10 tokens", "threads": threads});
        let on_gpu = || json!({"dropout": "none", "text": "10 tokens"});
        assert_eq!(
            notes(with(json!(4)), with(json!(2))),
            ["note: train.threads was 4 up to step 0 and is 2 from now on"]
        );
        for (before, now) in [(with(json!(4)), on_gpu()), (on_gpu(), with(json!(4)))] {
            assert!(notes(before, now).is_empty());
        }
    }
}
