//! Updates of tiles that live in host memory, computed on the GPU: up, one step, down.
//!
//! Each thread that updates has one of these, with a stream and device memory of its own. Three of them keep the bus busy both ways and
//! hide the kernel, whose 26 bytes a parameter pass the device's memory some sixty times faster than the bus: up 14 bytes a parameter and
//! down 12 (split bf16), so 55 GB/s each way are 3.9 G parameters a second, if the host memory is pinned ([`Gpu::register`]).

use std::ops::Range;

use super::buffer::HostLoan;
use super::{DeviceBuffer, Gpu, GpuError, Stream, TileAt};
use crate::adamw::{Hyper, Master, Tile, state_tile_bytes};

/// One thread's stream and device memory for streamed updates.
#[derive(Debug)]
pub struct TileUpdater {
    gpu: Gpu,
    stream: Stream,
    tile: DeviceBuffer,
}

/// Where a tile's three parts lie in the device's memory, each at a multiple of this.
const PART_ALIGN_BYTES: usize = 256;

impl TileUpdater {
    /// For tiles of `master` of up to `elems_max` elements; takes [`TileUpdater::device_bytes`] of the device.
    ///
    /// # Errors
    /// Too little device memory, the kernels do not compile, or a call failed.
    pub fn new(gpu: &Gpu, master: Master, elems_max: usize) -> Result<Self, GpuError> {
        gpu.kernels()?;
        Ok(Self {
            stream: gpu.stream()?,
            tile: gpu.alloc(Self::device_bytes(master, elems_max))?,
            gpu: gpu.clone(),
        })
    }

    /// Bytes of device memory one updater takes.
    pub fn device_bytes(master: Master, elems_max: usize) -> usize {
        parts(master, elems_max)[3]
    }

    /// One AdamW step over the parts of a tile; those that do not decay are stepped without weight decay. Elements of no part
    /// stay as they are. The bytes are final when this returns, and those of [`crate::adamw::step_range`].
    ///
    /// The slices may be longer than the tile needs. Panics if one is shorter, or the tile is larger than this was made for, or a part
    /// is not within the tile.
    ///
    /// # Errors
    /// A call failed. The tile is lost then: some of its bytes may be of the next step and some not.
    pub fn update(
        &mut self,
        hyper: &Hyper,
        tile: Tile<'_>,
        parts_of_tile: &[(Range<usize>, bool)],
    ) -> Result<(), GpuError> {
        let Tile {
            master,
            param,
            state,
            grad,
            elems,
        } = tile;
        let [param_at, state_at, grad_at, end] = parts(master, elems);
        assert!(
            end <= self.tile.bytes(),
            "a tile of {elems} elements needs {end} bytes, this updater has {}",
            self.tile.bytes()
        );
        let param = &mut param[..elems * master.param_bytes()];
        let state = &mut state[..state_tile_bytes(master, elems)];
        let grad = &grad[..elems * master.grad_bytes()];
        let kernels = self.gpu.kernels()?;
        let lent = HostLoan(&self.stream);
        let up = [(param_at, &*param), (state_at, &*state), (grad_at, grad)];
        // SAFETY: the slices are borrowed until this function returns, which `lent` lets it do only after the copies. The copies down
        // are enqueued behind those up.
        unsafe { self.gpu.enqueue_upload(&self.stream, &self.tile, &up)? };
        let at = TileAt {
            master,
            param: self.tile.at(param_at),
            state: self.tile.at(state_at),
            grad: self.tile.at(grad_at),
            elems,
        };
        for (range, decays) in parts_of_tile {
            kernels.adamw_range(&self.stream, &hyper.of_part(*decays), at, range.clone())?;
        }
        let mut down = [(param_at, param), (state_at, state)];
        // SAFETY: as above; the borrows of these two are exclusive.
        unsafe {
            self.gpu
                .enqueue_download(&self.stream, &self.tile, &mut down)?
        };
        lent.settle()
    }
}

/// Where `param`, `state` and `grad` start, and where the last one ends.
fn parts(master: Master, elems: usize) -> [usize; 4] {
    let mut places = [0; 4];
    let bytes = [
        elems * master.param_bytes(),
        state_tile_bytes(master, elems),
        elems * master.grad_bytes(),
    ];
    for (i, bytes) in bytes.into_iter().enumerate() {
        places[i + 1] = places[i] + bytes.next_multiple_of(PART_ALIGN_BYTES);
    }
    places
}
