//! Errors that these tests find: a reader that stops reading (`trainer train RUN.toml | head`) ends a run during a step, or a full disk loses output
//! without an error.

use std::fs::File;
use std::process::{Command, Stdio};

use crate::harness::{Harness, finish, spawn, words};

/// Writing end of a pipe without a reader.
fn unread() -> Stdio {
    let (reader, writer) = std::io::pipe().expect("a pipe");
    drop(reader);
    writer.into()
}

/// Returns the exit code and the text on standard error.
fn end(mut command: Command, out: Stdio) -> (Option<i32>, String) {
    command.stdout(out);
    let output = finish(spawn(command));
    (output.status.code(), words(&output).1)
}

#[test]
fn a_reader_that_stops_reading_does_not_end_the_run() {
    let harness = Harness::new();
    let run = harness.run("unread", &["train.steps=3", "train.log_every=1"]);
    let (code, said) = end(run.command("train"), unread());
    assert_eq!(code, Some(0), "{said}");
    assert_eq!(run.steps_written(), 3);
    for verb in ["plan", "fingerprint"] {
        let (code, said) = end(run.command(verb), unread());
        assert_eq!(code, Some(0), "{verb}: {said}");
    }
    // An error must still set the exit status if nobody reads its message.
    let mut refused = run.program();
    refused.args(["plan", "/no/such/run.toml"]).stderr(unread());
    assert_eq!(end(refused, unread()).0, Some(1));
}

#[test]
fn a_result_that_does_not_fit_on_a_full_disk_is_a_failure() {
    let Ok(full) = File::options().write(true).open("/dev/full") else {
        println!("skipped: there is no /dev/full here: a result on a full disk");
        return;
    };
    let run = Harness::new().run("unsaid", &[]);
    let mut keys = run.program();
    keys.arg("config-reference");
    let (code, said) = end(keys, full.into());
    assert_eq!(code, Some(1));
    assert!(said.contains("writing to standard output: "), "{said}");
}
