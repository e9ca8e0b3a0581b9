//! Finds what does not fit or is missing, and what to change.

use std::fmt;

use offload_support::paths::Word;
use offload_support::units::ApproxBytes;
use serde::Serialize;
use swapper::SwapperError;

use super::choices::why_no_cudnn;
use super::hardware::run_job;
use super::{InputsIn, Plan};
use crate::computation::{Matmuls, fp8_refusal};
use crate::config::{AttentionChoice, DeviceChoice, OptimizerDevice, RunSettings};
use training_state::run::{CheckpointError, DirError, resolved};
use training_state::store::StoreError;

/// Error that keeps a run from starting.
#[derive(Debug, thiserror::Error)]
pub enum PlanError {
    #[error(transparent)]
    Swapper(SwapperError),
    #[error(transparent)]
    Dir(#[from] DirError),
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    #[error(transparent)]
    Store(#[from] StoreError),
    #[error("{0}")]
    Refused(Problem),
}

impl From<SwapperError> for PlanError {
    fn from(error: SwapperError) -> Self {
        match error {
            SwapperError::StagingTooSmall { needed_bytes, .. } => Self::Refused(Problem::new(
                ProblemKind::Settings,
                error.to_string(),
                format!("set offload.staging_bytes = {needed_bytes} or more, or \"auto\""),
            )),
            error => Self::Swapper(error),
        }
    }
}

/// A reason why a run cannot start.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Problem {
    pub kind: ProblemKind,
    /// Description with figures.
    pub what: String,
    /// Remedy; empty if there is none.
    pub change: String,
}

/// Subject of a problem.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum ProblemKind {
    HostMemory,
    GpuMemory,
    DeviceSpace,
    RunDirSpace,
    NoGpu,
    Update,
    Settings,
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.change.as_str() {
            "" => write!(f, "{}", self.what),
            change => write!(f, "{}: {change}", self.what),
        }
    }
}

impl Problem {
    pub(super) fn new(kind: ProblemKind, what: String, change: impl Into<String>) -> Self {
        Self {
            kind,
            what,
            change: change.into(),
        }
    }
}

/// Returns all problems of `plan`, the most decisive first.
pub(super) fn find(plan: &Plan, settings: &RunSettings) -> Vec<Problem> {
    let found = [
        no_gpu(plan, settings),
        update(plan, settings),
        attention(plan, settings),
        matmuls(plan, settings),
        gpu_memory(plan),
        host_memory(plan, settings),
        store_room(plan, settings),
        device_space(plan, settings),
    ];
    found.into_iter().flatten().collect()
}

fn no_gpu(plan: &Plan, settings: &RunSettings) -> Option<Problem> {
    if let Some(why) = &plan.hardware.unusable_gpu {
        let change = "`trainer train` refuses this run too";
        return Some(Problem::new(ProblemKind::NoGpu, why.clone(), change));
    }
    let wanted = settings.train.device == DeviceChoice::Gpu;
    (wanted && plan.hardware.gpu.is_none()).then(|| {
        Problem::new(
            ProblemKind::NoGpu,
            format!(
                "train.device is \"gpu\", but there is no GPU: {}",
                plan.hardware.no_gpu_details
            ),
            "install its driver and libraries, or set train.device = \"cpu\"",
        )
    })
}

fn update(plan: &Plan, settings: &RunSettings) -> Option<Problem> {
    let wanted = settings.offload.optimizer_device;
    let what = |why: String| format!("offload.optimizer_device is \"{}\", {why}", wanted.name());
    match (&plan.hardware.gpu, wanted) {
        // Already reported by no_gpu.
        _ if settings.train.device == DeviceChoice::Gpu && plan.hardware.gpu.is_none() => None,
        _ if plan.hardware.unusable_gpu.is_some() => None,
        (None, OptimizerDevice::Gpu | OptimizerDevice::Shared) => Some(Problem::new(
            ProblemKind::Update,
            what(format!("but there is no GPU: {}", plan.hardware.no_gpu)),
            "leave it out, or set it to \"cpu\"",
        )),
        (Some(_), OptimizerDevice::Cpu | OptimizerDevice::Shared) if plan.lives_in_gpu() => {
            Some(Problem::new(
                ProblemKind::Update,
                what("but the state is in GPU memory".into()),
                "leave it out, or set zero_optimization.offload_optimizer.device = \"cpu\"",
            ))
        }
        _ => None,
    }
}

