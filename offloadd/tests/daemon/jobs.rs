//! Tests `offloadd job` and `offloadd verify`. What could go wrong: a daemon that reports something else than its devices hold, access to another
//! user's jobs, damage that is overlooked, tiles reported as damaged because they were written meanwhile, a scrub that takes bandwidth from training
//! or continues after its caller has gone.

use std::os::unix::fs::{FileExt, PermissionsExt};
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use offload_api::fault::FaultKind;
use offload_api::proto;
use rustix::process::Signal;
use serde_json::Value;

use crate::common::{
    Daemon, Session, Store, eventually, fill_tiles, link_program, open_sized, program, words,
};

const SOON: Duration = Duration::from_secs(60);

fn command(name: &str, store: &Store, more: &[&str]) -> Command {
    let mut command = program();
    command
        .args(name.split(' '))
        .arg("--config")
        .arg(&store.config)
        .args(more);
    command
}

fn json(output: &Output) -> Value {
    serde_json::from_slice(&output.stdout).unwrap_or_else(|_| panic!("{}", words(output)))
}

/// Makes a store in which the job `tiny` has committed `count` tiles twice.
fn filled(count: u32) -> (Store, Daemon) {
    let store = Store::new(2, "auto");
    let daemon = store.serve();
    let mut control = daemon.control();
    let mut session = control.session("tiny");
    let mut working = session.begin(&mut control, count);
    for step in [7, 8] {
        // All bytes differ between the two steps.
        fill_tiles(&mut session, count, working, 20 * step);
        let blob = format!("{{\"version\":1,\"step\":{step}}}");
        working = session.commit(&mut control, working, blob.as_bytes());
    }
    (store, daemon)
}

#[test]
fn a_daemon_says_of_its_store_what_its_devices_say_when_it_has_gone() {
    let (store, mut daemon) = filled(6);
    let listed = || json(&command("job list", &store, &["--json"]).output().unwrap());
    eventually("nobody has it open", SOON, || {
        listed()["jobs"][0]["pids"] == serde_json::json!([])
    });
    let online = listed();
    let job = &online["jobs"][0];
    assert_eq!(
        (&job["job"], &job["uid"]),
        (&"tiny".into(), &rustix::process::geteuid().as_raw().into())
    );
    assert_eq!(job["kinds"][0]["tile_count"], 6);
    let generation = &job["generations"][0];
    assert_eq!(job["generations"].as_array().unwrap().len(), 1, "{job}");
    assert_eq!(
        (&generation["generation"], &generation["state"]),
        (&2.into(), &"confirmed".into())
    );
    assert_eq!(generation["ranks"][0]["step"], 8);
    assert_eq!(
        (&generation["bytes"], &generation["new_bytes"]),
        (&24576.into(), &24576.into())
    );
    let shown = words(&command("job show", &store, &["tiny"]).output().unwrap());
    assert!(
        shown.contains("generation 2, confirmed: step 8 of 1 rank; 24.0 KiB in 6 tiles"),
        "{shown}"
    );
    let shown = json(
        &command("job show", &store, &["tiny", "--json"])
            .output()
            .unwrap(),
    );
    assert_eq!(shown, *job);
    let none = command("job show", &store, &["other"]).output().unwrap();
    assert!(!none.status.success());
    assert!(words(&none).contains("has no job other in this store"));
    let table = words(&command("job list", &store, &[]).output().unwrap());
    let line = table.lines().find(|line| line.starts_with("tiny "));
    let columns: Vec<_> = line.expect(&table).split_whitespace().collect();
    assert_eq!(columns[2..4], ["2", "8"], "generation and step: {table}");
    assert_eq!(columns.last(), Some(&"confirmed"), "{table}");

    daemon.signal(Signal::TERM);
    assert_eq!(daemon.wait(SOON), Some(0));
    // Only a daemon knows quotas.
    assert_eq!(online["users"][0]["job_count"], 1, "{online}");
    assert_eq!(online["users"][0]["jobs_max"], 256, "{online}");
    let offline = listed();
    assert_eq!(offline["jobs"], online["jobs"]);
    assert_eq!(offline["users"], serde_json::json!([]));
}

