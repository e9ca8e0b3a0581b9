//! Checkpoints: copies of what is trained in a directory of the caller's, in the native trainer's format. Frozen tiles never
//! change: a checkpoint has only their fingerprint.

use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

use pyo3::PyResult;
use serde_json::{Value, json};
use swapper::{Kind, Swapper, SwapperError, SwapperSettings, TileRange, UninitTile};
use training_state::fingerprint::Fingerprint;
use training_state::run::{
    Checkpoint, CheckpointDescription, CheckpointError, SavedFile, TileWriter,
};

use crate::errors::{Damaged, Error, LayoutChanged, NoSpace};
use crate::open::{Plan, UnitPlan, swapper_settings};
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

/// What two runs must have in common for one to load the other's tiles. `frozen` is the sum of all ranks' `frozen`.
fn layout(plan: &Plan, frozen: u64) -> Value {
    let unit = |unit: &UnitPlan| json!([unit.elems, unit.dtype, unit.trained]);
    let units: Vec<_> = plan.units.iter().map(unit).collect();
    let all_nodes = SwapperSettings {
        node_ranks: None,
        ..swapper_settings(plan).expect("the run was opened with this plan")
    };
    let tiles = all_nodes.cut().expect("the run was opened with this plan");
    let tiles = tiles.table().iter();
    let ranges = tiles.filter(|tile| tile.kind == Kind::Param).count();
    let mut layout = json!({"units": units, "ranges": ranges, "frozen": format!("{frozen:016x}")});
    if plan.moments != "fp32" {
        layout["moments"] = plan.moments.as_str().into();
    }
    layout
}

/// Fingerprint of a frozen tile. Sums of them do not depend on which rank has which tile.
fn of_frozen(range: &TileRange, param: &[u8]) -> u64 {
    let mut fingerprint = Fingerprint::default();
    fingerprint.add(&(range.unit as u64).to_le_bytes());
    fingerprint.add(&range.elems.start.to_le_bytes());
    fingerprint.add(param);
    fingerprint.finish()
}

/// Drains, and writes this rank's trained tiles into `dir`, which exists. Returns the file, and the sum of the frozen tiles'
/// fingerprints.
pub(crate) fn save(
    swapper: &mut Swapper<StepHyper>,
    plan: &Plan,
    dir: &Path,
) -> Result<(SavedFile, u64), Failure> {
    let mut frozen = 0_u64;
    let mut writer = TileWriter::create(dir, plan.rank)?;
    let mut written = Ok(());
    swapper.visit(&mut |range, param, state| {
        if !plan.units[range.unit].trained {
            frozen = frozen.wrapping_add(of_frozen(range, param));
        } else if written.is_ok() {
            written = writer.add(range, param, state);
        }
    })?;
    written?;
    Ok((writer.finish()?, frozen))
}

/// The sum of the fingerprints of this rank's frozen tiles.
pub(crate) fn frozen(swapper: &mut Swapper<StepHyper>, plan: &Plan) -> Result<u64, SwapperError> {
    let mut frozen = 0_u64;
    if plan.units.iter().any(|unit| !unit.trained) {
        swapper.visit(&mut |range, param, _| {
            if !plan.units[range.unit].trained {
                frozen = frozen.wrapping_add(of_frozen(range, param));
            }
        })?;
    }
    Ok(frozen)
}

/// Completes a checkpoint of which all ranks have written their `files`: describes it, with `state`, which `read_state` returns.
pub(crate) fn describe(
    plan: &Plan,
    dir: &Path,
    step: u64,
    state: Value,
    files: Vec<SavedFile>,
    frozen: u64,
) -> Result<(), CheckpointError> {
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    let description = CheckpointDescription {
        step,
        unix_s: now.unwrap_or_default().as_secs(),
        layout: layout(plan, frozen),
        state,
        files,
    };
    description.write(dir)
}

/// The state that was saved with the checkpoint in `dir`.
pub(crate) fn read_state(dir: &Path) -> PyResult<Value> {
    let checkpoint = Checkpoint::open(dir, 0).map_err(exception)?;
    Ok(checkpoint.description.state)
}

/// Fills this rank's trained tiles from the checkpoint in `dir` and commits them with `blob`. Its files are checked first.
/// `frozen` is the sum of all ranks' `frozen`.
pub(crate) fn load(
    swapper: &mut Swapper<StepHyper>,
    plan: &Plan,
    dir: &Path,
    blob: Vec<u8>,
    frozen: u64,
) -> Result<(), Failure> {
    let trained: Vec<usize> = (0..plan.units.len())
        .filter(|&unit| plan.units[unit].trained)
        .collect();
    let mut checkpoint = Checkpoint::open(dir, plan.rank)?;
    checkpoint.check_layout(&layout(plan, frozen))?;
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
