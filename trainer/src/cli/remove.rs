//! `trainer remove`: a run and what a store keeps of it.

use std::io::{IsTerminal, Write};
use std::path::PathBuf;

use clap::Args;
use offload_support::outln;
use trainer::remove::Removal;

pub(crate) const EXAMPLES: &str = "Examples:
  trainer remove runs/demo                               # shows what would go, and asks
  trainer remove runs/demo --yes
  trainer remove /mnt/nvme0/offloadd-demo-12.tiles       # a store without a run, as `trainer runs` lists it";

/// The arguments of `remove`.
#[derive(Args)]
pub(crate) struct RemoveArgs {
    /// A run's directory, or a file of a private store whose run is gone.
    #[arg(value_name = "RUN")]
    run: PathBuf,
    /// Do not ask.
    #[arg(long)]
    yes: bool,
}

/// Deletes what is named, if a person agrees.
///
/// # Errors
/// What the removal says; nobody is there to be asked.
pub(crate) fn run(args: &RemoveArgs) -> anyhow::Result<()> {
    let removal = Removal::of(&args.run)?;
    outln!("this permanently deletes:\n{removal}");
    if !args.yes && !agreed()? {
        outln!("nothing was deleted");
        return Ok(());
    }
    match removal.remove()? {
        None => outln!("deleted"),
        Some(dir) => outln!(
            "deleted; {} contains other files, which were kept",
            dir.display()
        ),
    }
    Ok(())
}

fn agreed() -> anyhow::Result<bool> {
    let stdin = std::io::stdin();
    anyhow::ensure!(
        stdin.is_terminal(),
        "nothing was deleted: there is no terminal to ask for confirmation; use --yes to delete without asking"
    );
    offload_support::console::out(format_args!("delete? [y/N] "));
    // A question that is not seen is answered with no.
    let _ = std::io::stdout().flush();
    let mut answer = String::new();
    stdin.read_line(&mut answer)?;
    Ok(["y", "yes"].contains(&answer.trim().to_lowercase().as_str()))
}
