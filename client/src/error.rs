//! Errors of this crate, by the kinds a caller branches on.

use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use offload_api::fault::{Fault, FaultKind};
use offload_api::ids::{Generation, TileIndex};
use offload_api::ring::entry::Verb;

use crate::private::LOG;

fn may_not(connecting: &io::Error) -> bool {
    connecting.kind() == io::ErrorKind::PermissionDenied
}

/// Names the log of the daemon on `socket`: the file of a private daemon, where it exists.
pub(crate) fn log_of(socket: &Path) -> String {
    // Beside the socket's directory, or a link to it beside the socket.
    let dirs = socket.ancestors().skip(1).take(2);
    let log = dirs.map(|dir| dir.join(LOG)).find(|log| log.is_file());
    match log {
        Some(log) => {
            let log = std::fs::read_link(&log).unwrap_or(log);
            format!("its log {}", log.display())
        }
        None => "its log (of a service: `journalctl -u offloadd`)".into(),
    }
}

/// Why a call failed.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// No daemon was reached.
    #[error(
        "{} {}: {source}; {}, or remove the socket setting to get a private daemon",
        if may_not(source) { "no permission to open" } else { "no daemon listens on" },
        socket.display(),
        if may_not(source) { "ask whoever runs offloadd for access (group and mode of the socket)" } else { "start offloadd there" }
    )]
    Connect {
        /// Path of the socket, as configured.
        socket: PathBuf,
        /// Error of connect(2).
        source: io::Error,
    },
    /// The daemon listens and takes no connection.
    #[error(
        "offloadd on {} is busy: it has taken no connection of this user for {} s; some process connects again and again, or this user has \
         too many connections: {} names the process",
        socket.display(),
        waited.as_secs(),
        log_of(socket)
    )]
    Busy {
        /// Path of the socket.
        socket: PathBuf,
        /// Time of the attempts.
        waited: Duration,
    },
    /// The daemon speaks another protocol version.
    #[error(
        "offloadd {build} speaks protocol version {theirs}, this program version {ours}: install both from one release"
    )]
    Version {
        /// Version of this crate.
        ours: u32,
        /// Version of the daemon.
        theirs: u32,
        /// Build of the daemon.
        build: String,
    },
    /// The daemon refused, or this crate did before asking it.
    #[error(transparent)]
    Refused(#[from] Fault),
    /// The session is over: operations in flight do not come back.
    #[error(
        "the daemon on {} has ended or has closed this session; {} says why, or nothing if the daemon was killed (out of memory: see `dmesg`). \
         Committed state is safe",
        socket.display(),
        log_of(socket)
    )]
    DaemonGone {
        /// Path of the socket.
        socket: PathBuf,
    },
    /// The daemon is connected and does not answer.
    #[error(
        "offloadd on {} has not answered {call} for {} s; the usual cause is a device that hangs: look at `offloadd top`, {} and the kernel's log",
        socket.display(),
        waited.as_secs(),
        log_of(socket)
    )]
    Timeout {
        /// Name of the call.
        call: &'static str,
        /// Path of the socket.
        socket: PathBuf,
        /// Time since the call began.
        waited: Duration,
    },
    /// The daemon sent something that no daemon of this version sends.
    #[error("the daemon violated the protocol: {what}")]
    Protocol {
        /// Description of the message.
        what: String,
    },
    /// The kernel refused memory or a descriptor.
    #[error("{what}: {source}")]
    Os {
        /// The operation that failed.
        what: String,
        /// Error of the system call.
        source: io::Error,
    },
    /// The private daemon did not start.
    #[error("private offloadd: {what}")]
    Private {
        /// The step that failed, why, and the end of the daemon's log.
        what: String,
    },
}

impl ClientError {
    /// Kind of a refusal, by the daemon or by this crate.
    pub fn fault(&self) -> Option<FaultKind> {
        match self {
            Self::Refused(fault) => Some(fault.kind),
            _ => None,
        }
    }

    pub(crate) fn refused(kind: FaultKind, message: impl Into<String>) -> Self {
        Self::Refused(Fault::new(kind, message))
    }

    pub(crate) fn protocol(what: impl Into<String>) -> Self {
        Self::Protocol { what: what.into() }
    }

    pub(crate) fn os(what: impl Into<String>) -> impl FnOnce(rustix::io::Errno) -> Self {
        let what = what.into();
        move |errno| Self::Os {
            what,
            source: errno.into(),
        }
    }
}

