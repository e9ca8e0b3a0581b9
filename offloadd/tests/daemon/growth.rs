//! Devices come to a store and leave it while a process writes. What could go wrong: a tile is lost on the way or at the next
//! start, a daemon that stops serving, a device that never empties or stays locked, counts that go on about it.

use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::time::{Duration, Instant};

use offload_api::ids::SlotIndex;
use offload_api::proto;
use offloadd::blocks::Blocks;
use offloadd::device::{Device, DeviceBlocks};
use offloadd::metrics::{DeviceView, Snapshot};
use offloadd::store::catalog::Phase;
use offloadd::store::placement::rate;
use offloadd::store::{CATALOG_OFFSETS, recover};
use rustix::process::Signal;

use crate::common::{
    Control, Daemon, Session, Store, engines, eventually, expect_tiles, fill_tiles, link_program,
    open, open_sized, program, swap_out, words,
};

pub(crate) const TILES: u32 = 30;

const TILE_BYTES: u32 = 4096;

/// Each of the two devices that give gives whole tiles, one rounding down and one up.
pub(crate) const ROUNDING_TILES: f64 = 1.5;

/// A thousand generations are written in less.
pub(crate) const LIMIT: Duration = Duration::from_secs(60);

/// So long a device's lock is waited for whose owner has ended.
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

/// Of all tiles, those that `path` should hold by what was measured of the store's devices.
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

/// Writes and commits generation after generation until `done`; the newest one.
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

