//! Where the daemon's socket lies: taken over from a predecessor that is going, given up only while it is ours.
//!
//! A daemon that ends gives its store's lock back first, so that its successor can start recovering, and its socket last.
//! Without a wait here the successor would be refused for as long as that takes; without a look at the end the predecessor
//! would remove the successor's socket instead of its own.

use std::fs::Metadata;
use std::io;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use super::SocketError;

/// How long one that listens may take to go. Whoever does not serves another store: this one's lock is ours already.
const LEAVING: Duration = Duration::from_secs(10);

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

/// A socket that was bound, removed when this is dropped, unless another lies there by then.
#[derive(Debug)]
pub struct Place {
    path: PathBuf,
    ours: Option<Made>,
}

/// A file's number, and when it was made: the number alone may be given again.
type Made = (u64, u64, i64, i64);

impl Place {
    /// Of the socket that was bound at `path` just now.
    pub fn of(path: &Path) -> Self {
        Self {
            ours: made(path),
            path: path.to_owned(),
        }
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        if self.ours.is_some() && made(&self.path) == self.ours {
            // What is left then is cleared by the next start.
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

fn made(path: &Path) -> Option<Made> {
    let number = |found: Metadata| (found.dev(), found.ino(), found.ctime(), found.ctime_nsec());
    std::fs::symlink_metadata(path).ok().map(number)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::net::UnixListener;

    #[test]
    fn a_socket_goes_with_its_daemon_and_a_successors_stays() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("socket");
        let bind = || (UnixListener::bind(&path).unwrap(), Place::of(&path));
        let (listener, place) = bind();
        drop((listener, place));
        assert!(!path.exists());

        let (old, old_place) = bind();
        drop(old);
        clear_socket(&path).unwrap();
        // The clock of the file system may stand for some milliseconds.
        std::thread::sleep(Duration::from_millis(50));
        let (_successor, place) = bind();
        drop(old_place);
        UnixStream::connect(&path).expect("the successor is there");
        drop(place);
        assert!(!path.exists());
    }

    #[test]
    fn one_that_is_going_is_waited_for() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("socket");
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
