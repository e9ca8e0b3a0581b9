//! The daemon's settings: what the file says ([`ConfigToml`]), and what is left after the checks ([`Config`]).
//!
//! Unknown keys are errors that name the nearest known one. Nothing here touches a device.

use std::path::{Path, PathBuf};

pub mod quota;

use offload_api::{
    DEVICES_MAX, ENGINES, IODEPTH_DEFAULT, IODEPTH_MAX, IODEPTH_MIN, SOCKET_PATH_BYTES_MAX,
};
use offload_support::units::{UnitError, parse_bytes, parse_rate};
use serde::Deserialize;

use crate::engine::EngineChoice;
use crate::quota::{Limits, Quotas};
use crate::server::page::PageAddress;

/// Where calls come in, when the file does not say: what systemd makes for the service, and what clients try.
pub const SOCKET_DEFAULT: &str = "/run/offloadd/offloadd.sock";

/// Host memory of all sessions together, when the file does not say.
const ARENA_BYTES_DEFAULT: u64 = 64 << 30;

/// Sessions at a time, when the file does not say: eight processes on each of eight GPUs.
const SESSIONS_DEFAULT: u32 = 64;
const SESSIONS_MAX: u32 = 1024;

/// What users' scrubs may read together, when the file does not say: little beside what one NVMe drive gives.
pub const SCRUB_BYTES_PER_S_DEFAULT: u64 = 512 << 20;

/// Least of what reads or copies a store: below it a scrub, or a move, would not end.
const STORE_BYTES_PER_S_MIN: u64 = 1 << 20;

/// The file, unchecked. Its doc comments, those of [`MetricsToml`] and of the quotas are `docs/daemon-configuration.md`.
#[derive(Debug, Deserialize)]
struct ConfigToml {
    /// Unix socket on which the daemon answers calls. Descriptors go over a second socket beside it, with `.fds` appended to its name.
    ///
    /// Default: `"/run/offloadd/offloadd.sock"`. Example: `"/run/user/1000/offloadd.sock"`.
    #[serde(default = "socket_default")]
    socket: PathBuf,
    /// Devices of the store: files on mounted drives, or block devices, made by `offloadd format`. Absolute paths, each once.
    ///
    /// Default: required. Example: `["/mnt/nvme0/tiles", "/mnt/nvme1/tiles"]`.
    devices: Vec<PathBuf>,
    /// Most pinned host memory that all sessions together may have.
    ///
    /// Default: `"64GiB"`. Example: `"128GiB"`.
    #[serde(default)]
    arena_bytes_max: Option<Size>,
    /// How the daemon does I/O: `auto` takes io_uring, or kernel AIO or threads where io_uring is forbidden; `uring`, `aio` and
    /// `psync` take just that engine.
    ///
    /// Default: `"auto"`. Example: `"uring"`.
    #[serde(default)]
    engine: Option<String>,
    /// Whether to refuse to start, and to refuse sessions, when memory cannot be locked. Without it the daemon warns.
    ///
    /// Default: `false`. Example: `true`.
    #[serde(default)]
    require_locked: bool,
    /// Most sessions at a time, 1 to 1024. Each training process has one session.
    ///
    /// Default: `64`. Example: `16`.
    #[serde(default)]
    sessions_max: Option<u32>,
    /// Most operations in flight of one session, 2 to 1024.
    ///
    /// Default: `64`. Example: `128`.
    #[serde(default)]
    iodepth_max: Option<u32>,
    /// Endurance ratings of the drives in terabytes written, from their data sheets: one number for all devices, or one for each.
    /// The daemon warns when 80 % of a rating is written.
    ///
    /// Default: none. Example: `[600, 1200]`.
    #[serde(default)]
    rated_tbw: Option<Rating>,
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

/// One number for all devices, or one each.
#[derive(Debug, Deserialize)]
#[serde(untagged)]
enum Rating {
    All(f64),
    Each(Vec<f64>),
}

#[derive(Debug, Default, Deserialize)]
struct MetricsToml {
    /// Where Prometheus reads counts: a unix socket, or a loopback address with a port.
    ///
    /// Default: none. Example: `"unix:/run/offloadd/metrics.sock"`.
    #[serde(default)]
    listen: Option<String>,
}

const KEYS: [&str; 11] = [
    "socket",
    "devices",
    "arena_bytes_max",
    "engine",
    "require_locked",
    "sessions_max",
    "iodepth_max",
    "rated_tbw",
    "scrub_bytes_per_s_max",
    "rebalance_bytes_per_s_max",
    "metrics.listen",
];

#[derive(Clone, Debug, Deserialize)]
#[serde(untagged)]
enum Size {
    Number(u64),
    Words(String),
}

impl Size {
    fn bytes(&self) -> Result<u64, UnitError> {
        match self {
            Self::Number(bytes) => Ok(*bytes),
            Self::Words(words) => parse_bytes(words),
        }
    }

