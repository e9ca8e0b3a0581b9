//! The daemon's settings: the file as parsed ([`ConfigToml`]) and the checked values ([`Config`]).
//!
//! An unknown key is an error that suggests the most similar known key. Nothing here touches a device.

use std::path::{Path, PathBuf};

mod keys;
mod page_address;
mod quota;

use offload_api::{
    DEVICES_MAX, ENGINES, IODEPTH_DEFAULT, IODEPTH_MAX, IODEPTH_MIN, SOCKET_PATH_BYTES_MAX,
};
use offload_support::units::{ApproxBytes, UnitError, parse_bytes, parse_rate};
use serde::Deserialize;

use self::keys::unknown_key;
use crate::engine::EngineChoice;
use crate::quota::{Limits, Quotas};

pub use page_address::PageAddress;

/// Default of `socket`: in the runtime directory that systemd creates for the service, and where clients look first.
pub const SOCKET_DEFAULT: &str = "/run/offloadd/offloadd.sock";

/// Default of `arena_bytes_max`.
const ARENA_BYTES_DEFAULT: u64 = 64 << 30;

/// Default of `sessions_max`: eight processes for each of eight GPUs.
const SESSIONS_DEFAULT: u32 = 64;
const SESSIONS_MAX: u32 = 1024;

/// Default of `scrub_bytes_per_s_max`: a small part of the bandwidth of one NVMe drive.
const SCRUB_BYTES_PER_S_DEFAULT: u64 = 512 << 20;

/// Lower limit of rates: with less, a scrub or a move would take years.
const STORE_BYTES_PER_S_MIN: u64 = 1 << 20;

/// The file, unchecked. Its doc comments, those of [`MetricsToml`] and of the quotas are `docs/daemon-configuration.md`.
#[derive(Debug, Deserialize)]
struct ConfigToml {
    /// Unix socket on which the daemon answers calls. Descriptors go over a second socket beside it, with `.fds` appended to its name.
    ///
    /// Default: `"/run/offloadd/offloadd.sock"`. Example: `"/run/offloadd/offloadd.sock"`.
    #[serde(default = "socket_default")]
    socket: PathBuf,
    /// Devices of the store: files on mounted drives, or block devices, made by `offloadd format`. Absolute paths, each once.
    ///
    /// Default: required. Example: `["/mnt/nvme0/offloadd/tiles", "/mnt/nvme1/offloadd/tiles"]`.
    devices: Vec<PathBuf>,
    /// Most pinned host memory that all sessions together may have.
    ///
    /// Default: `"64GiB"`. Example: `"128GiB"`.
    #[serde(default)]
    arena_bytes_max: Option<Size>,
    /// How the daemon does I/O: `auto` takes io_uring, or kernel AIO or threads where io_uring is forbidden; `uring`, `aio` and
    /// `psync` take just that engine.
    ///
    /// Default: `"auto"`. Example: `"auto"`.
    #[serde(default)]
    engine: Option<String>,
    /// Whether to refuse to start, and to refuse sessions, when memory cannot be locked. Without it the daemon warns.
    ///
    /// Default: `false`. Example: `false`.
    #[serde(default)]
    require_locked: bool,
    /// Most sessions at a time, 1 to 1024. Each training process has one for each model that it has in tiles.
    ///
    /// Default: `64`. Example: `128`.
    #[serde(default)]
    sessions_max: Option<u32>,
    /// Most operations in flight of one session, 2 to 1024.
    ///
    /// Default: `64`. Example: `128`.
    #[serde(default)]
    iodepth_max: Option<u32>,
    /// Most bytes per second that `offloadd verify` of all users together reads from a running daemon. Root and the daemon's user
    /// are not limited.
    ///
    /// Default: `"512MiB"`. Example: `"1GiB"`.
    #[serde(default)]
    scrub_bytes_per_s_max: Option<Size>,
    /// Most bytes per second that are copied while tiles move between devices, for moves without a rate of their own.
    ///
    /// Default: no limit. Example: `"200MiB"`.
    #[serde(default)]
    rebalance_bytes_per_s_max: Option<Size>,
    #[serde(default)]
    metrics: MetricsToml,
    #[serde(default)]
    quota: quota::QuotasToml,
}

