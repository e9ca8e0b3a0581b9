//! Measures how fast pinned host memory and a GPU exchange bytes.

use std::sync::Barrier;
use std::time::Instant;

use super::pinned::PinnedMemory;
use super::{DeviceBuffer, Gpu, GpuError, Stream};

/// Bytes of one copy: a millisecond on the fastest bus, of which starting and waiting are a small part.
const COPY_BYTES: usize = 64 << 20;

/// Copies each way: 10 ms on the fastest bus, 0.3 s on a slow one.
const COPIES: usize = 8;

/// Rates of copies between pinned host memory and a GPU, both ways at once.
#[derive(Clone, Copy, Debug)]
pub struct CopyRates {
    /// Bytes per second to the GPU.
    pub to_gpu_bytes_per_s: f64,
    /// Bytes per second from the GPU.
    pub from_gpu_bytes_per_s: f64,
}

impl Gpu {
    /// Measures both rates at the same time. Needs 128 MiB of the GPU's memory, and of host memory that may be locked.
    ///
    /// # Errors
    /// Too little memory, or a call failed.
    pub fn copy_rates(&self) -> Result<CopyRates, GpuError> {
        let (mut to, mut from) = (Direction::new(self)?, Direction::new(self)?);
        let start = Barrier::new(2);
        let (to_gpu, from_gpu) = std::thread::scope(|scope| {
            let down = scope.spawn(|| {
                start.wait();
                from.rate(Direction::download)
            });
            start.wait();
            let up = to.rate(Direction::upload);
            (up, down.join().expect("copies do not panic"))
        });
        Ok(CopyRates {
            to_gpu_bytes_per_s: to_gpu?,
            from_gpu_bytes_per_s: from_gpu?,
        })
    }
}

/// Memory and stream of the copies in one direction.
struct Direction {
    gpu: Gpu,
    stream: Stream,
    buffer: DeviceBuffer,
    host: PinnedMemory,
}

impl Direction {
    /// Allocates the memory, and makes a copy each way: the first ones are slower.
    fn new(gpu: &Gpu) -> Result<Self, GpuError> {
        let mut made = Self {
            gpu: gpu.clone(),
            stream: gpu.stream()?,
            buffer: gpu.alloc(COPY_BYTES)?,
            host: PinnedMemory::new(gpu, COPY_BYTES)?,
        };
        made.upload()?;
        made.download()?;
        Ok(made)
    }

    fn rate(&mut self, copy: impl Fn(&mut Self) -> Result<(), GpuError>) -> Result<f64, GpuError> {
        let start = Instant::now();
        for _ in 0..COPIES {
            copy(self)?;
        }
        Ok((COPIES * COPY_BYTES) as f64 / start.elapsed().as_secs_f64())
    }

    fn upload(&mut self) -> Result<(), GpuError> {
        let bytes = self.host.bytes_mut(0, COPY_BYTES);
        self.gpu.upload(&self.stream, &self.buffer, &[(0, bytes)])
    }

    fn download(&mut self) -> Result<(), GpuError> {
        let bytes = self.host.bytes_mut(0, COPY_BYTES);
        self.gpu
            .download(&self.stream, &self.buffer, &mut [(0, bytes)])
    }
}
