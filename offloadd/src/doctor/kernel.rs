//! Checks the kernel's version, its I/O interfaces and huge pages.

use std::sync::Arc;

use super::Roots;
use crate::engine::{Engine, EngineChoice};
use crate::findings::Finding;

/// First version with everything the engine is fastest with: sparse registered buffers, and deferred task runs of a single thread.
const BEST: (u32, u32) = (6, 1);

/// First version in which io_uring is usable for direct I/O with registered buffers.
const LEAST: (u32, u32) = (5, 6);

pub(super) fn version(roots: &Roots) -> Finding {
    let what = "kernel";
    let Some(release) = roots.proc("sys/kernel/osrelease") else {
        return Finding::hint(what, "its version is unknown", "mount -t proc proc /proc");
    };
    let mut numbers = release.split(['.', '-']).map(|part| part.parse().ok());
    let (Some(Some(major)), Some(Some(minor))) = (numbers.next(), numbers.next()) else {
        return Finding::hint(what, format!("unknown version {release}"), "uname -r");
    };
    let fix = "install a newer kernel: 6.1 or later";
    match (major, minor) {
        found if found < LEAST => {
            let message = format!(
                "{release} is too old for io_uring; kernel AIO or threads are used instead"
            );
            Finding::hint(what, message, fix)
        }
        found if found < BEST => {
            let message = format!("{release} lacks features with which io_uring is faster");
            Finding::hint(what, message, fix)
        }
        _ => Finding::fine(what, release),
    }
}

/// Tries each engine, and finds out what forbids io_uring.
pub(super) fn engines(roots: &Roots) -> Vec<Finding> {
    let tried = tempfile().map(Arc::new);
    let probe = |engine: EngineChoice| match &tried {
        Ok(file) => Engine::open(engine, std::slice::from_ref(file), 16)
            .map(|_| ())
            .map_err(|error| error.to_string()),
        Err(error) => Err(format!("cannot create a file to try it: {error}")),
    };
    vec![
        io_uring(roots, probe(EngineChoice::Uring)),
        kernel_aio(roots, probe(EngineChoice::Aio)),
    ]
}

fn tempfile() -> std::io::Result<std::fs::File> {
    let file = crate::arena::memory_file("offloadd-doctor")?;
    Ok(file.into())
}

fn io_uring(roots: &Roots, tried: Result<(), String>) -> Finding {
    let what = "io_uring";
    let Err(why) = tried else {
        return Finding::fine(what, "works");
    };
    let slower = "kernel AIO or threads are used instead";
    let disabled = roots.proc("sys/kernel/io_uring_disabled");
    let filtered = (roots.proc("self/status"))
        .is_some_and(|status| status.lines().any(|line| line == "Seccomp:\t2"));
    match disabled.as_deref() {
        Some("2") => Finding::hint(
            what,
            format!("kernel.io_uring_disabled is 2: {slower}"),
            "sysctl -w kernel.io_uring_disabled=0, and set it in /etc/sysctl.d",
        ),
        Some("1") => Finding::hint(
            what,
            format!(
                "kernel.io_uring_disabled is 1, which allows it to root and one group only: {slower}"
            ),
            "sysctl -w kernel.io_uring_group=$(getent group offloadd | cut -d: -f3)",
        ),
        _ if filtered => Finding::hint(
            what,
            format!("a seccomp filter forbids it ({why}): {slower}"),
            "in a container: --security-opt seccomp=FILE that allows io_uring_setup, io_uring_enter and io_uring_register; in a \
             service: SystemCallFilter=@aio",
        ),
        _ => Finding::hint(what, format!("{why}: {slower}"), "engine = \"auto\""),
    }
}

fn kernel_aio(roots: &Roots, tried: Result<(), String>) -> Finding {
    let what = "kernel AIO";
    let number = |name: &str| roots.proc(&format!("sys/fs/{name}"))?.parse::<u64>().ok();
    match (tried, number("aio-nr"), number("aio-max-nr")) {
        (Ok(()), ..) => Finding::fine(what, "works"),
        (Err(_), Some(used), Some(max)) if used >= max => Finding::hint(
            what,
            format!("other programs use all {max} requests that the machine allows"),
            format!("sysctl -w fs.aio-max-nr={}", max.saturating_mul(4)),
        ),
        (Err(why), ..) => Finding::hint(what, why, "engine = \"auto\""),
    }
}

