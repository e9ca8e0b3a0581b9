//! `trainer move`: moves the state of a run.

use std::path::PathBuf;

use clap::Args;
use offload_support::outln;
use training_run::relocate::{move_store, move_to_checkpoint};

pub(crate) const EXAMPLES: &str = "Examples:
  trainer move runs/demo --nvme /mnt/nvme1/offload
  trainer move runs/demo --nvme /mnt/nvme2 --nvme /mnt/nvme3      # a store on two drives
  trainer move runs/demo --to-checkpoint                          # then train it with device = \"cpu\"";

/// Arguments of `trainer move`.
#[derive(Args)]
pub struct MoveArgs {
    /// The run's directory. The run must not be in training.
    #[arg(value_name = "RUN")]
    run: PathBuf,
    /// Directory on another drive for the store; one for each directory in nvme_path, in the same order.
    #[arg(long, value_name = "DIR", required_unless_present = "to_checkpoint")]
    nvme: Vec<PathBuf>,
    /// Write the state into a checkpoint in the run directory, and delete the store.
    #[arg(long, conflicts_with = "nvme")]
    to_checkpoint: bool,
}

pub(crate) fn run(args: &MoveArgs) -> anyhow::Result<()> {
    if args.to_checkpoint {
        let step = move_to_checkpoint(&args.run)?;
        outln!(
            "moved the state of step {step} into a checkpoint; next: train it with device = \"cpu\" or \"none\" in zero_optimization, or with another nvme_path"
        );
        return Ok(());
    }
    move_store(&args.run, &args.nvme)?;
    let dirs = args.nvme.iter().map(|dir| {
        let text = dir.to_string_lossy().into_owned();
        toml::Value::String(text).to_string()
    });
    let dirs: Vec<String> = dirs.collect();
    outln!(
        "moved the store; next: set nvme_path = [{}] in the run file, and train",
        dirs.join(", ")
    );
    Ok(())
}
