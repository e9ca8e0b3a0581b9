//! Tests the Debian package of `trainer` and `bench-io`: its files, and that it installs, finds a libtorch that was
//! fetched, and removes it again.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use crate::harness::{Harness, succeed};
use crate::installed::link_program;

fn piped(mut command: Command) -> String {
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    succeed(command)
}

/// Builds the package from the real `trainer` and small programs in place of the others, which are large; `None` where
/// it cannot be built.
fn package(harness: &Harness, libtorch: &Path) -> Option<PathBuf> {
    if Command::new("dpkg-deb").arg("--version").output().is_err() {
        println!("skipped: the package of trainer: there is no dpkg-deb");
        return None;
    }
    let bin = harness.path("bin");
    std::fs::create_dir(&bin).unwrap();
    std::fs::create_dir_all(libtorch).unwrap();
    link_program(&bin, libtorch);
    std::fs::copy(crate::harness::trainer(), bin.join("trainer")).unwrap();
    let bench_io = bin.join("bench-io");
    std::fs::write(&bench_io, "#!/bin/sh\nif [ \"$1\" = man ]; then echo >\"$2/bench-io.1\"; else echo bench-io 0.1.0; fi\n").unwrap();
    std::fs::set_permissions(
        &bench_io,
        std::os::unix::fs::PermissionsExt::from_mode(0o755),
    )
    .unwrap();
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let mut build = Command::new(root.join("offloadd/packaging/deb.sh"));
    build
        .env("DPKG_DEB_COMPRESSOR_TYPE", "none")
        .env("LD_LIBRARY_PATH", libtorch)
        .arg("offloadd-trainer")
        .arg(&bin)
        .arg(harness.path("out"));
    Some(piped(build).trim().into())
}

#[test]
fn the_package_of_trainer_has_its_programs_and_the_script_that_fetches_libtorch() {
    let harness = Harness::new();
    let Some(package) = package(&harness, &harness.path("torch/lib")) else {
        return;
    };
    let mut list = Command::new("dpkg-deb");
    list.arg("-c").arg(&package);
    let list = piped(list);
    for (mode, name) in [
        ("-rwxr-xr-x", "/usr/bin/trainer\n"),
        ("-rwxr-xr-x", "/usr/bin/trainer-with-torch\n"),
        ("-rwxr-xr-x", "/usr/bin/bench-io\n"),
        (
            "-rwxr-xr-x",
            "/usr/share/offloadd-trainer/fetch-libtorch.py\n",
        ),
        ("-rw-r--r--", "/usr/share/doc/offloadd-trainer/copyright\n"),
        ("-rw-r--r--", "/usr/share/man/man1/trainer.1.gz\n"),
        ("-rw-r--r--", "/usr/share/man/man1/bench-io.1.gz\n"),
        (
            "-rw-r--r--",
            "/usr/share/bash-completion/completions/bench-io\n",
        ),
        (
            "-rw-r--r--",
            "/usr/share/doc/offloadd-trainer/LICENSE-MIT\n",
        ),
    ] {
        let line = list.split_inclusive('\n').find(|line| line.ends_with(name));
        assert!(
            line.is_some_and(|line| line.starts_with(mode)),
            "{name}: {list}"
        );
    }
    assert!(!list.contains("libtorch_cpu"), "{list}");
    let mut control = Command::new("dpkg-deb");
    control.arg("-f").arg(&package).args(["Depends", "Version"]);
    let control = piped(control);
    assert!(
        control.contains("offloadd (= 0.1.0)") && control.contains("libc6 (>= 2."),
        "{control}"
    );
}

#[test]
fn the_package_of_trainer_installs_says_what_is_missing_and_removes_what_it_fetched() {
    if !rustix::process::geteuid().is_root() {
        println!("skipped: installing the package of trainer: only root can install");
        return;
    }
    let harness = Harness::new();
    let fetched = harness.path("fetched/torch/lib");
    let Some(package) = package(&harness, &fetched) else {
        return;
    };
    let root = harness.path("root");
    for part in ["info", "updates", "triggers"] {
        std::fs::create_dir_all(root.join("var/lib/dpkg").join(part)).unwrap();
    }
    std::fs::write(root.join("var/lib/dpkg/status"), "").unwrap();
    // A `python3` without torch comes first.
    let python = harness.path("path/python3");
    std::fs::create_dir(harness.path("path")).unwrap();
    std::os::unix::fs::symlink("/bin/true", python).unwrap();
    let path = std::env::var("PATH").unwrap();
    let dpkg = |args: &[&str]| {
        let mut command = Command::new("dpkg");
        command
            .arg(format!("--root={}", root.display()))
            .args([
                "--force-script-chrootless",
                "--force-depends",
                "--log=/dev/null",
            ])
            .args(args)
            .env("PATH", format!("{}:{path}", harness.path("path").display()))
            .env_remove("LIBTORCH")
            .env_remove("LD_LIBRARY_PATH");
        piped(command)
    };
    let install = ["--install", package.to_str().unwrap()];
    let advice = "/usr/share/offloadd-trainer/fetch-libtorch.py /usr/lib/libtorch";
    assert!(dpkg(&install).contains(advice));
    // As the script does.
    std::fs::create_dir_all(root.join("usr/lib")).unwrap();
    std::fs::rename(harness.path("fetched"), root.join("usr/lib/libtorch")).unwrap();
    let printed = dpkg(&install);
    assert!(!printed.contains(advice), "{printed}");
    dpkg(&["--remove", "offloadd-trainer"]);
    assert!(!root.join("usr/lib/libtorch").exists());
    assert!(!root.join("usr/bin/trainer").exists());
}
