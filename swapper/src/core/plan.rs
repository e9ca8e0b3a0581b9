//! A program expanded to uses of single ranges, each knowing where the same tile is used next.
//!
//! Positions count uses from the plan's start. An update that stands right before its unit's gather is woven with it,
//! range by range, so that the gather finds each tile still in its slot.

use std::ops::Range;

use super::{Kind, Op};

/// A position no use has: the tile is not used again in this plan.
pub(super) const NEVER: u32 = u32::MAX;

/// What is done with one range.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum UseKind {
    Fill,
    Update,
    Gather,
    Scatter,
    Visit,
    Expect,
}

impl UseKind {
    /// Whether a tile of `kind` must be in its slot.
    pub(super) fn needs(self, kind: Kind) -> bool {
        match self {
            Self::Fill | Self::Update | Self::Visit | Self::Expect => true,
            Self::Gather => kind == Kind::Param,
            Self::Scatter => false,
        }
    }
}

/// One use of one range.
#[derive(Clone, Copy, Debug)]
pub(super) struct Use {
    pub(super) what: UseKind,
    pub(super) range: u32,
    /// Where the range's tile of each kind is used next, or [`NEVER`].
    pub(super) next: [u32; 2],
}

/// What is to come, in order.
#[derive(Debug, Default)]
pub(super) struct Plan {
    pub(super) uses: Vec<Use>,
    /// Positions of the updates, in order.
    pub(super) updates: Vec<u32>,
    /// The trainer's operations and the positions of their ranges, in order.
    pub(super) served: Vec<(Op, Vec<u32>)>,
    /// Whether a commit ends it.
    pub(super) commits: bool,
}

impl Plan {
    /// Expands `ops`; `first[kind][range]` becomes the position of each tile's first use.
    ///
    /// An update is expanded to the ranges `wanted` names.
    pub(super) fn new(
        ops: &[Op],
        units: &[Range<u32>],
        mut wanted: impl FnMut(u32) -> bool,
        first: &mut [Vec<u32>; 2],
    ) -> Self {
        let mut plan = Self::default();
        let mut woven: Option<usize> = None;
        for (at, &op) in ops.iter().enumerate() {
            match op {
                Op::Update { unit } => {
                    assert!(!plan.commits, "an update after its commit");
                    if ops.get(at + 1) == Some(&Op::Gather { unit }) {
                        woven = Some(unit);
                        continue;
                    }
                    for range in units[unit].clone().filter(|&range| wanted(range)) {
                        plan.push_update(range);
                    }
                }
                Op::Commit => {
                    assert!(!plan.commits, "two commits in one plan");
                    plan.commits = true;
                }
                Op::Expect { unit } => {
                    for range in units[unit].clone() {
                        plan.push(UseKind::Expect, range);
                    }
                }
                Op::Fill { unit }
                | Op::Gather { unit }
                | Op::Scatter { unit }
                | Op::Visit { unit } => {
                    let what = match op {
                        Op::Fill { .. } => UseKind::Fill,
                        Op::Scatter { .. } => UseKind::Scatter,
                        Op::Visit { .. } => UseKind::Visit,
                        _ => UseKind::Gather,
                    };
                    let update_too = woven.take() == Some(unit);
                    let mut positions = Vec::with_capacity(units[unit].len());
                    for range in units[unit].clone() {
                        if update_too && wanted(range) {
                            plan.push_update(range);
                        }
                        positions.push(plan.push(what, range));
                    }
                    plan.served.push((op, positions));
                }
            }
        }
        for first in first.iter_mut() {
            first.fill(NEVER);
        }
        for position in (0..plan.uses.len()).rev() {
            let one = &mut plan.uses[position];
            for kind in Kind::ALL {
                let first = &mut first[kind as usize][one.range as usize];
                one.next[kind as usize] = *first;
                if one.what.needs(kind) {
                    *first = position as u32;
                }
            }
        }
        plan
    }

    fn push_update(&mut self, range: u32) {
        let position = self.push(UseKind::Update, range);
        self.updates.push(position);
    }

    fn push(&mut self, what: UseKind, range: u32) -> u32 {
        let position = self.uses.len() as u32;
        self.uses.push(Use {
            what,
            range,
            next: [NEVER; 2],
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
            Op::Update { unit: 0 },
            Op::Gather { unit: 0 },
            Op::Commit,
            Op::Gather { unit: 0 },
            Op::Scatter { unit: 0 },
            Op::Expect { unit: 0 },
        ];
        let mut first = [vec![0; 2], vec![0; 2]];
        // Range 1's update has run already.
        let plan = Plan::new(&ops, &[0..2], |range| range == 0, &mut first);
        use UseKind::*;
        let shape: Vec<_> = plan.uses.iter().map(|u| (u.what, u.range)).collect();
        assert_eq!(
            shape,
            [
                (Update, 0),
                (Gather, 0),
                (Gather, 1),
                (Gather, 0),
                (Gather, 1),
                (Scatter, 0),
                (Scatter, 1),
                (Expect, 0),
                (Expect, 1),
            ]
        );
        let next =
            |kind: Kind| -> Vec<u32> { plan.uses.iter().map(|u| u.next[kind as usize]).collect() };
        assert_eq!(next(Kind::Param), [1, 3, 4, 7, 8, 7, 8, NEVER, NEVER]);
        assert_eq!(next(Kind::State), [7, 7, 8, 7, 8, 7, 8, NEVER, NEVER]);
        assert_eq!(first, [vec![0, 2], vec![0, 8]]);
        assert_eq!((plan.updates, plan.commits), (vec![0], true));
        assert_eq!(plan.served[0], (ops[1], vec![1, 2]));
    }
}
