//! Tests a device of the store that the settings do not list. What could go wrong: a daemon killed after a device was added does not start again; a
//! device of another store, or one that left, is used or locked; the line to write is not shown.

use std::io::Read;
use std::path::PathBuf;
use std::time::Duration;

use offloadd::device::Device;
use rustix::process::Signal;
use serde_json::Value;

use crate::common::{Daemon, Store, expect_tiles, fill_tiles, program, words};
use crate::growth::{TILES, device, drained};

const SOON: Duration = Duration::from_secs(60);

fn json(arguments: &[&str], store: &Store) -> Value {
    let mut command = program();
    command.args(arguments).arg("--config").arg(&store.config);
    let output = command.output().unwrap();
    serde_json::from_slice(&output.stdout).unwrap_or_else(|_| panic!("{}", words(&output)))
}

/// Returns the paths that `device list` shows.
fn listed(store: &Store) -> Vec<PathBuf> {
    let list = json(&["device", "list", "--json"], store);
    let devices = list["devices"].as_array().unwrap().iter();
    devices
        .map(|d| d["device"].as_str().unwrap().into())
        .collect()
}

fn kill(daemon: &mut Daemon) {
    daemon.signal(Signal::KILL);
    daemon.wait(SOON);
}

/// Makes a store of one device to which another was added with a generation of nines; its daemon was killed before the device was written into the
/// settings.
fn forgotten() -> (Store, PathBuf, u64) {
    let store = Store::new(1, "auto");
    let new = store.dir.path().join("new");
    let mut daemon = store.serve();
    let output = device(&store, "add", &new, &["--size", "8MiB"]);
    assert!(output.status.success(), "{}", words(&output));
    let mut control = daemon.control();
    let mut session = control.session("tiny");
    let working = session.begin(&mut control, TILES);
    fill_tiles(&mut session, TILES, working, 9);
    session.commit(&mut control, working, b"");
    kill(&mut daemon);
    (store, new, working)
}

#[test]
fn a_device_that_came_before_a_kill_is_opened_and_told_of_until_it_is_listed() {
    let (mut store, new, generation) = forgotten();
    let line = format!("devices = {:?}", [&store.devices[0], &new]);
    for command in [["check-config"].as_slice(), &["doctor", "--config"]] {
        let output = program().args(command).arg(&store.config).output().unwrap();
        assert!(words(&output).contains(&line), "{}", words(&output));
    }
    let check = program()
        .arg("check-config")
        .arg(&store.config)
        .output()
        .unwrap();
    assert!(check.status.success(), "{}", words(&check));
    // Without a daemon too.
    assert_eq!(listed(&store), [store.devices[0].clone(), new.clone()]);
    let verify = json(&["verify", "--json"], &store);
    assert_eq!(verify["tile_count"], TILES, "{verify}");
    assert_eq!(verify["sound"], true, "{verify}");

    let mut daemon = store.serve();
    let mut control = daemon.control();
    let mut session = control.session("tiny");
    session.resume(&mut control, generation);
    expect_tiles(&mut session, TILES, 9);
    drop(session);
    daemon.signal(Signal::TERM);
    assert_eq!(daemon.wait(SOON), Some(0));
    let mut log = String::new();
    let mut stderr = daemon.child.stderr.take().unwrap();
    stderr.read_to_string(&mut log).unwrap();
    assert!(log.contains("WARN") && log.contains(&line), "{log}");

    // Following its advice ends it.
    store.devices.push(new);
    store.write_config(&store.socket(), "auto");
    let check = program()
        .arg("check-config")
        .arg(&store.config)
        .output()
        .unwrap();
    assert!(
        !words(&check).contains("not in the list"),
        "{}",
        words(&check)
    );
    store.serve();
}

#[test]
fn what_is_not_the_stores_at_that_path_is_neither_taken_nor_locked() {
    let (store, new, _) = forgotten();
    let missing = format!(
        "device 1 of the store (last seen at {}) is missing from the list `devices`",
        new.display()
    );
    let kept = store.dir.path().join("kept");
    std::fs::rename(&new, &kept).unwrap();
    let refused = |why: &str| {
        let refusal = store.refusal();
        assert!(refusal.contains(&missing), "{why}: {refusal}");
        let check = program()
            .arg("check-config")
            .arg(&store.config)
            .output()
            .unwrap();
        assert_eq!(check.status.code(), Some(78), "{why}");
        assert!(words(&check).contains(&missing), "{}", words(&check));
    };
    refused("nothing is there");
    // Served by another daemon: waiting for its lock would take time and be logged.
    let other = Store::new(1, "auto");
    std::fs::rename(&other.devices[0], &new).unwrap();
    let held = Device::open(&new).unwrap();
    refused("it is another store's");
    drop(held);
    std::fs::write(&new, [7; 4096]).unwrap();
    refused("it is no device");
    std::fs::remove_file(&new).unwrap();
    std::fs::rename(&kept, &new).unwrap();
    store.serve();
}

#[test]
fn who_moved_a_store_is_not_given_a_device_of_the_old_place() {
    let (mut store, new, _) = forgotten();
    let copy = store.dir.path().join("copy");
    std::fs::copy(&store.devices[0], &copy).unwrap();
    store.devices = vec![copy];
    store.write_config(&store.socket(), "auto");
    let refusal = store.refusal();
    assert!(
        refusal.contains("is missing from the list") && refusal.contains(new.to_str().unwrap()),
        "{refusal}"
    );
}

#[test]
fn a_device_that_left_is_not_opened() {
    let (store, new, generation) = forgotten();
    let mut daemon = store.serve();
    drained(&store, &mut daemon.control(), &new);
    kill(&mut daemon);
    // No process holds the file, so nothing may need it.
    std::fs::remove_file(&new).unwrap();
    let daemon = store.serve();
    let mut control = daemon.control();
    let mut session = control.session("tiny");
    session.resume(&mut control, generation);
    expect_tiles(&mut session, TILES, 9);
    assert_eq!(listed(&store), store.devices);
}

#[test]
fn after_a_drain_the_line_to_write_names_the_devices_of_the_store_alone() {
    let store = Store::new(2, "auto");
    let new = store.dir.path().join("new");
    let mut daemon = store.serve();
    let output = device(&store, "add", &new, &["--size", "8MiB"]);
    assert!(output.status.success(), "{}", words(&output));
    // A listed device leaves; the added one is not listed yet.
    drained(&store, &mut daemon.control(), &store.devices[1]);
    kill(&mut daemon);
    let line = format!("devices = {:?}", [&store.devices[0], &new]);
    for command in [["check-config"].as_slice(), &["doctor", "--config"]] {
        let output = program().args(command).arg(&store.config).output().unwrap();
        assert!(words(&output).contains(&line), "{}", words(&output));
    }
}
