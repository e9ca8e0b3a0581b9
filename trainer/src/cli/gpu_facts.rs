//! `trainer gpu-facts`: tells `offloadd doctor` what needs GPU code and torch to find out.

use std::path::Path;

use kernels::gpu::Gpu;
use offload_support::gpu_facts::{CopiesFact, GpuFact, GpuFacts};
use offload_support::pcie::{self, Link};
use training_run::AskTorch;
use training_state::plan::assumed::bus_bytes_per_s;

/// Asks drivers and `torch`.
///
/// # Errors
/// There is no GPU, or its driver fails.
pub(crate) fn facts(torch: AskTorch) -> anyhow::Result<GpuFacts> {
    let (mut gpus, mut unopened) = (Vec::new(), Vec::new());
    for index in 0..Gpu::count()? {
        match Gpu::open(index) {
            Ok(gpu) => gpus.push(gpu),
            Err(why) => unopened.push(format!("GPU {index}: {why}")),
        }
    }
    let Some(first) = gpus.first() else {
        anyhow::bail!("{}", unopened.join("; "));
    };
    let support = torch(first.info());
    Ok(GpuFacts {
        torch_unusable: support.unusable,
        nccl: support.nccl,
        cudnn: support.cudnn,
        gpus: gpus.iter().map(fact).collect(),
        unopened,
    })
}

fn fact(gpu: &Gpu) -> GpuFact {
    let pci = gpu.info().pci.clone();
    let link = Link::of_busy_gpu(&Path::new(pcie::DEVICES).join(&pci));
    GpuFact {
        pci,
        copies: match gpu.copy_rates() {
            Ok(rates) => CopiesFact::Measured {
                to_gpu_bytes_per_s: rates.to_gpu_bytes_per_s,
                from_gpu_bytes_per_s: rates.from_gpu_bytes_per_s,
            },
            Err(why) => CopiesFact::Failed(why.to_string()),
        },
        planned_bytes_per_s: bus_bytes_per_s(link),
    }
}
