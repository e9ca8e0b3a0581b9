//! Which tiles are to move, and when that is done: all from a device that is drained, and to one that came its share.
//!
//! A plan is made for each job, and worked off some tiles at a time; whoever drives says when. It is not stored: after a
//! restart, or when something changed, it is made again from where the tiles lie then. Jobs in session first get their next
//! extents on the new device, so that what they write moves by itself; what they have not written when two generations
//! are over, or when there is a hurry, is copied, and so is everything of jobs that nobody runs.

use std::collections::{BTreeMap, BTreeSet, HashSet, VecDeque};

use offload_api::fault::{Fault, FaultKind};
use offload_api::ids::{DeviceIndex, Generation};

use super::Admin;
use super::catalog_queue::Work;
use super::copying::{Batch, Place};
use super::devices::DeviceChange;
use crate::core::JobKey;
use crate::core::data::{Data, Holds, Layout, Movable};
use crate::core::operations::Operations;
use crate::store::catalog::Phase;
use crate::store::metadata_device::place_areas;
use crate::store::placement::Space;
use crate::store::tile_table::Extent;

/// Copied together: large enough that writing the definition is little beside it, small enough that a job which ends or is
/// dropped does not wait long.
const BATCH_BYTES: u64 = 64 << 20;

/// The definition is written anew for each batch: of a large one a batch has so many times the bytes.
const DEFINITION_TIMES: u64 = 16;

/// Everything about tiles that move.
#[derive(Debug, Default)]
pub(super) struct Mover {
    /// Empty: all that could move has.
    plan: Option<VecDeque<JobPlan>>,
    plans_made: u64,
    pub(super) batch: Option<Batch>,
    /// Extents that tiles have left and that may still be read.
    pub(super) left: Vec<(Extent, u32)>,
    pub(super) stuck: Stuck,
    /// Why nothing moves until somebody asks again.
    stopped: Option<String>,
    /// Moved in this life, with a copy or without.
    moved_bytes: u64,
    /// Those with a copy.
    copied_bytes: u64,
    /// What may be copied a second in place of what the settings say; whoever drives keeps to it.
    bytes_per_s_max: Option<u64>,
}

/// Extents that cannot be moved in this life.
#[derive(Debug, Default)]
pub(super) struct Stuck {
    /// By job id, tile and which.
    places: BTreeSet<(u64, u32, u8)>,
    first: Option<String>,
}

#[derive(Debug)]
struct JobPlan {
    key: JobKey,
    /// Of the job it was made for: another may come to have its name.
    job_id: u64,
    tiles: VecDeque<(u32, DeviceIndex)>,
    /// Still to come to each target, as it was when the tiles were last gone through: people ask often.
    left_bytes: BTreeMap<DeviceIndex, u64>,
    /// The working generation when its free extents were exchanged last.
    spared: Option<Generation>,
}

/// What a driver needs to know.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Moves {
    /// No tile is to move.
    None,
    /// Some are: [`RebalanceTick`](crate::core::Event::RebalanceTick) begins with the next ones.
    Waiting,
    /// Some do.
    Moving,
    /// None does, because of a failure that people are told; asking again tries again.
    Stopped,
}

impl Stuck {
    pub(super) fn add(&mut self, job_id: u64, tile: u32, which: u8, fault: Fault) {
        self.places.insert((job_id, tile, which));
        self.first.get_or_insert(fault.message);
    }
}

impl Mover {
    /// What was given up is tried again, and everything is planned anew.
    pub(super) fn retry(&mut self) {
        self.plan = None;
        self.stopped = None;
        self.stuck = Stuck::default();
    }

    pub(super) fn stop(&mut self, fault: &Fault) {
        self.stopped = Some(fault.message.clone());
    }

    /// Whether all that could move has, and nothing has come since that is to be planned.
    pub(super) fn is_done(&self) -> bool {
        self.plan.as_ref().is_some_and(VecDeque::is_empty)
    }

    /// Why tiles do not move.
    pub(super) fn stuck(&self) -> Option<String> {
        let places = self.stuck.places.len();
        let lost = (self.stuck.first.as_ref()).map(|first| {
            format!("{places} extents cannot be moved and stay until they are written again or their job is dropped; the first: {first}")
        });
        self.stopped.clone().or(lost)
    }

