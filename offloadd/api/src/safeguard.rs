//! Protective mechanisms that a test can take away, to see that a named test fails without them.
//!
//! Only with the feature `safeguard`, which only test builds have: `OFFLOADD_DISABLE=checksum,second-flush`.
//! Without the feature every question is the constant `false` and no code is left.

/// A mechanism behind a promise.
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
    /// A submission of another life of the daemon is refused.
    Epoch,
    /// A dead process's slots are kept until its I/O has ended.
    ReclaimAfterIo,
    /// A write goes where nothing committed lies.
    OutOfPlace,
    /// Tiles are spread over the devices of a store.
    Placement,
    /// A copied tile is flushed before a definition names it.
    CopyFlush,
    /// The extent a tile has left is taken again only when the new definition is durable.
    LeaveLast,
    /// Nothing is committed while a definition is written again.
    ExchangeFirst,
    /// What was handed over before another daemon served the store is refused.
    Lives,
}

impl Safeguard {
    /// Its name in `OFFLOADD_DISABLE`.
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
            Self::Lives => "lives",
        }
    }
}

/// Whether a test took `mechanism` away.
#[cfg(feature = "safeguard")]
pub fn removed(mechanism: Safeguard) -> bool {
    static REMOVED: std::sync::OnceLock<String> = std::sync::OnceLock::new();
    let list = REMOVED.get_or_init(|| std::env::var("OFFLOADD_DISABLE").unwrap_or_default());
    list.split(',').any(|name| name == mechanism.name())
}

/// Whether a test took `mechanism` away: never, in this build.
#[cfg(not(feature = "safeguard"))]
pub const fn removed(_mechanism: Safeguard) -> bool {
    false
}
