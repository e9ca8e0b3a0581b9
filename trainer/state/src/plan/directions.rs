//! What Muon takes besides a step of AdamW: operations, memory and bytes of whole matrices. `trainer` and the Python package ask it.
//!
//! A step of the iteration on m rows and n columns, m <= n, has three products: m m n, m m m and m m n. Every rank makes every matrix orthogonal.

/// Bytes of a number while a matrix is made orthogonal.
const BF16_BYTES: usize = 2;

/// Whole matrices of a step of one process.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Directions {
    /// Parameters that Muon updates.
    pub params: u64,
    /// Operations of one step of the iteration.
    pub step_operations: f64,
    /// Most memory for a matrix that is made orthogonal.
    pub working_bytes: u64,
}

impl Directions {
    /// Those of matrices with these rows and columns.
    pub fn new(matrices: impl IntoIterator<Item = [usize; 2]>) -> Self {
        let mut all = Self::default();
        for [rows, columns] in matrices {
            let (short, long) = (rows.min(columns), rows.max(columns));
            // The matrix in bf16, its norm's quotient and the next one; two squares, and a third while they are added.
            let working = BF16_BYTES * (3 * short * long + 3 * short * short);
            let [m, n] = [short, long].map(|side| side as f64);
            all.params += (rows * columns) as u64;
            all.step_operations += 2.0 * (2.0 * m * m * n + m * m * m);
            all.working_bytes = all.working_bytes.max(working as u64);
        }
        all
    }

    /// Operations of so many steps of the iteration.
    pub fn operations(&self, ns_steps: u64) -> f64 {
        ns_steps as f64 * self.step_operations
    }

    /// Bytes that cross the bus to the GPU that makes matrices orthogonal, and back as directions: `part` of them, with `elem_bytes` a number.
    pub fn bus_bytes(&self, part: f64, elem_bytes: usize) -> u64 {
        (self.params as f64 * part * elem_bytes as f64) as u64
    }

    /// Bytes of matrices that are gathered from all ranks, with `elem_bytes` a number.
    pub fn gathered_bytes(&self, elem_bytes: usize) -> u64 {
        self.params * elem_bytes as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_matrix_costs_the_same_in_both_orientations() {
        let wide = Directions::new([[2, 3]]);
        // 2 x (2 x 2 x 3 + 2 x 2 x 2 + 2 x 2 x 3) operations; three matrices of 6 and three squares of 4 numbers.
        let by_hand = Directions {
            params: 6,
            step_operations: 2.0 * 32.0,
            working_bytes: 2 * (18 + 12),
        };
        assert_eq!(wide, by_hand);
        assert_eq!(Directions::new([[3, 2]]), wide);
        assert_eq!(wide.operations(5), 320.0);
        let two = Directions::new([[2, 3], [4, 4]]);
        // One after the other: the memory is that of the larger one.
        assert_eq!((two.params, two.working_bytes), (22, 2 * 96));
        assert_eq!((two.gathered_bytes(2), two.bus_bytes(0.5, 4)), (44, 44));
    }
}