    /// Whether tiles of this job move now.
    pub(super) fn is_at(&self, key: &JobKey) -> bool {
        self.batch.as_ref().is_some_and(|batch| batch.key == *key)
    }
}

impl Admin {
    /// Whether tiles are to move.
    pub(in crate::core) fn moves(&self, data: &Data) -> Moves {
        let home_waits = self.home_waits(data);
        let some = (self.devices.iter().enumerate()).any(|(index, device)| match device.phase {
            Some(Phase::Draining) => !(home_waits && index == self.home.0 as usize),
            Some(Phase::Filling) => true,
            Some(Phase::Settled) | None => false,
        });
        match (&self.mover.batch, &self.mover.stopped) {
            (Some(_), _) => Moves::Moving,
            (None, _) if !some || self.read_only.is_some() => Moves::None,
            (None, Some(_)) => Moves::Stopped,
            (None, None) => Moves::Waiting,
        }
    }

    /// Tiles that could not be moved are tried again.
    pub(in crate::core) fn retry_moves(&mut self) {
        self.mover.retry();
    }

    /// How often all tiles were gone through for those that are to move.
    pub(in crate::core) fn plans_made(&self) -> u64 {
        self.mover.plans_made
    }

    /// Moved since the daemon started, with a copy or without.
    pub(in crate::core) fn moved_bytes(&self) -> u64 {
        self.mover.moved_bytes
    }

    /// Of those, what was copied by the daemon: what counts for a ceiling.
    pub(in crate::core) fn copied_bytes(&self) -> u64 {
        self.mover.copied_bytes
    }

    /// What may be copied a second while tiles move; `None`: as much as goes, or none move.
    pub(in crate::core) fn rebalance_bytes_per_s_max(&self, data: &Data) -> Option<u64> {
        (self.rate_limiter()).filter(|_| self.moves(data) != Moves::None)
    }

    /// For these moves, or for all.
    fn rate_limiter(&self) -> Option<u64> {
        (self.mover.bytes_per_s_max).or(self.rebalance_bytes_per_s_max)
    }

    pub(in crate::core) fn limit_moves(
        &mut self,
        bytes_per_s_max: u64,
        data: &Data,
    ) -> Result<(), Fault> {
        if self.moves(data) == Moves::None {
            let what = "no tiles are to move: a ceiling is given with the device that comes or is drained, and goes with its last tile";
            return Err(Fault::new(FaultKind::Invalid, what));
        }
        self.mover.bytes_per_s_max = Some(bytes_per_s_max);
        Ok(())
    }

    /// What a device brings that comes or is drained. Of moves that have ended nothing is left, and what the
    /// settings say holds; those under way keep theirs where nobody says otherwise.
    pub(super) fn limit_next_moves(&mut self, bytes_per_s_max: Option<u64>, data: &Data) {
        if bytes_per_s_max.is_some() || self.moves(data) == Moves::None {
            self.mover.bytes_per_s_max = bytes_per_s_max;
        }
    }

    /// Of extents that are still to come to `device`, or to leave it.
    pub(super) fn left_bytes(&self, device: DeviceIndex, data: &Data) -> u64 {
        match self.devices[device.0 as usize].phase {
            None | Some(Phase::Settled) => 0,
            Some(Phase::Draining) if device == self.home => {
                self.bytes_on(device).saturating_sub(area_bytes(data))
            }
            Some(Phase::Draining) => self.bytes_on(device),
            Some(Phase::Filling) => {
                let plan = self.mover.plan.iter().flatten();
                let left = plan.filter_map(|job| job.left_bytes.get(&device));
                left.sum()
            }
        }
    }

    fn filling(&self) -> Vec<DeviceIndex> {
        self.in_phase(Phase::Filling)
    }

    fn in_phase(&self, phase: Phase) -> Vec<DeviceIndex> {
        let devices = self.devices.iter().enumerate();
        devices
            .filter(|(_, device)| device.phase == Some(phase))
            .map(|(index, _)| DeviceIndex(index as u32))
            .collect()
    }

