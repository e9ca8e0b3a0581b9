//! The evaluations of a run: when the loss was lowest, and when it stopped falling.
//!
//! Derived from `metrics.jsonl`, so a run that resumes has the same evaluations as one that was not interrupted.

/// Evaluations up to the current step.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Evaluations {
    /// Step and loss of the evaluation with the lowest loss.
    lowest: Option<(u64, f64)>,
    /// Evaluations after that one.
    since_lowest: u64,
}

impl Evaluations {
    /// Makes the state after `evaluations`, each a step and a loss.
    pub fn from_steps_and_losses(evaluations: &[(u64, f64)]) -> Self {
        let mut found = Self::default();
        for (step, loss) in evaluations {
            found.add(*step, *loss);
        }
        found
    }

    /// Adds an evaluation. Returns whether its loss is the lowest so far. A loss that is not finite is left out,
    /// because metrics do not keep it.
    pub fn add(&mut self, step: u64, loss: f64) -> bool {
        if !loss.is_finite() {
            return false;
        }
        let is_lowest = self.lowest.is_none_or(|(_, lowest)| loss < lowest);
        if is_lowest {
            self.lowest = Some((step, loss));
            self.since_lowest = 0;
        } else {
            self.since_lowest += 1;
        }
        is_lowest
    }

    pub fn lowest(&self) -> Option<(u64, f64)> {
        self.lowest
    }

    /// Returns whether the last `patience` evaluations had no new lowest loss; 0: never.
    pub fn has_stalled(&self, patience: u64) -> bool {
        patience > 0 && self.since_lowest >= patience
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_loss_has_stalled_after_as_many_evaluations_as_the_patience() {
        let mut evaluations =
            Evaluations::from_steps_and_losses(&[(10, 3.0), (20, 2.0), (30, 2.0)]);
        assert_eq!(evaluations.lowest(), Some((20, 2.0)));
        assert!(!evaluations.has_stalled(2) && evaluations.has_stalled(1));
        assert!(!evaluations.add(40, f64::NAN));
        assert!(!evaluations.has_stalled(2));
        assert!(!evaluations.add(50, 2.5));
        assert!(evaluations.has_stalled(2) && !evaluations.has_stalled(0));
        assert!(evaluations.add(60, 1.5));
        assert!(!evaluations.has_stalled(1));
    }
}
