//! The GPU of the tests: the first one, or a line that says why there is none.

use std::ops::Deref;
use std::sync::{Mutex, MutexGuard, PoisonError};

use kernels::adamw::{Hyper, Master, Rounding, TileFormat, state_tile_bytes};
use kernels::gpu::{DeviceBuffer, Gpu, Stream};
use kernels::reduce::GradType;

use crate::shared::{AlignedBytes, OwnedTile, Random, formats};

pub(crate) const HYPER: Hyper = Hyper {
    lr: 3e-4,
    beta1: 0.9,
    beta2: 0.95,
    eps: 1e-8,
    weight_decay: 0.1,
    step: 7,
    grad_scale: 0.37,
    rounding: Rounding {
        seed: 9,
        unit: 3,
        first_elem: u32::MAX as u64 - 100,
    },
};

/// A GPU for one test at a time: freeing memory waits for all work of the device, including that of other tests.
pub(crate) struct TestGpu {
    gpu: Gpu,
    _alone: MutexGuard<'static, ()>,
}

impl Deref for TestGpu {
    type Target = Gpu;
    fn deref(&self) -> &Gpu {
        &self.gpu
    }
}

/// Returns the first GPU, `None` if there is none. A GPU that fails is a failure of the test.
pub(crate) fn gpu() -> Option<TestGpu> {
    static ALONE: Mutex<()> = Mutex::new(());
    match Gpu::open(0) {
        Ok(gpu) => Some(TestGpu {
            gpu,
            _alone: ALONE.lock().unwrap_or_else(PoisonError::into_inner),
        }),
        Err(error) if error.is_absent() => {
            let thread = std::thread::current();
            let test = thread.name().unwrap_or("a test");
            println!("skipped: no GPU: kernels/tests/gpu {test}");
            None
        }
        Err(error) => panic!("{error}"),
    }
}

/// A tile on the device, each part surrounded by bytes of 0xAB that must not be written.
pub(crate) struct DeviceTile {
    pub(crate) param: DeviceBuffer,
    pub(crate) state: DeviceBuffer,
    pub(crate) grad: DeviceBuffer,
}

/// Offset of a part in its buffer; a multiple of 64 and not of 128.
pub(crate) const PART_AT: usize = 192;

const AROUND: u8 = 0xAB;

impl DeviceTile {
    pub(crate) fn upload(gpu: &Gpu, stream: &Stream, tile: &OwnedTile) -> Self {
        assert_eq!(
            tile.state.len(),
            state_tile_bytes(tile.format, tile.elems),
            "the tile is not larger than its elements"
        );
        let put = |bytes: &[u8]| {
            let mut framed = vec![AROUND; bytes.len() + 2 * PART_AT];
            framed[PART_AT..PART_AT + bytes.len()].copy_from_slice(bytes);
            let buffer = gpu.alloc(framed.len()).unwrap();
            gpu.upload(stream, &buffer, &[(0, &framed)]).unwrap();
            buffer
        };
        Self {
            param: put(&tile.param),
            state: put(&tile.state),
            grad: put(&tile.grad),
        }
    }

    /// Waits, and downloads the tile.
    pub(crate) fn download(&self, gpu: &Gpu, stream: &Stream, like: &OwnedTile) -> OwnedTile {
        let mut tile = OwnedTile::zeroed(like.format, like.elems);
        tile.grad = AlignedBytes::zeroed(like.grad.len());
        get(gpu, stream, &self.param, &mut tile.param);
        get(gpu, stream, &self.state, &mut tile.state);
        get(gpu, stream, &self.grad, &mut tile.grad);
        tile
    }
}

fn get(gpu: &Gpu, stream: &Stream, from: &DeviceBuffer, to: &mut [u8]) {
    let mut framed = vec![0; to.len() + 2 * PART_AT];
    gpu.download(stream, from, &mut [(0, &mut framed)]).unwrap();
    let (before, rest) = framed.split_at(PART_AT);
    let (inner, after) = rest.split_at(to.len());
    let untouched = before.iter().chain(after).all(|byte| *byte == AROUND);
    assert!(untouched, "something was written outside the tile");
    to.copy_from_slice(inner);
}

/// Uploads bytes to `offset_bytes` of a buffer of their own.
pub(crate) fn uploaded(
    gpu: &Gpu,
    stream: &Stream,
    offset_bytes: usize,
    bytes: &[u8],
) -> DeviceBuffer {
    let buffer = gpu.alloc(offset_bytes + bytes.len()).unwrap();
    gpu.upload(stream, &buffer, &[(offset_bytes, bytes)])
        .unwrap();
    buffer
}

/// Downloads `len` bytes of a buffer.
pub(crate) fn downloaded(
    gpu: &Gpu,
    stream: &Stream,
    buffer: &DeviceBuffer,
    offset_bytes: usize,
    len: usize,
) -> Vec<u8> {
    let mut bytes = vec![0; len];
    gpu.download(stream, buffer, &mut [(offset_bytes, &mut bytes)])
        .unwrap();
    bytes
}

/// Every format of a tile, with the types of gradients that it takes.
pub(crate) fn grads() -> impl Iterator<Item = (TileFormat, GradType)> {
    formats().flat_map(|format| {
        let fp32 = (format.master != Master::Fp32).then_some(GradType::Fp32);
        let types = [Some(format.master.grad_type()), fp32];
        types
            .into_iter()
            .flatten()
            .map(move |grad_type| (format, grad_type))
    })
}

/// [`OwnedTile::hard`] with gradients of any type.
pub(crate) fn hard_tile(
    format: TileFormat,
    grad_type: GradType,
    elems: usize,
    random: &mut Random,
) -> OwnedTile {
    let mut tile = OwnedTile::hard(format, elems, random);
    if grad_type != format.master.grad_type() {
        tile.grad = AlignedBytes::zeroed(elems * grad_type.elem_bytes());
        random.fill_hard(&mut tile.grad, grad_type.elem_bytes());
    }
    tile
}

/// Type of a tile's gradients, which their bytes tell.
pub(crate) fn grad_type_of(tile: &OwnedTile) -> GradType {
    match tile.grad.len() == tile.elems * 4 {
        true => GradType::Fp32,
        false => tile.format.master.grad_type(),
    }
}
