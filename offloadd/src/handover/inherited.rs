//! Descriptors that a process is born with, as systemd passes them: from number 3 on, their count in `LISTEN_FDS`, their
//! names in `LISTEN_FDNAMES`. Both halves, so that `offloadd supervise` is to a daemon what systemd is.
//!
//! Holds the `unsafe` of naming descriptors by number.

use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::process::CommandExt;
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::io::FdFlags;

/// Where they begin.
const FIRST: RawFd = 3;

/// More than any service manager keeps for one service.
const COUNT_MAX: usize = 1 << 16;

/// What came with the process, each with its name.
pub type Inherited = Vec<(String, OwnedFd)>;

/// Takes what came with this process: the first time it is asked, empty later, and empty when it is for another process.
/// To be asked before anything else opens descriptors.
pub fn take() -> Inherited {
    static TAKEN: AtomicBool = AtomicBool::new(false);
    if TAKEN.swap(true, Ordering::Relaxed) {
        return Vec::new();
    }
    let variable = |name: &str| std::env::var(name).ok();
    // `offloadd supervise` cannot know the number before the process exists and leaves it out.
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
        // SAFETY: it is open, as just seen, and nobody else has it: it came with the process, this is asked once (`TAKEN`),
        // before anything else has opened one, and who passed it says by the variables that it is ours.
        let fd = unsafe { OwnedFd::from_raw_fd(number) };
        // A failure would only let a child have it too, and there are none.
        let _ = rustix::io::fcntl_setfd(&fd, FdFlags::CLOEXEC);
        inherited.push(((*name).to_owned(), fd));
    }
    inherited
}

/// Closes what came with the process, beyond stdin, stdout and stderr: for a daemon that somebody's program starts, which may
/// hold sockets, locks or another user's files. To be asked before anything else opens descriptors, and instead of [`take`].
///
/// # Errors
/// The kernel has no such call (before Linux 5.9).
pub fn close_all() -> io::Result<()> {
    // SAFETY: nobody in this process has opened a descriptor yet, so none that is closed here is anybody's.
    match unsafe { libc::syscall(libc::SYS_close_range, FIRST, libc::c_uint::MAX, 0) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Numbers in this process that nothing else gets before they are dropped: std talks to a child it starts over a descriptor
/// of its own, which must not lie where the child's will be.
#[derive(Debug)]
pub struct Passed {
    _placeholders: Vec<OwnedFd>,
}

/// Lets the process of `command` be born with `fds`. What comes back is to be kept until it has been started.
///
/// # Errors
/// As the system names them (out of descriptors).
pub fn pass(command: &mut Command, fds: &[(String, OwnedFd)]) -> io::Result<Passed> {
    let end = FIRST + fds.len() as RawFd;
    let mut placeholders = Vec::new();
    // Copies beyond the numbers they will have, so that none is written over before it is copied.
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
            // SAFETY: plain numbers; what lies at the target in this new process is a copy that nobody uses there. The copy
            // stays open when the program starts.
            let copied = unsafe { libc::dup2(source.as_raw_fd(), FIRST + index as RawFd) };
            if copied < 0 {
                return Err(io::Error::last_os_error());
            }
        }
        Ok(())
    };
    // SAFETY: between fork and exec it calls dup2 alone, which may be called there, and takes no memory.
    unsafe { command.pre_exec(copy) };
    Ok(Passed {
        _placeholders: placeholders,
    })
}
