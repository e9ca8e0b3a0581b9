//! Tests that a device with wrong rates is calibrated while its daemon is stopped. What could go wrong: no tiles move by the new rates, the
//! rates are gone after a restart, or a device is written to while its daemon serves.

use offloadd::metrics::DeviceView;
use offloadd::store::catalog::Phase;

use crate::common::{Daemon, Store, eventually, expect_tiles, fill_tiles, program, words};
use crate::growth::{LIMIT, ROUNDING_TILES, TILES, device, keep_room, share, tiles_held, view};

/// Bytes per second of both devices; the store records a hundredth of that for the second one.
const RATE_LIMIT: &str = "16000000,16000000";
const RATE: u64 = 16_000_000;
const WRONG: u64 = RATE / 100;

fn serve(store: &Store) -> Daemon {
    let mut command = store.serve_command();
    command.env("OFFLOADD_RATE_LIMIT", RATE_LIMIT);
    Daemon::start(command, store.socket())
}

/// Whether the rates were corrected, on a slow machine too: they exceed the wrong ones.
fn was_corrected(view: &DeviceView) -> bool {
    view.state.read_bytes_per_s > WRONG && view.state.write_bytes_per_s > WRONG
}

fn stop(daemon: &mut Daemon) {
    daemon.signal(rustix::process::Signal::TERM);
    assert_eq!(daemon.wait(LIMIT), Some(0));
}

#[test]
fn a_device_with_wrong_rates_gets_its_share_when_the_daemon_starts_again() {
    let store = Store::new(2, "auto");
    store.set_rates(&[RATE, WRONG]);
    let slow = &store.devices[1];
    let mut daemon = serve(&store);
    let mut control = daemon.control();
    let mut session = control.session("tiny");
    let working = session.begin(&mut control, TILES);
    fill_tiles(&mut session, TILES, working, 5);
    session.commit(&mut control, working, b"");
    let before = view(&mut control, slow).unwrap();
    assert!(tiles_held(&before) <= ROUNDING_TILES, "{before:?}");
    drop((session, control));
    stop(&mut daemon);
    let mut calibrate = program();
    calibrate.args(["device", "calibrate"]).arg(slow);
    calibrate.arg("--config").arg(&store.config);
    let output = calibrate
        .env("OFFLOADD_RATE_LIMIT", RATE_LIMIT)
        .output()
        .unwrap();
    let told = words(&output);
    assert!(output.status.success(), "{told}");
    for printed in [
        "before  reads 0.00 GB/s, writes 0.00 GB/s",
        "now     reads 0.0",
    ] {
        assert!(told.contains(printed), "{printed}: {told}");
    }

    let mut daemon = serve(&store);
    let mut control = daemon.control();
    eventually("its tiles have come", LIMIT, || {
        let found = view(&mut control, slow).unwrap();
        found.state.status.phase == Some(Phase::Settled)
    });
    let found = view(&mut control, slow).unwrap();
    assert!(was_corrected(&found), "{found:?}");
    let (held, due) = (tiles_held(&found), share(&mut control, slow));
    println!("{held} of {TILES} tiles, its share is {due:.1}");
    assert!((held - due).abs() <= ROUNDING_TILES, "{held} of {due}");
    assert!(due > 2.0 * ROUNDING_TILES, "{due}");
    let mut session = control.session("tiny");
    session.resume(&mut control, working);
    expect_tiles(&mut session, TILES, 5);
    drop((session, control));
    stop(&mut daemon);

    let daemon = serve(&store);
    let again = view(&mut daemon.control(), slow).unwrap();
    assert_eq!(again.state, found.state, "kept with the device");
}

#[test]
fn what_cannot_be_calibrated_is_named() {
    // Each device holds a part of the reserved space.
    let store = Store::new(2, "auto");
    store.set_rates(&[0, 0]);
    let refused = |output: std::process::Output, printed: &str| {
        let told = words(&output);
        assert!(!output.status.success() && told.contains(printed), "{told}");
    };
    let nobody = store.dir.path().join("nobody");
    refused(
        device(&store, "calibrate", &nobody, &[]),
        "the store has no device",
    );
    let mut daemon = store.serve();
    let mut control = daemon.control();
    let served = &store.devices[1];
    let bytes = || std::fs::read(served).unwrap();
    let before = bytes();
    refused(device(&store, "calibrate", served, &[]), "start the daemon");
    assert!(bytes() == before, "nothing was written");
    let session = keep_room(&mut control);
    let output = device(&store, "drain", served, &[]);
    assert!(output.status.success(), "{}", words(&output));
    // It is killed while something is still on the device.
    daemon.signal(rustix::process::Signal::KILL);
    daemon.wait(LIMIT);
    drop(session);
    refused(device(&store, "calibrate", served, &[]), "is being drained");
    // Neither a daemon nor a store.
    let mut calibrate = program();
    calibrate
        .args(["device", "calibrate"])
        .arg(&nobody)
        .arg("--socket");
    refused(calibrate.arg(&nobody).output().unwrap(), "nobody");
    let config = store.dir.path().join("none.toml");
    let text = std::fs::read_to_string(&store.config).unwrap();
    let text = text
        .replace("device0", "none0")
        .replace("/run/", "/nowhere/");
    std::fs::write(&config, text).unwrap();
    let mut calibrate = program();
    calibrate
        .args(["device", "calibrate"])
        .arg(&nobody)
        .arg("--config");
    refused(calibrate.arg(&config).output().unwrap(), "none0");
}
