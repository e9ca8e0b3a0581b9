//! Connects a command to the running daemon.

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result};
use offload_api::proto;
use offload_api::proto::offload_client::OffloadClient;
use offloadd::metrics::Snapshot;
use tonic::transport::{Channel, Endpoint};
use tonic::{Response, Status};

/// Limit for connecting and for one answer. A daemon that works answers in microseconds, and one with a busy drive in seconds.
const ANSWER_WAIT: Duration = Duration::from_secs(10);

/// Enough for the contents of a store with 1024 jobs.
const ANSWER_BYTES_MAX: usize = 64 << 20;

pub(super) fn runtime() -> Result<tokio::runtime::Runtime> {
    tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .context("starting the async runtime")
}

/// A daemon, and the socket it answers at. Calls go through [`Self::ask`] or [`Self::work`], so that none waits forever for a daemon
/// that is stuck.
pub(crate) struct Daemon {
    pub(crate) socket: PathBuf,
    client: OffloadClient<Channel>,
}

impl Daemon {
    pub(crate) async fn connect(socket: &Path) -> Result<Self> {
        let name = socket.to_str().context("the socket's path must be UTF-8")?;
        let absolute = std::path::absolute(name)?;
        let endpoint = Endpoint::from_shared(format!("unix:{}", absolute.display()))?
            .http2_keep_alive_interval(ANSWER_WAIT / 2)
            .keep_alive_timeout(ANSWER_WAIT / 2);
        let connecting = tokio::time::timeout(ANSWER_WAIT, endpoint.connect()).await;
        let channel = connecting
            .map_err(|_| anyhow::anyhow!("no answer within {} s", ANSWER_WAIT.as_secs()))
            .and_then(|connected| connected.map_err(root_cause))
            .with_context(|| {
                format!(
                    "no daemon at {name}: check that `offloadd serve` runs, that this is its `socket` (--socket), and that you may open it (root: `usermod -aG offloadd USER`)"
                )
            })?;
        Ok(Self {
            socket: socket.to_owned(),
            client: OffloadClient::new(channel).max_decoding_message_size(ANSWER_BYTES_MAX),
        })
    }

    /// Makes a call and waits at most [`ANSWER_WAIT`] for its answer.
    ///
    /// # Errors
    /// If no answer comes in time, or the daemon refuses.
    pub(crate) async fn ask<T>(
        &mut self,
        call: impl AsyncFnOnce(&mut OffloadClient<Channel>) -> Result<Response<T>, Status>,
    ) -> Result<T> {
        let answer = tokio::time::timeout(ANSWER_WAIT, call(&mut self.client)).await;
        let answer = answer.map_err(|_| {
            let (socket, seconds) = (self.socket.display(), ANSWER_WAIT.as_secs());
            anyhow::anyhow!(
                "the daemon at {socket} did not answer within {seconds} s: its log may name a drive that hangs; a change that was asked for \
                 may still be made"
            )
        })?;
        let answer = answer.map_err(|status| refusal(&self.socket, &status))?;
        Ok(answer.into_inner())
    }

    /// Makes a call that may take as long as its work takes, or whose answer is a stream. Ends when the daemon's process is stuck: it no
    /// longer answers the pings of the connection.
    ///
    /// # Errors
    /// If the daemon refuses, ends or is stuck.
    pub(crate) async fn work<T>(
        &mut self,
        call: impl AsyncFnOnce(&mut OffloadClient<Channel>) -> Result<Response<T>, Status>,
    ) -> Result<T> {
        let answer = call(&mut self.client).await;
        let answer = answer.map_err(|status| refusal(&self.socket, &status))?;
        Ok(answer.into_inner())
    }

    pub(crate) async fn snapshot(&mut self) -> Result<Snapshot> {
        let asking =
            async |client: &mut OffloadClient<_>| client.metrics(proto::MetricsRequest {}).await;
        Ok(self.ask(asking).await?.try_into()?)
    }

    /// Returns the jobs of the store that the caller may see.
    pub(crate) async fn jobs(&mut self) -> Result<Vec<proto::JobContent>> {
        let asking =
            async |client: &mut OffloadClient<_>| client.inspect(proto::InspectRequest {}).await;
        Ok(self.ask(asking).await?.jobs)
    }

    /// Two snapshots, `interval` apart.
    pub(crate) async fn two_snapshots(
        &mut self,
        interval: Duration,
    ) -> Result<(Snapshot, Snapshot)> {
        let before = self.snapshot().await?;
        tokio::time::sleep(interval).await;
        Ok((before, self.snapshot().await?))
    }
}

/// Returns the innermost error: tonic reports "connection refused" as the cause of "transport error".
fn root_cause(error: tonic::transport::Error) -> anyhow::Error {
    let mut cause: &dyn std::error::Error = &error;
    while let Some(deeper) = cause.source() {
        cause = deeper;
    }
    anyhow::anyhow!("{cause}")
}

/// Turns the status of a failed call into an error for people.
pub(super) fn refusal(socket: &Path, status: &tonic::Status) -> anyhow::Error {
    match status.code() {
        tonic::Code::Unimplemented => {
            anyhow::anyhow!("the daemon is older than this offloadd and cannot do this")
        }
        tonic::Code::Unavailable | tonic::Code::Unknown | tonic::Code::Cancelled => {
            anyhow::anyhow!(
                "lost the connection to the daemon at {}: {}",
                socket.display(),
                status.message()
            )
        }
        _ => anyhow::anyhow!("{}", status.message()),
    }
}
