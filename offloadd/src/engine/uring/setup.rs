//! Rings of each kind, set up as well as this kernel does it; or why it does not.

use io_uring::IoUring;

use super::{KERNEL_INFLIGHT_MAX, SUBMISSION_ENTRIES};

/// How long the kernel's thread looks for more (SQPOLL) before it sleeps and has to be woken by a system call.
const SQPOLL_IDLE_MS: u32 = 10;

/// Who finds out that operations wait to begin, and that they have ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::engine) enum Flavour {
    /// A system call, and an interrupt.
    Plain,
    /// A system call, and whoever reaps asks the drive. Only for reads and writes of drives that can be asked.
    Polled,
    /// A thread of the kernel looks at the submission queue, and takes a processor meanwhile.
    Sqpoll,
}

impl Flavour {
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Plain => "uring",
            Self::Polled => "polled",
            Self::Sqpoll => "sqpoll",
        }
    }
}

/// A ring of the best kind this kernel has.
pub(super) fn set_up(flavour: Flavour) -> std::io::Result<(IoUring, &'static str)> {
    let completions = (KERNEL_INFLIGHT_MAX as u32).next_power_of_two();
    let special = |builder: &mut io_uring::Builder| match flavour {
        Flavour::Plain => {}
        Flavour::Polled => drop(builder.setup_iopoll()),
        Flavour::Sqpoll => drop(builder.setup_sqpoll(SQPOLL_IDLE_MS)),
    };
    if flavour == Flavour::Sqpoll {
        // Its thread is not interrupted, so there is nothing to defer.
        let mut watched = IoUring::builder();
        watched.setup_cqsize(completions).setup_single_issuer();
        special(&mut watched);
        let ring = watched.build(SUBMISSION_ENTRIES)?;
        return Ok((ring, "SQPOLL: a thread of the kernel takes a processor"));
    }
    let mut best = IoUring::builder();
    best.setup_cqsize(completions)
        .setup_submit_all()
        .setup_single_issuer()
        .setup_defer_taskrun()
        .setup_taskrun_flag();
    special(&mut best);
    match best.build(SUBMISSION_ENTRIES) {
        Ok(ring) => Ok((ring, "SINGLE_ISSUER and DEFER_TASKRUN")),
        // Kernels before 6.1.
        Err(e) if e.raw_os_error() == Some(libc::EINVAL) => {
            let mut plain = IoUring::builder();
            plain.setup_cqsize(completions);
            special(&mut plain);
            Ok((
                plain.build(SUBMISSION_ENTRIES)?,
                "no DEFER_TASKRUN before Linux 6.1",
            ))
        }
        Err(e) => Err(e),
    }
}

/// What a refusal of io_uring_setup means, in words a person can act on.
pub(super) fn why_not(error: &std::io::Error) -> String {
    match error.raw_os_error() {
        Some(libc::EPERM) => {
            let setting = std::fs::read_to_string("/proc/sys/kernel/io_uring_disabled");
            match setting.as_deref().map(str::trim) {
                Ok(level @ ("1" | "2")) => format!(
                    "io_uring is forbidden by kernel.io_uring_disabled = {level} (sysctl -w kernel.io_uring_disabled=0)"
                ),
                _ => "io_uring is forbidden, by seccomp most likely (Docker's default profile blocks it: --security-opt \
                      seccomp=PROFILE)"
                    .into(),
            }
        }
        Some(libc::ENOSYS) => "this kernel or sandbox has no io_uring".into(),
        Some(libc::ENOMEM) => {
            "no memory for a ring; before Linux 5.12 it counts against `ulimit -l`".into()
        }
        _ => format!("io_uring_setup: {error}"),
    }
}
