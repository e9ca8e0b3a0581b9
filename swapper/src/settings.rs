//! The settings of a swapper, the memory they need, and what opening returns.

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::PathBuf;

use offload_client::{ArenaMemory, IODEPTH_MAX, IODEPTH_MIN, SlotClass, Verb};

use crate::layout::{ByKind, Kind, Layout, UnitShape, resident};
use crate::nodes::Nodes;
use crate::scratch::ScratchSettings;
use crate::{Schedule, StepBytes, SwapperError};

/// Fewest staging slots of each kind: one tile is in use while the next one moves.
pub const STAGING_MIN: u32 = 2;

/// Everything a swapper needs to know.
#[derive(Clone, Debug)]
pub struct SwapperSettings {
    /// Units of the model, in order.
    pub units: Vec<UnitShape>,
    /// Elements of a tile of the smallest parameters; of larger ones fewer. [`crate::choose_tile_elems`] picks a good value.
    pub tile_elems: u64,
    /// Fraction of the `param` tiles kept in host memory, 0 to 1.
    pub param_fraction: f64,
    /// Fraction of the `state` tiles kept in host memory, 0 to 1.
    pub state_fraction: f64,
    /// Fraction of the gradients kept in host memory between backward and update, 0 to 1.
    pub grad_fraction: f64,
    /// Slots that the other tiles pass through.
    pub staging: Staging,
    /// Tiles of the caller's own beside those of the units: needs a store.
    pub scratch: ScratchSettings,
    /// When updates run.
    pub schedule: Schedule,
    /// Steps between commits; 0 commits only in [`crate::Swapper::drain`].
    pub commit_every: u64,
    /// Operations in flight, half of them in each direction. At least [`IODEPTH_MIN`]. Those of scratch tiles are counted beside them.
    pub iodepth: u32,
    /// Storage of the tiles.
    pub backing: Backing,
    /// Description of the layout, stored with the job. A job with another description is refused.
    pub layout: Vec<u8>,
    /// Index of this process in the job.
    pub rank: u32,
    /// Processes of the job.
    pub ranks: u32,
    /// Processes of the job on this node; `None` when all are.
    pub node_ranks: Option<Range<u32>>,
}

/// Number of staging slots.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Staging {
    /// The number of slots that fit in this many bytes.
    Bytes(u64),
    /// A number for each kind, at least [`STAGING_MIN`].
    Slots {
        /// For `param` tiles.
        param: u32,
        /// For `state` tiles.
        state: u32,
        /// For `grad` tiles.
        grad: u32,
    },
}

impl Default for Staging {
    /// 1.4 GB keep a drive of 6.2 GB/s read and 3.2 GB/s write busy while 1.3 G parameters are trained.
    fn default() -> Self {
        Self::Bytes(1_400_000_000)
    }
}

/// Storage of the tiles.
#[derive(Clone, Debug)]
pub enum Backing {
    /// In host memory. Nothing is committed.
    Memory,
    /// In a daemon's store.
    Store(StoreSettings),
}

/// A store and the job in it.
#[derive(Clone, Debug)]
pub struct StoreSettings {
    /// The daemon's control socket.
    pub socket: PathBuf,
    /// The job's name.
    pub job: String,
    /// Whether committed tiles survive a crash.
    pub durability: offload_client::Durability,
    /// The job's nodes, if there are several.
    pub nodes: Option<Nodes>,
}