    pub(in crate::core) fn move_on(&mut self, force: bool, data: &mut Data, ops: &mut Operations) {
        if self.moves(data) != Moves::Waiting {
            return;
        }
        let filling = self.filling();
        let mut plan = match self.mover.plan.take() {
            Some(plan) => plan,
            None => {
                self.mover.plans_made += 1;
                self.plan_moves(&filling, data)
            }
        };
        // Each job once: those that wait for their next commit are asked again later.
        for _ in 0..plan.len() {
            let mut job = plan.pop_front().expect("counted");
            let places = self.next_places(&mut job, force, data);
            let (key, job_id) = (job.key.clone(), job.job_id);
            if !job.tiles.is_empty() {
                plan.push_back(job);
            }
            if !places.is_empty() {
                self.mover.plan = Some(plan);
                for place in &places {
                    let bytes = u64::from(place.bytes);
                    self.mover.moved_bytes += bytes;
                    self.mover.copied_bytes += if place.copy.is_some() { bytes } else { 0 };
                }
                return self.start_batch(key, job_id, places, data, ops);
            }
        }
        // Kept when it is empty too: what a session keeps for itself may hold a device for long, and nothing is to be
        // looked for meanwhile.
        let ended = plan.is_empty();
        self.mover.plan = Some(plan);
        if ended && self.mover.stopped.is_none() {
            self.finish_moves(data, ops);
        }
    }

    fn plan_moves(&self, filling: &[DeviceIndex], data: &Data) -> VecDeque<JobPlan> {
        let jobs = data.layouts().filter_map(|layout| {
            let tiles = self.plan_job(&layout, filling);
            (!tiles.is_empty()).then(|| JobPlan {
                key: layout.key.clone(),
                job_id: layout.entry.job_id,
                left_bytes: left_bytes(&layout, &tiles),
                tiles,
                spared: None,
            })
        });
        jobs.collect()
    }

    fn plan_job(
        &self,
        layout: &Layout<'_>,
        filling: &[DeviceIndex],
    ) -> VecDeque<(u32, DeviceIndex)> {
        let specs = layout.table.definition.tiles().iter();
        let definition = &layout.table.definition;
        let tiles: Vec<(u64, [DeviceIndex; 2])> = (specs.zip(&layout.table.extents))
            .map(|(spec, extents)| {
                let devices = extents.map(|extent| extent.device);
                (definition.reserved_bytes(spec), devices)
            })
            .collect();
        let targets = self.space.targets(&tiles, filling);
        targets.into()
    }

    /// The next extents of a job that can move, each with its new place taken. Tiles that have moved leave the plan.
    fn next_places(&mut self, plan: &mut JobPlan, force: bool, data: &Data) -> Vec<Place> {
        let job = match data.movable(&plan.key, plan.job_id) {
            Movable::Now(job) => job,
            Movable::Later => return Vec::new(),
            Movable::Never => {
                plan.tiles.clear();
                return Vec::new();
            }
            Movable::Unreadable(why) => {
                // Nobody knows which extents it names.
                let fault = stays(&plan.key, why);
                for (tile, _) in plan.tiles.drain(..) {
                    (self.mover.stuck).add(plan.job_id, tile, 0, fault.clone());
                }
                return Vec::new();
            }
        };
        let layout = job.layout;
        let job_id = plan.job_id;
        let definition_bytes = layout.entry.area.definition_bytes;
        // Under a ceiling what a second allows: whoever waits for the drives waits for one batch.
        let batch_bytes = BATCH_BYTES.min(self.rate_limiter().unwrap_or(u64::MAX));
        let bytes_max = batch_bytes.max(DEFINITION_TIMES * definition_bytes);
        let may_copy = match (job.in_session, plan.spared) {
            (None, _) => true,
            (Some(working), Some(spared)) if working.0 >= spared.0 + 2 => true,
            _ => force,
        };
        let mut spare = Vec::new();
        let mut copied = Vec::new();
        let mut copied_bytes = 0;
        let stuck = &self.mover.stuck.places;
        plan.left_bytes.clear();
        plan.tiles.retain(|&(tile, target)| {
            let extents = &layout.table.extents[tile as usize];
            let bytes = layout.tile_bytes(tile as usize);
            let mut stays = false;
            for which in 0..layout.copies(tile as usize) as u8 {
                let from = extents[usize::from(which)];
                if from.device == target || stuck.contains(&(job_id, tile, which)) {
                    continue;
                }
                // It left, and found room elsewhere only.
                let takes = self.devices[target.0 as usize].phase == Some(Phase::Filling);
                if !takes && !self.space.is_closed(from.device) {
                    continue;
                }
                stays = true;
                *plan.left_bytes.entry(target).or_default() += bytes;
                let place = (tile, which, from, target, bytes);
                match job.holds(tile, which) {
                    Holds::Moving => {}
                    Holds::Nothing => spare.push((place, None)),
                    Holds::Bytes(checksum) if may_copy && copied_bytes < bytes_max => {
                        copied_bytes += bytes;
                        copied.push((place, Some(checksum)));
                    }
                    Holds::Bytes(_) => {}
                }
            }
            stays
        });
        if let Some(working) = job.in_session {
            plan.spared.get_or_insert(working);
            // What is free is exchanged at once for all tiles, so that the writes of this generation go there.
            if !spare.is_empty() {
                copied.clear();
            }
        }
        self.take_places(plan, spare.into_iter().chain(copied).collect(), data)
    }

