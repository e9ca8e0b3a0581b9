//! The daemon's client in the guest, and the bytes that it writes, known to the test that reads the drives afterwards.

use std::path::Path;
use std::time::Duration;

use offload_api::checksum::checksum;
use offload_api::ids::SlotIndex;
use offload_api::proto;

use crate::process::{Control, Session, eventually, open_sized, swap_in, swap_out};

pub(crate) const TILES: u32 = 6;
pub(crate) const TILE_BYTES: u32 = 16 << 10;
pub(crate) const JOB: &str = "guest";
/// Time limit of a restart: an emulated processor on a busy machine is slow.
const RESTARTED: Duration = Duration::from_secs(600);

/// Variable that is set for this program when it runs in the guest.
pub(crate) const SOCKET: &str = "OFFLOADD_GUEST_SOCKET";

/// Variable with the directory in which this program and the script that restarts the daemon report their progress; set for that test.
pub(crate) const RESTART: &str = "OFFLOADD_GUEST_RESTART";

/// Whether generation `generation` writes this tile; the first writes all.
fn writes(generation: u64, tile: u32) -> bool {
    generation == 1 || !(generation + u64::from(tile)).is_multiple_of(3)
}

/// Returns a tile's content in a generation.
pub(crate) fn content(generation: u64, tile: u32) -> Vec<u8> {
    let by = (1..=generation).rev().find(|by| writes(*by, tile));
    let mut state = (by.expect("the first writes all") << 32) + u64::from(tile) + 1;
    let words = (0..TILE_BYTES / 8).flat_map(|_| {
        state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (state ^ (state >> 29)).to_le_bytes()
    });
    words.collect()
}

/// Returns shell lines that start a daemon on both drives and run `test` of this program as its client.
pub(crate) fn script(test: &str, removed: &str) -> String {
    format!(
        "mkdir /run/offloadd\n\
         cat > /tmp/offloadd.toml <<END\n\
         socket = \"/run/offloadd/offloadd.sock\"\n\
         devices = [\"/dev/nvme0n1\", \"/dev/nvme1n1\"]\n\
         arena_bytes_max = \"16MiB\"\n\
         END\n\
         OFFLOADD_DISABLE={removed} offloadd serve --config /tmp/offloadd.toml > /tmp/log 2>&1 &\n\
         until grep -q READY /tmp/log || ! kill -0 $!; do sleep 0.1; done\n\
         grep READY /tmp/log || cat /tmp/log\n\
         {SOCKET}=/run/offloadd/offloadd.sock writer --exact {test} --nocapture\n\
         tail -n 20 /tmp/log"
    )
}

/// Opens a new job and defines its tiles.
pub(crate) fn begin(control: &mut Control) -> Session {
    let reply = control
        .open_session(open_sized(JOB, u64::from(TILE_BYTES)))
        .unwrap();
    let session = Session::attach_sized(&reply, u64::from(TILE_BYTES)).unwrap();
    session.begin_sized(control, TILES, TILE_BYTES);
    session
}

/// Commits one generation after the other and prints each on a line of its own.
pub(crate) fn commit_generations(socket: &Path, count: u64) {
    let mut control = Control::connect(socket);
    let mut session = begin(&mut control);
    for generation in 1..=count {
        let tiles: Vec<u32> = (0..TILES)
            .filter(|tile| writes(generation, *tile))
            .collect();
        for some in tiles.chunks(4) {
            for (slot, tile) in some.iter().enumerate() {
                let place = session.geometry.slot_place(SlotIndex(slot as u32)).unwrap();
                let bytes = content(generation, *tile);
                session.write_slot(place.offset, &bytes);
                session.submit(swap_out(*tile, slot as u32, generation, &bytes));
            }
            for _ in some {
                assert_eq!(session.complete().fault, 0);
            }
        }
        session.commit(&mut control, generation, &generation.to_le_bytes());
        println!("\nACK {generation}");
    }
}

/// Writes a generation, waits for a restart of the daemon, and commits it through the same session.
pub(crate) fn survive_a_restart(socket: &Path, dir: &Path) {
    let mut control = Control::connect(socket);
    let request = proto::OpenSessionRequest {
        job: "long-lived".into(),
        ..open_sized(JOB, u64::from(TILE_BYTES))
    };
    let reply = control.open_session(request).unwrap();
    let mut session = Session::attach_sized(&reply, u64::from(TILE_BYTES)).unwrap();
    session.begin_sized(&mut control, TILES, TILE_BYTES);
    write_first(&mut session);
    std::fs::write(dir.join("written"), []).unwrap();
    eventually("it is restarted", RESTARTED, || {
        dir.join("restarted").exists()
    });
    let mut control = Control::connect(socket);
    let token = session.token.clone();
    let found = control.reattach(proto::ReattachRequest { token }).unwrap();
    assert_eq!(found.working_generation, 1);
    for tile in 0..TILES {
        session.submit(swap_in(tile, 1));
        assert_eq!(session.complete().fault, 0);
        let place = session.geometry.slot_place(SlotIndex(1)).unwrap();
        let mut bytes = vec![0; TILE_BYTES as usize];
        rustix::io::pread(&session.received.arena, &mut bytes[..], place.offset).unwrap();
        assert!(bytes == content(1, tile), "tile {tile} is another");
    }
    assert_eq!(session.commit(&mut control, 1, b"lived"), 2);
}

/// Writes all tiles of generation 1, one after the other.
fn write_first(session: &mut Session) {
    for tile in 0..TILES {
        let place = session.geometry.slot_place(SlotIndex(0)).unwrap();
        let bytes = content(1, tile);
        session.write_slot(place.offset, &bytes);
        session.submit(swap_out(tile, 0, 1, &bytes));
        assert_eq!(session.complete().fault, 0);
    }
}

/// Reads all tiles again and again and prints the refusals, until there were ten; then tries to commit all tiles.
pub(crate) fn read_until_refused(socket: &Path) {
    let mut control = Control::connect(socket);
    let mut session = begin(&mut control);
    write_first(&mut session);
    session.commit(&mut control, 1, b"one");
    println!("\nREADING");
    let mut refused = 0;
    while refused < 10 {
        for tile in 0..TILES {
            session.submit(swap_in(tile, 1));
            let cqe = session.complete();
            if cqe.fault == 0 {
                let place = session.geometry.slot_place(SlotIndex(1)).unwrap();
                let mut bytes = vec![0; TILE_BYTES as usize];
                rustix::io::pread(&session.received.arena, &mut bytes[..], place.offset).unwrap();
                assert_eq!(checksum(&bytes), cqe.checksum, "handed out as whole");
                continue;
            }
            refused += 1;
            println!(
                "\nREFUSED tile {tile} device {} fault {} errno {}",
                cqe.device, cqe.fault, cqe.errno
            );
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    for tile in 0..TILES {
        let place = session.geometry.slot_place(SlotIndex(2)).unwrap();
        let bytes = content(2, tile);
        session.write_slot(place.offset, &bytes);
        session.submit(swap_out(tile, 2, 2, &bytes));
        session.complete();
    }
    let commit = control.commit(proto::CommitRequest {
        token: session.token.clone(),
        generation: 2,
        blob: b"two".to_vec(),
    });
    match commit {
        Ok(_) => println!("\nCOMMITTED"),
        Err(fault) => println!("\nNOT COMMITTED {fault}"),
    }
    let about = control.describe(proto::DescribeRequest {});
    println!("\nALIVE {}", about.is_ok());
}
