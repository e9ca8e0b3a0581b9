//! Sources of epoll events.

use rustix::event::epoll::EventData;

use crate::io::SessionId;

/// Source of an event, packed into the 64 bits that epoll stores per descriptor: kind in the high bits, number below.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Source {
    Inbox,
    Engine,
    Listener,
    Hello(u64),
    Doorbell(SessionId),
    LifeLine(SessionId),
}

const NUMBER_BITS: u32 = 56;

impl Source {
    pub(super) fn pack(self) -> EventData {
        let (kind, number) = match self {
            Self::Inbox => (0, 0),
            Self::Engine => (1, 0),
            Self::Listener => (2, 0),
            Self::Hello(key) => (3, key),
            Self::Doorbell(session) => (4, session.0),
            Self::LifeLine(session) => (5, session.0),
        };
        assert!(number >> NUMBER_BITS == 0, "numbers count up from 0");
        EventData::new_u64(kind << NUMBER_BITS | number)
    }

    pub(super) fn unpack(data: EventData) -> Self {
        let number = data.u64() & ((1 << NUMBER_BITS) - 1);
        match data.u64() >> NUMBER_BITS {
            0 => Self::Inbox,
            1 => Self::Engine,
            2 => Self::Listener,
            3 => Self::Hello(number),
            4 => Self::Doorbell(SessionId(number)),
            5 => Self::LifeLine(SessionId(number)),
            kind => unreachable!("epoll gave back kind {kind}, which was never packed"),
        }
    }
}
