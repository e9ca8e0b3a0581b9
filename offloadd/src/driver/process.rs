//! A pidfd of the process at the other end of a unix socket, which is readable once the process has ended.
//!
//! `SO_PEERPIDFD` (Linux 6.5) returns the process that connected. Older supported kernels (5.15 and 6.1) return only its pid, which
//! may have been reused before it is opened. Then the hang-up of the socket still reports the end, unless a child holds a copy.
//! Contains `unsafe` for this socket option, which rustix lacks.

use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd, RawFd};

use rustix::process::{Pid, PidfdFlags};

/// From `asm-generic/socket.h`.
const SO_PEERPIDFD: libc::c_int = 77;

/// Returns a pidfd of the process that connected to `socket`. `pid` is `None` for a process in another PID namespace. Returns `None`
/// if the kernel provides none; then only the socket reports the end of the process.
pub(super) fn of_peer(socket: impl AsFd, pid: Option<Pid>) -> Option<OwnedFd> {
    connected(&socket).or_else(|| rustix::process::pidfd_open(pid?, PidfdFlags::empty()).ok())
}

fn connected(socket: impl AsFd) -> Option<OwnedFd> {
    let mut fd: RawFd = -1;
    let mut bytes = size_of::<RawFd>() as libc::socklen_t;
    // SAFETY: both pointers are to locals of the sizes passed, which outlive the call.
    let failed = unsafe {
        libc::getsockopt(
            socket.as_fd().as_raw_fd(),
            libc::SOL_SOCKET,
            SO_PEERPIDFD,
            (&raw mut fd).cast(),
            &raw mut bytes,
        )
    } != 0;
    // SAFETY: the kernel has just created this descriptor for us.
    (!failed && fd >= 0).then(|| unsafe { OwnedFd::from_raw_fd(fd) })
}

#[cfg(test)]
mod tests {
    use std::io::{BufRead, BufReader};
    use std::process::{Command, Stdio};

    use offload_api::handoff;
    use rustix::event::{PollFd, PollFlags, Timespec, poll};

    use super::*;

    fn has_ended(process: &OwnedFd, limit_s: i64) -> bool {
        let limit = Timespec {
            tv_sec: limit_s,
            tv_nsec: 0,
        };
        poll(&mut [PollFd::new(process, PollFlags::IN)], Some(&limit)).unwrap() == 1
    }

    /// A reused pid must not be taken for the process.
    #[test]
    fn the_process_that_connected_is_watched_whatever_has_its_number() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("s");
        let listener = handoff::listen(&path).unwrap();
        let connect = "import socket,sys; s=socket.socket(socket.AF_UNIX,socket.SOCK_SEQPACKET); s.connect(sys.argv[1]); print(1,flush=True); sys.stdin.read()";
        let child = Command::new("python3")
            .args(["-c", connect])
            .arg(&path)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn();
        let mut child = child.expect("python3, which `make test` needs");
        let mut line = String::new();
        let mut output = BufReader::new(child.stdout.take().unwrap());
        output.read_line(&mut line).unwrap();
        let (socket, _) = handoff::accept(&listener).unwrap().unwrap();
        if connected(&socket).is_none() {
            child.kill().unwrap();
            child.wait().unwrap();
            println!(
                "skipped: {}: this kernel has no SO_PEERPIDFD (6.5)",
                std::thread::current().name().unwrap_or("a test")
            );
            return;
        }
        // Our own pid, as if it had been reused for us.
        let process = of_peer(&socket, Some(rustix::process::getpid())).unwrap();
        assert!(!has_ended(&process, 0));
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(has_ended(&process, 30));
    }
}
