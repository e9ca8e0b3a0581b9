//! Checks whether this machine can run the daemon, safely and at full speed; each finding comes with a fix.
//!
//! ```text
//!   kernel ── version, io_uring, kernel AIO, huge pages      memory ── control group limits, memlock, descriptors
//!   drives ── the place of each device: file system, free space, direct I/O
//!   links ── PCIe links of GPUs and NVMe drives, GPU drivers, the drives' schedulers      gpus ── what NVIDIA's driver says of them
//!   gpu_facts ── what `trainer` says of them (ask_trainer): rates of copies, torch, NCCL, cuDNN
//! ```
//!
//! Nothing is changed. Files of the kernel are read below [`Roots`], so that tests can describe machines.

use std::path::{Path, PathBuf};

use offload_support::gpu_facts::GpuFacts;
use offload_support::nvidia::NvidiaGpus;

use crate::config::Config;
use crate::findings::Finding;

mod ask_trainer;
mod drives;
mod gpu_facts;
mod gpus;
mod kernel;
mod links;
mod memory;

pub use ask_trainer::{AskTrainerError, ask_trainer};

/// Directories in which the kernel describes the machine.
#[derive(Clone, Debug)]
pub struct Roots {
    /// `/proc`
    pub proc: PathBuf,
    /// `/sys`
    pub sys: PathBuf,
}

impl Default for Roots {
    fn default() -> Self {
        Self {
            proc: "/proc".into(),
            sys: "/sys".into(),
        }
    }
}

impl Roots {
    /// Reads a file of one line; `None` if it does not exist.
    fn proc(&self, path: &str) -> Option<String> {
        line(&self.proc.join(path))
    }

    fn sys(&self, path: &str) -> Option<String> {
        line(&self.sys.join(path))
    }
}

fn line(path: &Path) -> Option<String> {
    let text = std::fs::read_to_string(path).ok()?;
    Some(text.trim().to_owned())
}

/// Returns the choice in brackets: "advise" for `always [advise] never`.
fn chosen(words: &str) -> Option<&str> {
    Some(words.split_once('[')?.1.split_once(']')?.0)
}

/// The kernel's setting of huge pages for shared memory, which arenas are: "advise", "never" and others. `None` if it has none.
pub fn huge_pages(roots: &Roots) -> Option<String> {
    let words = roots.sys(kernel::SHMEM_ENABLED)?;
    Some(chosen(&words).unwrap_or(&words).to_owned())
}

/// Checks the machine, `nvidia`'s GPUs, and `paths`, which are devices or directories for them. `trainer` is asked only where
/// there are GPUs.
pub fn examine(
    roots: &Roots,
    nvidia: Option<NvidiaGpus>,
    trainer: impl FnOnce() -> Result<GpuFacts, AskTrainerError>,
    config: Option<&Config>,
    paths: &[PathBuf],
) -> Vec<Finding> {
    let mut findings = vec![kernel::version(roots)];
    findings.extend(kernel::engines(roots));
    findings.push(kernel::huge_pages(roots));
    findings.extend(memory::groups(roots, config));
    if config.is_none() {
        findings.push(memory::locking());
    }
    findings.push(memory::descriptors(config));
    findings.extend(drives::examine(
        roots,
        paths,
        config.map_or(&[], |config| &config.devices),
    ));
    findings.extend(links::examine(roots));
    let has_gpus = nvidia.as_ref().is_some_and(|found| !found.gpus.is_empty());
    findings.extend(gpus::examine(nvidia));
    if has_gpus {
        findings.extend(gpu_facts::examine(trainer()));
    }
    findings
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A simulated machine.
    pub(super) struct Machine {
        pub(super) roots: Roots,
        _dir: tempfile::TempDir,
    }

    impl Machine {
        /// Creates a machine with these files, and links to directories; paths begin with proc or sys.
        pub(super) fn new(files: &[(&str, &str)], links: &[(&str, &str)]) -> Self {
            let dir = tempfile::tempdir().unwrap();
            let at = |path: &str| dir.path().join(path);
            for (path, text) in files {
                std::fs::create_dir_all(at(path).parent().unwrap()).unwrap();
                std::fs::write(at(path), format!("{text}\n")).unwrap();
            }
            for (path, target) in links {
                std::fs::create_dir_all(at(path).parent().unwrap()).unwrap();
                std::fs::create_dir_all(at(target)).unwrap();
                std::os::unix::fs::symlink(at(target), at(path)).unwrap();
            }
            let roots = Roots {
                proc: at("proc"),
                sys: at("sys"),
            };
            Self { roots, _dir: dir }
        }
    }

    #[test]
    fn the_chosen_word_stands_in_brackets() {
        assert_eq!(chosen("always [advise] never"), Some("advise"));
        assert_eq!(chosen("none"), None);
        assert_eq!(chosen("]broken["), None);
    }

    #[test]
    fn a_machine_that_says_nothing_is_no_reason_to_panic() {
        let machine = Machine::new(&[], &[]);
        let dir = tempfile::tempdir().unwrap();
        let no_gpu = || unreachable!("trainer is asked only where there are GPUs");
        let places = [dir.path().to_owned()];
        let found = examine(&machine.roots, None, no_gpu, None, &places);
        assert!(found.len() > 6, "{found:?}");
        let nvidia = NvidiaGpus {
            gpus: vec![Default::default()],
            ..Default::default()
        };
        let no_answer = || {
            Err(AskTrainerError::Start {
                program: "trainer".into(),
                error: std::io::ErrorKind::NotFound.into(),
            })
        };
        let beside = examine(&machine.roots, Some(nvidia), no_answer, None, &places);
        let said = |one: &Finding| one.subject == "GPU facts";
        assert!(
            beside.iter().any(said) && !found.iter().any(said),
            "{beside:?}"
        );
    }
}
