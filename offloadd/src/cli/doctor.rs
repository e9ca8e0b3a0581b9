//! `offloadd doctor`: what of this machine is in the way, and the lines that mend it.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::Result;
use offload_support::outln;
use offloadd::check::check;
use offloadd::config::Config;
use offloadd::doctor::{Roots, examine};
use offloadd::findings::{Severity, worst};
use serde_json::json;

use super::findings::{text, to_json};

/// Where the service has its settings.
const SERVICE_SETTINGS: &str = "/etc/offloadd/offloadd.toml";

pub(crate) fn run(
    config: Option<PathBuf>,
    mut places: Vec<PathBuf>,
    as_json: bool,
) -> Result<ExitCode> {
    let service = Path::new(SERVICE_SETTINGS);
    let config = match config {
        Some(path) => Some(path),
        None if places.is_empty() && service.exists() => Some(service.to_owned()),
        None => None,
    };
    let config = config.map(|path| Config::read(&path)).transpose()?;
    let mut findings = Vec::new();
    if let Some(config) = &config {
        findings.extend(check(config));
        places.extend(config.devices.iter().cloned());
    }
    for place in &mut places {
        *place = std::path::absolute(&*place)?;
    }
    findings.extend(examine(&Roots::default(), config.as_ref(), &places));
    let worst = worst(&findings);
    if as_json {
        let found: Vec<_> = findings.iter().map(to_json).collect();
        outln!("{}", json!({ "worst": worst.name(), "findings": found }));
    } else {
        for finding in &findings {
            outln!("{}", text(finding));
        }
        let count = |severity| {
            findings
                .iter()
                .filter(|one| one.severity == severity)
                .count()
        };
        outln!(
            "{} looked at: {} problems, {} hints",
            findings.len(),
            count(Severity::Problem),
            count(Severity::Hint)
        );
    }
    Ok(match worst {
        Severity::Problem => ExitCode::FAILURE,
        _ => ExitCode::SUCCESS,
    })
}
