//! Reads committed tiles at a limited rate while the daemon serves, and reports damage.
//!
//! ```text
//!   owner thread ──── places of some tiles ────▶ scrub thread ──read, compare──▶ the caller's stream
//!        ▲──── still at this place? ────────────────┘ before a tile is reported as damaged
//! ```
//!
//! The owner thread answers questions about a few tiles at a time and never waits. Tiles are read past the queues, through a file
//! opened for this, at a limited rate; if it cannot be opened, the tiles count as unread. A tile that was written, moved or deleted in
//! the meantime has another checksum, so a mismatch is damage only if the owner thread confirms that the tile is still there.

use std::collections::{BTreeSet, HashMap};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use offload_api::checksum::checksum;
use offload_api::fault::{Fault, FaultKind};
use offload_api::ids::DeviceIndex;
use offload_api::proto;
use tokio::sync::mpsc::error::TrySendError;
use tokio::sync::{mpsc, oneshot};
use tonic::Status;

use crate::core::{CommittedTile, TileDamage, TilePosition, Viewer};
use crate::device::{Device, DeviceBlocks};
use crate::driver::DriverHandle;
use crate::io::AlignedBytes;
use crate::metrics::MovedBeside;
use crate::store::content::JobContent;
use crate::store::sealed::{self, Unreadable};
use crate::store::superblock::{self, Superblock};
use crate::store::verify::{Damage as Wrong, DamagedTile};
use crate::store::{BLOCK, SUPERBLOCK_OFFSETS};

/// Lower limit of the rate: with less, a scrub would take years.
pub(super) const RATE_MIN: u64 = 1 << 20;

/// Bytes per read, so that other reads are not delayed.
const PIECE_BYTES: usize = 1 << 20;

/// Interval of progress messages to the caller.
const PROGRESS_INTERVAL: Duration = Duration::from_millis(500);

/// A scrub ends if its caller reads nothing for this long.
const READ_WAIT: Duration = Duration::from_secs(30);

/// Interval of checks whether the caller has read.
const READ_POLL: Duration = Duration::from_millis(20);

/// Longest sleep, after which a disconnected caller is noticed.
const SLEEP_MAX: Duration = Duration::from_millis(200);

/// Limit of damaged tiles that are listed; all are counted.
const NAMED_MAX: u64 = 10_000;

/// Limit of users' concurrent scrubs; each has a thread.
const SCRUBS_MAX: usize = 16;

/// Running scrubs, at most one per user.
#[derive(Clone, Debug)]
pub(super) struct Scrubs {
    running: Arc<Mutex<BTreeSet<(CallerClass, u32)>>>,
    /// Limit of all users' scrubs together.
    bytes_per_s_max: u64,
}

/// Whether the rate is limited.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum CallerClass {
    /// Root and the daemon's user: not limited.
    Administrator,
    User,
}

/// Registration of a running scrub; removed on drop.
#[derive(Debug)]
struct ScrubRegistration {
    scrubs: Scrubs,
    who: (CallerClass, u32),
}

impl Drop for ScrubRegistration {
    fn drop(&mut self) {
        self.scrubs.lock().remove(&self.who);
    }
}

impl ScrubRegistration {
    /// Rate at which a scrub that asked for `wished` may read now.
    fn bytes_per_s(&self, wished: u64) -> u64 {
        if self.who.0 == CallerClass::Administrator {
            return wished;
        }
        let running = self.scrubs.lock();
        let users = running.range((CallerClass::User, 0)..).count() as u64;
        wished.min(self.scrubs.bytes_per_s_max / users.max(1))
    }
}

/// A checked request.
#[derive(Clone, Debug)]
pub(super) struct Wish {
    pub(super) uid: u32,
    pub(super) viewer: Viewer,
    /// Name of one job; all jobs if `None`.
    pub(super) job: Option<String>,
    pub(super) bytes_per_s: u64,
}

pub(super) type Answers = mpsc::Receiver<Result<proto::ScrubReply, Status>>;

