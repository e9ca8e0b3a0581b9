//! A program expanded to uses of single ranges. Each use knows where its tiles are used next.
//!
//! Positions count uses from the plan's start. The plan's order must allow its uses to end in that order: the trainer
//! must not wait for a later use before it asks for an earlier one.

use std::ops::Range;

use super::{ByKind, Kind, Op};

/// Not a position: the tile is not used again in this plan.
pub(super) const NEVER: u32 = u32::MAX;

/// Effect of a use on its range.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum UseKind {
    Fill,
    Update,
    /// Instead of an update: a worker copies the caller's content of an external range.
    Copy,
    Gather,
    Scatter,
    /// A scatter of a range that has gradients of this step.
    Add,
    /// The trainer changes the state before the range's update, by gradients that it reads.
    Revise,
    Visit,
    /// A visit that changes what it finds.
    Rewrite,
    ExpectUpdate,
    ExpectGather,
}

impl UseKind {
    /// Whether a tile of `kind` must be in its slot, if the range has one.
    fn needs(self, kind: Kind) -> bool {
        match self {
            Self::Update | Self::ExpectUpdate => true,
            Self::Fill | Self::Copy | Self::Visit | Self::Rewrite => kind != Kind::Grad,
            Self::Gather | Self::ExpectGather => kind == Kind::Param,
            Self::Scatter | Self::Add => kind == Kind::Grad,
            Self::Revise => kind != Kind::Param,
        }
    }
}

/// One use of one range.
#[derive(Clone, Copy, Debug)]
pub(super) struct Use {
    pub(super) what: UseKind,
    pub(super) range: u32,
    /// Whether the range has state and gradients.
    trained: bool,
    /// Next position at which the range's tile of each kind is used, or [`NEVER`].
    pub(super) next: ByKind<u32>,
}

impl Use {
    /// Whether the range's tile of `kind` must be in its slot.
    pub(super) fn needs(&self, kind: Kind) -> bool {
        self.what.needs(kind) && (self.trained || kind == Kind::Param)
    }
}

/// All uses, in order.
#[derive(Debug, Default)]
pub(super) struct Plan {
    pub(super) uses: Vec<Use>,
    /// Positions of the updates, in order.
    pub(super) updates: Vec<u32>,
    /// The trainer's operations and the positions of their ranges, in order.
    pub(super) served: Vec<(Op, Vec<u32>)>,
    /// Whether the plan ends with a commit.
    pub(super) commits: bool,
}

impl Plan {
    /// Expands `ops`; `first[kind][range]` becomes the position of each tile's first use. `trained[range]` says which
    /// ranges have state and gradients, and `external[range]` of which the caller has the content: they are neither gathered nor scattered here.
    ///
    /// An update is expanded to the ranges `wanted` names; `scattered[range]` says which have gradients of this step.
    pub(super) fn new(
        ops: &[Op],
        units: &[Range<u32>],
        [trained, external]: [&[bool]; 2],
        mut wanted: impl FnMut(u32) -> bool,
        mut scattered: Vec<bool>,
        first: &mut ByKind<Vec<u32>>,
    ) -> Self {
        let mut plan = Self::default();
        let used = |unit: usize| {
            let ranges = units[unit].clone();
            ranges.filter(|&range| !external[range as usize])
        };
        let push_update = |plan: &mut Self, range: u32| {
            let what = match external[range as usize] {
                true => UseKind::Copy,
                false => UseKind::Update,
            };
            let position = plan.push(what, range);
            plan.updates.push(position);
        };
        for &op in ops {
            match op {
                Op::Update { unit } => {
                    assert!(!plan.commits, "an update after its commit");
                    for range in units[unit].clone().filter(|&range| wanted(range)) {
                        push_update(&mut plan, range);
                    }
                }
                Op::Commit => {
                    assert!(!plan.commits, "two commits in one plan");
                    plan.commits = true;
                }
                Op::Expect { unit, update } => {
                    let what = match update {
                        true => UseKind::ExpectUpdate,
                        false => UseKind::ExpectGather,
                    };
                    for range in used(unit) {
                        plan.push(what, range);
                    }
                }
                Op::UpdateAndGather { unit } => {
                    assert!(!plan.commits, "an update after its commit");
                    let mut positions = Vec::new();
                    for range in units[unit].clone() {
                        if wanted(range) {
                            push_update(&mut plan, range);
                        }
                        if !external[range as usize] {
                            positions.push(plan.push(UseKind::Gather, range));
                        }
                    }
                    plan.served.push((Op::Gather { unit }, positions));
                }
                Op::Fill { unit } => plan.serve(op, UseKind::Fill, units[unit].clone()),
                Op::Gather { unit } => plan.serve(op, UseKind::Gather, used(unit)),
                Op::Scatter { unit } => {
                    let positions = used(unit).map(|range| {
                        assert!(trained[range as usize], "gradients of what is not trained");
                        let what = match std::mem::replace(&mut scattered[range as usize], true) {
                            true => UseKind::Add,
                            false => UseKind::Scatter,
                        };
                        plan.push(what, range)
                    });
                    let positions = positions.collect();
                    plan.served.push((op, positions));
                }
                Op::Revise { unit } => plan.serve(op, UseKind::Revise, used(unit)),
                Op::Visit { unit } => plan.serve(op, UseKind::Visit, units[unit].clone()),
                Op::Rewrite { unit } => plan.serve(op, UseKind::Rewrite, units[unit].clone()),
            }
        }
        for one in &mut plan.uses {
            one.trained = trained[one.range as usize];
        }
        for first in &mut first.0 {
            first.fill(NEVER);
        }
        for position in (0..plan.uses.len()).rev() {
            let one = &mut plan.uses[position];
            for kind in Kind::ALL {
                let first = &mut first[kind][one.range as usize];
                one.next[kind] = *first;
                if one.needs(kind) {
                    *first = position as u32;
                }
            }
        }
        plan
    }

