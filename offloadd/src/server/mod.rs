//! Calls over the unix socket: the one async part of the daemon. It checks messages and waits for the owner thread.
//!
//! Bounded: connections a user, calls of a connection, bytes of a message, answers that a user has not taken, calls that wait
//! for the owner thread.

use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use tokio::net::UnixListener;
use tokio::sync::watch;
use tokio_stream::StreamExt;
use tokio_stream::wrappers::UnixListenerStream;

use crate::driver::DriverHandle;

mod checked;
mod content;
mod grpc;
mod job_record;
mod measuring;
pub mod page;
mod peer;
mod place;
mod reported;
mod scrub;
mod sizes;

pub use grpc::About;
use grpc::Service;
use peer::Places;
pub use place::{Place, clear_socket};
use reported::Reports;
use scrub::Scrubs;
use sizes::Sizes;

/// Calls of one connection at a time: a commit that waits for other ranks, and some besides.
const CALLS_A_CONNECTION: usize = 8;

/// How long connections may take to end once nothing will be answered any more.
const LAST_ANSWERS: Duration = Duration::from_secs(2);

/// The socket cannot be had.
#[derive(Debug, thiserror::Error)]
pub enum SocketError {
    /// A living daemon answers there.
    #[error(
        "socket {path}: another offloadd (pid {pid}) serves here, and still did after {} s: stop it, or give this one another `socket`",
        place::LEAVING.as_secs()
    )]
    Taken {
        /// Of the socket.
        path: PathBuf,
        /// Of the other.
        pid: i32,
    },
    /// Something lies there that is no socket.
    #[error("socket {path}: a file that is no socket lies there; it stays as it is")]
    NoSocket {
        /// Of the file.
        path: PathBuf,
    },
    /// Others could reach a private daemon.
    #[error(
        "socket {path}: its directory must belong to uid {uid} with mode 0700, it has uid {found_uid} and mode {found_mode:o}"
    )]
    Open {
        /// Of the socket.
        path: PathBuf,
        /// Ours.
        uid: u32,
        /// The directory's.
        found_uid: u32,
        /// The directory's.
        found_mode: u32,
    },
    /// A system call failed.
    #[error("socket {path}: {action}: {source}")]
    System {
        /// Of the socket.
        path: PathBuf,
        /// What failed.
        action: &'static str,
        /// The errno.
        source: io::Error,
    },
}

/// Sees to the socket's directory: made if missing; of a private daemon nobody else may enter it.
///
/// # Errors
/// [`SocketError`].
pub fn prepare_dir(socket: &Path, private: bool) -> Result<(), SocketError> {
    let failed = |action| {
        move |source| SocketError::System {
            path: socket.to_owned(),
            action,
            source,
        }
    };
    let dir = socket.parent().unwrap_or(Path::new("/"));
    let mode = if private { 0o700 } else { 0o755 };
    match std::fs::DirBuilder::new().mode(mode).create(dir) {
        Ok(()) => {}
        Err(e) if e.kind() == io::ErrorKind::AlreadyExists => {}
        Err(e) => return Err(failed("making its directory")(e)),
    }
    if !private {
        return Ok(());
    }
    let found = std::fs::metadata(dir).map_err(failed("looking at its directory"))?;
    let uid = rustix::process::geteuid().as_raw();
    let found_mode = found.mode() & 0o777;
    if found.uid() != uid || found_mode & 0o077 != 0 {
        return Err(SocketError::Open {
            path: socket.to_owned(),
            uid,
            found_uid: found.uid(),
            found_mode,
        });
    }
    Ok(())
}

/// Binds the socket for calls. `path` is free (see [`clear_socket`]); its mode is what the umask leaves.
///
/// # Errors
/// [`SocketError::System`].
pub fn bind(path: &Path) -> Result<UnixListener, SocketError> {
    UnixListener::bind(path).map_err(|source| SocketError::System {
        path: path.to_owned(),
        action: "binding it",
        source,
    })
}

/// Answers calls until `stop` turns true (or its sender is gone) and the last answers are out.
///
/// # Errors
/// What the transport says.
pub async fn serve(
    listener: UnixListener,
    driver: DriverHandle,
    about: About,
    stop: watch::Receiver<bool>,
) -> Result<(), tonic::transport::Error> {
    let places = Places::new(about.sessions_max);
    let scrubs = Scrubs::new(about.scrub_bytes_per_s_max);
    let incoming =
        UnixListenerStream::new(listener).filter_map(move |accepted| places.admit(accepted));
    let serving = tonic::transport::Server::builder()
        .concurrency_limit_per_connection(CALLS_A_CONNECTION)
        .max_concurrent_streams(CALLS_A_CONNECTION as u32)
        .http2_max_header_list_size(16 << 10)
        .add_service(Sizes::new(Service {
            driver,
            about,
            scrubs,
            reports: Reports::default(),
            measuring: Arc::default(),
        }))
        .serve_with_incoming_shutdown(incoming, stopped(stop.clone()));
    let timeouts = async {
        stopped(stop).await;
        tokio::time::sleep(LAST_ANSWERS).await;
    };
    tokio::select! {
        result = serving => result,
        // A peer that never reads its answer must not keep us.
        () = timeouts => Ok(()),
    }
}

async fn stopped(mut stop: watch::Receiver<bool>) {
    // An error means that the sender is gone, which is a stop as well.
    let _ = stop.wait_for(|stop| *stop).await;
}
