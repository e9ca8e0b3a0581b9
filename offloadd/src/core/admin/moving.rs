//! Plans which tiles move: all tiles of a drained device, and to an added device its share.
//!
//! There is a plan for each job, carried out in batches of tiles; the driver sends an event for each batch. Plans are not
//! stored: after a restart or a change, they are made again from the current extents. A job in session first gets its next
//! extents on the new device, so that written tiles move without a copy. Tiles that are not written within two generations are
//! copied, and so are all tiles if the move is forced, and the tiles of jobs without a session.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet, VecDeque};

use offload_api::fault::{Fault, FaultKind};
use offload_api::ids::{DeviceIndex, Generation};
use offload_support::units::ApproxBytes;

use super::Admin;
use super::batch::{Batch, CopyIo, TileMove};
use super::catalog_change::{DeviceChange, QueuedChange};
use super::device_table::DeviceTable;
use crate::core::JobKey;
use crate::core::data::{Data, Holds, JobTable, Layout, Movable};
use crate::core::operations::Operations;
use crate::io::IoId;
use crate::store::catalog::Phase;
use crate::store::tile_table::Extent;

/// Bytes copied in one batch: large beside the definition that is written after it, and small enough that a job which ends or
/// is deleted does not wait long.
const BATCH_BYTES: u64 = 64 << 20;

/// A batch has at least this many times the bytes of the job's definition, which is written after each batch.
const DEFINITION_TIMES: u64 = 16;

/// Tiles that move.
#[derive(Debug, Default)]
pub(in crate::core) struct Mover {
    /// Plans of the jobs; empty when all tiles that can move have moved, `None` before planning.
    plan: Option<VecDeque<JobPlan>>,
    plans_made: u64,
    pub(super) batch: Option<Batch>,
    /// Pieces of tiles being copied.
    pub(super) inflight: HashMap<IoId, CopyIo>,
    /// Extents that tiles have left, and that reads in flight may still use.
    pub(super) left: Vec<(Extent, u32)>,
    pub(super) stuck: StuckExtents,
    /// Reason why no tile moves until an administrator asks again.
    stopped: Option<String>,
    /// Bytes moved in this incarnation, with or without a copy.
    moved_bytes: u64,
    /// Bytes of `moved_bytes` that were copied.
    copied_bytes: u64,
    /// Limit of bytes copied per second, from the settings; the driver keeps to it.
    settings_bytes_per_s_max: Option<u64>,
    /// Limit that replaces it until all tiles have moved.
    bytes_per_s_max: Option<u64>,
}

/// Outcome of starting the next batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum NextBatch {
    Started,
    /// No tile can move now.
    Waits,
    /// All tiles that can move have moved.
    AllMoved,
}

/// Extents that cannot be moved in this incarnation.
#[derive(Debug, Default)]
pub(super) struct StuckExtents {
    /// Job id, tile, and which of its extents.
    extents: BTreeSet<(u64, u32, u8)>,
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

impl StuckExtents {
    pub(super) fn add(&mut self, job_id: u64, tile: u32, which: u8, fault: Fault) {
        self.extents.insert((job_id, tile, which));
        self.first.get_or_insert(fault.message);
    }
}

impl Mover {
    pub(super) fn new(bytes_per_s_max: Option<u64>) -> Self {
        Self {
            settings_bytes_per_s_max: bytes_per_s_max,
            ..Self::default()
        }
    }

    /// Plans everything again, including extents that could not be moved.
    pub(in crate::core) fn retry(&mut self) {
        self.plan = None;
        self.stopped = None;
        self.stuck = StuckExtents::default();
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
        let count = self.stuck.extents.len();
        let lost = (self.stuck.first.as_ref()).map(|first| {
            format!("{count} extents cannot be moved and stay until they are written again or their job is deleted; the first: {first}")
        });
        self.stopped.clone().or(lost)
    }

    /// Whether tiles of this job are moving.
    pub(super) fn is_at(&self, key: &JobKey) -> bool {
        self.batch.as_ref().is_some_and(|batch| batch.key == *key)
    }

    /// Whether no tile moves.
    pub(super) fn is_idle(&self) -> bool {
        self.batch.is_none()
    }

    /// Operations of copies in flight.
    pub(in crate::core) fn inflight_count(&self) -> usize {
        self.inflight.len()
    }

    /// Number of times that all tiles were examined to plan moves.
    pub(in crate::core) fn plans_made(&self) -> u64 {
        self.plans_made
    }

    /// Bytes moved since the daemon started, with or without a copy.
    pub(in crate::core) fn moved_bytes(&self) -> u64 {
        self.moved_bytes
    }

    /// Bytes that the daemon copied, to which the rate limit applies.
    pub(in crate::core) fn copied_bytes(&self) -> u64 {
        self.copied_bytes
    }