    fn bytes_per_s(&self) -> Result<u64, UnitError> {
        match self {
            Self::Number(bytes) => Ok(*bytes),
            Self::Words(words) => parse_rate(words),
        }
    }
}

/// Settings that hold together.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Config {
    /// Where calls come in. Descriptors go over [`Config::descriptor_socket`] beside it.
    pub socket: PathBuf,
    /// Files or block devices, each once.
    pub devices: Vec<PathBuf>,
    /// Host memory of all sessions together, at least one block.
    pub arena_bytes_max: u64,
    /// How bytes are moved.
    pub engine: EngineChoice,
    /// Refuse to start, and refuse sessions, when memory cannot be locked.
    pub require_locked: bool,
    /// Sessions at a time.
    pub sessions_max: u32,
    /// Operations in flight of one session.
    pub iodepth_max: u32,
    /// What may be written to each device before it is worn out, in the order of `devices`; `None`: nobody said.
    pub rated_bytes: Vec<Option<u64>>,
    /// Of a device that is not listed, as one that came while the daemon runs: what was said of all.
    pub rated_bytes_others: Option<u64>,
    /// What the scrubs of all users may read together; root and who runs the daemon read as fast as they ask.
    pub scrub_bytes_per_s_max: u64,
    /// What may be copied while tiles move, where nobody says otherwise for a move; `None`: as much as goes.
    pub rebalance_bytes_per_s_max: Option<u64>,
    /// Where Prometheus may ask; `None`: nowhere.
    pub metrics_listen: Option<PageAddress>,
    /// What each user and job may have.
    pub quotas: Quotas,
}

/// What is wrong with the settings.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// The file cannot be read.
    #[error("settings {path}: {source}")]
    Unreadable {
        /// Of the file.
        path: PathBuf,
        /// The errno.
        source: std::io::Error,
    },
    /// It is no TOML, or a value has another type.
    #[error("settings {path}: {message}")]
    Form {
        /// Of the file.
        path: PathBuf,
        /// Line and reason.
        message: String,
    },
    /// A key nobody reads.
    #[error("settings {path}: unknown key `{key}`{}", hint(nearest))]
    UnknownKey {
        /// Of the file.
        path: PathBuf,
        /// As written.
        key: String,
        /// The known key that looks most like it.
        nearest: Option<&'static str>,
    },
    /// A value outside its limits.
    #[error("settings {path}: {key}: {message}")]
    Value {
        /// Of the file.
        path: PathBuf,
        /// Which.
        key: &'static str,
        /// What it must be.
        message: String,
    },
}

fn hint(nearest: &Option<&str>) -> String {
    match nearest {
        Some(key) => format!("; did you mean `{key}`?"),
        None => format!("; known keys: {}", KEYS.join(", ")),
    }
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

    /// Checks `text`; `path` is for messages.
    ///
    /// # Errors
    /// [`ConfigError`], the first found.
    pub fn parse(text: &str, path: &Path) -> Result<Self, ConfigError> {
        let form = |error: toml::de::Error| ConfigError::Form {
            path: path.to_owned(),
            message: error.to_string(),
        };
        let table: toml::Table = toml::from_str(text).map_err(form)?;
        if let Some(key) = keys_of(&table).find(|key| !KEYS.contains(&key.as_str())) {
            return Err(ConfigError::UnknownKey {
                path: path.to_owned(),
                nearest: nearest_key(&key),
                key,
            });
        }
        let toml: ConfigToml = toml::from_str(text).map_err(form)?;
        toml.check(path)
    }

    /// Where descriptors are handed over: beside the socket for calls.
    pub fn descriptor_socket(&self) -> PathBuf {
        descriptor_socket(&self.socket)
    }

    /// What the core may hand out.
    pub fn limits(&self) -> Limits {
        Limits {
            arena_bytes_max: self.arena_bytes_max,
            sessions_max: self.sessions_max,
            iodepth_max: self.iodepth_max,
            rebalance_bytes_per_s_max: self.rebalance_bytes_per_s_max,
        }
    }
}

