//! Ownership of the socket's path, when one daemon replaces another.
//!
//! A daemon that stops releases the store's lock first, so that its successor can start recovery, and removes its socket last. The
//! successor waits here for that. A daemon removes its socket while it still listens, because later the path may be the successor's.

use std::fs::Metadata;
use std::io;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use super::SocketError;

/// How long to wait for a daemon that listens. One that stays serves another store, because this store is already locked.
pub(super) const LEAVING: Duration = Duration::from_secs(10);

const LOOK_AGAIN: Duration = Duration::from_millis(10);

/// Frees `path` to be bound: removes the socket of a dead daemon; the socket of a running one is an error.
///
/// # Errors
/// [`SocketError`].
pub fn clear_socket(path: &Path) -> Result<(), SocketError> {
    let failed = |action| {
        move |source| SocketError::System {
            path: path.to_owned(),
            action,
            source,
        }
    };
    let limit = Instant::now() + LEAVING;
    loop {
        match std::fs::symlink_metadata(path) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(()),
            Err(e) => return Err(failed("checking for an existing socket")(e)),
            Ok(found) if !found.file_type().is_socket() => {
                return Err(SocketError::NoSocket {
                    path: path.to_owned(),
                });
            }
            Ok(_) => {}
        }
        match UnixStream::connect(path) {
            Ok(_) if Instant::now() < limit => std::thread::sleep(LOOK_AGAIN),
            Ok(stream) => {
                let pid = rustix::net::sockopt::socket_peercred(&stream)
                    .map_or(0, |peer| peer.pid.as_raw_nonzero().get());
                return Err(SocketError::Taken {
                    path: path.to_owned(),
                    pid,
                });
            }
            // ECONNREFUSED: no listener. EPROTOTYPE: the descriptor socket, whose daemon was checked through the other socket.
            Err(_) => {
                return match std::fs::remove_file(path) {
                    // Its daemon has removed it.
                    Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(()),
                    removed => removed.map_err(failed("removing the socket of a dead daemon")),
                };
            }
        }
    }
}

/// Path of a bound socket. Removes the socket on drop, unless another file is at the path by then. Drop it before the listener: until
/// then no other file has the same inode, and a successor that can connect waits.
#[derive(Debug)]
pub struct SocketPath {
    path: PathBuf,
    ours: Option<(u64, u64)>,
}

impl SocketPath {
    /// Call right after the socket was bound at `path`.
    pub fn at(path: &Path) -> Self {
        Self {
            ours: number(path),
            path: path.to_owned(),
        }
    }
}

impl Drop for SocketPath {
    fn drop(&mut self) {
        if self.ours.is_some() && number(&self.path) == self.ours {
            // A socket that is left is removed by the next start.
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

fn number(path: &Path) -> Option<(u64, u64)> {
    let number = |found: Metadata| (found.dev(), found.ino());
    std::fs::symlink_metadata(path).ok().map(number)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;
    use std::os::unix::net::UnixListener;

    #[test]
    fn a_socket_goes_before_its_daemon_and_a_successors_stays() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("socket");
        let bind = || (UnixListener::bind(&path).unwrap(), SocketPath::at(&path));
        let (old, place) = bind();
        // An administrator may change the owner.
        std::fs::set_permissions(&path, PermissionsExt::from_mode(0o666)).unwrap();
        drop(place);
        assert!(!path.exists());
        // Another daemon may have been started by hand.
        let (other, place) = bind();
        std::fs::remove_file(&path).unwrap();
        let (others, others_place) = bind();
        drop(place);
        UnixStream::connect(&path).expect("the socket of another daemon stays");
        drop((others_place, others, other));
        clear_socket(&path).unwrap();
        let (_successor, place) = bind();
        drop(old);
        UnixStream::connect(&path).expect("the successor listens");
        drop(place);
        assert!(!path.exists());
    }

    #[test]
    fn one_that_is_going_is_waited_for() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("socket");
        let going = UnixListener::bind(&path).unwrap();
        let successor = std::thread::spawn({
            let path = path.clone();
            move || clear_socket(&path)
        });
        // It has connected, so it would have been refused by now.
        drop(going.accept().unwrap());
        drop(going);
        successor.join().unwrap().unwrap();
        assert!(!path.exists());
    }
}
