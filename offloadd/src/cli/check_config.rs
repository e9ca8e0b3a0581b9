//! `offloadd check-config`: settings and what they name, before a start or a reload.

use std::path::Path;
use std::process::ExitCode;

use offloadd::check::check;
use offloadd::config::Config;
use offloadd::findings::{Severity, worst};

use super::findings::text;
use offload_support::units::ApproxBytes;

/// As `sysexits.h` has it: something is wrong with the settings.
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
    // What is fine is not worth a line.
    for finding in findings.iter().filter(|one| one.severity > Severity::Fine) {
        eprintln!("{}", text(finding));
    }
    if worst(&findings) == Severity::Problem {
        eprintln!("offloadd: {}: cannot be served so", path.display());
        return ExitCode::from(EX_CONFIG);
    }
    print!("{}", resolved(&config));
    ExitCode::SUCCESS
}

/// All settings as they would be served, those that are left out too.
fn resolved(config: &Config) -> String {
    let mut text = format!(
        "socket = {:?}\ndevices = {:?}\narena_bytes_max = {} # {}\nengine = {:?}\nrequire_locked = {}\nsessions_max = {}\n\
         iodepth_max = {}\nscrub_bytes_per_s_max = {} # {}\n",
        config.socket,
        config.devices,
        config.arena_bytes_max,
        ApproxBytes(config.arena_bytes_max),
        config.engine.name(),
        config.require_locked,
        config.sessions_max,
        config.iodepth_max,
        config.scrub_bytes_per_s_max,
        ApproxBytes(config.scrub_bytes_per_s_max),
    );
    if let Some(bytes) = config.rebalance_bytes_per_s_max {
        text += &format!(
            "rebalance_bytes_per_s_max = {bytes} # {}\n",
            ApproxBytes(bytes)
        );
    }
    if let Some(rated) = config
        .rated_bytes
        .iter()
        .copied()
        .collect::<Option<Vec<_>>>()
    {
        let tb: Vec<_> = rated.iter().map(|&bytes| bytes as f64 / 1e12).collect();
        text += &format!("rated_tbw = {tb:?}\n");
    }
    if let Some(listen) = &config.metrics_listen {
        text += &format!("[metrics]\nlisten = {:?}\n", listen.words());
    }
    text + &offloadd::config::quota::words(&config.quotas)
}
