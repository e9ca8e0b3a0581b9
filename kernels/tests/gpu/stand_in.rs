//! The tests of this folder hold without a GPU too, on a stand-in for the driver that runs kernels on the CPU.
//!
//! What could go wrong: an argument is passed in another order or size, an offset is wrong, a wait is forgotten, an operation of a kernel
//! is not that of the definition; and all of it shows only on a machine nobody has at hand. `stand_in/driver.cc` has the functions of
//! the driver and the run-time compiler that we call, under CUDA's and under HIP's names; what is enqueued there runs only when it is
//! waited for. This program runs itself with the stand-in first among the libraries. What a GPU's compiler makes of a kernel is not seen
//! here.

use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::{Child, Command, ExitStatus};
use std::time::{Duration, Instant};

use crate::device::scratch;

/// Tells the stand-in where its own library lies, for the kernels it compiles.
pub(crate) const DRIVER: &str = "KERNELS_STAND_IN";

const CUDA_INFO: &str = "vendor: Cuda, index: 0, name: \"stand-in\"";

#[test]
fn the_tests_of_a_gpu_hold_on_a_stand_in_for_cuda() {
    let libraries = ["libcuda.so.1", "libnvrtc.so.13"];
    let tests = [
        "adamw::",
        "memory::",
        "reduce::",
        "shelf::",
        "streams::",
        "tile_updater::",
    ];
    run_on_stand_in(&libraries, &[], &tests, CUDA_INFO, 14);
}

/// torch's operators beside the kernels run at once on the CPU, so the kernels do too.
#[cfg(feature = "torch")]
#[test]
fn the_tests_of_fused_kernels_hold_on_a_stand_in() {
    let libraries = ["libcuda.so.1", "libnvrtc.so.13"];
    run_on_stand_in(
        &libraries,
        &["-DSTAND_IN_EAGER"],
        &["fused::"],
        CUDA_INFO,
        4,
    );
}

#[test]
fn the_tests_of_a_gpu_hold_on_a_stand_in_for_hip() {
    let libraries = ["libamdhip64.so.7", "libhiprtc.so.7"];
    // The kernels are those of the other test.
    let tests = [
        "memory::",
        "streams::",
        "hundred_steps",
        "tile_updater::a_tile",
    ];
    let info = "vendor: Hip, index: 0, name: \"stand-in\", arch: \"gfx90a:sramecc+:xnack-\"";
    run_on_stand_in(&libraries, &["-DSTAND_IN_HIP"], &tests, info, 14);
}

/// Builds the stand-in as `libraries`, which are one file, runs `tests` of this program with it and looks for `info`, which a test prints
/// of its device. At least `passed_min` of them must be there.
fn run_on_stand_in(
    libraries: &[&str],
    options: &[&str],
    tests: &[&str],
    info: &str,
    passed_min: usize,
) {
    let folder = scratch();
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/gpu/stand_in");
    if !source.exists() {
        println!("skipped: no source of the stand-in for a GPU's driver: this program was carried");
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
        .arg(folder.path().join(libraries[0]))
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
    symlink(libraries[0], folder.path().join(libraries[1])).unwrap();
    if libraries[0] != "libcuda.so.1" {
        // CUDA is asked first; an empty file of its name hides a real one.
        std::fs::write(folder.path().join("libcuda.so.1"), "").unwrap();
    }

    let log = folder.path().join("output");
    let output = std::fs::File::create(&log).unwrap();
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(tests)
        .arg("--show-output")
        // Spilled registers are a GPU's matter.
        .args(["--skip", "no_kernel_spills_registers"])
        .env("LD_LIBRARY_PATH", folder.path())
        .env(DRIVER, folder.path().join(libraries[0]))
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
    let passed = output.matches(" ... ok").count();
    assert!(passed >= passed_min, "only {passed} tests ran:\n{output}");
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
