//! The metrics endpoint for Prometheus: `GET /metrics` over HTTP/1.1, as OpenMetrics text, on a unix socket or on loopback.
//!
//! Anyone who can connect sees the names and counters of all jobs, so the endpoint never listens on a public address. Connections,
//! the bytes of a request's head and the duration of a connection are limited: a slow or malformed peer holds one connection for a
//! few seconds and does not delay others.

use std::convert::Infallible;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use http_body_util::Full;
use hyper::body::{Bytes, Incoming};
use hyper::header::{ALLOW, CONTENT_TYPE, HeaderValue};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, UnixListener};
use tokio::sync::{Semaphore, watch};

use super::{SocketError, bind, clear_socket, prepare_dir, stopped};
use crate::config::PageAddress;
use crate::core::Viewer;
use crate::driver::DriverHandle;
use crate::metrics::text;

/// Concurrent connections. Further ones wait in the kernel's queue.
const CONNECTIONS_MAX: usize = 32;

/// Time to receive the head of a request.
const HEAD_WAIT: Duration = Duration::from_secs(2);

/// Duration of a connection, including the answer.
const CONNECTION_WAIT: Duration = Duration::from_secs(5);

/// Limit of a request's head, which has a few hundred bytes: the smallest that hyper allows.
const HEAD_BYTES_MAX: usize = 8 << 10;

/// The endpoint, bound to its address.
#[derive(Debug)]
pub enum Page {
    /// Listener and path of a socket, which is removed on drop.
    Unix(UnixListener, PathBuf),
    /// Listener on a loopback interface.
    Loopback(TcpListener),
}

impl Page {
    /// Binds the address. Replaces the socket of a dead daemon; the socket of a running one is an error.
    ///
    /// # Errors
    /// [`SocketError`].
    pub async fn bind(address: &PageAddress) -> Result<Self, SocketError> {
        match address {
            PageAddress::Unix(path) => {
                prepare_dir(path, false)?;
                clear_socket(path)?;
                let listener = UnixListener::from_std(bind(path)?);
                let listener = listener.map_err(|source| SocketError::System {
                    path: path.clone(),
                    action: "listening on it",
                    source,
                })?;
                Ok(Self::Unix(listener, path.clone()))
            }
            PageAddress::Loopback(at) => {
                let listener = TcpListener::bind(at).await;
                let listener = listener.map_err(|source| SocketError::System {
                    path: at.to_string().into(),
                    action: "binding it for the metrics endpoint (the packaged service needs metrics-loopback.conf)",
                    source,
                })?;
                Ok(Self::Loopback(listener))
            }
        }
    }

    /// Answers requests until `stop` is true or its sender is dropped.
    pub async fn serve(self, driver: DriverHandle, stop: watch::Receiver<bool>) {
        let places = Arc::new(Semaphore::new(CONNECTIONS_MAX));
        let serving = async {
            loop {
                let place = places.clone().acquire_owned().await.expect("never closed");
                let accepted: io::Result<()> = match &self {
                    Self::Unix(listener, _) => listener.accept().await.map(|(stream, _)| {
                        tokio::spawn(answer(stream, driver.clone(), place));
                    }),
                    Self::Loopback(listener) => listener.accept().await.map(|(stream, _)| {
                        tokio::spawn(answer(stream, driver.clone(), place));
                    }),
                };
                if let Err(error) = accepted {
                    // Usually out of file descriptors. Retrying at once would keep a CPU busy.
                    tracing::error!(%error, "cannot accept a connection to the metrics endpoint");
                    tokio::time::sleep(Duration::from_millis(100)).await;
                }
            }
        };
        tokio::select! {
            () = serving => {}
            () = stopped(stop) => {}
        }
    }
}

impl Drop for Page {
    fn drop(&mut self) {
        if let Self::Unix(_, path) = self {
            let _ = std::fs::remove_file(path);
        }
    }
}

/// Answers one request and closes the connection.
async fn answer<P: Send>(
    stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
    driver: DriverHandle,
    _place: P,
) {
    let service = service_fn(|request| respond(request, &driver));
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(HEAD_WAIT)
        .max_buf_size(HEAD_BYTES_MAX)
        .keep_alive(false)
        .serve_connection(TokioIo::new(stream), service);
    match tokio::time::timeout(CONNECTION_WAIT, connection).await {
        Ok(Ok(())) => {}
        // The peer's mistake; hyper has answered if it could.
        Ok(Err(error)) => tracing::debug!(%error, "failed connection to the metrics endpoint"),
        Err(_) => tracing::debug!("timeout of a connection to the metrics endpoint"),
    }
}

async fn respond(
    request: Request<Incoming>,
    driver: &DriverHandle,
) -> Result<Response<Full<Bytes>>, Infallible> {
    let refusal = |status, text: &'static str| {
        let mut response = Response::new(Full::from(text));
        *response.status_mut() = status;
        response
    };
    if request.uri().path() != "/metrics" {
        return Ok(refusal(StatusCode::NOT_FOUND, "not found: try /metrics\n"));
    }
    if request.method() != Method::GET && request.method() != Method::HEAD {
        let mut response = refusal(StatusCode::METHOD_NOT_ALLOWED, "use GET\n");
        let allowed = HeaderValue::from_static("GET, HEAD");
        response.headers_mut().insert(ALLOW, allowed);
        return Ok(response);
    }
    let snapshot = match driver.snapshot(Viewer::All) {
        Ok(answer) => answer.await.ok().and_then(Result::ok),
        Err(_) => None,
    };
    let Some(snapshot) = snapshot else {
        return Ok(refusal(
            StatusCode::SERVICE_UNAVAILABLE,
            "offloadd is stopping or overloaded\n",
        ));
    };
    let page = text::text(Arc::unwrap_or_clone(snapshot));
    let mut response = Response::new(Full::from(page));
    let content_type = HeaderValue::from_static(text::CONTENT_TYPE);
    response.headers_mut().insert(CONTENT_TYPE, content_type);
    Ok(response)
}
