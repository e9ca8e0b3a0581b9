//! The fused kernels' arithmetic without a GPU: their sources are compiled for this processor, a block's threads emulated by fibers, and
//! the results held against the definition in double precision (`fused.cpp`).
//!
//! What could go wrong: a formula, a size that is no multiple of a vector or of a block, a barrier that some threads miss, a write beyond
//! a row. What this does not see: memory that two threads of a block race for between barriers, and speed.

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
        // The fp16 conversions are assembler, which is left out.
        .args(["-Wno-uninitialized", "-Wno-unknown-pragmas"])
        .arg("-I")
        .arg(kernels.join("src/gpu/source"))
        .arg(kernels.join("tests/emulated/fused.cpp"))
        .arg("-o")
        .arg(&program)
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&compiled.stderr);
    assert!(compiled.status.success(), "{compiler}:\n{said}");
    let run = Command::new(&program).output().unwrap();
    let said = String::from_utf8_lossy(&run.stdout);
    assert!(run.status.success(), "{said}");
    for checked in ["exp and log", "norms", "rotary", "gated", "loss"] {
        assert!(said.contains(&format!("{checked} checked")), "{said}");
    }
}
