//! The order of a step as data: what is gathered, computed and scattered, and when.
//!
//! ```text
//!   one after the other   G0 F0 G1 F1 G2 F2 .. GH head RH SH  GL BL RL SL .. G1 B1 R1 S1  B0 R0 S0
//!   ahead                 G0 G1 F0 G2 F1 ..    GL head RH  GL-1 BL RL SH  GL-2 BL-1 RL-1 SL ..  B0 R0 S1 S0
//! ```
//!
//! The diagram shows stage 3. In lower stages weights stay from forward to backward, so backward gathers
//! nothing. Below stage 2 gradients stay whole too, and all R and S follow B0.
//!
//! A unit's weights are released after the last turn that computes with them, or before they are gathered
//! again. Nothing may read their buffer after that.
//!
//! With several groups of micro-batches, forward and backward run once for each group. The gradients leave in the last one
//! only. In later groups only blocks are gathered, and in lower stages nothing: the embedding, the head and, in these
//! stages, every block have a buffer of their own.
//!
//! With "ahead", a unit's weights arrive while the previous unit computes, and its gradients leave while the
//! next one computes. This needs one more buffer for weights and one more for gradients.

use std::fmt;

use swapper::{Op, StepProgram};

use training_run::config::Stage;

/// Index of the embedding among the units.
pub(super) const EMBEDDING: usize = 0;

/// Buffers for blocks when weights are gathered ahead: for the unit that computes, the next one, and the one
/// whose gradients leave.
const BLOCK_BUFFERS_AHEAD: usize = 3;

/// Returns the number of buffers for the weights of blocks in a model of `units` units: the most that hold
/// weights at a time.
pub(super) fn block_buffers(units: usize, ahead: bool, stage: Stage) -> usize {
    if !stage.divides_parameters() {
        return units - 2;
    }
    if ahead { BLOCK_BUFFERS_AHEAD } else { 1 }
}

/// One operation of a step on one unit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Turn {
    /// Starts gathering the weights into a buffer, from the tiles of all ranks.
    Gather(usize),
    /// Starts gathering them again, from the copy that the ranks of the node have kept of the last gather.
    GatherCopy(usize),
    /// Runs the forward pass of the embedding or a block.
    Forward(usize),
    /// Computes the loss and its gradients.
    Head,
    /// Computes the gradients of the embedding or a block and of its input.
    Backward(usize),
    /// Starts moving out the complete gradients.
    Reduce(usize),
    /// Hands the gradients to the swapper.
    Scatter(usize),
    /// Replaces the gradients of a block by Muon's directions. What comes before the first one is what the norm of all gradients waits for.
    Orthogonalize(usize),
    /// Goes on to the next group of micro-batches. What comes before the first one belongs to the first group.
    NextGroup,
}

impl Turn {
    /// Returns whether the turn computes. The swapper records the others, which only move data.
    pub(super) fn computes(self) -> bool {
        !matches!(
            self,
            Self::Gather(_) | Self::GatherCopy(_) | Self::Scatter(_) | Self::NextGroup
        )
    }

    /// Returns whether the turn brings the weights of `unit` into a buffer.
    fn gathers(self, unit: usize) -> bool {
        self == Self::Gather(unit) || self == Self::GatherCopy(unit)
    }

    /// Describes the turn for a person; `head` is the last unit.
    pub(super) fn words(self, head: usize) -> String {
        let (what, unit) = match self {
            Self::Gather(unit) | Self::GatherCopy(unit) => ("weights", unit),
            Self::Forward(unit) => ("forward", unit),
            Self::Head => ("loss", head),
            Self::Backward(unit) => ("backward", unit),
            Self::Reduce(unit) | Self::Scatter(unit) => ("gradients", unit),
            Self::Orthogonalize(unit) => ("directions", unit),
            Self::NextGroup => return "next micro-batches".to_owned(),
        };
        format!("{what}, unit {} of {}", unit + 1, head + 1)
    }

    /// Returns the units whose gathered weights the turn computes with; `head` is the last unit.
    pub(super) fn weights(self, head: usize) -> Vec<usize> {
        match self {
            // The embedding's gradient needs no weights.
            Self::Backward(EMBEDDING) => vec![],
            Self::Forward(unit) | Self::Backward(unit) => vec![unit],
            // A tied head projects with the embedding's weights.
            Self::Head => vec![EMBEDDING, head],
            Self::Gather(_)
            | Self::GatherCopy(_)
            | Self::Reduce(_)
            | Self::Scatter(_)
            | Self::Orthogonalize(_)
            | Self::NextGroup => vec![],
        }
    }
}

