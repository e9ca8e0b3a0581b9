//! A training step on several nodes, computed from a plan for each number of nodes. Nothing is measured over a network.

use std::fmt;

use clap::Args;
use offload_support::units::ApproxBytes;
use serde::Serialize;

use super::machine::Shown;
use super::{Planned, Settings, step_line};
use crate::report::About;
use crate::units::Rate;

/// Options about nodes.
#[derive(Args, Clone, Debug, Serialize)]
pub(crate) struct NodesArgs {
    /// Predict a step on these numbers of nodes like this machine, separated by commas; --drives are those of each node
    #[arg(long, value_name = "N", value_delimiter = ',', conflicts_with_all = ["run", "dirs"], value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub(crate) nodes: Vec<u32>,
    /// With --nodes: GPUs of each node, one for each process
    #[arg(long, value_name = "N", default_value_t = 1, requires = "nodes", value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub(crate) gpus: u32,
    /// With --nodes: rate between a node and the others, in each direction
    #[arg(
        long,
        value_name = "RATE",
        default_value = "25GB/s",
        requires = "nodes"
    )]
    pub(crate) network: Rate,
}

/// Nodes of one row.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Cluster {
    pub(crate) nodes: u32,
    pub(crate) gpus: u32,
    pub(crate) network: Rate,
}

impl Cluster {
    /// Arguments of `trainer plan`.
    pub(super) fn words(&self) -> [String; 3] {
        [
            format!("--nodes={}", self.nodes),
            format!("--ranks={}", self.gpus),
            format!("--network={:.6}GB/s", self.network.0 as f64 / 1e9),
        ]
    }
}

/// Figures for one number of nodes.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct NodesRow {
    pub(crate) nodes: u32,
    pub(crate) gpus: u32,
    pub(crate) ours: Planned,
    /// Operations per second of one GPU, 6 for each parameter and token.
    pub(crate) gpu_tflops: f64,
}

impl NodesRow {
    pub(crate) fn new(cluster: Cluster, ours: Planned) -> Self {
        let gpus = cluster.nodes * cluster.gpus;
        let flops = 6.0 * ours.parameters * ours.tokens / ours.step_s;
        Self {
            nodes: cluster.nodes,
            gpus,
            gpu_tflops: flops / f64::from(gpus) / 1e12,
            ours,
        }
    }
}

#[derive(Clone, Debug, Serialize)]
pub(crate) struct NodesReport {
    #[serde(flatten)]
    pub(crate) about: About<Settings>,
    /// Rates of the drives and the network.
    pub(crate) rates: String,
    pub(crate) rows: Vec<NodesRow>,
}

const HEAD: &str = "\
| nodes | GPUs | host memory of a node | of it a copy of all parameters | on its drives | read + written a step | sent + received | tokens a step | computing | network | step (the bound) | bottleneck | TFLOPS a GPU |
|---|---|---|---|---|---|---|---|---|---|---|---|---|";

impl fmt::Display for NodesReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let bytes = |bytes: f64| ApproxBytes(bytes as u64);
        writeln!(f, "{HEAD}")?;
        for row in &self.rows {
            let ours = &row.ours;
            writeln!(
                f,
                "| {} | {} | {}{} | {} | {} | {} + {} | {} + {} | {} | {:.2} s | {:.2} s | {:.2} s | {} | {:.1} |",
                row.nodes,
                row.gpus,
                bytes(ours.host_bytes),
                if ours.fits { "" } else { ", does not fit" },
                bytes(ours.node_copy_bytes),
                ApproxBytes(ours.device_bytes),
                bytes(ours.read_bytes),
                bytes(ours.written_bytes),
                bytes(ours.network_bytes),
                bytes(ours.network_bytes),
                ours.tokens,
                ours.compute_s,
                ours.network_s,
                ours.step_s,
                ours.wall,
                row.gpu_tflops
            )?;
        }
        if let Some(row) = self.rows.first() {
            writeln!(f, "\none node: {}", step_line(&row.ours))?;
            writeln!(
                f,
                "{}",
                Shown(&row.ours.machine, &self.about.settings.machine)
            )?;
        }
        writeln!(f, "rates: {}", self.rates)?;
        writeln!(
            f,
            "computed, not measured: transfers between nodes are taken to overlap with everything else and to reach the given rate with any number of nodes"
        )?;
        write!(f, "{}", self.about)
    }
}
