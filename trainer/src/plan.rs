//! What a run will take, known before anything is touched: bytes of host memory and devices, bytes a step moves.
//!
//! ```text
//!   host     resident tiles | staging slots | gradients | unit buffers | activations | computing | text
//!   device   two extents a tile (one with durability none) and the store's own records
//! ```

use std::fmt;

use kernels::adamw::{Master, state_tile_bytes};
use swapper::{
    Backing, MemoryPlan, Staging, StepBytes, StoreSettings, SwapperError, SwapperSettings,
    TileBytes, UnitShape,
};

use crate::compute::{Dtype, working_bytes};
use crate::config::{Durability, RunSettings, Schedule};
use crate::model::{UnitLayout, unit_layouts};
use crate::store::Gib;

/// Staging when the run file is silent: a tenth of the machine's memory would be guesswork, this keeps one fast drive busy.
const STAGING_BYTES_DEFAULT: u64 = 1_400_000_000;

/// A device file holds more than tiles: superblocks, catalog, definitions, manifests and the space between extents.
const DEVICE_SLACK_BYTES: u64 = 32 << 20;

/// Why a run cannot start.
#[derive(Debug, thiserror::Error)]
pub enum PlanError {
    #[error(transparent)]
    Swapper(#[from] SwapperError),
    #[error(
        "the run needs {} of host memory, {} is available: set a device to \"nvme\", or lower offload.resident_share, offload.staging_bytes or the micro-batch",
        Gib(*needed_bytes), Gib(*available_bytes)
    )]
    Memory {
        needed_bytes: u64,
        available_bytes: u64,
    },
}

/// What a run takes and moves.
#[derive(Clone, Debug)]
pub struct Plan {
    /// For the swapper; a store's socket and job are filled in when they are known.
    pub swapper: SwapperSettings,
    pub units: Vec<UnitLayout>,
    pub master: Master,
    /// Of tiles, staging and gradients.
    pub memory: MemoryPlan,
    pub step_bytes: StepBytes,
    /// One buffer each for the embedding, a block and the head.
    pub unit_buffer_bytes: u64,
    /// Unit inputs of all micro-batches, kept from forward to backward.
    pub activation_bytes: u64,
    /// Most that computing one unit takes on top.
    pub working_bytes: u64,
    pub text_bytes: u64,
    params_count: u64,
}

impl Plan {
    /// Plans a run.
    ///
    /// # Errors
    /// Settings the swapper cannot work with: tiles too large, staging too small.
    pub fn new(settings: &RunSettings, text_bytes: u64) -> Result<Self, PlanError> {
        let units = unit_layouts(&settings.model);
        let master = match settings.dtype {
            Dtype::Bf16 => Master::SplitBf16,
            Dtype::Fp32 => Master::Fp32,
        };
        let swapper = swapper_settings(settings, &units, master);
        let memory = swapper.plan()?;
        let step_bytes = swapper.step_bytes()?;
        let elem_bytes = settings.dtype.elem_bytes() as u64;
        let buffers = [&units[0], &units[1], &units[units.len() - 1]];
        let batch = &settings.batch;
        // Inputs of every block and of the head, and the gradient that comes back.
        let kept = units.len() as u64;
        Ok(Self {
            memory,
            step_bytes,
            unit_buffer_bytes: buffers
                .iter()
                .map(|unit| unit.elems as u64 * elem_bytes)
                .sum(),
            activation_bytes: kept
                * batch.tokens()
                * settings.model.hidden_size as u64
                * elem_bytes,
            working_bytes: working_bytes(
                &settings.model,
                settings.dtype,
                batch.micro_batch,
                batch.seq_len,
                batch.micro_batches,
            ),
            text_bytes,
            params_count: settings.model.params_count() as u64,
            swapper,
            units,
            master,
        })
    }

    /// All host memory.
    pub fn host_bytes(&self) -> u64 {
        self.memory.host_bytes()
            + self.unit_buffer_bytes
            + self.activation_bytes
            + self.working_bytes
            + self.text_bytes
    }

    /// Room on devices, all together; 0 without a store.
    pub fn device_bytes(&self) -> u64 {
        match &self.swapper.backing {
            Backing::Memory => 0,
            Backing::Store(store) => self.memory.device_bytes(store.durability),
        }
    }

    /// Size of each of `count` equal device files of a private store.
    pub fn device_file_bytes(&self, count: u64) -> u64 {
        // Tiles go where a drive is faster: each file has room for an eighth more than its equal part, and a pair of tiles.
        let part_bytes = self.device_bytes().div_ceil(count.max(1));
        let spread_bytes = if count > 1 { part_bytes / 8 } else { 0 };
        (part_bytes + spread_bytes + 2 * self.memory.state_slot_bytes + DEVICE_SLACK_BYTES)
            .next_multiple_of(1 << 20)
    }