fn attention(plan: &Plan, settings: &RunSettings) -> Option<Problem> {
    let wanted = settings.train.attention == AttentionChoice::Cudnn;
    let why = why_no_cudnn(settings, &plan.hardware).filter(|_| wanted)?;
    Some(Problem::new(
        ProblemKind::Settings,
        format!("train.attention is \"cudnn\", but cuDNN's attention cannot be used: {why}"),
        "leave it out, or set it to \"torch\"",
    ))
}

fn matmuls(plan: &Plan, settings: &RunSettings) -> Option<Problem> {
    if settings.train.matmuls != Matmuls::Fp8 {
        return None;
    }
    let batch = &settings.batch;
    let why = match &plan.hardware.gpu {
        None => Some("there is no GPU".to_owned()),
        Some(gpu) => gpu.no_fp8.clone(),
    };
    let why = why.or_else(|| {
        fp8_refusal(
            &settings.model,
            &settings.dropout,
            settings.dtype,
            settings.train.mlp_chunks,
            batch.micro_batch_tokens(),
        )
    })?;
    Some(Problem::new(
        ProblemKind::Settings,
        format!("train.matmuls is \"fp8\", but products cannot be computed in 8 bits: {why}"),
        "leave it out, or set it to \"dtype\"",
    ))
}

fn gpu_memory(plan: &Plan) -> Option<Problem> {
    let gpu = plan.hardware.gpu.as_ref()?;
    let needed = plan.gpu_bytes();
    if needed <= gpu.memory_bytes {
        return None;
    }
    Some(Problem::new(
        ProblemKind::GpuMemory,
        format!(
            "the run needs {} of GPU memory, but {} is available",
            ApproxBytes(needed),
            ApproxBytes(gpu.memory_bytes)
        ),
        NO_LESS,
    ))
}

/// Remedy for too little memory, unless [`Plan::advise`] finds one.
const NO_LESS: &str = "no setting makes the run take less";

fn host_memory(plan: &Plan, settings: &RunSettings) -> Option<Problem> {
    let needed = plan.node_host_bytes();
    let too_much = |limit: u64, of: &str| {
        (limit < needed).then(|| {
            Problem::new(
                ProblemKind::HostMemory,
                format!(
                    "the run needs {} of host memory, but {} is {of}",
                    ApproxBytes(needed),
                    ApproxBytes(limit)
                ),
                NO_LESS,
            )
        })
    };
    let budget = settings.offload.host_memory_bytes;
    plan.hardware
        .host_memory_bytes
        .and_then(|limit| too_much(limit, "available"))
        .or_else(|| too_much(budget?, "the limit set by offload.host_memory_bytes"))
}

/// Checks that the private store of an earlier start has room for block inputs.
fn store_room(plan: &Plan, settings: &RunSettings) -> Option<Problem> {
    let file_bytes = plan.hardware.store_file_bytes?;
    if plan.has_store_room(settings) {
        return None;
    }
    let count = settings.placement.nvme_paths.len() as u64;
    let renewal = match plan.nodes() {
        1 => format!(
            "or move the state out of the store with `trainer move {} --to-checkpoint` and start again, which makes a larger one",
            Word(&resolved(&settings.train.run_dir))
        ),
        _ => "or resume from a checkpoint with --resume-from STEP, for which each node makes a larger store".to_owned(),
    };
    Some(Problem::new(
        ProblemKind::DeviceSpace,
        format!(
            "offload.activations is \"nvme\", but the store of this run was made without room for its block inputs: its files have {} each, which stays so, and {} are needed",
            ApproxBytes(file_bytes),
            ApproxBytes(plan.device_file_bytes(count))
        ),
        format!("set offload.activations = \"cpu\" or \"gpu\", {renewal}"),
    ))
}

/// Checks free space for a private store in directories that exist on this machine. A running daemon manages
/// its own space.
fn device_space(plan: &Plan, settings: &RunSettings) -> Option<Problem> {
    let files = plan.store_files(settings, &run_job(settings))?;
    let error = files.check_space().err()?;
    let text = error.to_string();
    let (what, change) = text
        .rsplit_once(": ")
        .unwrap_or((&text, "set another directory"));
    Some(Problem::new(
        ProblemKind::DeviceSpace,
        match plan.inputs_in {
            InputsIn::Drives => format!(
                "{what} (block inputs take {} on drives: offload.activations)",
                ApproxBytes(plan.device_input_bytes())
            ),
            InputsIn::Place | InputsIn::Host => what.to_owned(),
        },
        change,
    ))
}
