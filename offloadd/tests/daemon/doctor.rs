//! Tests `offloadd doctor` as a program. What could go wrong: an exit code that scripts cannot use, invalid JSON, a problem without a fix, files left
//! behind.

use crate::common::{Store, program, words};

#[test]
fn a_good_store_has_no_problems_and_json_says_so() {
    let store = Store::new(2, "auto");
    let mut command = program();
    command.arg("doctor").arg("--config").arg(&store.config);
    let output = command.output().unwrap();
    let printed = words(&output);
    for what in [
        "io_uring",
        "huge pages",
        "direct I/O at ",
        "all 2 of store",
        "file system of ",
    ] {
        assert!(printed.contains(what), "{what}: {printed}");
    }
    // If temporary files are in memory, doctor reports that correctly.
    let in_memory = printed.contains("it is memory");
    assert_eq!(output.status.success(), !in_memory, "{printed}");
    let output = command.arg("--json").output().unwrap();
    let json: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    let found = json["findings"].as_array().unwrap();
    assert!(
        found
            .iter()
            .all(|one| one["severity"] == "fine" || one["fix"].is_string())
    );
    assert_eq!(json["worst"] == "problem", in_memory, "{json}");
}

#[test]
fn a_place_that_is_not_there_is_said_beside_what_was_looked_at() {
    let dir = tempfile::tempdir().unwrap();
    let place = dir.path().join("nvme9");
    let output = program().arg("doctor").arg(&place).output().unwrap();
    let printed = words(&output);
    let expected = format!(
        "device {}: does not exist; checked {} instead",
        place.display(),
        dir.path().display()
    );
    assert!(printed.contains(&expected), "{printed}");
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
}

#[test]
fn a_problem_ends_with_1_and_the_line_that_mends_it() {
    let dir = tempfile::tempdir().unwrap();
    let place = dir.path().join("no/such/directory");
    let output = program().arg("doctor").arg(&place).output().unwrap();
    assert_eq!(output.status.code(), Some(1), "{}", words(&output));
    assert!(
        words(&output).contains("\n        mkdir -p "),
        "{}",
        words(&output)
    );
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
}