fn descriptor_socket(socket: &Path) -> PathBuf {
    let mut name = socket.as_os_str().to_owned();
    name.push(".fds");
    name.into()
}

impl ConfigToml {
    fn check(self, path: &Path) -> Result<Config, ConfigError> {
        let refuse = |key, message: String| {
            Err(ConfigError::Value {
                path: path.to_owned(),
                key,
                message,
            })
        };
        let socket_bytes = self.socket.as_os_str().len();
        if !self.socket.is_absolute() || socket_bytes > SOCKET_PATH_BYTES_MAX {
            let message = format!(
                "{} must be an absolute path of at most {SOCKET_PATH_BYTES_MAX} bytes",
                self.socket.display()
            );
            return refuse("socket", message);
        }
        if self.devices.is_empty() || self.devices.len() > DEVICES_MAX as usize {
            let message = format!(
                "{} devices; a store has 1 to {DEVICES_MAX}",
                self.devices.len()
            );
            return refuse("devices", message);
        }
        for (index, device) in self.devices.iter().enumerate() {
            if !device.is_absolute() {
                return refuse("devices", format!("{} is not absolute", device.display()));
            }
            if self.devices[..index].contains(device) {
                return refuse("devices", format!("{} is there twice", device.display()));
            }
        }
        let arena_bytes_max = self
            .arena_bytes_max
            .as_ref()
            .map_or(Ok(ARENA_BYTES_DEFAULT), Size::bytes);
        let arena_bytes_max = match arena_bytes_max {
            Ok(bytes) => bytes,
            Err(error) => return refuse("arena_bytes_max", error.to_string()),
        };
        let quotas = match self.quota.check() {
            Ok(quotas) => quotas,
            Err(message) => return refuse("quota", message),
        };
        if arena_bytes_max < u64::from(offload_api::BLOCK_BYTES) {
            return refuse(
                "arena_bytes_max",
                format!("{arena_bytes_max} bytes hold no block"),
            );
        }
        let engine = match self.engine.as_deref() {
            None => EngineChoice::default(),
            Some(name) => match EngineChoice::from_name(name) {
                Some(choice) => choice,
                None => {
                    let known = ENGINES.join(", ");
                    return refuse("engine", format!("`{name}` is none of {known}"));
                }
            },
        };
        let sessions_max = self.sessions_max.unwrap_or(SESSIONS_DEFAULT);
        if sessions_max == 0 || sessions_max > SESSIONS_MAX {
            let message = format!("{sessions_max}; from 1 to {SESSIONS_MAX}");
            return refuse("sessions_max", message);
        }
        let iodepth_max = self.iodepth_max.unwrap_or(IODEPTH_DEFAULT);
        if !(IODEPTH_MIN..=IODEPTH_MAX).contains(&iodepth_max) {
            let message = format!("{iodepth_max}; from {IODEPTH_MIN} to {IODEPTH_MAX}");
            return refuse("iodepth_max", message);
        }
        let rated_tb_others = match self.rated_tbw {
            Some(Rating::All(tb)) => Some(tb),
            Some(Rating::Each(_)) | None => None,
        };
        let rated_tb = match self.rated_tbw {
            None => vec![None; self.devices.len()],
            Some(Rating::All(tb)) => vec![Some(tb); self.devices.len()],
            Some(Rating::Each(each)) if each.len() == self.devices.len() => {
                each.into_iter().map(Some).collect()
            }
            Some(Rating::Each(each)) => {
                let (count, devices) = (each.len(), self.devices.len());
                let message =
                    format!("{count} numbers for {devices} devices: one for all, or one each");
                return refuse("rated_tbw", message);
            }
        };
        // A thousandth, so that what is nothing is not divided by; a million is more than any drive takes.
        let sane = |tb: &f64| (0.001..=1e6).contains(tb);
        if let Some(tb) = rated_tb.iter().flatten().find(|tb| !sane(tb)) {
            return refuse("rated_tbw", format!("{tb}; from 0.001 to 1000000 (TB)"));
        }
        let scrub = bytes_per_s(self.scrub_bytes_per_s_max.as_ref(), "a scrub");
        let scrub_bytes_per_s_max = match scrub {
            Ok(bytes) => bytes.unwrap_or(SCRUB_BYTES_PER_S_DEFAULT),
            Err(message) => return refuse("scrub_bytes_per_s_max", message),
        };
        let moves = bytes_per_s(
            self.rebalance_bytes_per_s_max.as_ref(),
            "a device's coming or going",
        );
        let rebalance_bytes_per_s_max = match moves {
            Ok(bytes) => bytes,
            Err(message) => return refuse("rebalance_bytes_per_s_max", message),
        };
        let rated_bytes = |tb: Option<f64>| tb.map(|tb| (tb * 1e12) as u64);
        let metrics_listen = match self.metrics.listen.as_deref().map(PageAddress::parse) {
            None => None,
            Some(Ok(address)) => Some(address),
            Some(Err(message)) => return refuse("metrics.listen", message),
        };
        if let Some(PageAddress::Unix(page)) = &metrics_listen {
            let taken = [self.socket.clone(), descriptor_socket(&self.socket)];
            let bytes = page.as_os_str().len();
            if taken.contains(page) || bytes > SOCKET_PATH_BYTES_MAX {
                let message = format!(
                    "{} must be another path than `socket` and its .fds, of at most {SOCKET_PATH_BYTES_MAX} bytes",
                    page.display()
                );
                return refuse("metrics.listen", message);
            }
        }
        Ok(Config {
            socket: self.socket,
            devices: self.devices,
            arena_bytes_max,
            engine,
            require_locked: self.require_locked,
            sessions_max,
            iodepth_max,
            rated_bytes: rated_tb.into_iter().map(rated_bytes).collect(),
            rated_bytes_others: rated_bytes(rated_tb_others),
            scrub_bytes_per_s_max,
            rebalance_bytes_per_s_max,
            metrics_listen,
            quotas,
        })
    }
}

