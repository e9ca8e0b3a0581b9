//! Tests that devices are added to a store and drained while a process writes. What could go wrong: a tile is lost while it moves or at the next
//! start, a daemon stops serving, a device never becomes empty or stays locked, metrics keep listing it.

mod bringing;
mod rate_limiter;

use std::path::Path;
use std::time::{Duration, Instant};

use offload_api::proto;
use offloadd::metrics::{DeviceView, Snapshot};
use offloadd::store::catalog::Phase;
use offloadd::store::format::MeasuredArea;
use offloadd::store::placement::rate;
use rustix::process::Signal;

use crate::common::{
    Control, Session, Store, engines, eventually, expect_tiles, fill_tiles, open, program, words,
};

pub(crate) const TILES: u32 = 30;

const TILE_BYTES: u32 = 4096;

/// Each of the two source devices moves whole tiles, one rounding down and one up.
pub(crate) const ROUNDING_TILES: f64 = 1.5;

/// Writing a thousand generations takes less.
pub(crate) const LIMIT: Duration = Duration::from_secs(60);

/// How long a start waits for the lock of a process that has ended.
const LOCK_WAIT: Duration = Duration::from_secs(30);

pub(crate) fn device(
    store: &Store,
    verb: &str,
    path: &Path,
    more: &[&str],
) -> std::process::Output {
    program()
        .args(["device", verb])
        .arg(path)
        .arg("--config")
        .arg(&store.config)
        .args(more)
        .output()
        .unwrap()
}

pub(crate) fn view(control: &mut Control, path: &Path) -> Option<DeviceView> {
    let reply = control.metrics(proto::MetricsRequest {}).unwrap();
    let snapshot = Snapshot::try_from(reply).unwrap();
    let mut views = snapshot.devices.into_iter();
    views.find(|view| Path::new(&view.state.path) == path)
}

pub(crate) fn tiles_held(view: &DeviceView) -> f64 {
    let held_bytes = view.state.data_bytes - view.state.free_bytes;
    // Each tile has two extents.
    held_bytes as f64 / (2.0 * f64::from(TILE_BYTES))
}

/// Returns the tiles that `path` should hold according to the measured rates of the store's devices.
pub(crate) fn share(control: &mut Control, path: &Path) -> f64 {
    let reply = control.metrics(proto::MetricsRequest {}).unwrap();
    let devices = Snapshot::try_from(reply).unwrap().devices;
    let rate = |DeviceView { state, .. }: &DeviceView| {
        rate(state.read_bytes_per_s, state.write_bytes_per_s) as f64
    };
    let all: f64 = devices.iter().map(rate).sum();
    let found = devices
        .iter()
        .find(|view| Path::new(&view.state.path) == path);
    f64::from(TILES) * rate(found.expect("it came")) / all
}

/// Drains a device of a served store, and waits until it has left.
pub(crate) fn drained(store: &Store, control: &mut Control, path: &Path) {
    let output = device(store, "drain", path, &[]);
    assert!(output.status.success(), "{}", words(&output));
    eventually("it has left", LIMIT, || view(control, path).is_none());
}

/// Writes and commits generation after generation until `done`. Returns the newest one.
pub(crate) fn write_until(
    session: &mut Session,
    control: &mut Control,
    mut working: u64,
    mut done: impl FnMut(&mut Control) -> bool,
) -> u64 {
    let end = Instant::now() + LIMIT;
    while !done(control) {
        assert!(Instant::now() < end, "not within {LIMIT:?}");
        fill_tiles(session, TILES, working, working as u8);
        expect_tiles(session, TILES, working as u8);
        working = session.commit(control, working, b"");
    }
    working - 1
}

/// Reserves a part of each device for itself until dropped.
pub(crate) fn keep_room(control: &mut Control) -> Session {
    let session = control.session("keeps");
    session.begin(control, 1);
    let token = session.token.clone();
    let tile_bytes = vec![4096; 60];
    let scratch = proto::ReserveScratchRequest { token, tile_bytes };
    control.reserve_scratch(scratch).unwrap();
    session
}