fn socket_default() -> PathBuf {
    SOCKET_DEFAULT.into()
}

#[derive(Debug, Default, Deserialize)]
struct MetricsToml {
    /// Where Prometheus reads metrics: a unix socket, or a loopback address with a port.
    ///
    /// Default: none. Example: `"unix:/run/offloadd/metrics.sock"`.
    #[serde(default)]
    listen: Option<String>,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(untagged)]
enum Size {
    Number(u64),
    Words(String),
}

impl Size {
    fn bytes(&self) -> Result<u64, UnitError> {
        self.parse(parse_bytes)
    }

    fn bytes_per_s(&self) -> Result<u64, UnitError> {
        self.parse(parse_rate)
    }

    /// Returns at most what TOML's integers hold, because settings are printed as TOML.
    fn parse(&self, parse: fn(&str) -> Result<u64, UnitError>) -> Result<u64, UnitError> {
        match self {
            Self::Number(number) => Ok(*number),
            Self::Words(words) => Ok(parse(words)?.min(i64::MAX as u64)),
        }
    }
}

/// Settings that passed all checks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Config {
    /// Socket for calls. File descriptors are passed over [`Config::descriptor_socket`].
    pub socket: PathBuf,
    /// Files or block devices, without duplicates.
    pub devices: Vec<PathBuf>,
    /// Limit of the host memory of all sessions together, at least one block.
    pub arena_bytes_max: u64,
    /// I/O engine.
    pub engine: EngineChoice,
    /// Whether to refuse to start, and to refuse sessions, if memory cannot be locked.
    pub require_locked: bool,
    /// Limit of concurrent sessions.
    pub sessions_max: u32,
    /// Limit of one session's operations in flight.
    pub iodepth_max: u32,
    /// Limit of what the scrubs of all users read together. Does not apply to root and the daemon's user.
    pub scrub_bytes_per_s_max: u64,
    /// Default limit of what is copied while tiles move between devices; `None`: no limit.
    pub rebalance_bytes_per_s_max: Option<u64>,
    /// Address of the metrics endpoint; `None`: no endpoint.
    pub metrics_listen: Option<PageAddress>,
    /// Limits and weights of users and jobs.
    pub quotas: Quotas,
}

/// Reason why settings cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// The file cannot be read.
    #[error("settings {path}: {source}")]
    Unreadable {
        /// Path of the file.
        path: PathBuf,
        /// Error of the system.
        source: std::io::Error,
    },
    /// Not TOML, or a value of the wrong type.
    #[error("settings {path}: {message}")]
    Form {
        /// Path of the file.
        path: PathBuf,
        /// Line and reason.
        message: String,
    },
    /// A key that is no setting.
    #[error("settings {path}: {section}unknown key `{key}`; {hint}")]
    UnknownKey {
        /// Path of the file.
        path: PathBuf,
        /// "[quota.default]: ", or empty at the top of the file.
        section: String,
        /// The key as written.
        key: String,
        /// The key that may be meant, or all known keys.
        hint: String,
    },
    /// A value outside its limits.
    #[error("settings {path}: {key}: {message}")]
    Value {
        /// Path of the file.
        path: PathBuf,
        /// The key.
        key: &'static str,
        /// The value and its limits.
        message: String,
    },
}

impl Config {
    /// Reads and checks the file at `path`.
    ///
    /// # Errors
    /// [`ConfigError`], the first found.
    pub fn read(path: &Path) -> Result<Self, ConfigError> {
        let text = std::fs::read_to_string(path).map_err(|source| ConfigError::Unreadable {
            path: path.to_owned(),
            source,
        })?;
        Self::parse(&text, path)
    }

