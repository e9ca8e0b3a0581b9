//! Tests that long work shows its progress. What could go wrong: minutes of silence, lines where a program reads, a total that is not the whole.
//! strace delays system calls, so that little work takes long.

use std::io::Read;
use std::process::Output;
use std::time::Duration;

use offload_api::ids::SlotIndex;
use rustix::process::Signal;

use crate::common::{Daemon, Session, Store, eventually, fill_tiles, open_sized, swap_out, words};
use crate::strace::strace;

/// Runs the program with these system calls changed; `None` where strace cannot.
fn slowed(inject: &[&str], arguments: &[&str]) -> Option<Output> {
    let mut command = strace()?;
    for one in inject {
        command.arg("-e").arg(format!("inject={one}"));
    }
    command.arg(env!("CARGO_BIN_EXE_offloadd")).args(arguments);
    Some(command.output().unwrap())
}

#[test]
fn verifying_a_slow_store_says_how_long_it_takes_and_not_in_json() {
    let store = Store::new(1, "psync");
    let mut daemon = store.serve();
    let mut control = daemon.control();
    let mut session = control.session("tiny");
    let working = session.begin(&mut control, 8);
    fill_tiles(&mut session, 8, working, 10);
    session.commit(&mut control, working, b"");
    daemon.child.kill().unwrap();
    daemon.child.wait().unwrap();

    // Some dozen reads, most of them of the store's own structures.
    let slow = ["pread64:delay_enter=120000"];
    let config = store.config.to_str().unwrap();
    let Some(output) = slowed(&slow, &["verify", "--config", config]) else {
        return;
    };
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{}", words(&output));
    assert!(error.contains("verifying: "), "{error}");
    assert!(error.contains(" % of 32.0 KiB, "), "{error}");
    assert!(
        String::from_utf8_lossy(&output.stdout).contains("sound"),
        "{}",
        words(&output)
    );

    let output = slowed(&slow, &["verify", "--json", "--config", config]).unwrap();
    assert!(output.stderr.is_empty(), "{}", words(&output));
    assert!(output.status.success());
}

#[test]
fn filling_a_file_that_cannot_be_reserved_says_how_long_it_takes() {
    let dir = tempfile::tempdir().unwrap();
    let device = dir.path().join("device");
    let changes = ["fallocate:error=EOPNOTSUPP", "pwrite64:delay_enter=350000"];
    let arguments = ["format", device.to_str().unwrap(), "--size", "64MiB"];
    let Some(output) = slowed(&changes, &arguments) else {
        return;
    };
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{}", words(&output));
    assert!(error.contains("filling "), "{error}");
    assert!(error.contains(" % of 64.0 MiB, "), "{error}");
}

#[test]
fn a_stop_that_waits_for_a_slow_device_says_so() {
    let store = Store::new(1, "psync");
    let mut command = store.serve_command();
    // A tile takes a second and a half.
    command.env("OFFLOADD_RATE_LIMIT", "43691,43691");
    let mut daemon = Daemon::start(command, store.socket());
    let mut control = daemon.control();
    let reply = control.open_session(open_sized("tiny", 64 << 10)).unwrap();
    let mut session = Session::attach_sized(&reply, 64 << 10).unwrap();
    let working = session.begin_sized(&mut control, 2, 64 << 10);
    let bytes = [7; 64 << 10];
    for tile in 0..2 {
        let place = session.geometry.slot_place(SlotIndex(tile)).unwrap();
        session.write_slot(place.offset, &bytes);
        session.submit(swap_out(tile, tile, working, &bytes));
    }
    eventually("both are under way", Duration::from_secs(60), || {
        let seen = control.metrics(Default::default()).unwrap();
        seen.jobs[0].writing_count == 2
    });
    daemon.signal(Signal::TERM);
    assert_eq!(daemon.wait(Duration::from_secs(20)), Some(0));
    let mut log = String::new();
    let mut stderr = daemon.child.stderr.take().unwrap();
    stderr.read_to_string(&mut log).unwrap();
    assert!(log.contains("the stop waits for "), "{log}");
}
