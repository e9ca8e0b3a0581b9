//! `trainer remove`: deletes a run and its state in a store.

use std::io::{IsTerminal, Write};
use std::path::PathBuf;

use clap::Args;
use offload_support::outln;
use training_run::remove::Removal;

pub(crate) const EXAMPLES: &str = "Examples:
  trainer remove runs/demo                               # shows what would go, and asks
  trainer remove runs/demo --yes
  trainer remove /mnt/nvme0/offloadd-demo-12.tiles       # a store without a run, as `trainer runs` lists it";

/// Arguments of `trainer remove`.
#[derive(Args)]
pub struct RemoveArgs {
    /// A run's directory, or a file of a private store whose run is gone.
    #[arg(value_name = "RUN")]
    run: PathBuf,
    /// Delete without asking.
    #[arg(long)]
    yes: bool,
}

/// Deletes a run after asking for confirmation. Returns the exit status: 1 if the answer was no.
///
/// # Errors
/// The removal fails, or there is no terminal to ask on.
pub(crate) fn run(args: &RemoveArgs) -> anyhow::Result<u8> {
    let removal = Removal::find(&args.run)?;
    outln!("this permanently deletes:\n{removal}");
    if !args.yes && !agreed()? {
        outln!("nothing was deleted");
        return Ok(1);
    }
    match removal.remove()? {
        None => outln!("deleted"),
        Some(dir) => outln!(
            "deleted; {} contains other files, which were kept",
            dir.display()
        ),
    }
    Ok(0)
}

fn agreed() -> anyhow::Result<bool> {
    let stdin = std::io::stdin();
    anyhow::ensure!(
        stdin.is_terminal(),
        "nothing was deleted: there is no terminal to ask for confirmation; use --yes to delete without asking"
    );
    offload_support::console::out(format_args!("delete? [y/N] "));
    // If the question cannot be shown, the answer is read as no.
    let _ = std::io::stdout().flush();
    let mut answer = String::new();
    stdin.read_line(&mut answer)?;
    Ok(["y", "yes"].contains(&answer.trim().to_lowercase().as_str()))
}