impl Scrubs {
    pub(super) fn new(bytes_per_s_max: u64) -> Self {
        Self {
            running: Arc::default(),
            bytes_per_s_max,
        }
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, BTreeSet<(CallerClass, u32)>> {
        self.running.lock().expect("no panic while locked")
    }

    fn register(&self, viewer: Viewer, uid: u32) -> Result<ScrubRegistration, Fault> {
        let class = match viewer {
            Viewer::All => CallerClass::Administrator,
            Viewer::Uid(_) => CallerClass::User,
        };
        let mut running = self.lock();
        let busy = |what: String| Err(Fault::new(FaultKind::TooMany, what));
        if running.contains(&(class, uid)) {
            return busy(format!(
                "a scrub of uid {uid} is already running; only one at a time is allowed, so that training keeps its bandwidth"
            ));
        }
        // Administrators do not count: at most two can run.
        let users_count = running.range((CallerClass::User, 0)..).count();
        if class == CallerClass::User && users_count >= SCRUBS_MAX {
            return busy(format!(
                "{SCRUBS_MAX} scrubs of users are already running; retry later"
            ));
        }
        running.insert((class, uid));
        Ok(ScrubRegistration {
            scrubs: self.clone(),
            who: (class, uid),
        })
    }

    /// Starts a scrub, which ends early if the receiver is dropped.
    pub(super) fn start(&self, owner: DriverHandle, wish: Wish) -> Result<Answers, Fault> {
        let place = self.register(wish.viewer, wish.uid)?;
        let (answers, receiver) = mpsc::channel(16);
        let scrub = Scrub {
            owner,
            wish,
            place,
            answers,
            files: HashMap::new(),
            uncounted: HashMap::new(),
            buffer: AlignedBytes::zeroed(0),
            pace_from: Instant::now(),
            reported_at: Instant::now(),
            done: proto::ScrubProgress::default(),
        };
        std::thread::Builder::new()
            .name("scrub".into())
            .spawn(move || scrub.run())
            .map_err(|error| {
                let what = format!("starting a thread for the scrub: {error}");
                Fault::new(FaultKind::NoMemory, what)
            })?;
        Ok(receiver)
    }
}

struct Scrub {
    owner: DriverHandle,
    wish: Wish,
    place: ScrubRegistration,
    answers: mpsc::Sender<Result<proto::ScrubReply, Status>>,
    /// By index, because a path may belong to another device by now. `None` if it cannot be opened.
    files: HashMap<DeviceIndex, Option<Device>>,
    /// Bytes read that have not been reported to the owner thread.
    uncounted: HashMap<DeviceIndex, u64>,
    buffer: AlignedBytes,
    pace_from: Instant,
    reported_at: Instant,
    done: proto::ScrubProgress,
}

/// Reason why a scrub ends early.
enum ScrubEnd {
    /// The caller has disconnected.
    Disconnected,
    Failed(Fault),
}

impl From<Fault> for ScrubEnd {
    fn from(fault: Fault) -> Self {
        Self::Failed(fault)
    }
}

impl Scrub {
    fn run(mut self) {
        let ended = self.all();
        self.count();
        match ended {
            Ok(()) | Err(ScrubEnd::Disconnected) => {}
            Err(ScrubEnd::Failed(fault)) => {
                let _ = self.answers.blocking_send(Err(fault.into()));
            }
        }
    }

    fn all(&mut self) -> Result<(), ScrubEnd> {
        let mut jobs = answered(self.owner.contents(self.wish.viewer))?;
        if let Some(name) = &self.wish.job {
            jobs.retain(|job| job.name.as_str() == name);
            if jobs.is_empty() {
                let what = format!("you have no job {name} in the store");
                return Err(Fault::new(FaultKind::NotFound, what).into());
            }
        }
        self.done.job_count = jobs.len() as u64;
        self.done.total_bytes = jobs.iter().map(JobContent::comparable_bytes).sum();
        self.report_progress()?;
        for job in jobs {
            if job.generations.iter().any(|one| one.overwriting) {
                self.done.unclean_jobs.push(proto::JobName {
                    uid: job.uid,
                    job: job.name.as_str().into(),
                });
            }
            let undecided = !job.unreadable.is_empty();
            if undecided {
                let newest = job.generations.last();
                self.done.undecided_jobs.push(proto::UndecidedJob {
                    uid: job.uid,
                    job: job.name.as_str().into(),
                    generation: newest.map_or(0, |newest| newest.generation.0),
                    differing_count: 0,
                });
            }
            let mut at = TilePosition {
                uid: job.uid,
                name: job.name,
                tile: 0,
            };
            // `None` if the job was deleted in the meantime.
            while let Some(found) = answered(self.owner.committed_tiles(at.clone()))? {
                for tile in &found.tiles {
                    let spec = found.definition.tiles()[tile.tile.0 as usize];
                    let wrong = self.compare(&at, tile, spec.tile_bytes)?;
                    if undecided && matches!(wrong, Some(Wrong::Checksum { .. })) {
                        // Overwritten, if the unreadable record is the newest.
                        let told = self.done.undecided_jobs.last_mut();
                        told.expect("told above").differing_count += 1;
                    } else if let Some(wrong) = wrong {
                        self.damaged(
                            &at,
                            tile,
                            DamagedTile {
                                path: tile.path.to_string(),
                                offset: tile.extent.offset,
                                uid: at.uid,
                                job: at.name.clone(),
                                tile: tile.tile,
                                spec,
                                generation: tile.generation,
                                written_by: tile.version.generation,
                                damage: wrong,
                            },
                        )?;
                    }
                }
                match found.next {
                    Some(next) => at.tile = next,
                    None => break,
                }
            }
        }
        self.done.ended = true;
        self.report_progress()
    }

