//! Resolves DeepSpeed's monitors and its breakdown of times.

use std::path::{Component, Path, PathBuf};

use serde::Serialize;
use training_state::monitor::Reports;

use super::value;
use crate::error::SettingsError;
use crate::toml::MonitorToml;

/// DeepSpeed's default name of a job.
const JOB_NAME: &str = "DeepSpeedJobName";

/// Resolves the reports. A monitor without a directory gets one in `run_dir`.
pub fn reports(
    wall_clock_breakdown: Option<bool>,
    tensorboard: &MonitorToml,
    csv_monitor: &MonitorToml,
    run_dir: &Path,
) -> Result<Reports, SettingsError> {
    let of = |name: &str, job_key: &'static str, monitor: &MonitorToml| {
        let found = monitor_of(monitor, job_key)?;
        Ok(found.map(|found| {
            found
                .output_path
                .unwrap_or_else(|| run_dir.join(name))
                .join(found.job_name)
        }))
    };
    Ok(Reports {
        wall_clock_breakdown: wall_clock_breakdown.unwrap_or(false),
        tensorboard: of("tensorboard", "tensorboard.job_name", tensorboard)?,
        csv: of("csv_monitor", "csv_monitor.job_name", csv_monitor)?,
    })
}

/// An enabled monitor.
#[derive(Clone, Debug, Serialize)]
pub struct Monitor {
    /// `None`: a directory of the monitor's name in the run's directory.
    pub output_path: Option<PathBuf>,
    /// Name of the directory in `output_path`.
    pub job_name: String,
}

/// Resolves one monitor, if it is enabled. `job_key` is the path of its `job_name`.
pub fn monitor_of(
    monitor: &MonitorToml,
    job_key: &'static str,
) -> Result<Option<Monitor>, SettingsError> {
    if !monitor.enabled.unwrap_or(false) {
        return Ok(None);
    }
    let job = monitor.job_name.as_deref().unwrap_or(JOB_NAME);
    let mut parts = Path::new(job).components();
    let is_name = matches!(parts.next(), Some(Component::Normal(_))) && parts.next().is_none();
    if !is_name {
        return Err(value(
            job_key,
            format!("\"{job}\": must be a directory name; set its parent with output_path"),
        ));
    }
    let given = monitor.output_path.clone();
    Ok(Some(Monitor {
        output_path: given.filter(|path| !path.as_os_str().is_empty()),
        job_name: job.to_owned(),
    }))
}
