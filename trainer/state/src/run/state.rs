//! The blob that is committed with a generation: the state of the run after the generation's step.

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::metrics::StepMetrics;
use crate::overflow::OverflowState;

const VERSION: u32 = 1;

/// State of a run apart from its tiles. A run resumes from this and the tiles of the same generation.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RunState {
    version: u32,
    /// Number of steps done.
    pub step: u64,
    /// Number of tokens trained on.
    pub tokens: u64,
    /// First sample of the next step.
    pub next_sample: u64,
    /// Seed of the initial weights and of the order of samples.
    pub seed: u64,
    /// Learning rate of the last step.
    pub lr: f64,
    /// Skipped steps and loss scale. `None` before the first step.
    #[serde(default)]
    pub overflow: Option<OverflowState>,
    /// Settings that the run was trained with; a difference is reported when it resumes.
    pub trained_with: Value,
    /// Metrics of the last step, for a crash between the commit and the step's line in `metrics.jsonl`.
    pub last: Option<StepMetrics>,
}

/// Error of reading a committed blob.
#[derive(Debug, thiserror::Error)]
pub enum StateError {
    #[error(
        "the committed state of the run cannot be read: {0}. Resume from a checkpoint with --resume-from STEP (`trainer runs` lists them), or start again with --fresh"
    )]
    Unreadable(#[from] serde_json::Error),
    #[error(
        "the committed state of the run has format version {found}, but this trainer reads version {VERSION}: use the trainer that wrote it, or start again with --fresh"
    )]
    Version { found: u32 },
}

impl RunState {
    /// Makes the state before the first step.
    pub fn new(seed: u64, trained_with: Value) -> Self {
        Self {
            version: VERSION,
            step: 0,
            tokens: 0,
            next_sample: 0,
            seed,
            lr: 0.0,
            overflow: None,
            trained_with,
            last: None,
        }
    }

    /// Encodes the state for a commit.
    pub fn encode(&self) -> Vec<u8> {
        serde_json::to_vec(self).expect("the state is plain data")
    }

    /// Decodes the blob of a commit.
    ///
    /// # Errors
    /// The bytes are not a state, or have another version.
    pub fn decode(bytes: &[u8]) -> Result<Self, StateError> {
        #[derive(Deserialize)]
        struct StateVersion {
            version: u32,
        }
        let StateVersion { version } = serde_json::from_slice(bytes)?;
        if version != VERSION {
            return Err(StateError::Version { found: version });
        }
        Ok(serde_json::from_slice(bytes)?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_state_is_restored_unchanged() {
        let mut state = RunState::new(u64::MAX, serde_json::json!({"lr": 0.1}));
        state.lr = f64::from_bits(0x3FD5_5555_5555_5557);
        assert_eq!(RunState::decode(&state.encode()).unwrap(), state);
    }

    #[test]
    fn another_version_is_refused_by_number() {
        let text = String::from_utf8(RunState::new(1, Value::Null).encode()).unwrap();
        let newer = text.replace("\"version\":1", "\"version\":7");
        assert!(matches!(
            RunState::decode(newer.as_bytes()),
            Err(StateError::Version { found: 7 })
        ));
        assert!(matches!(
            RunState::decode(b"nonsense"),
            Err(StateError::Unreadable(_))
        ));
    }
}
