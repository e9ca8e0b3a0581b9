//! Checkpoints: copies of what is trained in a directory of the caller's, in the native trainer's format. Frozen tiles never
//! change: a checkpoint has only their fingerprint.

use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

use pyo3::PyResult;
use serde_json::{Value, json};
use swapper::{Swapper, SwapperError, UninitTile};
use training_state::fingerprint::Fingerprint;
use training_state::run::{Checkpoint, CheckpointDescription, CheckpointError, TileWriter};

use crate::errors::{Damaged, Error, LayoutChanged, NoSpace};
use crate::open::{Plan, UnitPlan};
use crate::update::StepHyper;

/// Why a checkpoint was not written or not loaded.
#[derive(Debug)]
pub(crate) enum Failure {
    Swapper(SwapperError),
    Checkpoint(CheckpointError),
}

impl From<SwapperError> for Failure {
    fn from(error: SwapperError) -> Self {
        Self::Swapper(error)
    }
}

impl From<CheckpointError> for Failure {
    fn from(error: CheckpointError) -> Self {
        Self::Checkpoint(error)
    }
}

/// The exception for an error of a checkpoint's files.
pub(crate) fn exception(error: CheckpointError) -> pyo3::PyErr {
    let text = error.to_string();
    match error {
        // The native trainer's advice names its commands.
        CheckpointError::Damaged { path, message } => Damaged::new_err(format!(
            "the checkpoint {} is damaged: {message}; load another tag",
            path.display()
        )),
        CheckpointError::TooLittleSpace { .. } => NoSpace::new_err(text),
        CheckpointError::Other { .. } => LayoutChanged::new_err(text),
        _ => Error::new_err(text),
    }
}

/// What two runs must have in common for one to load the other's tiles. `frozen` is the fingerprint of the frozen tiles.
fn layout(plan: &Plan, swapper: &Swapper<StepHyper>, frozen: Fingerprint) -> Value {
    let unit = |unit: &UnitPlan| json!([unit.elems, unit.dtype, unit.trained]);
    let units: Vec<_> = plan.units.iter().map(unit).collect();
    let ranges = swapper.layout().ranges().len();
    let frozen = format!("{:016x}", frozen.finish());
    json!({"units": units, "ranges": ranges, "frozen": frozen})
}

/// Drains, and writes the trained tiles into `dir`, which exists, with `state`, which `read_state` returns.
pub(crate) fn save(
    swapper: &mut Swapper<StepHyper>,
    plan: &Plan,
    dir: &Path,
    step: u64,
    state: Value,
) -> Result<(), Failure> {
    let mut frozen = Fingerprint::default();
    let mut writer = TileWriter::create(dir, 0)?;
    let mut written = Ok(());
    swapper.visit(&mut |range, param, state| {
        if !plan.units[range.unit].trained {
            frozen.add(param);
        } else if written.is_ok() {
            written = writer.add(range, param, state);
        }
    })?;
    written?;
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    let description = CheckpointDescription {
        step,
        unix_s: now.unwrap_or_default().as_secs(),
        layout: layout(plan, swapper, frozen),
        state,
        files: vec![writer.finish()?],
    };
    description.write(dir)?;
    Ok(())
}

/// The state that was saved with the checkpoint in `dir`.
pub(crate) fn read_state(dir: &Path) -> PyResult<Value> {
    let checkpoint = Checkpoint::open(dir, 0).map_err(exception)?;
    Ok(checkpoint.description.state)
}

/// Fills the trained tiles from the checkpoint in `dir` and commits them with `blob`. Its files are checked first.
pub(crate) fn load(
    swapper: &mut Swapper<StepHyper>,
    plan: &Plan,
    dir: &Path,
    blob: Vec<u8>,
) -> Result<(), Failure> {
    let (trained, fixed): (Vec<usize>, Vec<usize>) =
        (0..plan.units.len()).partition(|&unit| plan.units[unit].trained);
    let mut frozen = Fingerprint::default();
    if !fixed.is_empty() {
        swapper.visit(&mut |range, param, _| {
            if !plan.units[range.unit].trained {
                frozen.add(param);
            }
        })?;
    }
    let mut checkpoint = Checkpoint::open(dir, 0)?;
    checkpoint.check_layout(&layout(plan, swapper, frozen))?;
    let layout = swapper.layout().clone();
    let of_trained = |unit: &usize| layout.units()[*unit].clone();
    let ranges = trained.iter().flat_map(of_trained);
    let ranges: Vec<_> = ranges
        .map(|range| layout.ranges()[range as usize].clone())
        .collect();
    checkpoint.check(&ranges, &mut |_| {})?;
    swapper.begin_rewrite(&trained, blob)?;
    for unit in trained {
        swapper.fill(unit, |tiles: &mut [UninitTile<'_>]| {
            tiles.iter_mut().try_for_each(|tile| {
                checkpoint.tile(tile.range, tile.param, tile.state)?;
                Ok::<(), Failure>(())
            })
        })?;
    }
    swapper.end_fill()?;
    Ok(())
}
