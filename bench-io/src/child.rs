//! Starts programs that end with this one, however it ends: a trainer left behind keeps its drives, a fio left behind
//! keeps writing, and the next measurement would measure them too.
//!
//! The kernel can signal a process when the thread that started it ends. Only the process itself can request that, and
//! the request survives `exec`. Therefore this program starts itself, makes the request, and becomes the other program.

use std::ffi::OsString;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, ensure};
use rustix::process::{Signal, getppid, set_parent_process_death_signal};

/// Hidden subcommand that becomes another program.
pub(crate) const WORD: &str = "end-with";

/// Builds a command for `program` that is killed when this process dies. Start it from the main thread, because it ends
/// with the starting thread.
pub(crate) fn command(program: &Path) -> Command {
    // This very file, even if another one was built over it.
    let mut command = Command::new("/proc/self/exe");
    command
        .arg0("bench-io")
        .args([WORD, &std::process::id().to_string(), "--"])
        .arg(program);
    command
}

/// Becomes the other program, in the started process.
///
/// # Errors
/// `parent` is gone, or there is no such program.
pub(crate) fn become_program(parent: u32, words: &[OsString]) -> Result<()> {
    let (program, words) = words.split_first().context("a command is required")?;
    set_parent_process_death_signal(Some(Signal::KILL))
        .context("asking for a signal when the parent process ends")?;
    // The parent may have died before the request.
    let now = getppid().map(|pid| pid.as_raw_nonzero().get());
    ensure!(
        now.is_some_and(|now| u32::try_from(now) == Ok(parent)),
        "process {parent}, which started this one, is gone"
    );
    let error = Command::new(program).args(words).exec();
    Err(error).with_context(|| format!("starting {}", program.display()))
}
