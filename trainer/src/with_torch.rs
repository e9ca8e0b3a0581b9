//! `trainer-with-torch`, the program that trains: finds its libraries and starts it.
//!
//! The system's loader resolves libraries before a program's `main`, so a program that is linked with libtorch cannot
//! say what to do when libtorch is missing. This program is linked with the system's libraries only:
//!
//! ```text
//!   environment ──▶ libraries found? ─── no ──▶ LIBTORCH, torch of python3 ─── none fits ──▶ error: what, where, what to do
//!                        │ yes                           │ LD_LIBRARY_PATH
//!                        └──────▶ start the program ◀────┘
//! ```

use std::ffi::OsString;
use std::os::unix::process::CommandExt;
use std::process::Command;

use kernels::gpu::{CUBLAS_WORKSPACE, CUBLAS_WORKSPACES, GpuInfo, nccl_buffer};
use training_run::TorchSupport;

use crate::libraries;

/// The program that trains.
const PROGRAM: &str = "trainer-with-torch";

/// Argument that asks the program what torch can do on the GPU whose number follows.
pub const TORCH_SUPPORT: &str = "torch-support";

/// Iterations that a waiting libgomp thread spins before it sleeps, about 50 us. The default is milliseconds:
/// with an optimizer thread, a daemon or another run on the same cores, steps took 2.5 times as long (4
/// threads on 4 cores). With this value they did not, and on idle cores there was no difference.
const SPIN_COUNT: &str = "20000";

/// Variables with the number of a run's processes and of those on this node, as torchrun and Open MPI set them.
const PROCESSES: [[&str; 2]; 2] = [
    ["WORLD_SIZE", "LOCAL_WORLD_SIZE"],
    ["OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE"],
];

/// Variable with the number of nodes, as Slurm sets it.
const NODES: &str = "SLURM_STEP_NUM_NODES";

/// Becomes the program that trains, with the arguments of this one. Returns the error that prevented it.
pub fn become_trainer_with_torch() -> String {
    let mut args = std::env::args_os();
    let name = args.next().unwrap_or_else(|| "trainer".into());
    match command() {
        Ok(mut command) => {
            // Keeps the name in help texts and `ps`.
            let error = command.arg0(name).args(args).exec();
            format!("cannot start {}: {error}", command.get_program().display())
        }
        Err(why) => why,
    }
}

/// Checks that the program that trains would start.
///
/// # Errors
/// A text that names what is missing and what to do.
pub(crate) fn check() -> Result<(), String> {
    command().map(|_| ())
}

/// Asks the program that trains what its torch can do on `gpu`.
pub fn ask_torch(gpu: &GpuInfo) -> TorchSupport {
    let ask = || -> Result<TorchSupport, String> {
        let mut command = command()?;
        let index = gpu.index.to_string();
        let output = command.args([TORCH_SUPPORT, &index]).output();
        let output = output.map_err(|error| format!("cannot start {PROGRAM}: {error}"))?;
        serde_json::from_slice(&output.stdout).map_err(|_| {
            let said = String::from_utf8_lossy(&output.stderr);
            format!("{PROGRAM} ended with {}: {}", output.status, said.trim())
        })
    };
    ask().unwrap_or_else(|why| TorchSupport::none(&why))
}

/// The program with what its libraries need in the environment.
fn command() -> Result<Command, String> {
    let beside = std::env::current_exe().map(|path| path.with_file_name(PROGRAM));
    let program = match beside {
        Ok(program) if program.is_file() => program,
        Ok(program) => {
            return Err(format!(
                "no program at {}: it is installed and moved together with trainer; install both again",
                program.display()
            ));
        }
        Err(error) => {
            return Err(format!(
                "cannot find the directory of this program: {error}"
            ));
        }
    };
    let library_path: Option<OsString> = libraries::library_path(&program)?;
    let mut command = Command::new(&program);
    command
        .envs(settings())
        .envs(library_path.map(|path| ("LD_LIBRARY_PATH", path)));
    Ok(command)
}

/// Variables that libraries read when they are loaded, unless they are set.
fn settings() -> Vec<(&'static str, &'static str)> {
    let missing = |name: &str| std::env::var_os(name).is_none();
    let mut settings = Vec::new();
    if missing("GOMP_SPINCOUNT") && missing("OMP_WAIT_POLICY") {
        settings.push(("GOMP_SPINCOUNT", SPIN_COUNT));
    }
    if missing(CUBLAS_WORKSPACE) {
        settings.push((CUBLAS_WORKSPACE, CUBLAS_WORKSPACES[0]));
    }
    let get = |name: &str| std::env::var(name).ok();
    settings.extend(nccl_buffer(on_several_nodes(&get)));
    settings
}

/// Whether a launcher's variables say that this process belongs to a run on several nodes. `trainer launch` sets up its processes itself.
fn on_several_nodes(get: &dyn Fn(&str) -> Option<String>) -> bool {
    let has_others = |[all, local]: [&str; 2]| get(all).is_some() && get(all) != get(local);
    PROCESSES.into_iter().any(has_others) || get(NODES).is_some_and(|nodes| nodes != "1")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn several_nodes_are_told_by_each_launcher() {
        let ompi = PROCESSES[1];
        for (variables, expected) in [
            (&[][..], false),
            (&[("WORLD_SIZE", "4"), ("LOCAL_WORLD_SIZE", "4")], false),
            (&[("WORLD_SIZE", "4"), ("LOCAL_WORLD_SIZE", "2")], true),
            (&[(ompi[0], "2"), (ompi[1], "1")], true),
            (&[("SLURM_STEP_NUM_NODES", "1")], false),
            (&[("SLURM_STEP_NUM_NODES", "2")], true),
        ] {
            let get = |name: &str| {
                let found = variables.iter().find(|(known, _)| *known == name);
                found.map(|(_, value)| (*value).to_owned())
            };
            assert_eq!(on_several_nodes(&get), expected, "{variables:?}");
        }
    }
}