    fn take_places(&mut self, plan: &mut JobPlan, wanted: Vec<Wanted>, data: &Data) -> Vec<Place> {
        let mut places = Vec::new();
        let mut no_room = HashSet::new();
        for ((tile, which, from, target, bytes), content) in wanted {
            let leaves = self.space.is_closed(from.device);
            match self.space.take_on(target, bytes, leaves) {
                Some(to) => {
                    places.push(Place::new(tile, which, [from, to], bytes as u32, content));
                }
                // What others took meanwhile is no reason to stop: it has its share, as far as there is room.
                None if !leaves => {
                    no_room.insert(tile);
                }
                None => {
                    let what = format!(
                        "{} bytes of a tile of job {} find no room on the other devices: drop a job or add a device",
                        bytes, plan.key.name
                    );
                    self.mover.stop(&Fault::new(FaultKind::NoSpace, what));
                    break;
                }
            }
        }
        if !no_room.is_empty() {
            plan.tiles.retain(|(tile, _)| !no_room.contains(tile));
            let layout = data.layout(&plan.key, plan.job_id);
            plan.left_bytes = layout.map_or_else(BTreeMap::new, |l| left_bytes(&l, &plan.tiles));
        }
        places
    }

    /// Everything has moved that can: devices that came are as the others, and empty ones go.
    fn finish_moves(&mut self, data: &mut Data, ops: &mut Operations) {
        let filling = self.filling();
        let mut draining = self.in_phase(Phase::Draining);
        // It goes at a start.
        draining.retain(|device| *device != self.home);
        let empty: Vec<_> = (draining.iter().copied())
            .filter(|device| self.is_empty(*device, data, ops))
            .collect();
        let home = &self.devices[self.home.0 as usize];
        let home_stays = home.phase == Some(Phase::Draining) && !self.home_waits(data);
        if self.mover.stuck.first.is_some() && (empty.len() < draining.len() || home_stays) {
            // Told until somebody asks again.
            self.mover.stopped = self.mover.stuck();
        }
        for device in &empty {
            data.leave_device(*device);
        }
        let settle = filling
            .into_iter()
            .map(|device| DeviceChange::Settle { device });
        let remove = empty
            .into_iter()
            .map(|device| DeviceChange::Remove { device });
        for change in settle.chain(remove).collect::<Vec<_>>() {
            // Refused: too many wait, or the catalog is broken. It is asked again at the next turn, or said already.
            let _ = self.change_catalog(Work::Device(change), data, ops);
        }
    }

    /// No tile of a job or session is on `device`, and nothing moves there.
    fn is_empty(&self, device: DeviceIndex, data: &Data, ops: &Operations) -> bool {
        let read = data.extents_in_use().any(|extent| extent.device == device);
        let busy = read || ops.uses(device) || !self.inflight.is_empty();
        !busy && self.bytes_on(device) == 0
    }

