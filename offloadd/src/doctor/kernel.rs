//! What the kernel can do, and what it was told not to.

use std::sync::Arc;

use super::Roots;
use crate::engine::{Engine, EngineChoice};
use crate::findings::Finding;

/// Registered buffers that come and go, and one thread's ring without interrupts: what the engine is fastest with.
const BEST: (u32, u32) = (6, 1);

/// Where io_uring became usable for direct I/O with registered buffers.
const LEAST: (u32, u32) = (5, 6);

pub(super) fn version(roots: &Roots) -> Finding {
    let what = "kernel";
    let Some(release) = roots.proc("sys/kernel/osrelease") else {
        return Finding::hint(
            what,
            "it does not say its version",
            "mount -t proc proc /proc",
        );
    };
    let mut numbers = release.split(['.', '-']).map(|part| part.parse().ok());
    let (Some(Some(major)), Some(Some(minor))) = (numbers.next(), numbers.next()) else {
        return Finding::hint(what, format!("unknown version {release}"), "uname -r");
    };
    let mend = "install a newer kernel: 6.1 or later";
    match (major, minor) {
        found if found < LEAST => {
            let message = format!("{release} is too old for io_uring: kernel AIO or threads serve");
            Finding::hint(what, message, mend)
        }
        found if found < BEST => {
            let message = format!("{release} lacks what makes io_uring fastest here");
            Finding::hint(what, message, mend)
        }
        _ => Finding::fine(what, release),
    }
}

/// Each engine is tried; what forbids io_uring is found out.
pub(super) fn engines(roots: &Roots) -> Vec<Finding> {
    let tried = tempfile().map(Arc::new);
    let probe = |engine: EngineChoice| match &tried {
        Ok(file) => Engine::open(engine, std::slice::from_ref(file), 16)
            .map(|_| ())
            .map_err(|error| error.to_string()),
        Err(error) => Err(format!("no file to try it with: {error}")),
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
    let slower = "kernel AIO or threads serve instead";
    let disabled = roots.proc("sys/kernel/io_uring_disabled");
    let filtered = (roots.proc("self/status"))
        .is_some_and(|status| status.lines().any(|line| line == "Seccomp:\t2"));
    match disabled.as_deref() {
        Some("2") => Finding::hint(
            what,
            format!("kernel.io_uring_disabled is 2: {slower}"),
            "sysctl -w kernel.io_uring_disabled=0, and the same in /etc/sysctl.d",
        ),
        Some("1") => Finding::hint(
            what,
            format!("kernel.io_uring_disabled is 1, for all but one group and root: {slower}"),
            "sysctl -w kernel.io_uring_group=$(getent group offloadd | cut -d: -f3)",
        ),
        _ if filtered => Finding::hint(
            what,
            format!("a filter of system calls forbids it ({why}): {slower}"),
            "a container: --security-opt seccomp=FILE with io_uring_setup, io_uring_enter, io_uring_register allowed; a \
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
            format!("all {max} requests that the machine allows are taken by other programs"),
            format!("sysctl -w fs.aio-max-nr={}", max.saturating_mul(4)),
        ),
        (Err(why), ..) => Finding::hint(what, why, "engine = \"auto\""),
    }
}

pub(super) const SHMEM_ENABLED: &str = "kernel/mm/transparent_hugepage/shmem_enabled";

/// Arenas are shared memory; in huge pages they are touched, locked and registered faster, and bytes moved with less processor
/// time: `bench-io/measured/README.md`.
pub(super) fn huge_pages(roots: &Roots) -> Finding {
    let what = "huge pages";
    let mend = format!("echo advise > /sys/{SHMEM_ENABLED}");
    match super::huge_pages(roots).as_deref() {
        None => Finding::fine(what, "the kernel has none"),
        Some(word @ ("never" | "deny")) => Finding::hint(
            what,
            format!(
                "shmem_enabled is {word}: arenas get small pages, which take longer to make and more processor time to move"
            ),
            mend,
        ),
        Some(word @ ("always" | "within_size" | "advise" | "force")) => {
            Finding::fine(what, format!("shmem_enabled is {word}"))
        }
        Some(words) => Finding::hint(what, format!("shmem_enabled says `{words}`"), mend),
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
        let mend = |files: &[(&str, &str)]| {
            let found = io_uring(&Machine::new(files, &[]).roots, refused());
            assert_eq!(found.severity, Hint);
            found.mend.unwrap()
        };
        let disabled = "proc/sys/kernel/io_uring_disabled";
        assert!(mend(&[(disabled, "2")]).contains("io_uring_disabled=0"));
        assert!(mend(&[(disabled, "1")]).contains("io_uring_group"));
        let filtered = ("proc/self/status", "Name:\tx\nSeccomp:\t2\n");
        assert!(mend(&[(disabled, "0"), filtered]).contains("seccomp="));
        assert!(mend(&[]).contains("auto"));
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
        assert_eq!(found.mend.unwrap(), "sysctl -w fs.aio-max-nr=262144");
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
