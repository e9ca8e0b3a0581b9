//! A real daemon on files of a drive, and the steps that all tests share.

use std::fs;
use std::io::{Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use offload_client::private::{PrivateDaemon, PrivateSettings};
use offload_client::{
    ClientError, Durability, EndedOperation, Generation, JobDefinition, Rank, Session,
    SessionSettings, SlotClass, Tile, TileIndex, TileKind,
};

pub(crate) const TILE_BYTES: u32 = 64 << 10;
pub(crate) const TILE_COUNT: u32 = 12;
pub(crate) const ARENA_BYTES_MAX: u64 = 64 << 20;
pub(crate) const DEVICE_BYTES: u64 = 32 << 20;
/// End of superblocks and catalogs.
const DATA_OFFSET: usize = 1 << 20;
/// Longer than any test may take: a wait that ends only at this limit has failed.
pub(crate) const LONG: Duration = Duration::from_secs(30);

/// A directory with two device files, formatted as one store.
pub(crate) struct Place {
    pub(crate) dir: tempfile::TempDir,
}

impl Place {
    pub(crate) fn new() -> Self {
        // Formatting measures each device for a while, so it is done once. It writes only before the data area; the rest is free.
        static FORMATTED: OnceLock<Vec<Vec<u8>>> = OnceLock::new();
        let formatted = FORMATTED.get_or_init(|| {
            let place = Self { dir: dir() };
            drop(place.start());
            let devices = place.devices().into_iter();
            devices
                .map(|(path, _)| {
                    let mut start = vec![0; DATA_OFFSET];
                    fs::File::open(path)
                        .unwrap()
                        .read_exact(&mut start)
                        .unwrap();
                    start
                })
                .collect()
        });
        let place = Self { dir: dir() };
        for ((path, bytes), start) in place.devices().into_iter().zip(formatted) {
            let mut file = fs::OpenOptions::new()
                .write(true)
                .create_new(true)
                .mode(0o600)
                .open(path)
                .unwrap();
            file.write_all(start).unwrap();
            file.set_len(bytes).unwrap();
        }
        place
    }

    pub(crate) fn devices(&self) -> Vec<(PathBuf, u64)> {
        self.settings().devices
    }

    pub(crate) fn settings(&self) -> PrivateSettings {
        settings_in(self.dir.path())
    }

    pub(crate) fn start(&self) -> PrivateDaemon {
        PrivateDaemon::start(self.settings()).unwrap_or_else(|e| panic!("{e}"))
    }
}

/// Settings of a private daemon with everything in `dir`.
pub(crate) fn settings_in(dir: &Path) -> PrivateSettings {
    PrivateSettings {
        program: None,
        dir: dir.to_owned(),
        devices: ["a.tiles", "b.tiles"]
            .map(|name| (dir.join(name), DEVICE_BYTES))
            .into(),
        arena_bytes_max: ARENA_BYTES_MAX,
        iodepth_max: 64,
        engine: "auto".into(),
    }
}

/// Makes a directory on a drive: direct I/O to memory file systems is not tested here.
pub(crate) fn dir() -> tempfile::TempDir {
    tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap()
}

pub(crate) fn settings(socket: &Path) -> SessionSettings {
    SessionSettings {
        socket: socket.to_owned(),
        job: "tried".into(),
        rank: Rank(0),
        local_ranks: 1,
        classes: vec![SlotClass {
            slot_bytes: u64::from(TILE_BYTES),
            slot_count: 16,
        }],
        iodepth: 8,
    }
}

pub(crate) fn definition() -> JobDefinition {
    let tile = |index| Tile {
        unit: index / 3,
        kind: TileKind::State,
        elem_offset: u64::from(index % 3) * 1024,
        tile_bytes: TILE_BYTES,
    };
    JobDefinition {
        layout: b"three tiles a unit".to_vec(),
        tiles: (0..TILE_COUNT).map(tile).collect(),
        durability: Durability::Committed,
        nodes: 1,
    }
}

/// Opens a new job, ready to be written.
pub(crate) fn open_new(socket: &Path) -> Session {
    let mut session = Session::open(settings(socket)).unwrap();
    assert_eq!(session.info().job, None);
    session.define_tiles(definition()).unwrap();
    assert_eq!(session.resume(Generation(0)).unwrap(), Generation(1));
    session
}

/// Returns the content of tile `tile` written with `seed`: no two blocks of two tiles are equal.
pub(crate) fn content(tile: u32, seed: u64) -> Vec<u8> {
    let mut state = (u64::from(tile) << 32) ^ seed ^ 0x9e37_79b9_7f4a_7c15;
    let words = (0..TILE_BYTES / 8).flat_map(|_| {
        state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (state ^ (state >> 29)).to_le_bytes()
    });
    words.collect()
}

/// Waits for `count` completions.
pub(crate) fn wait_for(
    session: &mut Session,
    count: usize,
) -> Result<Vec<EndedOperation>, ClientError> {
    let mut done = Vec::new();
    let until = Instant::now() + LONG;
    while done.len() < count {
        assert!(Instant::now() < until, "{} of {count} ended", done.len());
        session.wait(LONG)?;
        session.poll(&mut done)?;
    }
    Ok(done)
}

/// Swaps out `tiles` with the content of `seed`, with as many operations in flight as granted.
pub(crate) fn write(session: &mut Session, tiles: impl IntoIterator<Item = u32>, seed: u64) {
    for tile in tiles {
        while session.in_flight_count() as u32 == session.info().iodepth {
            for done in wait_for(session, 1).unwrap() {
                done.result.unwrap();
            }
        }
        let mut slot = session.take_slot(0).expect("more slots than iodepth");
        slot.as_mut_slice().copy_from_slice(&content(tile, seed));
        session.swap_out(TileIndex(tile), slot).unwrap();
    }
    let left = session.in_flight_count();
    for done in wait_for(session, left).unwrap() {
        done.result.unwrap();
    }
}

/// Swaps in `tile`.
pub(crate) fn read(session: &mut Session, tile: u32) -> EndedOperation {
    let slot = session.take_slot(0).expect("a free slot");
    session.swap_in(TileIndex(tile), slot).unwrap();
    wait_for(session, 1).unwrap().remove(0)
}

/// Asserts that all of `tiles` have the content of `seed`.
pub(crate) fn assert_content(session: &mut Session, tiles: std::ops::Range<u32>, seed: u64) {
    for tile in tiles {
        let done = read(session, tile);
        done.result.unwrap();
        assert!(
            done.slot.as_slice() == content(tile, seed),
            "tile {tile} does not hold what was written with seed {seed}"
        );
    }
}

/// Returns a command of the daemon's program.
pub(crate) fn offloadd_of(daemon: &PrivateDaemon) -> Command {
    Command::new(fs::read_link(format!("/proc/{}/exe", daemon.pid())).unwrap())
}

/// Returns the output of `offloadd top`.
pub(crate) fn top(daemon: &PrivateDaemon) -> serde_json::Value {
    let mut top = offloadd_of(daemon);
    top.args(["top", "--once", "--json", "--interval", "0.1", "--socket"]);
    let output = top.arg(daemon.socket()).output().unwrap();
    let words = String::from_utf8_lossy(&output.stderr);
    serde_json::from_slice(&output.stdout).unwrap_or_else(|error| panic!("{error}: {words}"))
}

pub(crate) fn kill_9(daemon: &PrivateDaemon) {
    let pid = rustix::process::Pid::from_raw(daemon.pid() as i32).unwrap();
    rustix::process::kill_process(pid, rustix::process::Signal::KILL).unwrap();
}

/// Runs one test in a process of its own, with safeguards disabled in it and in its daemon.
pub(crate) fn run_test(name: &str, removed: &str) -> Output {
    Command::new(std::env::current_exe().unwrap())
        .args(["--exact", name, "--nocapture"])
        .env("OFFLOADD_DISABLE", removed)
        .output()
        .unwrap()
}

/// Asserts that the test `name` passes, and fails with the safeguard `mechanism` disabled.
pub(crate) fn assert_depends_on(name: &str, mechanism: &str) {
    let with = run_test(name, "");
    assert!(
        with.status.success(),
        "{name}: {}",
        String::from_utf8_lossy(&with.stderr)
    );
    let without = run_test(name, mechanism);
    let words = String::from_utf8_lossy(&without.stderr);
    assert!(
        !without.status.success(),
        "{name} passes without {mechanism}"
    );
    assert!(
        words.contains("panicked"),
        "{name} failed for another reason: {words}"
    );
}

/// For a test that needs [`daemon_has_hooks`].
pub(crate) fn skip_without_hooks() {
    println!(
        "skipped: {}: this offloadd was built without the test hooks; `cargo test` of the workspace builds it with them",
        std::thread::current().name().unwrap_or("a test")
    );
}

/// Whether safeguards of the daemon itself can be disabled: only `cargo test` of the workspace builds it so.
pub(crate) fn daemon_has_hooks(place: &Place) -> bool {
    let daemon = place.start();
    let program = fs::read_link(format!("/proc/{}/exe", daemon.pid())).unwrap();
    let bytes = fs::read(program).unwrap();
    let name = b"OFFLOADD_DISABLE";
    bytes.windows(name.len()).any(|window| window == name)
}