impl fmt::Display for Turn {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Gather(unit) => write!(f, "gather unit {unit}"),
            Self::GatherCopy(unit) => write!(f, "gather the copy of unit {unit}"),
            Self::Forward(unit) => write!(f, "forward unit {unit}"),
            Self::Head => write!(f, "head"),
            Self::Backward(unit) => write!(f, "backward unit {unit}"),
            Self::Reduce(unit) => write!(f, "reduce unit {unit}"),
            Self::Scatter(unit) => write!(f, "scatter unit {unit}"),
            Self::Orthogonalize(unit) => write!(f, "orthogonalize unit {unit}"),
            Self::NextGroup => write!(f, "next group"),
        }
    }
}

/// The turns of a pass over all units, in order.
pub(super) struct Pass(Vec<PlannedTurn>);

/// A turn with the weights it needs.
pub(super) struct PlannedTurn {
    pub(super) turn: Turn,
    /// Units whose weights the turn computes with.
    pub(super) uses: Vec<usize>,
    /// Those units whose weights are not used again before they are gathered again.
    pub(super) gives_back: Vec<usize>,
}

impl Pass {
    /// The turns of a training step over `units` units; the last unit is the head. The micro-batches are divided into
    /// `groups`. With `copies`, the node keeps a copy of each unit's weights.
    pub(super) fn training(
        units: usize,
        ahead: bool,
        stage: Stage,
        groups: usize,
        copies: bool,
    ) -> Self {
        let mut turns = training(units, ahead, stage, groups);
        if copies {
            let mut gathered = vec![false; units];
            for turn in &mut turns {
                if let Turn::Gather(unit) = *turn
                    && std::mem::replace(&mut gathered[unit], true)
                {
                    *turn = Turn::GatherCopy(unit);
                }
            }
        }
        Self::new(turns, units - 1)
    }

    /// Adds the turns after the norm of all gradients is known, with Muon. The blocks come in the order of backward: the first one is needed
    /// first in the next step.
    pub(super) fn with_directions(mut self, head: usize) -> Self {
        self.0.extend((1..head).rev().map(|unit| PlannedTurn {
            turn: Turn::Orthogonalize(unit),
            uses: Vec::new(),
            gives_back: Vec::new(),
        }));
        self
    }

    /// The turns of a forward pass alone.
    pub(super) fn evaluation(units: usize, ahead: bool) -> Self {
        Self::new(
            [forward(units, ahead), vec![Turn::Head]].concat(),
            units - 1,
        )
    }

    fn new(step_order: Vec<Turn>, head: usize) -> Self {
        let planned = |(at, &turn): (usize, &Turn)| {
            let uses = turn.weights(head);
            let last = |unit: &&usize| {
                let mut later = step_order[at + 1..].iter();
                let next =
                    later.find(|&&turn| turn.gathers(**unit) || turn.weights(head).contains(unit));
                next.is_none_or(|next| next.gathers(**unit))
            };
            PlannedTurn {
                turn,
                gives_back: uses.iter().filter(last).copied().collect(),
                uses,
            }
        };
        Self(step_order.iter().enumerate().map(planned).collect())
    }

    pub(super) fn step_order(&self) -> &[PlannedTurn] {
        &self.0
    }

    /// The turns up to where the norm of all gradients is known, and those after it.
    pub(super) fn around_norm(&self) -> (&[PlannedTurn], &[PlannedTurn]) {
        let is_after = |planned: &PlannedTurn| matches!(planned.turn, Turn::Orthogonalize(_));
        let after = self.0.iter().position(is_after);
        self.0.split_at(after.unwrap_or(self.0.len()))
    }

    /// Converts the turns to the program that the swapper follows; copies do not concern it.
    pub(super) fn program(&self) -> StepProgram {
        program(&self.0)
    }
}

/// Converts turns to the program that the swapper follows.
pub(super) fn program(turns: &[PlannedTurn]) -> StepProgram {
    let ops = turns.iter().flat_map(|planned| match planned.turn {
        Turn::Gather(unit) => vec![Op::Gather { unit }],
        Turn::Scatter(unit) => vec![Op::Scatter { unit }],
        Turn::Orthogonalize(unit) => vec![Op::Revise { unit }, Op::Scatter { unit }],
        _ => vec![],
    });
    StepProgram::new(ops.collect()).expect("gathers, scatters and revisions")
}

