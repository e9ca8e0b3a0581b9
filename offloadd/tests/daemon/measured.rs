//! A device that was measured wrong is measured again, with its daemon and without. What could go wrong: nothing moves by the
//! new rates, they are gone after a restart, or somebody's bytes are written over to learn them.

use offload_api::fault::FaultKind;
use offload_api::proto;
use offloadd::metrics::DeviceView;
use offloadd::store::catalog::Phase;

use crate::common::{Daemon, Session, Store, expect_tiles, fill_tiles, open, program, words};
use crate::growth::{
    LIMIT, ROUNDING_TILES, TILES, device, keep_room, share, tiles_held, view, write_until,
};

/// Bytes a second, of both devices; the store says a hundredth of it of the second one.
const PACE: &str = "16000000,16000000";
const RATE: u64 = 16_000_000;
const WRONG: u64 = RATE / 100;

fn store() -> Store {
    let store = Store::new(2, "auto");
    store.set_rates(&[RATE, WRONG]);
    store
}

fn serve(store: &Store) -> Daemon {
    let mut command = store.serve_command();
    command.env("OFFLOADD_PACE", PACE);
    Daemon::start(command, store.socket())
}

/// Whether a machine is slow or not: more than it was made to be.
fn was_corrected(view: &DeviceView) -> bool {
    view.state.read_bytes_per_s > WRONG && view.state.write_bytes_per_s > WRONG
}

#[test]
fn a_device_with_wrong_rates_gets_its_share_while_a_job_runs() {
    let store = store();
    let slow = &store.devices[1];
    let mut daemon = serve(&store);
    let mut control = daemon.control();
    let reply = control.open_session(open("tiny")).unwrap();
    let mut session = Session::attach(&reply).unwrap();
    let working = session.begin(&mut control, TILES);
    fill_tiles(&mut session, TILES, working, 1);
    let working = session.commit(&mut control, working, b"");
    let before = view(&mut control, slow).unwrap();
    assert!(tiles_held(&before) <= ROUNDING_TILES, "{before:?}");
    let output = device(&store, "calibrate", slow, &[]);
    let told = words(&output);
    assert!(output.status.success(), "{told}");
    for said in [
        "before  reads 0.00 GB/s, writes 0.00 GB/s",
        "now     reads 0.0",
        "was busy",
    ] {
        assert!(told.contains(said), "{said}: {told}");
    }
    let newest = write_until(&mut session, &mut control, working, |control| {
        let found = view(control, slow).unwrap();
        found.state.status.phase == Some(Phase::Settled)
    });
    let found = view(&mut control, slow).unwrap();
    assert!(was_corrected(&found), "{found:?}");
    let (held, due) = (tiles_held(&found), share(&mut control, slow));
    println!("{held} of {TILES} tiles, its share is {due:.1}");
    assert!((held - due).abs() <= ROUNDING_TILES, "{held} of {due}");
    assert!(due > 2.0 * ROUNDING_TILES, "{due}");
    expect_tiles(&mut session, TILES, newest as u8);
    drop((session, control));
    daemon.signal(rustix::process::Signal::TERM);
    assert_eq!(daemon.wait(LIMIT), Some(0));

    let daemon = serve(&store);
    let mut control = daemon.control();
    let again = view(&mut control, slow).unwrap();
    assert_eq!(again.state, found.state, "kept with the device");
    let mut session = control.session("tiny");
    session.resume(&mut control, newest);
    expect_tiles(&mut session, TILES, newest as u8);
}

#[test]
fn a_flush_that_fails_while_a_device_is_measured_poisons_the_jobs_that_wrote_there() {
    let store = Store::new(2, "auto");
    let failing = store.dir.path().join("flushes-fail");
    let mut command = store.serve_command();
    command.env("OFFLOADD_FAULT_FLUSH", &failing);
    let daemon = Daemon::start(command, store.socket());
    let mut control = daemon.control();
    let mut session = control.session("tiny");
    let working = session.begin(&mut control, TILES);
    fill_tiles(&mut session, TILES, working, 1);
    std::fs::write(&failing, []).unwrap();
    let output = device(&store, "calibrate", &store.devices[1], &[]);
    assert!(!output.status.success(), "{}", words(&output));
    std::fs::remove_file(&failing).unwrap();
    let committed = control.commit(proto::CommitRequest {
        token: session.token.clone(),
        generation: working,
        blob: Vec::new(),
    });
    let fault = committed.unwrap_err();
    assert_eq!(fault.kind, FaultKind::Poisoned, "{fault}");
}

#[test]
fn a_store_at_rest_is_measured_and_its_tiles_move_at_once() {
    let store = store();
    let slow = &store.devices[1];
    let mut daemon = serve(&store);
    let mut control = daemon.control();
    let mut session = control.session("tiny");
    let working = session.begin(&mut control, TILES);
    fill_tiles(&mut session, TILES, working, 5);
    session.commit(&mut control, working, b"");
    drop((session, control));
    daemon.signal(rustix::process::Signal::TERM);
    assert_eq!(daemon.wait(LIMIT), Some(0));
    let mut measure = program();
    measure.args(["device", "calibrate"]).arg(slow);
    measure.arg("--config").arg(&store.config);
    let output = measure.env("OFFLOADD_PACE", PACE).output().unwrap();
    let told = words(&output);
    assert!(output.status.success(), "{told}");
    assert!(told.contains("  now     reads 0.0"), "{told}");
    assert!(!told.contains("busy"), "{told}");

    let daemon = serve(&store);
    let mut control = daemon.control();
    let found = view(&mut control, slow).unwrap();
    assert!(was_corrected(&found), "{found:?}");
    assert_eq!(found.state.status.phase, Some(Phase::Settled));
    let (held, due) = (tiles_held(&found), share(&mut control, slow));
    assert!((held - due).abs() <= ROUNDING_TILES, "{held} of {due}");
    let mut session = control.session("tiny");
    session.resume(&mut control, working);
    expect_tiles(&mut session, TILES, 5);
}

#[test]
fn what_cannot_be_measured_is_named() {
    // Of what is kept each device has a part.
    let store = Store::new(2, "auto");
    store.set_rates(&[0, 0]);
    let refused = |output: std::process::Output, said: &str| {
        let told = words(&output);
        assert!(!output.status.success() && told.contains(said), "{told}");
    };
    let nobody = store.dir.path().join("nobody");
    refused(
        device(&store, "calibrate", &nobody, &[]),
        "the store has no device",
    );
    let daemon = store.serve();
    refused(
        device(&store, "calibrate", &nobody, &[]),
        "the store has no device",
    );
    let mut control = daemon.control();
    let _session = keep_room(&mut control);
    let output = device(&store, "drain", &store.devices[1], &[]);
    assert!(output.status.success(), "{}", words(&output));
    refused(
        device(&store, "calibrate", &store.devices[1], &[]),
        "is drained: no tiles go there any more",
    );
    // Neither a daemon nor a store.
    let mut measure = program();
    measure
        .args(["device", "calibrate"])
        .arg(&nobody)
        .arg("--socket");
    refused(measure.arg(&nobody).output().unwrap(), "nobody");
    let config = store.dir.path().join("none.toml");
    let text = std::fs::read_to_string(&store.config).unwrap();
    let text = text
        .replace("device0", "none0")
        .replace("/run/", "/nowhere/");
    std::fs::write(&config, text).unwrap();
    let mut measure = program();
    measure
        .args(["device", "calibrate"])
        .arg(&nobody)
        .arg("--config");
    refused(measure.arg(&config).output().unwrap(), "none0");
}