pub(super) const SHMEM_ENABLED: &str = "kernel/mm/transparent_hugepage/shmem_enabled";

/// Checks huge pages for shared memory, which arenas are. With huge pages, allocating, locking and registering arenas is faster, and
/// I/O takes less CPU time: `trainer/bench/io/RESULTS.md`.
pub(super) fn huge_pages(roots: &Roots) -> Finding {
    let what = "huge pages";
    let fix = format!("echo advise > /sys/{SHMEM_ENABLED}");
    match super::huge_pages(roots).as_deref() {
        None => Finding::fine(what, "not supported by the kernel"),
        Some(word @ ("never" | "deny")) => Finding::hint(
            what,
            format!(
                "shmem_enabled is {word}, so arenas use small pages, which take longer to allocate and more CPU time for I/O"
            ),
            fix,
        ),
        Some(word @ ("always" | "within_size" | "advise" | "force")) => {
            Finding::fine(what, format!("shmem_enabled is {word}"))
        }
        Some(words) => Finding::hint(
            what,
            format!("shmem_enabled has the unknown value `{words}`"),
            fix,
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::tests::Machine;
    use crate::findings::Severity::{Fine, Hint};

    #[test]
    fn an_old_kernel_is_named_and_a_new_one_is_fine() {
        for (release, severity) in [
            ("6.12.90-arch1", Fine),
            ("6.1.0-18-amd64", Fine),
            ("5.15.0-100-generic", Hint),
            ("4.18.0", Hint),
            ("10.0", Fine),
            ("strange", Hint),
            ("6", Hint),
        ] {
            let machine = Machine::new(&[("proc/sys/kernel/osrelease", release)], &[]);
            assert_eq!(version(&machine.roots).severity, severity, "{release}");
        }
        assert_eq!(version(&Machine::new(&[], &[]).roots).severity, Hint);
    }

    #[test]
    fn what_forbids_io_uring_is_told_apart() {
        let refused = || Err("io_uring is forbidden".to_owned());
        let fix = |files: &[(&str, &str)]| {
            let found = io_uring(&Machine::new(files, &[]).roots, refused());
            assert_eq!(found.severity, Hint);
            found.fix.unwrap()
        };
        let disabled = "proc/sys/kernel/io_uring_disabled";
        assert!(fix(&[(disabled, "2")]).contains("io_uring_disabled=0"));
        assert!(fix(&[(disabled, "1")]).contains("io_uring_group"));
        let filtered = ("proc/self/status", "Name:\tx\nSeccomp:\t2\n");
        assert!(fix(&[(disabled, "0"), filtered]).contains("seccomp="));
        assert!(fix(&[]).contains("auto"));
        let machine = Machine::new(&[(disabled, "2")], &[]);
        assert_eq!(
            io_uring(&machine.roots, Ok(())).severity,
            Fine,
            "it works all the same"
        );
    }

    #[test]
    fn used_up_aio_requests_are_told_apart_from_a_refusal() {
        let full = [
            ("proc/sys/fs/aio-nr", "65536"),
            ("proc/sys/fs/aio-max-nr", "65536"),
        ];
        let found = kernel_aio(&Machine::new(&full, &[]).roots, Err("EAGAIN".into()));
        assert_eq!(found.fix.unwrap(), "sysctl -w fs.aio-max-nr=262144");
        let found = kernel_aio(&Machine::new(&[], &[]).roots, Err("EPERM".into()));
        assert_eq!((found.severity, &found.message[..]), (Hint, "EPERM"));
    }

    #[test]
    fn huge_pages_that_are_off_are_a_hint() {
        let path = "sys/kernel/mm/transparent_hugepage/shmem_enabled";
        for (words, severity) in [
            ("always within_size advise [never] deny force", Hint),
            ("always within_size [advise] never deny force", Fine),
            ("nonsense", Hint),
        ] {
            let machine = Machine::new(&[(path, words)], &[]);
            assert_eq!(huge_pages(&machine.roots).severity, severity, "{words}");
        }
        assert_eq!(huge_pages(&Machine::new(&[], &[]).roots).severity, Fine);
    }

    #[test]
    fn this_machines_engines_answer() {
        let found = engines(&Roots::default());
        assert_eq!(found.len(), 2);
        assert!(found.iter().all(|one| one.severity <= Hint), "{found:?}");
    }
}
