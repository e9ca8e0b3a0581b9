//! Checkpoints: copies of what is trained in a directory of the caller's, in the native trainer's format. Frozen tiles never
//! change: a checkpoint has only their fingerprint.
//!
//! Python names the files of a checkpoint by JSON lists of [`SavedFile`]: *tiles* end with their fingerprint, that of *other* files
//! covers all of them.

use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use pyo3::prelude::*;
use serde_json::{Value, json};
use swapper::{Kind, Swapper, SwapperError, SwapperSettings, TileRange, UninitTile};
use training_state::fingerprint::Fingerprint;
use training_state::ranks::{RankError, Ranks};
use training_state::run::{
    Checkpoint, CheckpointDescription, CheckpointError, SavedFile, SentFile, TileWriter, copy_files,
};

use crate::errors::{Damaged, Error, LayoutChanged, NoSpace};
use crate::nodes::FirstRanks;
use crate::open::{Plan, RunOptimizer, UnitPlan, swapper_settings};
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
        CheckpointError::Io { source, .. } | CheckpointError::Write { source, .. }
            if source.kind() == ErrorKind::StorageFull =>
        {
            NoSpace::new_err(text)
        }
        CheckpointError::Other { .. } => LayoutChanged::new_err(text),
        _ => Error::new_err(text),
    }
}

/// What two runs must have in common for one to load the other's tiles. `frozen` is the sum of all ranks' `frozen`.
fn layout(plan: &Plan, frozen: u64) -> Value {
    let unit = |unit: &UnitPlan| match unit.muon {
        true => json!([unit.elems, unit.dtype, unit.trained, "Muon"]),
        false => json!([unit.elems, unit.dtype, unit.trained]),
    };
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
    if plan.master != "fp32" {
        layout["master"] = plan.master.as_str().into();
    }
    if plan.optimizer != RunOptimizer::AdamW {
        layout["optimizer"] = plan.optimizer.word().into();
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
    unix_s: u64,
    state: Value,
    files: Vec<SavedFile>,
    frozen: u64,
) -> Result<(), CheckpointError> {
    let description = CheckpointDescription {
        step,
        unix_s,
        layout: layout(plan, frozen),
        state,
        files,
    };
    description.write(dir)
}

fn read_files(files: &str) -> PyResult<Vec<SavedFile>> {
    serde_json::from_str(files).map_err(|error| Error::new_err(error.to_string()))
}

/// Describes the file `name` in `dir`, which is not one with tiles.
#[pyfunction]
pub(crate) fn describe_file(py: Python<'_>, dir: PathBuf, name: &str) -> PyResult<String> {
    let file = py.detach(|| SavedFile::of_file(&dir, name))?;
    Ok(serde_json::to_string(&file).expect("plain data"))
}

/// What the checkpoint in `dir` is, as JSON; None if there is none with all its tiles.
#[pyfunction]
pub(crate) fn held_checkpoint(dir: PathBuf) -> Option<String> {
    let (checkpoint, fingerprint) = Checkpoint::whole(&dir)?;
    let CheckpointDescription {
        step,
        unix_s,
        state,
        files,
        ..
    } = checkpoint.description;
    let held = json!({
        "step": step, "unix_s": unix_s, "fingerprint": format!("{fingerprint:016x}"), "tiles": files, "others": state["others"],
    });
    Some(held.to_string())
}

/// Copies files between the first ranks of the nodes, of which this is number `node` of `count`: sends `tiles` and `others` of the
/// directory `source`, and writes below `dir` those of other nodes that it lacks, if it `receives`. A node that has `failed` before
/// says so and sends nothing. `gather` brings the bytes of every node, of equal length. Another node's failure ends the copying, and
/// is not raised here.
#[pyfunction]
#[allow(clippy::too_many_arguments, reason = "one place calls it")]
pub(crate) fn copy_between_nodes(
    py: Python<'_>,
    gather: Py<PyAny>,
    node: u32,
    count: u32,
    dir: PathBuf,
    source: PathBuf,
    tiles: &str,
    others: &str,
    receives: bool,
    failed: Option<String>,
) -> PyResult<()> {
    let (tiles, others) = (read_files(tiles)?, read_files(others)?);
    let own = match failed {
        Some(why) => Err(CheckpointError::Abandoned {
            path: dir.clone(),
            why,
        }),
        None => {
            let tiles = tiles.iter().map(|file| SentFile::of_tiles(&source, file));
            let others = others.iter().map(|file| SentFile::of_file(&source, file));
            Ok(tiles.chain(others).collect())
        }
    };
    let nodes = Ranks::new(FirstRanks::new(node, count, gather));
    match py.detach(|| copy_files(&nodes, &dir, own, receives)) {
        Ok(()) | Err(CheckpointError::OtherNode { .. }) => Ok(()),
        Err(CheckpointError::Rank(RankError::Group(error))) => Err(FirstRanks::exception(error)),
        Err(error) => Err(exception(error)),
    }
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
