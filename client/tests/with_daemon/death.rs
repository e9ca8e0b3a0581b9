//! Tests that a process that dies with transfers in flight frees its memory and rank, but only after the kernel has stopped writing. The victim is
//! this test's own program, started again and killed.

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use offload_client::{ClientError, FaultKind, Generation, Session, SlotClass, TileIndex};

use crate::real::*;

const VICTIM: &str = "OFFLOAD_TEST_VICTIM_SOCKET";

/// Time after which a dead process's memory must be free, as docs/reliability.md promises.
const PROMISED: Duration = Duration::from_secs(1);

/// Opens a session that takes all of the daemon's memory.
fn open_all(socket: &Path) -> Result<Session, ClientError> {
    let mut settings = settings(socket);
    settings.classes = vec![SlotClass {
        slot_bytes: u64::from(TILE_BYTES),
        slot_count: (ARENA_BYTES_MAX / u64::from(TILE_BYTES)) as u32,
    }];
    Session::open(settings)
}

/// Writes forever, with as many operations in flight as granted.
fn be_the_victim(socket: &Path) {
    let mut session = open_all(socket).unwrap();
    session.define_tiles(definition()).unwrap();
    session.resume(Generation(0)).unwrap();
    let mut tiles: Vec<u32> = (0..TILE_COUNT).collect();
    let mut done = Vec::new();
    println!("\nwriting");
    loop {
        while session.in_flight_count() < session.info().iodepth as usize {
            let slot = session.take_slot(0).unwrap();
            let tile = tiles.pop().unwrap();
            session.swap_out(TileIndex(tile), slot).unwrap();
        }
        session.wait(LONG).unwrap();
        session.poll(&mut done).unwrap();
        tiles.extend(done.drain(..).map(|d| d.tile.0));
    }
}

#[test]
fn a_dead_client_gives_its_slots_back() {
    if let Some(socket) = std::env::var_os(VICTIM) {
        return be_the_victim(Path::new(&socket));
    }
    let place = Place::new();
    let daemon = place.start();
    // On a busy machine the test may notice the death late, so the fastest of several deaths counts.
    let (mut rounds, mut fastest) = (0, LONG);
    while rounds < 5 || (fastest >= PROMISED && rounds < 20) {
        rounds += 1;
        let mut victim = Command::new(std::env::current_exe().unwrap())
            .args([
                "--exact",
                "death::a_dead_client_gives_its_slots_back",
                "--nocapture",
            ])
            .env(VICTIM, daemon.socket())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let output = BufReader::new(victim.stdout.take().unwrap());
        assert!(
            output.lines().map_while(Result::ok).any(|l| l == "writing"),
            "the victim did not get to writing"
        );
        std::thread::sleep(Duration::from_millis(20));
        let held = open_all(daemon.socket())
            .err()
            .expect("the victim holds it");
        assert!(matches!(
            held.fault(),
            Some(FaultKind::Busy | FaultKind::NoMemory)
        ));
        victim.kill().unwrap();
        victim.wait().unwrap();
        let dead = Instant::now();
        let session = loop {
            match open_all(daemon.socket()) {
                Ok(session) => break session,
                Err(error) => assert!(dead.elapsed() < LONG, "not free after {LONG:?}: {error}"),
            }
        };
        fastest = fastest.min(dead.elapsed());
        session.close().unwrap();
    }
    assert!(fastest < PROMISED, "{fastest:?} at best of {rounds}");
}