fn come_and_go(engine: &str) {
    let mut store = Store::new(2, engine);
    let new = store.folder.path().join("device2");
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
    let again = device(&store, "add", &new, &["--size", "8MiB"]);
    assert!(
        words(&again).contains("of the store already"),
        "{}",
        words(&again)
    );
    let newest = write_until(&mut session, &mut control, working, |control| {
        let found = view(control, &new).unwrap();
        found.state.standing.phase == Some(Phase::Settled)
    });
    let found = view(&mut control, &new).unwrap();
    // Of a file of 8 MiB any rate may be measured, but what was measured is what it gets.
    let (held, share) = (tiles_held(&found), share(&mut control, &new));
    println!("{engine}: {held} tiles, its share of {TILES} is {share:.1}");
    assert!(
        (held - share).abs() <= ROUNDING_TILES,
        "{held} tiles came, its rate says {share:.1}"
    );
    assert!(held == 0.0 || found.worn_bytes > 0);

    let output = device(&store, "drain", &old, &[]);
    assert!(output.status.success(), "{}", words(&output));
    let newest = write_until(&mut session, &mut control, newest + 1, |control| {
        view(control, &old).is_none()
    });
    // Closed and unlocked: another store may have it.
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
    // Nobody is sent looking for room on it.
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

/// A daemon served and ended; the generation that it committed, of sevens.
fn committed_and_stopped(store: &Store) -> u64 {
    let mut daemon = store.serve();
    let mut control = daemon.control();
    let reply = control.open_session(open("tiny")).unwrap();
    let mut session = Session::attach(&reply).unwrap();
    let working = session.begin(&mut control, TILES);
    fill_tiles(&mut session, TILES, working, 7);
    session.commit(&mut control, working, b"");
    drop(session);
    daemon.signal(Signal::TERM);
    assert_eq!(daemon.wait(LIMIT), Some(0));
    working
}

#[test]
fn without_a_daemon_devices_come_and_go_too() {
    let mut store = Store::new(2, "auto");
    let working = committed_and_stopped(&store);

    let new = store.folder.path().join("device2");
    // Somebody's file is not taken.
    std::fs::write(&new, [1; 4096]).unwrap();
    let output = device(&store, "add", &new, &["--size", "8MiB"]);
    assert!(
        words(&output).contains("exists already"),
        "{}",
        words(&output)
    );
    std::fs::remove_file(&new).unwrap();
    let output = device(&store, "add", &new, &["--size", "8MiB"]);
    assert!(output.status.success(), "{}", words(&output));
    store.devices.push(new);
    store.write_config(&store.socket(), "auto");

    let gone = store.devices[1].clone();
    let output = device(&store, "drain", &gone, &[]);
    assert!(output.status.success(), "{}", words(&output));
    // Still listed, it is warned of and left alone.
    let list = program()
        .args(["device", "list", "--config"])
        .arg(&store.config)
        .output()
        .unwrap();
    let told = words(&list);
    assert!(
        told.contains("was drained") && list.status.success(),
        "{told}"
    );
    store.devices.remove(1);
    store.write_config(&store.socket(), "auto");
    std::fs::remove_file(gone).unwrap();
    let verify = program()
        .args(["verify", "--config"])
        .arg(&store.config)
        .output()
        .unwrap();
    assert!(words(&verify).contains("30 tiles"), "{}", words(&verify));
    let daemon = store.serve();
    let mut control = daemon.control();
    let reply = control.open_session(open("tiny")).unwrap();
    let mut session = Session::attach(&reply).unwrap();
    session.resume(&mut control, working);
    expect_tiles(&mut session, TILES, 7);
}

#[test]
fn the_device_with_the_catalog_goes_without_a_daemon() {
    let mut store = Store::new(2, "auto");
    let working = committed_and_stopped(&store);

    let home = store.devices[0].clone();
    let told = words(&device(&store, "drain", &home, &[]));
    for part in ["catalog and records moved to", "of the store no more"] {
        assert!(told.contains(part), "{told}");
    }
    store.devices.remove(0);
    store.write_config(&store.socket(), "auto");
    std::fs::remove_file(home).unwrap();
    let daemon = store.serve();
    let mut control = daemon.control();
    let reply = control.open_session(open("tiny")).unwrap();
    let mut session = Session::attach(&reply).unwrap();
    session.resume(&mut control, working);
    expect_tiles(&mut session, TILES, 7);
    drop(session);
    drop(control);
    // Nobody is left to take it.
    let last = store.devices[0].clone();
    let told = words(&device(&store, "drain", &last, &[]));
    assert!(told.contains("find none"), "{told}");
}

#[test]
fn the_device_with_the_catalog_goes_when_the_daemon_starts_again() {
    let mut store = Store::new(2, "auto");
    let mut daemon = store.serve();
    let mut control = daemon.control();
    let reply = control.open_session(open("tiny")).unwrap();
    let mut session = Session::attach(&reply).unwrap();
    let working = session.begin(&mut control, TILES);
    let home = store.devices[0].clone();
    let output = device(&store, "drain", &home, &[]);
    assert!(output.status.success(), "{}", words(&output));
    let waits = |control: &mut Control| {
        let standing = view(control, &home).unwrap().state.standing;
        standing
            .stuck
            .is_some_and(|why| why.contains("started next"))
            && standing.left_bytes == 0
    };
    let newest = write_until(&mut session, &mut control, working, waits);
    // Records go to it as before.
    let newest = newest + 1;
    fill_tiles(&mut session, TILES, newest, newest as u8);
    session.commit(&mut control, newest, b"");
    drop(session);
    daemon.signal(Signal::TERM);
    assert_eq!(daemon.wait(LIMIT), Some(0));

    let mut daemon = store.serve();
    let mut control = daemon.control();
    let gone = |control: &mut Control| view(control, &home).is_none();
    let end = Instant::now() + LIMIT;
    while !gone(&mut control) {
        assert!(Instant::now() < end, "not within {LIMIT:?}");
        std::thread::sleep(Duration::from_millis(5));
    }
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

#[test]
fn only_root_and_who_runs_the_daemon_bring_and_drain_devices() {
    if !rustix::process::geteuid().is_root() {
        println!(
            "skipped: {}: only root can become another user",
            std::thread::current().name().unwrap_or("a test")
        );
        return;
    }
    let all = |mode| PermissionsExt::from_mode(mode);
    let store = Store::new(2, "auto");
    let daemon = store.serve();
    std::fs::set_permissions(store.folder.path(), all(0o777)).unwrap();
    std::fs::set_permissions(&daemon.socket, all(0o666)).unwrap();
    let copy = store.folder.path().join("offloadd");
    link_program(&copy);
    let new = store.folder.path().join("device2");
    let other = |verb: &str, path: &Path, more: &[&str]| {
        let mut command = std::process::Command::new(&copy);
        command.args(["device", verb]).arg(path).args(more);
        command.arg("--socket").arg(&daemon.socket);
        command.uid(65534).gid(65534).current_dir("/");
        command.output().unwrap()
    };
    for refused in [
        other("add", &new, &["--size", "8MiB"]),
        other("drain", &store.devices[1], &[]),
    ] {
        let told = words(&refused);
        assert!(!refused.status.success(), "{told}");
        assert!(
            told.contains("uid 65534: devices come and go by root's word"),
            "{told}"
        );
    }
    // Neither was begun.
    assert!(!new.exists());
    let mut control = daemon.control();
    let devices = control.describe(proto::DescribeRequest {}).unwrap().devices;
    let phases: Vec<_> = devices.iter().map(|device| device.phase()).collect();
    assert_eq!(phases, [proto::DevicePhase::Settled; 2]);
    // Root may, also of another user's daemon.
    drop(daemon);
    std::fs::remove_dir_all(store.folder.path().join("run")).unwrap();
    for path in [store.folder.path(), &store.devices[0], &store.devices[1]] {
        std::os::unix::fs::chown(path, Some(65534), Some(65534)).unwrap();
    }
    let mut command = std::process::Command::new(&copy);
    command.args(["serve", "--config"]).arg(&store.config);
    command.uid(65534).gid(65534).current_dir("/");
    let _daemon = Daemon::start(command, store.socket());
    let drained = device(&store, "drain", &store.devices[1], &[]);
    assert!(drained.status.success(), "{}", words(&drained));
}

#[test]
fn what_root_makes_for_a_users_store_is_the_users() {
    if !rustix::process::geteuid().is_root() {
        println!(
            "skipped: {}: only root can make files for others",
            std::thread::current().name().unwrap_or("a test")
        );
        return;
    }
    let store = Store::new(1, "auto");
    std::os::unix::fs::chown(&store.devices[0], Some(65534), Some(65533)).unwrap();
    let new = store.folder.path().join("device1");
    let output = device(&store, "add", &new, &["--size", "8MiB"]);
    assert!(output.status.success(), "{}", words(&output));
    let made = std::fs::metadata(&new).unwrap();
    assert_eq!((made.uid(), made.gid()), (65534, 65533));
    // One that was cut off before it was given; and what a link leads to.
    for (linked, uid) in [(false, 65534), (true, 0)] {
        let store = Store::new(1, "auto");
        std::os::unix::fs::chown(&store.devices[0], Some(65534), Some(65533)).unwrap();
        let new = store.folder.path().join("device1");
        let begun = store
            .folder
            .path()
            .join(if linked { "elsewhere" } else { "device1" });
        std::fs::write(&begun, []).unwrap();
        if linked {
            std::os::unix::fs::symlink(&begun, &new).unwrap();
        }
        let output = device(&store, "add", &new, &["--size", "8MiB"]);
        assert!(output.status.success(), "{}", words(&output));
        assert_eq!(std::fs::metadata(&begun).unwrap().uid(), uid);
    }
}

#[test]
fn a_refused_device_leaves_no_file_behind() {
    let store = Store::new(1, "auto");
    let path = &store.devices[0];
    let opened = [Device::open(path).unwrap()];
    let mut blocks = DeviceBlocks(&opened);
    let mut catalog = recover::read(&mut blocks).unwrap().catalog;
    // No number is left for another device.
    catalog.next_number = u32::MAX;
    for offset in CATALOG_OFFSETS {
        blocks.write(0, offset, &catalog.encode()).unwrap();
    }
    drop(opened);
    let new = store.folder.path().join("device1");
    let output = device(&store, "add", &new, &["--size", "8MiB"]);
    let told = words(&output);
    assert!(
        !output.status.success() && told.contains("none is given twice"),
        "{told}"
    );
    assert!(!new.exists(), "{told}");
}

#[test]
fn a_stop_does_not_wait_for_a_device_that_is_being_made_ready() {
    let store = Store::new(1, "auto");
    let mut daemon = store.serve();
    let new = store.folder.path().join("device1");
    let mut format = program();
    format.arg("format").arg(&new).args(["--size", "8MiB"]);
    assert!(format.output().unwrap().status.success());
    // Locked by a process that has ended, as the list of locks says: it is waited for, for half a minute.
    let held = std::fs::File::open(&new).unwrap();
    let locked = std::process::Command::new("flock")
        .args(["--exclusive", "0"])
        .stdin(held.try_clone().unwrap())
        .status();
    if !locked.is_ok_and(|status| status.success()) {
        println!(
            "skipped: {}: there is no `flock` here",
            std::thread::current().name().unwrap_or("a test")
        );
        return;
    }
    let began = Instant::now();
    let mut adding = program();
    adding.args(["device", "add"]).arg(&new).arg("--socket");
    let mut adding = adding.arg(&daemon.socket).spawn().unwrap();
    let asked = daemon.pid().as_raw_nonzero();
    let waits = || {
        let lists = std::fs::read_dir(format!("/proc/{asked}/fd")).unwrap();
        let mut opened = lists.filter_map(|entry| std::fs::read_link(entry.ok()?.path()).ok());
        opened.any(|path| path == new)
    };
    eventually("the daemon waits for the lock", LIMIT, waits);
    daemon.signal(Signal::TERM);
    assert_eq!(daemon.wait(LIMIT), Some(0));
    assert!(began.elapsed() < LOCK_WAIT, "the lock was waited for");
    assert!(!adding.wait().unwrap().success());
}

const LARGE: u32 = 128 << 10;

/// Two devices of which nobody knows how fast they are: tiles lie on both evenly, on a busy machine too.
fn even_store() -> Store {
    let store = Store::new(2, "auto");
    store.set_rates(&[0, 0]);
    store
}

/// What `device list` shows as the ceiling of what moves.
fn ceiling_seen(daemon: &Daemon) -> Option<u64> {
    let mut list = program();
    list.args(["device", "list", "--json", "--socket"]);
    let output = list.arg(&daemon.socket).output().unwrap();
    let list: serde_json::Value = serde_json::from_slice(&output.stdout).expect("JSON");
    let devices = list["devices"].as_array().unwrap().iter();
    let mut ceilings = devices.filter_map(|device| device["move_bytes_per_s_max"].as_u64());
    ceilings.next()
}

/// Keeps a part of each device for itself as long as it lives.
pub(crate) fn keep_room(control: &mut Control) -> Session {
    let session = control.session("keeps");
    session.begin(control, 1);
    let token = session.token.clone();
    let tile_bytes = vec![4096; 60];
    let scratch = proto::ReserveScratchRequest { token, tile_bytes };
    control.reserve_scratch(scratch).unwrap();
    session
}

#[test]
fn the_settings_ceiling_holds_for_every_move_over_restarts_and_a_reload_changes_it() {
    let store = Store::new(3, "auto");
    store.set_rates(&[0; 3]);
    store.add_setting("move_bytes_per_s_max = \"2MiB\"");
    let mut daemon = store.serve();
    let mut control = daemon.control();
    let session = keep_room(&mut control);
    assert_eq!(ceiling_seen(&daemon), None, "nothing moves");
    let drain = |index: usize| {
        let output = device(&store, "drain", &store.devices[index], &[]);
        assert!(output.status.success(), "{}", words(&output));
    };
    drain(2);
    assert_eq!(ceiling_seen(&daemon), Some(2 << 20));
    let text = std::fs::read_to_string(&store.config).unwrap();
    std::fs::write(&store.config, text.replace("2MiB", "3MiB")).unwrap();
    daemon.signal(Signal::HUP);
    eventually("the changed ceiling holds", LIMIT, || {
        ceiling_seen(&daemon) == Some(3 << 20)
    });
    let mut rate = program();
    rate.args(["device", "rate", "5MiB/s", "--socket"]);
    assert!(rate.arg(&daemon.socket).status().unwrap().success());
    assert_eq!(ceiling_seen(&daemon), Some(5 << 20));
    drop((session, control));
    daemon.signal(Signal::TERM);
    assert_eq!(daemon.wait(LIMIT), Some(0));
    let daemon = store.serve();
    let mut control = daemon.control();
    let _session = keep_room(&mut control);
    drain(1);
    assert_eq!(ceiling_seen(&daemon), Some(3 << 20));
}

/// A job whose tiles nobody uses: 2.5 MiB, as much again is reserved.
fn idle_job(control: &mut Control) {
    let reply = control
        .open_session(open_sized("idle", LARGE.into()))
        .unwrap();
    let mut session = Session::attach_sized(&reply, LARGE.into()).unwrap();
    let working = session.begin_sized(control, 20, LARGE);
    let place = session.geometry.place(SlotIndex(0)).unwrap();
    let bytes = vec![7; LARGE as usize];
    session.write_slot(place.offset, &bytes);
    for tile in 0..20 {
        session.submit(swap_out(tile, 0, working, &bytes));
        assert_eq!(session.complete().fault, 0);
    }
    session.commit(control, working, b"");
}

/// Only from below: a machine may be as slow as it likes.
#[test]
fn tiles_move_no_faster_than_their_ceiling() {
    let rate = 1 << 20;
    // The ceiling of the move, or the settings'.
    for (served, asked) in [(true, true), (false, true), (false, false)] {
        let store = even_store();
        if !asked {
            store.add_setting("move_bytes_per_s_max = \"1MiB\"");
        }
        let [home, old] = [0, 1].map(|index| store.devices[index].clone());
        let mut daemon = store.serve();
        let mut control = daemon.control();
        idle_job(&mut control);
        let written = |control: &mut Control| view(control, &home).unwrap().worn_bytes;
        let before = written(&mut control);
        if !served {
            drop(control);
            daemon.signal(Signal::TERM);
            assert_eq!(daemon.wait(LIMIT), Some(0));
        }
        let begun = Instant::now();
        let ceiling: &[&str] = if asked { &["--rate", "1MiB/s"] } else { &[] };
        let output = device(&store, "drain", &old, ceiling);
        assert!(output.status.success(), "{}", words(&output));
        if served {
            assert!(
                words(&output).contains(", at most 1.0 MiB a second;"),
                "{}",
                words(&output)
            );
            let mut control = daemon.control();
            eventually("it is drained", LIMIT, || {
                view(&mut control, &old).is_none()
            });
        }
        let took = begun.elapsed();
        let list = program()
            .args(["device", "list", "--json", "--config"])
            .arg(&store.config)
            .output();
        let list: serde_json::Value = serde_json::from_slice(&list.unwrap().stdout).expect("JSON");
        let copied = list["devices"][0]["worn_bytes"].as_u64().unwrap() - before;
        assert!(copied >= u64::from(LARGE), "nothing was copied");
        // Records and definitions are little beside it.
        let least = Duration::from_secs_f64(0.8 * copied as f64 / f64::from(rate));
        assert!(took > least, "{copied} bytes in {took:?}, served: {served}");
    }
}

#[test]
fn a_ceiling_is_seen_and_changed_while_tiles_move_and_nonsense_is_refused() {
    let store = even_store();
    let old = store.devices[1].clone();
    let daemon = store.serve();
    let mut control = daemon.control();
    // It keeps the device as long as it is there.
    let session = keep_room(&mut control);
    let rate = |words: &str| {
        let mut command = program();
        command.args(["device", "rate", words, "--socket"]);
        command.arg(&daemon.socket).output().unwrap()
    };
    let refused = |output: std::process::Output, said: &str| {
        let told = words(&output);
        assert!(!output.status.success() && told.contains(said), "{told}");
    };
    refused(rate("2MiB/s"), "no tiles are to move");
    for (nonsense, said) in [
        ("0MiB/s", "from 1MiB/s"),
        ("-1MB/s", "unit"),
        ("fast", "unit"),
        ("1kB/s", "from 1MiB/s"),
    ] {
        refused(
            device(&store, "drain", &old, &[&format!("--rate={nonsense}")]),
            said,
        );
        let new = store.folder.path().join("device2");
        refused(
            device(&store, "add", &new, &[&format!("--rate={nonsense}")]),
            said,
        );
    }
    // As another program might ask.
    let request = proto::DrainDeviceRequest {
        path: old.to_str().unwrap().into(),
        move_bytes_per_s_max: Some(1000),
    };
    let fault = control.drain_device(request).unwrap_err();
    assert!(fault.message.contains("at least 1048576"), "{fault}");

    let output = device(&store, "drain", &old, &["--rate", "3MiB/s"]);
    assert!(output.status.success(), "{}", words(&output));
    let list = |more: &[&str]| {
        let mut command = program();
        command
            .args(["device", "list", "--socket"])
            .arg(&daemon.socket);
        let output = command.args(more).output().unwrap();
        String::from_utf8(output.stdout).unwrap()
    };
    let ceiling = || {
        let json: serde_json::Value = serde_json::from_str(&list(&["--json"])).expect("JSON");
        json["devices"][1]["move_bytes_per_s_max"].as_u64()
    };
    assert_eq!(ceiling(), Some(3 << 20));
    let output = rate("2MiB/s");
    assert!(output.status.success(), "{}", words(&output));
    assert_eq!(ceiling(), Some(2 << 20));
    let told = list(&[]);
    assert!(told.contains(" s left, at most 2.0 MiB a second"), "{told}");
    drop(session);
    eventually("it is drained", LIMIT, || {
        view(&mut control, &old).is_none()
    });
    refused(rate("2MiB/s"), "no tiles are to move");
}
