//! Resolves DeepSpeed's monitors and its breakdown of times.

use std::path::{Component, Path, PathBuf};

use super::value;
use crate::config::toml::{ConfigToml, MonitorToml};
use crate::config::{Reports, SettingsError};

/// DeepSpeed's default name of a job.
const JOB_NAME: &str = "DeepSpeedJobName";

/// Resolves the reports. A monitor without a directory gets one in `run_dir`.
pub(super) fn reports(config: &ConfigToml, run_dir: &Path) -> Result<Reports, SettingsError> {
    let of = |name: &str, job_key: &'static str, monitor: &MonitorToml| {
        dir(monitor, job_key, &run_dir.join(name))
    };
    Ok(Reports {
        wall_clock_breakdown: config.wall_clock_breakdown.unwrap_or(false),
        tensorboard: of("tensorboard", "tensorboard.job_name", &config.tensorboard)?,
        csv: of("csv_monitor", "csv_monitor.job_name", &config.csv_monitor)?,
    })
}

/// Directory that the monitor writes to, if it is enabled.
fn dir(
    monitor: &MonitorToml,
    job_key: &'static str,
    default: &Path,
) -> Result<Option<PathBuf>, SettingsError> {
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
    let given = monitor.output_path.as_deref();
    let given = given.filter(|path| !path.as_os_str().is_empty());
    Ok(Some(given.unwrap_or(default).join(job)))
}
