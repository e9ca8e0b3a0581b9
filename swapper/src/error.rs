//! Errors of the swapper. After any error except a refused call the swapper serves nothing more; the state that was
//! committed remains.

use std::sync::Arc;

use offload_client::{ClientError, FaultKind, TileError};

use crate::op::Op;

/// A refusal or failure of the swapper.
#[derive(Debug, thiserror::Error)]
pub enum SwapperError {
    /// The settings cannot work. Nothing was touched.
    #[error("swapper settings: {what}")]
    Settings {
        /// The setting, why it is wrong, and what would work.
        what: String,
    },
    /// The staging budget is smaller than two tiles of each kind.
    #[error(
        "a staging budget of {budget_bytes} bytes is too small: two tiles of each kind need {needed_bytes} bytes"
    )]
    StagingTooSmall {
        /// Budget in the settings.
        budget_bytes: u64,
        /// The smallest budget that works.
        needed_bytes: u64,
    },
    /// The swapper cannot follow the program.
    #[error("step program: {what}")]
    Program {
        /// The operation, and why it is refused.
        what: String,
    },
    /// The trainer asked for another operation than it announced.
    #[error("{asked:?} was requested, but the step's program has {}", match announced {
        Some(op) => format!("{op:?} next"),
        None => "nothing more".into(),
    })]
    OutOfOrder {
        /// The requested operation.
        asked: Op,
        /// The program's next operation.
        announced: Option<Op>,
    },
    /// The tiles have no content yet.
    #[error("the tiles have no content: call initialize first")]
    NotInitialized,
    /// The job exists with another layout.
    #[error(
        "job {job:?} exists with another layout ({what}): resume with its original settings, or start under another job name"
    )]
    LayoutChanged {
        /// The job's name.
        job: String,
        /// The first difference.
        what: String,
    },
    /// The daemon refused a call or is gone.
    #[error("{doing}: {source}")]
    Client {
        /// The call.
        doing: String,
        /// The client's error.
        source: offload_client::ClientError,
    },
    /// A tile could not be read or written, or its checksum was wrong.
    #[error("{doing} {kind:?} elements {elems:?} of unit {unit}: {source}")]
    Tile {
        /// `reading` or `writing`.
        doing: &'static str,
        /// Kind of the tile.
        kind: crate::Kind,
        /// Index of the unit.
        unit: usize,
        /// The tile's elements, counted from the unit's first.
        elems: std::ops::Range<u64>,
        /// Device, offset and cause.
        source: offload_client::TileError,
    },
    /// One of the caller's own tiles could not be read or written, or its checksum was wrong. The swapper serves on.
    #[error("{doing} scratch tile {tile}: {source}")]
    ScratchTile {
        /// `reading` or `writing`.
        doing: &'static str,
        /// Index of the tile.
        tile: u32,
        /// Device, offset and cause.
        source: offload_client::TileError,
    },
    /// The error that ended the swapper, which several threads are told.
    #[error(transparent)]
    Shared(Arc<SwapperError>),
    /// The optimizer panicked.
    #[error("the update of elements {elems:?} of unit {unit} panicked: {message}")]
    UpdatePanicked {
        /// Index of the unit.
        unit: usize,
        /// The tile's elements, counted from the unit's first.
        elems: std::ops::Range<u64>,
        /// The panic's message.
        message: String,
    },
    /// Operations were in flight and none completed within the limit.
    #[error(
        "no device operation completed for {seconds} s with {inflight} in flight{}: check {log} and the drives",
        devices.iter().map(|device| format!("; {device}")).collect::<String>()
    )]
    Stalled {
        /// The limit in seconds.
        seconds: u64,
        /// Operations in flight.
        inflight: usize,
        /// The daemon's log, in words.
        log: String,
        /// Devices that hang according to the daemon; all devices of the store if it names none or does not answer.
        devices: Vec<String>,
    },
    /// The nodes' stores do not belong together.
    #[error(transparent)]
    Disagreement(#[from] offload_client::nodes::Disagreement),
    /// The nodes could not exchange messages.
    #[error("{doing}: {source}")]
    OtherNodes {
        /// Purpose of the messages.
        doing: &'static str,
        /// The caller's error.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// Somebody called [`crate::Canceller::cancel`].
    #[error("{why}")]
    Cancelled {
        /// The caller's reason.
        why: String,
    },
    /// The function given to [`crate::Swapper::set_interrupt`] ended a wait. The swapper serves on; what was asked still happens,
    /// except that an interrupted scatter's step can only be begun again.
    #[error("interrupted while waiting for tiles")]
    Interrupted,
    /// An earlier failure has ended this swapper.
    #[error("the swapper stopped after an earlier error; committed steps are safe")]
    Stopped,
}

impl SwapperError {
    /// The error for one of those who are told it.
    pub(crate) fn told(error: Arc<Self>) -> Self {
        Arc::try_unwrap(error).unwrap_or_else(Self::Shared)
    }

    /// The error itself where several threads are told it.
    pub fn cause(&self) -> &Self {
        match self {
            Self::Shared(error) => error.cause(),
            error => error,
        }
    }

    /// Whether the daemon is gone, and with it perhaps the rank that started it: a private daemon ends when that rank
    /// dies.
    pub fn is_of_a_gone_daemon(&self) -> bool {
        let Self::Client { source, .. } = self.cause() else {
            return false;
        };
        matches!(source, ClientError::DaemonGone { .. })
            || source.fault() == Some(FaultKind::Stopping)
    }

    /// Whether the job takes nothing more, perhaps because one of its ranks is dead.
    pub fn is_of_a_poisoned_job(&self) -> bool {
        match self.cause() {
            Self::Client { source, .. } => source.fault() == Some(FaultKind::Poisoned),
            Self::Tile { source, .. } | Self::ScratchTile { source, .. } => {
                source.kind() == FaultKind::Poisoned
            }
            _ => false,
        }
    }

    /// Whether a tile of the job came back with other bytes than were written.
    pub fn is_of_a_damaged_tile(&self) -> bool {
        let Self::Tile { source, .. } = self.cause() else {
            return false;
        };
        matches!(source, TileError::Damaged { .. })
    }

    /// Whether the job was written in place and did not end in order, so that its tiles belong to no generation.
    pub fn is_of_an_unclean_job(&self) -> bool {
        matches!(self.cause(), Self::Client { source, .. } if source.fault() == Some(FaultKind::Unclean))
    }
}

#[cfg(test)]
mod tests {
    //! Tests that an error caused by another rank's death is not reported as this rank's own, and the reverse.

    use offload_client::{Fault, Generation, TileIndex};

    use super::*;

    fn committing(source: ClientError) -> SwapperError {
        SwapperError::Client {
            doing: "committing".into(),
            source,
        }
    }

    #[test]
    fn a_damaged_tile_of_the_state_is_known_by_whoever_is_told_of_it() {
        let damaged = || TileError::Damaged {
            device: "drive".into(),
            offset: 0,
            tile: TileIndex(3),
            generation: Generation(1),
            expected: 1,
            found: 2,
        };
        let of_the_state = || SwapperError::Tile {
            doing: "reading",
            kind: crate::Kind::State,
            unit: 1,
            elems: 0..8,
            source: damaged(),
        };
        assert!(of_the_state().is_of_a_damaged_tile());
        // A wait for another tile was told first.
        let shared = SwapperError::Shared(Arc::new(of_the_state()));
        assert!(shared.is_of_a_damaged_tile());
        let of_the_caller = SwapperError::ScratchTile {
            doing: "reading",
            tile: 0,
            source: damaged(),
        };
        assert!(!of_the_caller.is_of_a_damaged_tile());
        assert!(!SwapperError::Stopped.is_of_a_damaged_tile());
    }

    #[test]
    fn a_daemon_that_stops_in_order_is_as_gone_as_one_that_was_killed() {
        let refused = |kind| committing(ClientError::Refused(Fault::new(kind, "as told")));
        let socket = "daemon.sock".into();
        assert!(committing(ClientError::DaemonGone { socket }).is_of_a_gone_daemon());
        assert!(refused(FaultKind::Stopping).is_of_a_gone_daemon());
        for kind in [FaultKind::Poisoned, FaultKind::Io, FaultKind::TooMany] {
            assert!(!refused(kind).is_of_a_gone_daemon(), "{kind:?}");
        }
        assert!(!SwapperError::Stopped.is_of_a_gone_daemon());
        assert!(refused(FaultKind::Poisoned).is_of_a_poisoned_job());
        assert!(!refused(FaultKind::Stopping).is_of_a_poisoned_job());
        assert!(refused(FaultKind::Unclean).is_of_an_unclean_job());
        assert!(!refused(FaultKind::NoSpace).is_of_an_unclean_job());
    }
}
