//! The `trainer` command: finds libtorch and becomes `trainer-with-torch`, which lies beside it.
//!
//! The system's loader resolves libraries before a program's `main`, so a program that is linked with libtorch cannot
//! say what to do when libtorch is missing. This program is linked with the system's libraries only:
//!
//! ```text
//!   environment ──▶ libraries found? ─── no ──▶ LIBTORCH, torch of python3 ─── none fits ──▶ error: what, where, what to do
//!                        │ yes                           │ LD_LIBRARY_PATH
//!                        └───────────────▶ exec ◀────────┘
//! ```

#![forbid(unsafe_code)]

mod libraries;

use std::io::Write;
use std::os::unix::process::CommandExt;
use std::process::{Command, ExitCode};

use kernels::gpu::{CUBLAS_WORKSPACE, CUBLAS_WORKSPACES, nccl_buffer};

/// The program that trains.
const PROGRAM: &str = "trainer-with-torch";

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

fn main() -> ExitCode {
    let error = start();
    // The reader of standard error may be gone.
    let _ = writeln!(std::io::stderr(), "trainer: {error}");
    ExitCode::FAILURE
}

/// Becomes the program. Returns the error that prevented it.
fn start() -> String {
    let beside = std::env::current_exe().map(|path| path.with_file_name(PROGRAM));
    let program = match beside {
        Ok(program) if program.is_file() => program,
        Ok(program) => {
            return format!(
                "no program at {}: it is installed and moved together with trainer; install both again",
                program.display()
            );
        }
        Err(error) => return format!("cannot find the directory of this program: {error}"),
    };
    let library_path = match libraries::library_path(&program) {
        Ok(path) => path,
        Err(error) => return error,
    };
    let library_path = library_path.map(|path| ("LD_LIBRARY_PATH", path));
    let mut args = std::env::args_os();
    let mut command = Command::new(&program);
    // Keeps the name in help texts and `ps`.
    command.arg0(args.next().unwrap_or_else(|| "trainer".into()));
    command.args(args).envs(settings()).envs(library_path);
    format!("cannot start {}: {}", program.display(), command.exec())
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
