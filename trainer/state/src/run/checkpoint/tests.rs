//! Errors that these tests find: an incomplete checkpoint is taken for complete; a file of another checkpoint
//! is accepted; tiles are assigned wrongly if other ranks read them than wrote them; old checkpoints are
//! kept, or others removed; the description differs from what was written.

use std::fs;

use swapper::TileRange;

use super::*;
use crate::run::RunState;

/// Tiles of two units distributed over `ranks` ranks: unit 0 has five, unit 1 has two.
fn tiles_of(rank: u32, ranks: u32) -> Vec<TileRange> {
    let of = |unit, count: u64| {
        let each = count.div_ceil(u64::from(ranks));
        let owned = (u64::from(rank) * each).min(count)..(u64::from(rank + 1) * each).min(count);
        owned.map(move |tile| TileRange {
            unit,
            elems: tile * 10..tile * 10 + 10,
        })
    };
    of(0, 5).chain(of(1, 2)).collect()
}

fn content(step: u64, range: &TileRange) -> ([u8; 20], [u8; 7]) {
    let byte = step as u8 ^ (range.unit as u8) << 6 ^ range.elems.start as u8;
    ([byte; 20], [!byte; 7])
}

/// Writes all files of a checkpoint without completing it.
fn begin(checkpoints: &Checkpoints, step: u64, ranks: u32) -> CheckpointDescription {
    checkpoints.begin(step, 1000, true).unwrap();
    let files = (0..ranks).map(|rank| {
        let mut writer = TileWriter::create(&checkpoints.partial(step), rank).unwrap();
        // Updates end in any order.
        for range in tiles_of(rank, ranks).iter().rev() {
            let (param, state) = content(step, range);
            writer.add(range, &param, &state).unwrap();
        }
        writer.finish().unwrap()
    });
    CheckpointDescription {
        step,
        unix_s: 1_700_000_000 + step,
        layout: serde_json::json!({"model": {"hidden_size": 32}}),
        files: files.collect(),
        state: serde_json::to_value(RunState::new(step, serde_json::json!({"lr": 0.1}))).unwrap(),
    }
}

fn checkpoint(checkpoints: &Checkpoints, step: u64, ranks: u32) {
    let description = begin(checkpoints, step, ranks);
    checkpoints.finish(&description).unwrap();
    checkpoints.keep(2, step, None).unwrap();
}

/// Reads all tiles as each of `ranks` ranks would, and returns the step.
fn read(dir: &Path, ranks: u32) -> Result<u64, CheckpointError> {
    let mut step = 0;
    for rank in 0..ranks {
        let mut checkpoint = Checkpoint::open(dir, rank)?;
        step = checkpoint.description.step;
        assert_eq!(checkpoint.description.state["seed"], step);
        checkpoint.check(&tiles_of(rank, ranks), &mut |_| {})?;
        for range in tiles_of(rank, ranks) {
            let (mut param, mut state) = ([0; 20], [0; 7]);
            checkpoint.tile(&range, &mut param, &mut state)?;
            assert_eq!((param, state), content(step, &range), "{range:?}");
        }
    }
    Ok(step)
}

fn names(dir: &Path) -> Vec<String> {
    let mut names: Vec<String> = fs::read_dir(dir)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    names
}

#[test]
fn the_newest_of_two_checkpoints_is_read_by_any_number_of_ranks() {
    let dir = tempfile::tempdir().unwrap();
    let checkpoints = Checkpoints::in_run_dir(dir.path());
    assert_eq!(checkpoints.newest().unwrap(), None);
    for (step, ranks) in [(1, 1), (2, 3), (3, 2), (4, 4), (5, 1)] {
        checkpoint(&checkpoints, step, ranks);
        let newest = checkpoints.newest().unwrap().unwrap();
        for readers in [1, 2, 3, 4] {
            let found = read(&newest, readers).unwrap();
            assert_eq!(found, step, "{ranks} wrote, {readers} read");
        }
    }
    assert_eq!(
        names(checkpoints.path()),
        ["step-00000004", "step-00000005"]
    );
    assert!(checkpoints.has(4) && !checkpoints.has(3));
    let text = checkpoints.at(3).unwrap_err().to_string();
    assert!(
        text.contains("the run has checkpoints of step 4, 5"),
        "{text}"
    );
}

#[test]
fn a_rank_reads_only_its_own_file() {
    let dir = tempfile::tempdir().unwrap();
    let checkpoints = Checkpoints::in_run_dir(dir.path());
    checkpoint(&checkpoints, 1, 4);
    let mut checkpoint = Checkpoint::open(&checkpoints.at(1).unwrap(), 2).unwrap();
    let mut read_bytes = 0;
    checkpoint
        .check(&tiles_of(2, 4), &mut |bytes| read_bytes += bytes)
        .unwrap();
    assert_eq!(checkpoint.unread.len(), 3, "three of the four files");
    assert_eq!(read_bytes + 8, checkpoint.description.files[2].bytes);
}