#[test]
fn a_job_whose_records_can_be_read_has_none_to_discard() {
    let (store, daemon) = filled(2);
    let told = |arguments: &[&str]| {
        let output = command("job discard-unreadable", &store, arguments)
            .output()
            .unwrap();
        assert!(!output.status.success(), "{}", words(&output));
        words(&output)
    };
    drop(daemon);
    let printed = told(&["tiny"]);
    assert!(
        printed.contains("no daemon at ") && printed.contains("start it"),
        "{printed}"
    );
    let _daemon = store.serve();
    let printed = told(&["tiny"]);
    assert!(printed.contains("nothing to discard"), "{printed}");
    let printed = told(&["other"]);
    assert!(printed.contains("has no job other"), "{printed}");
    let printed = told(&["a/b"]);
    assert!(printed.contains("job name \"a/b\""), "{printed}");
}

#[test]
fn a_job_is_deleted_by_its_name_and_not_by_mistake() {
    let (store, mut daemon) = filled(2);
    let told = |arguments: &[&str]| {
        let output = command("job delete", &store, arguments).output().unwrap();
        assert!(!output.status.success(), "{}", words(&output));
        words(&output)
    };
    daemon.signal(Signal::TERM);
    assert_eq!(daemon.wait(SOON), Some(0));
    let mut daemon = store.serve();
    let mut control = daemon.control();
    let session = control.session("tiny");
    let [pid, uid] = [std::process::id(), rustix::process::geteuid().as_raw()];
    let printed = told(&["tiny", "--force"]);
    let open = format!("job tiny is open in process {pid} of uid {uid}: end it first");
    assert!(printed.contains(&open), "{printed}");
    let fault = control
        .open_session(crate::common::open("tiny"))
        .unwrap_err();
    let open = format!("rank 0 of job tiny is open already in process {pid} of uid {uid}");
    assert!(fault.message.contains(&open), "{fault}");
    let shown = words(&command("job show", &store, &["tiny"]).output().unwrap());
    assert!(
        shown.contains(&format!("open in process {pid}\n")),
        "{shown}"
    );
    let table = words(&command("job list", &store, &[]).output().unwrap());
    let line = table.lines().find(|line| line.starts_with("tiny "));
    let mut columns = line.expect(&table).split_whitespace().rev();
    assert_eq!(columns.nth(1), Some(pid.to_string().as_str()), "{table}");
    drop((session, control));
    let printed = told(&["tiny"]);
    assert!(
        printed.contains("can be resumed from generation 2 of step 8"),
        "{printed}"
    );
    assert!(told(&["other"]).contains("has no job other"));
    assert!(told(&["a/b"]).contains("job name"));
    if let Some(another) = another_user(&store, &daemon) {
        // Another user cannot see root's job, and a request by job id is refused.
        let refused = words(&another(&["job", "delete", "tiny", "--force"]));
        assert!(refused.contains("has no job tiny"), "{refused}");
        let refused = words(&another(&[
            "job", "delete", "tiny", "--force", "--uid", "0",
        ]));
        assert!(
            refused.contains("has no job tiny") || refused.contains("it belongs to uid 0"),
            "{refused}"
        );
        let mut control = daemon.control();
        let foreign = control.drop_job(proto::DropJobRequest {
            job: "tiny".into(),
            uid: Some(65534),
        });
        assert_eq!(foreign.unwrap_err().kind, FaultKind::NotFound);
    }
    daemon.signal(Signal::TERM);
    assert_eq!(daemon.wait(SOON), Some(0));
    let printed = told(&["tiny", "--force"]);
    assert!(
        printed.contains("no daemon at ") && printed.contains("start it"),
        "{printed}"
    );
    let daemon = store.serve();
    let output = command("job delete", &store, &["tiny", "--force"])
        .output()
        .unwrap();
    assert!(
        words(&output).contains("deleted job tiny: "),
        "{}",
        words(&output)
    );
    let log = daemon.last_words();
    let deleted = format!("deleted job tiny of uid {uid}: ");
    assert!(log.contains(&deleted), "{log}");
    // Its devices say the same when the daemon has gone.
    let left = json(&command("job list", &store, &["--json"]).output().unwrap());
    assert_eq!(left["jobs"].as_array().unwrap().len(), 0, "{left}");
}