/// Why a tile did not move. The slot comes back with the error. After a swap in its bytes are all ones (NaN in every float
/// format), so that nobody computes with them by mistake.
#[derive(Debug, thiserror::Error)]
pub enum TileError {
    /// The bytes read do not match their checksum.
    #[error(
        "tile {tile} on {} at byte {offset} is damaged: generation {generation} wrote checksum {expected:08x}, and \
         two reads did not return it (the second one: {found:08x}); `offloadd verify` lists all damage. A job with a damaged tile resumes \
         from a checkpoint that was made before (`trainer train RUN.toml --resume-from STEP`), or begins again",
        device.display()
    )]
    Damaged {
        /// Path of the device.
        device: PathBuf,
        /// First byte of the extent on the device.
        offset: u64,
        /// The damaged tile.
        tile: TileIndex,
        /// Generation that wrote the tile.
        generation: Generation,
        /// Checksum in the manifest.
        expected: u32,
        /// Checksum of the bytes read.
        found: u32,
    },
    /// The device answered with an error.
    #[error("{} tile {tile}, {asked_bytes} bytes on {} at byte {offset}: {source}", words(*.verb), device.display())]
    Io {
        /// Direction of the transfer.
        verb: Verb,
        /// The tile.
        tile: TileIndex,
        /// Path of the device.
        device: PathBuf,
        /// First byte of the extent on the device.
        offset: u64,
        /// Length of the transfer.
        asked_bytes: u32,
        /// Errno of the device.
        source: io::Error,
    },
    /// The device moved fewer bytes than asked; a removed drive moves none.
    #[error(
        "{} tile {tile} on {} at byte {offset}: only {moved_bytes} of {asked_bytes} bytes were moved; check that the drive is still connected",
        words(*.verb),
        device.display()
    )]
    Short {
        /// Direction of the transfer.
        verb: Verb,
        /// The tile.
        tile: TileIndex,
        /// Path of the device.
        device: PathBuf,
        /// First byte of the extent on the device.
        offset: u64,
        /// Length of the transfer.
        asked_bytes: u32,
        /// Bytes that were moved.
        moved_bytes: u32,
    },
    /// The daemon refused before it asked a device.
    #[error("{} tile {tile}: the daemon refused: {why}", words(*.verb))]
    Refused {
        /// Direction of the transfer.
        verb: Verb,
        /// The tile.
        tile: TileIndex,
        /// Kind of the refusal.
        kind: FaultKind,
        /// Reason of the refusal; of a job that can write nothing more, the daemon's words about the first failure.
        why: String,
    },
}

impl TileError {
    pub(crate) fn refused(verb: Verb, tile: TileIndex, kind: FaultKind) -> Self {
        let why = refusal(kind);
        Self::Refused {
            verb,
            tile,
            kind,
            why,
        }
    }

    /// Kind of the error, to branch on.
    pub fn kind(&self) -> FaultKind {
        match self {
            Self::Damaged { .. } => FaultKind::Damaged,
            Self::Io { source, .. } if source.kind() == io::ErrorKind::StorageFull => {
                FaultKind::NoSpace
            }
            Self::Io { .. } => FaultKind::Io,
            Self::Short { .. } => FaultKind::Short,
            Self::Refused { kind, .. } => *kind,
        }
    }
}

fn words(verb: Verb) -> &'static str {
    match verb {
        Verb::SwapIn => "swapping in",
        Verb::SwapOut => "swapping out",
    }
}

fn refusal(kind: FaultKind) -> String {
    match kind {
        FaultKind::NeverWritten => "the tile was never written".into(),
        FaultKind::Poisoned => {
            "after a failed flush or a dead rank the job refuses everything until it is opened again; or the store is \
             read-only: the daemon's log says which"
                .into()
        }
        FaultKind::WrongGeneration => {
            "the write names another generation than the working one".into()
        }
        FaultKind::StaleEpoch => "the submission is for another incarnation of the daemon".into(),
        FaultKind::TileBusy => {
            "the tile has an operation in flight that this one would disturb".into()
        }
        FaultKind::TooMany => "more operations in flight than were granted".into(),
        FaultKind::Stopping => "the daemon is stopping".into(),
        other => format!("{other:?}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_socket_that_may_not_be_opened_is_not_one_where_nobody_listens() {
        let connect = |kind: io::ErrorKind| {
            let socket = "/run/offloadd/offloadd.sock".into();
            ClientError::Connect {
                socket,
                source: kind.into(),
            }
            .to_string()
        };
        let denied = connect(io::ErrorKind::PermissionDenied);
        assert!(
            denied.starts_with("no permission to open /run/"),
            "{denied}"
        );
        assert!(!denied.contains("start offloadd"), "{denied}");
        let nobody = connect(io::ErrorKind::ConnectionRefused);
        assert!(nobody.starts_with("no daemon listens on /run/"), "{nobody}");
        assert!(nobody.contains("start offloadd there"), "{nobody}");
    }
}
