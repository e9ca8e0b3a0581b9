//! Tests that a store whose metadata device takes no writes is served read-only. What could go wrong: it is not served, a write is reported as done,
//! or the reason is not reported.

use std::io::Read;
use std::os::unix::net::UnixDatagram;
use std::process::Command;
use std::time::Duration;

use offload_api::fault::{Fault, FaultKind};
use offload_api::ids::SlotIndex;
use offload_api::proto;
use rustix::process::Signal;

use crate::common::{Daemon, Store, expect_tiles, fill_tiles, open, program, swap_out, words};
use crate::page;
use crate::strace::strace;

const TILES: u32 = 6;
const SOON: Duration = Duration::from_secs(60);

/// Returns `served` with each of its `calls` to the first device of `store` failing; `None` where strace cannot trace.
pub(crate) fn with_failing(calls: &str, store: &Store, served: &Command) -> Option<Command> {
    with_injected(calls, "error=EIO", store, served)
}

/// Like [`with_failing`], with strace's action for these calls.
fn with_injected(calls: &str, what: &str, store: &Store, served: &Command) -> Option<Command> {
    let mut command = strace()?;
    // strace is not the parent: the daemon is this process's child, as without strace.
    command.args(["-D", "-P"]);
    command.arg(&store.devices[0]);
    command.args(["-e", &format!("trace={calls}")]);
    command.args(["-e", &format!("inject={calls}:{what}")]);
    command.arg(served.get_program()).args(served.get_args());
    let variables = served.get_envs();
    command.envs(variables.filter_map(|(name, value)| Some((name, value?))));
    Some(command)
}

/// Starts a daemon whose writes to the first device fail from before its start.
fn serve_unwritable(store: &Store) -> Option<Daemon> {
    let command = with_failing("pwrite64", store, &store.serve_command())?;
    Some(Daemon::start(command, store.socket()))
}

#[test]
fn what_is_committed_is_served_from_a_device_that_takes_no_writes() {
    let store = Store::new(2, "psync");
    let mut daemon = store.serve();
    let mut control = daemon.control();
    let mut session = control.session("tiny");
    let working = session.begin(&mut control, TILES);
    fill_tiles(&mut session, TILES, working, 40);
    let working = session.commit(&mut control, working, b"one");
    drop((session, control));
    daemon.signal(Signal::TERM);
    assert_eq!(daemon.wait(SOON), Some(0));

    let Some(mut daemon) = serve_unwritable(&store) else {
        return;
    };
    let path = store.devices[0].display().to_string();
    let told = |fault: Fault| {
        assert_eq!(fault.kind, FaultKind::Poisoned, "{fault}");
        let printed = fault.message.contains("read-only") && fault.message.contains(&path);
        assert!(printed, "{fault}");
    };
    let mut control = daemon.control();
    let mut session = control.session("tiny");
    assert_eq!(session.resume(&mut control, working - 1), working);
    expect_tiles(&mut session, TILES, 40);
    let place = session.geometry.slot_place(SlotIndex(0)).unwrap();
    let bytes = [99; 4096];
    session.write_slot(place.offset, &bytes);
    session.submit(swap_out(0, 0, working, &bytes));
    assert_eq!(session.complete().fault, FaultKind::Poisoned as u32);
    let committed = control.commit(proto::CommitRequest {
        token: session.token.clone(),
        generation: working,
        blob: Vec::new(),
    });
    told(committed.unwrap_err());
    let job = "tiny".to_owned();
    let new = store.dir.path().join("new");
    let mut add = program();
    add.args(["device", "add", "--size", "16MiB"]).arg(&new);
    let output = add.arg("--config").arg(&store.config).output().unwrap();
    assert!(!output.status.success() && words(&output).contains("read-only"));
    assert!(!new.exists(), "refused before anything is made");
    drop(session);
    let reply = control.open_session(open("other")).unwrap();
    let defined = control.define_tiles(proto::DefineTilesRequest {
        token: reply.token,
        layout: Vec::new(),
        tiles: vec![proto::Tile {
            unit: 0,
            kind: 1,
            elem_offset: 0,
            tile_bytes: 4096,
        }],
        durability: 1,
        nodes: 1,
    });
    told(defined.unwrap_err());
    told(loop {
        // Until its session has ended.
        let dropped = control.drop_job(proto::DropJobRequest {
            job: job.clone(),
            uid: None,
        });
        match dropped.unwrap_err() {
            soon if soon.kind == FaultKind::Ending => std::thread::sleep(Duration::from_millis(5)),
            other => break other,
        }
    });
    for (arguments, printed) in [
        (&["verify"][..], "sound"),
        (&["job", "list"], "tiny"),
        (&["device", "list"], "the store is read-only"),
    ] {
        let mut command = program();
        command.args(arguments).arg("--config").arg(&store.config);
        let output = command.output().unwrap();
        let told = words(&output);
        assert!(output.status.success() && told.contains(printed), "{told}");
    }
    drop(control);
    daemon.signal(Signal::TERM);
    assert_eq!(daemon.wait(SOON), Some(0));
    let mut printed = String::new();
    let stderr = daemon.child.stderr.as_mut().unwrap();
    stderr.read_to_string(&mut printed).unwrap();
    let error = printed.lines().find(|line| line.contains("ERROR"));
    let error = error.unwrap_or_else(|| panic!("{printed}"));
    assert!(error.contains("the store is read-only") && error.contains(&path));

    // Another drive, or the same one repaired: nothing is lost, and the job can be resumed.
    let daemon = store.serve();
    let mut control = daemon.control();
    let mut session = control.session("tiny");
    session.resume(&mut control, working - 1);
    expect_tiles(&mut session, TILES, 40);
    fill_tiles(&mut session, TILES, working, 50);
    session.commit(&mut control, working, b"two");
    expect_tiles(&mut session, TILES, 50);
}

