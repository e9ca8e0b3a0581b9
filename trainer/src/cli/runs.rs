//! `trainer runs`: lists runs and their checkpoints.

use std::path::PathBuf;

use clap::Args;
use offload_support::outln;
use training_run::runs;

pub(crate) const EXAMPLES: &str = "Examples:
  trainer runs                                  # below this directory
  trainer runs runs/demo                        # one run and its checkpoints
  trainer runs /mnt/nvme0                       # stores there whose run is gone
  trainer runs --json | jq '.runs[].checkpoints'      # for other programs";

/// Arguments of `trainer runs`.
#[derive(Args)]
pub struct RunsArgs {
    /// A run's directory, or a directory that contains runs up to three levels down.
    #[arg(value_name = "DIR", default_value = ".")]
    dir: PathBuf,
    /// Print JSON, for programs.
    #[arg(long)]
    json: bool,
}

pub(crate) fn list(args: &RunsArgs) -> anyhow::Result<()> {
    let list = runs::list(&args.dir)
        .map_err(|error| anyhow::anyhow!("cannot list {}: {error}", args.dir.display()))?;
    if args.json {
        outln!("{}", serde_json::to_string_pretty(&list)?);
    } else {
        outln!("{list}");
    }
    Ok(())
}
