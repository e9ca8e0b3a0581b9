//! Runs the built `bench-io`, with `offloadd` beside it in the target directory (`cargo test` of the workspace builds both).

use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::{Mutex, MutexGuard, PoisonError};

use offload_client::private::{PrivateDaemon, PrivateSettings};
use serde_json::Value;

/// Command for the program, without arguments.
pub(crate) fn program() -> Command {
    Command::new(env!("CARGO_BIN_EXE_bench-io"))
}

/// Runs the program with `args` to its end.
pub(crate) fn bench_io(args: &[&str]) -> Output {
    program().args(args).output().expect("bench-io starts")
}

/// Runs the program, expects success, and returns its JSON.
pub(crate) fn json(args: &[&str]) -> Value {
    let output = bench_io(args);
    assert!(output.status.success(), "{args:?}: {}", printed(&output));
    serde_json::from_slice(&output.stdout).expect("one JSON object")
}

/// Runs the program, expects a refusal, and returns its output.
pub(crate) fn refused(args: &[&str]) -> String {
    let output = bench_io(args);
    assert!(!output.status.success(), "{args:?} went well");
    printed(&output)
}

/// Returns the program's output for people.
pub(crate) fn printed(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// Returns the picture that `trainer/bench/io/draw.py` draws of a report.
pub(crate) fn drawn(report: &Path) -> String {
    let output = std::process::Command::new("python3")
        .arg(concat!(
            env!("CARGO_MANIFEST_DIR"),
            "/../trainer/bench/io/draw.py"
        ))
        .arg(report)
        .output()
        .expect("python3");
    assert!(output.status.success(), "{}", printed(&output));
    std::fs::read_to_string(report.with_extension("svg")).expect("a picture")
}

/// Asserts that a report names its program, command and devices.
pub(crate) fn says_what_it_is_of(report: &Value, dir: &Path) {
    assert!(report["version"].as_u64().is_some(), "{report}");
    let text = |value: &Value| value.as_str().expect("a text").to_owned();
    assert_eq!(
        text(&report["program"]),
        concat!("bench-io ", env!("CARGO_PKG_VERSION"))
    );
    assert!(text(&report["command"]).contains("bench-io"), "{report}");
    assert!(text(&report["machine"]["kernel"]).contains("Linux"));
    let device = text(&report["devices"][0]["path"]);
    assert!(Path::new(&device).starts_with(dir), "{device}");
    assert!(!text(&report["devices"][0]["under"]).is_empty());
    assert!(report["settings"].is_object(), "{report}");
    // Tests usually run a debug build, which is a warning.
    let warnings = report["warnings"].as_array().expect("a list");
    assert_eq!(
        warnings
            .iter()
            .any(|printed| text(printed).contains("a debug build")),
        cfg!(debug_assertions),
        "{report}"
    );
}

/// Asserts that the figures of one direction have latencies and CPU time.
pub(crate) fn says_how_it_went(figures: &Value, way: &str) {
    let latencies = ["p50", "p99", "p999", "max"].map(|which| {
        figures[way][format!("latency_ns_{which}")]
            .as_u64()
            .expect("a latency")
    });
    assert!(latencies[0] > 0 && latencies.is_sorted(), "{figures}");
    assert!(figures["cpu"]["s_per_gb"].as_f64().is_some(), "{figures}");
}

/// Makes a directory on the drive that holds the target directory, because direct I/O needs a real drive.
pub(crate) fn drive() -> tempfile::TempDir {
    tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).expect("a directory for the test")
}

/// Starts a daemon with a store of 128 MiB in `dir`, which other processes may use too.
pub(crate) fn daemon(dir: &Path) -> PrivateDaemon {
    let settings = PrivateSettings {
        program: None,
        dir: dir.to_owned(),
        devices: vec![(dir.join("tiles"), 128 << 20)],
        arena_bytes_max: 64 << 20,
        engine: "auto".into(),
        iodepth_max: 64,
    };
    PrivateDaemon::start(settings).expect("a daemon starts")
}

/// Asserts that nothing was left in `dir`.
pub(crate) fn assert_empty(dir: &Path) {
    let left: Vec<_> = std::fs::read_dir(dir).expect("a directory").collect();
    assert!(left.is_empty(), "{left:?}");
}

/// Measurements until a rate must be within its limits. On a busy machine a rate can have any value for a second, so one undisturbed measurement is
/// enough; drives with a wrong limit never pass.
pub(crate) const TRIES: usize = 5;

/// Writes a program `name` in `dir` that runs `lines` in a shell. Another process writes the file: a file open for writing here would be inherited by
/// a process that another test starts at this moment, and a program that is open for writing cannot be started.
pub(crate) fn script(dir: &Path, name: &str, lines: &str) -> PathBuf {
    let path = dir.join(name);
    let made = Command::new("sh")
        .args([
            "-c",
            r#"printf '#!/bin/sh\n%s\n' "$1" > "$0" && chmod 755 "$0""#,
        ])
        .arg(&path)
        .arg(lines)
        .status();
    assert!(made.expect("sh starts").success());
    path
}

/// Held by tests that measure time, so that they do not measure each other.
pub(crate) fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    // Another test failed while it measured, which does not affect the next one.
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Whether rate-limited drives cannot be made here. Then prints that the test is skipped, and why.
pub(crate) fn cannot_make_testdrives() -> bool {
    let output = bench_io(&[
        "testdrives",
        "create",
        "--probe",
        "1",
        "16m",
        "1MB/s",
        "1MB/s",
    ]);
    if output.status.success() {
        return false;
    }
    println!(
        "skipped: {}: {}",
        std::thread::current().name().unwrap_or("a test"),
        printed(&output).trim()
    );
    true
}