/// Lists the turns of a training step over `units` units, of which the last is the head, with its micro-batches in `groups`.
fn training(units: usize, ahead: bool, stage: Stage, groups: usize) -> Vec<Turn> {
    let mut last = backward(units, ahead);
    let leaves = |turn: &Turn| matches!(turn, Turn::Reduce(_) | Turn::Scatter(_));
    let earlier: Vec<Turn> = last.iter().copied().filter(|turn| !leaves(turn)).collect();
    if !stage.divides_gradients() {
        let (moved, computed): (Vec<_>, Vec<_>) = last.into_iter().partition(leaves);
        last = [computed, moved].concat();
    }
    let mut step_order = Vec::new();
    for _ in 1..groups {
        step_order.extend(forward(units, ahead));
        step_order.extend(&earlier);
        step_order.push(Turn::NextGroup);
    }
    step_order.extend(forward(units, ahead));
    step_order.extend(last);
    let mut gathered = vec![false; units];
    step_order.retain(|turn| match *turn {
        Turn::Gather(unit) => {
            let has_own_buffer =
                unit == EMBEDDING || unit == units - 1 || !stage.divides_parameters();
            let again = std::mem::replace(&mut gathered[unit], true);
            !(again && has_own_buffer)
        }
        _ => true,
    });
    step_order
}

/// Lists the turns of head and backward pass in stage 3.
fn backward(units: usize, ahead: bool) -> Vec<Turn> {
    use Turn::*;
    let head = units - 1;
    let mut step_order = Vec::new();
    if !ahead {
        step_order.extend([Head, Reduce(head), Scatter(head)]);
        for unit in (1..head).rev() {
            step_order.extend([Gather(unit), Backward(unit), Reduce(unit), Scatter(unit)]);
        }
        step_order.extend([Backward(EMBEDDING), Reduce(EMBEDDING), Scatter(EMBEDDING)]);
        return step_order;
    }
    step_order.extend((head > 1).then_some(Gather(head - 1)));
    step_order.extend([Head, Reduce(head)]);
    for unit in (1..head).rev() {
        step_order.extend((unit > 1).then_some(Gather(unit - 1)));
        step_order.extend([Backward(unit), Reduce(unit), Scatter(unit + 1)]);
    }
    step_order.extend([Backward(EMBEDDING), Reduce(EMBEDDING)]);
    step_order.extend([Scatter(1), Scatter(EMBEDDING)]);
    step_order
}

