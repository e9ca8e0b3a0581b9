//! The order of a step as data: what is gathered, computed and handed over, and when.
//!
//! ```text
//!   one after the other   G0 F0 G1 F1 G2 F2 .. GH head RH SH  GL BL RL SL .. G1 B1 R1 S1  B0 R0 S0
//!   ahead                 G0 G1 F0 G2 F1 ..    GL head RH  GL-1 BL RL SH  GL-2 BL-1 RL-1 SL ..  B0 R0 S1 S0
//! ```
//!
//! Ahead, a unit's weights come while the unit before it computes, and its gradients leave while the next one does: one
//! more unit has its weights in a buffer, one more its gradients.

use std::fmt;

use swapper::{Op, StepProgram};

/// The embedding's number among the units.
pub(super) const EMBEDDING: usize = 0;

/// Buffers that blocks need when weights come ahead: the unit that computes, the next one, the one whose gradients leave.
pub(super) const BLOCK_BUFFERS_AHEAD: usize = 3;

/// One thing a step does with one unit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Turn {
    /// Its weights begin to come into a buffer.
    Gather(usize),
    /// Embedding or block.
    Forward(usize),
    /// Loss and its gradients.
    Head,
    /// Embedding or block: its gradients, and its input's.
    Backward(usize),
    /// Its gradients are complete and begin to leave.
    Reduce(usize),
    /// Its gradients are handed to the swapper.
    Scatter(usize),
}

impl Turn {
    /// Whether it computes. The others move, which the swapper tells of.
    pub(super) fn computes(self) -> bool {
        !matches!(self, Self::Gather(_) | Self::Scatter(_))
    }

    /// The unit whose weights it computes with, that were gathered for it; `head` is the last.
    pub(super) fn weights(self, head: usize) -> Option<usize> {
        match self {
            // The embedding's gradient needs no weights.
            Self::Backward(EMBEDDING) => None,
            Self::Forward(unit) | Self::Backward(unit) => Some(unit),
            Self::Head => Some(head),
            Self::Gather(_) | Self::Reduce(_) | Self::Scatter(_) => None,
        }
    }
}

impl fmt::Display for Turn {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Gather(unit) => write!(f, "gather unit {unit}"),
            Self::Forward(unit) => write!(f, "forward unit {unit}"),
            Self::Head => write!(f, "head"),
            Self::Backward(unit) => write!(f, "backward unit {unit}"),
            Self::Reduce(unit) => write!(f, "reduce unit {unit}"),
            Self::Scatter(unit) => write!(f, "scatter unit {unit}"),
        }
    }
}

/// A training step over `units` units, the last of which is the head.
pub(super) fn training(units: usize, ahead: bool) -> Vec<Turn> {
    use Turn::*;
    let head = units - 1;
    let mut turns = forward(units, ahead);
    if !ahead {
        turns.extend([Head, Reduce(head), Scatter(head)]);
        for unit in (1..head).rev() {
            turns.extend([Gather(unit), Backward(unit), Reduce(unit), Scatter(unit)]);
        }
        turns.extend([Backward(EMBEDDING), Reduce(EMBEDDING), Scatter(EMBEDDING)]);
        return turns;
    }
    turns.extend((head > 1).then_some(Gather(head - 1)));
    turns.extend([Head, Reduce(head)]);
    for unit in (1..head).rev() {
        turns.extend((unit > 1).then_some(Gather(unit - 1)));
        turns.extend([Backward(unit), Reduce(unit), Scatter(unit + 1)]);
    }
    turns.extend([Backward(EMBEDDING), Reduce(EMBEDDING)]);
    turns.extend([Scatter(1), Scatter(EMBEDDING)]);
    turns
}

/// A forward pass up to the head's own turn, which is the caller's.
pub(super) fn forward(units: usize, ahead: bool) -> Vec<Turn> {
    use Turn::*;
    let head = units - 1;
    if !ahead {
        let mut turns: Vec<Turn> = (0..head)
            .flat_map(|unit| [Gather(unit), Forward(unit)])
            .collect();
        turns.push(Gather(head));
        return turns;
    }
    let mut turns = vec![Gather(EMBEDDING)];
    turns.extend((0..head).flat_map(|unit| [Gather(unit + 1), Forward(unit)]));
    turns
}

/// What the swapper is told of `turns`.
pub(super) fn program(turns: &[Turn]) -> StepProgram {
    let ops = turns.iter().filter_map(|turn| match *turn {
        Turn::Gather(unit) => Some(Op::Gather { unit }),
        Turn::Scatter(unit) => Some(Op::Scatter { unit }),
        _ => None,
    });
    StepProgram::new(ops.collect()).expect("gathers, and one scatter a unit")
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Follows `turns` and checks that each has what it needs, and that buffers never run out.
    fn check(units: usize, ahead: bool) {
        let head = units - 1;
        let buffers = if ahead { BLOCK_BUFFERS_AHEAD } else { 1 };
        let mut weights: Vec<usize> = Vec::new();
        let (mut forward, mut backward, mut reduced) = (0, units, vec![false; units]);
        let mut scattered = Vec::new();
        for turn in training(units, ahead) {
            match turn {
                Turn::Gather(unit) => {
                    weights.retain(|&held| held != unit);
                    weights.push(unit);
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
                    assert!(weights.contains(&unit), "no weights for unit {unit}");
                    forward += 1;
                }
                Turn::Head => {
                    assert_eq!((forward, backward), (head, units));
                    assert!(weights.contains(&head) && weights.contains(&EMBEDDING));
                    backward = head;
                }
                Turn::Backward(unit) => {
                    assert_eq!(unit + 1, backward);
                    assert!(weights.contains(&unit), "no weights for unit {unit}");
                    backward = unit;
                }
                Turn::Reduce(unit) => {
                    assert_eq!(unit, backward);
                    reduced[unit] = true;
                }
                Turn::Scatter(unit) => {
                    assert!(reduced[unit]);
                    scattered.push(unit);
                }
            }
        }
        assert_eq!(scattered, (0..units).rev().collect::<Vec<_>>());
    }

    #[test]
    fn every_turn_has_its_weights_and_a_buffer() {
        for units in [3, 4, 5, 26] {
            check(units, false);
            check(units, true);
        }
    }

    #[test]
    fn weights_come_while_the_unit_before_computes() {
        let turns = training(6, true);
        let at = |turn| turns.iter().position(|&found| found == turn).unwrap();
        for unit in 0..4 {
            assert!(at(Turn::Gather(unit + 1)) < at(Turn::Forward(unit)));
        }
        for unit in 2..5 {
            let again = turns
                .iter()
                .rposition(|&found| found == Turn::Gather(unit - 1));
            assert!(again.unwrap() < at(Turn::Backward(unit)));
        }
    }
}
