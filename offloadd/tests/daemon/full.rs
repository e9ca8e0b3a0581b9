//! Tests a full file system below a store. What could go wrong: a write that found no space counts as done, a generation with it is acknowledged, the
//! daemon ends, or the job can never be resumed. Space is reserved when a store is made, so this needs a device file with holes, as a sparse copy has
//! them.

use std::path::{Path, PathBuf};
use std::process::Command;

use offload_api::fault::FaultKind;
use offload_api::ids::SlotIndex;
use offload_api::proto;
use rustix::fs::FallocateFlags;

use crate::common::{Store, expect_tiles, fill_tiles, swap_out, words};

const DATA_OFFSET: u64 = 1 << 20;
const DEVICE_BYTES: u64 = 8 << 20;

/// A small file system of its own, unmounted when dropped.
struct Small {
    dir: PathBuf,
}

impl Small {
    /// Returns `None` after printing why.
    fn new(below: &Path) -> Option<Self> {
        let skip = |why: &str| {
            println!(
                "skipped: {}: {why}",
                std::thread::current().name().unwrap_or("a test")
            );
            None
        };
        if !rustix::process::geteuid().is_root() {
            return skip("only root can mount a file system");
        }
        let image = below.join("image");
        std::fs::File::create(&image)
            .unwrap()
            .set_len(24 << 20)
            .unwrap();
        let dir = below.join("small");
        std::fs::create_dir(&dir).unwrap();
        let mut make = Command::new("mkfs.ext4");
        make.args(["-q", "-m", "0", "-O", "^has_journal"])
            .arg(&image);
        let Ok(made) = make.output() else {
            return skip("there is no mkfs.ext4");
        };
        assert!(made.status.success(), "{}", words(&made));
        let mut mount = Command::new("mount");
        let mounted = mount.args(["-o", "loop"]).arg(&image).arg(&dir).output();
        match mounted {
            Ok(output) if output.status.success() => Some(Self { dir }),
            Ok(output) => skip(words(&output).trim()),
            Err(error) => skip(&format!("mount: {error}")),
        }
    }
}

impl Drop for Small {
    fn drop(&mut self) {
        // A ring releases its files a moment after its process has ended.
        for _ in 0..100 {
            let output = Command::new("umount").arg(&self.dir).output();
            if output.is_ok_and(|output| output.status.success()) {
                return;
            }
            std::thread::sleep(std::time::Duration::from_millis(20));
        }
    }
}

#[test]
fn a_full_file_system_is_named_and_the_job_continues_when_there_is_space() {
    let below = tempfile::tempdir().unwrap();
    let Some(small) = Small::new(below.path()) else {
        return;
    };
    let mut store = Store::new(1, "auto");
    let device = small.dir.join("device");
    std::fs::copy(&store.devices[0], &device).unwrap();
    let file = std::fs::File::options().write(true).open(&device).unwrap();
    let hole = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    rustix::fs::fallocate(&file, hole, DATA_OFFSET, DEVICE_BYTES - DATA_OFFSET).unwrap();
    drop(file);
    store.devices = vec![device.clone()];
    store.write_config(&store.socket(), "auto");

    let daemon = store.serve();
    let mut control = daemon.control();
    let mut session = control.session("tiny");
    let working = session.begin(&mut control, 400);
    let ballast = small.dir.join("ballast");
    let filled = std::fs::write(&ballast, vec![1; 24 << 20]);
    assert!(filled.is_err(), "the file system has room for everything");
    let place = session.geometry.slot_place(SlotIndex(1)).unwrap();
    let mut refused = 0;
    for tile in 0..400 {
        let bytes = [tile as u8; 4096];
        session.write_slot(place.offset, &bytes);
        session.submit(swap_out(tile, 1, working, &bytes));
        let cqe = session.complete();
        match FaultKind::from_number(cqe.fault) {
            None => {}
            Some(FaultKind::NoSpace) => refused += 1,
            Some(other) => panic!("tile {tile}: {other:?}"),
        }
    }
    assert!(refused > 50, "{refused} of 400 tiles found no room");
    let commit = proto::CommitRequest {
        token: session.token.clone(),
        generation: working,
        blob: Vec::new(),
    };
    let fault = control.commit(commit).unwrap_err();
    assert_eq!(fault.kind, FaultKind::Poisoned, "{fault}");
    assert!(
        fault.message.contains(&format!("{refused} tiles")),
        "{fault}"
    );

    std::fs::remove_file(ballast).unwrap();
    fill_tiles(&mut session, 400, working, 9);
    session.commit(&mut control, working, b"");
    expect_tiles(&mut session, 400, 9);
}