    /// Checks `text`; `path` is used in messages only.
    ///
    /// # Errors
    /// [`ConfigError`], the first found.
    pub fn parse(text: &str, path: &Path) -> Result<Self, ConfigError> {
        let form = |error: toml::de::Error| ConfigError::Form {
            path: path.to_owned(),
            message: error.to_string(),
        };
        let table: toml::Table = toml::from_str(text).map_err(form)?;
        if let Some((section, key, hint)) = unknown_key(&table) {
            return Err(ConfigError::UnknownKey {
                path: path.to_owned(),
                section,
                key,
                hint,
            });
        }
        let toml: ConfigToml = toml::from_str(text).map_err(form)?;
        toml.check(path)
    }

    /// Formats all settings, with defaults filled in, as TOML that parses to the same settings.
    pub fn to_toml(&self) -> String {
        let mut text = format!(
            "socket = {}\ndevices = {}\narena_bytes_max = {} # {}\nengine = {:?}\nrequire_locked = {}\nsessions_max = {}\n\
             iodepth_max = {}\nscrub_bytes_per_s_max = {} # {}\n",
            path_value(&self.socket),
            toml::Value::Array(self.devices.iter().map(|path| path_value(path)).collect()),
            self.arena_bytes_max,
            ApproxBytes(self.arena_bytes_max),
            self.engine.name(),
            self.require_locked,
            self.sessions_max,
            self.iodepth_max,
            self.scrub_bytes_per_s_max,
            ApproxBytes(self.scrub_bytes_per_s_max),
        );
        if let Some(bytes) = self.rebalance_bytes_per_s_max {
            text += &format!(
                "rebalance_bytes_per_s_max = {bytes} # {}\n",
                ApproxBytes(bytes)
            );
        }
        if let Some(listen) = &self.metrics_listen {
            let listen = toml::Value::String(listen.to_toml());
            text += &format!("[metrics]\nlisten = {listen}\n");
        }
        text + &quota::to_toml(&self.quotas)
    }

    /// Socket over which file descriptors are passed: `<socket>.fds`.
    pub fn descriptor_socket(&self) -> PathBuf {
        descriptor_socket(&self.socket)
    }

    /// Limits for the core.
    pub fn limits(&self) -> Limits {
        Limits {
            arena_bytes_max: self.arena_bytes_max,
            sessions_max: self.sessions_max,
            iodepth_max: self.iodepth_max,
            rebalance_bytes_per_s_max: self.rebalance_bytes_per_s_max,
        }
    }
}

/// A path that was read from TOML, which has UTF-8 only.
fn path_value(path: &Path) -> toml::Value {
    toml::Value::String(path.to_string_lossy().into_owned())
}

fn descriptor_socket(socket: &Path) -> PathBuf {
    let mut name = socket.as_os_str().to_owned();
    name.push(".fds");
    name.into()
}

impl ConfigToml {
    fn check(self, path: &Path) -> Result<Config, ConfigError> {
        let refused = |key| {
            move |message| ConfigError::Value {
                path: path.to_owned(),
                key,
                message,
            }
        };
        check_socket(&self.socket).map_err(refused("socket"))?;
        check_devices(&self.devices).map_err(refused("devices"))?;
        let arena_bytes_max = arena_bytes(self.arena_bytes_max.as_ref());
        let arena_bytes_max = arena_bytes_max.map_err(refused("arena_bytes_max"))?;
        let quotas = self.quota.check().map_err(refused("quota"))?;
        let engine = engine(self.engine.as_deref()).map_err(refused("engine"))?;
        let sessions_max = self.sessions_max.unwrap_or(SESSIONS_DEFAULT);
        if sessions_max == 0 || sessions_max > SESSIONS_MAX {
            let message = format!("{sessions_max} is not from 1 to {SESSIONS_MAX}");
            return Err(refused("sessions_max")(message));
        }
        let iodepth_max = self.iodepth_max.unwrap_or(IODEPTH_DEFAULT);
        if !(IODEPTH_MIN..=IODEPTH_MAX).contains(&iodepth_max) {
            let message = format!("{iodepth_max} is not from {IODEPTH_MIN} to {IODEPTH_MAX}");
            return Err(refused("iodepth_max")(message));
        }
        let scrub = bytes_per_s(self.scrub_bytes_per_s_max.as_ref(), "a scrub");
        let scrub = scrub.map_err(refused("scrub_bytes_per_s_max"))?;
        let moves = bytes_per_s(
            self.rebalance_bytes_per_s_max.as_ref(),
            "adding or draining a device",
        );
        let listen = self.metrics.listen.as_deref();
        let listen = listen.map(|listen| metrics_address(listen, &self.socket));
        Ok(Config {
            devices: self.devices,
            arena_bytes_max,
            engine,
            require_locked: self.require_locked,
            sessions_max,
            iodepth_max,
            scrub_bytes_per_s_max: scrub.unwrap_or(SCRUB_BYTES_PER_S_DEFAULT),
            rebalance_bytes_per_s_max: moves.map_err(refused("rebalance_bytes_per_s_max"))?,
            metrics_listen: listen.transpose().map_err(refused("metrics.listen"))?,
            quotas,
            socket: self.socket,
        })
    }
}

