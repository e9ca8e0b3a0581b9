//! `trainer launch`: starts several ranks of one run on this machine as processes of this program, and ends
//! them together.
//!
//! ```text
//!   launch ──starts──▶ rank 0 .. N-1   environment: torchrun's variables, and the rendezvous directory
//!          ──SIGTERM, SIGINT──▶        each signal is forwarded: every rank ends after its step, with everything committed
//!          ◀──status──                 the first failure ends the others: SIGTERM, later SIGKILL. 128 plus the signal's
//!                                      number is no failure: the rank was asked to stop, and the others end with it
//! ```
//!
//! Each rank has its own process group, so a terminal's Ctrl-C reaches only the launcher, and each rank gets
//! the signal once. A rank requests SIGTERM for the death of its launcher.

mod rendezvous_dir;
mod supervise;

use std::ffi::OsString;
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};

use kernels_torch::collective::DIR_VARIABLE;
use rustix::process::{Signal, getpid, getppid, set_parent_process_death_signal};

use rendezvous_dir::RendezvousDir;
pub use supervise::Failure;
use supervise::{Limits, supervise};

/// Environment variable with the launcher's process id.
const LAUNCHER_VARIABLE: &str = "OFFLOADD_LAUNCHER";

/// Error of starting or ending ranks.
#[derive(Debug, thiserror::Error)]
pub enum LaunchError {
    #[error("cannot install handlers for SIGTERM and SIGINT: {0}")]
    Signals(std::io::Error),
    #[error("cannot create the ranks' rendezvous directory in {}: {source}", dir.display())]
    Dir {
        dir: std::path::PathBuf,
        source: std::io::Error,
    },
    #[error("cannot start rank {rank}: {source}")]
    Start { rank: u32, source: std::io::Error },
    #[error(transparent)]
    Failed(#[from] Failure),
    #[error(
        "the launcher (process {0}) has ended, so this rank ends too: start the run again with the same command"
    )]
    LauncherGone(String),
}

/// Starts `ranks` processes `trainer train ARGS...` and waits until all have ended. Returns the exit status:
/// 0 when the run is done, the ranks' status when they were asked to stop earlier.
///
/// # Errors
/// Ranks cannot be started; the first rank that failed, with its status.
pub fn launch(ranks: u32, args: &[OsString]) -> Result<u8, LaunchError> {
    let base = std::env::temp_dir();
    let rendezvous_dir =
        RendezvousDir::new(&base).map_err(|source| LaunchError::Dir { dir: base, source })?;
    let program =
        std::env::current_exe().map_err(|source| LaunchError::Start { rank: 0, source })?;
    let command = |rank: u32| {
        let mut command = Command::new(&program);
        command.arg("train").args(args).stdin(Stdio::null());
        for (name, number) in [
            ("RANK", rank),
            ("LOCAL_RANK", rank),
            ("WORLD_SIZE", ranks),
            ("LOCAL_WORLD_SIZE", ranks),
        ] {
            command.env(name, number.to_string());
        }
        command
            .env(DIR_VARIABLE, rendezvous_dir.path())
            .env(LAUNCHER_VARIABLE, getpid().to_string())
            .process_group(0);
        command
    };
    supervise((0..ranks).map(command), Limits::default())
}

/// Makes a rank receive SIGTERM when its launcher dies. Does nothing in a process that was not started by
/// `launch`.
///
/// # Errors
/// The launcher is already dead.
pub fn end_with_launcher() -> Result<(), LaunchError> {
    let Some(launcher) = std::env::var_os(LAUNCHER_VARIABLE) else {
        return Ok(());
    };
    let launcher = launcher.to_string_lossy().into_owned();
    // The only possible error is an invalid signal.
    let _ = set_parent_process_death_signal(Some(Signal::TERM));
    // The launcher may have died before the request.
    let parent = getppid().map(|pid| pid.to_string());
    if parent.as_deref() == Some(launcher.as_str()) {
        Ok(())
    } else {
        Err(LaunchError::LauncherGone(launcher))
    }
}