#[test]
fn unexpected_tiles_or_layouts_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let checkpoints = Checkpoints::in_run_dir(dir.path());
    checkpoint(&checkpoints, 1, 2);
    let mut checkpoint = Checkpoint::open(&checkpoints.at(1).unwrap(), 0).unwrap();
    let mut refused = |unit, start, param_bytes| {
        let range = TileRange {
            unit,
            elems: start..start + 10,
        };
        let read = checkpoint.tile(&range, &mut vec![0; param_bytes], &mut [0; 7]);
        read.unwrap_err().to_string()
    };
    let text = refused(0, 0, 19);
    let says = "expected tiles of 19 and 7 bytes, found 20 and 7";
    assert!(text.contains(says), "{text}");
    let text = refused(1, 5, 20);
    let says = "no tile of unit 1 from element 5 on";
    assert!(text.contains(says), "{text}");
    let of = |hidden: u64| serde_json::json!({"model": {"hidden_size": hidden}});
    checkpoint.check_layout(&of(32)).unwrap();
    let text = checkpoint.check_layout(&of(64)).unwrap_err().to_string();
    let says = "cannot be resumed by this run: model.hidden_size is 32 there and 64 here";
    assert!(text.contains(says), "{text}");
}

#[test]
fn a_flipped_bit_or_a_missing_end_is_detected_and_the_file_named() {
    let dir = tempfile::tempdir().unwrap();
    let checkpoints = Checkpoints::in_run_dir(dir.path());
    checkpoint(&checkpoints, 1, 2);
    let dir = checkpoints.at(1).unwrap();
    for name in ["tiles.0", "tiles.1"] {
        let path = dir.join(name);
        let good = fs::read(&path).unwrap();
        let refused = |what: &str| {
            let text = read(&dir, 2).expect_err(what).to_string();
            let says = format!("{name} is damaged: ");
            assert!(text.contains(&says), "{what}: {text}");
            assert!(text.contains("--resume-from STEP"), "{what}: {text}");
        };
        for byte in 0..good.len() {
            let mut bad = good.clone();
            bad[byte] ^= 0x10;
            fs::write(&path, &bad).unwrap();
            refused(&format!("byte {byte}"));
        }
        for length in 0..good.len() {
            fs::write(&path, &good[..length]).unwrap();
            refused(&format!("cut to {length}"));
        }
        fs::remove_file(&path).unwrap();
        refused("no file");
        fs::write(&path, &good).unwrap();
        assert_eq!(read(&dir, 2).unwrap(), 1);
    }
}

#[test]
fn a_changed_description_is_refused_or_equivalent() {
    let dir = tempfile::tempdir().unwrap();
    let checkpoints = Checkpoints::in_run_dir(dir.path());
    checkpoint(&checkpoints, 1, 2);
    let dir = checkpoints.at(1).unwrap();
    let path = dir.join("checkpoint.json");
    let good = fs::read(&path).unwrap();
    let whole = Checkpoint::open(&dir, 0).unwrap().description;
    let mut refused = 0;
    for byte in 0..good.len() {
        for bit in [0x01, 0x20] {
            let mut bad = good.clone();
            bad[byte] ^= bit;
            fs::write(&path, &bad).unwrap();
            match Checkpoint::open(&dir, 0) {
                // White space that became another kind.
                Ok(checkpoint) => assert_eq!(checkpoint.description, whole, "byte {byte}"),
                Err(error) => {
                    let text = error.to_string();
                    assert!(text.contains("checkpoint.json"), "byte {byte}: {text}");
                    refused += 1;
                }
            }
        }
    }
    assert!(refused > good.len(), "{refused} of {}", 2 * good.len());
    let text = String::from_utf8(good).unwrap();
    let newer = text.replace("\n  \"version\": 1", "\n  \"version\": 7");
    fs::write(&path, newer).unwrap();
    let text = Checkpoint::open(&dir, 0).unwrap_err().to_string();
    assert!(
        text.contains("checkpoint.json has format version 7"),
        "{text}"
    );
    let text = Checkpoint::open(dir.parent().unwrap(), 0).unwrap_err();
    assert!(
        text.to_string().contains("there is no checkpoint in "),
        "{text}"
    );
}

#[test]
fn a_file_of_another_checkpoint_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let checkpoints = Checkpoints::in_run_dir(dir.path());
    checkpoint(&checkpoints, 1, 2);
    checkpoint(&checkpoints, 2, 2);
    let (one, two) = (checkpoints.at(1).unwrap(), checkpoints.at(2).unwrap());
    // Complete and of the same length, but of another step.
    fs::copy(two.join("tiles.1"), one.join("tiles.1")).unwrap();
    let text = read(&one, 2).unwrap_err().to_string();
    assert!(
        text.contains("tiles.1 is damaged: expected fingerprint "),
        "{text}"
    );
    assert_eq!(read(&two, 2).unwrap(), 2);
}

