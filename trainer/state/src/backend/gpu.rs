//! Tiles in a GPU's memory: all, or those of some units. Nothing moves, and the update runs where the tiles are.
//!
//! ```text
//!   a unit      param   parameters                             read by forward and backward
//!               state   residuals | momenta | variances        one tile as long as this rank's shard; with Muon one for each run of tiles of one format
//!               grad    gradients                              where backward leaves them
//! ```
//!
//! An update processes a whole unit: it launches one kernel for each change of the parameter group, not one for
//! each tile. Initial contents and reads pass through the host as tiles, with the same bytes as in other backends.
//!
//! With state on drives, each of these tiles has its place in the store too: a commit copies what it lacks ([`GpuReader`]) on a stream of its own, beside
//! computing, and the next update waits for that.
//!
//! In 16 bits a parameter takes 14 bytes, and its update moves 26 bytes: 10 and 18 with moments in bf16,
//! 8 and 14 if the masters are bf16 too.

use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};

use kernels::adamw::{Hyper, Master, TileFormat, state_planes, state_tile_bytes};
use kernels::gpu::{DeviceBuffer, Event, Gpu, GpuError, Stream, TileAt};
use offload_support::aligned::AlignedBytes;
use swapper::{
    Kind, Layout, Optimizer, SwapperError, TileRange, TileUpdate, TileVisitor, UninitTile,
};

use crate::update::{ParamGroups, TileFormats};

/// Host memory for initial contents and reads.
pub const GPU_STAGING_BYTES: usize = 256 << 20;

/// This rank's shard of one unit.
pub struct UnitTiles {
    /// The shard's elements of the unit.
    elems: Range<u64>,
    pub param: DeviceBuffer,
    /// Consecutive elements whose state is one tile, and its offset in `state`.
    runs: Vec<Run>,
    state: DeviceBuffer,
    pub grad: DeviceBuffer,
}

/// Tiles of one format that follow one another.
struct Run {
    elems: Range<u64>,
    format: TileFormat,
    state_at: usize,
}

impl Run {
    fn elems_count(&self) -> usize {
        (self.elems.end - self.elems.start) as usize
    }
}

/// The runs of consecutive `ranges`, and the bytes of their state.
fn runs(ranges: &[TileRange], formats: &TileFormats) -> (Vec<Run>, usize) {
    let mut runs: Vec<Run> = Vec::new();
    for range in ranges {
        let format = formats.of_tile(range);
        match runs.last_mut() {
            Some(run) if run.format == format => run.elems.end = range.elems.end,
            _ => runs.push(Run {
                elems: range.elems.clone(),
                format,
                state_at: 0,
            }),
        }
    }
    let mut end = 0;
    for run in &mut runs {
        run.state_at = end;
        end += state_tile_bytes(run.format, run.elems_count());
    }
    (runs, end)
}

/// The tiles of one rank in one GPU.
pub struct GpuBackend {
    gpu: Gpu,
    /// Torch's stream, so that computing and updating run one after the other.
    stream: Stream,
    layout: Layout,
    formats: TileFormats,
    groups: ParamGroups,
    units: Arc<Vec<UnitTiles>>,
    /// Reached when the newest update has run.
    updated: Arc<Mutex<Option<Event>>>,
}

/// Copies tiles out of a GPU's memory on a stream of its own, for one thread.
pub struct GpuReader {
    gpu: Gpu,
    stream: Stream,
    master: Master,
    units: Arc<Vec<UnitTiles>>,
    updated: Arc<Mutex<Option<Event>>>,
}

impl GpuReader {
    /// Copies the tiles of `tile.range` as the newest update leaves them.
    fn read(&self, tile: UninitTile<'_>) -> Result<(), GpuError> {
        {
            let updated = self.updated.lock().unwrap_or_else(PoisonError::into_inner);
            if let Some(event) = &*updated {
                self.stream.wait(event)?;
            }
        }
        let unit = &self.units[tile.range.unit];
        unit.read((&self.gpu, &self.stream), self.master, tile)
    }
}

/// An optimizer of the other units, whose thread also copies what commits lack of the units in a GPU's memory.
pub struct BesideGpu<O> {
    pub optimizer: O,
    /// `None` if no unit is there.
    pub reader: Option<GpuReader>,
}

impl<S, O: Optimizer<S>> Optimizer<S> for BesideGpu<O> {
    fn update(&mut self, tile: TileUpdate<'_>, step: &S) {
        self.optimizer.update(tile, step);
    }

    fn copy(&mut self, tile: UninitTile<'_>) {
        let reader = self.reader.as_ref();
        let reader = reader.expect("units in GPU memory have a reader");
        // A commit without the tile must not end, so the run cannot continue. The swapper names the tile.
        if let Err(error) = reader.read(tile) {
            panic!("{error}");
        }
    }
}

