//! Descriptors that a process inherits, in systemd's convention: from number 3 on, their count in `LISTEN_FDS` and their names
//! in `LISTEN_FDNAMES`. Implements both sides, because `offloadd supervise` plays systemd's part.
//!
//! Holds the `unsafe` of naming descriptors by number.

use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::process::CommandExt;
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::io::FdFlags;

/// Number of the first one.
const FIRST: RawFd = 3;

/// More than any service manager keeps for a service.
const COUNT_MAX: usize = 1 << 16;

/// Inherited descriptors with their names.
pub type InheritedDescriptors = Vec<(String, OwnedFd)>;

/// Takes the inherited descriptors, once. Returns none when they are for another process. Must be called before anything opens
/// descriptors.
pub fn take_descriptors() -> InheritedDescriptors {
    static TAKEN: AtomicBool = AtomicBool::new(false);
    if TAKEN.swap(true, Ordering::Relaxed) {
        return Vec::new();
    }
    let variable = |name: &str| std::env::var(name).ok();
    // `offloadd supervise` leaves it out, because it does not know the number before the process exists.
    let other = variable("LISTEN_PID").is_some_and(|pid| pid != std::process::id().to_string());
    let count = variable("LISTEN_FDS").and_then(|count| count.parse::<usize>().ok());
    let (Some(count), false) = (count, other) else {
        return Vec::new();
    };
    let names = variable("LISTEN_FDNAMES").unwrap_or_default();
    let names: Vec<&str> = names.split(':').collect();
    let mut inherited = Vec::new();
    for (index, name) in names.iter().enumerate().take(count.min(COUNT_MAX)) {
        let number = FIRST + index as RawFd;
        if std::fs::symlink_metadata(format!("/proc/self/fd/{number}")).is_err() {
            break;
        }
        // SAFETY: it is open, as just checked, and nobody else has it: it was inherited, this is called once (`TAKEN`), before
        // anything else opened one, and the variables say that it is meant for this process.
        let fd = unsafe { OwnedFd::from_raw_fd(number) };
        // A failure would only pass it on to child processes, and there are none.
        let _ = rustix::io::fcntl_setfd(&fd, FdFlags::CLOEXEC);
        inherited.push(((*name).to_owned(), fd));
    }
    inherited
}

/// Closes inherited descriptors except stdin, stdout and stderr, for a daemon that another program starts: they may be sockets,
/// locks or another user's files. Must be called instead of [`take_descriptors`], before anything opens descriptors.
///
/// # Errors
/// The kernel lacks the system call (before Linux 5.9).
pub fn close_all() -> io::Result<()> {
    // SAFETY: nothing in this process has opened a descriptor yet, so none that is closed here is in use.
    match unsafe { libc::syscall(libc::SYS_close_range, FIRST, libc::c_uint::MAX, 0) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Reserves descriptor numbers until dropped: std uses a descriptor of its own to talk to a child it starts, which must not
/// have a number that the child's descriptors will get.
#[derive(Debug)]
pub struct DescriptorReservation {
    _placeholders: Vec<OwnedFd>,
}

/// Lets the process of `command` inherit `fds`. Keep the result until the process was started.
///
/// # Errors
/// The system's errors (out of descriptors).
pub fn pass(command: &mut Command, fds: &[(String, OwnedFd)]) -> io::Result<DescriptorReservation> {
    let end = FIRST + fds.len() as RawFd;
    let mut placeholders = Vec::new();
    // Copies above the target numbers, so that none is overwritten before it is copied.
    let mut sources = Vec::with_capacity(fds.len());
    for (_, fd) in fds {
        sources.push(rustix::io::fcntl_dupfd_cloexec(fd, end)?);
    }
    let any = std::fs::File::open("/dev/null")?;
    loop {
        let next = rustix::io::fcntl_dupfd_cloexec(&any, FIRST)?;
        if next.as_raw_fd() >= end {
            break;
        }
        placeholders.push(next);
    }
    placeholders.push(any.into());
    let names: Vec<&str> = fds.iter().map(|(name, _)| name.as_str()).collect();
    command
        .env_remove("LISTEN_PID")
        .env("LISTEN_FDS", fds.len().to_string())
        .env("LISTEN_FDNAMES", names.join(":"));
    let copy = move || {
        for (index, source) in sources.iter().enumerate() {
            // SAFETY: plain numbers. The target in the new process is a copy that nothing uses there. The copy stays open
            // across exec.
            let copied = unsafe { libc::dup2(source.as_raw_fd(), FIRST + index as RawFd) };
            if copied < 0 {
                return Err(io::Error::last_os_error());
            }
        }
        Ok(())
    };
    // SAFETY: between fork and exec it calls only dup2, which is allowed there and allocates nothing.
    unsafe { command.pre_exec(copy) };
    Ok(DescriptorReservation {
        _placeholders: placeholders,
    })
}