#[test]
fn an_interrupted_checkpoint_is_not_listed_and_is_removed_by_the_next() {
    let dir = tempfile::tempdir().unwrap();
    let checkpoints = Checkpoints::in_run_dir(dir.path());
    checkpoint(&checkpoints, 1, 2);
    begin(&checkpoints, 3, 2);
    fs::rename(
        checkpoints.at(1).unwrap(),
        checkpoints.path().join("step-00000000.removed"),
    )
    .unwrap();
    checkpoint(&checkpoints, 2, 1);
    begin(&checkpoints, 3, 2);
    assert_eq!(checkpoints.list().unwrap().len(), 1);
    assert_eq!(read(&checkpoints.newest().unwrap().unwrap(), 2).unwrap(), 2);
    checkpoint(&checkpoints, 4, 1);
    assert_eq!(
        names(checkpoints.path()),
        ["step-00000002", "step-00000004"]
    );
}

#[test]
fn a_repeated_step_has_its_newer_checkpoint() {
    let dir = tempfile::tempdir().unwrap();
    let checkpoints = Checkpoints::in_run_dir(dir.path());
    checkpoint(&checkpoints, 1, 2);
    checkpoint(&checkpoints, 1, 1);
    assert_eq!(names(checkpoints.path()), ["step-00000001"]);
    let newest = checkpoints.at(1).unwrap();
    assert_eq!(names(&newest), ["checkpoint.json", "tiles.0"]);
    assert_eq!(read(&newest, 2).unwrap(), 1);
}

#[test]
fn newer_checkpoints_are_moved_aside_under_distinct_names() {
    let dir = tempfile::tempdir().unwrap();
    let checkpoints = Checkpoints::in_run_dir(dir.path());
    let metrics = dir.path().join("metrics.jsonl");
    fs::write(&metrics, "lines").unwrap();
    checkpoint(&checkpoints, 1, 1);
    assert_eq!(checkpoints.set_aside_after(1, &metrics).unwrap(), None);
    for way in ["aside-1", "aside-2"] {
        checkpoint(&checkpoints, 2, 1);
        let aside = checkpoints.set_aside_after(1, &metrics).unwrap().unwrap();
        assert_eq!(aside, checkpoints.path().join(way));
        assert_eq!(names(&aside), ["metrics.jsonl", "step-00000002"]);
        assert_eq!(read(&aside.join("step-00000002"), 1).unwrap(), 2);
    }
    assert_eq!(checkpoints.list().unwrap().len(), 1);
    assert_eq!(checkpoints.list_aside().unwrap().len(), 2);
}

#[test]
fn too_little_space_is_reported_before_anything_is_written() {
    let dir = tempfile::tempdir().unwrap();
    let checkpoints = Checkpoints::in_run_dir(dir.path());
    let text = checkpoints
        .begin(1, 1 << 60, false)
        .unwrap_err()
        .to_string();
    assert!(
        text.contains("step-00000001 takes 1048576.0 TiB, but the file system has ")
            && text.contains("train.checkpoints_kept"),
        "{text}"
    );
    assert_eq!(names(checkpoints.path()), [""; 0]);
}

#[test]
fn a_file_outside_the_directory_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let checkpoints = Checkpoints::in_run_dir(dir.path());
    let mut description = begin(&checkpoints, 1, 1);
    description.files[0].name = "../step-00000001/tiles.0".into();
    let path = checkpoints.finish(&description).unwrap();
    let text = Checkpoint::open(&path, 0).unwrap_err().to_string();
    assert!(text.contains("it names the file"), "{text}");
}

#[test]
fn a_checkpoint_in_another_directory_is_used_and_removed_through_its_link() {
    let dir = tempfile::tempdir().unwrap();
    let run = dir.path().join("run");
    let elsewhere = dir.path().join("spare/job");
    let checkpoints = Checkpoints::in_run_dir(&run).or_in(Some(elsewhere.clone()));
    for step in [1, 2, 2, 3] {
        checkpoint(&checkpoints, step, 2);
        let newest = checkpoints.newest().unwrap().unwrap();
        assert_eq!(
            (read(&newest, 1).unwrap(), checkpoints.has(step)),
            (step, true)
        );
    }
    // The repeated step was replaced, and the oldest was removed.
    assert_eq!(names(&elsewhere), ["step-00000002-1", "step-00000003"]);
    // One that is interrupted.
    begin(&checkpoints, 4, 1);
    assert_eq!(names(&elsewhere).len(), 3);
    Checkpoints::in_run_dir(&run).clean().unwrap();
    assert_eq!(names(&elsewhere).len(), 2);
    // Too large for either place: the first one is named.
    let refused = checkpoints
        .begin(5, u64::MAX, false)
        .unwrap_err()
        .to_string();
    assert!(
        refused.contains("run/checkpoints/step-00000005 takes "),
        "{refused}"
    );
    Checkpoints::in_run_dir(&run).remove_all().unwrap();
    assert!(!elsewhere.exists() && !run.join("checkpoints").exists());
}
