//! Muon's directions in a plan: of which matrices, how long they take, and what the ranks gather for them.

use std::fmt;

use offload_support::units::ApproxBytes;
use training_state::plan::Directions;

use super::figures::Seconds;
use crate::config::RunSettings;
use crate::model::UnitLayout;

/// Whole matrices of a step of one process.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PlannedDirections {
    /// What does not depend on the machine.
    pub of_matrices: Directions,
    /// Operations of the iteration.
    pub operations: f64,
    /// Seconds for their operations.
    pub s: f64,
    /// Bytes of matrices that are gathered from all ranks; 0 for one.
    pub gathered_bytes: u64,
}

impl PlannedDirections {
    /// Those of a run at a rate of `tflops` in 10^12 operations per second; `None` for a run with another optimizer.
    pub(super) fn new(settings: &RunSettings, units: &[UnitLayout], tflops: f64) -> Option<Self> {
        let ns_steps = settings.optimizer.muon.as_ref()?.ns_steps;
        let of_matrices = directions(settings, units)?;
        let operations = of_matrices.operations(ns_steps);
        let is_divided = settings.ranks > 1 && settings.placement.stage.divides_state();
        Some(Self {
            operations,
            s: operations / (tflops * 1e12),
            gathered_bytes: match is_divided {
                true => of_matrices.gathered_bytes(settings.dtype.elem_bytes()),
                false => 0,
            },
            of_matrices,
        })
    }
}

/// What directions of the matrices of `units` take; `None` for a run with another optimizer.
pub(super) fn directions(settings: &RunSettings, units: &[UnitLayout]) -> Option<Directions> {
    settings.optimizer.muon.as_ref()?;
    let params = units.iter().flat_map(|unit| &unit.params);
    let matrices = params.filter(|param| param.member.is_block_matrix());
    let sides = matrices.map(|matrix| [matrix.shape[0], matrix.shape[1]]);
    Some(Directions::new(sides))
}

/// A line for people.
impl fmt::Display for PlannedDirections {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let all = &self.of_matrices;
        write!(
            f,
            "Muon      {:.2} M parameters of matrices, with one moment; directions take {:.3} TFLOP a step, {}, and {}",
            all.params as f64 / 1e6,
            self.operations / 1e12,
            Seconds(self.s),
            ApproxBytes(all.working_bytes)
        )?;
        match self.gathered_bytes {
            0 => Ok(()),
            bytes => write!(f, "; {} are gathered for them", ApproxBytes(bytes)),
        }
    }
}