/// Host and device memory of a swapper, known before it starts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MemoryPlan {
    /// Slots of resident `param` tiles.
    pub param_resident_count: u32,
    /// Slots of resident `state` tiles that have the size of the largest one.
    pub state_resident_count: u32,
    /// Slots of smaller resident `state` tiles: size and number of each.
    pub smaller_states: Vec<(u64, u32)>,
    /// Staging slots for `param` tiles; 0 when all are resident.
    pub param_staging_count: u32,
    /// Staging slots for `state` tiles; 0 when all are resident.
    pub state_staging_count: u32,
    /// Slots of gradients that stay in host memory.
    pub grad_resident_count: u32,
    /// Staging slots for `grad` tiles; 0 when all gradients stay in host memory.
    pub grad_staging_count: u32,
    /// Ranges of this rank.
    pub range_count: u32,
    /// Bytes of one `param` slot.
    pub param_slot_bytes: u64,
    /// Bytes of one `state` slot.
    pub state_slot_bytes: u64,
    /// Bytes of one `grad` slot.
    pub grad_slot_bytes: u64,
    /// Bytes of the tiles of all ranks of all nodes, each counted once.
    pub all_bytes: u64,
    /// Bytes of the tiles of this node's ranks, each counted once; a durable store holds two copies.
    pub table_bytes: u64,
    /// Part of `table_bytes` in units that are not trained; a store holds one copy of it.
    pub frozen_bytes: u64,
    /// Tiles of this node's ranks.
    pub table_count: usize,
    /// Bytes of this rank's scratch tiles on devices: gradients that go there, and the caller's own.
    pub scratch_bytes: u64,
    /// The caller's own tiles.
    pub scratch: ScratchSettings,
    /// Ranks of this node.
    pub ranks: u32,
}

impl MemoryPlan {
    /// Bytes of the slots of resident tiles.
    pub fn resident_bytes(&self) -> u64 {
        u64::from(self.param_resident_count) * self.param_slot_bytes
            + u64::from(self.state_resident_count) * self.state_slot_bytes
            + (self.smaller_states.iter())
                .map(|(bytes, count)| bytes * u64::from(*count))
                .sum::<u64>()
    }

    /// Bytes of the staging slots.
    pub fn staging_bytes(&self) -> u64 {
        u64::from(self.param_staging_count) * self.param_slot_bytes
            + u64::from(self.state_staging_count) * self.state_slot_bytes
            + u64::from(self.grad_staging_count) * self.grad_slot_bytes
    }

    /// Bytes of the gradients kept in host memory.
    pub fn grad_bytes(&self) -> u64 {
        u64::from(self.grad_resident_count) * self.grad_slot_bytes
    }

    /// Bytes of the slots of the caller's own tiles.
    pub fn scratch_slot_bytes(&self) -> u64 {
        u64::from(self.scratch.slot_count) * u64::from(self.scratch.tile_bytes)
    }

    /// Staging slots by kind.
    pub(crate) fn staging_counts(&self) -> ByKind<u32> {
        ByKind([
            self.param_staging_count,
            self.state_staging_count,
            self.grad_staging_count,
        ])
    }

    /// All slots of a kind, but those of smaller states.
    pub(crate) fn slot_count(&self, kind: Kind) -> u32 {
        let resident = match kind {
            Kind::Param => self.param_resident_count,
            Kind::State => self.state_resident_count,
            Kind::Grad => self.grad_resident_count,
        };
        resident + self.staging_counts()[kind]
    }

    /// All host memory in bytes.
    pub fn host_bytes(&self) -> u64 {
        self.resident_bytes() + self.staging_bytes() + self.grad_bytes() + self.scratch_slot_bytes()
    }

    /// Bytes of the session's arena: the slots and the gaps between their classes.
    ///
    /// # Errors
    /// Slots are too large or too many for an arena.
    pub fn arena_bytes(&self) -> Result<u64, SwapperError> {
        offload_client::arena_bytes(&self.classes()).map_err(|source| SwapperError::Client {
            doing: "laying out the slots".into(),
            source,
        })
    }

    /// Position in [`MemoryPlan::classes`] of the slots of smaller states of `slot_bytes`; `None` if none have this size.
    pub(crate) fn smaller_class(&self, slot_bytes: u64) -> Option<usize> {
        let first = Kind::ALL.len() + usize::from(self.scratch.slot_count > 0);
        let at = self
            .smaller_states
            .iter()
            .position(|(bytes, _)| *bytes == slot_bytes);
        at.map(|at| first + at)
    }

