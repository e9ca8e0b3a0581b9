//! What follows every result: program, command, machine, devices and warnings.

use std::fmt;
use std::path::Path;

use serde::Serialize;

use super::REPORT_VERSION;
use crate::drive;
use crate::machine::Machine;
use crate::shell;

/// Fields common to all reports, flattened into each. `S` are the settings of the command.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct About<S> {
    /// Version of the JSON fields.
    pub(crate) version: u32,
    /// Name and version.
    pub(crate) program: &'static str,
    pub(crate) command: String,
    pub(crate) machine: Machine,
    pub(crate) devices: Vec<DeviceReport>,
    pub(crate) settings: S,
    pub(crate) warnings: Vec<String>,
}

/// A measured device.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct DeviceReport {
    pub(crate) path: String,
    /// File system and device, or model.
    pub(crate) under: String,
}

impl<S> About<S> {
    /// Describes this run on this machine; removes duplicate warnings.
    pub(crate) fn new(settings: S, devices: Vec<DeviceReport>, warnings: Vec<String>) -> Self {
        let mut once: Vec<String> = Vec::new();
        for warning in warnings {
            if !once.contains(&warning) {
                once.push(warning);
            }
        }
        Self {
            version: REPORT_VERSION,
            program: concat!("bench-io ", env!("CARGO_PKG_VERSION")),
            command: shell::command(std::env::args_os()),
            machine: Machine::here(),
            devices,
            settings,
            warnings: once,
        }
    }
}

impl DeviceReport {
    /// Describes `path` now: files made for a measurement are gone after it.
    pub(crate) fn describe(path: &Path) -> Self {
        Self {
            path: path.display().to_string(),
            under: drive::under(path),
        }
    }
}

impl fmt::Display for DeviceReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.path, self.under)
    }
}

/// All but the settings, which each report prints itself.
impl<S> fmt::Display for About<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{}: `{}`", self.program, self.command)?;
        writeln!(f, "{}", self.machine)?;
        for device in &self.devices {
            writeln!(f, "{device}")?;
        }
        for warning in &self.warnings {
            writeln!(f, "warning: {warning}")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_report_says_who_measured_what_and_ends_with_each_warning_once() {
        let devices = vec![DeviceReport::describe(Path::new("/proc"))];
        let warnings = ["busy", "short", "busy"].map(str::to_owned).to_vec();
        let about = About::new((), devices, warnings);
        let printed = about.to_string();
        assert_eq!(printed.matches("warning: ").count(), 2, "{printed}");
        assert!(
            printed.ends_with("warning: busy\nwarning: short\n"),
            "{printed}"
        );
        let program = format!("bench-io {}: `", env!("CARGO_PKG_VERSION"));
        for part in [&program[..], " cores, ", "\n/proc: proc on "] {
            assert!(printed.contains(part), "{part}: {printed}");
        }
    }
}
