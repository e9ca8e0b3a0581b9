//! A plan for other programs: `trainer plan --json`. Field names are stable; a change of meaning raises the
//! version.

use serde::Serialize;

use super::problems::ProblemKind;
use super::{
    BusBytes, CheckpointsPlan, Choice, ComputeMemory, FileSystem, Hardware, InputsIn, Outlook,
    Plan, PlanError, Problem, SequenceExchange, attention_kernel_name, checkpointing_name,
};

/// Version of the JSON report; raised when a field changes its name or meaning.
pub const REPORT_VERSION: u32 = 1;

/// A whole plan. Bytes and times are for all processes together unless a name contains `process`.
#[derive(Clone, Debug, Serialize)]
pub struct Report {
    pub version: u32,
    /// Whether the run can start on this machine.
    pub fits: bool,
    pub problems: Vec<Problem>,
    pub parameters: u64,
    pub units_count: usize,
    /// Parameter and state tiles of all processes.
    pub tiles_count: usize,
    pub tokens_per_step: u64,
    /// Micro-batches of a step, in each process.
    pub gradient_accumulation_steps: usize,
    /// Processes of the run, on all nodes.
    pub ranks: u32,
    /// Ranks among them that divide each sequence.
    pub sequence_parallel: u32,
    /// Nodes of the run. Host memory, devices and bytes of a step are those of one node.
    pub nodes: u32,
    pub hardware: Hardware,
    pub host: HostReport,
    /// GPU memory in bytes; `None` without a GPU.
    pub gpu: Option<GpuReport>,
    /// Space on devices for both generations of tiles and for block inputs.
    pub device_bytes: u64,
    /// Part of the space on devices that is for block inputs.
    pub device_input_bytes: u64,
    pub step: StepReport,
    pub bound: BoundReport,
    /// Duration and wear of the whole run, at the bound.
    pub outlook: Outlook,
    /// `None` for a run that makes no checkpoints.
    pub checkpoints: Option<CheckpointsPlan>,
    /// File systems that a start writes to, with their free space.
    pub space: Vec<FileSystem>,
    pub chosen: ChosenReport,
    /// Settings that the plan chose, with reasons.
    pub choices: Vec<Choice>,
}

/// Output instead of a [`Report`] if planning failed.
#[derive(Clone, Debug, Serialize)]
pub struct Refusal {
    pub version: u32,
    /// Always false.
    pub fits: bool,
    pub problems: Vec<Problem>,
}

impl Refusal {
    /// Wraps `error`.
    pub fn new(error: &PlanError) -> Self {
        let problem = match error {
            PlanError::Refused(problem) => problem.clone(),
            error => Problem::new(
                ProblemKind::Settings,
                error.to_string(),
                "change the setting named in the message",
            ),
        };
        Self {
            version: REPORT_VERSION,
            fits: false,
            problems: vec![problem],
        }
    }
}

/// Host memory of one process by purpose.
#[derive(Clone, Debug, Serialize)]
pub struct HostReport {
    pub process_bytes: u64,
    pub node_bytes: u64,
    pub resident_tile_bytes: u64,
    pub staging_bytes: u64,
    pub grad_bytes: u64,
    /// Block inputs that are kept in host memory for a GPU.
    pub input_bytes: u64,
    /// Memory that block inputs on devices pass through.
    pub input_slot_bytes: u64,
    /// Copy of all parameters that the ranks of one of several nodes keep together; 0 if they keep none.
    pub node_copy_bytes: u64,
    /// Memory that tiles in a GPU's memory pass through, without a store.
    pub gpu_staging_bytes: u64,
    /// Memory that tiles pass through on their way to checkpoints.
    pub checkpoint_buffer_bytes: u64,
    /// Memory for computing; all zero if a GPU computes.
    pub compute: ComputeMemory,
}

