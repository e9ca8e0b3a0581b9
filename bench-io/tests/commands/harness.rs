//! The built `bench-io` for tests, `offloadd` beside it in the target directory (`cargo test` of the workspace builds both).

use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::{Mutex, MutexGuard, PoisonError};

use offload_client::private::{PrivateDaemon, PrivateSettings};
use serde_json::Value;

/// The program, nothing said to it yet.
pub(crate) fn program() -> Command {
    Command::new(env!("CARGO_BIN_EXE_bench-io"))
}

/// Runs it with `args`, to its end.
pub(crate) fn bench_io(args: &[&str]) -> Output {
    program().args(args).output().expect("bench-io starts")
}

/// Expects it to end well. Its JSON.
pub(crate) fn json(args: &[&str]) -> Value {
    let output = bench_io(args);
    assert!(output.status.success(), "{args:?}: {}", said(&output));
    serde_json::from_slice(&output.stdout).expect("one JSON object")
}

/// Expects a refusal. What it said.
pub(crate) fn refused(args: &[&str]) -> String {
    let output = bench_io(args);
    assert!(!output.status.success(), "{args:?} went well");
    said(&output)
}

/// What it wrote for people.
pub(crate) fn said(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// Asserts that a report names who made it, how it was asked, and what of.
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
    // Whoever runs tests has a debug build.
    let warnings = report["warnings"].as_array().expect("a list");
    assert_eq!(
        warnings
            .iter()
            .any(|said| text(said).contains("a debug build")),
        cfg!(debug_assertions),
        "{report}"
    );
}

/// Asserts that figures of one direction have latencies and processor time.
pub(crate) fn says_how_it_went(figures: &Value, way: &str) {
    let latencies = ["p50", "p99", "p999", "max"].map(|which| {
        figures[way][format!("latency_ns_{which}")]
            .as_u64()
            .expect("a latency")
    });
    assert!(latencies[0] > 0 && latencies.is_sorted(), "{figures}");
    assert!(figures["cpu"]["s_per_gb"].as_f64().is_some(), "{figures}");
}

/// A directory for files on the drive that holds the target directory: direct I/O needs a real one.
pub(crate) fn drive() -> tempfile::TempDir {
    tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).expect("a directory for the test")
}

/// A daemon that others use too, with a store of 128 MiB in `dir`.
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

/// Until a rate is within its limits: on a machine that does something else a second can have any rate, and one measurement that nothing
/// disturbed is enough. Drives of another speed are never right.
pub(crate) const TRIES: usize = 5;

/// A program `name` in `dir` that runs `lines` of the shell. Written by another process: what this one has open for writing, a
/// process that another test starts just now has too, and a program that is open for writing cannot be started.
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

/// Held by tests that measure time: one at a time, or they measure each other.
pub(crate) fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    // Another test failed while it measured; that says nothing about the next.
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Whether rate-limited drives cannot be made here. Then it says that the test is skipped, and why.
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
        said(&output).trim()
    );
    true
}
