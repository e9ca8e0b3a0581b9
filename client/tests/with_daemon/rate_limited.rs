//! Tests with daemons on devices of a known speed (`OFFLOADD_RATE_LIMIT`, test builds): a slow drive must not slow the others down, and a tile that
//! is waited for must not queue behind read-ahead.

use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use offload_client::private::PrivateDaemon;
use offload_client::{
    Durability, Generation, JobDefinition, Session, SessionSettings, SlotClass, Tile, TileIndex,
    TileKind,
};

use crate::real::{Place, daemon_has_hooks, settings, skip_without_hooks, wait_for};

/// Bytes read and written per second; the other device has half of both.
const FAST: [u64; 2] = [80_000_000, 40_000_000];

/// Least share of the sum of both rates. Half of the bytes on each device would reach 0.67; the rest is room for a busy machine.
const SHARE_MIN: f64 = 0.85;

/// Whether this is the inner process. The limit applies to a whole process, so a test runs in a process of its own; in the outer process it is done
/// when this returns `false`.
fn is_rate_limited(name: &str) -> bool {
    if std::env::var_os("OFFLOADD_RATE_LIMIT").is_some() {
        return true;
    }
    if !daemon_has_hooks(&Place::new()) {
        skip_without_hooks();
        return false;
    }
    let [read, write] = FAST;
    let output = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", name])
        .env(
            "OFFLOADD_RATE_LIMIT",
            format!("b={},{};{read},{write}", read / 2, write / 2),
        )
        .output()
        .unwrap();
    let message = String::from_utf8_lossy(&output.stdout);
    assert!(message.contains("1 passed"), "{message}");
    false
}

/// Starts a daemon whose store was formatted, and therefore measured, under the limit.
fn start(place: &Place) -> PrivateDaemon {
    let mut settings = place.settings();
    for (path, bytes) in &mut settings.devices {
        let _ = std::fs::remove_file(path);
        *bytes = 128 << 20;
    }
    settings.arena_bytes_max = 128 << 20;
    PrivateDaemon::start(settings).unwrap_or_else(|e| panic!("{e}"))
}

fn open(socket: &Path, tile_bytes: u32, tile_count: u32) -> Session {
    let mut session = Session::open(SessionSettings {
        classes: vec![SlotClass {
            slot_bytes: u64::from(tile_bytes),
            slot_count: 64,
        }],
        iodepth: 64,
        ..settings(socket)
    })
    .unwrap();
    let tile = |unit| Tile {
        unit,
        kind: TileKind::State,
        elem_offset: 0,
        tile_bytes,
    };
    session
        .define_tiles(JobDefinition {
            layout: Vec::new(),
            tiles: (0..tile_count).map(tile).collect(),
            durability: Durability::Committed,
            nodes: 1,
        })
        .unwrap();
    session.resume(Generation(0)).unwrap();
    session
}

/// Moves all tiles in order, as many at a time as there are slots. Returns the duration.
fn pass(session: &mut Session, tile_count: u32, out: bool) -> Duration {
    let since = Instant::now();
    for tile in (0..tile_count).map(TileIndex) {
        let slot = loop {
            match session.take_slot(0) {
                Some(slot) => break slot,
                None => drop(wait_for(session, 1).unwrap()),
            }
        };
        match out {
            true => session.swap_out(tile, slot).unwrap(),
            false => session.swap_in(tile, slot).unwrap(),
        };
    }
    let left = session.in_flight_count();
    for done in wait_for(session, left).unwrap() {
        done.result.unwrap();
    }
    since.elapsed()
}

#[test]
fn a_drive_of_half_the_speed_does_not_hold_the_other_back() {
    if !is_rate_limited("rate_limited::a_drive_of_half_the_speed_does_not_hold_the_other_back") {
        return;
    }
    let place = Place::new();
    let daemon = start(&place);
    let (tile_bytes, tile_count) = (256 << 10, 256);
    let mut session = open(daemon.socket(), tile_bytes, tile_count);
    let bytes = f64::from(tile_bytes) * f64::from(tile_count);
    let mut best = [0.0_f64; 2];
    // On a busy machine a pass may be late, so one pass in time is enough.
    for _ in 0..5 {
        for (way, out) in [(1, true), (0, false)] {
            let sum = FAST[way] as f64 * 1.5;
            let share = bytes / pass(&mut session, tile_count, out).as_secs_f64() / sum;
            best[way] = best[way].max(share);
        }
        if best.iter().all(|share| *share >= SHARE_MIN) {
            break;
        }
    }
    println!(
        "of the sum of both: read {:.3}, written {:.3}",
        best[0], best[1]
    );
    // Operations in flight when a pass begins may make it slightly early, never more.
    assert!(
        best.iter().all(|s| (SHARE_MIN..1.1).contains(s)),
        "{best:?}"
    );
    session.close().unwrap();
}

#[test]
fn a_wanted_tile_comes_before_what_is_read_ahead() {
    if !is_rate_limited("rate_limited::a_wanted_tile_comes_before_what_is_read_ahead") {
        return;
    }
    let place = Place::new();
    let daemon = start(&place);
    let mut session = open(daemon.socket(), 1 << 20, 61);
    pass(&mut session, 61, true);
    // The promotion comes at the start, while in flight, or never.
    for (wanted, hastened, places) in [
        (true, false, 0..30),
        (false, true, 0..30),
        (false, false, 40..61),
    ] {
        for tile in (0..60).map(TileIndex) {
            let slot = session.take_slot(0).unwrap();
            session.swap_in(tile, slot).unwrap();
        }
        let slot = session.take_slot(0).unwrap();
        let ticket = match wanted {
            true => session.swap_in_wanted(TileIndex(60), slot).unwrap(),
            false => session.swap_in(TileIndex(60), slot).unwrap(),
        };
        if hastened {
            session.promote(ticket).unwrap();
        }
        let done = wait_for(&mut session, 61).unwrap();
        let before = done.iter().position(|one| one.ticket == ticket).unwrap();
        assert!(
            places.contains(&before),
            "{before} of 60 came before it, wanted: {wanted}, hastened: {hastened}"
        );
        // The operation has ended.
        session.promote(ticket).unwrap();
    }
    session.close().unwrap();
}
