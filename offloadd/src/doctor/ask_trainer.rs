//! Asks the program `trainer` about GPUs: the daemon itself has no GPU code.

use std::io;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use offload_support::gpu_facts::GpuFacts;

/// Most time for an answer. Opening eight GPUs takes some seconds, and torch some more.
const LIMIT: Duration = Duration::from_secs(60);

/// Time between looks at whether the program has ended.
const LOOK: Duration = Duration::from_millis(20);

/// Why there are no facts.
#[derive(Debug, thiserror::Error)]
pub enum AskTrainerError {
    /// The program is not there, or the system refuses to start it.
    #[error("cannot start {}: {error}", program.display())]
    Start {
        /// The program.
        program: PathBuf,
        /// The system's reason.
        error: io::Error,
    },
    /// The program ended with an error.
    #[error("{}: {said}", program.display())]
    Failed {
        /// The program.
        program: PathBuf,
        /// What it wrote, or how it ended.
        said: String,
    },
    /// The program did not end in time.
    #[error("{} had not answered after {} s and was ended", program.display(), limit.as_secs())]
    Late {
        /// The program.
        program: PathBuf,
        /// The time.
        limit: Duration,
    },
}

/// Asks the `trainer` beside this program, or the one in PATH.
///
/// # Errors
/// There is none, or it does not answer.
pub fn ask_trainer() -> Result<GpuFacts, AskTrainerError> {
    let beside = std::env::current_exe().map(|path| path.with_file_name("trainer"));
    let program = beside.ok().filter(|path| path.is_file());
    ask(&program.unwrap_or_else(|| "trainer".into()), LIMIT)
}

fn ask(program: &Path, limit: Duration) -> Result<GpuFacts, AskTrainerError> {
    let failed = |said| AskTrainerError::Failed {
        program: program.to_owned(),
        said,
    };
    let start = |error| AskTrainerError::Start {
        program: program.to_owned(),
        error,
    };
    let mut child = Command::new(program)
        .arg("gpu-facts")
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .map_err(start)?;
    // The answer fits into a pipe.
    if !ends_within(limit, &mut child).map_err(start)? {
        return Err(AskTrainerError::Late {
            program: program.to_owned(),
            limit,
        });
    }
    let output = child.wait_with_output().map_err(start)?;
    if !output.status.success() {
        let said = String::from_utf8_lossy(&output.stderr).trim().to_owned();
        return Err(failed(match said.is_empty() {
            true => output.status.to_string(),
            false => said,
        }));
    }
    serde_json::from_slice(&output.stdout)
        .map_err(|error| failed(format!("another version than this program's: {error}")))
}

/// Whether the process has ended within `limit`. It is killed if it has not.
fn ends_within(limit: Duration, child: &mut Child) -> io::Result<bool> {
    let start = Instant::now();
    while child.try_wait()?.is_none() {
        if start.elapsed() > limit {
            child.kill()?;
            child.wait()?;
            return Ok(false);
        }
        std::thread::sleep(LOOK);
    }
    Ok(true)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    /// A program that does what `script` says.
    fn program(dir: &Path, script: &str) -> PathBuf {
        let path = dir.join("trainer");
        // Renamed, so that no fork of another test has it open for writing.
        std::fs::write(dir.join("script"), format!("#!/bin/sh\n{script}\n")).unwrap();
        std::fs::set_permissions(dir.join("script"), PermissionsExt::from_mode(0o755)).unwrap();
        std::fs::rename(dir.join("script"), &path).unwrap();
        path
    }

    #[test]
    fn each_way_of_not_answering_is_an_error_that_names_the_program() {
        let dir = tempfile::tempdir().unwrap();
        for (script, limit_s, words) in [
            ("echo no driver >&2; exit 1", 60, "trainer: no driver"),
            ("exit 3", 60, "trainer: exit status: 3"),
            ("echo '{}'", 60, "trainer: another version than"),
            (
                "exec sleep 600",
                0,
                "trainer had not answered after 0 s and was ended",
            ),
        ] {
            let asked = ask(&program(dir.path(), script), Duration::from_secs(limit_s));
            let text = asked.unwrap_err().to_string();
            assert!(text.contains(words), "{words}: {text}");
        }
        let text = ask(&dir.path().join("absent"), LIMIT).unwrap_err();
        assert!(text.to_string().starts_with("cannot start "), "{text}");
    }

    #[test]
    fn the_facts_are_those_that_trainer_prints() {
        let dir = tempfile::tempdir().unwrap();
        let answer = r#"{"gpus":[{"pci":"0000:41:00.0","copies":{"measured":{"to_gpu_bytes_per_s":1e9,"from_gpu_bytes_per_s":2e9}},"planned_bytes_per_s":5e10}],"unopened":[],"torch_unusable":null,"nccl":{"version":"2.28.9"},"cudnn":{"missing":"not here"}}"#;
        let script = format!("[ \"$*\" = gpu-facts ] && echo '{answer}'");
        let facts = ask(&program(dir.path(), &script), LIMIT).unwrap();
        assert_eq!(facts.gpus[0].pci, "0000:41:00.0");
    }
}
