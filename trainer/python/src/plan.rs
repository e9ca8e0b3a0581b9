//! What a run will take before it starts: host memory, device files, bytes a step, and the bound of a step's time.

use std::path::{Path, PathBuf};

use kernels::gpu::Gpu;
use offload_support::memory::available_bytes;
use offload_support::pcie::{self, Link};
use pyo3::prelude::*;
use serde::{Deserialize, Serialize};
use swapper::{Bound, Durability, Kind, Layout, StepBytes, StepRates, bound};
use training_state::metrics::MetricsFile;
use training_state::plan::assumed::{
    DRIVE_READ_BYTES_PER_S, DRIVE_WRITE_BYTES_PER_S, bus_bytes_per_s,
};
use training_state::plan::updaters::{core_params_per_s, script_update_s};
use training_state::plan::{Directions, MeasuredRates, TileSums};
use training_state::store::{StoreFiles, device_file_bytes, is_in_memory};

use crate::errors::{Error, failed};
use crate::open::{Plan, swapper_settings};

/// What another machine than this one has.
#[derive(Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
struct Machine {
    host_memory_bytes: Option<u64>,
    /// Rates of all drives together.
    read_bytes_per_s: Option<f64>,
    write_bytes_per_s: Option<f64>,
}

/// What the run that the JSON text `plan` describes will take, as JSON; on this machine, or as far as the JSON text `machine` says, on that one.
#[pyfunction]
#[pyo3(name = "plan", signature = (plan, machine = "{}"))]
pub(crate) fn of_run(py: Python<'_>, plan: &str, machine: &str) -> PyResult<String> {
    let wrong = |error: serde_json::Error| Error::new_err(error.to_string());
    let plan: Plan = serde_json::from_str(plan).map_err(wrong)?;
    let machine: Machine = serde_json::from_str(machine).map_err(wrong)?;
    let outlook = py.detach(|| Outlook::new(&plan, &machine))?;
    Ok(serde_json::to_string(&outlook).expect("figures are plain data"))
}

/// Host memory that this machine and the process's control groups leave, bytes; None if the kernel does not say.
#[pyfunction]
pub(crate) fn host_available_bytes() -> Option<u64> {
    available_bytes()
}

/// The bytes of a size of memory such as `24GiB`.
#[pyfunction]
pub(crate) fn parse_memory(text: &str) -> PyResult<u64> {
    training_state::plan::parse_memory(text).map_err(Error::new_err)
}

/// A count such as `7000000000` or `7B`, at least 1.
#[pyfunction]
pub(crate) fn parse_count(text: &str) -> PyResult<u64> {
    training_state::plan::parse_count(text).map_err(Error::new_err)
}

/// The bytes a second of a rate such as `6.2GB/s`.
#[pyfunction]
pub(crate) fn parse_rate(text: &str) -> PyResult<f64> {
    training_state::plan::parse_rate(text).map_err(Error::new_err)
}

/// The bytes a second that drives such as `2x6.2GB/s:3.2GB/s` read and write together.
#[pyfunction]
pub(crate) fn parse_drives(text: &str) -> PyResult<(f64, f64)> {
    let drives = training_state::plan::parse_drives(text).map_err(Error::new_err)?;
    let all = |rate| rate * drives.count as f64;
    Ok((all(drives.read_bytes_per_s), all(drives.write_bytes_per_s)))
}

/// What Muon takes of the GPU that makes matrices with these rows and columns orthogonal: the most memory for one of them, and the bytes that cross
/// the bus to it, and back as directions, with `elem_bytes` a number.
#[pyfunction]
pub(crate) fn muon_directions(matrices: Vec<[usize; 2]>, elem_bytes: usize) -> (u64, u64) {
    let all = Directions::new(matrices);
    (all.working_bytes, all.bus_bytes(1.0, elem_bytes))
}

/// The link of this machine's first GPU, if the kernel says it.
fn first_link() -> Option<Link> {
    let gpu = Gpu::open(0).ok()?;
    Link::of_busy_gpu(&Path::new(pcie::DEVICES).join(&gpu.info().pci))
}

/// The figures of a plan; `offloadd/_plan.py` writes them for people.
#[derive(Serialize)]
pub(crate) struct Outlook {
    tiles: usize,
    tile_elems: u64,
    /// Elements of a rank's part of each unit; the last ranks' parts may be shorter.
    shard_elems: Vec<u64>,
    host_bytes: u64,
    /// Memory that the machine and this process's control groups leave; `None` if the kernel does not say.
    host_available_bytes: Option<u64>,
    resident_bytes: u64,
    staging_bytes: u64,
    grad_bytes: u64,
    /// Bytes of the slots of inputs of blocks that wait on devices, and of their tiles there.
    input_slot_bytes: u64,
    input_bytes: u64,
    /// Bytes of tiles on devices, both generations, and of each device file.
    device_bytes: u64,
    file_bytes: u64,
    forward_read_bytes: f64,
    backward_read_bytes: f64,
    update_read_bytes: f64,
    written_bytes: f64,
    read_bytes_per_s: f64,
    write_bytes_per_s: f64,
    bus_bytes_per_s: f64,
    /// Each `given`, `measured` when the run last started, or `assumed`.
    read_source: &'static str,
    write_source: &'static str,
    bound_s: f64,
    wall: &'static str,
    /// Seconds of the last step in metrics.jsonl, and of its computing.
    last_step_s: Option<f64>,
    compute_s: Option<f64>,
    /// Why the device files do not fit.
    problem: Option<String>,
    /// The first directory of device files that are in memory.
    in_memory: Option<PathBuf>,
}

