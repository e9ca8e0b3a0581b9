//! What could go wrong: a checkpoint is taken for whole that is not; a part of another save is taken for this one's; a tile
//! goes to another place when other ranks read it than wrote it; what is old stays, or what is kept goes.

use super::*;
use swapper::{See, TileRange};

/// Tiles of two units over `ranks` ranks: unit 0 has five, unit 1 has two.
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

fn begin(checkpoints: &Checkpoints, step: u64, rank: u32, ranks: u32) -> Begun {
    let tiles = |take: &mut See| {
        for range in tiles_of(rank, ranks) {
            let (param, state) = content(step, &range);
            take(&range, &param, &state);
        }
        Ok::<(), CheckpointError>(())
    };
    let blob = format!("blob {step} of rank {rank}");
    checkpoints
        .begin(step, rank, blob.as_bytes(), tiles)
        .unwrap()
}

fn save(checkpoints: &Checkpoints, step: u64, ranks: u32) {
    let first = begin(checkpoints, step, 0, ranks);
    let parts: Vec<u64> = (1..ranks)
        .map(|rank| begin(checkpoints, step, rank, ranks).finish(&[]).unwrap())
        .collect();
    first.finish(&parts).unwrap();
    checkpoints.prune().unwrap();
}

/// Reads all tiles as each of `ranks` ranks would.
fn read(checkpoints: &Checkpoints, ranks: u32) -> Result<u64, CheckpointError> {
    let mut step = 0;
    for rank in 0..ranks {
        let mut checkpoint = checkpoints.newest(rank)?.expect("there is one");
        let blob = String::from_utf8(checkpoint.blob.clone()).unwrap();
        let words: Vec<&str> = blob.split(' ').collect();
        assert_eq!(words[2..], ["of", "rank", "0"]);
        step = words[1].parse().unwrap();
        for range in tiles_of(rank, ranks) {
            let (mut param, mut state) = ([0; 20], [0; 7]);
            checkpoint.tile(&range, &mut param, &mut state)?;
            assert_eq!((param, state), content(step, &range), "{range:?}");
        }
    }
    Ok(step)
}

fn names(folder: &Path) -> Vec<String> {
    let mut names: Vec<String> = fs::read_dir(folder)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    names
}

#[test]
fn the_newest_of_two_kept_checkpoints_comes_back_to_any_number_of_ranks() {
    let folder = tempfile::tempdir().unwrap();
    let checkpoints = Checkpoints::new(folder.path().join("checkpoint"));
    assert!(checkpoints.newest(0).unwrap().is_none());
    for (step, ranks) in [(1, 1), (2, 3), (3, 2), (4, 4), (5, 1)] {
        save(&checkpoints, step, ranks);
        for readers in [1, 2, 3, 4] {
            let found = read(&checkpoints, readers).unwrap();
            assert_eq!(found, step, "{ranks} wrote, {readers} read");
        }
    }
    let expected = [
        "000000000004.1.part",
        "000000000004.2.part",
        "000000000004.3.part",
        "000000000004.ckpt",
        "000000000005.ckpt",
    ];
    assert_eq!(names(&checkpoints.folder), expected);
}

#[test]
fn a_rank_reads_its_own_file_and_not_all_others() {
    let folder = tempfile::tempdir().unwrap();
    let checkpoints = Checkpoints::new(folder.path().to_path_buf());
    save(&checkpoints, 1, 4);
    let mut checkpoint = checkpoints.newest(2).unwrap().unwrap();
    for range in tiles_of(2, 4) {
        checkpoint.tile(&range, &mut [0; 20], &mut [0; 7]).unwrap();
    }
    assert_eq!(checkpoint.unread.len(), 2, "of the three parts");
}

#[test]
fn other_tiles_than_expected_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let checkpoints = Checkpoints::new(folder.path().to_path_buf());
    save(&checkpoints, 1, 2);
    let mut newest = checkpoints.newest(0).unwrap().unwrap();
    let mut refused = |unit, start, param_bytes| {
        let range = TileRange {
            unit,
            elems: start..start + 10,
        };
        let read = newest.tile(&range, &mut vec![0; param_bytes], &mut [0; 7]);
        read.unwrap_err().to_string()
    };
    let text = refused(0, 0, 19);
    assert!(
        text.contains("tiles of 19 and 7 bytes expected, 20 and 7 found"),
        "{text}"
    );
    let text = refused(1, 5, 20);
    assert!(
        text.contains("no tile of unit 1 from element 5 on"),
        "{text}"
    );
}

#[test]
fn a_flipped_bit_anywhere_is_found_and_the_file_named() {
    let folder = tempfile::tempdir().unwrap();
    let checkpoints = Checkpoints::new(folder.path().to_path_buf());
    save(&checkpoints, 1, 2);
    for name in ["000000000001.ckpt", "000000000001.1.part"] {
        let path = folder.path().join(name);
        let good = fs::read(&path).unwrap();
        let refused = |what: &str| {
            let text = read(&checkpoints, 2).expect_err(what).to_string();
            let says = format!("{name} is damaged");
            assert!(text.contains(&says), "{what}: {text}");
            assert!(
                text.contains("000000000001.ckpt to go on from the one before"),
                "{text}"
            );
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
        fs::write(&path, &good).unwrap();
        assert_eq!(read(&checkpoints, 2).unwrap(), 1);
    }
}

#[test]
fn a_part_of_another_save_or_none_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let checkpoints = Checkpoints::new(folder.path().to_path_buf());
    save(&checkpoints, 1, 2);
    let part = folder.path().join("000000000001.1.part");
    let good = fs::read(&part).unwrap();
    // Whole, but written before the others started again from an older checkpoint and came here another way.
    let tiles = |take: &mut See| {
        for range in tiles_of(1, 2) {
            take(&range, &[9; 20], &[9; 7]);
        }
        Ok::<(), CheckpointError>(())
    };
    let other = checkpoints.begin(1, 1, b"", tiles).unwrap();
    other.finish(&[]).unwrap();
    let text = read(&checkpoints, 2).unwrap_err().to_string();
    assert!(
        text.contains("1.part is damaged: it is of another save"),
        "{text}"
    );
    fs::remove_file(&part).unwrap();
    let text = read(&checkpoints, 2).unwrap_err().to_string();
    assert!(
        text.contains("1.part is damaged: the file is missing"),
        "{text}"
    );
    fs::write(&part, good).unwrap();
    assert_eq!(read(&checkpoints, 2).unwrap(), 1);
}

#[test]
fn a_save_that_fails_or_is_cut_off_leaves_the_one_before() {
    let folder = tempfile::tempdir().unwrap();
    let checkpoints = Checkpoints::new(folder.path().to_path_buf());
    save(&checkpoints, 1, 2);
    let fails = |_: &mut See| -> Result<(), CheckpointError> {
        Err(CheckpointError::io("read", Path::new("x"))(
            std::io::ErrorKind::Other.into(),
        ))
    };
    assert!(checkpoints.begin(2, 0, b"", fails).is_err());
    assert_eq!(read(&checkpoints, 2).unwrap(), 1);
    // Parts are there, the first file is not.
    let first = begin(&checkpoints, 3, 0, 2);
    begin(&checkpoints, 3, 1, 2).finish(&[]).unwrap();
    drop(first);
    assert_eq!(read(&checkpoints, 2).unwrap(), 1);
    save(&checkpoints, 4, 1);
    let expected = [
        "000000000001.1.part",
        "000000000001.ckpt",
        "000000000004.ckpt",
    ];
    assert_eq!(names(folder.path()), expected, "what was cut off is gone");
}