    /// Sets the limit of the settings.
    pub(in crate::core) fn set_bytes_per_s_max(&mut self, bytes_per_s_max: Option<u64>) {
        self.settings_bytes_per_s_max = bytes_per_s_max;
    }

    /// Limit of these moves, or else the one of the settings.
    fn rate_limit(&self) -> Option<u64> {
        (self.bytes_per_s_max).or(self.settings_bytes_per_s_max)
    }

    /// Bytes of planned extents that still have to move to `device`.
    fn left_bytes(&self, device: DeviceIndex) -> u64 {
        let plan = self.plan.iter().flatten();
        let left = plan.filter_map(|job| job.left_bytes.get(&device));
        left.sum()
    }

    /// Starts the next batch of tiles.
    fn start_next(
        &mut self,
        force: bool,
        devices: &mut DeviceTable,
        data: &mut Data,
        ops: &mut Operations,
    ) -> NextBatch {
        let mut plan = match self.plan.take() {
            Some(plan) => plan,
            None => {
                self.plans_made += 1;
                plan_moves(devices, &data.jobs)
            }
        };
        // Each job once: jobs that wait for their next commit get another turn later.
        for _ in 0..plan.len() {
            let mut job = plan.pop_front().expect("counted");
            let moves = self.next_moves(&mut job, force, devices, &data.jobs);
            let (key, job_id) = (job.key.clone(), job.job_id);
            if !job.tiles.is_empty() {
                plan.push_back(job);
            }
            if !moves.is_empty() {
                self.plan = Some(plan);
                for tile in &moves {
                    let bytes = u64::from(tile.bytes);
                    self.moved_bytes += bytes;
                    self.copied_bytes += if tile.copy.is_some() { bytes } else { 0 };
                }
                self.start_batch(key, job_id, moves, devices, data, ops);
                return NextBatch::Started;
            }
        }
        // An empty plan is kept: a session's own tiles may occupy a device for long, and planning again would find nothing.
        let ended = plan.is_empty();
        self.plan = Some(plan);
        match ended && self.stopped.is_none() {
            true => NextBatch::AllMoved,
            false => NextBatch::Waits,
        }
    }