    /// Adds the trainer's operation on ranges of a unit.
    fn serve(&mut self, op: Op, what: UseKind, ranges: impl Iterator<Item = u32>) {
        let positions = ranges.map(|range| self.push(what, range)).collect();
        self.served.push((op, positions));
    }

    fn push(&mut self, what: UseKind, range: u32) -> u32 {
        let position = self.uses.len() as u32;
        self.uses.push(Use {
            what,
            range,
            trained: true,
            next: ByKind([NEVER; 3]),
        });
        position
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_update_is_woven_with_its_gather_and_uses_are_chained() {
        let ops = [
            Op::UpdateAndGather { unit: 1 },
            Op::Commit,
            Op::Gather { unit: 1 },
            Op::Scatter { unit: 1 },
            Op::Expect {
                unit: 1,
                update: true,
            },
        ];
        let mut first = ByKind::new(|_| vec![0; 3]);
        // Range 2 is already updated.
        let units = vec![0..1, 1..3];
        let trained = [true; 3];
        let wanted = |range| range == 1;
        let marks: [&[bool]; 2] = [&trained, &[false; 3]];
        let plan = Plan::new(&ops, &units, marks, wanted, vec![false; 3], &mut first);
        use UseKind::*;
        let shape: Vec<_> = plan.uses.iter().map(|u| (u.what, u.range)).collect();
        assert_eq!(
            shape,
            [
                (Update, 1),
                (Gather, 1),
                (Gather, 2),
                (Gather, 1),
                (Gather, 2),
                (Scatter, 1),
                (Scatter, 2),
                (ExpectUpdate, 1),
                (ExpectUpdate, 2),
            ]
        );
        let next = |kind: Kind| -> Vec<u32> { plan.uses.iter().map(|u| u.next[kind]).collect() };
        assert_eq!(next(Kind::Param), [1, 3, 4, 7, 8, 7, 8, NEVER, NEVER]);
        assert_eq!(next(Kind::State), [7, 7, 8, 7, 8, 7, 8, NEVER, NEVER]);
        assert_eq!(next(Kind::Grad), [5, 5, 6, 5, 6, 7, 8, NEVER, NEVER]);
        let first_of = [[NEVER, 0, 2], [NEVER, 0, 8], [NEVER, 0, 6]];
        assert_eq!(first.0, first_of.map(Vec::from));
        assert_eq!((plan.updates, plan.commits), (vec![0], true));
        assert_eq!(plan.served[0], (Op::Gather { unit: 1 }, vec![1, 2]));
    }
}
