//! The question before files are made in a directory that nobody named.

use std::io::{self, BufRead, IsTerminal, Write};

use anyhow::{Context, Result, bail, ensure};
use offload_support::units::ApproxBytes;

/// Asks whether `bytes` of temporary files may be made in the current directory.
///
/// # Errors
/// The answer is no, or nobody is there to answer.
pub(crate) fn current_directory(bytes: u64) -> Result<()> {
    let here = std::env::current_dir().context("finding the current directory")?;
    let (here, size) = (here.display(), ApproxBytes(bytes));
    if !io::stdin().is_terminal() {
        bail!(
            "would write about {size} of temporary files into {here}: name a directory on the drive to measure, such as --directory ."
        );
    }
    let mut err = io::stderr();
    write!(
        err,
        "bench-io writes about {size} of temporary files into {here} and removes them after the measurement. Continue? [y/N] "
    )?;
    err.flush()?;
    let mut answer = String::new();
    io::stdin()
        .lock()
        .read_line(&mut answer)
        .context("reading the answer")?;
    ensure!(
        matches!(answer.trim().to_lowercase().as_str(), "y" | "yes"),
        "nothing was written; --directory names another directory"
    );
    Ok(())
}
