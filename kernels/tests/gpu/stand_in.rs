//! The tests of this folder hold without a GPU too, on a stand-in for the driver that runs kernels on the CPU.
//!
//! What could go wrong: an argument is passed in another order or size, an offset is wrong, a wait is forgotten, an operation of a kernel
//! is not that of the definition; and all of it shows only on a machine nobody has at hand. `stand_in/driver.cc` has the functions of
//! libcuda and NVRTC that we call; what is enqueued there runs only when it is waited for. This program runs itself with the stand-in
//! first among the libraries. What a GPU's compiler makes of a kernel is not seen here.

use std::path::Path;
use std::process::{Child, Command, ExitStatus};
use std::time::{Duration, Instant};

const TMP: &str = env!("CARGO_TARGET_TMPDIR");
const FOLDER: &str = "KERNELS_STAND_IN";

#[test]
fn the_tests_of_a_gpu_hold_on_a_stand_in() {
    if std::env::var_os(FOLDER).is_some() {
        // In the child already.
        return;
    }
    let folder = tempfile::tempdir_in(TMP).unwrap();
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/gpu/stand_in");
    let compiler = std::env::var("CXX").unwrap_or_else(|_| "c++".to_owned());
    let built = Command::new(&compiler)
        .args([
            "-std=c++17",
            "-O2",
            "-Wall",
            "-fPIC",
            "-shared",
            "-Wl,-soname,libcuda.so.1",
        ])
        .arg(format!(
            "-DKERNEL_HEADER=\"{}\"",
            source.join("kernel.h").display()
        ))
        .arg(source.join("driver.cc"))
        .arg("-o")
        .arg(folder.path().join("libcuda.so.1"))
        .output();
    let built = match built {
        Ok(built) => built,
        Err(error) => {
            println!("skipped: {compiler}: {error}: no stand-in for a GPU's driver");
            return;
        }
    };
    let said = String::from_utf8_lossy(&built.stderr);
    assert!(built.status.success(), "{said}");
    std::os::unix::fs::symlink("libcuda.so.1", folder.path().join("libnvrtc.so.13")).unwrap();

    let log = folder.path().join("output");
    let output = std::fs::File::create(&log).unwrap();
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["adamw::", "memory::", "reduce::", "streams::"])
        .args(["tile_updater::", "--show-output"])
        // Spilled registers are a GPU's matter.
        .args(["--skip", "no_kernel_spills_registers"])
        .env("LD_LIBRARY_PATH", folder.path())
        .env(FOLDER, folder.path())
        .stderr(output.try_clone().unwrap())
        .stdout(output)
        .spawn()
        .unwrap();
    let status = wait_at_most(Duration::from_secs(400), &mut child);
    let output = std::fs::read_to_string(&log).unwrap();
    assert!(
        status.is_some_and(|status| status.success()),
        "{status:?}\n{output}"
    );
    assert!(
        !output.contains("skipped: "),
        "the stand-in was not found:\n{output}"
    );
    assert!(
        output.contains("\"stand-in\""),
        "another driver was found:\n{output}"
    );
    let passed = output.matches(" ... ok").count();
    assert!(passed >= 20, "only {passed} tests ran:\n{output}");
}

/// None if it had to be killed: the work of a stream never came to an end.
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
