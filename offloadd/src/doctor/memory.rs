//! Checks the limits of memory, locked memory and file descriptors.

use offload_support::memory;
use offload_support::units::ApproxBytes;
use rustix::process::{Resource, getrlimit};

use super::Roots;
use crate::arena::lock_outlook;
use crate::config::Config;
use crate::findings::Finding;

/// Size of a usual session's arena.
const ARENA_BYTES: u64 = 1 << 30;

/// A session's rings, doorbells, memory and sockets.
const DESCRIPTORS_A_SESSION: u64 = 8;

/// Descriptors of the program itself, its devices and engines.
const DESCRIPTORS_BESIDES: u64 = 256;

/// Compares `arena_bytes_max` with the limits of the control groups.
pub(super) fn groups(roots: &Roots, config: Option<&Config>) -> Vec<Finding> {
    let what = "control group";
    let asked = config.map(|config| config.arena_bytes_max);
    let limits = memory::group_limits(&roots.proc, &roots.sys.join("fs/cgroup"));
    let mut findings: Vec<_> = (limits.iter())
        .map(|limit| {
            let finding = format!(
                "{} of {} is {}",
                limit.name,
                limit.group.display(),
                ApproxBytes(limit.bytes)
            );
            match asked {
                Some(asked) if asked > limit.bytes => Finding::problem(
                    what,
                    format!("{finding}, but `arena_bytes_max` is {}", ApproxBytes(asked)),
                    format!(
                        "arena_bytes_max = \"{}MiB\", or for the service: systemctl set-property offloadd MemoryMax={}M",
                        (limit.bytes / 4 * 3) >> 20,
                        (asked / 2 * 3) >> 20
                    ),
                ),
                _ => Finding::fine(what, finding),
            }
        })
        .collect();
    if findings.is_empty() {
        findings.push(Finding::fine(what, "no memory limit"));
    }
    findings
}

/// Checks whether a usual arena can be locked; used without settings.
pub(super) fn locking() -> Finding {
    let what = "memlock";
    let outlook = lock_outlook(ARENA_BYTES);
    match outlook.can_lock {
        true => Finding::fine(what, "arenas can be locked"),
        false => Finding::hint(
            what,
            outlook.note,
            "LimitMEMLOCK=infinity in the unit, or `* - memlock unlimited` in /etc/security/limits.d and a new login",
        ),
    }
}

pub(super) fn descriptors(config: Option<&Config>) -> Finding {
    let what = "descriptors";
    let sessions = config.map_or(64, |config| config.sessions_max);
    let needed = DESCRIPTORS_BESIDES + DESCRIPTORS_A_SESSION * u64::from(sessions);
    match getrlimit(Resource::Nofile).maximum {
        Some(limit) if limit < needed => Finding::hint(
            what,
            format!("limit of {limit}, but {sessions} sessions need {needed}"),
            format!("LimitNOFILE={needed} in the unit, or `ulimit -Hn {needed}`"),
        ),
        Some(limit) => Finding::fine(what, format!("limit of {limit}")),
        None => Finding::fine(what, "no limit"),
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::doctor::tests::Machine;
    use crate::findings::Severity::{Fine, Problem};

    #[test]
    fn a_control_groups_limit_is_named_and_compared_with_the_settings() {
        let files = [
            ("proc/self/cgroup", "0::/slurm/job_7/step\n"),
            ("sys/fs/cgroup/slurm/job_7/step/memory.max", "max"),
            ("sys/fs/cgroup/slurm/job_7/memory.max", "4294967296"),
            ("sys/fs/cgroup/slurm/job_7/memory.high", "2147483648"),
        ];
        let machine = Machine::new(&files, &[]);
        let roots = &machine.roots;
        let config = |bytes: &str| {
            let text =
                format!("socket = \"/s\"\ndevices = [\"/d\"]\narena_bytes_max = \"{bytes}\"");
            Config::parse(&text, Path::new("x")).unwrap()
        };
        let severities = |config| {
            let found = groups(roots, Some(&config));
            found.iter().map(|one| one.severity).collect::<Vec<_>>()
        };
        assert_eq!(severities(config("1GiB")), [Fine, Fine]);
        assert_eq!(
            severities(config("3GiB")),
            [Fine, Problem],
            "memory.high slows it down"
        );
        assert_eq!(severities(config("5GiB")), [Problem, Problem]);
        let found = &groups(roots, Some(&config("5GiB")))[0];
        assert!(
            found
                .message
                .contains("memory.max of /slurm/job_7 is 4.0 GiB"),
            "{found:?}"
        );
        assert!(
            found
                .fix
                .as_ref()
                .unwrap()
                .contains("arena_bytes_max = \"3072MiB\"")
        );
        assert_eq!(
            groups(&Machine::new(&[], &[]).roots, None)[0].severity,
            Fine
        );
    }

    #[test]
    fn more_sessions_than_descriptors_are_a_hint() {
        let text =
            "socket = \"/s\"\ndevices = [\"/d\"]\narena_bytes_max = \"1GiB\"\nsessions_max = 1";
        let config = Config::parse(text, Path::new("x")).unwrap();
        let limit = getrlimit(Resource::Nofile).maximum;
        let enough = limit.is_none_or(|limit| limit >= 264);
        assert_eq!(descriptors(Some(&config)).severity == Fine, enough);
    }
}
