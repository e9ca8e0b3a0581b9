//! Kills a trainer with SIGKILL at each named point of every phase (`test_hooks::kill_point`, test builds
//! only).
//!
//! The error that these tests find: something is incomplete at that moment, and the next start takes it for
//! complete or ignores it: a run's record, initial weights, a tile, an acknowledged commit, a line of
//! metrics, a checkpoint, an export. After each kill, the committed state must have the fingerprint of that
//! step in a run that was not killed, and so must the newest checkpoint. Neither may be older than what was
//! seen before, nor the committed state older than the reported steps allow.
//!
//! A push kills two kinds of runs at every second point each. `OFFLOADD_KILLS=500 cargo test -p trainer-torch --test runs killed_at_each` kills
//! each kind at every point, that often.

use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::Command;

use test_hooks::kill_point::Point;

use crate::harness::{Harness, finish, spawn, succeed};
use crate::killed::{KilledRuns, NewestState};
use crate::muon::MUON;
use crate::random::Random;

const STEPS: u64 = 40;

/// Kills `command` when it reaches `point` for the `number`th time. Returns false if it ended before.
pub(crate) fn killed(mut command: Command, point: Point, number: u64) -> bool {
    command.env("OFFLOADD_KILL", format!("{}@{number}", point.name()));
    let output = finish(spawn(command));
    let ended = output.status.success();
    assert!(
        ended || output.status.signal() == Some(9),
        "{}@{number}: {}",
        point.name(),
        String::from_utf8_lossy(&output.stderr)
    );
    !ended
}

impl KilledRuns {
    /// Kills once at each of `points`; each start resumes after the kill before.
    fn round(&mut self, number: u64, points: &[Point]) -> u64 {
        let mut run = self.run(number);
        let mut seen = NewestState::default();
        let mut kills = 0;
        for &point in points {
            let times = match point {
                Point::Filling | Point::Forward | Point::Backward | Point::Revised => 3,
                Point::Updated | Point::Writing | Point::Checkpointing => 6,
                Point::Committing | Point::Committed | Point::Telling => 2,
                _ => 1,
            };
            let times = 1 + self.random.below(times);
            if matches!(point, Point::Draining | Point::Closing) {
                run = self.stopped(run);
            }
            let after = format!("{}@{times} of run {number}", point.name());
            let met = killed(run.command("train"), point, times);
            assert!(met, "{after}: the point was never reached");
            kills += 1;
            println!("{after}: {} steps were written", run.steps_written());
            let committed = !matches!(
                point,
                Point::Tokens | Point::Opening | Point::Describing | Point::Filling
            );
            if committed {
                self.check_resumable(&run, &mut seen, &after);
                assert!(seen.begun, "{after}: nothing was committed");
            }
            self.look_at_checkpoint(&run, &mut seen, &after);
        }
        self.end(&self.run(number), &mut seen);
        kills
    }
}

/// Points that a run on one node reaches while it trains.
fn points_of_training() -> Vec<Point> {
    // Only runs on several nodes wait between `Prepared` and `Confirming`, and copy files. Only those with Muon revise states.
    let elsewhere = [
        Point::Revised,
        Point::Exporting,
        Point::NamingExport,
        Point::CopyingFiles,
        Point::Prepared,
        Point::Confirming,
    ];
    let all = Point::ALL.into_iter();
    all.filter(|point| !elsewhere.contains(point)).collect()
}

#[test]
fn a_run_killed_at_each_named_point_resumes_bit_for_bit() {
    let wanted: Option<u64> = std::env::var("OFFLOADD_KILLS")
        .ok()
        .map(|kills| kills.parse().expect("a number of kills"));
    let seed = Random::seed("numbers of times that each point is passed before its kill");
    type Sets = &'static [&'static str];
    let kills = |first, commit_every, of_all: Sets, sets: Sets| {
        move || {
            let mut points = points_of_training();
            if wanted.is_none() {
                points = points.into_iter().skip(first).step_by(2).collect();
            }
            if of_all.contains(&MUON) {
                points.insert(points.len() / 2, Point::Revised);
            }
            let mut killed = KilledRuns::new(1, STEPS, commit_every, of_all, sets, seed);
            let mut kills = 0;
            let mut rounds = 0;
            while kills < wanted.unwrap_or(1) {
                kills += killed.round(rounds, &points);
                rounds += 1;
            }
            println!("{kills} kills in {rounds} runs of {sets:?}");
        }
    };
    std::thread::scope(|scope| {
        scope.spawn(kills(0, 1, &[], &["offload.optimizer_step=deferred"]));
        scope.spawn(kills(
            1,
            2,
            &[MUON],
            &[
                "offload.optimizer_step=immediate",
                "offload.resident_fraction=0.5",
            ],
        ));
    });
}

/// Names and contents of the files in `dir`.
fn contents(dir: &Path) -> Vec<(String, Vec<u8>)> {
    let entries = std::fs::read_dir(dir).unwrap().map(|entry| {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_string_lossy().into_owned();
        (name, std::fs::read(&path).unwrap())
    });
    let mut contents: Vec<_> = entries.collect();
    contents.sort();
    contents
}

#[test]
fn an_export_killed_at_its_points_is_absent_and_can_be_repeated() {
    let harness = Harness::new();
    let run = harness.run("run", &[]).with(&harness.nvme());
    run.train();
    let export = |out: &str| {
        let mut command = run.program();
        command.arg("export").arg(&run.dir);
        command.arg("--out").arg(harness.path(out));
        command
    };
    succeed(export("whole"));
    for (point, number) in [(Point::Exporting, 3), (Point::NamingExport, 1)] {
        assert!(killed(export("out"), point, number), "{}", point.name());
        assert!(!harness.path("out").exists(), "{}", point.name());
    }
    succeed(export("out"));
    assert_eq!(
        contents(&harness.path("whole")),
        contents(&harness.path("out"))
    );
    assert!(!harness.path("out.partial").exists());
}

#[test]
fn copying_another_runs_weights_survives_a_kill_at_any_point() {
    let harness = Harness::new();
    let first = harness.run("first", &[]).with(&harness.nvme());
    first.train();
    let second = |name: &str| {
        let run = harness.run(name, &[]).with(&harness.nvme());
        let mut command = run.command("train");
        command.arg("--from").arg(&first.dir);
        (run, command)
    };
    let (whole, command) = second("whole");
    succeed(command);
    let points = [
        (Point::Exporting, 2),
        (Point::Opening, 1),
        (Point::Describing, 1),
        (Point::Filling, 2),
    ];
    for (point, number) in points {
        assert!(
            killed(second("killed").1, point, number),
            "{}",
            point.name()
        );
    }
    let (run, command) = second("killed");
    succeed(command);
    assert_eq!(whole.bits("loss"), run.bits("loss"));
    assert_eq!(whole.fingerprint(), run.fingerprint());
    assert!(!run.dir.join("first-weights").exists());
}
