//! `offloadd check-config`: checks settings, and the devices and sockets they name, before a start or a reload.

use std::path::Path;
use std::process::ExitCode;

use offloadd::check::check;
use offloadd::config::Config;
use offloadd::findings::{Severity, worst};

use super::findings::text;
use offload_support::units::ApproxBytes;

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
    print!("{}", resolved(&config));
    ExitCode::SUCCESS
}

/// Formats all settings, with defaults filled in.
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
    if let Some(listen) = &config.metrics_listen {
        text += &format!("[metrics]\nlisten = {:?}\n", listen.to_toml());
    }
    text + &offloadd::config::quota::to_toml(&config.quotas)
}