    /// Takes room for the areas of all jobs on one device, each in one piece.
    fn take_new_home(&self, trial: &mut Space, data: &Data) -> Result<(), Fault> {
        for (extent, bytes) in self.find_new_home(trial, data)? {
            assert!(trial.take(extent, bytes), "just found free");
        }
        Ok(())
    }

    /// Room for them in `space`, and how many bytes each takes.
    pub(super) fn find_new_home(
        &self,
        space: &Space,
        data: &Data,
    ) -> Result<Vec<(Extent, u64)>, Fault> {
        let sizes = data.layouts().map(|layout| layout.entry.area.bytes());
        let sizes: Vec<u64> = sizes.collect();
        let Some((to, offsets)) = place_areas(space, self.devices.len(), &sizes) else {
            return Err(Fault::new(
                FaultKind::NoSpace,
                format!(
                    "{} holds the store's catalog and {} bytes of its jobs' records, which need space on one other device, those of each job in one piece, and there is none: delete a job (`offloadd job delete`) or add a device first",
                    self.path(self.home),
                    sizes.iter().sum::<u64>()
                ),
            ));
        };
        let extents = (offsets.into_iter()).map(|offset| Extent { device: to, offset });
        Ok(extents.zip(sizes).collect())
    }

    /// Refused with the numbers when the tiles of `device` do not fit on the others.
    pub(super) fn check_room_without(&self, device: DeviceIndex, data: &Data) -> Result<(), Fault> {
        let mut trial = self.space.clone();
        trial.close(device);
        // Drained earlier, it waits for a start.
        if trial.is_closed(self.home) {
            self.take_new_home(&mut trial, data)?;
        }
        let room: Vec<(usize, u64)> = (0..self.devices.len())
            .filter(|&other| self.devices[other].phase.is_some())
            .map(|other| DeviceIndex(other as u32))
            .filter(|other| !trial.is_closed(*other))
            .map(|other| (other.0 as usize, trial.free_bytes(other)))
            .collect();
        let fits = data.layouts().all(|layout| {
            (layout.table.extents.iter().enumerate()).all(|(tile, extents)| {
                let (copies, bytes) = (layout.copies(tile), layout.tile_bytes(tile));
                let leaving = extents[..copies].iter().filter(|e| e.device == device);
                let mut all = leaving.map(|_| trial.take_on(device, bytes, true));
                all.all(|taken| taken.is_some())
            })
        });
        if fits {
            return Ok(());
        }
        let free: Vec<String> = (room.iter())
            .map(|(other, free)| format!("{} has {free}", self.devices[*other].path))
            .collect();
        Err(Fault::new(
            FaultKind::NoSpace,
            format!(
                "{} bytes lie on {}; free: {}; delete a job (`offloadd job delete`) or add a device first",
                self.bytes_on(device),
                self.path(device),
                free.join(", ")
            ),
        ))
    }
}

/// Of the extents of `tiles` that do not lie on their target, by target.
fn left_bytes(
    layout: &Layout<'_>,
    tiles: &VecDeque<(u32, DeviceIndex)>,
) -> BTreeMap<DeviceIndex, u64> {
    let mut left = BTreeMap::new();
    for &(tile, target) in tiles {
        let copies = layout.copies(tile as usize);
        let extents = &layout.table.extents[tile as usize][..copies];
        let away = extents.iter().filter(|extent| extent.device != target);
        *left.entry(target).or_default() += away.count() as u64 * layout.tile_bytes(tile as usize);
    }
    left
}

/// Of a job with a record that the device did not give.
fn stays(key: &JobKey, why: &str) -> Fault {
    let JobKey { uid, name } = key;
    let what = format!(
        "job {name} of uid {uid}: {why}; its tiles stay until the record can be read when offloadd starts, or `offloadd job discard-unreadable {name}` forgets it"
    );
    Fault::new(FaultKind::Damaged, what)
}

/// Tile, which, from, target, bytes; and what it holds.
type Wanted = ((u32, u8, Extent, DeviceIndex, u64), Option<Option<u32>>);

/// Of the jobs' areas, which lie at home.
pub(super) fn area_bytes(data: &Data) -> u64 {
    data.layouts().map(|layout| layout.entry.area.bytes()).sum()
}
