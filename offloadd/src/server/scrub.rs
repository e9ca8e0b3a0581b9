//! Reads what is committed while the daemon serves, slowly, and names what is damaged.
//!
//! ```text
//!   owner thread ──"these tiles lie there now"──▶ scrub thread ──read, compare──▶ the caller's stream
//!        ▲────────"is it still so?"────────────────┘ before anything is called damaged
//! ```
//!
//! The owner thread is asked for some tiles at a time and never waits. Tiles are read beside the queues, by a file of our own,
//! at a bounded rate, and a device that cannot be opened for that says nothing about what lies on it. A tile that was written,
//! moved or dropped meanwhile reads as something else: only what does not fit while the owner thread says that it must is
//! damaged.

use std::collections::{BTreeSet, HashMap};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use offload_api::checksum::checksum;
use offload_api::fault::{Fault, FaultKind};
use offload_api::ids::DeviceIndex;
use offload_api::proto;
use tokio::sync::mpsc;
use tokio::sync::mpsc::error::TrySendError;
use tonic::Status;

use crate::core::{At, CommittedTile, Core, Damage, Viewer};
use crate::device::{Device, DeviceBlocks};
use crate::driver::DriverHandle;
use crate::io::AlignedBytes;
use crate::metrics::MovedBeside;
use crate::store::content::JobContent;
use crate::store::sealed::{self, Unreadable};
use crate::store::superblock::{self, Superblock};
use crate::store::verify::{Damage as Wrong, DamagedTile};
use crate::store::{BLOCK, SUPERBLOCK_OFFSETS};

/// Least rate: below it a scrub would not end.
pub(super) const RATE_MIN: u64 = 1 << 20;

/// Read at a time, so that others' reads come between.
const PIECE_BYTES: usize = 1 << 20;

/// Between two words to the caller.
const TOLD_EVERY: Duration = Duration::from_millis(500);

/// A caller who reads nothing for so long is not waiting for it.
const HEARD_WITHIN: Duration = Duration::from_secs(30);
const HEARD_POLL: Duration = Duration::from_millis(20);

/// Slept at a time: so soon a caller who has gone is noticed, however slowly is read for him.
const SLEEP_MAX: Duration = Duration::from_millis(200);

/// Damaged tiles that are named; all are counted.
const NAMED_MAX: u64 = 10_000;

/// Users' scrubs at a time: each is a thread.
const SCRUBS_MAX: usize = 16;

/// Scrubs of this daemon: one of each user, so that nobody keeps another from looking after his own.
#[derive(Clone, Debug)]
pub(super) struct Scrubs {
    running: Arc<Mutex<BTreeSet<(Class, u32)>>>,
    /// Of all users' together.
    bytes_per_s_max: u64,
}

/// Whose rate has a ceiling.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Class {
    /// Root, and who runs the daemon.
    Administrator,
    User,
}

/// One running scrub; over when dropped.
#[derive(Debug)]
struct Place {
    scrubs: Scrubs,
    who: (Class, u32),
}

impl Drop for Place {
    fn drop(&mut self) {
        self.scrubs.lock().remove(&self.who);
    }
}

impl Place {
    /// What a scrub that wants `wished` may read a second now.
    fn bytes_per_s(&self, wished: u64) -> u64 {
        if self.who.0 == Class::Administrator {
            return wished;
        }
        let running = self.scrubs.lock();
        let users = running.range((Class::User, 0)..).count() as u64;
        wished.min(self.scrubs.bytes_per_s_max / users.max(1))
    }
}

/// What is asked for, checked.
#[derive(Clone, Debug)]
pub(super) struct Wish {
    pub(super) uid: u32,
    pub(super) viewer: Viewer,
    /// One job's name; of all otherwise.
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

    fn lock(&self) -> std::sync::MutexGuard<'_, BTreeSet<(Class, u32)>> {
        self.running.lock().expect("nobody panics while holding it")
    }

    fn place(&self, viewer: Viewer, uid: u32) -> Result<Place, Fault> {
        let class = match viewer {
            Viewer::All => Class::Administrator,
            Viewer::Uid(_) => Class::User,
        };
        let mut running = self.lock();
        let busy = |what: String| Err(Fault::new(FaultKind::TooMany, what));
        if running.contains(&(class, uid)) {
            return busy(format!(
                "a scrub of uid {uid} runs already: one at a time, so that training keeps the drives"
            ));
        }
        // Of administrators there are two, and no user is in their way or they in his.
        let users_count = running.range((Class::User, 0)..).count();
        if class == Class::User && users_count >= SCRUBS_MAX {
            return busy(format!(
                "{SCRUBS_MAX} users' scrubs run, as many as may: try again later"
            ));
        }
        running.insert((class, uid));
        Ok(Place {
            scrubs: self.clone(),
            who: (class, uid),
        })
    }

    /// Starts one; it ends when nobody listens any more.
    pub(super) fn start(&self, owner: DriverHandle, wish: Wish) -> Result<Answers, Fault> {
        let place = self.place(wish.viewer, wish.uid)?;
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
            told_at: Instant::now(),
            done: proto::ScrubProgress::default(),
        };
        std::thread::Builder::new()
            .name("scrub".into())
            .spawn(move || scrub.run())
            .map_err(|error| {
                let what = format!("starting the thread that scrubs: {error}");
                Fault::new(FaultKind::NoMemory, what)
            })?;
        Ok(receiver)
    }
}

