//! Tests that wear is counted over all incarnations of the daemon on a store. What could go wrong: a restart forgets it, a commit counts twice, a
//! torn or foreign copy is used, a drive near its end is not reported.

use std::io::{BufRead, BufReader};
use std::os::unix::fs::FileExt;
use std::time::Duration;

use offload_api::proto;
use offloadd::metrics::{DeviceView, Snapshot};
use offloadd::store::format::MeasuredArea;
use offloadd::store::superblock::StoreId;
use offloadd::store::wear::Wear;
use rustix::process::Signal;

use crate::common::{Control, Session, Store, fill_tiles, open, program, words};
use crate::growth::{device, drained, view};

const SOON: Duration = Duration::from_secs(60);

/// Bytes of one operation, of several.
const MEASURED_MIN: u64 = MeasuredArea::BYTES_MIN;

trait Before {
    /// Bytes written before this incarnation of the daemon.
    fn before_bytes(&self) -> u64;
}

impl Before for DeviceView {
    fn before_bytes(&self) -> u64 {
        self.worn_bytes - self.counts.written.bytes
    }
}

fn snapshot(control: &mut Control) -> Snapshot {
    let reply = control.metrics(proto::MetricsRequest {}).unwrap();
    Snapshot::try_from(reply).unwrap()
}

#[test]
fn what_was_written_is_known_in_the_next_incarnation_by_device_and_by_job() {
    let store = Store::new(2, "auto");
    let mut written = [0; 2];
    for incarnation in 1..=3u64 {
        let mut daemon = store.serve();
        let mut control = daemon.control();
        if incarnation == 1 {
            let formatted = snapshot(&mut control).devices;
            written = [0, 1].map(|device: usize| formatted[device].before_bytes());
            // Each device was measured.
            assert!(written.iter().all(|bytes| *bytes >= MEASURED_MIN));
        }
        let reply = control.open_session(open("tiny")).unwrap();
        let mut session = Session::attach(&reply).unwrap();
        let working = match incarnation {
            1 => session.begin(&mut control, 6),
            _ => session.resume(&mut control, incarnation - 1),
        };
        fill_tiles(&mut session, 6, working, 10);
        session.commit(&mut control, working, b"");
        let now = snapshot(&mut control);
        assert_eq!(now.jobs[0].worn_bytes, incarnation * 6 * 4096);
        let job = &now.jobs[0];
        assert_eq!(
            job.worn.iter().map(|worn| worn.bytes).sum::<u64>(),
            incarnation * 6 * 4096
        );
        for worn in &job.worn {
            let device = now.devices.iter();
            let mut device = device.filter(|d| d.state.status.number == worn.number);
            let device = device.next().expect("of the store");
            assert!(worn.bytes <= device.worn_bytes);
        }
        for (device, before) in now.devices.iter().zip(written) {
            assert_eq!(device.worn_bytes, before + device.counts.written.bytes);
        }
        written = [0, 1].map(|device: usize| now.devices[device].worn_bytes);
        assert!(
            written.iter().sum::<u64>() >= incarnation * 7 * 4096,
            "{written:?}"
        );
        daemon.signal(Signal::TERM);
        assert_eq!(daemon.wait(SOON), Some(0));
    }
    let mut verify = program();
    verify
        .args(["verify", "--json", "--config"])
        .arg(&store.config);
    let output = verify.output().unwrap();
    let json: serde_json::Value = serde_json::from_slice(&output.stdout).expect("JSON");
    assert_eq!(json["sound"], true);
    for (device, written) in written.into_iter().enumerate() {
        let wear = &json["wear"][device];
        // Ending in order may write more.
        assert!(wear["worn_bytes"].as_u64().unwrap() >= written, "{json}");
    }
}

#[test]
fn a_drive_near_the_end_of_its_rating_is_named_and_a_damaged_copy_is_not_believed() {
    let store = Store::new(1, "psync");
    let device = std::fs::File::options()
        .read(true)
        .write(true)
        .open(&store.devices[0])
        .unwrap();
    let mut id = [0; 16];
    device.read_exact_at(&mut id, 32).unwrap();
    let wear = |sequence, written_bytes| Wear {
        sequence,
        written_bytes,
        ..Wear::default()
    };
    let (offset, blocks) = wear(4, 900_000_000).encode(StoreId(id), 0);
    device.write_all_at(blocks.as_slice(), offset).unwrap();
    // The newer copy is torn.
    let (offset, mut blocks) = wear(5, 990_000_000).encode(StoreId(id), 0);
    blocks.as_mut_slice()[70] ^= 1;
    device.write_all_at(blocks.as_slice(), offset).unwrap();
    let config = std::fs::read_to_string(&store.config).unwrap();
    std::fs::write(&store.config, format!("{config}rated_tbw = 0.001\n")).unwrap();

    let verify = program()
        .args(["verify", "--config"])
        .arg(&store.config)
        .output()
        .unwrap();
    let told = words(&verify);
    assert!(told.contains("90.0 % of its rated endurance"), "{told}");

    let mut daemon = store.serve();
    let seen = snapshot(&mut daemon.control());
    assert_eq!(seen.devices[0].worn_bytes, 900_000_000);
    assert_eq!(seen.devices[0].rated_bytes, Some(1_000_000_000));
    let log = BufReader::new(daemon.child.stderr.take().unwrap());
    let mut lines = log.lines().map(Result::unwrap);
    let line = lines
        .find(|line| line.contains("90 % of its rated endurance"))
        .unwrap();
    assert!(line.contains(store.devices[0].to_str().unwrap()), "{line}");
}