fn check_socket(socket: &Path) -> Result<(), String> {
    match socket.is_absolute() && socket.as_os_str().len() <= SOCKET_PATH_BYTES_MAX {
        true => Ok(()),
        false => Err(format!(
            "{} must be an absolute path of at most {SOCKET_PATH_BYTES_MAX} bytes",
            socket.display()
        )),
    }
}

fn check_devices(devices: &[PathBuf]) -> Result<(), String> {
    if devices.is_empty() || devices.len() > DEVICES_MAX as usize {
        return Err(format!(
            "{} devices listed; a store has 1 to {DEVICES_MAX}",
            devices.len()
        ));
    }
    for (index, device) in devices.iter().enumerate() {
        if !device.is_absolute() {
            return Err(format!("{} is not an absolute path", device.display()));
        }
        if devices[..index].contains(device) {
            return Err(format!("{} is listed twice", device.display()));
        }
    }
    Ok(())
}

fn arena_bytes(size: Option<&Size>) -> Result<u64, String> {
    let bytes = size.map_or(Ok(ARENA_BYTES_DEFAULT), Size::bytes);
    let bytes = bytes.map_err(|error| error.to_string())?;
    match bytes < u64::from(offload_api::BLOCK_BYTES) {
        true => Err(format!("{bytes} bytes is less than one block")),
        false => Ok(bytes),
    }
}

fn engine(name: Option<&str>) -> Result<EngineChoice, String> {
    name.map_or(Ok(EngineChoice::default()), |name| {
        let known = || format!("`{name}` is not one of {}", ENGINES.join(", "));
        EngineChoice::from_name(name).ok_or_else(known)
    })
}

fn metrics_address(listen: &str, socket: &Path) -> Result<PageAddress, String> {
    let address = PageAddress::parse(listen)?;
    if let PageAddress::Unix(page) = &address {
        let taken = [socket.to_owned(), descriptor_socket(socket)];
        if taken.contains(page) || page.as_os_str().len() > SOCKET_PATH_BYTES_MAX {
            return Err(format!(
                "{} must be another path than `socket` and its .fds, of at most {SOCKET_PATH_BYTES_MAX} bytes",
                page.display()
            ));
        }
    }
    Ok(address)
}

/// Checks the rate limit of `what`.
fn bytes_per_s(size: Option<&Size>, what: &str) -> Result<Option<u64>, String> {
    match size
        .map(Size::bytes_per_s)
        .transpose()
        .map_err(|error| error.to_string())?
    {
        Some(bytes) if bytes < STORE_BYTES_PER_S_MIN => Err(format!(
            "{bytes} bytes per second is less than 1MiB, with which {what} would take too long"
        )),
        bytes => Ok(bytes),
    }
}

#[cfg(test)]
mod docs;

#[cfg(test)]
mod tests;
