//! Tiles of the caller's own on the job's devices, for what can be computed again: they belong to no generation, end with the session, and
//! pass through slots of their own, so that neither waits for the job's tiles.
//!
//! ```text
//!   caller's threads               owner thread
//!   slot, write ─── operation ───▶ waiting ──▶ session        in order; of one tile one after the other
//!   begin_read, wait ◀── result ─────────────────┘
//! ```
//!
//! The tiles pass no core: nothing depends on when they move. Operations that the daemon granted beyond those of the core are theirs.

use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use offload_client::{EndedOperation, Session, Slot, TILE_BYTES_MAX, TileError, TileIndex, Verb};

use crate::SwapperError;

/// Fewest slots: one is in use while the next one moves.
pub const SCRATCH_SLOTS_MIN: u32 = 2;

/// Most bytes of a tile: enough for a drive's full rate, and few are left unused at the end of what is stored.
const TILE_BYTES_MOST: u64 = 8 << 20;

/// Most slots, 256 MiB of the largest tiles: half of them keep four drives busy while the others are filled.
const SLOTS_MOST: u64 = 32;

/// Tiles of an area that is too small for the largest ones.
const TILES_LEAST: u64 = 1024;

/// An area of scratch tiles.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ScratchSettings {
    /// Bytes of a tile, a multiple of the block.
    pub tile_bytes: u32,
    /// Number of tiles; 0 for no area.
    pub tile_count: u32,
    /// Slots they pass through, at least [`SCRATCH_SLOTS_MIN`].
    pub slot_count: u32,
}

impl ScratchSettings {
    /// An area of at least `bytes` bytes.
    ///
    /// # Errors
    /// No area is so large.
    pub fn new(bytes: u64) -> Result<Self, SwapperError> {
        if bytes == 0 {
            return Ok(Self::default());
        }
        let block = u64::from(offload_client::BLOCK_BYTES);
        let tile_bytes = (bytes / TILES_LEAST).div_ceil(block).max(1) * block;
        let tile_bytes = tile_bytes.min(TILE_BYTES_MOST);
        let tile_count = bytes.div_ceil(tile_bytes).max(SCRATCH_SLOTS_MIN.into());
        let most = offload_client::TILES_MAX as u64;
        if tile_count > most {
            return Err(SwapperError::Settings {
                what: format!(
                    "{bytes} bytes of scratch tiles: at most {}",
                    most * tile_bytes
                ),
            });
        }
        Ok(Self {
            tile_bytes: tile_bytes as u32,
            tile_count: tile_count as u32,
            slot_count: tile_count.min(SLOTS_MOST) as u32,
        })
    }

    /// The smallest area in which tensors of these sizes fit, each in tiles of its own.
    ///
    /// # Errors
    /// No area is so large.
    pub fn for_tensors(sizes: &[u64]) -> Result<Self, SwapperError> {
        let mut area = Self::new(sizes.iter().sum())?;
        loop {
            let tile_bytes = u64::from(area.tile_bytes).max(1);
            let needed = sizes.iter().map(|size| size.next_multiple_of(tile_bytes));
            let needed = needed.sum();
            if needed <= area.bytes() {
                return Ok(area);
            }
            // Its tiles may be larger; they have a largest size, so this ends.
            area = Self::new(needed)?;
        }
    }

    /// Tiles that a tensor of `bytes` takes.
    pub fn tiles_of(&self, bytes: u64) -> u32 {
        bytes.div_ceil(self.tile_bytes.into()) as u32
    }

    /// Bytes on devices.
    pub fn bytes(&self) -> u64 {
        u64::from(self.tile_bytes) * u64::from(self.tile_count)
    }

    pub(crate) fn check(&self) -> Result<(), SwapperError> {
        let wrong = self.tile_count > 0
            && (self.slot_count < SCRATCH_SLOTS_MIN
                || self.tile_bytes == 0
                || self.tile_bytes > TILE_BYTES_MAX
                || !self.tile_bytes.is_multiple_of(offload_client::BLOCK_BYTES));
        match wrong {
            true => Err(SwapperError::Settings {
                what: format!("{self:?}: tiles of whole blocks and {SCRATCH_SLOTS_MIN} slots"),
            }),
            false => Ok(()),
        }
    }
}

