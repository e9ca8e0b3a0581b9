//! Tests debug lines about tiles and commits. What could go wrong: a line lacks the fields that name its session, job, tile or generation, or a step
//! is missing.

use crate::common::{Daemon, Store, fill_tiles};

#[test]
fn debug_lines_show_a_tile_and_its_commit_step_by_step() {
    let store = Store::new(1, "psync");
    let mut command = store.serve_command();
    command.env("RUST_LOG", "offloadd=debug");
    let daemon = Daemon::start(command, store.socket());
    let mut control = daemon.control();
    let mut session = control.session("tiny");
    let working = session.begin(&mut control, 2);
    fill_tiles(&mut session, 2, working, 10);
    session.commit(&mut control, working, b"step 1");
    let log = daemon.last_words();

    let uid = rustix::process::geteuid().as_raw();
    let whose = format!(" uid={uid} job=tiny}}:");
    let steps = |span: &str| -> Vec<&str> {
        let span = format!("{whose}{span}:");
        let lines = log.lines().filter(|line| line.contains("session{session="));
        lines
            .filter_map(|line| Some(line.split_once(&span)?.1))
            .collect()
    };
    let tile = steps("tile{tile=1 ticket=101}");
    let expected = [
        "submitted",
        "operation queued",
        "operation ended",
        "completed",
    ];
    assert_eq!(tile.len(), expected.len(), "{log}");
    for (line, step) in tile.iter().zip(expected) {
        assert!(line.contains(step), "{step}: {line}");
    }
    assert!(tile[0].contains(&format!("generation={working}")), "{log}");
    assert!(tile[1].contains("device=0 op=Write"), "{log}");
    let commit = steps(&format!("commit{{generation={working}}}"));
    assert!(
        commit.first().is_some_and(|line| line.contains("called")),
        "{log}"
    );
    assert!(commit.iter().any(|line| line.contains("op=Flush")), "{log}");
    assert!(
        commit.last().is_some_and(|line| line.contains("durable")),
        "{log}"
    );
}