impl Outlook {
    fn new(plan: &Plan, machine: &Machine) -> PyResult<Self> {
        let settings = swapper_settings(plan)?;
        let memory = settings.plan().map_err(failed)?;
        let layout = settings.cut().map_err(failed)?;
        let units = 0..settings.units.len();
        let bytes = StepBytes {
            scratch_written_bytes: plan.moved_bytes as f64,
            scratch_read_bytes: plan.moved_bytes as f64,
            ..settings.step_bytes().map_err(failed)?
        };
        let drives = plan.nvme.len() as u64;
        let found = MeasuredRates::read(&plan.run_dir).unwrap_or_default();
        let measured = (found.read_bytes_per_s).zip(found.write_bytes_per_s);
        let (read, write) = measured.unwrap_or((
            DRIVE_READ_BYTES_PER_S * drives.max(1) as f64,
            DRIVE_WRITE_BYTES_PER_S * drives.max(1) as f64,
        ));
        let (given_read, given_write) = (machine.read_bytes_per_s, machine.write_bytes_per_s);
        let read_bytes_per_s = given_read.unwrap_or(read);
        let write_bytes_per_s = given_write.unwrap_or(write);
        let on_bus = plan.bus_bytes > 0 || plan.update_gpu.is_some();
        let bus_bytes_per_s = bus_bytes_per_s(on_bus.then(first_link).flatten());
        let last = MetricsFile::last(&plan.run_dir);
        // Equal ranks of a node share its drives.
        let ranks = settings.local().len() as f64;
        let Bound { s, wall, .. } = bound(
            settings.schedule,
            &bytes,
            &StepRates {
                read_bytes_per_s: read_bytes_per_s / ranks,
                write_bytes_per_s: write_bytes_per_s / ranks,
                staging_bytes: (memory.staging_bytes() + memory.scratch_slot_bytes()) as f64,
                forward_s: last.as_ref().map_or(0.0, |last| last.forward_s),
                backward_s: last.as_ref().map_or(0.0, |last| last.backward_s),
                update_s: match &last {
                    Some(last) => last.update_s,
                    None => update_s(plan, &layout, bus_bytes_per_s)?,
                },
                bus_s: plan.bus_bytes as f64 / bus_bytes_per_s,
                network_s: 0.0,
            },
        );
        let has_files = !plan.nvme.is_empty();
        let file_bytes = match has_files {
            true => device_file_bytes(&memory, Durability::Committed, drives),
            false => 0,
        };
        let problem = StoreFiles::new(&plan.nvme, &plan.job, file_bytes)
            .check_space()
            .err();
        Ok(Self {
            tiles: memory.table_count,
            tile_elems: settings.tile_elems,
            shard_elems: units.map(|unit| layout.shard_elems(unit)).collect(),
            host_bytes: memory.host_bytes(),
            host_available_bytes: machine.host_memory_bytes.or_else(available_bytes),
            resident_bytes: memory.resident_bytes(),
            staging_bytes: memory.staging_bytes(),
            grad_bytes: memory.grad_bytes(),
            input_slot_bytes: memory.scratch_slot_bytes(),
            input_bytes: memory.scratch.bytes(),
            device_bytes: match plan.has_store() {
                true => memory.device_bytes(Durability::Committed),
                false => 0,
            },
            file_bytes,
            forward_read_bytes: bytes.forward_read_bytes,
            backward_read_bytes: bytes.backward_read_bytes,
            update_read_bytes: bytes.update_read_bytes,
            written_bytes: bytes.written_bytes,
            read_bytes_per_s,
            write_bytes_per_s,
            bus_bytes_per_s,
            read_source: source(given_read, measured),
            write_source: source(given_write, measured),
            bound_s: s,
            wall: wall.word(),
            last_step_s: last.as_ref().map(|last| last.step_s),
            compute_s: last.as_ref().map(|last| last.forward_s + last.backward_s),
            problem: problem.map(|problem| problem.to_string()),
            in_memory: plan.nvme.iter().find(|dir| is_in_memory(dir)).cloned(),
        })
    }
}

/// Where a rate is from.
fn source(given: Option<f64>, measured: Option<(f64, f64)>) -> &'static str {
    match (given, measured) {
        (Some(_), _) => "given",
        (None, Some(_)) => "measured",
        (None, None) => "assumed",
    }
}

/// Seconds in which this rank updates its tiles.
fn update_s(plan: &Plan, layout: &Layout, bus_bytes_per_s: f64) -> PyResult<f64> {
    let formats = plan.formats()?;
    let (mut core_s, mut tiles) = (0.0, TileSums::default());
    for range in 0..layout.ranges().len() as u32 {
        let unit = layout.ranges()[range as usize].unit;
        let Some(update) = &formats[unit].update else {
            continue;
        };
        core_s += layout.elems(range) as f64 / core_params_per_s(update.format.master);
        let bytes = |kind| layout.content_bytes(kind, range) as u64;
        tiles.param_bytes += bytes(Kind::Param);
        tiles.state_bytes += bytes(Kind::State);
        tiles.grad_bytes += bytes(Kind::Grad);
    }
    let gpu_s = tiles.streamed_s(bus_bytes_per_s);
    let has_gpu = plan.update_gpu.is_some();
    Ok(script_update_s(plan.update_threads, has_gpu, core_s, gpu_s))
}
