//! The errors that these tests find: a program that was copied to another directory does not find its libraries;
//! without them it shows only the loader's message.

use std::path::Path;
use std::process::{Command, Stdio};

use crate::harness::{Harness, fail, succeed};

#[test]
fn an_installed_program_finds_libtorch_beside_it() {
    let harness = Harness::new();
    let (program, libtorch) = (
        harness.path("bin/trainer-with-torch"),
        harness.path("lib/libtorch/torch"),
    );
    std::fs::create_dir(harness.path("bin")).unwrap();
    std::fs::create_dir_all(&libtorch).unwrap();
    let loads = |program: &Path| {
        let mut command = Command::new(program);
        command
            .env_remove("LD_LIBRARY_PATH")
            .env("LD_TRACE_LOADED_OBJECTS", "1")
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        succeed(command)
    };
    let built = Path::new(env!("CARGO_BIN_EXE_trainer-with-torch"));
    let said = loads(built);
    let library = said
        .split_once("libtorch_cpu.so => ")
        .and_then(|(_, rest)| rest.split_once(" ("));
    let library = Path::new(library.expect("it is linked with libtorch").0);
    let built_in = library.parent().unwrap().canonicalize().unwrap();
    // A hard link, because the loader uses the name of the file.
    std::fs::hard_link(built, &program).unwrap();
    std::os::unix::fs::symlink(&built_in, libtorch.join("lib")).unwrap();
    let found = |dir: &str| format!("libtorch_cpu.so => {dir}/libtorch_cpu.so");
    let beside = format!(
        "{}/../lib/libtorch/torch/lib",
        harness.path("bin").display()
    );
    let said = loads(&program);
    assert!(said.contains(&found(&beside)), "{said}");
    // Without that library, it uses the one that it was built with.
    std::fs::remove_file(libtorch.join("lib")).unwrap();
    let said = loads(&program);
    assert!(
        said.contains(&found(&built_in.display().to_string())),
        "{said}"
    );
}

/// Links a small `trainer-with-torch` with an empty libtorch_cpu.so into `bin`, and puts the library into `lib`.
pub(crate) fn link_program(bin: &Path, lib: &Path) {
    let cc = |source: &str, args: &[&std::ffi::OsStr]| {
        let file = bin.join("source.c");
        std::fs::write(&file, source).unwrap();
        let status = Command::new("cc").arg(&file).args(args).status().unwrap();
        assert!(status.success());
    };
    let (library, program) = (lib.join("libtorch_cpu.so"), bin.join("trainer-with-torch"));
    let (shared, out) = ("-shared".as_ref(), "-o".as_ref());
    cc(
        "",
        &[
            shared,
            "-Wl,-soname,libtorch_cpu.so".as_ref(),
            out,
            library.as_ref(),
        ],
    );
    let source = r#"#include <stdio.h>
        int main(int n, char **a) { return printf("%s got %s\n", a[0], a[1]) < 0; }"#;
    let used = "-Wl,--no-as-needed".as_ref();
    let beside = "-Wl,-rpath,$ORIGIN/../lib/libtorch/torch/lib".as_ref();
    cc(
        source,
        &[used, library.as_ref(), beside, out, program.as_ref()],
    );
    std::fs::remove_file(bin.join("source.c")).unwrap();
}

#[test]
fn a_program_without_libtorch_says_how_to_get_it_and_finds_an_installed_torch() {
    let harness = Harness::new();
    let (bin, torch) = (harness.path("bin"), harness.path("site/torch"));
    std::fs::create_dir(&bin).unwrap();
    std::fs::create_dir_all(torch.join("lib")).unwrap();
    link_program(&bin, &torch.join("lib"));
    std::fs::copy(crate::harness::trainer(), bin.join("trainer")).unwrap();
    let trainer = || {
        let mut command = Command::new(bin.join("trainer"));
        command
            .args(["train", "RUN.toml"])
            .env("PATH", harness.path("site"))
            .env_remove("LD_LIBRARY_PATH")
            .env_remove("LIBTORCH")
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        command
    };
    let said = fail(trainer());
    for part in [
        "trainer: cannot start: not found: libtorch_cpu.so\n",
        "python3 was not found",
        "lib/libtorch/torch/lib",
        "pip install 'torch==2.11.*'",
        "export LIBTORCH=",
    ] {
        assert!(said.contains(part), "{part}: {said}");
    }
    let got = format!("{} got train\n", bin.join("trainer").display());
    let mut named = trainer();
    named.env("LIBTORCH", &torch);
    assert_eq!(succeed(named), got);
    // A `python3` whose torch this is.
    let python = harness.path("site/python3");
    std::fs::write(&python, format!("#!/bin/sh\necho '{}'\n", torch.display())).unwrap();
    std::fs::set_permissions(&python, std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
    assert_eq!(succeed(trainer()), got);
    std::fs::write(torch.join("version.py"), "__version__ = '2.12.0'\n").unwrap();
    let said = fail(trainer());
    let other = format!("{} is of torch 2.12.0", torch.join("lib").display());
    assert!(said.contains(&other), "{said}");
    // What needs no libtorch runs without it.
    let mut reference = Command::new(bin.join("trainer"));
    reference
        .args(["config-reference", "train.epochs"])
        .env_remove("LD_LIBRARY_PATH")
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    assert!(succeed(reference).contains("epochs"));
    // The two programs belong together.
    std::fs::remove_file(bin.join("trainer-with-torch")).unwrap();
    let said = fail(trainer());
    assert!(
        said.contains("no program at ") && said.contains("install both again"),
        "{said}"
    );
}
