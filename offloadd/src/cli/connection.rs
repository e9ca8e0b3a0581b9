//! A command's way to the running daemon.

use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result};
use offload_api::proto::offload_client::OffloadClient;
use tonic::transport::{Channel, Endpoint};

/// To reach the daemon and to get one answer: it answers in microseconds or hangs.
pub(super) const ANSWER_WAIT: Duration = Duration::from_secs(10);

/// A store with a thousand jobs.
const ANSWER_BYTES_MAX: usize = 64 << 20;

/// One thread is enough for a command.
pub(super) fn runtime() -> Result<tokio::runtime::Runtime> {
    tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .context("starting")
}

/// Connects to the daemon at `socket`.
pub(super) async fn connect(socket: &Path) -> Result<OffloadClient<Channel>> {
    let name = socket.to_str().context("the socket's path must be UTF-8")?;
    let absolute = std::path::absolute(name)?;
    let endpoint = Endpoint::from_shared(format!("unix:{}", absolute.display()))?;
    let connecting = tokio::time::timeout(ANSWER_WAIT, endpoint.connect()).await;
    let channel = connecting
        .map_err(|_| anyhow::anyhow!("no answer in {} s", ANSWER_WAIT.as_secs()))
        .and_then(|connected| connected.map_err(root_cause))
        .with_context(|| {
            format!(
                "no daemon at {name}: does `offloadd serve` run, is this its `socket` (--socket), and may you open it?"
            )
        })?;
    Ok(OffloadClient::new(channel).max_decoding_message_size(ANSWER_BYTES_MAX))
}

/// "connection refused" behind "transport error".
fn root_cause(error: tonic::transport::Error) -> anyhow::Error {
    let mut cause: &dyn std::error::Error = &error;
    while let Some(deeper) = cause.source() {
        cause = deeper;
    }
    anyhow::anyhow!("{cause}")
}

/// What a refused or failed call means for people.
pub(super) fn refusal(socket: &Path, status: &tonic::Status) -> anyhow::Error {
    match status.code() {
        tonic::Code::Unimplemented => {
            anyhow::anyhow!("the daemon is older than this offloadd and cannot do this")
        }
        tonic::Code::Unavailable | tonic::Code::Unknown | tonic::Code::Cancelled => {
            anyhow::anyhow!(
                "the daemon at {} has gone: {}",
                socket.display(),
                status.message()
            )
        }
        _ => anyhow::anyhow!("{}", status.message()),
    }
}
