//! Finds the store a command works on: through the daemon that serves it, or on its devices when no daemon does.

use std::path::{Path, PathBuf};

use anyhow::{Result, anyhow, bail};
use clap::Args;
use offload_api::proto;
use offload_api::proto::offload_client::OffloadClient;
use offloadd::config::{Config, SOCKET_DEFAULT};
use rustix::fs::{Access, AtFlags, CWD, accessat};
use rustix::io::Errno;

use super::connection::Daemon;

/// Process that holds the store.
pub(super) enum Holder {
    Daemon(Box<Daemon>),
    /// The devices of these settings may be locked.
    Nobody(Box<Config>),
}

// A doc comment on a flattened struct would replace the command's own.
#[derive(Args, Clone, Debug)]
pub(crate) struct WhichStore {
    /// Use the store of this settings file
    #[arg(long, value_name = "FILE", conflicts_with = "socket")]
    config: Option<PathBuf>,
    /// Use the daemon at this socket [default: the installed service]
    #[arg(long, value_name = "SOCKET")]
    socket: Option<PathBuf>,
}

impl WhichStore {
    /// Returns the socket at which the store's daemon answers, if it runs.
    ///
    /// # Errors
    /// If the settings cannot be read.
    pub(super) fn socket(&self) -> Result<PathBuf> {
        Ok(match (&self.config, &self.socket) {
            (Some(config), _) => Config::read(config)?.socket,
            (None, Some(socket)) => socket.clone(),
            (None, None) => SOCKET_DEFAULT.into(),
        })
    }
}

/// Connects to the daemon that serves the store, for a command that changes the store.
///
/// # Errors
/// Same as [`holder`]; also if no daemon serves the store.
pub(super) async fn serving(which: &WhichStore) -> Result<Daemon> {
    match holder(which).await? {
        Holder::Daemon(daemon) => Ok(*daemon),
        Holder::Nobody(config) => Err(anyhow!(
            "no daemon at {} serves this store: start it (`systemctl start offloadd`, or `offloadd serve --config FILE` with these settings) and run this command again",
            config.socket.display()
        )),
    }
}

/// Connects to the daemon at the socket. With settings, returns them if no daemon answers at their socket.
///
/// # Errors
/// If there are no settings and no daemon answers, or if the daemon serves other devices than the settings list.
pub(super) async fn holder(which: &WhichStore) -> Result<Holder> {
    // The answer also shows that the daemon is not stuck: connecting succeeds all the same then.
    let describe =
        async |client: &mut OffloadClient<_>| client.describe(proto::DescribeRequest {}).await;
    let Some(config) = &which.config else {
        let mut daemon = Daemon::connect(&which.socket()?).await?;
        daemon.ask(describe).await?;
        return Ok(Holder::Daemon(Box::new(daemon)));
    };
    let config = Config::read(config)?;
    if !config.socket.exists() {
        return Ok(Holder::Nobody(Box::new(config)));
    }
    // Not by a connection: it waits forever where those that a stuck daemon has not accepted are as many as can be.
    let may_open = accessat(CWD, &config.socket, Access::WRITE_OK, AtFlags::EACCESS);
    if may_open == Err(Errno::ACCESS) {
        bail!(
            "you may not open the daemon's socket {}: ask root to add you to its group (`usermod -aG offloadd USER`), and log in again",
            config.socket.display()
        );
    }
    // A daemon that was killed leaves its socket behind. The locks of the devices tell whether a daemon has them.
    let Ok(mut daemon) = Daemon::connect(&config.socket).await else {
        return Ok(Holder::Nobody(Box::new(config)));
    };
    let served = daemon.ask(describe).await?.devices;
    let listed = |device: &proto::Device| {
        let mut devices = config.devices.iter();
        devices.any(|path| path == Path::new(&device.path))
    };
    if !served.iter().any(listed) {
        bail!(
            "the daemon at {} serves another store: it has none of the devices of these settings",
            config.socket.display()
        );
    }
    Ok(Holder::Daemon(Box::new(daemon)))
}
