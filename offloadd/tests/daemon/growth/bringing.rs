//! Tests who may add a device, and what remains of one that is refused. What could go wrong: any user adds or drains a device, the daemon cannot open
//! its file, files of refused devices remain, a stop waits for a device that is being prepared.

use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::time::Instant;

use offload_api::proto;
use offloadd::blocks::Blocks;
use offloadd::device::{Device, DeviceBlocks};
use offloadd::store::{CATALOG_OFFSETS, recover};
use rustix::process::Signal;

use super::{LIMIT, LOCK_WAIT, device};
use crate::common::{Daemon, Store, eventually, link_program, program, words};

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
    std::fs::set_permissions(store.dir.path(), all(0o777)).unwrap();
    std::fs::set_permissions(&daemon.socket, all(0o666)).unwrap();
    let copy = store.dir.path().join("offloadd");
    link_program(&copy);
    let new = store.dir.path().join("device2");
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
        assert!(told.contains("uid 65534 may not change devices"), "{told}");
    }
    // Neither add was begun.
    assert!(!new.exists());
    let mut control = daemon.control();
    let devices = control.describe(proto::DescribeRequest {}).unwrap().devices;
    let phases: Vec<_> = devices.iter().map(|device| device.phase()).collect();
    assert_eq!(phases, [proto::DevicePhase::Settled; 2]);
    // Root may, even on another user's daemon.
    drop(daemon);
    std::fs::remove_dir_all(store.dir.path().join("run")).unwrap();
    for path in [store.dir.path(), &store.devices[0], &store.devices[1]] {
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
    let _daemon = store.serve();
    let new = store.dir.path().join("device1");
    let output = device(&store, "add", &new, &["--size", "8MiB"]);
    let told = words(&output);
    assert!(
        !output.status.success() && told.contains("a number is never used again"),
        "{told}"
    );
    assert!(!new.exists(), "{told}");
}

#[test]
fn a_stop_does_not_wait_for_a_device_that_is_being_made_ready() {
    let store = Store::new(1, "auto");
    let mut daemon = store.serve();
    let new = store.dir.path().join("device1");
    let mut format = program();
    format.arg("format").arg(&new).args(["--size", "8MiB"]);
    assert!(format.output().unwrap().status.success());
    // Locked by a process that has ended, according to the list of locks: the daemon waits half a minute for it.
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
