//! Tests the rate at which tiles move. What could go wrong: a limit that is not kept, that a restart or a reload forgets, or that is not shown.

use std::time::{Duration, Instant};

use offload_api::ids::SlotIndex;
use offload_api::proto;
use rustix::process::Signal;

use super::{LIMIT, device, keep_room, view};
use crate::common::{
    Control, Daemon, Session, Store, eventually, open_sized, program, swap_out, words,
};

const LARGE: u32 = 128 << 10;

/// A store of two devices with unknown rates: tiles are spread evenly, on a busy machine too.
fn even_store() -> Store {
    let store = Store::new(2, "auto");
    store.set_rates(&[0, 0]);
    store
}

/// Returns the limit that `device list` shows for moving tiles.
fn limit_shown(daemon: &Daemon) -> Option<u64> {
    let mut list = program();
    list.args(["device", "list", "--json", "--socket"]);
    let output = list.arg(&daemon.socket).output().unwrap();
    let list: serde_json::Value = serde_json::from_slice(&output.stdout).expect("JSON");
    let devices = list["devices"].as_array().unwrap().iter();
    let mut ceilings = devices.filter_map(|device| device["rebalance_bytes_per_s_max"].as_u64());
    ceilings.next()
}

#[test]
fn the_rate_limit_of_the_settings_holds_for_every_move_over_restarts_and_a_reload_changes_it() {
    let store = Store::new(3, "auto");
    store.set_rates(&[0; 3]);
    store.add_setting("rebalance_bytes_per_s_max = \"2MiB\"");
    let mut daemon = store.serve();
    let mut control = daemon.control();
    let session = keep_room(&mut control);
    assert_eq!(limit_shown(&daemon), None, "nothing moves");
    let drain = |index: usize| {
        let output = device(&store, "drain", &store.devices[index], &[]);
        assert!(output.status.success(), "{}", words(&output));
    };
    drain(2);
    assert_eq!(limit_shown(&daemon), Some(2 << 20));
    let text = std::fs::read_to_string(&store.config).unwrap();
    std::fs::write(&store.config, text.replace("2MiB", "3MiB")).unwrap();
    daemon.signal(Signal::HUP);
    eventually("the changed rate limit holds", LIMIT, || {
        limit_shown(&daemon) == Some(3 << 20)
    });
    let mut rate = program();
    rate.args(["device", "rebalance-rate", "5MiB/s", "--socket"]);
    assert!(rate.arg(&daemon.socket).status().unwrap().success());
    assert_eq!(limit_shown(&daemon), Some(5 << 20));
    drop((session, control));
    daemon.signal(Signal::TERM);
    assert_eq!(daemon.wait(LIMIT), Some(0));
    let daemon = store.serve();
    let mut control = daemon.control();
    let _session = keep_room(&mut control);
    drain(1);
    assert_eq!(limit_shown(&daemon), Some(3 << 20));
}

/// Creates a job whose tiles are not used: 2.5 MiB of tiles, in twice as much reserved space.
fn idle_job(control: &mut Control) {
    let reply = control
        .open_session(open_sized("idle", LARGE.into()))
        .unwrap();
    let mut session = Session::attach_sized(&reply, LARGE.into()).unwrap();
    let working = session.begin_sized(control, 20, LARGE);
    let place = session.geometry.slot_place(SlotIndex(0)).unwrap();
    let bytes = vec![7; LARGE as usize];
    session.write_slot(place.offset, &bytes);
    for tile in 0..20 {
        session.submit(swap_out(tile, 0, working, &bytes));
        assert_eq!(session.complete().fault, 0);
    }
    session.commit(control, working, b"");
}

/// Checks only that copying is not too fast: a machine may be as slow as it likes.
#[test]
fn tiles_move_no_faster_than_their_rate_limit() {
    let rate = 1 << 20;
    // The limit of the move, or that of the settings.
    for asked in [true, false] {
        let store = even_store();
        if !asked {
            store.add_setting("rebalance_bytes_per_s_max = \"1MiB\"");
        }
        let [metadata, old] = [0, 1].map(|index| store.devices[index].clone());
        let daemon = store.serve();
        let mut control = daemon.control();
        idle_job(&mut control);
        let written =
            |control: &mut Control| view(control, &metadata).unwrap().counts.written.bytes;
        let before = written(&mut control);
        let begun = Instant::now();
        let rate_limiter: &[&str] = if asked { &["--rate", "1MiB/s"] } else { &[] };
        let output = device(&store, "drain", &old, rate_limiter);
        assert!(output.status.success(), "{}", words(&output));
        if asked {
            let told = words(&output);
            assert!(told.contains(", at most 1.0 MiB per second;"), "{told}");
        }
        eventually("it is drained", LIMIT, || {
            view(&mut control, &old).is_none()
        });
        let took = begun.elapsed();
        let copied = written(&mut control) - before;
        assert!(copied >= u64::from(LARGE), "nothing was copied");
        // Records and definitions are small in comparison.
        let least = Duration::from_secs_f64(0.8 * copied as f64 / f64::from(rate));
        assert!(took > least, "{copied} bytes in {took:?}, asked: {asked}");
    }
}

#[test]
fn a_rate_limit_is_shown_and_changed_while_tiles_move_and_nonsense_is_refused() {
    let store = even_store();
    let old = store.devices[1].clone();
    let daemon = store.serve();
    let mut control = daemon.control();
    // Keeps the device in the store until the session ends.
    let session = keep_room(&mut control);
    let rate = |words: &str| {
        let mut command = program();
        command.args(["device", "rebalance-rate", words, "--socket"]);
        command.arg(&daemon.socket).output().unwrap()
    };
    let refused = |output: std::process::Output, printed: &str| {
        let told = words(&output);
        assert!(!output.status.success() && told.contains(printed), "{told}");
    };
    refused(rate("2MiB/s"), "no tiles are moving");
    for (nonsense, printed) in [
        ("0MiB/s", "between 1MiB/s"),
        ("-1MB/s", "number"),
        ("fast", "number"),
        ("1kB/s", "between 1MiB/s"),
    ] {
        refused(
            device(&store, "drain", &old, &[&format!("--rate={nonsense}")]),
            printed,
        );
        let new = store.dir.path().join("device2");
        refused(
            device(&store, "add", &new, &[&format!("--rate={nonsense}")]),
            printed,
        );
    }
    // A request without a valid rate, from another program.
    let request = proto::DrainDeviceRequest {
        path: old.to_str().unwrap().into(),
        rebalance_bytes_per_s_max: Some(1000),
    };
    let fault = control.drain_device(request).unwrap_err();
    assert!(fault.message.contains("is less than 1048576"), "{fault}");

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
    let rate_limiter = || {
        let json: serde_json::Value = serde_json::from_str(&list(&["--json"])).expect("JSON");
        json["devices"][1]["rebalance_bytes_per_s_max"].as_u64()
    };
    assert_eq!(rate_limiter(), Some(3 << 20));
    let output = rate("2MiB/s");
    assert!(output.status.success(), "{}", words(&output));
    assert_eq!(rate_limiter(), Some(2 << 20));
    let told = list(&[]);
    assert!(
        told.contains(" s left, at most 2.0 MiB per second"),
        "{told}"
    );
    drop(session);
    eventually("it is drained", LIMIT, || {
        view(&mut control, &old).is_none()
    });
    refused(rate("2MiB/s"), "no tiles are moving");
}
