//! Address of the metrics endpoint, from the settings.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};

/// Address of the metrics endpoint.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PageAddress {
    /// Path of a unix socket.
    Unix(PathBuf),
    /// Address on a loopback interface.
    Loopback(SocketAddr),
}

impl PageAddress {
    /// Parses "unix:/run/offloadd/metrics.sock" or "127.0.0.1:9464".
    ///
    /// # Errors
    /// Text for people, for anything else and for an address that other machines can reach.
    pub fn parse(text: &str) -> Result<Self, String> {
        if let Some(path) = text.strip_prefix("unix:") {
            return match Path::new(path) {
                path if path.is_absolute() => Ok(Self::Unix(path.to_owned())),
                _ => Err(format!("`{text}`: the path of the socket must be absolute")),
            };
        }
        let address: SocketAddr = text.parse().map_err(|_| {
            format!("`{text}` is neither \"unix:/PATH\" nor an address like \"127.0.0.1:9464\"")
        })?;
        if address.ip().is_loopback() {
            return Ok(Self::Loopback(address));
        }
        Err(format!(
            "{address} can be reached from other machines, and the metrics name every user's jobs: use 127.0.0.1, ::1 or a unix \
             socket, and forward it through an agent or an authenticating proxy"
        ))
    }

    /// Formats the address as [`Self::parse`] takes it.
    pub fn to_toml(&self) -> String {
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