    /// Refuses a run that does not fit the memory that is free now.
    ///
    /// # Errors
    /// What is needed and what there is.
    pub fn check_memory(&self) -> Result<(), PlanError> {
        match available_bytes() {
            Some(available_bytes) if available_bytes < self.host_bytes() => {
                Err(PlanError::Memory {
                    needed_bytes: self.host_bytes(),
                    available_bytes,
                })
            }
            _ => Ok(()),
        }
    }
}

impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let memory = &self.memory;
        writeln!(
            f,
            "model     {:.2} M parameters in {} units, {} tiles of {} elements",
            self.params_count as f64 / 1e6,
            self.units.len(),
            memory.table_count,
            self.swapper.tile_elems
        )?;
        writeln!(
            f,
            "host      {}: resident tiles {}, staging {}, gradients {}, unit buffers {}, activations {}, computing {}, text {}",
            Gib(self.host_bytes()),
            Gib(memory.resident_bytes()),
            Gib(memory.staging_bytes()),
            Gib(memory.grad_bytes()),
            Gib(self.unit_buffer_bytes),
            Gib(self.activation_bytes),
            Gib(self.working_bytes),
            Gib(self.text_bytes)
        )?;
        if self.device_bytes() == 0 {
            return write!(f, "devices   nothing");
        }
        writeln!(
            f,
            "devices   {} of tiles, both generations",
            Gib(self.device_bytes())
        )?;
        let bytes = &self.step_bytes;
        write!(
            f,
            "a step    reads {} (forward {}, backward {}, update {}), writes {}",
            Gib(bytes.read_bytes() as u64),
            Gib(bytes.forward_read_bytes as u64),
            Gib(bytes.backward_read_bytes as u64),
            Gib(bytes.update_read_bytes as u64),
            Gib(bytes.written_bytes as u64)
        )
    }
}

fn swapper_settings(
    settings: &RunSettings,
    units: &[UnitLayout],
    master: Master,
) -> SwapperSettings {
    let shapes: Vec<UnitShape> = units
        .iter()
        .map(|unit| UnitShape {
            elems: unit.elems as u64,
        })
        .collect();
    let offload = &settings.offload;
    let backing = if settings.placement.has_store() {
        Backing::Store(StoreSettings {
            socket: offload.socket.clone().unwrap_or_default(),
            job: String::new(),
            durability: match offload.durability {
                Durability::Full => swapper::Durability::Committed,
                Durability::None => swapper::Durability::None,
            },
        })
    } else {
        Backing::Memory
    };
    SwapperSettings {
        tile_elems: offload
            .tile_elems
            .unwrap_or_else(|| swapper::choose_tile_elems(&shapes)),
        units: shapes,
        tile_bytes: tile_bytes(master),
        param_share: settings.placement.param_share.get(),
        state_share: settings.placement.state_share.get(),
        staging: Staging::Bytes(offload.staging_bytes.unwrap_or(STAGING_BYTES_DEFAULT)),
        schedule: match offload.schedule {
            Schedule::AtOnce => swapper::Schedule::AtOnce,
            Schedule::Deferred => swapper::Schedule::Deferred,
        },
        commit_every: offload.commit_every,
        iodepth: offload.iodepth.max(swapper::IODEPTH_MIN),
        backing,
        layout: Vec::new(),
        rank: 0,
        ranks: 1,
    }
}

fn tile_bytes(master: Master) -> TileBytes {
    let state_tile_bytes = match master {
        Master::SplitBf16 => |elems| state_tile_bytes(Master::SplitBf16, elems),
        Master::Fp32 => |elems| state_tile_bytes(Master::Fp32, elems),
        Master::Fp16WholeMaster => |elems| state_tile_bytes(Master::Fp16WholeMaster, elems),
    };
    TileBytes {
        param_bytes_per_elem: master.param_bytes(),
        grad_bytes_per_elem: master.grad_bytes(),
        state_tile_bytes,
    }
}

/// What the machine, or the group this process is confined to, has left. `None` where the kernel does not say.
fn available_bytes() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    let line = text
        .lines()
        .find_map(|line| line.strip_prefix("MemAvailable:"))?;
    let machine = line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()? << 10;
    let number = |name| {
        std::fs::read_to_string(format!("/sys/fs/cgroup/{name}"))
            .ok()?
            .trim()
            .parse::<u64>()
            .ok()
    };
    let group = number("memory.max")
        .zip(number("memory.current"))
        .map(|(max, current)| max.saturating_sub(current));
    Some(group.map_or(machine, |group| group.min(machine)))
}
