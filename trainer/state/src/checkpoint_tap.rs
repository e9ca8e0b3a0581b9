//! Copies tiles while they are updated, so that the state after one step is written while the next step runs.
//!
//! ```text
//!   optimizer ─▶ tile, updated ─▶ its destination
//!                     │ copy into a buffer, waiting for one if the drive is slow
//!                     ▼
//!                 full ─▶ writer thread ─▶ empty ─▶ the next copy
//! ```
//!
//! An update touches every tile once in a step, wherever it is stored, so a checkpoint reads nothing again.
//! There are few buffers: if the drive is slower than the updates, updates wait for it until all tiles are
//! copied.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};

use swapper::{Optimizer, TileRange, TileUpdate};

/// Buffers, each for a tile's parameters and state: two optimizer threads fill one each while the others are
/// written.
pub const BUFFERS: usize = 4;

/// Copy of a range's parameters, followed by its state.
pub struct TileCopy {
    pub range: TileRange,
    pub bytes: Vec<u8>,
    pub param_bytes: usize,
}

/// Copies updated tiles while a checkpoint needs them. Clones share one tap.
#[derive(Clone, Default)]
pub struct CheckpointTap {
    /// Read for each tile of each step; almost always false.
    wanted: Arc<AtomicBool>,
    lane: Arc<Mutex<Option<Lane>>>,
}

struct Lane {
    empty: Arc<Mutex<Receiver<Vec<u8>>>>,
    full: Sender<TileCopy>,
    /// Copies that are still missing.
    left: usize,
}

/// Receiver of copies, which returns their buffers.
pub struct CopyReceiver {
    pub full: Receiver<TileCopy>,
    pub empty: Sender<Vec<u8>>,
}

impl CheckpointTap {
    /// Copies the next `count` tiles that are updated.
    pub fn want(&self, count: usize) -> CopyReceiver {
        let (full, taken) = channel();
        let (given_back, empty) = channel();
        for _ in 0..BUFFERS {
            given_back.send(Vec::new()).expect("the receiver exists");
        }
        *self.lane() = Some(Lane {
            empty: Arc::new(Mutex::new(empty)),
            full,
            left: count,
        });
        self.wanted.store(count > 0, Ordering::Release);
        CopyReceiver {
            full: taken,
            empty: given_back,
        }
    }

    /// Stops copying. Returns the number of missing copies.
    pub fn stop(&self) -> usize {
        self.wanted.store(false, Ordering::Release);
        self.lane().take().map_or(0, |lane| lane.left)
    }

    /// Copies the tiles of `range` if a checkpoint needs them. Waits for a buffer.
    pub fn offer(&self, range: &TileRange, param: &[u8], state: &[u8]) {
        if !self.wanted.load(Ordering::Acquire) {
            return;
        }
        let (empty, full) = {
            let mut lane = self.lane();
            let Some(lane) = lane.as_mut().filter(|lane| lane.left > 0) else {
                return;
            };
            lane.left -= 1;
            if lane.left == 0 {
                self.wanted.store(false, Ordering::Release);
            }
            (lane.empty.clone(), lane.full.clone())
        };
        let buffer = empty.lock().unwrap_or_else(PoisonError::into_inner).recv();
        // The receiver has ended and reports the reason itself.
        let Ok(mut bytes) = buffer else {
            return;
        };
        bytes.clear();
        bytes.extend_from_slice(param);
        bytes.extend_from_slice(state);
        let _ = full.send(TileCopy {
            range: range.clone(),
            bytes,
            param_bytes: param.len(),
        });
    }

    fn lane(&self) -> std::sync::MutexGuard<'_, Option<Lane>> {
        self.lane.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Optimizer that offers each updated tile to a [`CheckpointTap`].
pub struct TappedOptimizer<O> {
    pub optimizer: O,
    pub checkpoint_tap: CheckpointTap,
}

impl<S, O: Optimizer<S>> Optimizer<S> for TappedOptimizer<O> {
    fn update(&mut self, tile: TileUpdate<'_>, step: &S) {
        let TileUpdate {
            range,
            param,
            state,
            grad,
        } = tile;
        let tile = TileUpdate {
            range,
            param: &mut *param,
            state: &mut *state,
            grad,
        };
        self.optimizer.update(tile, step);
        self.checkpoint_tap.offer(range, param, state);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn range(unit: usize) -> TileRange {
        TileRange { unit, elems: 0..4 }
    }

    #[test]
    fn exactly_the_wanted_number_of_tiles_is_copied() {
        let checkpoint_tap = CheckpointTap::default();
        checkpoint_tap.offer(&range(0), &[1], &[2]);
        let taken = checkpoint_tap.want(2);
        for unit in 1..4 {
            checkpoint_tap.offer(&range(unit), &[unit as u8], &[7, 8]);
        }
        let units: Vec<usize> = (taken.full.try_iter())
            .map(|copy| {
                assert_eq!(copy.bytes, [copy.range.unit as u8, 7, 8]);
                assert_eq!(copy.param_bytes, 1);
                copy.range.unit
            })
            .collect();
        assert_eq!(units, [1, 2]);
        assert_eq!(checkpoint_tap.stop(), 0);
    }

    #[test]
    fn copies_wait_for_buffers_but_not_for_a_receiver_that_gave_up() {
        let checkpoint_tap = CheckpointTap::default();
        let taken = checkpoint_tap.want(100);
        std::thread::scope(|scope| {
            let offering = scope.spawn(|| {
                for unit in 0..100 {
                    checkpoint_tap.offer(&range(unit), &[0; 16], &[0; 16]);
                }
            });
            let first = taken.full.recv().unwrap();
            while taken.full.try_recv().is_ok() {}
            std::thread::sleep(std::time::Duration::from_millis(20));
            assert!(!offering.is_finished(), "there are only {BUFFERS} buffers");
            taken.empty.send(first.bytes).unwrap();
            taken.full.recv().unwrap();
            drop(taken);
            offering.join().unwrap();
        });
        assert_eq!(checkpoint_tap.stop(), 0);
        let taken = checkpoint_tap.want(3);
        checkpoint_tap.offer(&range(0), &[1], &[2]);
        assert_eq!(checkpoint_tap.stop(), 2, "missing copies are counted");
        assert_eq!(taken.full.iter().count(), 1, "the lane ends");
    }
}