    /// Checks a tile and confirms a mismatch with the owner thread.
    fn compare(
        &mut self,
        at: &TilePosition,
        tile: &CommittedTile,
        tile_bytes: u32,
    ) -> Result<Option<Wrong>, ScrubEnd> {
        let Some(read) = self.read(tile, tile_bytes)? else {
            self.done.unread_count += 1;
            return Ok(None);
        };
        self.done.tile_count += 1;
        let wrong = match read {
            Err(error) => Wrong::Unreadable(error.to_string()),
            Ok(()) => {
                let found = checksum(&self.buffer.as_slice()[..tile_bytes as usize]);
                let expected = tile.version.checksum;
                if found == expected {
                    return Ok(None);
                }
                Wrong::Checksum { expected, found }
            }
        };
        let again = TilePosition {
            tile: tile.tile.0 as usize,
            ..at.clone()
        };
        let now = answered(self.owner.committed_tiles(again))?;
        let still = now.is_some_and(|now| {
            let same = |other: &CommittedTile| {
                (other.tile, other.version, other.extent) == (tile.tile, tile.version, tile.extent)
            };
            now.tiles.iter().any(same)
        });
        Ok(still.then_some(wrong))
    }

    /// Opens the device of a tile, once per scrub.
    fn open(&mut self, tile: &CommittedTile) -> Result<(), ScrubEnd> {
        let index = tile.extent.device;
        if self.files.contains_key(&index) {
            return Ok(());
        }
        let ours = answered(self.owner.superblock_of(index))?;
        let looked = match Device::open_readonly(Path::new(&*tile.path)) {
            Ok(device) if is_another(&device, &ours) => Err(format!(
                "device {}: another device is at this path than the daemon has open",
                tile.path
            )),
            Ok(device) => Ok(device),
            Err(error) => Err(error.to_string()),
        };
        let device = looked.map_err(|why| self.done.unread.push(why)).ok();
        self.files.insert(index, device);
        Ok(())
    }

    /// Reads a tile; `None` if its device could not be opened.
    fn read(
        &mut self,
        tile: &CommittedTile,
        tile_bytes: u32,
    ) -> Result<Option<std::io::Result<()>>, ScrubEnd> {
        let tile_bytes = tile_bytes as usize;
        if self.buffer.len() < tile_bytes {
            self.buffer = AlignedBytes::zeroed(tile_bytes);
        }
        self.open(tile)?;
        let mut at = 0;
        let mut result = Ok(());
        while at < tile_bytes {
            let end = (at + PIECE_BYTES).min(tile_bytes);
            let Some(device) = &self.files[&tile.extent.device] else {
                return Ok(None);
            };
            let into = &mut self.buffer.as_mut_slice()[at..end];
            if result.is_ok() {
                result = device
                    .file()
                    .read_exact_at(into, tile.extent.offset + at as u64);
                if result.is_ok() {
                    *self.uncounted.entry(tile.extent.device).or_default() += (end - at) as u64;
                }
            }
            self.done.done_bytes += (end - at) as u64;
            self.keep_pace(end - at)?;
            at = end;
            if self.reported_at.elapsed() >= PROGRESS_INTERVAL {
                self.report_progress()?;
            }
        }
        Ok(Some(result))
    }

    /// Sleeps to keep the rate, averaged over about a second.
    fn keep_pace(&mut self, bytes: usize) -> Result<(), ScrubEnd> {
        let rate = self.place.bytes_per_s(self.wish.bytes_per_s);
        let piece = Duration::from_secs_f64(bytes as f64 / rate as f64);
        let now = Instant::now();
        let due = self.pace_from + piece;
        if !pause_until(due, || !self.answers.is_closed()) {
            return Err(ScrubEnd::Disconnected);
        }
        self.pace_from = due.max(now.checked_sub(Duration::from_secs(1)).unwrap_or(now));
        Ok(())
    }

    fn damaged(
        &mut self,
        at: &TilePosition,
        tile: &CommittedTile,
        damaged: DamagedTile,
    ) -> Result<(), ScrubEnd> {
        self.done.damaged_count += 1;
        let (expected, found) = match damaged.damage {
            Wrong::Checksum { expected, found } => (expected, found),
            Wrong::Unreadable(_) => (tile.version.checksum, 0),
        };
        let heard = TileDamage {
            device: tile.extent.device,
            offset: tile.extent.offset,
            tile: tile.tile,
            generation: tile.version.generation,
            expected,
            found,
        };
        self.owner.damaged(false, at.uid, at.name.clone(), heard)?;
        if self.done.damaged_count > NAMED_MAX {
            return Ok(());
        }
        let message = proto::scrub_reply::What::Damaged((&damaged).into());
        self.send(message)
    }