/// What is bounded to so many bytes a second, if the file says so.
fn bytes_per_s(size: Option<&Size>, what: &str) -> Result<Option<u64>, String> {
    match size
        .map(Size::bytes_per_s)
        .transpose()
        .map_err(|e| e.to_string())?
    {
        Some(bytes) if bytes < STORE_BYTES_PER_S_MIN => {
            Err(format!("{bytes}; at least 1MiB, or {what} would not end"))
        }
        bytes => Ok(bytes),
    }
}

/// The file's keys; those of a table with its name before them.
fn keys_of(table: &toml::Table) -> impl Iterator<Item = String> {
    // Quotas have users' numbers among their keys, and know their own.
    let table = table.iter().filter(|(name, _)| *name != "quota");
    table.flat_map(|(name, value)| match value {
        toml::Value::Table(inner) => (inner.keys()).map(|key| format!("{name}.{key}")).collect(),
        _ => vec![name.clone()],
    })
}

/// The known key most like `key`, if one is close enough to be meant.
fn nearest_key(key: &str) -> Option<&'static str> {
    KEYS.iter()
        .map(|known| (strsim::normalized_damerau_levenshtein(key, known), *known))
        .max_by(|a, b| a.0.total_cmp(&b.0))
        .filter(|(likeness, _)| *likeness >= 0.5)
        .map(|(_, known)| known)
}

#[cfg(test)]
mod docs;

#[cfg(test)]
mod tests {
    use super::*;

    const WHOLE: &str = r#"
        socket = "/run/offloadd/offloadd.sock"
        devices = ["/mnt/nvme0/tiles", "/mnt/nvme1/tiles"]
        arena_bytes_max = "64GiB"
        engine = "psync"
        require_locked = true
        sessions_max = 16
        iodepth_max = 32
        rated_tbw = [600, 1200.5]
        scrub_bytes_per_s_max = "100MiB"
        rebalance_bytes_per_s_max = "200MiB"
        [metrics]
        listen = "127.0.0.1:9464"
    "#;

    fn parse(text: &str) -> Result<Config, String> {
        Config::parse(text, Path::new("offloadd.toml")).map_err(|e| e.to_string())
    }

    #[test]
    fn the_devices_are_all_that_a_file_must_say() {
        let config = parse("devices = [\"/mnt/nvme0/tiles\"]").unwrap();
        assert_eq!(config.socket, Path::new(SOCKET_DEFAULT));
        assert_eq!(config.arena_bytes_max, 64 << 30);
        assert_eq!((config.sessions_max, config.iodepth_max), (64, 64));
        let message = parse("sessions_max = 1").unwrap_err();
        assert!(message.contains("devices"), "{message}");
    }

