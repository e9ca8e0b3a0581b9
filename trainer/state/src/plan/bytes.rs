//! Bytes of a process's tiles, and bytes that cross the bus to its GPU.

use serde::Serialize;

/// Bytes that cross the bus to a GPU in one step of one process.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct BusBytes {
    /// To the GPU.
    pub up_bytes: u64,
    /// From the GPU.
    pub down_bytes: u64,
}

impl BusBytes {
    /// Bytes for a process whose `tiles` are in host memory or on devices. Weights cross the bus `gathers`
    /// times; other ranks' shards arrive over links between GPUs. The fraction `on_gpu_share` of the update
    /// runs on the GPU, with state copied in both directions. `away_bytes` of block inputs are copied in both
    /// directions.
    pub fn new(tiles: &TileSums, gathers: u64, on_gpu_share: f64, away_bytes: u64) -> Self {
        let streamed = |bytes: u64| (bytes as f64 * on_gpu_share) as u64;
        Self {
            up_bytes: gathers * tiles.param_bytes + streamed(tiles.sum_bytes()) + away_bytes,
            down_bytes: tiles.grad_bytes
                + streamed(tiles.param_bytes + tiles.state_bytes)
                + away_bytes,
        }
    }

    /// Adds a copy of `bytes` that goes to host memory once and comes back once.
    pub fn with_copy(self, bytes: u64) -> Self {
        Self {
            up_bytes: self.up_bytes + bytes,
            down_bytes: self.down_bytes + bytes,
        }
    }

    /// Adds `bytes` of weights that are gathered again.
    pub fn with_gathers(self, bytes: u64) -> Self {
        Self {
            up_bytes: self.up_bytes + bytes,
            ..self
        }
    }

    /// Adds `bytes` that commits copy from the GPU.
    pub fn with_commits(self, bytes: u64) -> Self {
        Self {
            down_bytes: self.down_bytes + bytes,
            ..self
        }
    }

    /// Seconds at `bytes_per_s` in each direction.
    pub fn s(&self, bytes_per_s: f64) -> f64 {
        self.up_bytes.max(self.down_bytes) as f64 / bytes_per_s
    }
}

/// Bytes of a process's tiles, and of their gradients.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct TileSums {
    pub param_bytes: u64,
    pub state_bytes: u64,
    pub grad_bytes: u64,
}

/// Part of the bus's rate at which tiles are updated on a GPU: each is five copies of less than 2 MB. Of 50 GB/s each way, 34 came with fp32
/// masters and moments and 30 in bf16.
const STREAMED_SHARE: f64 = 0.62;

impl TileSums {
    pub fn sum_bytes(&self) -> u64 {
        self.param_bytes + self.state_bytes + self.grad_bytes
    }

    /// The tiles that are not in `part`.
    pub fn without(&self, part: &Self) -> Self {
        Self {
            param_bytes: self.param_bytes - part.param_bytes,
            state_bytes: self.state_bytes - part.state_bytes,
            grad_bytes: self.grad_bytes - part.grad_bytes,
        }
    }

    /// Seconds of an update for which all tiles are copied to the GPU and back over a bus of `bytes_per_s` each way.
    pub fn streamed_s(&self, bytes_per_s: f64) -> f64 {
        self.sum_bytes() as f64 / (STREAMED_SHARE * bytes_per_s)
    }
}
