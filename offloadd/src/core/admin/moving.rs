//! Plans which tiles move: all tiles of a drained device, and to an added device its share.
//!
//! There is a plan for each job, carried out in batches of tiles; the driver sends an event for each batch. Plans are not
//! stored: after a restart or a change, they are made again from the current extents. A job in session first gets its next
//! extents on the new device, so that written tiles move without a copy. Tiles that are not written within two generations are
//! copied, and so are all tiles if the move is forced, and the tiles of jobs without a session.

use std::collections::{BTreeMap, BTreeSet, HashSet, VecDeque};

use offload_api::fault::{Fault, FaultKind};
use offload_api::ids::{DeviceIndex, Generation};
use offload_support::units::ApproxBytes;

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

/// Bytes copied in one batch: large beside the definition that is written after it, and small enough that a job which ends or
/// is deleted does not wait long.
const BATCH_BYTES: u64 = 64 << 20;

/// A batch has at least this many times the bytes of the job's definition, which is written after each batch.
const DEFINITION_TIMES: u64 = 16;

/// Tiles that move.
#[derive(Debug, Default)]
pub(super) struct Mover {
    /// Plans of the jobs; empty when all tiles that can move have moved, `None` before planning.
    plan: Option<VecDeque<JobPlan>>,
    plans_made: u64,
    pub(super) batch: Option<Batch>,
    /// Extents that tiles have left, and that reads in flight may still use.
    pub(super) left: Vec<(Extent, u32)>,
    pub(super) stuck: Stuck,
    /// Reason why no tile moves until an administrator asks again.
    stopped: Option<String>,
    /// Bytes moved in this incarnation, with or without a copy.
    moved_bytes: u64,
    /// Bytes of `moved_bytes` that were copied.
    copied_bytes: u64,
    /// Limit of bytes copied per second that replaces the one in the settings; the driver keeps to it.
    bytes_per_s_max: Option<u64>,
}

/// Extents that cannot be moved in this incarnation.
#[derive(Debug, Default)]
pub(super) struct Stuck {
    /// Job id, tile, and which of its extents.
    places: BTreeSet<(u64, u32, u8)>,
    first: Option<String>,
}

#[derive(Debug)]
struct JobPlan {
    key: JobKey,
    /// Id of the planned job: another job may get its name.
    job_id: u64,
    tiles: VecDeque<(u32, DeviceIndex)>,
    /// Bytes still to move to each target, cached when the tiles were last examined, because status calls are frequent.
    left_bytes: BTreeMap<DeviceIndex, u64>,
    /// Working generation at the last exchange of the job's free extents.
    spared: Option<Generation>,
}

/// State of the moves, for the driver.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Moves {
    /// No tile has to move.
    None,
    /// Tiles have to move; [`RebalanceTick`](crate::core::Event::RebalanceTick) starts the next batch.
    Waiting,
    /// Tiles are moving.
    Moving,
    /// No tile moves because of a reported failure; asking again retries.
    Stopped,
}

impl Stuck {
    pub(super) fn add(&mut self, job_id: u64, tile: u32, which: u8, fault: Fault) {
        self.places.insert((job_id, tile, which));
        self.first.get_or_insert(fault.message);
    }
}

impl Mover {
    /// Plans everything again, including extents that could not be moved.
    pub(super) fn retry(&mut self) {
        self.plan = None;
        self.stopped = None;
        self.stuck = Stuck::default();
    }

    pub(super) fn stop(&mut self, fault: &Fault) {
        self.stopped = Some(fault.message.clone());
    }

    /// Whether all tiles that can move have moved, and nothing has changed since.
    pub(super) fn is_done(&self) -> bool {
        self.plan.as_ref().is_some_and(VecDeque::is_empty)
    }

    /// Returns the reason why tiles do not move.
    pub(super) fn stuck(&self) -> Option<String> {
        let places = self.stuck.places.len();
        let lost = (self.stuck.first.as_ref()).map(|first| {
            format!("{places} extents cannot be moved and stay until they are written again or their job is deleted; the first: {first}")
        });
        self.stopped.clone().or(lost)
    }

