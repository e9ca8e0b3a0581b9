//! Stores that were damaged between two starts: training stops and names the damage; it never continues with
//! wrong weights.
//!
//! Errors that these tests find: a tile with flipped bytes is used; a damaged superblock or manifest is taken
//! for an empty store and overwritten; the message does not identify the drive, or its advice does not help.
//! Each test damages the file and then follows the advice.

use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use crate::daemon::program;
use crate::harness::{Harness, Run, fail, finish, spawn, succeed};

/// Offset of the store's data area; superblocks and catalog precede it.
const DATA_OFFSET: u64 = 1 << 20;

/// Offset of a byte in each copy of the superblock.
const SUPERBLOCK_COPIES: [u64; 2] = [20, (64 << 10) + 20];

/// Makes a run of three steps on a private store. Returns it with the store's file.
fn trained(harness: &Harness) -> (Run, PathBuf) {
    let run = harness
        .run("run", &["train.stop_after=3"])
        .with(&harness.nvme());
    run.train();
    let files = harness.store_files();
    assert_eq!(files.len(), 1, "{files:?}");
    (
        harness.run("run", &[]).with(&harness.nvme()),
        files.into_iter().next().expect("one"),
    )
}

fn flip(file: &PathBuf, offset: u64) {
    let file = std::fs::OpenOptions::new()
        .read(true)
        .write(true)
        .open(file)
        .expect("the store's file");
    let mut byte = [0];
    file.read_exact_at(&mut byte, offset).expect("a byte");
    file.write_all_at(&[byte[0] ^ 0x40], offset)
        .expect("another byte");
}

#[test]
fn a_flipped_byte_in_a_tile_stops_the_run_and_is_reported() {
    let harness = Harness::new();
    let (run, file) = trained(&harness);
    // Changes a byte of every block with weights or moments, so that the current extent of a tile is damaged.
    let blocks = tile_blocks(&std::fs::read(&file).expect("the store"));
    assert!(!blocks.is_empty());
    for offset in blocks {
        flip(&file, offset);
    }
    let text = run.refused();
    for part in [
        file.file_name().unwrap().to_str().unwrap(),
        "is damaged",
        "at byte ",
        "of unit ",
        "wrote checksum ",
        "two reads did not return it",
        "an older copy of the run directory and of its store",
        "start again with --fresh",
    ] {
        assert!(text.contains(part), "{part:?} is not in {text}");
    }
    assert_eq!(run.metrics().len(), 3, "no step used damaged tiles");
    let config = text
        .split_once("`offloadd verify --config ")
        .and_then(|(_, rest)| rest.split_once('`'))
        .map(|(config, _)| config)
        .unwrap_or_else(|| panic!("the message names no command to examine the damage: {text}"));
    let dir = run.dir.canonicalize().expect("the run directory");
    assert_eq!(Path::new(config), dir.join("offloadd/offloadd.toml"));
    let listed = verify(Path::new(config));
    assert!(listed.contains("damaged"), "{listed}");
    let text = fail(run.command("fingerprint"));
    assert!(text.contains("`offloadd verify --config "), "{text}");
    start_again(&run);
}

/// Output of the advised command for a damaged store.
fn verify(config: &Path) -> String {
    let mut command = Command::new(program());
    command.arg("verify").arg("--config").arg(config);
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    let output = finish(spawn(command));
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    [output.stdout, output.stderr]
        .map(|words| String::from_utf8_lossy(&words).into_owned())
        .concat()
}

/// Starts again with the advised `--fresh`, and checks that all steps are made.
fn start_again(run: &Run) {
    let mut fresh = run.command("train");
    fresh.arg("--fresh");
    assert!(succeed(fresh).contains("started with random weights"));
    assert_eq!(run.metrics().len(), 6);
}

/// Offsets of full blocks that look like fp32 weights or moments, and not like text of the store's records.
fn tile_blocks(content: &[u8]) -> Vec<u64> {
    let data = &content[DATA_OFFSET as usize..];
    let full = |block: &[u8]| block.iter().filter(|byte| **byte == 0).count() < 512;
    data.chunks_exact(4096)
        .enumerate()
        .filter(|(_, block)| full(block))
        .map(|(block, _)| DATA_OFFSET + block as u64 * 4096 + 2048)
        .collect()
}

#[test]
fn an_older_copy_of_the_store_is_reported_with_advice() {
    let harness = Harness::new();
    let (run, file) = trained(&harness);
    let older = std::fs::read(&file).expect("the store");
    let resumed = run.train();
    assert!(!resumed.contains("older copy"), "{resumed}");
    assert_eq!(run.metrics().len(), 6);
    std::fs::write(&file, older).expect("the older store");
    let text = run.train();
    for part in [
        "warning: metrics.jsonl has steps up to 6",
        "older copy",
        "is at step 3",
        file.file_name().unwrap().to_str().unwrap(),
        "--resume-from STEP",
    ] {
        assert!(text.contains(part), "{part:?} is not in {text}");
    }
    assert_eq!(run.metrics().len(), 6);
}

#[test]
fn one_damaged_superblock_is_survived_and_two_are_reported() {
    let harness = Harness::new();
    let (run, file) = trained(&harness);
    let fingerprint = run.fingerprint();
    flip(&file, SUPERBLOCK_COPIES[0]);
    assert_eq!(run.fingerprint(), fingerprint, "the second copy is used");
    // Both are damaged again, because the first may have been repaired from the second.
    for offset in SUPERBLOCK_COPIES {
        flip(&file, offset);
    }
    let text = run.refused();
    for part in [
        file.file_name().unwrap().to_str().unwrap(),
        "both copies are damaged",
        "--fresh",
    ] {
        assert!(text.contains(part), "{part:?} is not in {text}");
    }
    assert_eq!(run.metrics().len(), 3);
    start_again(&run);
}

#[test]
fn damaged_records_are_reported_and_never_taken_for_a_new_run() {
    let harness = Harness::new();
    let (run, file) = trained(&harness);
    // The record of each generation contains the run's state as text.
    let content = std::fs::read(&file).expect("the store");
    let state = b"\"trained_with\"";
    let records: Vec<usize> = (0..content.len() - state.len())
        .filter(|at| content[*at..].starts_with(state))
        .collect();
    assert!(records.len() >= 2, "two generations are kept");
    for offset in records {
        flip(&file, offset as u64);
    }
    let text = run.refused();
    for part in [
        file.file_name().unwrap().to_str().unwrap(),
        "`offloadd verify`",
        "--fresh",
    ] {
        assert!(text.contains(part), "{part:?} is not in {text}");
    }
    assert_eq!(run.metrics().len(), 3);
    start_again(&run);
}

#[test]
fn a_lost_store_is_not_taken_for_a_new_run() {
    let harness = Harness::new();
    let (run, file) = trained(&harness);
    std::fs::remove_file(&file).expect("removed");
    let text = run.refused();
    assert!(
        text.contains("has metrics of 3 steps, but the store on ") && text.contains("--fresh"),
        "{text}"
    );
    assert_eq!(run.metrics().len(), 3);
    assert!(harness.store_files().is_empty(), "no new store was made");
    start_again(&run);
}