/// What to do with a tile. The slot comes back to the caller's free ones.
#[derive(Debug)]
pub(crate) struct ScratchOperation {
    verb: Verb,
    tile: u32,
    slot: Slot,
}

/// The area of scratch tiles, for any thread. Which tile holds what is the caller's business: a tile is written before it is read, and a read
/// that was begun is waited for.
#[derive(Clone)]
pub struct Scratch {
    area: Arc<ScratchArea>,
    send: Arc<dyn Fn(ScratchOperation) + Send + Sync>,
}

/// What both sides know.
#[derive(Debug)]
pub(crate) struct ScratchArea {
    settings: ScratchSettings,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    free: Vec<Slot>,
    /// Reads that have ended and were not waited for.
    read: HashMap<u32, Result<Slot, SwapperError>>,
    /// Why the content of a tile is not there: its last write failed.
    unwritten: HashMap<u32, SwapperError>,
    ended: Option<Ending>,
}

#[derive(Debug)]
enum Ending {
    InOrder,
    Failed(Arc<SwapperError>),
}

impl std::fmt::Debug for Scratch {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.area.settings.fmt(f)
    }
}

impl Scratch {
    pub(crate) fn new(
        area: Arc<ScratchArea>,
        send: impl Fn(ScratchOperation) + Send + Sync + 'static,
    ) -> Self {
        Self {
            area,
            send: Arc::new(send),
        }
    }

    /// Size of the area.
    pub fn settings(&self) -> ScratchSettings {
        self.area.settings
    }

    /// Takes a free slot, and waits for one. Slots that are dropped come back to nobody: give them to [`Scratch::write`] or
    /// [`Scratch::give_back`].
    ///
    /// # Errors
    /// The swapper has ended.
    pub fn slot(&self) -> Result<Slot, SwapperError> {
        self.area.wait(|state| state.free.pop())
    }

    /// Takes a free slot; `None` when all are taken.
    pub fn free_slot(&self) -> Option<Slot> {
        self.area.lock().free.pop()
    }

    /// Gives a slot back whose content is not needed.
    pub fn give_back(&self, slot: Slot) {
        self.area.change(|state| state.free.push(slot));
    }

    /// Begins to write `slot` to `tile`. A failure is told to whoever reads the tile.
    pub fn write(&self, tile: u32, slot: Slot) {
        self.begin(Verb::SwapOut, tile, slot);
    }

    /// Begins to read `tile` into `slot`, behind writes of it that have begun.
    pub fn begin_read(&self, tile: u32, slot: Slot) {
        self.begin(Verb::SwapIn, tile, slot);
    }

    /// Waits for a read that has begun.
    ///
    /// # Errors
    /// The tile could not be written or read, its checksum was wrong, or the swapper has ended.
    pub fn wait(&self, tile: u32) -> Result<Slot, SwapperError> {
        self.area.wait(|state| state.read.remove(&tile))?
    }

    /// The result of a read that has begun, if it has ended.
    pub fn poll(&self, tile: u32) -> Option<Result<Slot, SwapperError>> {
        self.area.lock().read.remove(&tile)
    }

    fn begin(&self, verb: Verb, tile: u32, slot: Slot) {
        assert!(tile < self.area.settings.tile_count, "no tile {tile}");
        (self.send)(ScratchOperation { verb, tile, slot });
    }
}

impl ScratchArea {
    pub(crate) fn new(settings: ScratchSettings, slots: Vec<Slot>) -> Self {
        let state = State {
            free: slots,
            ..State::default()
        };
        Self {
            settings,
            state: Mutex::new(state),
            changed: Condvar::new(),
        }
    }

    /// Wakes those who wait: nothing moves any more.
    pub(crate) fn end(&self, failure: Option<Arc<SwapperError>>) {
        self.change(|state| {
            let ended = failure.map_or(Ending::InOrder, Ending::Failed);
            state.ended.get_or_insert(ended);
        });
    }