    /// Whether tiles of this job are moving.
    pub(super) fn is_at(&self, key: &JobKey) -> bool {
        self.batch.as_ref().is_some_and(|batch| batch.key == *key)
    }
}

impl Admin {
    /// Returns the state of the moves.
    pub(in crate::core) fn moves(&self, data: &Data) -> Moves {
        let only_metadata_left = self.only_metadata_left(data);
        let some = (self.devices.iter().enumerate()).any(|(index, device)| match device.phase {
            Some(Phase::Draining) => {
                !(only_metadata_left && index == self.metadata_device.0 as usize)
            }
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

    /// Retries tiles that could not be moved.
    pub(in crate::core) fn retry_moves(&mut self) {
        self.mover.retry();
    }

    /// Number of times that all tiles were examined to plan moves.
    pub(in crate::core) fn plans_made(&self) -> u64 {
        self.mover.plans_made
    }

    /// Bytes moved since the daemon started, with or without a copy.
    pub(in crate::core) fn moved_bytes(&self) -> u64 {
        self.mover.moved_bytes
    }

    /// Bytes that the daemon copied, to which the rate limit applies.
    pub(in crate::core) fn copied_bytes(&self) -> u64 {
        self.mover.copied_bytes
    }

    /// Limit of bytes copied per second; `None` if there is no limit or no tile moves.
    pub(in crate::core) fn rebalance_bytes_per_s_max(&self, data: &Data) -> Option<u64> {
        (self.rate_limiter()).filter(|_| self.moves(data) != Moves::None)
    }

    /// Limit of these moves, or else the one of the settings.
    fn rate_limiter(&self) -> Option<u64> {
        (self.mover.bytes_per_s_max).or(self.rebalance_bytes_per_s_max)
    }

    pub(in crate::core) fn limit_moves(
        &mut self,
        bytes_per_s_max: u64,
        data: &Data,
    ) -> Result<(), Fault> {
        if self.moves(data) == Moves::None {
            let what = "no tiles are moving: set the limit with --rate of `device add` or `device drain`; it ends with the last tile";
            return Err(Fault::new(FaultKind::Invalid, what));
        }
        self.mover.bytes_per_s_max = Some(bytes_per_s_max);
        Ok(())
    }

    /// Sets the limit that comes with an added or drained device. If moves are in progress and no limit is given, theirs stays;
    /// after moves have ended, the limit of the settings applies.
    pub(super) fn limit_next_moves(&mut self, bytes_per_s_max: Option<u64>, data: &Data) {
        if bytes_per_s_max.is_some() || self.moves(data) == Moves::None {
            self.mover.bytes_per_s_max = bytes_per_s_max;
        }
    }

    /// Bytes of extents that still have to move to `device`, or off it.
    pub(super) fn left_bytes(&self, device: DeviceIndex, data: &Data) -> u64 {
        match self.devices[device.0 as usize].phase {
            None | Some(Phase::Settled) => 0,
            Some(Phase::Draining) if device == self.metadata_device => {
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
        // Each job once: jobs that wait for their next commit get another turn later.
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
        // An empty plan is kept: a session's own tiles may occupy a device for long, and planning again would find nothing.
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

    /// Returns the next extents of a job to move, and reserves the target of each. Removes tiles that have moved from the plan.
    fn next_places(&mut self, plan: &mut JobPlan, force: bool, data: &Data) -> Vec<Place> {
        let job = match data.movable(&plan.key, plan.job_id) {
            Movable::Now(job) => job,
            Movable::Later => return Vec::new(),
            Movable::Never => {
                plan.tiles.clear();
                return Vec::new();
            }
            Movable::Unreadable(why) => {
                // The extents that it names are unknown.
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
        // With a rate limit, one second's worth: other operations on the drives wait for at most one batch.
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
                // The tile left the device, and space was found only elsewhere.
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
            // Free extents are exchanged for all tiles at once, so that the writes of this generation go to the new ones.
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
                // Space that others took meanwhile does not stop the moves: the device gets its share as far as there is space.
                None if !leaves => {
                    no_room.insert(tile);
                }
                None => {
                    let what = format!(
                        "the other devices have no space for {} of a tile of job {}: delete a job or add a device",
                        ApproxBytes(bytes),
                        plan.key.name
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

    /// Ends the moves: added devices become settled, and empty drained devices are removed.
    fn finish_moves(&mut self, data: &mut Data, ops: &mut Operations) {
        let filling = self.filling();
        let mut draining = self.in_phase(Phase::Draining);
        // The metadata device is removed at a start.
        draining.retain(|device| *device != self.metadata_device);
        let empty: Vec<_> = (draining.iter().copied())
            .filter(|device| self.is_empty(*device, data, ops))
            .collect();
        let metadata_device = &self.devices[self.metadata_device.0 as usize];
        let stays =
            metadata_device.phase == Some(Phase::Draining) && !self.only_metadata_left(data);
        if self.mover.stuck.first.is_some() && (empty.len() < draining.len() || stays) {
            // Reported until an administrator asks again.
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
            // Refused if too many changes wait, which the next tick retries, or if the catalog is broken, which was reported.
            let _ = self.change_catalog(Work::Device(change), data, ops);
        }
    }

    /// Whether `device` holds no tile of a job or session, and no tile moves there.
    fn is_empty(&self, device: DeviceIndex, data: &Data, ops: &Operations) -> bool {
        let read = data.extents_in_use().any(|extent| extent.device == device);
        let busy = read || ops.uses(device) || !self.inflight.is_empty();
        !busy && self.bytes_on(device) == 0
    }

    /// Reserves space for the areas of all jobs on one device, each contiguous.
    fn take_new_metadata_device(&self, trial: &mut Space, data: &Data) -> Result<(), Fault> {
        for (extent, bytes) in self.find_new_metadata_device(trial, data)? {
            assert!(trial.take(extent, bytes), "just found free");
        }
        Ok(())
    }

    /// Finds one device with space for the areas of all jobs. Returns the extent and the length of each area.
    pub(super) fn find_new_metadata_device(
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
                    "{} holds the store's catalog and {} of its jobs' records. No other device has space for all of them, with the records of each job in one piece: delete a job (`offloadd job delete`) or add a device first",
                    self.path(self.metadata_device),
                    ApproxBytes(sizes.iter().sum::<u64>())
                ),
            ));
        };
        let extents = (offsets.into_iter()).map(|offset| Extent { device: to, offset });
        Ok(extents.zip(sizes).collect())
    }

    /// Checks that the tiles of `device` fit on the other devices. The error has the numbers.
    pub(super) fn check_room_without(&self, device: DeviceIndex, data: &Data) -> Result<(), Fault> {
        let mut trial = self.space.clone();
        trial.close(device);
        // Drained earlier: it waits for a start.
        if trial.is_closed(self.metadata_device) {
            self.take_new_metadata_device(&mut trial, data)?;
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
            .map(|(other, free)| {
                format!("{} has {}", self.devices[*other].path, ApproxBytes(*free))
            })
            .collect();
        Err(Fault::new(
            FaultKind::NoSpace,
            format!(
                "{} lie on {} and do not fit on the other devices (free: {}): delete a job (`offloadd job delete`) or add a device first",
                ApproxBytes(self.bytes_on(device)),
                self.path(device),
                free.join(", ")
            ),
        ))
    }
}

/// Bytes of the extents of `tiles` that are not on their target, by target.
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

/// Fault for a job with an unreadable record.
fn stays(key: &JobKey, why: &str) -> Fault {
    let JobKey { uid, name } = key;
    let what = format!(
        "job {name} of uid {uid}: {why}; its tiles stay until the record can be read when offloadd starts, or `offloadd job discard-unreadable {name}` discards it"
    );
    Fault::new(FaultKind::Damaged, what)
}

/// Tile, which of its extents, current extent, target, bytes; and content.
type Wanted = ((u32, u8, Extent, DeviceIndex, u64), Option<Option<u32>>);

/// Bytes of the jobs' areas on the metadata device.
pub(super) fn area_bytes(data: &Data) -> u64 {
    data.layouts().map(|layout| layout.entry.area.bytes()).sum()
}
