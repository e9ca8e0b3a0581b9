//! Indices and identifiers. An index counts from zero within one table. The type of a number says nothing about its validity.

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
    /// Index of a tile in its job's table.
    TileIndex(u32)
);
number!(
    /// Index of a slot in its session's arena, over all classes in order.
    SlotIndex(u32)
);
number!(
    /// Index of a device in the daemon. Another incarnation may give the device another index.
    DeviceIndex(u32)
);
number!(
    /// Number of a device in its store. Stays with the device and is never used again, so that processes know devices by it.
    DeviceNumber(u32)
);
number!(
    /// Version of all of a job's tiles. 0 means none; the first commit is 1.
    Generation(u64)
);
number!(
    /// Incarnation of a daemon. Drawn at random at start, so that no two are equal.
    Epoch(u64)
);
number!(
    /// Chosen by the process for one submission and returned in its completion.
    TicketId(u64)
);
number!(
    /// Number of a process of a job, over all nodes.
    Rank(u32)
);

/// 128 random bits that stand for a session in calls and on the descriptor socket.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct SessionToken(pub [u8; 16]);

impl SessionToken {
    /// Reads the token of a message; `None` if it has the wrong length.
    pub fn from_bytes(bytes: &[u8]) -> Option<Self> {
        bytes.try_into().ok().map(Self)
    }
}

/// Never prints the bits: a token in a log would give access to the session.
impl std::fmt::Debug for SessionToken {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("SessionToken(..)")
    }
}