#[test]
fn everybody_who_looks_is_told_that_the_daemon_only_reads_and_why() {
    let store = Store::new(2, "psync");
    let prometheus = store.dir.path().join("run/metrics.sock");
    page::listen(&store, &format!("unix:{}", prometheus.display()));
    let notify = store.dir.path().join("notify");
    let manager = UnixDatagram::bind(&notify).unwrap();
    manager.set_read_timeout(Some(SOON)).unwrap();
    let mut daemon = store.serve();
    let mut control = daemon.control();
    control.session("tiny").begin(&mut control, TILES);
    let (_, text) = page::get(&prometheus, "/metrics");
    assert!(text.contains("\noffloadd_read_only 0.0\n"), "{text}");
    drop(control);
    daemon.signal(Signal::TERM);
    assert_eq!(daemon.wait(SOON), Some(0));

    let mut served = store.serve_command();
    served.env("NOTIFY_SOCKET", &notify);
    let Some(command) = with_failing("pwrite64", &store, &served) else {
        return;
    };
    let daemon = Daemon::start(command, store.socket());
    let path = store.devices[0].display().to_string();
    let why = |words: &str| {
        let printed = words.contains("the store is read-only") && words.contains(&path);
        assert!(printed, "{words}");
    };
    let limited = daemon.ready.split_once(", read-only: ");
    why(limited.expect(&daemon.ready).1);
    let status = |end: &str| loop {
        let mut bytes = [0; 2048];
        let length = manager.recv(&mut bytes).expect("a word from the daemon");
        let word = String::from_utf8_lossy(&bytes[..length]);
        if let Some(status) = word.trim_end().strip_prefix("STATUS=serving")
            && status.ends_with(end)
        {
            why(status);
            break assert!(status.starts_with(" read-only at "), "{status}");
        }
    };
    status("");
    daemon.signal(Signal::HUP);
    status("; no setting was changed");

    let (_, text) = page::get(&prometheus, "/metrics");
    assert!(text.contains("\noffloadd_read_only 1.0\n"), "{text}");
    let mut control = daemon.control();
    let _session = control.session("tiny");
    let mut top = program();
    top.args(["top", "--once", "--interval", "0.1", "--config"]);
    let shown = words(&top.arg(&store.config).output().unwrap());
    why(shown.lines().nth(1).expect(&shown));
    assert!(shown.contains("\nREAD-ONLY: "), "{shown}");
    assert!(
        shown.contains("  a restart of offloadd: the store is read-only\n"),
        "{shown}"
    );
    assert!(!shown.contains("resuming:"), "{shown}");
}

#[test]
fn what_fails_but_once_at_the_start_is_tried_again() {
    // The start flushes the structures it has read, and writes the catalog of its incarnation.
    for call in ["fdatasync", "pwrite64"] {
        let store = Store::new(2, "psync");
        let served = store.serve_command();
        let Some(command) = with_injected(call, "error=EIO:when=1", &store, &served) else {
            return;
        };
        let mut daemon = Daemon::start(command, store.socket());
        assert!(!daemon.ready.contains("reading only"), "{}", daemon.ready);
        // No more than that: strace counts for each thread, and the engine's threads are still to come.
        let seen = daemon.control().metrics(proto::MetricsRequest {}).unwrap();
        assert_eq!(seen.read_only, None);
        daemon.signal(Signal::TERM);
        assert_eq!(daemon.wait(SOON), Some(0));
        let mut printed = String::new();
        let stderr = daemon.child.stderr.as_mut().unwrap();
        stderr.read_to_string(&mut printed).unwrap();
        assert!(printed.contains("retrying in"), "{printed}");
        store.serve();
    }
}
