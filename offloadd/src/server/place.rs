//! Where the daemon's socket lies: taken over from a predecessor that is going, given up while it is ours.
//!
//! A daemon that ends gives its store's lock back first, so that its successor can start recovering, and its socket last.
//! Without a wait here the successor would be refused for as long as that takes. A predecessor removes its socket while it still
//! listens: later it might be the successor's.

use std::fs::Metadata;
use std::io;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use super::SocketError;

/// How long one that listens may take to go. Whoever does not serves another store: this one's lock is ours already.
pub(super) const LEAVING: Duration = Duration::from_secs(10);

const LOOK_AGAIN: Duration = Duration::from_millis(10);

/// Makes `path` free to be bound: a dead daemon's socket goes, a living one's is an error.
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
            Err(e) => return Err(failed("looking for a predecessor's")(e)),
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
            // ECONNREFUSED: nobody listens. EPROTOTYPE: a socket of the other kind; its daemon is told apart by the first one.
            Err(_) => {
                return match std::fs::remove_file(path) {
                    // Its daemon was quicker.
                    Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(()),
                    removed => removed.map_err(failed("removing a dead daemon's")),
                };
            }
        }
    }
}

/// The place of a socket that was bound, given up when this is dropped, unless another socket lies there by then. To be
/// dropped while its listener is there: so long no other file has its number, and a successor that can connect waits.
#[derive(Debug)]
pub struct Place {
    path: PathBuf,
    ours: Option<(u64, u64)>,
}

impl Place {
    /// Of the socket that was bound at `path` just now.
    pub fn of(path: &Path) -> Self {
        Self {
            ours: number(path),
            path: path.to_owned(),
        }
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        if self.ours.is_some() && number(&self.path) == self.ours {
            // What is left then is cleared by the next start.
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
        let bind = || (UnixListener::bind(&path).unwrap(), Place::of(&path));
        let (old, place) = bind();
        // As an administrator may, for who is to connect.
        std::fs::set_permissions(&path, PermissionsExt::from_mode(0o666)).unwrap();
        drop(place);
        assert!(!path.exists());
        // Somebody may have put another daemon there by hand.
        let (other, place) = bind();
        std::fs::remove_file(&path).unwrap();
        let (others, others_place) = bind();
        drop(place);
        UnixStream::connect(&path).expect("another's socket stays");
        drop((others_place, others, other));
        clear_socket(&path).unwrap();
        let (_successor, place) = bind();
        drop(old);
        UnixStream::connect(&path).expect("the successor is there");
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
        // It has asked: it would have been refused by now.
        drop(going.accept().unwrap());
        drop(going);
        successor.join().unwrap().unwrap();
        assert!(!path.exists());
    }
}