impl GpuBackend {
    /// Allocates the tiles. Their contents are undefined until [`GpuBackend::initialize`].
    ///
    /// # Errors
    /// The GPU has too little free memory.
    pub fn new(
        gpu: &Gpu,
        layout: Layout,
        formats: TileFormats,
        groups: ParamGroups,
    ) -> Result<Self, GpuError> {
        let master = formats.master();
        let mut units = Vec::with_capacity(layout.units().len());
        for ranges in layout.units() {
            let all = &layout.ranges()[ranges.start as usize..ranges.end as usize];
            let elems = match (all.first(), all.last()) {
                (Some(first), Some(last)) => first.elems.start..last.elems.end,
                _ => 0..0,
            };
            let count = (elems.end - elems.start) as usize;
            let (runs, state_bytes) = runs(all, &formats);
            units.push(UnitTiles {
                elems,
                param: gpu.alloc(count * master.param_bytes())?,
                runs,
                state: gpu.alloc(state_bytes)?,
                grad: gpu.alloc(count * master.grad_bytes())?,
            });
        }
        Ok(Self {
            stream: gpu.default_stream(),
            gpu: gpu.clone(),
            layout,
            formats,
            groups,
            units: Arc::new(units),
            updated: Arc::default(),
        })
    }

    /// Returns what copies tiles for commits.
    ///
    /// # Errors
    /// A stream cannot be made.
    pub fn reader(&self) -> Result<GpuReader, GpuError> {
        Ok(GpuReader {
            gpu: self.gpu.clone(),
            stream: self.gpu.stream()?,
            master: self.formats.master(),
            units: self.units.clone(),
            updated: self.updated.clone(),
        })
    }

    pub fn unit(&self, unit: usize) -> &UnitTiles {
        &self.units[unit]
    }

