//! Tiles in a GPU's memory: all, or those of some units. Nothing moves, and the update runs where the tiles are.
//!
//! ```text
//!   a unit      param   parameters                             read by forward and backward
//!               state   residuals | momenta | variances        one tile as long as this rank's shard
//!               grad    gradients                              where backward leaves them
//! ```
//!
//! An update processes a whole unit: it launches one kernel for each change of the parameter group, not one for
//! each tile. Initial contents and reads pass through the host as tiles, with the same bytes as in other backends.
//!
//! In 16 bits a parameter takes 14 bytes, and its update moves 26 bytes: 10 and 18 with moments in bf16,
//! 8 and 14 if the masters are bf16 too.

use std::ops::Range;

use kernels::adamw::{Hyper, Master, TileFormat, state_planes, state_tile_bytes};
use kernels::gpu::{DeviceBuffer, Gpu, GpuError, Stream, TileAt};
use offload_support::aligned::AlignedBytes;
use swapper::{Kind, Layout, SwapperError, TileRange, TileVisitor, UninitTile};

use crate::update::ParamGroups;

/// Host memory for initial contents and reads.
pub const GPU_STAGING_BYTES: usize = 256 << 20;

/// This rank's shard of one unit.
pub struct UnitTiles {
    /// The shard's elements of the unit.
    elems: Range<u64>,
    pub param: DeviceBuffer,
    state: DeviceBuffer,
    pub grad: DeviceBuffer,
}

/// The tiles of one rank in one GPU.
pub struct GpuBackend {
    gpu: Gpu,
    /// Torch's stream, so that computing and updating run one after the other.
    stream: Stream,
    layout: Layout,
    format: TileFormat,
    groups: ParamGroups,
    units: Vec<UnitTiles>,
}

impl GpuBackend {
    /// Allocates the tiles. Their contents are undefined until [`GpuBackend::initialize`].
    ///
    /// # Errors
    /// The GPU has too little free memory.
    pub fn new(
        gpu: &Gpu,
        layout: Layout,
        format: TileFormat,
        groups: ParamGroups,
    ) -> Result<Self, GpuError> {
        let mut units = Vec::with_capacity(layout.units().len());
        for ranges in layout.units() {
            let all = &layout.ranges()[ranges.start as usize..ranges.end as usize];
            let elems = match (all.first(), all.last()) {
                (Some(first), Some(last)) => first.elems.start..last.elems.end,
                _ => 0..0,
            };
            let count = (elems.end - elems.start) as usize;
            units.push(UnitTiles {
                elems,
                param: gpu.alloc(count * format.master.param_bytes())?,
                state: gpu.alloc(state_tile_bytes(format, count))?,
                grad: gpu.alloc(count * format.master.grad_bytes())?,
            });
        }
        Ok(Self {
            stream: gpu.default_stream(),
            gpu: gpu.clone(),
            layout,
            format,
            groups,
            units,
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
                let unit = &self.units[blank.range.unit];
                let params = [(
                    unit.param_at(self.format.master, blank.range),
                    &*blank.param,
                )];
                self.gpu.upload(&self.stream, &unit.param, &params)?;
                let places = unit.state_at(self.format, blank.range);
                let states = places.map(|(at, bytes)| (at, &blank.state[bytes]));
                self.gpu.upload(&self.stream, &unit.state, &states)?;
            }
        }
        Ok(())
    }

    /// Updates every unit with the gradients in its buffer. The host does not wait.
    pub(super) fn update(&mut self, hyper: &Hyper) -> Result<(), GpuError> {
        let kernels = self.gpu.kernels()?;
        for (number, unit) in self.units.iter().enumerate() {
            if unit.elems.is_empty() {
                continue;
            }
            let tile = TileAt {
                format: self.format,
                param: unit.param.at(0),
                state: unit.state.at(0),
                grad: unit.grad.at(0),
                grad_type: self.format.master.grad_type(),
                elems: (unit.elems.end - unit.elems.start) as usize,
            };
            let shard = TileRange {
                unit: number,
                elems: unit.elems.clone(),
            };
            for (part, hyper) in self.groups.parts(&shard, hyper) {
                kernels.adamw_range(&self.stream, &hyper, tile, part)?;
            }
        }
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
            let param_at = unit.param_at(self.format.master, range);
            self.gpu
                .download(&self.stream, &unit.param, &mut [(param_at, param)])?;
            // The padding of planes is zero in every tile.
            state.fill(0);
            for (at, bytes) in unit.state_at(self.format, range) {
                self.gpu
                    .download(&self.stream, &unit.state, &mut [(at, &mut state[bytes])])?;
            }
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
    fn elem_at(&self, range: &TileRange) -> usize {
        (range.elems.start - self.elems.start) as usize
    }

    fn param_at(&self, master: Master, range: &TileRange) -> usize {
        self.elem_at(range) * master.param_bytes()
    }

    /// Offset of each plane of a range's state in the shard, and the plane's bytes in the range's tile.
    fn state_at(&self, format: TileFormat, range: &TileRange) -> [(usize, Range<usize>); 5] {
        let count = |elems: &Range<u64>| (elems.end - elems.start) as usize;
        let own = state_planes(format, count(&self.elems));
        let tile = state_planes(format, count(&range.elems));
        let before = state_planes(format, self.elem_at(range));
        std::array::from_fn(|plane| {
            let skipped = before[plane].len();
            (own[plane].start + skipped, tile[plane].clone())
        })
    }
}
