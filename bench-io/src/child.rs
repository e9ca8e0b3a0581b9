//! Programs that this one starts and that end with it, whatever ends it: a trainer nobody waits for keeps its drives, a fio
//! goes on writing, and the next measurement measures them too.
//!
//! The kernel sends a signal to whoever asked for it when the thread ends that started it. Only a process itself can ask, and
//! it stays asked for when it becomes another program. So this program starts itself, asks, and becomes the other.

use std::ffi::OsString;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, ensure};
use rustix::process::{Signal, getppid, set_parent_process_death_signal};

/// The command of this program that becomes another one; not for people.
pub(crate) const WORD: &str = "end-with";

/// Starts `program`, to be killed when this process dies. From the main thread, as it goes with the thread that starts it.
pub(crate) fn command(program: &Path) -> Command {
    // Of this very file, also when another was built over it.
    let mut command = Command::new("/proc/self/exe");
    command
        .arg0("bench-io")
        .args([WORD, &std::process::id().to_string(), "--"])
        .arg(program);
    command
}

/// In the process that was started: becomes the other program.
///
/// # Errors
/// `parent` is gone already, or there is no such program.
pub(crate) fn become_program(parent: u32, words: &[OsString]) -> Result<()> {
    let (program, words) = words.split_first().context("what to run")?;
    set_parent_process_death_signal(Some(Signal::KILL))
        .context("asking for a signal when the parent process ends")?;
    // It may have died before that was asked for.
    let now = getppid().map(|pid| pid.as_raw_nonzero().get());
    ensure!(
        now.is_some_and(|now| u32::try_from(now) == Ok(parent)),
        "process {parent}, which started this one, is gone"
    );
    let error = Command::new(program).args(words).exec();
    Err(error).with_context(|| format!("starting {}", program.display()))
}
