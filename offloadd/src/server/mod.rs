//! Calls over the unix socket. This is the only async part of the daemon: it checks messages and waits for the owner thread.
//!
//! Limited: connections per user, calls per connection, bytes per message, unread answers per user, calls that wait for the owner
//! thread.

use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::time::Duration;

use tokio::sync::watch;
use tokio_stream::StreamExt;
use tokio_stream::wrappers::UnboundedReceiverStream;

use offload_api::handoff;

use crate::driver::DriverHandle;

mod acceptor;
mod checked;
mod content;
mod grpc;
mod job_record;
pub mod page;
mod peer;
mod place;
mod scrub;
mod sizes;

use acceptor::Acceptor;
pub use grpc::About;
use grpc::Service;
use peer::{ConnectionCounts, PeerStream};
pub use place::{SocketPath, clear_socket};
use scrub::Scrubs;
use sizes::Sizes;

/// Concurrent calls per connection: a commit that waits for other ranks, and a few more.
const CALLS_A_CONNECTION: usize = 8;

/// How long connections may take to end when the server stops.
const LAST_ANSWERS: Duration = Duration::from_secs(2);

/// Reason why the socket cannot be bound.
#[derive(Debug, thiserror::Error)]
pub enum SocketError {
    /// Another daemon serves at this path.
    #[error(
        "socket {path}: another offloadd (pid {pid}) still serves here after {} s: stop it, or set another `socket`",
        place::LEAVING.as_secs()
    )]
    Taken {
        /// Path of the socket.
        path: PathBuf,
        /// Process of the other daemon.
        pid: i32,
    },
    /// Another kind of file exists at the path.
    #[error(
        "socket {path}: a file that is not a socket exists there; remove it, or set another `socket`"
    )]
    NoSocket {
        /// Path of the file.
        path: PathBuf,
    },
    /// Other users could reach a private daemon.
    #[error(
        "socket {path}: its directory must belong to uid {uid} with mode 0700, but belongs to uid {found_uid} with mode {found_mode:o}"
    )]
    Open {
        /// Path of the socket.
        path: PathBuf,
        /// User ID of the daemon.
        uid: u32,
        /// User ID of the directory.
        found_uid: u32,
        /// Mode of the directory.
        found_mode: u32,
    },
    /// A system call failed.
    #[error("socket {path}: {action}: {source}")]
    System {
        /// Path of the socket.
        path: PathBuf,
        /// The attempted action.
        action: &'static str,
        /// Error of the system.
        source: io::Error,
    },
}

/// Creates the socket's directory if it is missing, and checks that only this user may enter that of a private daemon.
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
        Err(e) => return Err(failed("creating its directory")(e)),
    }
    if !private {
        return Ok(());
    }
    let found = std::fs::metadata(dir).map_err(failed("checking its directory"))?;
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

/// Binds a socket that does not block, with a mode according to the umask. Call [`clear_socket`] first.
///
/// # Errors
/// [`SocketError::System`].
pub fn bind(path: &Path) -> Result<UnixListener, SocketError> {
    let bound = UnixListener::bind(path).and_then(|listener| {
        // Sets the length of the queue anew.
        rustix::net::listen(&listener, handoff::BACKLOG)?;
        listener.set_nonblocking(true)?;
        Ok(listener)
    });
    bound.map_err(|source| SocketError::System {
        path: path.to_owned(),
        action: "binding it",
        source,
    })
}

/// Reason why calls are not answered any more.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    /// The thread that accepts connections could not be started.
    #[error("starting the thread that accepts connections: {0}")]
    Acceptor(#[source] io::Error),
    /// Error of the transport.
    #[error(transparent)]
    Transport(#[from] tonic::transport::Error),
}

/// Answers calls until `stop` is true (or its sender is dropped) and the last answers have been sent.
///
/// # Errors
/// [`ServeError`].
pub async fn serve(
    listener: UnixListener,
    driver: DriverHandle,
    about: About,
    stop: watch::Receiver<bool>,
) -> Result<(), ServeError> {
    let connections = ConnectionCounts::new(about.sessions_max);
    let scrubs = Scrubs::new(about.scrub_bytes_per_s_max);
    let (_acceptor, admitted) =
        Acceptor::start(listener, connections).map_err(ServeError::Acceptor)?;
    let incoming = UnboundedReceiverStream::new(admitted).filter_map(|one| {
        let stream = PeerStream::from_admitted(one);
        // An error would end the server; the connection is closed.
        let failed = |error: &io::Error| tracing::error!(%error, "cannot serve a connection");
        stream.inspect_err(failed).ok().map(Ok::<_, io::Error>)
    });
    let serving = tonic::transport::Server::builder()
        .concurrency_limit_per_connection(CALLS_A_CONNECTION)
        .max_concurrent_streams(CALLS_A_CONNECTION as u32)
        .http2_max_header_list_size(16 << 10)
        .add_service(Sizes::new(Service {
            driver,
            about,
            scrubs,
            adding: tokio::sync::Mutex::default(),
        }))
        .serve_with_incoming_shutdown(incoming, stopped(stop.clone()));
    let timeouts = async {
        stopped(stop).await;
        tokio::time::sleep(LAST_ANSWERS).await;
    };
    tokio::select! {
        result = serving => Ok(result?),
        // A peer that does not read its answer must not delay the stop.
        () = timeouts => Ok(()),
    }
}

async fn stopped(mut stop: watch::Receiver<bool>) {
    // Fails if the sender was dropped, which is a stop as well.
    let _ = stop.wait_for(|stop| *stop).await;
}
