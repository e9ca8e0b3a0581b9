//! A step's program as data: the order of gathers, scatters and updates, and the place of the commit.
//!
//! ```text
//!   immediate | G0 G1 G2 | G2 S2 G1 S1 G0 S0 | U0 U1 U2 commit |
//!   deferred  | U0 G0 U1 G1 U2 G2 commit | G2 S2 G1 S1 G0 S0 |           updates of the step before, the same bits
//!
//!   G  gather: read parameters      S  scatter: add gradients      U  update      0, 1, 2: the unit
//! ```
//!
//! Both end with the operations expected next, so that read-ahead continues across the end of a step.

use std::collections::{BTreeSet, HashSet};

use crate::error::SwapperError;
use crate::op::Op;

/// When the updates of a step run. Both schedules give the same bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Schedule {
    /// All updates at the end of the step.
    Immediate,
    /// Each unit's update just before its first gather of the next step.
    Deferred,
}

/// The gathers and scatters of one pass, in the order in which the trainer will ask for them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StepProgram {
    ops: Vec<Op>,
}

impl StepProgram {
    /// Checks that there are only gathers, scatters and revisions.
    ///
    /// A unit may be gathered any number of times (tied embeddings), and scattered any number of times: the second scatter
    /// of a step and those after it add to the first. A revision follows a scatter.
    pub fn new(ops: Vec<Op>) -> Result<Self, SwapperError> {
        let is_of_trainer = |op: &Op| {
            matches!(
                op,
                Op::Gather { .. } | Op::Scatter { .. } | Op::Revise { .. }
            )
        };
        match ops.iter().find(|op| !is_of_trainer(op)) {
            None => Ok(Self { ops }),
            Some(other) => Err(SwapperError::Program {
                what: format!("{other:?} cannot be announced by the trainer"),
            }),
        }
    }

    /// Forward over `units` units, then backward: each unit is gathered again and then scattered.
    pub fn training(units: usize) -> Self {
        let forward = (0..units).map(|unit| Op::Gather { unit });
        let backward = (0..units)
            .rev()
            .flat_map(|unit| [Op::Gather { unit }, Op::Scatter { unit }]);
        Self {
            ops: forward.chain(backward).collect(),
        }
    }

    /// Gathers only, for evaluation.
    pub fn reading(units: impl IntoIterator<Item = usize>) -> Self {
        Self {
            ops: units.into_iter().map(|unit| Op::Gather { unit }).collect(),
        }
    }

    /// The operations, in order.
    pub fn ops(&self) -> &[Op] {
        &self.ops
    }

    /// Units in the order of their first use in the next step, each with its update if it has gradients.
    fn first_uses(&self) -> impl Iterator<Item = Op> + '_ {
        let updated: HashSet<usize> = self.scattered().collect();
        let mut seen = HashSet::new();
        self.ops.iter().filter_map(move |op| match *op {
            Op::Gather { unit } | Op::Scatter { unit } if seen.insert(unit) => {
                let update = updated.contains(&unit);
                Some(Op::Expect { unit, update })
            }
            _ => None,
        })
    }

    /// The updates that follow the program under [`Schedule::Immediate`], in the model's order.
    fn updates(&self) -> impl Iterator<Item = Op> + '_ {
        let units: BTreeSet<usize> = self.scattered().collect();
        let expect = |unit| Op::Expect { unit, update: true };
        units.into_iter().map(expect)
    }

    fn scattered(&self) -> impl Iterator<Item = usize> + '_ {
        self.ops.iter().filter_map(|op| match *op {
            Op::Scatter { unit } => Some(unit),
            _ => None,
        })
    }
}

/// Plans the updates of the `pending` units in the model's order, the commit, and `program` as the expected
/// continuation.
pub fn immediate(pending: &[usize], commit: bool, program: &StepProgram) -> Vec<Op> {
    let mut pending = pending.to_vec();
    pending.sort_unstable();
    let mut ops: Vec<Op> = pending
        .into_iter()
        .map(|unit| Op::Update { unit })
        .collect();
    ops.extend(commit.then_some(Op::Commit));
    ops.extend(&program.ops);
    ops.extend(program.updates());
    ops
}

/// Plans `program` with the update of each `pending` unit before the unit's first use, and the commit after the last
/// update.
pub fn deferred(pending: &[usize], commit: bool, program: &StepProgram) -> Vec<Op> {
    let mut left: BTreeSet<usize> = pending.iter().copied().collect();
    let mut ops = Vec::with_capacity(program.ops.len() + 2 * pending.len() + 1);
    if commit && left.is_empty() {
        ops.push(Op::Commit);
    }
    for &op in &program.ops {
        if let Op::Gather { unit } | Op::Scatter { unit } = op
            && left.remove(&unit)
        {
            match op {
                Op::Gather { .. } => ops.push(Op::UpdateAndGather { unit }),
                _ => ops.extend([Op::Update { unit }, op]),
            }
            if commit && left.is_empty() {
                ops.push(Op::Commit);
            }
        } else {
            ops.push(op);
        }
    }
    // Units that the program does not use are updated at the end.
    if !left.is_empty() {
        ops.extend(left.into_iter().map(|unit| Op::Update { unit }));
        ops.extend(commit.then_some(Op::Commit));
    }
    ops.extend(program.first_uses());
    ops
}

#[cfg(test)]
mod tests {
    use super::*;
    use Op::*;

    #[test]
    fn deferred_updates_come_just_before_the_first_gather() {
        let program = StepProgram::training(2);
        assert_eq!(
            deferred(&[0, 1], true, &program),
            [
                UpdateAndGather { unit: 0 },
                UpdateAndGather { unit: 1 },
                Commit,
                Gather { unit: 1 },
                Scatter { unit: 1 },
                Gather { unit: 0 },
                Scatter { unit: 0 },
                Expect {
                    unit: 0,
                    update: true
                },
                Expect {
                    unit: 1,
                    update: true
                },
            ]
        );
    }

    #[test]
    fn a_unit_nobody_gathers_is_updated_and_committed_too() {
        assert_eq!(
            deferred(&[0, 1], true, &StepProgram::reading([1])),
            [
                UpdateAndGather { unit: 1 },
                Update { unit: 0 },
                Commit,
                Expect {
                    unit: 1,
                    update: false
                }
            ]
        );
        assert_eq!(deferred(&[], true, &StepProgram::default()), [Commit]);
    }

    #[test]
    fn immediate_updates_everything_first() {
        assert_eq!(
            immediate(&[0, 1], true, &StepProgram::reading([0])),
            [
                Update { unit: 0 },
                Update { unit: 1 },
                Commit,
                Gather { unit: 0 }
            ]
        );
    }

    #[test]
    fn a_program_the_swapper_cannot_follow_is_refused() {
        for ops in [vec![Commit], vec![Update { unit: 0 }]] {
            assert!(matches!(
                StepProgram::new(ops),
                Err(SwapperError::Program { .. })
            ));
        }
        let again = [Gather { unit: 0 }, Scatter { unit: 0 }].repeat(2);
        assert!(StepProgram::new(again).is_ok());
    }
}