    /// Slot classes of param, state and grad, in this order, of the caller's own tiles if there are any, and of smaller states.
    pub(crate) fn classes(&self) -> Vec<SlotClass> {
        let class = |kind, slot_bytes| SlotClass {
            slot_bytes,
            slot_count: self.slot_count(kind),
        };
        let mut grad = class(Kind::Grad, self.grad_slot_bytes);
        // A rank that owns no tile takes part too, and an arena has at least one slot.
        grad.slot_count = grad.slot_count.max(1);
        let mut classes = vec![
            class(Kind::Param, self.param_slot_bytes),
            class(Kind::State, self.state_slot_bytes),
            grad,
        ];
        if self.scratch.slot_count > 0 {
            classes.push(SlotClass {
                slot_bytes: self.scratch.tile_bytes.into(),
                slot_count: self.scratch.slot_count,
            });
        }
        let smaller = self.smaller_states.iter();
        classes.extend(smaller.map(|&(slot_bytes, slot_count)| SlotClass {
            slot_bytes,
            slot_count,
        }));
        classes
    }

    /// Bytes that the tiles of this node's ranks need on devices: one or two extents a tile, one for tiles that are not trained and
    /// for gradients that are not kept in host memory.
    pub fn device_bytes(&self, durability: offload_client::Durability) -> u64 {
        let extents = match durability {
            offload_client::Durability::Committed => 2,
            offload_client::Durability::None => 1,
        };
        extents * (self.table_bytes - self.frozen_bytes)
            + self.frozen_bytes
            + u64::from(self.ranks) * self.scratch_bytes
    }
}

impl SwapperSettings {
    /// Operations in flight that the session asks for: those of scratch tiles too, as far as a session may have so many.
    pub fn session_iodepth(&self) -> u32 {
        (self.iodepth + self.scratch.slot_count).min(IODEPTH_MAX)
    }

    /// Checks the settings and computes their memory, without touching anything.
    pub fn plan(&self) -> Result<MemoryPlan, SwapperError> {
        let layout = self.cut()?;
        self.plan_of(&layout)
    }

    /// Like [`SwapperSettings::plan`], with the bytes of a step as in [`SwapperSettings::step_bytes`]. A large model has tens of thousands of tiles,
    /// which are cut once here.
    pub fn plan_with_bytes(&self) -> Result<(MemoryPlan, StepBytes), SwapperError> {
        let layout = self.cut()?;
        Ok((self.plan_of(&layout)?, self.step_bytes_of(&layout)))
    }

    /// Bytes of the arenas of all ranks on this node. Any rank may need the most: which of its tiles stay in host memory differs, and
    /// their states may have several sizes.
    ///
    /// # Errors
    /// As [`SwapperSettings::plan`], for any of these ranks.
    pub fn local_arena_bytes(&self) -> Result<u64, SwapperError> {
        let of_rank = |rank| {
            let settings = Self {
                rank,
                ..self.clone()
            };
            settings.plan()?.arena_bytes()
        };
        self.local().map(of_rank).sum()
    }

    /// Divides the units among the ranks and cuts this rank's part into tiles.
    pub fn cut(&self) -> Result<Layout, SwapperError> {
        let (rank, ranks) = (self.rank, self.ranks);
        let layout = Layout::of_node(&self.units, self.tile_elems, rank, ranks, self.local())?;
        // In memory, a node may have none: one of two parts of the units may be small.
        if let Backing::Store(_) = self.backing {
            layout.check_node(self.tile_elems, ranks, self.local())?;
        }
        Ok(layout)
    }

    /// Ranks on this node.
    pub fn local(&self) -> Range<u32> {
        self.node_ranks.clone().unwrap_or(0..self.ranks)
    }

