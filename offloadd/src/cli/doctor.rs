//! `offloadd doctor`: reports what on this machine stops or slows down a daemon, with the commands that fix it.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::Result;
use offload_support::nvidia::NvidiaGpus;
use offload_support::outln;
use offload_support::units::CountOf;
use offloadd::check::check;
use offloadd::config::Config;
use offloadd::doctor::{Roots, ask_trainer, examine};
use offloadd::findings::{Severity, worst};
use serde_json::json;

use super::findings::{text, to_json};

/// Settings of the installed service.
const SERVICE_SETTINGS: &str = "/etc/offloadd/offloadd.toml";

pub(crate) fn run(
    config: Option<PathBuf>,
    mut paths: Vec<PathBuf>,
    as_json: bool,
) -> Result<ExitCode> {
    let service = Path::new(SERVICE_SETTINGS);
    let config = match config {
        Some(path) => Some(path),
        None if paths.is_empty() && service.exists() => Some(service.to_owned()),
        None => None,
    };
    let config = config.map(|path| Config::read(&path)).transpose()?;
    let mut findings = Vec::new();
    if let Some(config) = &config {
        findings.extend(check(config));
        paths.extend(config.devices.iter().cloned());
    }
    for path in &mut paths {
        *path = std::path::absolute(&*path)?;
    }
    findings.extend(examine(
        &Roots::default(),
        NvidiaGpus::of_this_machine(),
        ask_trainer,
        config.as_ref(),
        &paths,
    ));
    let worst = worst(&findings);
    if as_json {
        let found: Vec<_> = findings.iter().map(to_json).collect();
        outln!("{}", json!({ "worst": worst.name(), "findings": found }));
    } else {
        // What needs a hand comes first.
        findings.sort_by_key(|finding| std::cmp::Reverse(finding.severity));
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
            "{}: {}, {}",
            CountOf(findings.len(), "check"),
            CountOf(count(Severity::Problem), "problem"),
            CountOf(count(Severity::Hint), "hint")
        );
    }
    Ok(match worst {
        Severity::Problem => ExitCode::FAILURE,
        _ => ExitCode::SUCCESS,
    })
}