#[test]
fn what_calibrating_and_verify_move_beside_the_queue_is_counted_and_who_comes_is_rated() {
    let store = Store::new(2, "psync");
    store.add_setting("rated_tbw = 600");
    let mut daemon = store.serve();
    let mut control = daemon.control();
    let mut session = control.session("tiny");
    let working = session.begin(&mut control, 6);
    fill_tiles(&mut session, 6, working, 10);
    session.commit(&mut control, working, b"");
    let read = |control: &mut Control| -> u64 {
        let devices = snapshot(control).devices;
        devices.iter().map(|d| d.counts.read.bytes).sum()
    };
    let before = read(&mut control);
    let mut verify = program();
    verify.args(["verify", "--config"]).arg(&store.config);
    let output = verify.output().unwrap();
    assert!(output.status.success(), "{}", words(&output));
    assert_eq!(read(&mut control) - before, 6 * 4096);

    let measured = &store.devices[1];
    let now = view(&mut control, measured).unwrap();
    let new = store.dir.path().join("device2");
    let output = device(&store, "add", &new, &["--size", "8MiB"]);
    assert!(output.status.success(), "{}", words(&output));
    let came = view(&mut control, &new).unwrap();
    assert!(came.worn_bytes >= MEASURED_MIN);
    assert_eq!(came.rated_bytes, Some(600_000_000_000_000));
    drop((session, control));
    daemon.signal(Signal::TERM);
    assert_eq!(daemon.wait(SOON), Some(0));

    // Without a daemon the devices say so.
    let text = std::fs::read_to_string(&store.config).unwrap();
    let listed = format!("\"{}\"]", measured.display());
    let with_new = format!("\"{}\", \"{}\"]", measured.display(), new.display());
    assert!(text.contains(&listed), "{text}");
    std::fs::write(&store.config, text.replace(&listed, &with_new)).unwrap();
    let worn = || -> Vec<u64> {
        let mut list = program();
        list.args(["device", "list", "--json", "--config"]);
        let output = list.arg(&store.config).output().unwrap();
        let json: serde_json::Value = serde_json::from_slice(&output.stdout).expect("JSON");
        let devices = json["devices"].as_array().unwrap().iter();
        devices.map(|d| d["worn_bytes"].as_u64().unwrap()).collect()
    };
    let kept = worn();
    assert!(
        kept[1] >= now.worn_bytes && kept[2] >= came.worn_bytes,
        "{kept:?}"
    );
    let output = device(&store, "calibrate", measured, &[]);
    assert!(output.status.success(), "{}", words(&output));
    let later = worn();
    assert!(later[1] - kept[1] >= MEASURED_MIN, "{kept:?} {later:?}");
}

/// Returns the bytes that the only job has written in all incarnations.
fn job_worn(store: &Store) -> u64 {
    snapshot(&mut Control::connect(&store.socket())).jobs[0].worn_bytes
}

#[test]
fn what_a_job_wrote_to_devices_that_left_stays_counted() {
    let mut store = Store::new(2, "auto");
    // Half of the tiles on each device.
    store.set_rates(&[0, 0]);
    let mut daemon = store.serve();
    let mut control = daemon.control();
    let mut session = control.session("tiny");
    let working = session.begin(&mut control, 16);
    fill_tiles(&mut session, 16, working, 10);
    session.commit(&mut control, working, b"");
    let gone = store.devices[1].clone();
    let on_it: u64 = {
        let number = view(&mut control, &gone).unwrap().state.status.number;
        let worn = snapshot(&mut control).jobs.remove(0).worn;
        worn.iter()
            .filter(|w| w.number == number)
            .map(|w| w.bytes)
            .sum()
    };
    assert!(
        on_it > 0,
        "the device that leaves holds none of the job's bytes"
    );
    let before = job_worn(&store);
    assert_eq!(before, 16 * 4096);
    drop((session, control));
    drained(&store, &mut daemon.control(), &gone);
    assert_eq!(job_worn(&store), before);
    daemon.signal(Signal::TERM);
    assert_eq!(daemon.wait(SOON), Some(0));
    store.devices.remove(1);
    store.write_config(&store.socket(), "auto");
    // The counters are the same in later incarnations, in which that device is not present.
    for _ in 0..2 {
        let mut daemon = store.serve();
        assert_eq!(
            job_worn(&store),
            before,
            "{on_it} were on the one that left"
        );
        daemon.signal(Signal::TERM);
        assert_eq!(daemon.wait(SOON), Some(0));
    }
}
