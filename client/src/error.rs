//! What can go wrong on this side, by kinds a caller branches on.

use std::io;
use std::path::PathBuf;
use std::time::Duration;

use offload_api::fault::{Fault, FaultKind};
use offload_api::ids::{Generation, TileIndex};
use offload_api::ring::entry::Verb;

fn may_not(connecting: &io::Error) -> bool {
    connecting.kind() == io::ErrorKind::PermissionDenied
}

/// Why a call failed.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// No daemon was reached.
    #[error(
        "{} {}: {source}; {}, or leave the socket setting out to get a private one",
        if may_not(source) { "this user may not open" } else { "nobody listens on" },
        socket.display(),
        if may_not(source) { "have whoever runs offloadd let it (group and mode of the socket)" } else { "start offloadd there" }
    )]
    Connect {
        /// As configured.
        socket: PathBuf,
        /// What connecting said.
        source: io::Error,
    },
    /// The daemon speaks another protocol.
    #[error(
        "offloadd {build} speaks protocol version {theirs}, this program {ours}: install both from one release"
    )]
    Version {
        /// This crate's.
        ours: u32,
        /// The daemon's.
        theirs: u32,
        /// The daemon's build.
        build: String,
    },
    /// The daemon, or this crate before asking it, said no.
    #[error(transparent)]
    Refused(#[from] Fault),
    /// The session is over: what is in flight does not come back.
    #[error(
        "the daemon on {} is gone, or has thrown this session out; its log says why. What was committed is safe",
        socket.display()
    )]
    DaemonGone {
        /// Where it was.
        socket: PathBuf,
    },
    /// The daemon lives and does not answer.
    #[error(
        "offloadd on {} has not answered {call} for {} s; a device that hangs is the usual reason",
        socket.display(),
        waited.as_secs()
    )]
    Timeout {
        /// Name of the call.
        call: &'static str,
        /// Where.
        socket: PathBuf,
        /// As long as that.
        waited: Duration,
    },
    /// The daemon sent what no daemon of this version sends.
    #[error("the daemon broke the protocol: {what}")]
    Protocol {
        /// What it was.
        what: String,
    },
    /// The kernel refused memory or a descriptor.
    #[error("{what}: {source}")]
    Os {
        /// What was tried.
        what: String,
        /// The errno.
        source: io::Error,
    },
    /// The private daemon did not start.
    #[error("private offloadd: {what}")]
    Private {
        /// What was tried, what came, and where its log is.
        what: String,
    },
}

impl ClientError {
    /// The kind of a refusal, whichever side refused.
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

/// Why a tile did not move. The slot comes back with the error; after a swap in its bytes are all ones (NaN in every
/// float format), so that nobody computes with them by mistake.
#[derive(Debug, thiserror::Error)]
pub enum TileError {
    /// The bytes read are not the bytes written.
    #[error(
        "tile {tile} on {} at byte {offset} is damaged: generation {generation} wrote checksum {expected:08x}, found \
         {found:08x} the second time it was read; `offloadd verify` lists all damage",
        device.display()
    )]
    Damaged {
        /// Path of the device.
        device: PathBuf,
        /// Of the extent, in bytes.
        offset: u64,
        /// Whose bytes.
        tile: TileIndex,
        /// That wrote them.
        generation: Generation,
        /// In the manifest.
        expected: u32,
        /// Of the bytes read.
        found: u32,
    },
    /// The device answered with an error.
    #[error("{} tile {tile}, {asked_bytes} bytes on {} at byte {offset}: {source}", words(*.verb), device.display())]
    Io {
        /// What was tried.
        verb: Verb,
        /// With which tile.
        tile: TileIndex,
        /// Path of the device.
        device: PathBuf,
        /// Of the extent, in bytes.
        offset: u64,
        /// Length of the transfer.
        asked_bytes: u32,
        /// The device's errno.
        source: io::Error,
    },
    /// The device moved less than it was asked to; nothing at all is what a removed drive answers.
    #[error(
        "{} tile {tile} on {} at byte {offset}: only {moved_bytes} of {asked_bytes} bytes moved; is the drive still there?",
        words(*.verb),
        device.display()
    )]
    Short {
        /// What was tried.
        verb: Verb,
        /// With which tile.
        tile: TileIndex,
        /// Path of the device.
        device: PathBuf,
        /// Of the extent, in bytes.
        offset: u64,
        /// Length of the transfer.
        asked_bytes: u32,
        /// What came of it.
        moved_bytes: u32,
    },
    /// The daemon refused before it asked a device.
    #[error("{} tile {tile}: the daemon refused: {}", words(*.verb), refusal(*.kind))]
    Refused {
        /// What was tried.
        verb: Verb,
        /// With which tile.
        tile: TileIndex,
        /// Why.
        kind: FaultKind,
    },
}

impl TileError {
    /// To branch on.
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
        FaultKind::NeverWritten => "it was never written".into(),
        FaultKind::Poisoned => {
            "the job takes nothing more after a failed flush or a dead rank: open it again; or the whole store is only \
             read: `offloadd device list` says why"
                .into()
        }
        FaultKind::WrongGeneration => {
            "the write names another generation than the working one".into()
        }
        FaultKind::StaleEpoch => "the submission is of another life of the daemon".into(),
        FaultKind::TileBusy => {
            "the tile has an operation in flight that this one would disturb".into()
        }
        FaultKind::TooMany => "more in flight than was granted".into(),
        FaultKind::Stopping => "it is stopping".into(),
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
            denied.starts_with("this user may not open /run/"),
            "{denied}"
        );
        assert!(!denied.contains("start offloadd"), "{denied}");
        let nobody = connect(io::ErrorKind::ConnectionRefused);
        assert!(nobody.starts_with("nobody listens on /run/"), "{nobody}");
        assert!(nobody.contains("start offloadd there"), "{nobody}");
    }
}
