//! All tiles in a GPU's memory: nothing moves, and the update runs where the tiles are.
//!
//! ```text
//!   a unit   param   | range 0 | range 1 | ...      flat: what is computed with
//!            state   | tile 0 | tile 1 | ...        each as on a device: residuals, momenta, variances of its range
//!            grad    | range 0 | range 1 | ...      flat: where backward leaves it
//! ```
//!
//! 14 bytes a parameter in 16 bit. An update moves 26 of them, at the memory's own speed.

use kernels::adamw::Master;
use kernels::gpu::{DeviceBuffer, Gpu, GpuError, Stream, TileAt};
use swapper::{Blank, Kind, Layout, See, StepIo, SwapperError};

use crate::lines::Lines;
use crate::update::{Decay, Update};

/// Host bytes that first contents and readings pass through.
const STAGING_BYTES: usize = 256 << 20;

/// One unit of this rank's.
pub(crate) struct UnitTiles {
    /// Element of the unit that the flat buffers start with.
    first_elem: u64,
    pub(crate) param: DeviceBuffer,
    state: DeviceBuffer,
    pub(crate) grad: DeviceBuffer,
}

/// The tiles of one rank in one GPU.
pub(crate) struct GpuHome {
    gpu: Gpu,
    /// torch's: what is computed and what is updated come one after the other.
    stream: Stream,
    layout: Layout,
    master: Master,
    decay: Decay,
    units: Vec<UnitTiles>,
    /// Where each range's state starts in its unit's buffer.
    state_at: Vec<usize>,
}

impl GpuHome {
    /// Takes the memory. What it holds is undefined until [`GpuHome::initialize`].
    ///
    /// # Errors
    /// The GPU has too little memory free.
    pub(crate) fn new(
        gpu: &Gpu,
        layout: Layout,
        master: Master,
        decay: Decay,
    ) -> Result<Self, GpuError> {
        let mut state_at = vec![0; layout.ranges().len()];
        let mut units = Vec::with_capacity(layout.units().len());
        for ranges in layout.units() {
            let (mut elems, mut state_bytes) = (0, 0);
            for range in ranges.clone() {
                elems += layout.elems(range) as usize;
                state_at[range as usize] = state_bytes;
                state_bytes += layout.moved_bytes(Kind::State, range) as usize;
            }
            let first = layout.ranges().get(ranges.start as usize);
            units.push(UnitTiles {
                first_elem: first.map_or(0, |range| range.elems.start),
                param: gpu.alloc(elems * master.param_bytes())?,
                state: gpu.alloc(state_bytes)?,
                grad: gpu.alloc(elems * master.grad_bytes())?,
            });
        }
        Ok(Self {
            stream: gpu.default_stream(),
            gpu: gpu.clone(),
            layout,
            master,
            decay,
            units,
            state_at,
        })
    }

    /// A unit's buffers.
    pub(crate) fn unit(&self, unit: usize) -> &UnitTiles {
        &self.units[unit]
    }

    pub(super) fn initialize<E: From<SwapperError> + From<GpuError>>(
        &mut self,
        mut fill: impl FnMut(&mut [Blank<'_>]) -> Result<(), E>,
    ) -> Result<(), E> {
        for ranges in self.batches() {
            let mut contents: Vec<[Lines; 2]> = ranges
                .clone()
                .map(|range| {
                    Kind::STORED.map(|kind| Lines::new(self.layout.content_bytes(kind, range)))
                })
                .collect();
            let mut blanks: Vec<Blank> = contents
                .iter_mut()
                .zip(ranges.clone())
                .map(|([param, state], range)| Blank {
                    range: &self.layout.ranges()[range as usize],
                    param: param.bytes_mut(),
                    state: state.bytes_mut(),
                })
                .collect();
            fill(&mut blanks)?;
            for ([param, state], range) in contents.iter_mut().zip(ranges) {
                let (param, state) = (&*param.bytes_mut(), &*state.bytes_mut());
                let tiles = &self.units[self.layout.ranges()[range as usize].unit];
                self.gpu
                    .upload(&self.stream, &tiles.param, &[(self.param_at(range), param)])?;
                let state_at = self.state_at[range as usize];
                self.gpu
                    .upload(&self.stream, &tiles.state, &[(state_at, state)])?;
            }
        }
        Ok(())
    }

    /// Updates every unit with the gradients that are in its buffer. The host does not wait.
    pub(super) fn update(&mut self, update: &Update) -> Result<StepIo, GpuError> {
        let Update::Step(hyper) = update else {
            return Ok(StepIo::default());
        };
        let kernels = self.gpu.kernels()?;
        for (number, range) in self.layout.ranges().iter().enumerate() {
            let tiles = &self.units[range.unit];
            let number = number as u32;
            let elems = self.layout.elems(number) as usize;
            let tile = TileAt {
                master: self.master,
                param: tiles.param.at(self.param_at(number)),
                state: tiles.state.at(self.state_at[number as usize]),
                grad: tiles.grad.at(self.grad_at(number)),
                elems,
            };
            for (part, decays) in self.decay.parts(range) {
                kernels.adamw_range(&self.stream, &hyper.of_part(decays), tile, part)?;
            }
        }
        Ok(StepIo::default())
    }

    pub(super) fn settle(&self) -> Result<(), GpuError> {
        self.stream.synchronize()
    }

    pub(super) fn visit(&mut self, see: &mut See) -> Result<(), GpuError> {
        for range in self.batches().into_iter().flatten() {
            let tiles = &self.units[self.layout.ranges()[range as usize].unit];
            let [mut param, mut state] =
                Kind::STORED.map(|kind| Lines::new(self.layout.content_bytes(kind, range)));
            let (param, state) = (param.bytes_mut(), state.bytes_mut());
            let down = |from: &DeviceBuffer, at: usize, to: &mut [u8]| {
                self.gpu.download(&self.stream, from, &mut [(at, to)])
            };
            down(&tiles.param, self.param_at(range), param)?;
            down(&tiles.state, self.state_at[range as usize], state)?;
            see(&self.layout.ranges()[range as usize], param, state);
        }
        Ok(())
    }

    /// All ranges in order, as many at a time as the staging bytes allow.
    fn batches(&self) -> Vec<std::ops::Range<u32>> {
        let tile_bytes = self.layout.slot_bytes(Kind::Param) + self.layout.slot_bytes(Kind::State);
        let count = (STAGING_BYTES as u64 / tile_bytes).max(1) as u32;
        let all = self.layout.ranges().len() as u32;
        (0..all)
            .step_by(count as usize)
            .map(|start| start..(start + count).min(all))
            .collect()
    }

    fn elem_at(&self, range: u32) -> usize {
        let range = &self.layout.ranges()[range as usize];
        (range.elems.start - self.units[range.unit].first_elem) as usize
    }

    fn param_at(&self, range: u32) -> usize {
        self.elem_at(range) * self.master.param_bytes()
    }

    fn grad_at(&self, range: u32) -> usize {
        self.elem_at(range) * self.master.grad_bytes()
    }
}