struct Scrub {
    owner: DriverHandle,
    wish: Wish,
    place: Place,
    answers: mpsc::Sender<Result<proto::ScrubReply, Status>>,
    /// By index: a path may be another device's by now. `None`: it cannot be opened.
    files: HashMap<DeviceIndex, Option<Device>>,
    /// Bytes that were read and the owner thread does not know of.
    uncounted: HashMap<DeviceIndex, u64>,
    buffer: AlignedBytes,
    pace_from: Instant,
    told_at: Instant,
    done: proto::ScrubProgress,
}

/// Why it ends before its end.
enum Ended {
    /// The caller has gone.
    Unheard,
    Failed(Fault),
}

impl From<Fault> for Ended {
    fn from(fault: Fault) -> Self {
        Self::Failed(fault)
    }
}

impl Scrub {
    fn run(mut self) {
        let ended = self.all();
        self.count();
        match ended {
            Ok(()) | Err(Ended::Unheard) => {}
            Err(Ended::Failed(fault)) => {
                let _ = self.answers.blocking_send(Err(fault.into()));
            }
        }
    }

    fn all(&mut self) -> Result<(), Ended> {
        let viewer = self.wish.viewer;
        let mut jobs = self.ask(move |core| core.contents(viewer))?;
        if let Some(name) = &self.wish.job {
            jobs.retain(|job| job.name.as_str() == name);
            if jobs.is_empty() {
                let what = format!("no job {name} of yours is in the store");
                return Err(Fault::new(FaultKind::NotFound, what).into());
            }
        }
        self.done.job_count = jobs.len() as u64;
        self.done.total_bytes = jobs.iter().map(JobContent::comparable_bytes).sum();
        self.tell()?;
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
            let mut at = At {
                uid: job.uid,
                name: job.name,
                tile: 0,
            };
            loop {
                let asked = at.clone();
                // Dropped since.
                let Some(found) = self.ask(move |core| core.committed_tiles(&asked))? else {
                    break;
                };
                for tile in &found.tiles {
                    let spec = found.definition.tiles()[tile.tile.0 as usize];
                    let wrong = self.compare(&at, tile, spec.tile_bytes)?;
                    if undecided && matches!(wrong, Some(Wrong::Checksum { .. })) {
                        // Written over since, if the record that the device does not give is the newest.
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
        self.tell()
    }

    /// What is wrong with a tile that must be right, if anything is.
    fn compare(
        &mut self,
        at: &At,
        tile: &CommittedTile,
        tile_bytes: u32,
    ) -> Result<Option<Wrong>, Ended> {
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
        let again = At {
            tile: tile.tile.0 as usize,
            ..at.clone()
        };
        let now = self.ask(move |core| core.committed_tiles(&again))?;
        let still = now.is_some_and(|now| {
            let same = |other: &CommittedTile| {
                (other.tile, other.version, other.extent) == (tile.tile, tile.version, tile.extent)
            };
            now.tiles.iter().any(same)
        });
        Ok(still.then_some(wrong))
    }

    /// The file of a device, looked for once.
    fn open(&mut self, tile: &CommittedTile) -> Result<(), Ended> {
        let index = tile.extent.device;
        if self.files.contains_key(&index) {
            return Ok(());
        }
        let ours = self.ask(move |core| core.superblock_of(index))?;
        let looked = match Device::open_readonly(Path::new(&*tile.path)) {
            Ok(device) if is_another(&device, &ours) => Err(format!(
                "device {}: another than the daemon has open lies there",
                tile.path
            )),
            Ok(device) => Ok(device),
            Err(error) => Err(error.to_string()),
        };
        let device = looked.map_err(|why| self.done.unread.push(why)).ok();
        self.files.insert(index, device);
        Ok(())
    }

    /// `None`: nobody could look.
    fn read(
        &mut self,
        tile: &CommittedTile,
        tile_bytes: u32,
    ) -> Result<Option<std::io::Result<()>>, Ended> {
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
            if self.told_at.elapsed() >= TOLD_EVERY {
                self.tell()?;
            }
        }
        Ok(Some(result))
    }

    /// Not faster than was asked for and may be, over the last seconds: what was not used before is not made up for.
    fn keep_pace(&mut self, bytes: usize) -> Result<(), Ended> {
        let rate = self.place.bytes_per_s(self.wish.bytes_per_s);
        let piece = Duration::from_secs_f64(bytes as f64 / rate as f64);
        let now = Instant::now();
        let due = self.pace_from + piece;
        if !pause_until(due, || !self.answers.is_closed()) {
            return Err(Ended::Unheard);
        }
        self.pace_from = due.max(now.checked_sub(Duration::from_secs(1)).unwrap_or(now));
        Ok(())
    }

    fn damaged(
        &mut self,
        at: &At,
        tile: &CommittedTile,
        damaged: DamagedTile,
    ) -> Result<(), Ended> {
        self.done.damaged_count += 1;
        let (expected, found) = match damaged.damage {
            Wrong::Checksum { expected, found } => (expected, found),
            Wrong::Unreadable(_) => (tile.version.checksum, 0),
        };
        let heard = Damage {
            device: tile.extent.device,
            offset: tile.extent.offset,
            tile: tile.tile,
            generation: tile.version.generation,
            expected,
            found,
        };
        self.owner.damaged(at.uid, at.name.clone(), heard)?;
        if self.done.damaged_count > NAMED_MAX {
            return Ok(());
        }
        let message = proto::scrub_reply::What::Damaged((&damaged).into());
        self.send(message)
    }

    /// Now and then, not for each of small tiles.
    fn count(&mut self) {
        for (device, read_bytes) in self.uncounted.drain() {
            let moved = MovedBeside {
                read_bytes,
                written_bytes: 0,
            };
            self.owner.moved_beside(device, moved);
        }
    }

    fn tell(&mut self) -> Result<(), Ended> {
        self.count();
        self.told_at = Instant::now();
        self.done.bytes_per_s = self.place.bytes_per_s(self.wish.bytes_per_s);
        self.send(proto::scrub_reply::What::Progress(self.done.clone()))
    }

    /// Waits for a caller who does not read, the daemon not for us; not for ever, as others want to scrub too.
    fn send(&self, what: proto::scrub_reply::What) -> Result<(), Ended> {
        let mut reply = Ok(proto::ScrubReply { what: Some(what) });
        let limit = Instant::now() + HEARD_WITHIN;
        loop {
            match self.answers.try_send(reply) {
                Ok(()) => return Ok(()),
                Err(TrySendError::Full(unsent)) if Instant::now() < limit => reply = unsent,
                Err(_) => return Err(Ended::Unheard),
            }
            std::thread::sleep(HEARD_POLL);
        }
    }

    fn ask<R: Send + 'static>(
        &self,
        question: impl FnOnce(&Core) -> R + Send + 'static,
    ) -> Result<R, Ended> {
        let answer = self.owner.ask(question)?;
        answer.blocking_recv().map_err(|_| {
            let what = "offloadd stopped before the scrub ended";
            Ended::Failed(Fault::new(FaultKind::Stopping, what))
        })
    }
}

/// Sleeps until `due`, or as long as somebody listens: whether that is so.
fn pause_until(due: Instant, listens: impl Fn() -> bool) -> bool {
    loop {
        let left = due.saturating_duration_since(Instant::now());
        if left.is_zero() || !listens() {
            return left.is_zero();
        }
        std::thread::sleep(left.min(SLEEP_MAX));
    }
}

/// Whether no copy of the superblock is that of `ours`. One that the device withholds may be: its tiles tell.
pub(super) fn is_another(device: &Device, ours: &Superblock) -> bool {
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
    fn each_user_has_one_and_users_share_their_ceiling() {
        let scrubs = Scrubs::new(100 << 20);
        let user = |uid| scrubs.place(Viewer::Uid(uid), uid);
        let root = scrubs.place(Viewer::All, 0).unwrap();
        let first = user(1000).unwrap();
        assert_eq!(first.bytes_per_s(1 << 40), 100 << 20);
        let second = user(1001).unwrap();
        // Half each; who wants less has what he wants, and an administrator what he asks for.
        assert_eq!(first.bytes_per_s(1 << 40), 50 << 20);
        assert_eq!(second.bytes_per_s(7), 7);
        assert_eq!(root.bytes_per_s(1 << 40), 1 << 40);
        let fault = user(1000).unwrap_err();
        assert_eq!(fault.kind, FaultKind::TooMany);
        assert!(fault.message.contains("a scrub of uid 1000"), "{fault}");
        assert!(scrubs.place(Viewer::All, 0).is_err());
        drop(first);
        assert_eq!(second.bytes_per_s(1 << 40), 100 << 20);
        let places: Vec<_> = (2000..).map_while(|uid| user(uid).ok()).collect();
        assert_eq!(places.len() + 1, SCRUBS_MAX);
        // An administrator is not in their number.
        assert!(scrubs.place(Viewer::All, 7).is_ok());
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
