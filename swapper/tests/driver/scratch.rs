//! The caller's own tiles beside those of units, with a private daemon.

use std::os::unix::fs::FileExt;
use std::time::{Duration, Instant};

use swapper::private::PrivateDaemon;
use swapper::{
    Backing, Daemon, FaultKind, Schedule, Scratch, ScratchSettings, Swapper, SwapperError,
    SwapperSettings, TileError,
};

use crate::{store, toy};

const TILE_BYTES: u32 = 16384;

/// More tiles than slots.
const AREA: ScratchSettings = ScratchSettings {
    tile_bytes: TILE_BYTES,
    tile_count: 11,
    slot_count: 3,
};

fn settings(daemon: &PrivateDaemon, job: &str) -> SwapperSettings {
    SwapperSettings {
        scratch: AREA,
        ..store::settings(daemon, job)
    }
}

fn open(settings: &SwapperSettings) -> (Swapper<u64>, Scratch) {
    let (swapper, ..) = toy::open(settings).unwrap();
    let scratch = swapper.scratch().unwrap();
    (swapper, scratch)
}

/// Writes a tile whose every byte is `byte`.
fn write(scratch: &Scratch, tile: u32, byte: u8) -> Result<(), SwapperError> {
    let mut slot = scratch.slot()?;
    slot.as_mut_slice().fill(byte);
    scratch.write(tile, slot);
    Ok(())
}

/// Reads a tile that one byte fills. The slot loses its content.
fn read(scratch: &Scratch, tile: u32) -> Result<u8, SwapperError> {
    scratch.begin_read(tile, scratch.slot()?);
    let mut slot = scratch.wait(tile)?;
    let byte = slot.as_slice()[0];
    let whole = slot.as_slice().iter().all(|&other| other == byte);
    assert!(whole, "tile {tile} has bytes of several writes");
    slot.as_mut_slice().fill(0xEE);
    scratch.give_back(slot);
    Ok(byte)
}

fn free_bytes(daemon: &PrivateDaemon) -> u64 {
    let daemon = Daemon::connect(daemon.socket()).unwrap();
    daemon.info().devices.iter().map(|d| d.free_bytes).sum()
}

/// Writes and reads tiles in an order that `seed` draws. Returns how many were written and read.
fn move_any(scratch: &Scratch, mut seed: u64) -> (u64, u64) {
    let mut content = [None; AREA.tile_count as usize];
    let (mut written, mut came) = (0, 0);
    for round in 0..400u32 {
        seed = toy::mix(seed, u64::from(round) + 1);
        let tile = (seed >> 8) as usize % content.len();
        match content[tile] {
            // Behind a write that may not have begun.
            Some(byte) if seed & 1 == 0 => {
                assert_eq!(read(scratch, tile as u32).unwrap(), byte, "round {round}");
                came += 1;
            }
            _ => {
                content[tile] = Some(round as u8);
                write(scratch, tile as u32, round as u8).unwrap();
                written += 1;
            }
        }
    }
    (written, came)
}

#[test]
fn tiles_of_the_caller_keep_their_bytes_while_steps_train() {
    let dir = tempfile::tempdir().unwrap();
    let daemon = store::start(dir.path());
    let expected = toy::reference(4);
    for (seed, schedule, grad_fraction) in [
        (1, Schedule::Deferred, 0.0),
        (2, Schedule::Deferred, 1.0),
        (3, Schedule::Immediate, 0.0),
        (4, Schedule::Immediate, 0.5),
    ] {
        let job = format!("scratch-{seed}");
        let settings = SwapperSettings {
            schedule,
            grad_fraction,
            ..settings(&daemon, &job)
        };
        let (mut swapper, scratch) = open(&settings);
        let before = free_bytes(&daemon);
        let other = scratch.clone();
        let moves = std::thread::spawn(move || move_any(&other, seed));
        let mut io = Vec::new();
        for step in 1..=3 {
            io.push(toy::train_step(&mut swapper, step).unwrap());
        }
        let (written, came) = moves.join().unwrap();
        // What moved after the third step's end is counted in the fourth.
        write(&scratch, 0, 77).unwrap();
        assert_eq!(read(&scratch, 0).unwrap(), 77);
        io.push(toy::train_step(&mut swapper, 4).unwrap());
        let sum = |bytes: fn(&swapper::StepIo) -> u64| io.iter().map(bytes).sum::<u64>();
        let tile_bytes = u64::from(TILE_BYTES);
        assert_eq!(
            sum(|io| io.scratch_written_bytes),
            (written + 1) * tile_bytes
        );
        assert_eq!(sum(|io| io.scratch_read_bytes), (came + 1) * tile_bytes);
        assert!(sum(|io| io.written_bytes) > (written + 1) * tile_bytes);
        assert_eq!(sum(|io| io.grad_written_bytes) > 0, grad_fraction < 1.0);
        toy::assert_same(&toy::contents(&mut swapper).unwrap(), &expected, &job);
        swapper.close().unwrap();
        assert!(matches!(read(&scratch, 0), Err(SwapperError::Stopped)));
        // The tiles end with the session.
        let plan = settings.plan().unwrap();
        assert_eq!(free_bytes(&daemon), before + plan.scratch_bytes, "{job}");
    }
}

