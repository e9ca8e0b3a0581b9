//! Runs tests of the program that contains it again, on a fake GPU driver (`tests/gpu/fake`).

use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::{Child, Command, ExitStatus};
use std::time::{Duration, Instant};

use tempfile::TempDir;

use self::library_path::before_others;

#[path = "library_path.rs"]
mod library_path;

/// Variable that tells the fake driver the path of its own library, for the kernels it compiles.
pub(crate) const DRIVER: &str = "KERNELS_FAKE";

/// Device information that a test prints with the fake of CUDA.
pub(crate) const CUDA_INFO: &str = "vendor: Cuda, index: 0, name: \"fake\"";

/// Makes a directory for a test's files: cargo's, or the system's if this program was copied to another machine.
pub(crate) fn scratch() -> TempDir {
    tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR"))
        .or_else(|_| tempfile::tempdir())
        .unwrap()
}

/// Builds the fake driver from the directory `source` as `libraries`, which are one file, runs `tests` of this program with it, and looks for `info`,
/// which a test prints about its device. Each of `tests`, which are parts of names, must name one.
pub(crate) fn run_on_fake(
    source: &Path,
    libraries: &[&str],
    options: &[&str],
    tests: &[&str],
    info: &str,
) {
    let dir = scratch();
    if !source.exists() {
        println!(
            "skipped: no source of the fake driver for a GPU's driver: this program was carried"
        );
        return;
    }
    let compiler = std::env::var("CXX").unwrap_or_else(|_| "c++".to_owned());
    let header = format!("-DKERNEL_HEADER=\"{}\"", source.join("kernel.h").display());
    let built = Command::new(&compiler)
        .args(["-std=c++17", "-O1", "-Wall", "-fPIC", "-shared"])
        .args([&format!("-Wl,-soname,{}", libraries[0]), &header])
        .args(options)
        .arg(source.join("driver.cc"))
        .arg("-o")
        .arg(dir.path().join(libraries[0]))
        .output();
    let built = match built {
        Ok(built) => built,
        Err(error) => {
            println!("skipped: {compiler}: {error}: no fake for a GPU's driver");
            return;
        }
    };
    let printed = String::from_utf8_lossy(&built.stderr);
    assert!(built.status.success(), "{printed}");
    symlink(libraries[0], dir.path().join(libraries[1])).unwrap();
    if libraries[0] != "libcuda.so.1" {
        // CUDA is asked first; an empty file of its name hides a real one.
        std::fs::write(dir.path().join("libcuda.so.1"), "").unwrap();
    }

    let log = dir.path().join("output");
    let output = std::fs::File::create(&log).unwrap();
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(tests)
        .arg("--show-output")
        // Spilled registers occur only on a GPU.
        .args(["--skip", "no_kernel_spills_registers"])
        .env("LD_LIBRARY_PATH", before_others(dir.path()))
        .env(DRIVER, dir.path().join(libraries[0]))
        .stderr(output.try_clone().unwrap())
        .stdout(output)
        .spawn()
        .unwrap();
    let status = wait_at_most(Duration::from_secs(400), &mut child);
    let output = std::fs::read_to_string(&log).unwrap();
    let success = status.is_some_and(|status| status.success());
    assert!(success, "{status:?}\n{output}");
    assert!(
        !output.contains("skipped: "),
        "a test found no GPU:\n{output}"
    );
    assert!(output.contains(info), "another driver was found:\n{output}");
    for part in tests {
        let ran = |line: &str| line.contains(part) && line.ends_with(" ... ok");
        assert!(output.lines().any(ran), "no test {part}:\n{output}");
    }
}

/// Waits for the process; `None` if it had to be killed, because the work of a stream never ended.
fn wait_at_most(limit: Duration, child: &mut Child) -> Option<ExitStatus> {
    let start = Instant::now();
    while start.elapsed() < limit {
        if let Some(status) = child.try_wait().unwrap() {
            return Some(status);
        }
        std::thread::sleep(Duration::from_millis(50));
    }
    child.kill().unwrap();
    child.wait().unwrap();
    None
}
