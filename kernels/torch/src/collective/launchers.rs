//! The launchers of a run's nodes: a store in which they meet before their ranks start, and heartbeats with which each
//! notices that another one is gone.
//!
//! The same store later connects the ranks, so a run needs one listening port, and the store survives a restart of the
//! ranks.

use std::time::Duration;

use super::gloo::Store;
use super::tcp_heartbeat_store::TcpHeartbeatStore;
use training_ranks::{CollectiveError, Heartbeat, JobToken, Timeouts, World, key_prefix, listen};

/// Longest value that is read at first. A longer one is read again.
const VALUE_BYTES: usize = 4096;

/// The store of a run's launchers: small values with names, at a TCP address.
///
/// Calls may block while the network is down; the caller bounds them.
pub struct LauncherStore {
    store: Store,
    host: String,
    port: u16,
    prefix: String,
}

impl LauncherStore {
    /// Runs the store in this process. It listens at `host` and `port` only.
    ///
    /// # Errors
    /// The address is not one of this machine, is in use, or other nodes cannot reach it.
    pub fn serve(
        host: &str,
        port: u16,
        token: Option<&JobToken>,
        nodes: bool,
        timeout: Duration,
    ) -> Result<LauncherStore, CollectiveError> {
        let listener = listen(host, port, nodes)?;
        LauncherStore::open(host, port, Some(listener), token, timeout)
    }

    /// Connects with the store, for which it waits at most `timeout`.
    ///
    /// # Errors
    /// There is none.
    pub fn connect(
        host: &str,
        port: u16,
        token: Option<&JobToken>,
        timeout: Duration,
    ) -> Result<LauncherStore, CollectiveError> {
        LauncherStore::open(host, port, None, token, timeout)
    }

    fn open(
        host: &str,
        port: u16,
        listener: Option<std::net::TcpListener>,
        token: Option<&JobToken>,
        timeout: Duration,
    ) -> Result<LauncherStore, CollectiveError> {
        let prefix = key_prefix(token, "launchers");
        Ok(LauncherStore {
            store: Store::over_tcp(host, port, listener, &prefix, timeout)?,
            host: host.to_owned(),
            port,
            prefix,
        })
    }

    /// Sets the value of `key`.
    ///
    /// # Errors
    /// The store is gone.
    pub fn set(&self, key: &str, value: &str) -> Result<(), CollectiveError> {
        self.store.set(key, value.as_bytes())
    }

    /// Returns the value of `key`, or `None` without one.
    ///
    /// # Errors
    /// The store is gone.
    pub fn get(&self, key: &str) -> Result<Option<String>, CollectiveError> {
        let mut bytes = vec![0; VALUE_BYTES];
        while let Some(length) = self.store.get(key, &mut bytes)? {
            if length <= bytes.len() {
                bytes.truncate(length);
                return Ok(Some(String::from_utf8_lossy(&bytes).into_owned()));
            }
            bytes.resize(length, 0);
        }
        Ok(None)
    }

    /// Whether this call is the first one for `key` by any launcher.
    ///
    /// # Errors
    /// The store is gone.
    pub fn claim(&self, key: &str) -> Result<bool, CollectiveError> {
        Ok(self.store.add(key, 1)? == 1)
    }

    /// Starts heartbeats as launcher `node` of `nodes`, over a connection of their own. `round` separates them from
    /// those before a restart. Errors give launchers' numbers as ranks.
    ///
    /// # Errors
    /// Another launcher has this number; the store is gone.
    pub fn heartbeat(
        &self,
        node: u32,
        nodes: u32,
        round: u32,
        timeout: Duration,
    ) -> Result<Heartbeat, CollectiveError> {
        let prefix = format!("{}/{round}", self.prefix);
        let own = Store::over_tcp(&self.host, self.port, None, &prefix, timeout)?;
        let world = World {
            rank: node,
            ranks: nodes,
            local_rank: 0,
            local_ranks: 1,
        };
        let place = format!("{}:{}", self.host, self.port);
        let heartbeat_store = Box::new(TcpHeartbeatStore::open(own, node)?);
        let timeouts = Timeouts::default();
        Ok(Heartbeat::start(
            world,
            timeouts,
            heartbeat_store,
            Some(0),
            place,
        ))
    }
}