/// Lists the turns of a forward pass up to the head's own turn.
fn forward(units: usize, ahead: bool) -> Vec<Turn> {
    use Turn::*;
    let head = units - 1;
    if !ahead {
        let mut step_order: Vec<Turn> = (0..head)
            .flat_map(|unit| [Gather(unit), Forward(unit)])
            .collect();
        step_order.push(Gather(head));
        return step_order;
    }
    let mut step_order = vec![Gather(EMBEDDING)];
    step_order.extend((0..head).flat_map(|unit| [Gather(unit + 1), Forward(unit)]));
    step_order
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Simulates `step_order` and checks that every turn has its weights and that a buffer is always free.
    fn check(units: usize, ahead: bool, stage: Stage, groups: usize, copies: bool) {
        let head = units - 1;
        let buffers = block_buffers(units, ahead, stage);
        let mut weights: Vec<usize> = Vec::new();
        let (mut forward, mut backward, mut reduced) = (0, units, vec![false; units]);
        let (mut scattered, mut given_back) = (Vec::new(), Vec::new());
        let mut left = groups;
        for planned in Pass::training(units, ahead, stage, groups, copies).step_order() {
            for unit in &planned.uses {
                let there = weights.contains(unit) && !given_back.contains(unit);
                assert!(there, "no weights for unit {unit}");
            }
            match planned.turn {
                Turn::Gather(unit) | Turn::GatherCopy(unit) => {
                    weights.retain(|&held| held != unit);
                    weights.push(unit);
                    given_back.retain(|&held| held != unit);
                    let blocks = |&&held: &&usize| held != EMBEDDING && held != head;
                    if weights.iter().filter(blocks).count() > buffers {
                        let oldest = weights.iter().position(|held| blocks(&held)).unwrap();
                        let given_up = weights.remove(oldest);
                        assert!(
                            !reduced[given_up] || scattered.contains(&given_up),
                            "unit {given_up}'s gradients are still in its buffer"
                        );
                    }
                }
                Turn::Forward(unit) => {
                    assert_eq!(unit, forward);
                    forward += 1;
                }
                Turn::Head => {
                    assert_eq!((forward, backward), (head, units));
                    backward = head;
                }
                Turn::Backward(unit) => {
                    assert_eq!(unit + 1, backward);
                    backward = unit;
                }
                Turn::NextGroup => {
                    assert_eq!((forward, backward), (head, EMBEDDING));
                    (forward, backward) = (0, units);
                    left -= 1;
                }
                Turn::Reduce(unit) => {
                    assert_eq!(left, 1, "gradients leave in the last group");
                    let gone_back = if stage.divides_gradients() { unit } else { 0 };
                    assert_eq!(gone_back, backward);
                    reduced[unit] = true;
                }
                Turn::Scatter(unit) => {
                    assert!(reduced[unit]);
                    scattered.push(unit);
                }
                Turn::Orthogonalize(_) => panic!("a step without Muon"),
            }
            given_back.extend(&planned.gives_back);
        }
        assert_eq!(scattered, (0..units).rev().collect::<Vec<_>>());
        given_back.sort_unstable();
        assert_eq!(given_back, (0..units).collect::<Vec<_>>());
        assert_eq!(left, 1);
    }

    #[test]
    fn every_turn_has_its_weights_and_a_buffer() {
        for units in [3, 4, 5, 26] {
            for stage in [0, 1, 2, 3].map(|number| Stage::from_number(number).unwrap()) {
                for (groups, copies) in [(1, false), (1, true), (2, false), (3, false), (3, true)] {
                    check(units, false, stage, groups, copies);
                    check(units, true, stage, groups, copies);
                }
            }
        }
    }

    #[test]
    fn an_evaluation_uses_what_it_gathered_and_gives_all_of_it_back() {
        for ahead in [false, true] {
            let mut given_back: Vec<usize> = Vec::new();
            for planned in Pass::evaluation(5, ahead).step_order() {
                assert!(planned.uses.iter().all(|unit| !given_back.contains(unit)));
                given_back.extend(&planned.gives_back);
            }
            assert_eq!(given_back, [1, 2, 3, 0, 4]);
        }
    }

    #[test]
    fn weights_are_gathered_twice_a_group_in_stage_3_and_once_a_step_in_the_others() {
        for groups in [1, 3] {
            for (number, count) in [(0, 1), (1, 1), (2, 1), (3, 2 * groups)] {
                let step_order = training(6, true, Stage::from_number(number).unwrap(), groups);
                let gathers = |unit| {
                    let turns = step_order.iter();
                    turns.filter(|&&turn| turn == Turn::Gather(unit)).count()
                };
                assert_eq!(gathers(2), count, "stage {number}, {groups} groups");
                assert_eq!([gathers(EMBEDDING), gathers(5)], [1, 1], "stage {number}");
            }
        }
    }

    #[test]
    fn one_group_is_a_step_without_groups() {
        for ahead in [false, true] {
            let one = [forward(5, ahead), backward(5, ahead)].concat();
            assert_eq!(training(5, ahead, Stage::Parameters, 1), one);
        }
    }

    #[test]
    fn with_copies_every_unit_is_read_from_its_tiles_once_and_gathered_as_often() {
        for ahead in [false, true] {
            let units = 6;
            let [all, copies] = [false, true]
                .map(|copies| Pass::training(units, ahead, Stage::Parameters, 2, copies));
            let read = copies.program();
            let gathers = |op: &&Op| matches!(op, Op::Gather { .. });
            assert_eq!(read.ops().iter().filter(gathers).count(), units);
            let gathered = |pass: &Pass| {
                let turns = pass.step_order().iter();
                turns
                    .filter(|planned| (0..units).any(|unit| planned.turn.gathers(unit)))
                    .count()
            };
            assert_eq!(gathered(&copies), gathered(&all));
        }
    }

    #[test]
    fn gradients_leave_as_they_come_from_stage_2_on_and_at_the_end_before() {
        for (number, at_the_end) in [(0, true), (1, true), (2, false), (3, false)] {
            let step_order = training(6, true, Stage::from_number(number).unwrap(), 1);
            let at = |turn| step_order.iter().position(|&found| found == turn).unwrap();
            let last = at(Turn::Backward(EMBEDDING));
            assert_eq!(at(Turn::Reduce(5)) > last, at_the_end, "stage {number}");
        }
    }

    #[test]
    fn weights_come_while_the_unit_before_computes() {
        let step_order = training(6, true, Stage::Parameters, 1);
        let at = |turn| step_order.iter().position(|&found| found == turn).unwrap();
        for unit in 0..4 {
            assert!(at(Turn::Gather(unit + 1)) < at(Turn::Forward(unit)));
        }
        for unit in 2..5 {
            let again = step_order
                .iter()
                .rposition(|&found| found == Turn::Gather(unit - 1));
            assert!(again.unwrap() < at(Turn::Backward(unit)));
        }
    }
}