    #[test]
    fn every_key_is_read() {
        let config = parse(WHOLE).unwrap();
        assert_eq!(config.arena_bytes_max, 64 << 30);
        assert_eq!(config.engine, EngineChoice::Psync);
        assert!(config.require_locked);
        assert_eq!((config.sessions_max, config.iodepth_max), (16, 32));
        assert_eq!(
            config.descriptor_socket(),
            Path::new("/run/offloadd/offloadd.sock.fds")
        );
        let table: toml::Table = toml::from_str(WHOLE).unwrap();
        let keys: Vec<_> = keys_of(&table).collect();
        assert!(KEYS.iter().all(|key| keys.iter().any(|k| k == key)));
        let rated_bytes = [600_000_000_000_000, 1_200_500_000_000_000];
        assert_eq!(config.rated_bytes, rated_bytes.map(Some));
        let one = parse(&WHOLE.replace("[600, 1200.5]", "600")).unwrap();
        assert_eq!(one.rated_bytes, [Some(rated_bytes[0]); 2]);
        assert_eq!(config.scrub_bytes_per_s_max, 100 << 20);
        assert_eq!(config.limits().rebalance_bytes_per_s_max, Some(200 << 20));
        let listen = config.metrics_listen.unwrap();
        assert_eq!(listen.to_string(), "http://127.0.0.1:9464/metrics");
    }

    #[test]
    fn an_unknown_key_is_an_error_that_names_the_nearest() {
        let message = parse(&WHOLE.replace("devices", "device")).unwrap_err();
        assert!(message.contains("`device`"), "{message}");
        assert!(message.contains("did you mean `devices`"), "{message}");
        let message = parse(&WHOLE.replace("listen", "listne")).unwrap_err();
        assert!(
            message.contains("did you mean `metrics.listen`"),
            "{message}"
        );
        let message = parse(&format!("zzz = 1\n{WHOLE}")).unwrap_err();
        assert!(message.contains("known keys: socket"), "{message}");
    }

    #[test]
    fn values_outside_their_limits_are_refused_by_key() {
        for (from, to, key) in [
            ("/run/offloadd/offloadd.sock", "offloadd.sock", "socket"),
            ("/mnt/nvme1/tiles", "/mnt/nvme0/tiles", "devices"),
            ("/mnt/nvme1/tiles", "nvme1/tiles", "devices"),
            ("64GiB", "64Gb", "arena_bytes_max"),
            ("64GiB", "1", "arena_bytes_max"),
            ("psync", "libaio", "engine"),
            ("sessions_max = 16", "sessions_max = 0", "sessions_max"),
            ("iodepth_max = 32", "iodepth_max = 100000", "iodepth_max"),
            // No trainer could begin a session.
            ("iodepth_max = 32", "iodepth_max = 1", "iodepth_max"),
            ("100MiB", "100M", "scrub_bytes_per_s_max"),
            ("100MiB", "1023KiB", "scrub_bytes_per_s_max"),
            ("200MiB", "200MB/h", "rebalance_bytes_per_s_max"),
            ("200MiB", "1023KiB", "rebalance_bytes_per_s_max"),
            ("[600, 1200.5]", "[600]", "rated_tbw"),
            ("[600, 1200.5]", "0", "rated_tbw"),
            ("[600, 1200.5]", "-1", "rated_tbw"),
            ("[600, 1200.5]", "nan", "rated_tbw"),
            ("[600, 1200.5]", "inf", "rated_tbw"),
            ("127.0.0.1:9464", "0.0.0.0:9464", "metrics.listen"),
            ("127.0.0.1:9464", "192.168.1.5:9464", "metrics.listen"),
            ("127.0.0.1:9464", "[::]:9464", "metrics.listen"),
            ("127.0.0.1:9464", "localhost", "metrics.listen"),
            ("127.0.0.1:9464", "unix:metrics.sock", "metrics.listen"),
            (
                "127.0.0.1:9464",
                "unix:/run/offloadd/offloadd.sock.fds",
                "metrics.listen",
            ),
        ] {
            let message = parse(&WHOLE.replace(from, to)).unwrap_err();
            assert!(message.contains(&format!(" {key}: ")), "{message}");
        }
        let long = format!("/{}", "x".repeat(110));
        let message = parse(&WHOLE.replace("/run/offloadd/offloadd.sock", &long)).unwrap_err();
        assert!(message.contains("at most 103 bytes"), "{message}");
    }
}