    /// Returns the next extents of a job to move, and reserves the target of each. Removes tiles that have moved from the plan.
    fn next_moves(
        &mut self,
        plan: &mut JobPlan,
        force: bool,
        devices: &mut DeviceTable,
        jobs: &JobTable,
    ) -> Vec<TileMove> {
        let job = match jobs.movable(&plan.key, plan.job_id) {
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
                    (self.stuck).add(plan.job_id, tile, 0, fault.clone());
                }
                return Vec::new();
            }
        };
        let layout = job.layout;
        let job_id = plan.job_id;
        let definition_bytes = layout.entry.area.definition_bytes;
        // With a rate limit, one second's worth: other operations on the drives wait for at most one batch.
        let batch_bytes = BATCH_BYTES.min(self.rate_limit().unwrap_or(u64::MAX));
        let bytes_max = batch_bytes.max(DEFINITION_TIMES * definition_bytes);
        let may_copy = match (job.in_session, plan.spared) {
            (None, _) => true,
            (Some(working), Some(spared)) if working.0 >= spared.0 + 2 => true,
            _ => force,
        };
        let mut spare = Vec::new();
        let mut copied = Vec::new();
        let mut copied_bytes = 0;
        let stuck = &self.stuck.extents;
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
                let takes = devices.get(target).phase == Some(Phase::Filling);
                if !takes && !devices.space.is_closed(from.device) {
                    continue;
                }
                stays = true;
                *plan.left_bytes.entry(target).or_default() += bytes;
                let wanted = (tile, which, from, target, bytes);
                match job.holds(tile, which) {
                    Holds::Moving => {}
                    Holds::Nothing => spare.push((wanted, None)),
                    Holds::Bytes(checksum) if may_copy && copied_bytes < bytes_max => {
                        copied_bytes += bytes;
                        copied.push((wanted, Some(checksum)));
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
        let wanted = spare.into_iter().chain(copied).collect();
        self.reserve_targets(plan, wanted, devices, jobs)
    }

    fn reserve_targets(
        &mut self,
        plan: &mut JobPlan,
        wanted: Vec<WantedMove>,
        devices: &mut DeviceTable,
        jobs: &JobTable,
    ) -> Vec<TileMove> {
        let mut moves = Vec::new();
        let mut no_room = HashSet::new();
        for ((tile, which, from, target, bytes), content) in wanted {
            let leaves = devices.space.is_closed(from.device);
            match devices.space.take_on(target, bytes, leaves) {
                Some(to) => {
                    let extents = [from, to];
                    moves.push(TileMove::new(tile, which, extents, bytes as u32, content));
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
                    self.stop(&Fault::new(FaultKind::NoSpace, what));
                    break;
                }
            }
        }
        if !no_room.is_empty() {
            plan.tiles.retain(|(tile, _)| !no_room.contains(tile));
            let layout = jobs.layout(&plan.key, plan.job_id);
            plan.left_bytes = layout.map_or_else(BTreeMap::new, |l| left_bytes(&l, &plan.tiles));
        }
        moves
    }
}

impl Admin {
    /// Returns the state of the moves.
    pub(in crate::core) fn moves(&self, data: &Data) -> Moves {
        let only_metadata_left = self.devices.only_metadata_left(&data.jobs);
        let some = self
            .devices
            .iter()
            .any(|(index, device)| match device.phase {
                Some(Phase::Draining) => {
                    !(only_metadata_left && index == self.devices.metadata_device())
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

    /// Limit of bytes copied per second; `None` if there is no limit or no tile moves.
    pub(in crate::core) fn rebalance_bytes_per_s_max(&self, data: &Data) -> Option<u64> {
        (self.mover.rate_limit()).filter(|_| self.moves(data) != Moves::None)
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
        let bytes = self.devices.bytes_on(device);
        match self.devices.get(device).phase {
            None | Some(Phase::Settled) => 0,
            Some(Phase::Draining) if device == self.devices.metadata_device() => {
                bytes.saturating_sub(data.jobs.area_bytes())
            }
            Some(Phase::Draining) => bytes,
            Some(Phase::Filling) => self.mover.left_bytes(device),
        }
    }

    /// Starts the next batch of tiles that move.
    pub(in crate::core) fn move_next(
        &mut self,
        force: bool,
        data: &mut Data,
        ops: &mut Operations,
    ) {
        if self.moves(data) != Moves::Waiting {
            return;
        }
        match (self.mover).start_next(force, &mut self.devices, data, ops) {
            NextBatch::Started => self.next_change(data, ops),
            NextBatch::Waits => {}
            NextBatch::AllMoved => self.finish_moves(data, ops),
        }
    }

    /// Ends the moves: added devices become settled, and empty drained devices are removed.
    fn finish_moves(&mut self, data: &mut Data, ops: &mut Operations) {
        let filling = self.devices.in_phase(Phase::Filling);
        let mut draining = self.devices.in_phase(Phase::Draining);
        let metadata_device = self.devices.metadata_device();
        // The metadata device is removed at a start.
        draining.retain(|device| *device != metadata_device);
        let empty: Vec<_> = (draining.iter().copied())
            .filter(|device| self.is_empty(*device, data, ops))
            .collect();
        let stays = self.devices.get(metadata_device).phase == Some(Phase::Draining)
            && !self.devices.only_metadata_left(&data.jobs);
        if self.mover.stuck.first.is_some() && (empty.len() < draining.len() || stays) {
            // Reported until an administrator asks again.
            self.mover.stopped = self.mover.stuck();
        }
        for device in &empty {
            data.jobs.leave_device(*device);
        }
        let settle = filling
            .into_iter()
            .map(|device| DeviceChange::Settle { device });
        let remove = empty
            .into_iter()
            .map(|device| DeviceChange::Remove { device });
        for change in settle.chain(remove).collect::<Vec<_>>() {
            // Refused if too many changes wait, which the next tick retries, or if the catalog is broken, which was reported.
            let _ = self.change_catalog(QueuedChange::Device(change), data, ops);
        }
    }

    /// Whether `device` holds no tile of a job or session, and no tile moves there.
    fn is_empty(&self, device: DeviceIndex, data: &Data, ops: &Operations) -> bool {
        let read = data.extents_in_use().any(|extent| extent.device == device);
        let busy = read || ops.uses(device) || self.mover.inflight_count() > 0;
        !busy && self.devices.bytes_on(device) == 0
    }
}

fn plan_moves(devices: &DeviceTable, jobs: &JobTable) -> VecDeque<JobPlan> {
    let filling = devices.in_phase(Phase::Filling);
    let plans = jobs.layouts().filter_map(|layout| {
        let tiles = plan_job(&layout, devices, &filling);
        (!tiles.is_empty()).then(|| JobPlan {
            key: layout.key.clone(),
            job_id: layout.entry.job_id,
            left_bytes: left_bytes(&layout, &tiles),
            tiles,
            spared: None,
        })
    });
    plans.collect()
}

fn plan_job(
    layout: &Layout<'_>,
    devices: &DeviceTable,
    filling: &[DeviceIndex],
) -> VecDeque<(u32, DeviceIndex)> {
    let specs = layout.table.definition.tiles().iter();
    let definition = &layout.table.definition;
    let tiles: Vec<(u64, [DeviceIndex; 2])> = (specs.zip(&layout.table.extents))
        .map(|(spec, extents)| {
            let on = extents.map(|extent| extent.device);
            (definition.reserved_bytes(spec), on)
        })
        .collect();
    let targets = devices.space.targets(&tiles, filling);
    targets.into()
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
type WantedMove = ((u32, u8, Extent, DeviceIndex, u64), Option<Option<u32>>);
