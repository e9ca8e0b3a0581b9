//! Safeguards that a test can disable, to see that a named test fails without them:
//! `OFFLOADD_DISABLE=checksum,second-flush`.

/// A mechanism that protects a promise.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Safeguard {
    /// A tile read back is compared with its checksum.
    Checksum,
    /// Devices are flushed before the manifest record is written.
    FirstFlush,
    /// The manifest record is flushed before a commit is acknowledged.
    SecondFlush,
    /// A write must name the working generation.
    GenerationCheck,
    /// A store belongs to one daemon.
    Lock,
    /// A submission of another incarnation of the daemon is refused.
    Epoch,
    /// A dead process's slots are kept until its I/O has ended.
    ReclaimAfterIo,
    /// A write never overwrites committed bytes.
    OutOfPlace,
    /// Tiles are spread over the devices of a store.
    Placement,
    /// A copied tile is flushed before a definition names it.
    CopyFlush,
    /// The extent that a moved tile leaves is reused only after the new definition is durable.
    LeaveLast,
    /// Nothing is committed while a definition is rewritten.
    ExchangeFirst,
    /// State handed over before another daemon served the store is refused.
    Incarnations,
    /// With several nodes, the next generation is written only after the one before is confirmed.
    ConfirmFirst,
    /// A generation is confirmed only after every node has prepared it.
    LeastPrepared,
    /// Generations that different starts of a run committed are different, even if their numbers are equal.
    SameStart,
    /// After an update, a node's copy of the parameters is made anew before it is used.
    CopyInvalidation,
}

impl Safeguard {
    /// Returns the name in `OFFLOADD_DISABLE`.
    pub fn name(self) -> &'static str {
        match self {
            Self::Checksum => "checksum",
            Self::FirstFlush => "first-flush",
            Self::SecondFlush => "second-flush",
            Self::GenerationCheck => "generation-check",
            Self::Lock => "lock",
            Self::Epoch => "epoch",
            Self::ReclaimAfterIo => "reclaim-after-io",
            Self::OutOfPlace => "out-of-place",
            Self::Placement => "placement",
            Self::CopyFlush => "copy-flush",
            Self::LeaveLast => "leave-last",
            Self::ExchangeFirst => "exchange-first",
            Self::Incarnations => "incarnations",
            Self::ConfirmFirst => "confirm-first",
            Self::LeastPrepared => "least-prepared",
            Self::SameStart => "same-start",
            Self::CopyInvalidation => "copy-invalidation",
        }
    }
}

/// Whether a test disabled `safeguard`.
#[cfg(feature = "active")]
pub fn is_disabled(safeguard: Safeguard) -> bool {
    static DISABLED: std::sync::OnceLock<String> = std::sync::OnceLock::new();
    let list = DISABLED.get_or_init(|| std::env::var("OFFLOADD_DISABLE").unwrap_or_default());
    list.split(',').any(|name| name == safeguard.name())
}

/// Whether a test disabled the safeguard: never, in this build.
#[cfg(not(feature = "active"))]
pub const fn is_disabled(_safeguard: Safeguard) -> bool {
    false
}
