//! Where a command finds a store: at the daemon that has it, or on its devices when nobody has.

use std::path::{Path, PathBuf};

use anyhow::{Result, bail};
use clap::Args;
use offload_api::proto;
use offload_api::proto::offload_client::OffloadClient;
use offloadd::config::{Config, SOCKET_DEFAULT};
use tonic::transport::Channel;

use super::connection::{connect, refusal};

/// Who has the store.
pub(super) enum Holder {
    /// A daemon, at this socket.
    Daemon(PathBuf, OffloadClient<Channel>),
    /// Nobody: it may be locked.
    Nobody(Config),
}

// Which store people mean. (A doc comment would be taken for the command's.)
#[derive(Args, Clone, Debug)]
pub(crate) struct At {
    /// Of the store of these settings
    #[arg(long, value_name = "FILE", conflicts_with = "socket")]
    pub(crate) config: Option<PathBuf>,
    /// Of the daemon that answers here
    #[arg(long, value_name = "SOCKET")]
    pub(crate) socket: Option<PathBuf>,
}

/// A daemon at the socket, or, for these settings, the one that answers at theirs and has one of their devices.
pub(super) async fn holder(at: &At) -> Result<Holder> {
    let Some(config) = &at.config else {
        let socket = at.socket.clone().unwrap_or_else(|| SOCKET_DEFAULT.into());
        let client = connect(&socket).await?;
        return Ok(Holder::Daemon(socket, client));
    };
    let config = Config::read(config)?;
    if !config.socket.exists() {
        return Ok(Holder::Nobody(config));
    }
    match connect(&config.socket).await {
        Ok(mut client) => {
            let about = client.describe(proto::DescribeRequest {}).await;
            let about = about.map_err(|status| refusal(&config.socket, &status))?;
            let devices = about.into_inner().devices;
            let ours = |device: &proto::Device| {
                config
                    .devices
                    .iter()
                    .any(|path| path == Path::new(&device.path))
            };
            if devices.iter().any(ours) {
                return Ok(Holder::Daemon(config.socket, client));
            }
            bail!(
                "the daemon at {} has none of the devices of these settings: it serves another store",
                config.socket.display()
            );
        }
        // A dead daemon's.
        Err(_) => Ok(Holder::Nobody(config)),
    }
}
