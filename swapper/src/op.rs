//! The operations of a step.

/// One operation on one unit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Op {
    /// The trainer provides the first content of parameters and state.
    Fill {
        /// Index of the unit.
        unit: usize,
    },
    /// The optimizer updates the unit, if its gradients are there.
    Update {
        /// Index of the unit.
        unit: usize,
    },
    /// The trainer reads the parameters.
    Gather {
        /// Index of the unit.
        unit: usize,
    },
    /// Each tile is updated and then gathered while it is still in its slot.
    UpdateAndGather {
        /// Index of the unit.
        unit: usize,
    },
    /// The trainer provides the gradients.
    Scatter {
        /// Index of the unit.
        unit: usize,
    },
    /// The trainer reads gradients that have come, and reads and changes the state of the unit before its update. The step must then be finished.
    Revise {
        /// Index of the unit.
        unit: usize,
    },
    /// The trainer reads parameters and state.
    Visit {
        /// Index of the unit.
        unit: usize,
    },
    /// The trainer reads and changes parameters and state.
    Rewrite {
        /// Index of the unit.
        unit: usize,
    },
    /// The next step is expected to use the unit here: a target for read-ahead.
    Expect {
        /// Index of the unit.
        unit: usize,
        /// Whether the unit will be updated, or only gathered.
        update: bool,
    },
    /// All earlier fills, rewrites and updates become a generation.
    Commit,
}
