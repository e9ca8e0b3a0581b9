//! Fingerprints of weights and optimizer state for each unit, at the last committed step. Runs with equal
//! fingerprints have the same bits, wherever they keep them.

use std::fmt;

use swapper::TileRange;

use crate::config::RunSettings;
use crate::open::RunError;
use crate::run_state_reader::RunStateReader;
use offload_support::progress::{Audience, Progress, Unit};
use training_state::fingerprint::Fingerprint;
use training_state::run::CheckpointName;

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RunFingerprint {
    /// Step of the state.
    pub step: u64,
    pub units: Vec<UnitFingerprint>,
}

/// Fingerprints of one unit: of its parameters, and of residuals and moments.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UnitFingerprint {
    pub name: String,
    pub weights: u64,
    pub state: u64,
}

/// Reads the run's tiles, or those of `checkpoint`, without changing them.
///
/// # Errors
/// Nothing was committed yet; the run cannot be opened or read.
pub fn run_fingerprint(
    settings: RunSettings,
    checkpoint: Option<CheckpointName>,
) -> Result<RunFingerprint, RunError> {
    read(settings.clone(), checkpoint).map_err(|error| error.of_run(&settings))
}

fn read(
    settings: RunSettings,
    checkpoint: Option<CheckpointName>,
) -> Result<RunFingerprint, RunError> {
    let mut run = RunStateReader::open(settings, checkpoint)?;
    let names: Vec<String> = run.units.iter().map(|unit| unit.name.clone()).collect();
    let mut prints = vec![(Fingerprint::default(), Fingerprint::default()); names.len()];
    let elems: usize = run.units.iter().map(|unit| unit.elems).sum();
    let elem_bytes = run.formats.master().param_bytes() + run.formats.usual().state_bytes();
    let mut work = Progress::new("reading the run's tiles", Unit::Bytes, Audience::Person)
        .with_total((elems * elem_bytes) as u64);
    run.visit(&mut |range: &TileRange, param, state| {
        let (weights, states) = &mut prints[range.unit];
        weights.add(param);
        states.add(state);
        work.add((range.elems.end - range.elems.start) * elem_bytes as u64);
    })?;
    drop(work);
    let step = run.state.step;
    run.close()?;
    let unit = |(name, (weights, state)): (String, (Fingerprint, Fingerprint))| UnitFingerprint {
        name,
        weights: weights.finish(),
        state: state.finish(),
    };
    Ok(RunFingerprint {
        step,
        units: names.into_iter().zip(prints).map(unit).collect(),
    })
}

impl fmt::Display for RunFingerprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "step {}", self.step)?;
        let mut all = Fingerprint::default();
        for UnitFingerprint {
            name,
            weights,
            state,
        } in &self.units
        {
            writeln!(f, "{name:12} weights {weights:016x} state {state:016x}")?;
            all.add(&weights.to_le_bytes());
            all.add(&state.to_le_bytes());
        }
        write!(f, "all          {:016x}", all.finish())
    }
}
