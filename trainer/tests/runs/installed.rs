//! The error that this test finds: a program that was copied to another directory does not find its
//! libraries.

use std::process::Command;

use kernels::gpu::library::dirs_of_loaded;

use crate::harness::{Harness, succeed};

#[test]
fn an_installed_program_finds_libtorch_beside_it() {
    let harness = Harness::new();
    let (program, libtorch) = (
        harness.path("bin/trainer"),
        harness.path("lib/libtorch/torch"),
    );
    std::fs::create_dir(harness.path("bin")).unwrap();
    std::fs::create_dir_all(&libtorch).unwrap();
    // A hard link, because the loader uses the name of the file.
    std::fs::hard_link(env!("CARGO_BIN_EXE_trainer"), &program).unwrap();
    let loaded = dirs_of_loaded("libtorch_cpu");
    std::os::unix::fs::symlink(&loaded[0], libtorch.join("lib")).unwrap();
    let loads = || {
        let mut command = Command::new(&program);
        command
            .arg("--version")
            .env_remove("LD_LIBRARY_PATH")
            .env("LD_TRACE_LOADED_OBJECTS", "1")
            .stdout(std::process::Stdio::piped())
            .stderr(std::process::Stdio::piped());
        succeed(command)
    };
    let found = |dir: &str| format!("libtorch_cpu.so => {dir}/libtorch_cpu.so");
    let beside = format!(
        "{}/../lib/libtorch/torch/lib",
        harness.path("bin").display()
    );
    let said = loads();
    assert!(said.contains(&found(&beside)), "{said}");
    // Without that library, it uses the one that it was built with.
    std::fs::remove_file(libtorch.join("lib")).unwrap();
    let built = loaded[0].canonicalize().unwrap();
    let said = loads();
    assert!(
        said.contains(&found(&built.display().to_string())),
        "{said}"
    );
}