    pub(super) fn initialize<E: From<SwapperError> + From<GpuError>>(
        &mut self,
        mut fill: impl FnMut(&mut [UninitTile<'_>]) -> Result<(), E>,
    ) -> Result<(), E> {
        let batches = self.batches();
        // One staging buffer for all batches: touching new memory takes longer than copying.
        let mut staging = self.staging(batches.first());
        for ranges in batches {
            let mut blanks: Vec<UninitTile> = (staging.iter_mut().zip(ranges))
                .map(|([param, state], range)| {
                    let [param_bytes, state_bytes] = self.content_bytes(range);
                    UninitTile {
                        range: &self.layout.ranges()[range as usize],
                        param: &mut param.as_mut_slice()[..param_bytes],
                        state: &mut state.as_mut_slice()[..state_bytes],
                    }
                })
                .collect();
            fill(&mut blanks)?;
            for blank in &blanks {
                self.write(blank.range, blank.param, blank.state)?;
            }
        }
        Ok(())
    }

    /// Gives the tiles of `range` this content, if they are here.
    pub(super) fn write(
        &self,
        range: &TileRange,
        param: &[u8],
        state: &[u8],
    ) -> Result<(), GpuError> {
        if !self.has(range.unit) {
            return Ok(());
        }
        let unit = &self.units[range.unit];
        let params = [(unit.param_at(self.formats.master(), range), param)];
        self.gpu.upload(&self.stream, &unit.param, &params)?;
        let places = unit.state_at(range);
        let states = places.map(|(at, bytes)| (at, &state[bytes]));
        self.gpu.upload(&self.stream, &unit.state, &states)
    }

    /// Updates every unit with the gradients in its buffer. The host does not wait.
    pub(super) fn update(&mut self, hyper: &Hyper) -> Result<(), GpuError> {
        let kernels = self.gpu.kernels()?;
        for (number, unit) in self.units.iter().enumerate() {
            for run in &unit.runs {
                let format = run.format;
                let first = (run.elems.start - unit.elems.start) as usize;
                let range = TileRange {
                    unit: number,
                    elems: run.elems.clone(),
                };
                for part in self.groups.parts(&range, format.rule, hyper) {
                    let rule = part.rule;
                    let tile = TileAt {
                        format: TileFormat { rule, ..format },
                        param: unit.param.at(first * format.master.param_bytes()),
                        state: unit.state.at(run.state_at),
                        grad: unit.grad.at(first * format.master.grad_bytes()),
                        grad_type: format.master.grad_type(),
                        elems: run.elems_count(),
                    };
                    kernels.adamw_range(&self.stream, &part.hyper, tile, part.elems)?;
                }
            }
        }
        let mut updated = self.updated.lock().unwrap_or_else(PoisonError::into_inner);
        *updated = Some(self.stream.record()?);
        Ok(())
    }

    pub(super) fn settle(&self) -> Result<(), GpuError> {
        self.stream.synchronize()
    }

    /// Whether this has tiles of `unit`.
    pub fn has(&self, unit: usize) -> bool {
        !self.layout.units()[unit].is_empty()
    }

    /// Sees the tiles of `units`; there may be fewer units.
    pub(super) fn visit(
        &mut self,
        units: Range<usize>,
        see: &mut TileVisitor,
    ) -> Result<(), GpuError> {
        let Some([mut param, mut state]) = self.staging(Some(&(0..1))).pop() else {
            return Ok(());
        };
        for (number, range) in self.layout.ranges().iter().enumerate() {
            if !units.contains(&range.unit) {
                continue;
            }
            let unit = &self.units[range.unit];
            let [param_bytes, state_bytes] = self.content_bytes(number as u32);
            let param = &mut param.as_mut_slice()[..param_bytes];
            let state = &mut state.as_mut_slice()[..state_bytes];
            let tile = UninitTile {
                range,
                param: &mut *param,
                state: &mut *state,
            };
            unit.read((&self.gpu, &self.stream), self.formats.master(), tile)?;
            see(range, param, state);
        }
        Ok(())
    }

    /// All ranges in order, each batch within [`GPU_STAGING_BYTES`].
    fn batches(&self) -> Vec<Range<u32>> {
        let tile_bytes = self.layout.slot_bytes(Kind::Param) + self.layout.slot_bytes(Kind::State);
        let count = (GPU_STAGING_BYTES as u64 / tile_bytes).max(1) as u32;
        let all = self.layout.ranges().len() as u32;
        (0..all)
            .step_by(count as usize)
            .map(|start| start..(start + count).min(all))
            .collect()
    }

    /// Host memory for the parameters and the state of each range of `batch`.
    fn staging(&self, batch: Option<&Range<u32>>) -> Vec<[AlignedBytes; 2]> {
        let slot = |kind| AlignedBytes::zeroed(self.layout.slot_bytes(kind) as usize);
        batch.map_or(Vec::new(), |ranges| {
            ranges.clone().map(|_| Kind::STORED.map(slot)).collect()
        })
    }

    /// Bytes of a range's parameter tile and state tile.
    fn content_bytes(&self, range: u32) -> [usize; 2] {
        Kind::STORED.map(|kind| self.layout.content_bytes(kind, range))
    }
}

impl UnitTiles {
    /// This rank's elements of the unit.
    pub fn elems(&self) -> &Range<u64> {
        &self.elems
    }

    pub fn state(&self) -> &DeviceBuffer {
        &self.state
    }

    /// Consecutive elements of the unit, with the offset in bytes of their momenta in the state.
    pub fn momenta(&self) -> impl Iterator<Item = (Range<u64>, usize)> + '_ {
        self.runs.iter().map(|run| {
            let [_, momenta, ..] = state_planes(run.format, run.elems_count());
            (run.elems.clone(), run.state_at + momenta.start)
        })
    }

    /// Copies the tiles of `tile.range` to it.
    fn read(
        &self,
        (gpu, stream): (&Gpu, &Stream),
        master: Master,
        tile: UninitTile<'_>,
    ) -> Result<(), GpuError> {
        let UninitTile {
            range,
            param,
            state,
        } = tile;
        let param_at = self.param_at(master, range);
        gpu.download(stream, &self.param, &mut [(param_at, param)])?;
        // The padding of planes is zero in every tile.
        state.fill(0);
        for (at, bytes) in self.state_at(range) {
            gpu.download(stream, &self.state, &mut [(at, &mut state[bytes])])?;
        }
        Ok(())
    }

    fn elem_at(&self, range: &TileRange) -> usize {
        (range.elems.start - self.elems.start) as usize
    }

    fn param_at(&self, master: Master, range: &TileRange) -> usize {
        self.elem_at(range) * master.param_bytes()
    }

    /// Offset of each plane of a range's state in the shard, and the plane's bytes in the range's tile.
    fn state_at(&self, range: &TileRange) -> [(usize, Range<usize>); 5] {
        let run = self
            .runs
            .iter()
            .find(|run| run.elems.end > range.elems.start);
        let run = run.expect("every range is in a run");
        let count = |elems: &Range<u64>| (elems.end - elems.start) as usize;
        let own = state_planes(run.format, run.elems_count());
        let tile = state_planes(run.format, count(&range.elems));
        let before = state_planes(run.format, count(&(run.elems.start..range.elems.start)));
        std::array::from_fn(|plane| {
            let skipped = before[plane].len();
            (
                run.state_at + own[plane].start + skipped,
                tile[plane].clone(),
            )
        })
    }
}
