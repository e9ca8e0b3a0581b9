//! Tests that a closed reader (`bench-io run | head -1`) does not make a completed measurement panic, and that a full disk is reported.

use std::ffi::OsStr;
use std::fs::File;
use std::os::unix::ffi::OsStrExt;
use std::process::{Output, Stdio};

use crate::harness::{drive, printed, program};

/// Returns the writing end of a pipe that nobody reads.
fn unread() -> Stdio {
    let (reader, writer) = std::io::pipe().expect("a pipe");
    drop(reader);
    writer.into()
}

fn ends_with(words: &[&str], out: Stdio, err: Stdio) -> Output {
    let mut command = program();
    command.args(words).stdout(out).stderr(err);
    let child = command.spawn().expect("bench-io starts");
    child.wait_with_output().expect("it ends")
}

#[test]
fn a_reader_that_has_gone_fails_nothing() {
    let dir = drive();
    let place = dir.path().to_str().unwrap();
    let moved = ["--size=1m", "--bs=64k", "--iodepth=2"];
    let alone = ["--target=device", "--runtime=0", "--directory", place];
    let run = [&["run"][..], &alone[..], &moved].concat();
    let json = [&run[..], &["--json"]].concat();
    for words in [&run[..], &json, &["testdrives", "show"]] {
        let output = ends_with(words, unread(), Stdio::piped());
        assert_eq!(
            output.status.code(),
            Some(0),
            "{words:?}: {}",
            printed(&output)
        );
    }
    // The refusal cannot be printed, but the exit status reports it.
    let output = ends_with(&["run", "--bs=1"], unread(), unread());
    assert_eq!(output.status.code(), Some(1));
}

#[test]
fn a_report_that_a_full_disk_does_not_take_is_a_failure() {
    let Ok(full) = File::options().write(true).open("/dev/full") else {
        println!("skipped: there is no /dev/full here: a report on a full disk");
        return;
    };
    let output = ends_with(&["testdrives", "show"], full.into(), Stdio::piped());
    assert_eq!(output.status.code(), Some(1));
    let printed = printed(&output);
    assert!(
        printed.contains("writing to standard output: "),
        "{printed}"
    );
}

/// `bench-io` starts where libtorch is not installed.
#[test]
fn only_libraries_of_the_system_are_needed() {
    let output = program().env("LD_TRACE_LOADED_OBJECTS", "1").output();
    let output = output.expect("bench-io is loaded");
    let list = String::from_utf8_lossy(&output.stdout);
    let names = list
        .lines()
        .filter_map(|line| line.split_whitespace().next());
    let mut count = 0;
    for name in names.filter_map(|name| name.rsplit('/').next()) {
        count += 1;
        let known = ["linux-vdso", "ld-linux", "libc.", "libm.", "libgcc_s."];
        assert!(
            known.iter().any(|start| name.starts_with(start)),
            "{name}: {list}"
        );
    }
    assert!(count >= 3, "{list}");
}

#[test]
fn a_command_with_any_path_is_said_as_a_shell_takes_it_again() {
    let dir = drive();
    let moved = [
        "run",
        "--target=device",
        "--size=1m",
        "--bs=64k",
        "--runtime=0",
    ];
    for (name, shown) in [(&b"a b$c"[..], "a b$c'"), (b"x\xff", r"x\xff'")] {
        let place = dir.path().join(OsStr::from_bytes(name));
        std::fs::create_dir(&place).expect("a directory");
        let output = program()
            .args(moved)
            .arg("--directory")
            .arg(&place)
            .output();
        let output = output.expect("bench-io starts");
        assert_eq!(output.status.code(), Some(0), "{}", printed(&output));
        let words = String::from_utf8_lossy(&output.stdout);
        assert!(words.contains(shown), "{words}");
    }
}