#[test]
fn the_name_of_a_run_is_enough_where_it_has_one_job() {
    let store = Store::new(1, "auto");
    let daemon = store.serve();
    let mut control = daemon.control();
    let names = [
        "run-1dad8fd8bc5ae5a4",
        "two-1dad8fd8bc5ae5a4",
        "two-2dad8fd8bc5ae5a4",
    ];
    for name in names {
        control.session(name).begin(&mut control, 1);
    }
    let told = |name: &str, more: &[&str]| words(&command(name, &store, more).output().unwrap());
    assert!(told("job show", &["run"]).starts_with("run-1dad8fd8bc5ae5a4 (uid "));
    let both = told("job show", &["two"]);
    assert!(
        both.contains("2 jobs of runs named two")
            && both.contains(names[1])
            && both.contains(names[2]),
        "{both}"
    );
    let own = rustix::process::geteuid().as_raw();
    let other = told("job show", &["run", "--uid", "4242"]);
    assert!(
        other.contains(&format!(
            "but uid {own} has {}: select the owner with --uid",
            names[0]
        )),
        "{other}"
    );
    eventually("its session has ended", SOON, || {
        let printed = told("job delete", &["run"]);
        printed.contains("deleted job run-1dad8fd8bc5ae5a4: ")
            || !printed.contains(" is open in process ")
    });
    assert!(told("job show", &["run"]).contains("has no job run"));
}

/// Runs commands as another user. Returns `None` with a message if this user cannot become another one.
fn another_user(store: &Store, daemon: &Daemon) -> Option<impl Fn(&[&str]) -> Output + use<>> {
    if !rustix::process::geteuid().is_root() {
        println!(
            "skipped: {}: only root can become another user",
            std::thread::current().name().unwrap_or("a test")
        );
        return None;
    }
    let all = |mode| PermissionsExt::from_mode(mode);
    std::fs::set_permissions(store.dir.path(), all(0o755)).unwrap();
    std::fs::set_permissions(&daemon.socket, all(0o666)).unwrap();
    let copy = store.dir.path().join("offloadd");
    link_program(&copy);
    let socket = daemon.socket.clone();
    Some(move |arguments: &[&str]| {
        let mut command = Command::new(&copy);
        command
            .args(arguments)
            .arg("--socket")
            .arg(&socket)
            .uid(65534)
            .gid(65534)
            .current_dir("/");
        command.output().unwrap()
    })
}

#[test]
fn users_read_not_more_than_they_may_together() {
    let store = Store::new(1, "auto");
    let text = std::fs::read_to_string(&store.config).unwrap();
    std::fs::write(&store.config, text + "scrub_bytes_per_s_max = \"1MiB\"\n").unwrap();
    let daemon = store.serve();
    let Some(other) = another_user(&store, &daemon) else {
        return;
    };
    let less = "reading 1.0 MiB per second: `scrub_bytes_per_s_max` of the daemon";
    let told = words(&other(&["verify", "--rate", "1GB/s"]));
    assert!(told.contains(less), "{told}");
    let told = words(&other(&["verify", "--rate", "1MiB/s"]));
    assert!(!told.contains(less), "as fast as was asked: {told}");
    let told = words(&command("verify", &store, &[]).output().unwrap());
    assert!(!told.contains(less), "who runs the daemon: {told}");
}

#[test]
fn another_user_sees_and_scrubs_none_of_our_jobs() {
    let (store, daemon) = filled(4);
    let Some(other) = another_user(&store, &daemon) else {
        return;
    };
    assert_eq!(
        json(&other(&["job", "list", "--json"]))["jobs"],
        Value::Array(Vec::new())
    );
    // With the settings, and without access to the socket or the devices, nobody is told to take the store.
    let open = |path: &std::path::Path, mode| {
        std::fs::set_permissions(path, PermissionsExt::from_mode(mode)).unwrap()
    };
    open(&store.config, 0o644);
    let with_settings = || {
        let mut command = Command::new(store.dir.path().join("offloadd"));
        command.args(["job", "list", "--config"]).arg(&store.config);
        let output = command.uid(65534).gid(65534).current_dir("/").output();
        words(&output.unwrap())
    };
    open(&store.socket(), 0o600);
    let printed = with_settings();
    assert!(
        printed.contains("usermod -aG offloadd USER") && !printed.contains("chown"),
        "{printed}"
    );
    open(&store.socket(), 0o666);
    let refused = words(&other(&["job", "discard-unreadable", "tiny"]));
    assert!(refused.contains("uid 65534 has no job tiny"), "{refused}");
    let refused = words(&other(&["job", "discard-unreadable", "tiny", "--uid", "0"]));
    assert!(refused.contains("it belongs to uid 0"), "{refused}");
    let scrubbed = json(&other(&["verify", "--json"]));
    assert_eq!(
        (&scrubbed["job_count"], &scrubbed["tile_count"]),
        (&0.into(), &0.into())
    );
    let named = other(&["verify", "--job", "tiny"]);
    assert!(
        words(&named).contains("you have no job tiny"),
        "{}",
        words(&named)
    );
    let ours = json(&command("verify", &store, &["--json"]).output().unwrap());
    assert_eq!(ours["tile_count"], 4);
    drop(daemon);
    let printed = with_settings();
    assert!(
        printed.contains("no daemon runs at ") && !printed.contains("chown"),
        "{printed}"
    );
}