fn come_and_go(engine: &str) {
    let mut store = Store::new(2, engine);
    let new = store.dir.path().join("device2");
    let old = store.devices[1].clone();
    let mut daemon = store.serve();
    let mut control = daemon.control();
    let reply = control.open_session(open("tiny")).unwrap();
    let mut session = Session::attach(&reply).unwrap();
    let working = session.begin(&mut control, TILES);
    let newest = write_until(&mut session, &mut control, working, |_| true).max(1);
    fill_tiles(&mut session, TILES, newest, newest as u8);
    let working = session.commit(&mut control, newest, b"");

    let output = device(&store, "add", &new, &["--size", "8MiB"]);
    assert!(output.status.success(), "{}", words(&output));
    assert!(
        words(&output).contains("Add it to `devices`"),
        "{}",
        words(&output)
    );
    let came = view(&mut control, &new).unwrap();
    // What its measurement moved beside the queue.
    assert!(came.counts.written.bytes >= MeasuredArea::BYTES_MIN);
    let again = device(&store, "add", &new, &["--size", "8MiB"]);
    assert!(
        words(&again).contains("is already device 2 of the store"),
        "{}",
        words(&again)
    );
    let newest = write_until(&mut session, &mut control, working, |control| {
        let found = view(control, &new).unwrap();
        found.state.status.phase == Some(Phase::Settled)
    });
    let found = view(&mut control, &new).unwrap();
    // A file of 8 MiB may be measured at any rate, but its share must follow the measured rate.
    let (held, share) = (tiles_held(&found), share(&mut control, &new));
    println!("{engine}: {held} tiles, its share of {TILES} is {share:.1}");
    assert!(
        (held - share).abs() <= ROUNDING_TILES,
        "{held} tiles came, its rate says {share:.1}"
    );

    let output = device(&store, "drain", &old, &[]);
    assert!(output.status.success(), "{}", words(&output));
    let newest = write_until(&mut session, &mut control, newest + 1, |control| {
        view(control, &old).is_none()
    });
    // Closed and unlocked: another store may use it.
    let output = program()
        .arg("format")
        .arg(&old)
        .args(["--size", "8MiB", "--force"])
        .output();
    let output = output.unwrap();
    assert!(output.status.success(), "{}", words(&output));
    let list = program()
        .args(["device", "list", "--json", "--config"])
        .arg(&store.config)
        .output();
    let list: serde_json::Value = serde_json::from_slice(&list.unwrap().stdout).expect("JSON");
    let listed: Vec<_> = (list["devices"].as_array().unwrap().iter())
        .map(|device| device["number"].as_u64().unwrap())
        .collect();
    assert_eq!(listed, [0, 2]);
    // A full store's error does not name the drained device.
    let other = control.open_session(open("other")).unwrap();
    let too_large = proto::DefineTilesRequest {
        token: other.token,
        tiles: vec![proto::Tile {
            kind: 1,
            tile_bytes: 128 << 20,
            ..Default::default()
        }],
        durability: 1,
        nodes: 1,
        ..Default::default()
    };
    let fault = control.define_tiles(too_large).unwrap_err();
    assert!(fault.message.contains("free: "), "{fault}");
    assert!(!fault.message.contains(old.to_str().unwrap()), "{fault}");

    daemon.signal(Signal::KILL);
    daemon.wait(LIMIT);
    drop(session);
    store.devices = vec![store.devices[0].clone()];
    store.write_config(&store.socket(), engine);
    store.devices.push(new);
    store.write_config(&store.socket(), engine);
    let daemon = store.serve();
    let mut control = daemon.control();
    let reply = control.open_session(open("tiny")).unwrap();
    let mut session = Session::attach(&reply).unwrap();
    session.resume(&mut control, newest);
    expect_tiles(&mut session, TILES, newest as u8);
}

#[test]
fn devices_come_and_go_while_a_process_writes() {
    for engine in engines() {
        come_and_go(engine);
    }
}

#[test]
fn an_existing_file_is_not_used_and_a_drained_device_is_warned_of_and_left_alone() {
    let mut store = Store::new(2, "auto");
    let new = store.dir.path().join("device2");
    std::fs::write(&new, [1; 4096]).unwrap();
    let add = || words(&device(&store, "add", &new, &["--size", "8MiB"]));
    let told = add();
    assert!(told.contains("start it"), "{told}");
    let daemon = store.serve();
    let told = add();
    assert!(told.contains("the file exists"), "{told}");
    let mut control = daemon.control();
    let gone = store.devices[1].clone();
    drained(&store, &mut control, &gone);
    // No other device is left to take the tiles of this one.
    let told = words(&device(&store, "drain", &store.devices[0], &[]));
    assert!(told.contains("No other device has space"), "{told}");
    drop(control);
    let log = daemon.last_words();
    let [uid, path] = [
        rustix::process::geteuid().as_raw().to_string(),
        gone.display().to_string(),
    ];
    for told in [
        format!("draining device {path}: 0 bytes to move uid={uid} pid="),
        format!("drained device {path}, which is not part of the store any more"),
    ] {
        assert!(log.contains(&told), "{told}: {log}");
    }
    let list = |store: &Store| {
        let mut list = program();
        list.args(["device", "list", "--config"]).arg(&store.config);
        let output = list.output().unwrap();
        assert!(output.status.success(), "{}", words(&output));
        words(&output)
    };
    let told = list(&store);
    assert!(told.contains("was drained"), "{told}");
    store.devices.remove(1);
    store.write_config(&store.socket(), "auto");
    std::fs::remove_file(&gone).unwrap();
    let told = list(&store);
    assert!(!told.contains(gone.to_str().unwrap()), "{told}");
}

#[test]
fn the_device_with_the_catalog_goes_when_the_daemon_starts_again() {
    let mut store = Store::new(2, "auto");
    let mut daemon = store.serve();
    let mut control = daemon.control();
    let reply = control.open_session(open("tiny")).unwrap();
    let mut session = Session::attach(&reply).unwrap();
    let working = session.begin(&mut control, TILES);
    let metadata = store.devices[0].clone();
    let output = device(&store, "drain", &metadata, &[]);
    assert!(output.status.success(), "{}", words(&output));
    let waits = |control: &mut Control| {
        let status = view(control, &metadata).unwrap().state.status;
        status.stuck.is_some_and(|why| why.contains("started next")) && status.left_bytes == 0
    };
    let newest = write_until(&mut session, &mut control, working, waits);
    // Records are written to it as before.
    let newest = newest + 1;
    fill_tiles(&mut session, TILES, newest, newest as u8);
    session.commit(&mut control, newest, b"");
    drop(session);
    daemon.signal(Signal::TERM);
    assert_eq!(daemon.wait(LIMIT), Some(0));

    let mut daemon = store.serve();
    let mut control = daemon.control();
    eventually("it has left", LIMIT, || {
        view(&mut control, &metadata).is_none()
    });
    daemon.signal(Signal::TERM);
    assert_eq!(daemon.wait(LIMIT), Some(0));
    store.devices.remove(0);
    store.write_config(&store.socket(), "auto");
    let daemon = store.serve();
    let mut control = daemon.control();
    let reply = control.open_session(open("tiny")).unwrap();
    let mut session = Session::attach(&reply).unwrap();
    session.resume(&mut control, newest);
    expect_tiles(&mut session, TILES, newest as u8);
}
