//! Kinds of failures, for programs to branch on, with a message for people.

/// Kinds of failures. The numbers are part of the protocol and never reused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u16)]
pub enum FaultKind {
    /// A device answered with an errno.
    Io = 1,
    /// A device moved fewer bytes than asked; a removed NVMe drive moves none.
    Short = 2,
    /// A device is full, or the store has no room for a reservation.
    NoSpace = 3,
    /// Bytes do not match their checksum.
    Damaged = 4,
    /// No such tile in this job, or none was defined yet.
    UnknownTile = 5,
    /// No such slot in this session.
    UnknownSlot = 6,
    /// The slot has an operation in flight.
    SlotBusy = 7,
    /// The tile has another operation in flight that conflicts with this one.
    TileBusy = 8,
    /// The tile does not fit the slot.
    SlotTooSmall = 9,
    /// The tile was never written.
    NeverWritten = 10,
    /// The write or commit does not name the working generation.
    WrongGeneration = 11,
    /// The request names another incarnation of the daemon or another session.
    StaleEpoch = 12,
    /// More operations in flight than were granted.
    TooMany = 13,
    /// Malformed bytes: an unknown verb, a non-zero reserved field, an impossible ring index.
    Protocol = 14,
    /// A device of the job failed a flush or a manifest write; the job refuses everything until it is opened again.
    Poisoned = 15,
    /// The other side speaks another version.
    Version = 16,
    /// The object belongs to another user.
    Denied = 17,
    /// The job, or this rank of it, is open already.
    Busy = 18,
    /// The job exists with other tiles, durability or number of nodes.
    LayoutChanged = 19,
    /// A setting or request is outside its limits.
    Invalid = 20,
    /// There is not enough host memory.
    NoMemory = 21,
    /// The job ran with `durability = "none"` and was not closed in order.
    Unclean = 22,
    /// The daemon is stopping.
    Stopping = 23,
    /// No such job or session.
    NotFound = 24,
    /// The user has too many new sessions that no process has fetched yet: ask again in a moment.
    Queued = 25,
    /// The last operations of the job, or of this rank of it, are still ending: ask again in a moment.
    Ending = 26,
}

impl FaultKind {
    const ALL: [Self; 26] = [
        Self::Io,
        Self::Short,
        Self::NoSpace,
        Self::Damaged,
        Self::UnknownTile,
        Self::UnknownSlot,
        Self::SlotBusy,
        Self::TileBusy,
        Self::SlotTooSmall,
        Self::NeverWritten,
        Self::WrongGeneration,
        Self::StaleEpoch,
        Self::TooMany,
        Self::Protocol,
        Self::Poisoned,
        Self::Version,
        Self::Denied,
        Self::Busy,
        Self::LayoutChanged,
        Self::Invalid,
        Self::NoMemory,
        Self::Unclean,
        Self::Stopping,
        Self::NotFound,
        Self::Queued,
        Self::Ending,
    ];

    /// Returns the kind with this number, if this version knows it.
    pub fn from_number(number: u32) -> Option<Self> {
        Self::ALL.into_iter().find(|kind| *kind as u32 == number)
    }
}

/// A failure with a message.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct Fault {
    /// Kind of the failure, to branch on.
    pub kind: FaultKind,
    /// The failed action, its object, the cause, and how to fix it.
    pub message: String,
}

impl Fault {
    /// Makes a failure of `kind` with a message.
    pub fn new(kind: FaultKind, message: impl Into<String>) -> Self {
        Self {
            kind,
            message: message.into(),
        }
    }
}

impl From<Fault> for tonic::Status {
    fn from(fault: Fault) -> Self {
        use prost::Message;
        use tonic::Code;
        let code = match fault.kind {
            FaultKind::NoSpace | FaultKind::NoMemory | FaultKind::TooMany | FaultKind::Queued => {
                Code::ResourceExhausted
            }
            FaultKind::Denied => Code::PermissionDenied,
            FaultKind::NotFound | FaultKind::UnknownTile | FaultKind::UnknownSlot => Code::NotFound,
            FaultKind::Invalid | FaultKind::Protocol => Code::InvalidArgument,
            FaultKind::Io | FaultKind::Short | FaultKind::Damaged => Code::DataLoss,
            FaultKind::Stopping => Code::Unavailable,
            _ => Code::FailedPrecondition,
        };
        let details = crate::proto::Fault {
            kind: fault.kind as u32,
            message: fault.message.clone(),
        };
        Self::with_details(code, fault.message, details.encode_to_vec().into())
    }
}

impl From<&tonic::Status> for Fault {
    /// Reads the fault from a status. A status without one (a lost connection) becomes [`FaultKind::Stopping`].
    fn from(status: &tonic::Status) -> Self {
        use prost::Message;
        crate::proto::Fault::decode(status.details())
            .ok()
            .and_then(|f| Some(Self::new(FaultKind::from_number(f.kind)?, f.message)))
            .unwrap_or_else(|| {
                Self::new(
                    FaultKind::Stopping,
                    format!("the daemon did not answer: {status}"),
                )
            })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An older client takes a kind that it does not know for a daemon that is stopping, and waits for the next one.
    #[test]
    fn a_new_kind_raises_the_protocol_version() {
        let (kinds, version) = (FaultKind::ALL.len(), crate::PROTOCOL_VERSION);
        assert_eq!((kinds, version), (26, 8), "raise both");
    }

    #[test]
    fn a_fault_survives_the_way_through_a_status() {
        for kind in FaultKind::ALL {
            let fault = Fault::new(kind, format!("tried {kind:?}"));
            assert_eq!(Fault::from(&tonic::Status::from(fault.clone())), fault);
        }
        assert_eq!(FaultKind::from_number(0), None);
        assert_eq!(
            Fault::from(&tonic::Status::unavailable("gone")).kind,
            FaultKind::Stopping
        );
    }
}