#[test]
fn an_area_without_a_store_or_without_space_is_refused_in_words() {
    let dir = tempfile::tempdir().unwrap();
    let daemon = store::start(dir.path());
    let memory = SwapperSettings {
        scratch: AREA,
        ..toy::settings(Backing::Memory)
    };
    let refused = memory.plan().unwrap_err().to_string();
    assert!(refused.contains("there is no store"), "{refused}");
    let large = SwapperSettings {
        scratch: ScratchSettings::new(1 << 30).unwrap(),
        ..settings(&daemon, "large")
    };
    let refused = Swapper::open(large, toy::workers()).unwrap_err();
    let SwapperError::Client { doing, source } = &refused else {
        panic!("{refused}");
    };
    assert_eq!(source.fault(), Some(FaultKind::NoSpace));
    assert!(
        doing.contains("1073741824 bytes of scratch tiles"),
        "{doing}"
    );
    // What was refused holds nothing.
    let (swapper, _) = open(&settings(&daemon, "small"));
    swapper.close().unwrap();
}

#[test]
fn damaged_bytes_of_the_caller_are_an_error_for_who_reads_them_and_steps_go_on() {
    let dir = tempfile::tempdir().unwrap();
    let daemon = store::start(dir.path());
    let (mut swapper, scratch) = open(&settings(&daemon, "damaged"));
    write(&scratch, 5, 0xC3).unwrap();
    assert_eq!(read(&scratch, 5).unwrap(), 0xC3);
    let mut damaged = 0;
    for device in store::devices(dir.path()) {
        let device = std::fs::File::options().read(true).write(true).open(device);
        let (device, mut block) = (device.unwrap(), [0; 4096]);
        let mut offset = 1 << 20;
        while device.read_exact_at(&mut block, offset).is_ok() {
            if block == [0xC3; 4096] {
                device.write_all_at(&[0xC2], offset + 77).unwrap();
                damaged += 1;
            }
            offset += 4096;
        }
    }
    assert_eq!(damaged, TILE_BYTES / 4096);
    let error = read(&scratch, 5).unwrap_err();
    assert!(
        matches!(
            &error,
            SwapperError::ScratchTile {
                doing: "reading",
                tile: 5,
                source: TileError::Damaged { .. }
            }
        ),
        "{error}"
    );
    // Neither the tile nor a slot is lost.
    for byte in 0..10 {
        write(&scratch, 5, byte).unwrap();
        assert_eq!(read(&scratch, 5).unwrap(), byte);
    }
    toy::train_step(&mut swapper, 1).unwrap();
    let found = toy::contents(&mut swapper).unwrap();
    toy::assert_same(&found, &toy::reference(1), "after damage");
}

#[test]
fn what_ends_the_swapper_ends_waits_for_the_callers_tiles_with_the_same_error() {
    let dir = tempfile::tempdir().unwrap();
    for (signal, stalls) in [("-9", false), ("-STOP", true)] {
        let daemon = store::start(&dir.path().join(signal));
        let (mut swapper, scratch) = open(&settings(&daemon, "ends"));
        swapper.drain().unwrap();
        swapper.set_stall_max(Duration::from_millis(300)).unwrap();
        write(&scratch, 1, 1).unwrap();
        assert_eq!(read(&scratch, 1).unwrap(), 1);
        store::send(&daemon, signal);
        let since = Instant::now();
        // Nothing but the caller's tiles is in flight.
        let error = write(&scratch, 2, 2)
            .and_then(|()| read(&scratch, 2))
            .unwrap_err();
        assert!(since.elapsed() < store::SOON);
        match stalls {
            true => assert!(
                matches!(error.cause(), SwapperError::Stalled { .. }),
                "{error}"
            ),
            false => assert!(error.is_of_a_gone_daemon(), "{error}"),
        }
        let told = toy::train_step(&mut swapper, 1).unwrap_err();
        assert_eq!(told.to_string(), error.to_string());
        if stalls {
            store::send(&daemon, "-CONT");
        }
    }
}
