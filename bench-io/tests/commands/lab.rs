//! The built `bench-io` for tests, `offloadd` beside it in the target folder (`cargo test` of the workspace builds both).

use std::path::Path;
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

/// A folder for files on the drive that holds the target folder: direct I/O needs a real one.
pub(crate) fn drive() -> tempfile::TempDir {
    tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).expect("a folder for the test")
}

/// A daemon that others use too, with a store of 128 MiB in `folder`.
pub(crate) fn daemon(folder: &Path) -> PrivateDaemon {
    let settings = PrivateSettings {
        program: None,
        folder: folder.to_owned(),
        devices: vec![(folder.join("tiles"), 128 << 20)],
        arena_bytes_max: 64 << 20,
        engine: "auto".into(),
        iodepth_max: 64,
    };
    PrivateDaemon::start(settings).expect("a daemon starts")
}

/// Asserts that nothing was left in `folder`.
pub(crate) fn assert_empty(folder: &Path) {
    let left: Vec<_> = std::fs::read_dir(folder).expect("a folder").collect();
    assert!(left.is_empty(), "{left:?}");
}

/// Until a rate is within its limits: on a machine that does something else a second can have any rate, and one measurement that nothing
/// disturbed is enough. Drives of another speed are never right.
pub(crate) const TRIES: usize = 5;

/// Held by tests that measure time: one at a time, or they measure each other.
pub(crate) fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    // Another test failed while it measured; that says nothing about the next.
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Whether paced drives cannot be made here. Then it says that the test is skipped, and why.
pub(crate) fn without_paced_drives() -> bool {
    let output = bench_io(&["paced", "up", "--probe", "1", "16m", "1M", "1M"]);
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
