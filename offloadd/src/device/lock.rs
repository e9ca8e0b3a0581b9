//! The lock that gives a store to one daemon at a time.

use std::fs::File;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::fs::FlockOperation;
use rustix::io::Errno;
use rustix::process::{Pid, test_kill_process};
use test_hooks::safeguard::{Safeguard, is_disabled};

use super::DeviceError;
use super::error::failed;

/// How long to wait for the lock of a living predecessor.
pub(super) const LOCK_WAIT: Duration = Duration::from_secs(1);

/// How long to wait for the lock of a predecessor that has ended. The kernel keeps its files until its ring is freed, which took over a second after
/// a plain exit on a drive that was busy freeing a large file.
const DEAD_LOCK_WAIT: Duration = Duration::from_secs(30);

pub(super) const LOCK_RETRY: Duration = Duration::from_millis(10);

pub(super) fn is_busy(error: &io::Error) -> bool {
    error.raw_os_error() == Some(Errno::BUSY.raw_os_error())
}

/// Takes the store's lock on this device. From then on no other daemon reads or writes it.
pub(super) fn lock(file: &File, path: &Path) -> Result<(), DeviceError> {
    if is_disabled(Safeguard::Lock) {
        return Ok(());
    }
    let start = Instant::now();
    let mut wait = LOCK_WAIT;
    loop {
        match rustix::fs::flock(file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => return Ok(()),
            Err(Errno::WOULDBLOCK) => {
                let pid = lock_holder(file);
                wait = wait_limit(wait, pid, has_ended);
                if start.elapsed() >= wait {
                    return Err(DeviceError::Locked {
                        path: path.to_owned(),
                        pid,
                    });
                }
                std::thread::sleep(LOCK_RETRY);
            }
            Err(Errno::INTR) => {}
            Err(errno) => {
                return Err(failed(path, "locking it")(errno.into()));
            }
        }
    }
}

/// How long to wait for this holder; `before` is the time for the previous one.
fn wait_limit(before: Duration, pid: Option<u32>, has_ended: impl Fn(u32) -> bool) -> Duration {
    match pid {
        Some(pid) if has_ended(pid) => DEAD_LOCK_WAIT,
        Some(_) => LOCK_WAIT,
        // The lock was released since the last try; the next try takes it.
        None => before,
    }
}

/// Finds the holder of the lock in the kernel's list, if possible.
fn lock_holder(file: &File) -> Option<u32> {
    let inode = file.metadata().ok()?.ino();
    let list = std::fs::read_to_string("/proc/locks").ok()?;
    // `1: FLOCK  ADVISORY  WRITE 1234 08:01:5678 0 EOF`
    list.lines().find_map(|line| {
        let fields: Vec<_> = line.split_whitespace().collect();
        let place = fields.iter().position(|f| *f == "FLOCK")?;
        let found: u64 = fields.get(place + 4)?.rsplit(':').next()?.parse().ok()?;
        (found == inode).then(|| fields.get(place + 3)?.parse().ok())?
    })
}

/// Whether no program runs under this number any more.
fn has_ended(pid: u32) -> bool {
    match std::fs::read_to_string(format!("/proc/{pid}/stat")) {
        // `1234 (name) Z ...`: the name may contain anything, so the state follows the last parenthesis.
        Ok(stat) => stat
            .rsplit(')')
            .next()
            .is_some_and(|rest| rest.trim_start().starts_with(['Z', 'X'])),
        // Hidden from this process (a service that sees only its own), or gone.
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            Pid::from_raw(pid as i32).is_none_or(|pid| test_kill_process(pid) == Err(Errno::SRCH))
        }
        Err(_) => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lock_that_a_dead_one_lets_go_of_between_two_looks_is_still_waited_for() {
        let dead = |pid| pid == 7;
        let mut wait = LOCK_WAIT;
        let mut look = |pid| {
            wait = wait_limit(wait, pid, dead);
            wait
        };
        assert_eq!(look(None), LOCK_WAIT, "nobody knows who has it");
        assert_eq!(look(Some(7)), DEAD_LOCK_WAIT);
        assert_eq!(look(None), DEAD_LOCK_WAIT, "it was the dead one's");
        assert_eq!(look(Some(8)), LOCK_WAIT, "a living one has it now");
    }
}
