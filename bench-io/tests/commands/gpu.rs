//! Tests of `--target gpu`: tiles continue into a GPU's memory, here on the fake driver of the `kernels` tests.
//!
//! A read counts only after its bytes are on the GPU, each slot has its own place there, a machine without a GPU gets a clear error, and the program
//! does not need libtorch although the trainer beside it does.

use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::Command;

use offload_client::Daemon;
use serde_json::Value;

use super::harness::{daemon, drive, printed, program};

/// Builds the fake driver into `dir`, under the names of the CUDA libraries; an error says why it cannot be built.
fn fake(dir: &Path) -> Result<(), String> {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("../kernels/tests/gpu/fake");
    let compiler = std::env::var("CXX").unwrap_or_else(|_| "c++".to_owned());
    let header = format!("-DKERNEL_HEADER=\"{}\"", source.join("kernel.h").display());
    let built = Command::new(&compiler)
        .args([
            "-std=c++17",
            "-O1",
            "-fPIC",
            "-shared",
            "-Wl,-soname,libcuda.so.1",
            &header,
        ])
        .arg(source.join("driver.cc"))
        .arg("-o")
        .arg(dir.join("libcuda.so.1"))
        .output()
        .map_err(|error| format!("{compiler}: {error}"))?;
    assert!(built.status.success(), "{}", printed(&built));
    symlink("libcuda.so.1", dir.join("libnvrtc.so.13")).expect("a link");
    Ok(())
}

#[test]
fn tiles_go_to_a_gpu_and_come_from_it() {
    let libraries = tempfile::tempdir().expect("a directory");
    if let Err(reason) = fake(libraries.path()) {
        println!("skipped: {reason}: bench-io --target gpu on a fake GPU driver");
        return;
    }
    let dir = drive();
    let with_gpu = |words: &[&str]| {
        let output = program()
            .args(words)
            .args(["--target", "gpu", "--size", "16m", "--bs", "256k", "--json"])
            .arg("--directory")
            .arg(dir.path())
            .env("LD_LIBRARY_PATH", libraries.path())
            .output()
            .expect("bench-io starts");
        assert!(output.status.success(), "{words:?}: {}", printed(&output));
        serde_json::from_slice::<Value>(&output.stdout).expect("one JSON object")
    };
    let measured = with_gpu(&["run", "--rw", "rw", "--runtime", "0.3", "--ramp_time", "0"]);
    let text = measured.to_string();
    assert!(text.contains("fake"), "{text}");
    assert!(
        measured["read"]["ops"].as_u64().is_some_and(|ops| ops > 0),
        "{text}"
    );
    assert!(
        measured["write"]["ops"].as_u64().is_some_and(|ops| ops > 0),
        "{text}"
    );
}

#[test]
fn a_machine_without_a_gpu_is_told_so() {
    let hidden = tempfile::tempdir().expect("a directory");
    for library in [
        "libcuda.so.1",
        "libcuda.so",
        "libamdhip64.so",
        "libamdhip64.so.7",
        "libamdhip64.so.6",
        "libamdhip64.so.5",
    ] {
        std::fs::write(hidden.path().join(library), "").expect("a file");
    }
    let dir = drive();
    let output = program()
        .args([
            "run",
            "--target",
            "gpu",
            "--size",
            "16m",
            "--runtime",
            "0.1",
            "--directory",
        ])
        .arg(dir.path())
        .env("LD_LIBRARY_PATH", hidden.path())
        .output()
        .expect("bench-io starts");
    assert!(!output.status.success());
    let words = printed(&output);
    assert!(
        words.contains("--target gpu") && words.contains("libcuda.so.1"),
        "{words}"
    );

    // A daemon keeps none of the files.
    let daemon = daemon(dir.path());
    let output = program()
        .args(["run", "--target", "gpu", "--size", "16m", "--bs", "256k"])
        .args(["--iodepth", "8", "--socket"])
        .arg(daemon.socket())
        .env("LD_LIBRARY_PATH", hidden.path())
        .output()
        .expect("bench-io starts");
    assert!(
        printed(&output).contains("libcuda.so.1"),
        "{}",
        printed(&output)
    );
    let daemon = Daemon::connect(daemon.socket()).expect("it is there");
    assert_eq!(daemon.jobs().expect("its jobs"), []);
}

/// Cargo unifies the features of crates that are built together, and `make build` builds the trainer too, but bench-io must not link torch.
#[test]
fn the_program_needs_no_libtorch() {
    let needed = Command::new("ldd")
        .arg(env!("CARGO_BIN_EXE_bench-io"))
        .output();
    let needed = needed.expect("ldd comes with the C library");
    let needed = String::from_utf8_lossy(&needed.stdout);
    assert!(needed.contains("libc.so"), "{needed}");
    assert!(
        !needed.contains("torch") && !needed.contains("libc10"),
        "{needed}"
    );
}
