//! `offloadd check-config`: checks settings, and the devices and sockets they name, before a start or a reload.

use std::path::Path;
use std::process::ExitCode;

use offloadd::check::check;
use offloadd::config::Config;
use offloadd::findings::{Severity, worst};

use super::findings::text;

/// Exit status for a configuration error, from `sysexits.h`.
const EX_CONFIG: u8 = 78;

pub(crate) fn run(path: &Path) -> ExitCode {
    let config = match Config::read(path) {
        Ok(config) => config,
        Err(error) => {
            eprintln!("offloadd: {error}");
            return ExitCode::from(EX_CONFIG);
        }
    };
    let findings = check(&config);
    for finding in findings.iter().filter(|one| one.severity > Severity::Fine) {
        eprintln!("{}", text(finding));
    }
    if worst(&findings) == Severity::Problem {
        eprintln!(
            "offloadd: {}: cannot be served with these settings",
            path.display()
        );
        return ExitCode::from(EX_CONFIG);
    }
    print!("{}", config.to_toml());
    ExitCode::SUCCESS
}
