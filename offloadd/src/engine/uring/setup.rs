//! Sets up a ring with the best flags this kernel has, or says why it cannot.

use io_uring::IoUring;

use super::{KERNEL_INFLIGHT_MAX, SUBMISSION_ENTRIES};

/// Returns a ring and how it was set up.
pub(super) fn set_up() -> std::io::Result<(IoUring, &'static str)> {
    let completions = (KERNEL_INFLIGHT_MAX as u32).next_power_of_two();
    let mut best = IoUring::builder();
    best.setup_cqsize(completions)
        .setup_submit_all()
        .setup_single_issuer()
        .setup_defer_taskrun()
        .setup_taskrun_flag();
    match best.build(SUBMISSION_ENTRIES) {
        Ok(ring) => Ok((ring, "SINGLE_ISSUER and DEFER_TASKRUN")),
        // Kernels before 6.1.
        Err(e) if e.raw_os_error() == Some(libc::EINVAL) => {
            let mut plain = IoUring::builder();
            plain.setup_cqsize(completions);
            let ring = plain.build(SUBMISSION_ENTRIES)?;
            Ok((ring, "no DEFER_TASKRUN before Linux 6.1"))
        }
        Err(e) => Err(e),
    }
}

/// Explains an error of io_uring_setup and what to do about it.
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