    /// Which ranges' tiles stay in host memory, by kind. A tile that a range does not have stays nowhere.
    pub(crate) fn residency(&self, layout: &Layout) -> ByKind<Vec<bool>> {
        let shares = match self.backing {
            Backing::Memory => ByKind([1.0; 3]),
            Backing::Store(_) => {
                ByKind([self.param_fraction, self.state_fraction, self.grad_fraction])
            }
        };
        ByKind::new(|kind| {
            // What the caller has passes through on its way to a commit.
            let has = |range| layout.has(kind, range) && !layout.has_external(range);
            let ranges = 0..layout.ranges().len() as u32;
            let count = ranges.clone().filter(|&range| has(range)).count();
            let mut chosen = resident(count, shares[kind]).into_iter();
            ranges
                .map(|range| has(range) && chosen.next().expect("one a tile"))
                .collect()
        })
    }

    pub(crate) fn plan_of(&self, layout: &Layout) -> Result<MemoryPlan, SwapperError> {
        for (name, fraction) in [
            ("param_fraction", self.param_fraction),
            ("state_fraction", self.state_fraction),
            ("grad_fraction", self.grad_fraction),
        ] {
            if !(0.0..=1.0).contains(&fraction) {
                return Err(SwapperError::Settings {
                    what: format!("{name} = {fraction}: must be 0 to 1"),
                });
            }
        }
        if self.iodepth < IODEPTH_MIN {
            return Err(SwapperError::Settings {
                what: format!("iodepth = {}: must be at least {IODEPTH_MIN}", self.iodepth),
            });
        }
        self.scratch.check()?;
        if self.units.iter().any(|unit| unit.external) && matches!(self.backing, Backing::Memory) {
            return Err(SwapperError::Settings {
                what: "external units are copied for commits, and there is no store".into(),
            });
        }
        if self.scratch.tile_count > 0 && matches!(self.backing, Backing::Memory) {
            return Err(SwapperError::Settings {
                what: "scratch tiles are on devices, and there is no store".into(),
            });
        }
        let range_count = layout.ranges().len() as u32;
        let tile_counts = ByKind::new(|kind| {
            let ranges = 0..range_count;
            ranges.filter(|&range| layout.has(kind, range)).count() as u32
        });
        let residency = self.residency(layout);
        let spilled = (0..range_count).filter(|&range| !residency[Kind::Grad][range as usize]);
        let grad_bytes: u64 = spilled
            .map(|range| layout.moved_bytes(Kind::Grad, range))
            .sum();
        let resident_counts = ByKind::new(|kind| {
            let resident = residency[kind].iter().filter(|&&resident| resident);
            resident.count() as u32
        });
        let slot_bytes = ByKind::new(|kind| layout.slot_bytes(kind));
        let mut smaller = BTreeMap::new();
        for range in (0..range_count).filter(|&range| residency[Kind::State][range as usize]) {
            let bytes = layout.own_slot_bytes(Kind::State, range);
            if bytes < slot_bytes[Kind::State] {
                *smaller.entry(bytes).or_insert(0) += 1;
            }
        }
        let smaller_count: u32 = smaller.values().sum();
        let mut plan = MemoryPlan {
            param_resident_count: resident_counts[Kind::Param],
            state_resident_count: resident_counts[Kind::State] - smaller_count,
            smaller_states: smaller.into_iter().collect(),
            param_staging_count: 0,
            state_staging_count: 0,
            grad_resident_count: resident_counts[Kind::Grad],
            grad_staging_count: 0,
            range_count,
            param_slot_bytes: slot_bytes[Kind::Param],
            state_slot_bytes: slot_bytes[Kind::State],
            grad_slot_bytes: slot_bytes[Kind::Grad],
            all_bytes: layout.all_bytes(),
            table_bytes: layout.table_bytes(),
            frozen_bytes: layout.frozen_bytes(),
            table_count: layout.table().len(),
            scratch_bytes: grad_bytes + self.scratch.bytes(),
            scratch: self.scratch,
            ranks: self.local().len() as u32,
        };
        let staged = Kind::ALL.map(|kind| tile_counts[kind] - resident_counts[kind]);
        let staged_bytes = |kind: Kind| -> u64 {
            let ranges = 0..range_count;
            let staged =
                ranges.filter(|&range| layout.has(kind, range) && !residency[kind][range as usize]);
            staged.map(|range| layout.moved_bytes(kind, range)).sum()
        };
        let most_is_frozen = staged_bytes(Kind::Param) > staged_bytes(Kind::State);
        let unit_max = layout
            .units()
            .iter()
            .map(|unit| unit.end - unit.start)
            .max();
        let counts =
            self.staging
                .counts(staged, slot_bytes.0, unit_max.unwrap_or(0), most_is_frozen)?;
        [
            plan.param_staging_count,
            plan.state_staging_count,
            plan.grad_staging_count,
        ] = counts;
        Ok(plan)
    }
}

