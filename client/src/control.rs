//! Blocking gRPC calls with deadlines. The only async code of this crate, in one thread that owns the connection.

use std::future::Future;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::mpsc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use offload_api::MESSAGE_BYTES_MAX;
use offload_api::fault::{Fault, FaultKind};
use offload_api::proto::offload_client::OffloadClient;
use tonic::transport::{Channel, Endpoint};
use tonic::{Response, Status};

use crate::ClientError;
use crate::signal::Waker;

/// Time limit for connecting. A daemon accepts at once; the limit is for one that hangs.
const CONNECT_WAIT: Duration = Duration::from_secs(10);

/// How long to try to get a connection from a daemon that is there and takes none: its queue is full, or the user has too many.
pub(crate) const BUSY_WAIT: Duration = Duration::from_secs(30);

/// Time between two such attempts. The daemon empties its queue within milliseconds.
pub(crate) const BUSY_AGAIN: Duration = Duration::from_millis(5);

/// How long a process that was started again after a failure waits for a daemon that may be starting again too.
const AGAIN_WAIT: Duration = Duration::from_secs(60);

/// Time between two such attempts.
const AGAIN_PAUSE: Duration = Duration::from_millis(100);

/// Time limit of a call that touches no device.
pub(crate) const SHORT_WAIT: Duration = Duration::from_secs(30);

/// Time limit of other calls. Populating an arena can take seconds a GiB, and a commit waits for its slowest rank and device.
pub(crate) const LONG_WAIT: Duration = Duration::from_secs(600);

/// How long to wait for an answer that was already sent when the daemon hung up.
const LAST_ANSWER_WAIT: Duration = Duration::from_secs(1);

pub(crate) type Client = OffloadClient<Channel>;

/// A connection to a daemon. Dropping it cancels calls in progress.
pub(crate) struct Control {
    socket: PathBuf,
    client: Client,
    runtime: tokio::runtime::Handle,
    /// Woken when a call ends.
    ended: Waker,
    stop: Option<tokio::sync::oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Control {
    pub(crate) fn connect(socket: &Path) -> Result<Self, ClientError> {
        let connect = |source| ClientError::Connect {
            socket: socket.to_owned(),
            source,
        };
        let name = socket.to_str().ok_or_else(|| {
            let what = "the path of a socket must be UTF-8";
            connect(io::Error::new(io::ErrorKind::InvalidInput, what))
        })?;
        let endpoint = Endpoint::from_shared(format!("unix:{name}"))
            .map_err(|e| connect(io::Error::other(e)))?;
        let ended = Waker::new()?;
        let (started, start) = mpsc::sync_channel(1);
        let (stop, stopped) = tokio::sync::oneshot::channel();
        let thread = std::thread::Builder::new()
            .name("offload-control".into())
            .spawn(move || {
                let runtime = match tokio::runtime::Builder::new_current_thread()
                    .enable_all()
                    .build()
                {
                    Ok(runtime) => runtime,
                    Err(error) => return drop(started.send(Err(error))),
                };
                runtime.block_on(async {
                    let ready = connect_to(&endpoint)
                        .await
                        .map(|c| (c, tokio::runtime::Handle::current()));
                    if started.send(ready).is_ok() {
                        // An error means that `Control` was dropped, which also stops the thread.
                        let _ = stopped.await;
                    }
                });
            })
            .map_err(connect)?;
        let (channel, runtime) =
            start
                .recv()
                .expect("the thread answers once")
                .map_err(|source| match source.kind() {
                    io::ErrorKind::WouldBlock => ClientError::Busy {
                        socket: socket.to_owned(),
                        waited: BUSY_WAIT,
                    },
                    _ => connect(source),
                })?;
        Ok(Self {
            socket: socket.to_owned(),
            client: Client::new(channel)
                .max_decoding_message_size(MESSAGE_BYTES_MAX)
                .max_encoding_message_size(MESSAGE_BYTES_MAX),
            runtime,
            ended,
            stop: Some(stop),
            thread: Some(thread),
        })
    }

    pub(crate) fn socket(&self) -> &Path {
        &self.socket
    }

    /// The waker that a call wakes when it ends.
    pub(crate) fn ended(&self) -> &Waker {
        &self.ended
    }

    /// Starts a call that ends after `limit` at the latest.
    pub(crate) fn begin<R, F>(
        &self,
        call: &'static str,
        limit: Duration,
        make: impl FnOnce(Client) -> F,
    ) -> Pending<R>
    where
        R: Send + 'static,
        F: Future<Output = Result<Response<R>, Status>> + Send + 'static,
    {
        let (sender, answer) = mpsc::sync_channel(1);
        let answering = make(self.client.clone());
        let ended = self.ended.clone();
        self.runtime.spawn(async move {
            let result = match tokio::time::timeout(limit, answering).await {
                Ok(Ok(response)) => Ok(response.into_inner()),
                Ok(Err(status)) => Err(Some(status)),
                Err(_) => Err(None),
            };
            // An error means that the caller stopped waiting.
            let _ = sender.send(result);
            ended.wake();
        });
        Pending {
            call,
            limit,
            started: Instant::now(),
            socket: self.socket.clone(),
            answer,
        }
    }

    /// Calls the daemon and waits for the answer.
    pub(crate) fn call<R, F>(
        &self,
        call: &'static str,
        limit: Duration,
        make: impl FnOnce(Client) -> F,
    ) -> Result<R, ClientError>
    where
        R: Send + 'static,
        F: Future<Output = Result<Response<R>, Status>> + Send + 'static,
    {
        self.begin(call, limit, make).wait()
    }
}

impl Drop for Control {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take() {
            // The thread has already printed its panic, if any.
            let _ = thread.join();
        }
    }
}

