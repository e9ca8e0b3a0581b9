//! ZeRO's stages: which parts of the state the ranks divide among themselves.
//!
//! ```text
//!   stage   state    gradients   parameters          in a step
//!   0       each     each        each                gradients are summed for everyone, everyone updates everything
//!   1       shards   each        each, gathered      weights gathered once; gradients kept whole until backward ends, then summed to shards
//!   2       shards   shards      each, gathered      weights gathered once; gradients summed to shards as they come
//!   3       shards   shards      shards              weights gathered unit by unit, in forward and again in backward
//! ```
//!
//! Lower stages move less and hold more. With one rank nothing is divided: stages then differ in what is held
//! and copied, but not in results.

use serde::{Serialize, Serializer};

/// Parts of the state that are divided; each stage includes the one before.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum Stage {
    /// Stage 0: plain data parallelism.
    Nothing,
    /// Stage 1.
    State,
    /// Stage 2.
    Gradients,
    /// Stage 3.
    #[default]
    Parameters,
}

impl Stage {
    /// Returns the stage with DeepSpeed's number; `None` if there is none.
    pub fn from_number(number: u64) -> Option<Self> {
        [
            Self::Nothing,
            Self::State,
            Self::Gradients,
            Self::Parameters,
        ]
        .get(usize::try_from(number).ok()?)
        .copied()
    }

    /// DeepSpeed's number.
    pub fn number(self) -> u64 {
        self as u64
    }

    /// Returns whether each rank keeps only a part of the tiles.
    pub fn divides_state(self) -> bool {
        self >= Self::State
    }

    /// Returns whether a unit's gradients are summed to shards as soon as they are complete.
    pub fn divides_gradients(self) -> bool {
        self >= Self::Gradients
    }

    /// Returns whether a unit's weights are released after forward and gathered again for backward.
    pub fn divides_parameters(self) -> bool {
        self >= Self::Parameters
    }
}

impl Serialize for Stage {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_u64(self.number())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stage_has_deepspeeds_number() {
        for number in 0..4 {
            assert_eq!(Stage::from_number(number).map(Stage::number), Some(number));
        }
        assert_eq!(Stage::from_number(4), None);
        assert_eq!(Stage::from_number(u64::MAX), None);
    }
}