impl Staging {
    /// Staging slots of each kind for `staged` tiles of each kind, never more than there are tiles. A unit has at most
    /// `unit_max` ranges; `most_is_frozen` if the parameters have more bytes than the state.
    fn counts(
        self,
        staged: [u32; 3],
        slot_bytes: [u64; 3],
        unit_max: u32,
        most_is_frozen: bool,
    ) -> Result<[u32; 3], SwapperError> {
        let least = staged.map(|staged| staged.min(STAGING_MIN));
        let bytes = |counts: [u32; 3]| -> u64 {
            let of_kind = counts.iter().zip(slot_bytes);
            of_kind
                .map(|(&count, bytes)| u64::from(count) * bytes)
                .sum()
        };
        match self {
            Self::Slots { param, state, grad } => {
                if param.min(state).min(grad) < STAGING_MIN {
                    return Err(SwapperError::Settings {
                        what: format!(
                            "staging of {param} param, {state} state and {grad} grad slots: must be at least {STAGING_MIN} each"
                        ),
                    });
                }
                let wanted = [param, state, grad];
                Ok([0, 1, 2].map(|kind| wanted[kind].min(staged[kind])))
            }
            Self::Bytes(budget_bytes) => {
                if bytes(least) > budget_bytes {
                    return Err(SwapperError::StagingTooSmall {
                        budget_bytes,
                        needed_bytes: bytes(least),
                    });
                }
                // Param and grad get as many slots as state, but more than two units only when all state has slots: one
                // unit is in use while the next one moves, parameters are written first, and the unwritten bytes
                // carried into backward are state. Where most is frozen, reads limit a step, and a parameter in a slot
                // saves two of them, after forward and after backward, a state one: each kind then has slots for the
                // same part of its tiles. A binary search finds the most that fits.
                let part =
                    |n: u32| u64::from(n) * u64::from(staged[1]) / u64::from(staged[0].max(1));
                let of = |n: u32| {
                    let two_units = n.min(unit_max.saturating_mul(2));
                    let param = two_units + n.saturating_sub(staged[1]);
                    let wanted = match most_is_frozen {
                        true => [n, part(n) as u32, two_units],
                        false => [param, n, two_units],
                    };
                    [0, 1, 2].map(|kind| staged[kind].min(wanted[kind]).max(least[kind]))
                };
                let (mut fits, mut too_many) = (0, staged[0] + staged[1] + staged[2] + 1);
                while fits + 1 < too_many {
                    let middle = fits + (too_many - fits) / 2;
                    if bytes(of(middle)) <= budget_bytes {
                        fits = middle;
                    } else {
                        too_many = middle;
                    }
                }
                Ok(of(fits))
            }
        }
    }
}

