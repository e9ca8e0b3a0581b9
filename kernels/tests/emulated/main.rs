//! Tests the fused kernels' arithmetic without a GPU: their sources are compiled for this processor, with fibers as the threads of a block, and the
//! results are compared with the definition in double precision (`fused.cpp`).
//!
//! This finds wrong formulas, sizes that are not a multiple of a vector or a block, barriers that some threads miss, and writes beyond a row. It does
//! not find races between two threads of a block between barriers, or slowness.

use std::path::Path;
use std::process::Command;

#[test]
fn fused_kernels_compute_their_definition_on_an_emulated_block() {
    let compiler = std::env::var("CXX").unwrap_or_else(|_| "c++".to_owned());
    if Command::new(&compiler).arg("--version").output().is_err() {
        println!("skipped: no C++ compiler ({compiler}): fused kernels on an emulated block");
        return;
    }
    let kernels = Path::new(env!("CARGO_MANIFEST_DIR"));
    let program = Path::new(env!("CARGO_TARGET_TMPDIR")).join("emulated_fused");
    let compiled = Command::new(&compiler)
        .args(["-std=c++17", "-O1", "-ffp-contract=off", "-Wall", "-Werror"])
        // The fp16 conversions are in assembler, which is left out.
        .args(["-Wno-uninitialized", "-Wno-unknown-pragmas"])
        .arg("-I")
        .arg(kernels.join("src/gpu/source"))
        .arg(kernels.join("tests/emulated/fused.cpp"))
        .arg("-o")
        .arg(&program)
        .output()
        .unwrap();
    let printed = String::from_utf8_lossy(&compiled.stderr);
    assert!(compiled.status.success(), "{compiler}:\n{printed}");
    let run = Command::new(&program).output().unwrap();
    let printed = String::from_utf8_lossy(&run.stdout);
    assert!(run.status.success(), "{printed}");
    for checked in ["exp and log", "norms", "rotary", "gated", "loss"] {
        assert!(printed.contains(&format!("{checked} checked")), "{printed}");
    }
}