/// GPU memory of one process by purpose.
#[derive(Clone, Debug, Serialize)]
pub struct GpuReport {
    pub process_bytes: u64,
    /// Parameters, state and gradients whose device is `none`.
    pub tile_bytes: u64,
    pub compute: ComputeMemory,
}

/// Bytes moved in a step.
#[derive(Clone, Debug, Serialize)]
pub struct StepReport {
    pub forward_read_bytes: u64,
    pub backward_read_bytes: u64,
    pub update_read_bytes: u64,
    pub read_bytes: u64,
    pub written_bytes: u64,
    /// Part of the written bytes that is gradients not kept in host memory; they are read once too.
    pub grad_written_bytes: u64,
    /// Part of the written bytes that is block inputs on devices, in whole tiles; they are read once too.
    pub input_written_bytes: u64,
    /// Bytes that cross the bus of one process.
    pub bus_process: BusBytes,
    /// Bytes that a node sends to other nodes, and that it receives.
    pub network_bytes: u64,
    /// What a process sends to the others with which it divides each sequence.
    pub sequence_exchange_process: SequenceExchange,
}

/// The shortest time of a step.
#[derive(Clone, Debug, Serialize)]
pub struct BoundReport {
    pub s: f64,
    pub wall: &'static str,
    pub terms: Vec<TermReport>,
    pub tokens_per_s: f64,
    /// Rate of all processes together, in 10^12 operations per second.
    pub tflops: f64,
    /// Operations of a step of all processes: 6 for each parameter and token, and those of attention.
    pub operations: f64,
    /// Computing time alone.
    pub forward_s: f64,
    pub backward_s: f64,
    /// Part of both for attention.
    pub attention_s: f64,
    /// Part of both in which ranks exchange parts of sequences.
    pub sequence_exchange_s: f64,
    pub update_s: f64,
    pub bus_s: f64,
    pub network_s: f64,
}

/// One lower limit of a step's time.
#[derive(Clone, Debug, Serialize)]
pub struct TermReport {
    pub wall: &'static str,
    pub what: &'static str,
    pub s: f64,
}

/// Settings in effect, chosen or configured.
#[derive(Clone, Debug, Serialize)]
pub struct ChosenReport {
    pub tile_elems: u64,
    pub param_tile_bytes: u64,
    pub state_tile_bytes: u64,
    /// Staging of one process.
    pub staging_bytes: u64,
    pub commit_every: u64,
    pub param_resident_fraction: f64,
    pub state_resident_fraction: f64,
    /// Fraction of the gradients that stays in host memory until the optimizer step.
    pub grad_resident_fraction: f64,
    /// Of the parameters whose tiles are in GPU memory.
    pub gpu_resident_fraction: f64,
    pub iodepth: u32,
    pub optimizer_step: &'static str,
    pub optimizer_device: &'static str,
    pub activation_checkpointing: &'static str,
    /// Number of blocks that keep what the next level does.
    pub blocks_keeping_more: usize,
    /// Kernels that compute attention.
    pub attention: &'static str,
    pub activations: &'static str,
    pub mlp_chunks: usize,
    /// Micro-batches of a step that are processed together.
    pub micro_batch_group: usize,
}

