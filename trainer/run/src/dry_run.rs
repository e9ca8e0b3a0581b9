//! A dry run: the length of a run's data and the plan, without opening anything. `trainer plan` prints it, `bench-io training` takes a step's
//! bytes and time from it.

use crate::accelerator::AskTorch;
use crate::config::{RunSettings, SettingsError};
use crate::data::{DataError, DataLength, length};
use crate::plan::{Hardware, Overrides, Plan, PlanError};

/// A run that is planned and not opened.
#[derive(Debug)]
pub struct DryRun {
    /// The settings, with the steps that follow from the data.
    pub settings: RunSettings,
    /// `None` if the run has no steps, or if its data cannot be read and its steps do not follow from the data.
    pub length: Option<DataLength>,
    pub hardware: Hardware,
    /// What cannot be planned is an error here; what does not fit is a problem of the plan.
    pub plan: Result<Plan, PlanError>,
}

/// Error of a run that cannot be planned because of its data.
#[derive(Debug, thiserror::Error)]
pub enum DryRunError {
    /// The length of the run follows from data that cannot be read.
    #[error(transparent)]
    Data(#[from] DataError),
    /// A setting contradicts the number of steps.
    #[error(transparent)]
    Settings(#[from] SettingsError),
}

impl DryRun {
    /// Plans the part of a run that each of `nodes` equal nodes has.
    ///
    /// # Errors
    /// The number of steps is not known, or a setting contradicts it.
    pub fn new(
        mut settings: RunSettings,
        nodes: u32,
        overrides: &Overrides,
        torch: AskTorch,
    ) -> Result<Self, DryRunError> {
        let length = match settings.train.steps {
            0 => None,
            _ => match length(&settings) {
                Ok(length) => {
                    settings.set_windows(length.windows)?;
                    Some(length)
                }
                Err(error) if settings.train.epochs.is_some() => return Err(error.into()),
                Err(_) => None,
            },
        };
        settings.local_ranks = settings.ranks / nodes;
        let hardware = Hardware::new(&settings, overrides, torch);
        let mut plan = Plan::new(&settings, hardware.clone());
        if let (Ok(plan), Some(length)) = (&mut plan, &length) {
            plan.epochs = Some(settings.epochs(length.windows));
            plan.with_documents(&settings, length.documents.clone());
        }
        Ok(Self {
            settings,
            length,
            hardware,
            plan,
        })
    }
}
