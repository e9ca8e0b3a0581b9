//! Runs the tests of several GPUs without a GPU, on fakes of the driver and of NCCL: three ranks, each with its own GPU.
//!
//! This finds arguments in the wrong order or size, results at the wrong place, and streams that do not end when a rank dies, which otherwise show
//! only on machines with several GPUs.

use std::path::Path;
use std::process::Command;

use crate::library_path::before_others;

const DIR: &str = "KERNELS_FAKE";

#[test]
fn the_tests_of_gpus_together_hold_on_a_fake() {
    if std::env::var_os(DIR).is_some() {
        // This process is already the child.
        return;
    }
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let package = Path::new(env!("CARGO_MANIFEST_DIR"));
    let driver_source = package.join("../tests/gpu/fake");
    let compiler = std::env::var("CXX").unwrap_or_else(|_| "c++".to_owned());
    if let Err(error) = Command::new(&compiler).arg("--version").output() {
        println!("skipped: {compiler}: {error}: no fake for GPUs");
        return;
    }
    let kernel = driver_source.join("kernel.h");
    let driver = dir.path().join("libcuda.so.1");
    let build = |source: &Path, name: &str, more: &[&Path]| {
        let built = Command::new(&compiler)
            .args(["-std=c++17", "-O2", "-Wall", "-fPIC", "-shared"])
            .arg(format!("-Wl,-soname,{name}"))
            .arg(format!("-DKERNEL_HEADER=\"{}\"", kernel.display()))
            .arg(source)
            .args(more)
            .arg("-o")
            .arg(dir.path().join(name))
            .output()
            .unwrap();
        assert!(
            built.status.success(),
            "{}",
            String::from_utf8_lossy(&built.stderr)
        );
    };
    build(&driver_source.join("driver.cc"), "libcuda.so.1", &[]);
    let nccl = package.join("tests/collective/fake/nccl.cc");
    build(&nccl, "libnccl.so.2", &[&driver]);
    std::os::unix::fs::symlink("libcuda.so.1", dir.path().join("libnvrtc.so.13")).unwrap();
    let output = Command::new(std::env::current_exe().unwrap())
        .args(["gpus::", "--show-output", "--test-threads=1"])
        .env("LD_LIBRARY_PATH", before_others(dir.path()))
        .env(DIR, dir.path())
        .env("KERNELS_FAKE_GPUS", "3")
        .output()
        .unwrap();
    let printed = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{printed}");
    assert!(!printed.contains("skipped: "), "{printed}");
    assert!(printed.contains("all-gather on 3 GPUs"), "{printed}");
}