    /// Reports bytes read to the owner thread, now and then.
    fn count(&mut self) {
        for (device, read_bytes) in self.uncounted.drain() {
            let moved = MovedBeside {
                read_bytes,
                written_bytes: 0,
            };
            self.owner.moved_beside(device, moved);
        }
    }

    fn report_progress(&mut self) -> Result<(), ScrubEnd> {
        self.count();
        self.reported_at = Instant::now();
        self.done.bytes_per_s = self.place.bytes_per_s(self.wish.bytes_per_s);
        self.send(proto::scrub_reply::What::Progress(self.done.clone()))
    }

    /// Sends a message; waits a limited time for a caller that does not read.
    fn send(&self, what: proto::scrub_reply::What) -> Result<(), ScrubEnd> {
        let mut reply = Ok(proto::ScrubReply { what: Some(what) });
        let limit = Instant::now() + READ_WAIT;
        loop {
            match self.answers.try_send(reply) {
                Ok(()) => return Ok(()),
                Err(TrySendError::Full(unsent)) if Instant::now() < limit => reply = unsent,
                Err(_) => return Err(ScrubEnd::Disconnected),
            }
            std::thread::sleep(READ_POLL);
        }
    }
}

/// Waits for the owner thread's answer to a question.
fn answered<R>(asked: Result<oneshot::Receiver<R>, Fault>) -> Result<R, ScrubEnd> {
    asked?.blocking_recv().map_err(|_| {
        let what = "offloadd stopped before the scrub ended";
        ScrubEnd::Failed(Fault::new(FaultKind::Stopping, what))
    })
}

/// Sleeps until `due` and returns true, or returns false when `is_connected` turns false.
fn pause_until(due: Instant, is_connected: impl Fn() -> bool) -> bool {
    loop {
        let left = due.saturating_duration_since(Instant::now());
        if left.is_zero() || !is_connected() {
            return left.is_zero();
        }
        std::thread::sleep(left.min(SLEEP_MAX));
    }
}

/// Whether no copy of the superblock matches `ours`. A copy that cannot be read counts as matching: the checksums of tiles decide.
fn is_another(device: &Device, ours: &Superblock) -> bool {
    let mut blocks = DeviceBlocks(std::slice::from_ref(device));
    SUPERBLOCK_OFFSETS.into_iter().all(|offset| {
        match sealed::read(&mut blocks, 0, offset, BLOCK, superblock::MAGIC) {
            Err(Unreadable::Device(_)) => false,
            Err(_) => true,
            Ok(block) => Superblock::decode(&block).map_or(true, |found| {
                (found.store, found.number, found.id) != (ours.store, ours.number, ours.id)
            }),
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_user_has_one_scrub_and_users_share_the_limit() {
        let scrubs = Scrubs::new(100 << 20);
        let user = |uid| scrubs.register(Viewer::Uid(uid), uid);
        let root = scrubs.register(Viewer::All, 0).unwrap();
        let first = user(1000).unwrap();
        assert_eq!(first.bytes_per_s(1 << 40), 100 << 20);
        let second = user(1001).unwrap();
        // Half each; a user who asks for less gets that, and an administrator is not limited.
        assert_eq!(first.bytes_per_s(1 << 40), 50 << 20);
        assert_eq!(second.bytes_per_s(7), 7);
        assert_eq!(root.bytes_per_s(1 << 40), 1 << 40);
        let fault = user(1000).unwrap_err();
        assert_eq!(fault.kind, FaultKind::TooMany);
        assert!(fault.message.contains("a scrub of uid 1000"), "{fault}");
        assert!(scrubs.register(Viewer::All, 0).is_err());
        drop(first);
        assert_eq!(second.bytes_per_s(1 << 40), 100 << 20);
        let places: Vec<_> = (2000..).map_while(|uid| user(uid).ok()).collect();
        assert_eq!(places.len() + 1, SCRUBS_MAX);
        // An administrator does not count.
        assert!(scrubs.register(Viewer::All, 7).is_ok());
    }
    #[test]
    fn a_pause_ends_soon_after_nobody_listens() {
        let due = Instant::now() + Duration::from_secs(24 * 3600);
        let asked = std::cell::Cell::new(0);
        let heard = pause_until(due, || {
            asked.set(asked.get() + 1);
            asked.get() < 3
        });
        assert_eq!((heard, asked.get()), (false, 3));
        assert!(pause_until(Instant::now(), || false));
    }
}
