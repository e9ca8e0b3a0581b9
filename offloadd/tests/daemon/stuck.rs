//! Tests every command against a daemon that has stopped working. What could go wrong: a command that waits for it forever.

use std::process::{Child, Stdio};
use std::time::Duration;

use rustix::process::Signal;

use crate::common::{Store, eventually, fill_tiles, program, words};

/// Above the ten seconds after which a command gives up.
const SOON: Duration = Duration::from_secs(40);

/// Every command that asks a daemon, without the option that names it.
const COMMANDS: [&[&str]; 12] = [
    &["top", "--once"],
    &["top", "--json"],
    &["verify"],
    &["job", "list"],
    &["job", "show", "tiny"],
    &["job", "delete", "tiny"],
    &["job", "discard-unreadable", "tiny"],
    &["device", "list"],
    &["device", "add", "/nowhere"],
    &["device", "drain", "/nowhere"],
    &["device", "calibrate", "/nowhere"],
    &["device", "rebalance-rate", "100MB/s"],
];

#[test]
fn every_command_gives_up_on_a_daemon_that_does_not_answer() {
    let store = Store::new(1, "auto");
    let daemon = store.serve();
    let mut control = daemon.control();
    let mut session = control.session("tiny");
    let working = session.begin(&mut control, 200);
    fill_tiles(&mut session, 200, working, 1);
    session.commit(&mut control, working, b"");
    let start = |arguments: &[&str], which: [&str; 2]| -> Child {
        let mut command = program();
        command.args(arguments).args(which);
        command.stdout(Stdio::piped()).stderr(Stdio::piped());
        command.spawn().unwrap()
    };
    let (socket, config) = (store.socket(), &store.config);
    let places = [
        ["--socket", socket.to_str().unwrap()],
        ["--config", config.to_str().unwrap()],
    ];
    let running = start(&["verify", "--rate", "1MiB/s"], places[0]);
    eventually("the scrub runs", SOON, || daemon.is_scrubbing());
    daemon.signal(Signal::STOP);
    let mut started = vec![("a running verify".to_owned(), running)];
    for (arguments, which) in COMMANDS
        .iter()
        .flat_map(|one| places.map(|place| (one, place)))
    {
        started.push((
            format!("{arguments:?} {}", which[0]),
            start(arguments, which),
        ));
    }
    for (what, mut child) in started {
        let mut ended = false;
        let waited = std::time::Instant::now();
        while !ended && waited.elapsed() < SOON {
            ended = child.try_wait().unwrap().is_some();
            std::thread::sleep(Duration::from_millis(10));
        }
        if !ended {
            child.kill().unwrap();
        }
        let output = child.wait_with_output().unwrap();
        let printed = words(&output);
        assert!(ended, "{what} still waits: {printed}");
        assert_eq!(output.status.code(), Some(1), "{what}: {printed}");
        let named = printed.contains(socket.to_str().unwrap());
        assert!(named && !printed.contains("no daemon"), "{what}: {printed}");
    }
    daemon.signal(Signal::CONT);
}