/// Returns device and offset of tile 3 as last committed.
fn place_of_tile_3(store: &Store) -> (PathBuf, u64) {
    let block = [160 + 3; 4096];
    for device in &store.devices {
        let bytes = std::fs::read(device).unwrap();
        if let Some(place) = bytes.chunks(4096).position(|found| found == block) {
            return (device.clone(), place as u64 * 4096);
        }
    }
    panic!("tile 3 is on no device");
}

#[test]
fn a_flipped_bit_is_found_and_named_while_the_daemon_serves() {
    let (store, daemon) = filled(8);
    let sound = command("verify", &store, &["--json"]).output().unwrap();
    assert!(sound.status.success(), "{}", words(&sound));
    let found = json(&sound);
    assert_eq!(
        (&found["by_daemon"], &found["tile_count"]),
        (&true.into(), &8.into())
    );

    let (device, offset) = place_of_tile_3(&store);
    let file = std::fs::OpenOptions::new()
        .write(true)
        .open(&device)
        .unwrap();
    file.write_all_at(&[160 + 3 + 64], offset + 1234).unwrap();
    file.sync_all().unwrap();
    let output = command("verify", &store, &["--json"]).output().unwrap();
    assert_eq!(output.status.code(), Some(1), "{}", words(&output));
    let found = json(&output);
    assert_eq!(
        (&found["sound"], &found["damaged_count"]),
        (&false.into(), &1.into())
    );
    let tile = &found["damaged_tiles"][0];
    assert_eq!(
        (&tile["device"], &tile["offset"]),
        (&device.display().to_string().into(), &offset.into())
    );
    assert_eq!((&tile["tile"], &tile["generation"]), (&3.into(), &2.into()));
    let printed = words(
        &command("verify", &store, &["--job", "tiny"])
            .output()
            .unwrap(),
    );
    assert!(
        printed.contains("DAMAGED 4096 bytes at ") && printed.contains("tile 3 (unit 3, param"),
        "{printed}"
    );
    let last = printed.lines().last().unwrap();
    assert!(
        last.contains("--resume-from STEP") && last.contains("--fresh"),
        "{printed}"
    );
    // The administrator's metrics show the damage, as if a process had read the tile.
    let metrics = daemon.control().metrics(proto::MetricsRequest {}).unwrap();
    let counted: u64 = metrics
        .devices
        .iter()
        .map(|device| device.damaged_count)
        .sum();
    assert_eq!(counted, 1, "one tile, that two scrubs found");
}

#[test]
fn a_device_that_cannot_be_looked_at_is_not_called_damaged() {
    let (store, daemon) = filled(8);
    let device = &store.devices[0];
    let aside = store.dir.path().join("aside");
    std::fs::rename(device, &aside).unwrap();
    let output = command("verify", &store, &["--json"]).output().unwrap();
    assert_eq!(output.status.code(), Some(1), "{}", words(&output));
    let found = json(&output);
    assert_eq!(found["damaged_count"], 0, "{found}");
    let unread = found["unread_count"].as_u64().unwrap();
    assert_eq!(found["tile_count"], 8 - unread, "{found}");
    let why = found["unread"][0].as_str().unwrap();
    assert!(why.contains(&device.display().to_string()), "{why}");
    let printed = words(&command("verify", &store, &[]).output().unwrap());
    for word in ["NOT READ device ", "not everything could be read"] {
        assert!(
            printed.contains(word) && !printed.contains("DAMAGED"),
            "{printed}"
        );
    }
    // A file that lies at its path now is not verified either.
    std::fs::write(device, vec![7; 1 << 20]).unwrap();
    let found = json(&command("verify", &store, &["--json"]).output().unwrap());
    assert_eq!(found["damaged_count"], 0, "{found}");
    assert_eq!(found["unread_count"], unread, "{found}");
    let why = found["unread"][0].as_str().unwrap();
    assert!(
        why.contains("another device is at this path than the daemon has open"),
        "{why}"
    );
    let metrics = daemon.control().metrics(proto::MetricsRequest {}).unwrap();
    assert!(metrics.devices.iter().all(|one| one.damaged_count == 0));
    std::fs::rename(&aside, device).unwrap();
    let found = json(&command("verify", &store, &["--json"]).output().unwrap());
    assert_eq!(
        (&found["sound"], &found["tile_count"]),
        (&true.into(), &8.into())
    );
}