/// Result of [`crate::Swapper::open`].
#[derive(Clone, Debug)]
pub struct OpenReport {
    /// Blob of the resumed generation; `None` if the tiles are empty and need `initialize`.
    pub resumed: Option<Vec<u8>>,
    /// Blob that this rank gave to the resumed generation; `None` if the generation has none of this rank.
    pub resumed_own: Option<Vec<u8>>,
    /// The resumed generation, 0 for none.
    pub generation: u64,
    /// Memory in use.
    pub memory: MemoryPlan,
    /// Address range of the slots, to register it with a GPU.
    pub arena: Option<ArenaMemory>,
    /// Operations in flight that the daemon granted.
    pub iodepth: u32,
    /// The daemon's I/O engine; `memory` without a store.
    pub engine: String,
    /// Devices of the store; empty without a store.
    pub devices: Vec<DeviceRates>,
    /// Notes for the person who runs this, such as unlocked memory and how to lock it.
    pub notes: Vec<String>,
}

impl OpenReport {
    /// Rates of all devices together, bytes a second (read, write); `None` if a device was never measured.
    pub fn rates(&self) -> Option<(f64, f64)> {
        let sum = |rate: fn(&DeviceRates) -> u64| {
            let known = !self.devices.is_empty() && self.devices.iter().all(|d| rate(d) > 0);
            known.then(|| self.devices.iter().map(|d| rate(d) as f64).sum())
        };
        Some((sum(|d| d.read_bytes_per_s)?, sum(|d| d.write_bytes_per_s)?))
    }
}

/// One device of the store.
#[derive(Clone, Debug)]
pub struct DeviceRates {
    /// Path as the daemon opened it.
    pub path: String,
    /// Measured read rate; 0 if unknown.
    pub read_bytes_per_s: u64,
    /// Measured write rate; 0 if unknown.
    pub write_bytes_per_s: u64,
}

/// I/O since the previous step was finished, a drain included; since `initialize` for the first step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StepIo {
    /// Bytes read from devices.
    pub read_bytes: u64,
    /// Bytes written to devices.
    pub written_bytes: u64,
    /// Tiles read from devices.
    pub read_count: u64,
    /// Tiles written to devices.
    pub written_count: u64,
    /// The newest committed generation.
    pub generation: u64,
    /// Bytes of gradients among the bytes read.
    pub grad_read_bytes: u64,
    /// Bytes of gradients among the bytes written.
    pub grad_written_bytes: u64,
    /// Bytes of the caller's own tiles among the bytes read.
    pub scratch_read_bytes: u64,
    /// Bytes of the caller's own tiles among the bytes written.
    pub scratch_written_bytes: u64,
    /// Time the trainer waited for tiles, updates and commits.
    pub waited_ns: u64,
    /// Time in which at least one update ran.
    pub update_ns: u64,
}

impl StepIo {
    /// Counts an operation on one of the caller's own tiles.
    pub(crate) fn count_scratch(&mut self, verb: Verb, bytes: u64) {
        let (all, count, of_scratch) = match verb {
            Verb::SwapIn => (
                &mut self.read_bytes,
                &mut self.read_count,
                &mut self.scratch_read_bytes,
            ),
            Verb::SwapOut => (
                &mut self.written_bytes,
                &mut self.written_count,
                &mut self.scratch_written_bytes,
            ),
        };
        *all += bytes;
        *of_scratch += bytes;
        *count += u64::from(bytes > 0);
    }

