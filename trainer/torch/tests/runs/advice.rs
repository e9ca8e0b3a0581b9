//! Follows the advice of error messages.
//!
//! Errors that these tests find: a message names a command that fails, a file that does not exist, or no
//! remedy.

use std::os::unix::fs::FileExt;
use std::process::{Command, Stdio};

use crate::daemon::program;
use crate::harness::{Harness, finish, spawn, succeed};

/// Offset of the store's data area; superblocks and catalog precede it.
const DATA_OFFSET: usize = 1 << 20;
const BLOCK_BYTES: usize = 4096;

#[test]
fn the_advice_for_a_damaged_tile_works() {
    let harness = Harness::new();
    let run = harness.run("run", &["train.steps=3"]).with(&harness.nvme());
    run.train();
    let store = harness.store_files().remove(0);
    // Changes a byte of every block that is not text of the store's records, so that the current extent of a
    // tile is damaged.
    let content = std::fs::read(&store).expect("the store");
    let file = std::fs::OpenOptions::new().write(true).open(&store);
    let file = file.expect("the store again");
    for at in (DATA_OFFSET..content.len()).step_by(BLOCK_BYTES) {
        let block = &content[at..content.len().min(at + BLOCK_BYTES)];
        if block.iter().filter(|byte| **byte == 0).count() < BLOCK_BYTES / 8 {
            let byte = [block[BLOCK_BYTES / 2] ^ 1];
            file.write_all_at(&byte, (at + BLOCK_BYTES / 2) as u64)
                .expect("another byte");
        }
    }

    let more = harness.run("run", &["train.steps=6"]).with(&harness.nvme());
    let text = more.refused();
    let config = run.dir.canonicalize().expect("the run directory");
    let config = config.join("offloadd/offloadd.toml");
    for part in [
        format!("offloadd verify --config {}", config.display()),
        "an older copy of the run directory and of its store".to_owned(),
        "start again with --fresh".to_owned(),
    ] {
        assert!(text.contains(&part), "{part:?} is not in {text}");
    }
    let mut fingerprint = more.command("fingerprint");
    fingerprint.stdout(Stdio::null());
    assert!(crate::harness::fail(fingerprint).contains("offloadd verify --config"));

    let mut verify = Command::new(program());
    verify
        .arg("verify")
        .arg("--config")
        .arg(config)
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    let output = finish(spawn(verify));
    let listed = String::from_utf8_lossy(&output.stdout).into_owned();
    assert_eq!(output.status.code(), Some(1), "{listed} {output:?}");
    assert!(listed.contains("damaged"), "{listed}");

    let mut fresh = more.command("train");
    fresh.arg("--fresh");
    succeed(fresh);
    assert_eq!(more.metrics().len(), 6);
}
