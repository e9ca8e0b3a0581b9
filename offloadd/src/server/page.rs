//! Counts for Prometheus: `GET /metrics` over HTTP/1.1, on a unix socket or on loopback; OpenMetrics, or the text of before it for
//! who asks for that.
//!
//! Whoever reaches the socket sees all jobs' names and counts, so that it is never bound to anything but this machine.
//! Bounded: connections at a time, bytes of a request's head, seconds of a connection; a peer that is slow or sends
//! nonsense keeps one place for that long and delays nobody else.

use std::convert::Infallible;
use std::io;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use http_body_util::Full;
use hyper::body::{Bytes, Incoming};
use hyper::header::{ACCEPT, ALLOW, CONTENT_TYPE, VARY};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, UnixListener};
use tokio::sync::{Semaphore, watch};

use super::{SocketError, bind, clear_socket, prepare_dir, stopped};
use crate::core::Viewer;
use crate::driver::DriverHandle;
use crate::metrics::text;

/// Connections at a time. One asks every few seconds; others wait in the kernel's queue.
const CONNECTIONS_MAX: usize = 32;

/// From the first byte to the last of a request's head.
const HEAD_WAIT: Duration = Duration::from_secs(2);

/// Of one connection, the answer included.
const CONNECTION_WAIT: Duration = Duration::from_secs(5);

/// A scraper's head has some hundred bytes. The least that hyper takes.
const HEAD_BYTES_MAX: usize = 8 << 10;

/// Where Prometheus comes to ask.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PageAddress {
    /// A socket of this machine's file system.
    Unix(PathBuf),
    /// On loopback.
    Loopback(SocketAddr),
}

impl PageAddress {
    /// "unix:/run/offloadd/metrics.sock" or "127.0.0.1:9464".
    ///
    /// # Errors
    /// What is wrong with the words.
    pub fn parse(words: &str) -> Result<Self, String> {
        if let Some(path) = words.strip_prefix("unix:") {
            return match Path::new(path) {
                path if path.is_absolute() => Ok(Self::Unix(path.to_owned())),
                _ => Err(format!("`{words}`: the socket's path must be absolute")),
            };
        }
        let address: SocketAddr = words.parse().map_err(|_| {
            format!("`{words}` is neither \"unix:/PATH\" nor an address like \"127.0.0.1:9464\"")
        })?;
        if address.ip().is_loopback() {
            return Ok(Self::Loopback(address));
        }
        Err(format!(
            "{address} can be reached from other machines, and the counts name every user's jobs: listen at 127.0.0.1, ::1 or \
             a unix socket, and let an agent or a proxy that asks for a password pass them on"
        ))
    }
}

impl PageAddress {
    /// What [`Self::parse`] takes.
    pub fn words(&self) -> String {
        match self {
            Self::Unix(_) => self.to_string(),
            Self::Loopback(address) => address.to_string(),
        }
    }
}

impl std::fmt::Display for PageAddress {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Unix(path) => write!(f, "unix:{}", path.display()),
            Self::Loopback(address) => write!(f, "http://{address}/metrics"),
        }
    }
}

/// A bound address.
#[derive(Debug)]
pub enum Page {
    /// Removed when dropped.
    Unix(UnixListener, PathBuf),
    /// On loopback.
    Loopback(TcpListener),
}

impl Page {
    /// Binds the address; a dead daemon's socket goes, a living one's is an error.
    ///
    /// # Errors
    /// [`SocketError`].
    pub async fn bind(address: &PageAddress) -> Result<Self, SocketError> {
        match address {
            PageAddress::Unix(path) => {
                prepare_dir(path, false)?;
                clear_socket(path)?;
                Ok(Self::Unix(bind(path)?, path.clone()))
            }
            PageAddress::Loopback(at) => {
                let listener = TcpListener::bind(at).await;
                let listener = listener.map_err(|source| SocketError::System {
                    path: at.to_string().into(),
                    action: "binding it for metrics",
                    source,
                })?;
                Ok(Self::Loopback(listener))
            }
        }
    }

    /// Answers until `stop` turns true or its sender is gone.
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
                    // Out of descriptors, mostly. At once again it would burn a CPU.
                    tracing::error!(%error, "cannot accept a connection for metrics");
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

/// One connection, one answer: nothing is kept between two questions.
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
        // Its own mistake, and it has been told where it could be.
        Ok(Err(error)) => tracing::debug!(%error, "a connection for metrics"),
        Err(_) => tracing::debug!("a connection for metrics was too slow"),
    }
}

async fn respond(
    request: Request<Incoming>,
    driver: &DriverHandle,
) -> Result<Response<Full<Bytes>>, Infallible> {
    let plain = |status, words: &'static str| {
        let mut response = Response::new(Full::from(words));
        *response.status_mut() = status;
        response
    };
    if request.uri().path() != "/metrics" {
        return Ok(plain(StatusCode::NOT_FOUND, "only /metrics is here\n"));
    }
    if request.method() != Method::GET && request.method() != Method::HEAD {
        let mut refusal = plain(StatusCode::METHOD_NOT_ALLOWED, "GET it\n");
        let allowed = hyper::header::HeaderValue::from_static("GET, HEAD");
        refusal.headers_mut().insert(ALLOW, allowed);
        return Ok(refusal);
    }
    let looked = match driver.look(Viewer::All) {
        Ok(answer) => answer.await.ok().and_then(Result::ok),
        Err(_) => None,
    };
    let Some(snapshot) = looked else {
        return Ok(plain(
            StatusCode::SERVICE_UNAVAILABLE,
            "offloadd stops or is very busy\n",
        ));
    };
    let accept = request.headers().get_all(ACCEPT).into_iter();
    let older = text::plain::is_wanted(accept.filter_map(|header| header.to_str().ok()));
    let page = text::text(Arc::unwrap_or_clone(snapshot));
    let (page, content_type) = match older {
        true => (text::plain::plain(&page), text::plain::CONTENT_TYPE),
        false => (page, text::CONTENT_TYPE),
    };
    let mut response = Response::new(Full::from(page));
    let content_type = hyper::header::HeaderValue::from_static(content_type);
    response.headers_mut().insert(CONTENT_TYPE, content_type);
    response
        .headers_mut()
        .insert(VARY, hyper::header::HeaderValue::from_static("accept"));
    Ok(response)
}