    /// The difference to the earlier count `before`.
    pub(crate) fn since(&self, before: &Self) -> Self {
        Self {
            read_bytes: self.read_bytes - before.read_bytes,
            written_bytes: self.written_bytes - before.written_bytes,
            read_count: self.read_count - before.read_count,
            written_count: self.written_count - before.written_count,
            generation: self.generation,
            grad_read_bytes: self.grad_read_bytes - before.grad_read_bytes,
            grad_written_bytes: self.grad_written_bytes - before.grad_written_bytes,
            scratch_read_bytes: self.scratch_read_bytes - before.scratch_read_bytes,
            scratch_written_bytes: self.scratch_written_bytes - before.scratch_written_bytes,
            waited_ns: self.waited_ns - before.waited_ns,
            update_ns: self.update_ns - before.update_ns,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_arena_has_gaps_and_they_are_counted() {
        let memory = MemoryPlan {
            param_resident_count: 0,
            state_resident_count: 2000,
            smaller_states: Vec::new(),
            param_staging_count: 0,
            state_staging_count: 0,
            grad_resident_count: 0,
            grad_staging_count: 0,
            range_count: 0,
            param_slot_bytes: 4096,
            state_slot_bytes: 9_052_160,
            grad_slot_bytes: 4096,
            all_bytes: 0,
            table_bytes: 0,
            frozen_bytes: 0,
            table_count: 0,
            scratch_bytes: 0,
            scratch: ScratchSettings::default(),
            ranks: 1,
        };
        // Each GiB holds 118 such slots, and ends where huge pages do.
        let gaps = memory.arena_bytes().unwrap() - memory.host_bytes();
        assert!((16 << 20..64 << 20).contains(&gaps), "{gaps}");
    }

    #[test]
    fn staging_keeps_to_its_budget_and_to_what_is_staged() {
        let slot_bytes = [2 << 20, 10 << 20, 2 << 20];
        let with_grads =
            |budget, staged| Staging::Bytes(budget).counts(staged, slot_bytes, 20, false);
        let counts = |budget, [param, state]: [u32; 2]| {
            let [param, state, grad] = with_grads(budget, [param, state, 0])?;
            assert_eq!(grad, 0, "nothing of them is staged");
            Ok::<_, SwapperError>([param, state])
        };
        for budget in [24 << 20, 25 << 20, 100 << 20, 1 << 30] {
            let [param, state] = counts(budget, [1000, 1000]).unwrap();
            let used = u64::from(param) * slot_bytes[0] + u64::from(state) * slot_bytes[1];
            assert!(used <= budget && param >= STAGING_MIN && state >= STAGING_MIN);
            assert!(
                used + 2 * slot_bytes[0] + slot_bytes[1] > budget,
                "{budget} is not used up"
            );
        }
        // Two units of parameters, then only state; once all state has slots, parameters get the rest.
        assert_eq!(counts(1000 << 20, [1000, 1000]).unwrap(), [40, 92]);
        assert_eq!(counts(1000 << 20, [1000, 50]).unwrap(), [250, 50]);
        assert_eq!(counts(1 << 40, [7, 3]).unwrap(), [7, 3]);
        assert_eq!(counts(1 << 30, [0, 0]).unwrap(), [0, 0]);
        assert_eq!(counts(2 << 20, [1, 0]).unwrap(), [1, 0]);
        // Most is frozen: the same part of each kind.
        let frozen = |budget, staged| Staging::Bytes(budget).counts(staged, slot_bytes, 20, true);
        assert_eq!(frozen(1000 << 20, [1000, 50, 0]).unwrap(), [400, 20, 0]);
        assert_eq!(frozen(24 << 20, [1000, 1, 1]).unwrap(), [6, 1, 1]);
        assert_eq!(frozen(1000 << 20, [1000, 50, 50]).unwrap(), [370, 18, 40]);
        assert_eq!(frozen(1 << 40, [7, 3, 3]).unwrap(), [7, 3, 3]);
        // Gradients are written like parameters: two units of them at most.
        assert_eq!(with_grads(1000 << 20, [1000; 3]).unwrap(), [40, 84, 40]);
        assert_eq!(with_grads(28 << 20, [9; 3]).unwrap(), [2, 2, 2]);
        assert!(with_grads(27 << 20, [9; 3]).is_err());
        assert!(matches!(
            counts(23 << 20, [9, 9]),
            Err(SwapperError::StagingTooSmall { needed_bytes, .. }) if needed_bytes == 24 << 20
        ));
    }
}