    /// Gives a slot back whose operation has ended: a read's to whoever waits for it.
    fn put_result(&self, verb: Verb, tile: u32, slot: Slot, result: Result<(), TileError>) {
        let failed = |doing, source| SwapperError::ScratchTile {
            doing,
            tile,
            source,
        };
        self.change(|state| match (verb, result) {
            (Verb::SwapOut, Ok(())) => {
                state.unwritten.remove(&tile);
                state.free.push(slot);
            }
            (Verb::SwapOut, Err(source)) => {
                state.unwritten.insert(tile, failed("writing", source));
                state.free.push(slot);
            }
            (Verb::SwapIn, Ok(())) => {
                state.read.insert(tile, Ok(slot));
            }
            (Verb::SwapIn, Err(source)) => {
                let unwritten = state.unwritten.remove(&tile);
                let error = unwritten.unwrap_or_else(|| failed("reading", source));
                state.read.insert(tile, Err(error));
                state.free.push(slot);
            }
        });
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn change(&self, change: impl FnOnce(&mut State)) {
        change(&mut self.lock());
        self.changed.notify_all();
    }

    fn wait<T>(&self, ready: impl Fn(&mut State) -> Option<T>) -> Result<T, SwapperError> {
        let mut state = self.lock();
        loop {
            if let Some(found) = ready(&mut state) {
                return Ok(found);
            }
            match &state.ended {
                Some(Ending::Failed(error)) => return Err(SwapperError::Shared(error.clone())),
                Some(Ending::InOrder) => return Err(SwapperError::Stopped),
                None => {}
            }
            state = (self.changed.wait(state)).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

/// The owner thread's side.
#[derive(Debug)]
pub(crate) struct ScratchQueue {
    pub(crate) area: Arc<ScratchArea>,
    /// The session's number of the first tile.
    first: TileIndex,
    inflight_max: usize,
    /// Tiles in flight.
    inflight: HashSet<u32>,
    /// Operations that have not begun. There are no more than slots.
    waiting: VecDeque<ScratchOperation>,
}

impl ScratchQueue {
    pub(crate) fn new(area: Arc<ScratchArea>, first: TileIndex, inflight_max: usize) -> Self {
        Self {
            area,
            first,
            inflight_max,
            inflight: HashSet::new(),
            waiting: VecDeque::new(),
        }
    }

    pub(crate) fn inflight_count(&self) -> usize {
        self.inflight.len()
    }

    pub(crate) fn push(&mut self, operation: ScratchOperation) {
        self.waiting.push_back(operation);
    }

    /// Begins what may begin. Returns whether something did.
    pub(crate) fn start(&mut self, session: &mut Session) -> Result<bool, SwapperError> {
        let mut began = false;
        let mut index = 0;
        while self.inflight.len() < self.inflight_max && index < self.waiting.len() {
            // Behind an operation that waits for its tile, all later ones of the tile wait too.
            if self.inflight.contains(&self.waiting[index].tile) {
                index += 1;
                continue;
            }
            let ScratchOperation { verb, tile, slot } =
                self.waiting.remove(index).expect("within the queue");
            let number = TileIndex(self.first.0 + tile);
            let begun = match verb {
                Verb::SwapOut => session.swap_out(number, slot),
                // The caller computes with it next.
                Verb::SwapIn => session.swap_in_wanted(number, slot),
            };
            begun.map_err(|(_, source)| SwapperError::Client {
                doing: "moving a scratch tile".into(),
                source,
            })?;
            self.inflight.insert(tile);
            began = true;
        }
        Ok(began)
    }

    /// Whether a tile of the session is one of these.
    pub(crate) fn has(&self, tile: TileIndex) -> bool {
        tile.0 >= self.first.0 && tile.0 - self.first.0 < self.area.settings.tile_count
    }

    /// Hands the result of an operation to the caller. Returns the bytes that were moved.
    pub(crate) fn ended(&mut self, done: EndedOperation) -> u64 {
        let EndedOperation {
            verb,
            tile,
            slot,
            result,
            ..
        } = done;
        let tile = tile.0 - self.first.0;
        self.inflight.remove(&tile);
        let bytes = result.as_ref().map_or(0, |moved| u64::from(moved.bytes));
        self.area.put_result(verb, tile, slot, result.map(drop));
        bytes
    }
}

impl Drop for ScratchQueue {
    /// After a panic of the owner thread, nobody else tells those who wait. An earlier ending stays.
    fn drop(&mut self) {
        self.area.end(None);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_owner_that_panics_ends_all_waits_for_tiles() {
        let settings = ScratchSettings::new(8192).unwrap();
        let area = Arc::new(ScratchArea::new(settings, Vec::new()));
        let queue = ScratchQueue::new(area.clone(), TileIndex(0), 1);
        let owner = std::thread::spawn(move || {
            let _queue = queue;
            panic!("as an invariant of the owner");
        });
        owner.join().unwrap_err();
        let scratch = Scratch::new(area, |_| {});
        assert!(matches!(scratch.slot(), Err(SwapperError::Stopped)));
        assert!(matches!(scratch.wait(1), Err(SwapperError::Stopped)));
    }

    #[test]
    fn areas_of_all_sizes_have_room_and_few_slots() {
        assert_eq!(ScratchSettings::new(0).unwrap(), ScratchSettings::default());
        for bytes in [
            1,
            4096,
            100_000,
            5 << 20,
            600 << 20,
            (600 << 20) + 1,
            3 << 40,
        ] {
            let area = ScratchSettings::new(bytes).unwrap();
            area.check().unwrap();
            assert!(area.bytes() >= bytes, "{area:?}");
            assert!(
                area.bytes() - bytes <= u64::from(area.tile_bytes) * 2,
                "{area:?}"
            );
            assert!(u64::from(area.slot_count) <= SLOTS_MOST);
        }
        assert!(ScratchSettings::new(1 << 60).is_err());
    }

    #[test]
    fn who_reads_a_tile_is_told_that_it_could_not_be_written_and_no_slot_is_lost() {
        let class = offload_client::SlotClass {
            slot_bytes: 4096,
            slot_count: 1,
        };
        let mut arena = offload_client::MemoryArena::new(&[class]).unwrap();
        let settings = ScratchSettings::new(8192).unwrap();
        let area = ScratchArea::new(settings, vec![arena.take_slot(0).unwrap()]);
        let end = |verb, result| {
            let slot = area.lock().free.pop().expect("the slot came back");
            area.put_result(verb, 1, slot, result);
        };
        let short = |verb| {
            Err(TileError::Short {
                verb,
                tile: TileIndex(1),
                device: "a drive".into(),
                offset: 0,
                asked_bytes: 4096,
                moved_bytes: 0,
            })
        };
        let told = |error: SwapperError| match error {
            SwapperError::ScratchTile { doing, tile: 1, .. } => doing,
            other => panic!("{other}"),
        };
        let read = || area.lock().read.remove(&1).expect("a result");
        // The daemon refuses to read what was not written; the drive's error says more.
        end(Verb::SwapOut, short(Verb::SwapOut));
        end(Verb::SwapIn, short(Verb::SwapIn));
        assert_eq!(told(read().unwrap_err()), "writing");
        end(Verb::SwapIn, short(Verb::SwapIn));
        assert_eq!(told(read().unwrap_err()), "reading");
        // A later write is whole.
        end(Verb::SwapOut, short(Verb::SwapOut));
        end(Verb::SwapOut, Ok(()));
        end(Verb::SwapIn, short(Verb::SwapIn));
        assert_eq!(told(read().unwrap_err()), "reading");
        end(Verb::SwapIn, Ok(()));
        let slot = read().unwrap();
        area.lock().free.push(slot);
        assert_eq!(area.lock().free.len(), 1);
    }

    #[test]
    fn an_area_for_tensors_has_a_tile_for_each_end() {
        for (size, count) in [
            (1, 1),
            (100, 5000),
            (5000, 40),
            (3 << 20, 96),
            ((1 << 30) + 1, 80),
        ] {
            let area = ScratchSettings::for_tensors(&vec![size; count]).unwrap();
            let of_each = size.div_ceil(area.tile_bytes.into());
            assert!(of_each * count as u64 <= area.tile_count.into(), "{area:?}");
        }
        let large = ScratchSettings::for_tensors(&[1 << 30; 80]).unwrap();
        assert_eq!(large.bytes(), 80 << 30, "nothing is left unused");
        assert_eq!(ScratchSettings::for_tensors(&[]).unwrap().tile_count, 0);
    }
}
