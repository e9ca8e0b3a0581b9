//! `trainer export`: writes a run's weights as a Hugging Face model directory.

use std::path::PathBuf;

use clap::{Args, ValueEnum};
use offload_support::outln;
use offload_support::units::parse_bytes;
use training_run::export::{Export, Numbers, export};
use training_state::run::CheckpointName;

pub(crate) const EXAMPLES: &str = "Examples:
  trainer export runs/mine --out exported
  trainer export runs/mine --checkpoint 40 --out exported
  trainer export runs/mine --out exported --dtype fp16 --shard-size 2GB
  python3 -c 'from transformers import AutoModelForCausalLM; AutoModelForCausalLM.from_pretrained(\"exported\")'";

#[derive(Args)]
pub struct ExportArgs {
    /// The run's directory (train.run_dir). The run must not be in training.
    #[arg(value_name = "RUN_DIR")]
    run_dir: PathBuf,
    /// Export a checkpoint instead of the newest state: its step, or its directory.
    #[arg(long, value_name = "STEP|DIR")]
    checkpoint: Option<CheckpointName>,
    /// Directory to create. It appears only when the export is complete.
    #[arg(long, value_name = "DIR")]
    out: PathBuf,
    /// Element type of the weights, by default the type that the run computes with. fp32 is exact.
    #[arg(long, value_enum)]
    dtype: Option<NumbersArg>,
    /// Largest size of one file.
    #[arg(long, value_name = "BYTES", default_value = "5GB", value_parser = parse_bytes)]
    shard_size: u64,
}

#[derive(Clone, Copy, ValueEnum)]
enum NumbersArg {
    Bf16,
    Fp32,
    Fp16,
}

pub(crate) fn run(args: ExportArgs) -> anyhow::Result<()> {
    let numbers = args.dtype.map(|dtype| match dtype {
        NumbersArg::Bf16 => Numbers::Bf16,
        NumbersArg::Fp32 => Numbers::Fp32,
        NumbersArg::Fp16 => Numbers::Fp16,
    });
    let exported = export(&Export {
        run_dir: args.run_dir,
        checkpoint: args.checkpoint,
        out: args.out,
        numbers,
        shard_bytes: args.shard_size,
    })?;
    outln!("{exported}");
    Ok(())
}
