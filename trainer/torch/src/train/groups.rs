//! Groups of micro-batches, which pass through the model one after the other, and the sums of gradients between them.
//!
//! ```text
//!   one group of 4     G F F F F .. G B B B B        G  gather a unit    F, B  a micro-batch's forward and backward
//!   two groups of 2    G F F .. G B B  G F F .. G B B
//! ```
//!
//! A smaller group keeps fewer activations, so less is recomputed in backward. It costs a gather of each block in forward and in
//! backward, 4 bytes a parameter with 16-bit parameters, and memory for a sum of all gradients, 4 bytes a parameter.
//!
//! The order and the precision of sums do not depend on the groups: each parameter's gradients are added in the order of
//! micro-batches, in fp32, and the sum is rounded once. So the size of a group changes no bit.

use std::ops::Range;

use crate::compute::{ComputeError, Engine, GradSink, GradSums};

use super::step_order::EMBEDDING;

/// Division of a step's micro-batches into groups of the same size, of which the last may be smaller.
#[derive(Clone, Copy, Debug)]
pub(super) struct Groups {
    micro_batches: usize,
    size: usize,
}

impl Groups {
    /// Divides `micro_batches` into groups of `size`, at most all of them.
    pub(super) fn new(micro_batches: usize, size: usize) -> Self {
        assert!((1..=micro_batches).contains(&size));
        Self {
            micro_batches,
            size,
        }
    }

    pub(super) fn count(self) -> usize {
        self.micro_batches.div_ceil(self.size)
    }

    /// Micro-batches of the first group.
    pub(super) fn first(self) -> Range<usize> {
        0..self.size
    }

    /// Micro-batches of the group that follows `group`.
    pub(super) fn after(self, group: &Range<usize>) -> Range<usize> {
        group.end..self.micro_batches.min(group.end + self.size)
    }

    /// Returns whether no group follows `group`.
    pub(super) fn ends_with(self, group: &Range<usize>) -> bool {
        group.end == self.micro_batches
    }
}

/// Memory for the sums of all units' gradients from one group to the next.
pub(super) struct GroupSums {
    units: Vec<GradSums>,
    /// The head's part of the gradients of a tied embedding. It is a sum of its own, because the embedding's part is added
    /// later in each group.
    tied: Option<GradSums>,
}

impl GroupSums {
    /// # Errors
    /// Out of memory.
    pub(super) fn new(engine: &Engine) -> Result<Self, ComputeError> {
        let units = 0..engine.units().len();
        let tied = engine.config().tied.then(|| engine.new_sums(EMBEDDING));
        Ok(Self {
            units: units
                .map(|unit| engine.new_sums(unit))
                .collect::<Result<_, _>>()?,
            tied: tied.transpose()?,
        })
    }
}

/// Gradients of a step until they are complete.
pub(super) struct Sinks {
    units: Vec<Option<GradSink>>,
    tied: Option<GradSink>,
}

impl Sinks {
    pub(super) fn new(units: usize) -> Self {
        Self {
            units: (0..units).map(|_| None).collect(),
            tied: None,
        }
    }

    /// Takes the gradients of `unit` in earlier groups; an empty sum from `empty` in the first group.
    pub(super) fn take_or<E>(
        &mut self,
        unit: usize,
        empty: impl FnOnce() -> Result<GradSink, E>,
    ) -> Result<GradSink, E> {
        self.units[unit].take().map_or_else(empty, Ok)
    }

    /// Takes the head's part of the gradients of a tied embedding, like [`Sinks::take_or`].
    pub(super) fn take_tied(&mut self, engine: &Engine) -> Option<GradSink> {
        let empty = || engine.new_grads(EMBEDDING);
        (engine.config().tied).then(|| self.tied.take().unwrap_or_else(empty))
    }

    /// Keeps the gradients of `unit` for the next group, whose memory is `sums`, or until they leave.
    pub(super) fn put(
        &mut self,
        unit: usize,
        mut grads: GradSink,
        sums: Option<&GroupSums>,
    ) -> Result<(), ComputeError> {
        if let Some(sums) = sums {
            grads.keep_in(&sums.units[unit])?;
        }
        self.units[unit] = Some(grads);
        Ok(())
    }

    /// Like [`Sinks::put`], for the head's part of the gradients of a tied embedding.
    pub(super) fn put_tied(
        &mut self,
        grads: Option<GradSink>,
        sums: Option<&GroupSums>,
    ) -> Result<(), ComputeError> {
        self.tied = grads;
        if let (Some(grads), Some(sums)) = (&mut self.tied, sums) {
            grads.keep_in(sums.tied.as_ref().expect("a tied model has memory for it"))?;
        }
        Ok(())
    }

    /// Takes the complete gradients of `unit`.
    pub(super) fn complete(&mut self, unit: usize) -> GradSink {
        self.units[unit]
            .take()
            .expect("its backward turn came before")
    }

    /// Takes the head's part of the complete gradients of a tied embedding.
    pub(super) fn complete_tied(&mut self) -> Option<GradSink> {
        self.tied.take()
    }

    /// Bytes of gradients that have not started to leave.
    pub(super) fn held_bytes(&self) -> u64 {
        let held = self.units.iter().chain([&self.tied]).flatten();
        held.map(|grads| grads.size_bytes() as u64).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn groups_have_every_micro_batch_once_in_order() {
        for micro_batches in 1..9 {
            for size in 1..=micro_batches {
                let groups = Groups::new(micro_batches, size);
                let (mut group, mut count) = (groups.first(), 1);
                let mut seen: Vec<usize> = group.clone().collect();
                while !groups.ends_with(&group) {
                    group = groups.after(&group);
                    seen.extend(group.clone());
                    count += 1;
                }
                assert_eq!(seen, (0..micro_batches).collect::<Vec<_>>());
                assert_eq!(count, groups.count());
            }
        }
    }
}