#[test]
fn tiles_that_are_written_during_a_scrub_are_not_called_damaged() {
    let store = Store::new(1, "auto");
    let daemon = store.serve();
    let mut control = daemon.control();
    let mut session = control.session("tiny");
    let count = 200;
    let mut working = session.begin(&mut control, count);
    fill_tiles(&mut session, count, working, 1);
    working = session.commit(&mut control, working, b"");
    // 4 ms per tile: all tiles are listed at once, and written several times before the last one is read.
    let mut scrub = command("verify", &store, &["--json", "--rate", "1MiB/s"])
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut generations = 0;
    while scrub.try_wait().unwrap().is_none() {
        fill_tiles(&mut session, count, working, generations);
        working = session.commit(&mut control, working, b"");
        generations = generations.wrapping_add(1);
    }
    let output = scrub.wait_with_output().unwrap();
    assert!(output.status.success(), "{}", words(&output));
    assert!(
        generations >= 2,
        "{generations} generations were written meanwhile"
    );
    assert_eq!(json(&output)["tile_count"], count);
}

#[test]
fn a_scrub_keeps_its_rate_runs_alone_and_ends_with_its_caller() {
    let store = Store::new(1, "auto");
    let daemon = store.serve();
    let mut control = daemon.control();
    let reply = control.open_session(open_sized("large", 64 << 10)).unwrap();
    let mut session = Session::attach_sized(&reply, 64 << 10).unwrap();
    let working = session.begin_sized(&mut control, 24, 64 << 10);
    let bytes = vec![5; 64 << 10];
    let place = session
        .geometry
        .slot_place(offload_api::ids::SlotIndex(1))
        .unwrap();
    session.write_slot(place.offset, &bytes);
    for tile in 0..24 {
        session.submit(crate::common::swap_out(tile, 1, working, &bytes));
        assert_eq!(session.complete().fault, 0);
    }
    session.commit(&mut control, working, b"");

    let slow = || {
        command("verify", &store, &["--rate", "1MiB/s"])
            .stdout(Stdio::piped())
            .spawn()
            .unwrap()
    };
    let scrubs = || daemon.is_scrubbing();
    let started = Instant::now();
    let first = slow();
    eventually("the first runs", SOON, scrubs);
    let other = || {
        words(
            &command("verify", &store, &["--rate", "1GB/s"])
                .output()
                .unwrap(),
        )
    };
    let printed = other();
    assert!(
        printed.contains("is already running; only one at a time"),
        "{printed}"
    );
    let output = first.wait_with_output().unwrap();
    assert!(output.status.success(), "{}", words(&output));
    let took = started.elapsed();
    assert!(
        took >= Duration::from_millis(1300),
        "1.5 MiB at 1 MiB a second took {took:?}"
    );

    let mut gone = slow();
    eventually("another runs", SOON, scrubs);
    gone.kill().unwrap();
    gone.wait().unwrap();
    eventually("nobody listens to it", SOON, || !scrubs());
    let printed = other();
    assert!(printed.contains("sound"), "{printed}");
    // Scrubs read beside the queue, and are counted.
    let reply = control.metrics(proto::MetricsRequest {}).unwrap();
    let read_bytes = reply.devices[0].read.as_ref().unwrap().bytes;
    assert!(read_bytes >= 2 * 24 * (64 << 10), "{read_bytes}");
}

#[test]
fn without_a_daemon_and_settings_it_says_where_it_looked() {
    for name in ["job list", "verify", "device list", "top --once"] {
        let output = program()
            .args(name.split(' '))
            .args(["--socket", "/no/such/socket"])
            .output()
            .unwrap();
        assert!(!output.status.success());
        assert!(
            words(&output).contains("no daemon at /no/such/socket"),
            "{}",
            words(&output)
        );
    }
}
