//! The Python package's own keys, in the table `offloadd` of DeepSpeed's file.

use std::path::PathBuf;

use super::values::ByteCount;
use crate::schema::keys;

keys! {
    /// `offloadd`: the package's own keys.
    pub struct OwnToml {
        /// The run's directory, where `prepare` or `initialize` names none.
        #[default("offloadd-NAME beside NAME.json, offloadd-run for a dict")]
        pub run_dir: Option<PathBuf>,
        /// When parameters are updated: "deferred" (each unit before its next forward) or "immediate" (at the end of the step). Both
        /// give the same bits.
        #[default("\"deferred\"")]
        pub optimizer_step: Option<String>,
        /// Fraction of the tiles that stays in host memory; "auto" counts as left out.
        #[default("0.0")]
        pub resident_fraction: Option<f64>,
        /// Classes or patterns of module names whose parameters move together; `prepare(..., units=[...])` takes precedence.
        #[default("found in the module tree")]
        pub units: Option<Vec<String>>,
        /// Memory that one unit takes where its model lets it be cut: the experts of a layer that is larger are brought in groups, or one
        /// by one where each is a module.
        #[default("512MiB")]
        pub unit_bytes_max: Option<ByteCount>,
        /// Steps between commits, at least 1. The trainer's plan chooses the number by what a commit costs; a script may end at any
        /// line, so each step is committed.
        #[default("1")]
        pub commit_every: Option<u64>,
        /// Host memory that tiles pass through.
        #[default("an eighth of the state, 64 MiB to 4 GiB")]
        pub staging_bytes: Option<ByteCount>,
        /// Threads that update.
        #[default("half of the cores, at most 4; beside a GPU all cores but 2")]
        pub update_threads: Option<u64>,
        /// Where tiles are updated: "cpu"; "gpu" (copied to the GPU and back); "shared" (on both). All give the same bits.
        #[default("\"shared\" if a GPU computes and the state is in host memory, else \"cpu\"")]
        pub optimizer_device: Option<String>,
        /// Where gradients wait for the update: "cpu", or "nvme", which writes and reads them once more.
        #[default("host memory if they take at most half of what is available")]
        pub gradients: Option<String>,
        /// Where inputs of checkpointed blocks wait for their backward: "gpu", "cpu" (pinned host memory, when a GPU computes), or "nvme" (the
        /// drives of the state).
        #[default("\"gpu\"")]
        pub activations: Option<String>,
        /// Space on the drives for inputs of blocks with activations = "nvme", for each process: those of one micro-batch, which
        /// `python -m offloadd plan --seq-len TOKENS --activations nvme` computes.
        #[default("")]
        pub activations_bytes: Option<ByteCount>,
        /// Numbers of the factors in the products of Linear layers in blocks: "dtype" (the parameters'), or "fp8" (8 bits; NVIDIA GPUs from Ada
        /// and Hopper on, parameters in bf16), as the trainer's train.matmuls has them. The choice changes results.
        #[default("\"dtype\"")]
        pub matmuls: Option<String>,
        /// Chunks of tokens in which the module `mlp` of each block is computed, one after the other, and again in backward: the
        /// intermediate results of one chunk are in memory. Gradients are added in another order.
        #[default("1")]
        pub mlp_chunks: Option<u64>,
        /// Chunks of tokens in which the head of a causal language model and its cross entropy are computed, one after the other, and
        /// again in backward: the logits of one chunk are in memory, and no others. Gradients are added in another order.
        #[default("1")]
        pub loss_chunks: Option<u64>,
        /// Fraction of the parameters' bytes that stays in the memory of the GPU that computes, in whole units, or "auto" for as much as
        /// fits beside what a step took. Frozen parameters come once then, trained ones once a step. The choice does not change results.
        #[default("\"auto\"")]
        pub gpu_resident_fraction: Option<f64>,
        /// Where parameters come from after their first use in a step, with several nodes: "auto" (a copy in the host memory of each
        /// node if there is room) or "all" (the ranks of all nodes).
        #[default("\"auto\"")]
        pub shard: Option<String>,
        /// Number format of momentum and variance: "fp32", "bf16" with stochastic rounding, 4 bytes a parameter less in memory, on
        /// drives and in checkpoints, or "8bit" as bitsandbytes has it, 6 bytes less. A run or checkpoint with other moments is refused.
        #[default("\"fp32\"")]
        pub moments: Option<String>,
        /// Number format of the masters of bf16 parameters: "fp32" (exact), or "bf16": the parameter is its own master, rounded
        /// stochastically after each step, 2 bytes a parameter less in memory, on drives and in checkpoints. fp32 parameters stay as
        /// they are, fp16 ones are refused. A run or checkpoint with another master is refused.
        #[default("\"fp32\"")]
        pub master: Option<String>,
        /// Socket of a running daemon, instead of a private one: nvme_path has no effect then, and the daemon's quotas apply.
        #[default("none")]
        pub socket: Option<PathBuf>,
        /// The program offloadd.
        #[default("the wheel's, or the one in the PATH")]
        pub program: Option<PathBuf>,
        /// Where the model computes, such as cuda:0. The model may be built in host memory.
        #[default("the GPU with `initialize`, if there is one; otherwise where its parameters are")]
        pub compute_device: Option<String>,
    }
}
