//! What Muon takes besides a step of AdamW: operations, memory and bytes of whole matrices.
//!
//! A step of the iteration on m rows and n columns, m <= n, has three products: m m n, m m m and m m n. Every rank makes every matrix orthogonal.

use std::fmt;

use offload_support::units::ApproxBytes;

use super::figures::Seconds;
use crate::config::RunSettings;
use crate::model::{ParamLayout, UnitLayout};

/// Bytes of a number while a matrix is made orthogonal.
const BF16_BYTES: usize = 2;

/// Whole matrices of a step of one process.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Directions {
    /// Parameters that Muon updates.
    pub params: u64,
    /// Operations of the iteration.
    pub operations: f64,
    /// Seconds for them.
    pub s: f64,
    /// Most memory for a matrix that is made orthogonal.
    pub working_bytes: u64,
    /// Bytes of matrices that are gathered from all ranks; 0 for one.
    pub gathered_bytes: u64,
}

impl Directions {
    /// Returns `None` for a run with another optimizer.
    pub(super) fn new(settings: &RunSettings, units: &[UnitLayout]) -> Option<Self> {
        let muon = settings.optimizer.muon.as_ref()?;
        let params = units.iter().flat_map(|unit| &unit.params);
        let matrices = params.filter(|param| param.member.is_block_matrix());
        let is_divided = settings.ranks > 1 && settings.placement.stage.divides_state();
        let elem_bytes = settings.dtype.elem_bytes();
        let mut all = Self {
            params: 0,
            operations: 0.0,
            s: 0.0,
            working_bytes: 0,
            gathered_bytes: 0,
        };
        for matrix in matrices {
            let [rows, columns] = sides(matrix);
            let products = 2 * rows * rows * columns + rows * rows * rows;
            // The matrix in bf16, its norm's quotient and the next one; two squares, and a third while they are added.
            let working = BF16_BYTES * (3 * rows * columns + 3 * rows * rows);
            all.params += matrix.elems() as u64;
            all.operations += muon.ns_steps as f64 * 2.0 * products as f64;
            all.working_bytes = all.working_bytes.max(working as u64);
            all.gathered_bytes += u64::from(is_divided) * (matrix.elems() * elem_bytes) as u64;
        }
        Some(all)
    }

    /// The same at a rate of `tflops` in 10^12 operations per second.
    pub(super) fn at(self, tflops: f64) -> Self {
        let s = self.operations / (tflops * 1e12);
        Self { s, ..self }
    }
}

/// The shorter and the longer side of a matrix.
fn sides(matrix: &ParamLayout) -> [usize; 2] {
    let mut sides = [matrix.shape[0], matrix.shape[1]];
    sides.sort_unstable();
    sides
}

/// A line for people.
impl fmt::Display for Directions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "Muon      {:.2} M parameters of matrices, with one moment; directions take {:.3} TFLOP a step, {}, and {}",
            self.params as f64 / 1e6,
            self.operations / 1e12,
            Seconds(self.s),
            ApproxBytes(self.working_bytes)
        )?;
        match self.gathered_bytes {
            0 => Ok(()),
            bytes => write!(f, "; {} are gathered for them", ApproxBytes(bytes)),
        }
    }
}
