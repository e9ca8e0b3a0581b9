//! Tests of the canonical run at a small size: it runs, leaves no files behind, reports rates, and asks its daemon only for what the daemon grants.

use std::process::Output;

use crate::harness::{program, says_how_it_went, says_what_it_is_of};

fn bench_io(dir: &std::path::Path, args: &[&str]) -> Output {
    program()
        .arg("--directory")
        .arg(dir)
        .args(args)
        .output()
        .unwrap()
}

#[test]
fn with_more_in_flight_than_a_daemon_grants_unasked_it_gives_its_numbers_and_leaves_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let small = ["--size=16m", "--tile=64KiB", "--iodepth=100", "--json"];
    let output = bench_io(dir.path(), &small);
    let words = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{words}");
    let report: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(report["settings"]["tile_count"], 256);
    says_what_it_is_of(&report, dir.path());
    for who in ["daemon", "engine_alone"] {
        for way in ["write", "read"] {
            says_how_it_went(&report[who][way], way);
            assert_eq!(report[who][way][way]["bytes"], 16 << 20, "{who} {way}");
        }
    }
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
}

#[test]
fn more_in_flight_than_a_daemon_can_grant_is_refused_before_anything_is_made() {
    let dir = tempfile::tempdir().unwrap();
    let output = bench_io(dir.path(), &["--iodepth=1025"]);
    let words = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success());
    assert!(
        words.contains("--iodepth 1025: must be 1 to 1024"),
        "{words}"
    );
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
}
