//! `trainer export`: a run's weights as a directory that Hugging Face's library loads.

use std::path::PathBuf;

use clap::{Args, ValueEnum};
use offload_support::outln;
use offload_support::units::parse_bytes;
use trainer::export::{Export, Numbers, export};
use trainer::run::CheckpointName;

/// Shown below the options.
pub(crate) const EXAMPLES: &str = "Examples:
  trainer export runs/mine --out exported
  trainer export runs/mine --save 40 --out exported
  trainer export runs/mine --out exported --dtype fp16 --shard-size 2GB
  python3 -c 'from transformers import AutoModelForCausalLM; AutoModelForCausalLM.from_pretrained(\"exported\")'";

/// What is exported, and how.
#[derive(Args)]
pub(crate) struct ExportArgs {
    /// The run's directory (train.run_folder). No trainer may work in it.
    #[arg(value_name = "RUN_DIR")]
    run_dir: PathBuf,
    /// One of its checkpoints: a step, or the checkpoint's directory. Otherwise the newest state.
    #[arg(long, value_name = "STEP|SAVE_FOLDER")]
    checkpoint: Option<CheckpointName>,
    /// The directory to be made. It is there when all of it is.
    #[arg(long, value_name = "DIR")]
    out: PathBuf,
    /// The type of its numbers; otherwise the one that the run computes with. fp32 is exact.
    #[arg(long, value_enum)]
    dtype: Option<NumbersArg>,
    /// Most bytes of one file.
    #[arg(long, value_name = "BYTES", default_value = "5GB", value_parser = parse_bytes)]
    shard_size: u64,
    /// The daemon's socket, for a run of an earlier version on a shared daemon.
    #[arg(long, value_name = "PATH")]
    socket: Option<PathBuf>,
}

#[derive(Clone, Copy, ValueEnum)]
enum NumbersArg {
    Bf16,
    Fp32,
    Fp16,
}

/// Exports, and says what was.
///
/// # Errors
/// What the export says.
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
        socket: args.socket,
    })?;
    outln!("{exported}");
    Ok(())
}
