//! Heartbeats in a TCP store, for runs over several nodes or under torchrun. A dead rank is detected by its silence.

use super::gloo::Store;
use training_ranks::{BEAT_BYTES, Beat, CollectiveError, HeartbeatStore, LastHeartbeat};

/// Heartbeats as keys of a store, over a connection of their own.
pub(crate) struct TcpHeartbeatStore {
    store: Store,
    rank: u32,
}

impl TcpHeartbeatStore {
    /// Claims `rank`'s keys in `store`.
    ///
    /// # Errors
    /// The rank is taken, or the store does not answer.
    pub(crate) fn open(store: Store, rank: u32) -> Result<Self, CollectiveError> {
        if store.add(&format!("taken-{rank}"), 1)? != 1 {
            return Err(CollectiveError::Taken {
                rank,
                place: store.location().to_owned(),
            });
        }
        Ok(TcpHeartbeatStore { store, rank })
    }
}

impl HeartbeatStore for TcpHeartbeatStore {
    fn write(&mut self, beat: &Beat) -> Result<(), CollectiveError> {
        self.store.set(&key(self.rank), &beat.encode())
    }

    fn read(&mut self, rank: u32) -> Result<LastHeartbeat, CollectiveError> {
        let mut bytes = [0; BEAT_BYTES];
        Ok(match self.store.get(&key(rank), &mut bytes)? {
            None => LastHeartbeat::Nothing,
            Some(count) => LastHeartbeat::Beat(bytes.get(..count).and_then(Beat::decode)),
        })
    }
}

fn key(rank: u32) -> String {
    format!("beat-{rank}")
}
