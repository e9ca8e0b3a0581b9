//! Numbers with a meaning. An index counts from zero within one table; none of them is trusted because of its type.

macro_rules! number {
    ($(#[$doc:meta])* $name:ident($inner:ty)) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
        pub struct $name(pub $inner);

        impl std::fmt::Display for $name {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                self.0.fmt(f)
            }
        }
    };
}

number!(
    /// A tile's place in its job's table.
    TileIndex(u32)
);
number!(
    /// A slot's place in its session's arena, over all classes in order.
    SlotIndex(u32)
);
number!(
    /// A device's place in its store.
    DeviceIndex(u32)
);
number!(
    /// A version of all of a job's tiles. 0 is "nothing yet"; the first commit is 1.
    Generation(u64)
);
number!(
    /// One life of a daemon. Drawn at random at start, so two lives never share one.
    Epoch(u64)
);
number!(
    /// Chosen by the process for one submission, given back in its completion.
    TicketId(u64)
);
number!(
    /// A process of a job, over all nodes.
    Rank(u32)
);

/// 128 random bits that stand for a session in calls and on the descriptor socket.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct SessionToken(pub [u8; 16]);

impl SessionToken {
    /// The token of a message, if it has the right length.
    pub fn from_bytes(bytes: &[u8]) -> Option<Self> {
        bytes.try_into().ok().map(Self)
    }
}

/// Never prints the bits: a token in a log is a key in a log.
impl std::fmt::Debug for SessionToken {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("SessionToken(..)")
    }
}