impl Plan {
    /// Converts the plan for other programs.
    pub fn report(&self) -> Report {
        let memory = &self.memory;
        let bytes = self.node_bytes;
        let on_gpu = self.hardware.gpu.is_some();
        Report {
            version: REPORT_VERSION,
            fits: self.problems.is_empty(),
            problems: self.problems.clone(),
            parameters: self.params_count,
            units_count: self.units.len(),
            tiles_count: memory.table_count,
            tokens_per_step: self.tokens,
            gradient_accumulation_steps: self.micro_batches,
            ranks: self.ranks,
            sequence_parallel: self.sequence_ranks,
            nodes: self.nodes(),
            hardware: self.hardware.clone(),
            host: HostReport {
                process_bytes: self.host_bytes(),
                node_bytes: self.node_host_bytes(),
                resident_tile_bytes: self.host_resident_bytes(),
                staging_bytes: memory.staging_bytes(),
                grad_bytes: self.host_grad_bytes(),
                input_bytes: self.compute.away_bytes,
                input_slot_bytes: memory.scratch_slot_bytes(),
                node_copy_bytes: self.node_copy_bytes(),
                gpu_staging_bytes: self.gpu_staging_bytes(),
                checkpoint_buffer_bytes: self.checkpoint_buffer_bytes(),
                compute: if on_gpu {
                    ComputeMemory::default()
                } else {
                    self.compute
                },
            },
            gpu: on_gpu.then(|| GpuReport {
                process_bytes: self.gpu_bytes(),
                tile_bytes: self.gpu_tiles.sum_bytes(),
                compute: self.compute,
            }),
            device_bytes: self.device_bytes(),
            device_input_bytes: self.device_input_bytes(),
            step: StepReport {
                forward_read_bytes: bytes.forward_read_bytes as u64,
                backward_read_bytes: bytes.backward_read_bytes as u64,
                update_read_bytes: bytes.update_read_bytes as u64,
                read_bytes: bytes.all_read_bytes() as u64,
                written_bytes: bytes.all_written_bytes() as u64,
                grad_written_bytes: bytes.grad_written_bytes as u64,
                input_written_bytes: bytes.scratch_written_bytes as u64,
                bus_process: self.bus,
                network_bytes: self.network_bytes,
                sequence_exchange_process: self.exchange,
            },
            bound: self.bound_report(),
            outlook: self.outlook(),
            checkpoints: self.checkpoints,
            space: self.space.clone(),
            chosen: ChosenReport {
                tile_elems: self.swapper.tile_elems,
                param_tile_bytes: memory.param_slot_bytes,
                state_tile_bytes: memory.state_slot_bytes,
                staging_bytes: memory.staging_bytes(),
                commit_every: self.swapper.commit_every,
                param_resident_fraction: self.swapper.param_fraction,
                state_resident_fraction: self.swapper.state_fraction,
                grad_resident_fraction: self.swapper.grad_fraction,
                gpu_resident_fraction: self.gpu_fraction(),
                iodepth: self.swapper.iodepth,
                optimizer_step: match self.swapper.schedule {
                    swapper::Schedule::Immediate => "immediate",
                    swapper::Schedule::Deferred => "deferred",
                },
                optimizer_device: self.optimizer_device.name(),
                activation_checkpointing: checkpointing_name(self.checkpointing.level),
                blocks_keeping_more: self.checkpointing.more_blocks,
                attention: attention_kernel_name(self.attention),
                activations: match self.inputs_in {
                    InputsIn::Drives => "nvme",
                    InputsIn::Place if on_gpu => "gpu",
                    InputsIn::Place | InputsIn::Host => "cpu",
                },
                mlp_chunks: self.mlp_chunks,
                micro_batch_group: self.micro_batch_group,
            },
            choices: self.choices.clone(),
        }
    }

    fn bound_report(&self) -> BoundReport {
        let bound = &self.bound;
        let terms = bound.terms.iter().map(|term| TermReport {
            wall: term.wall.word(),
            what: term.what,
            s: term.s,
        });
        let tokens_per_s = self.tokens as f64 / bound.s;
        BoundReport {
            s: bound.s,
            wall: bound.wall.word(),
            terms: terms.collect(),
            tokens_per_s,
            tflops: self.step_operations() / bound.s / 1e12,
            operations: self.step_operations(),
            attention_s: self.attention_s,
            sequence_exchange_s: self.exchange_s(self.exchange.sum_bytes()),
            forward_s: self.forward_s(),
            backward_s: self.compute_s() - self.forward_s(),
            update_s: self.rates.update_s,
            bus_s: self.rates.bus_s,
            network_s: self.rates.network_s,
        }
    }
}