/// A call in progress.
#[derive(Debug)]
pub(crate) struct Pending<R> {
    call: &'static str,
    limit: Duration,
    started: Instant,
    socket: PathBuf,
    answer: mpsc::Receiver<Result<R, Option<Status>>>,
}

impl<R> Pending<R> {
    /// Returns the answer, if it has arrived.
    pub(crate) fn poll(&self) -> Option<Result<R, ClientError>> {
        self.poll_for(Duration::ZERO)
    }

    /// Returns the last answer of a daemon that hung up, or an error that it is gone. A daemon also hangs up after it closed or
    /// evicted a session, and then the answer says so. Calls to a dead daemon fail at once.
    pub(crate) fn last_words(&self) -> Result<R, ClientError> {
        self.poll_for(LAST_ANSWER_WAIT)
            .unwrap_or_else(|| Err(self.gone()))
    }

    fn wait(self) -> Result<R, ClientError> {
        // The task ends by itself at the limit; the extra time guards against a bug there.
        self.poll_for(self.limit + Duration::from_secs(5))
            .unwrap_or_else(|| self.told(Err(None)))
    }

    /// Returns the answer, if it arrives within `limit`.
    pub(crate) fn poll_for(&self, limit: Duration) -> Option<Result<R, ClientError>> {
        match self.answer.recv_timeout(limit) {
            Ok(result) => Some(self.told(result)),
            Err(mpsc::RecvTimeoutError::Timeout) => None,
            Err(mpsc::RecvTimeoutError::Disconnected) => Some(Err(self.gone())),
        }
    }

    fn told(&self, result: Result<R, Option<Status>>) -> Result<R, ClientError> {
        result.map_err(|status| match status {
            None => ClientError::Timeout {
                call: self.call,
                socket: self.socket.clone(),
                waited: self.started.elapsed(),
            },
            // Only a daemon puts a fault into the details; without one the connection broke.
            Some(status) if status.details().is_empty() && is_broken(&status) => self.gone(),
            Some(status) => match Fault::from(&status) {
                fault if fault.kind == FaultKind::Stopping && status.details().is_empty() => {
                    ClientError::protocol(format!("{}: {status}", self.call))
                }
                fault => ClientError::Refused(fault),
            },
        })
    }

    fn gone(&self) -> ClientError {
        ClientError::DaemonGone {
            socket: self.socket.clone(),
        }
    }
}

/// Whether a launcher (`trainer launch`, torchrun) has started this process again after a failure, which may be that the daemon ended.
fn is_started_again() -> bool {
    let count = std::env::var("TORCHELASTIC_RESTART_COUNT");
    count.is_ok_and(|count| count.parse().is_ok_and(|count: u32| count > 0))
}

/// Connects. Tries again while the daemon's queue of connections is full and, in a process that was started again, while no daemon listens.
async fn connect_to(endpoint: &Endpoint) -> io::Result<Channel> {
    let began = Instant::now();
    loop {
        let connecting = tokio::time::timeout(CONNECT_WAIT, endpoint.connect());
        let error = match connecting.await {
            Ok(Ok(channel)) => return Ok(channel),
            Ok(Err(error)) => io_error(&error),
            Err(_) => io::ErrorKind::TimedOut.into(),
        };
        let (wait, pause) = match error.kind() {
            io::ErrorKind::WouldBlock => (BUSY_WAIT, BUSY_AGAIN),
            io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused if is_started_again() => {
                (AGAIN_WAIT, AGAIN_PAUSE)
            }
            _ => return Err(error),
        };
        if began.elapsed() >= wait {
            return Err(error);
        }
        tokio::time::sleep(pause).await;
    }
}

/// Whether tonic reports a lost connection.
fn is_broken(status: &Status) -> bool {
    use tonic::Code;
    matches!(
        status.code(),
        Code::Unavailable | Code::Unknown | Code::Cancelled | Code::Internal
    ) && std::error::Error::source(status).is_some()
}

/// Finds the system's error behind a transport error, to tell "no such file" from "permission denied".
fn io_error(error: &(dyn std::error::Error + 'static)) -> io::Error {
    let mut cause = Some(error);
    while let Some(error) = cause {
        if let Some(io) = error.downcast_ref::<io::Error>() {
            return match io.raw_os_error() {
                Some(errno) => io::Error::from_raw_os_error(errno),
                None => io::Error::new(io.kind(), io.to_string()),
            };
        }
        cause = error.source();
    }
    io::Error::other(error.to_string())
}
