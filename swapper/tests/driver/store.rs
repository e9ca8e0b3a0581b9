//! Tests with a private daemon: the program `offloadd`, built into the same target directory.

use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use swapper::private::{PrivateDaemon, PrivateSettings};
use swapper::{
    Backing, Durability, Schedule, SpanKind, Spans, Staging, StepProgram, StoreSettings, Swapper,
    SwapperError, SwapperSettings, TileError,
};

use crate::toy;

const DEVICE_BYTES: u64 = 16 << 20;
/// Stall limit of tests without a stall; the default is four minutes.
pub(crate) const SOON: Duration = Duration::from_secs(30);

pub(crate) fn devices(dir: &Path) -> Vec<PathBuf> {
    vec![dir.join("a.tiles"), dir.join("b.tiles")]
}

pub(crate) fn start(dir: &Path) -> PrivateDaemon {
    PrivateDaemon::start(PrivateSettings {
        program: None,
        dir: dir.join("daemon"),
        devices: devices(dir)
            .into_iter()
            .map(|path| (path, DEVICE_BYTES))
            .collect(),
        arena_bytes_max: 64 << 20,
        iodepth_max: 64,
        engine: "auto".into(),
    })
    .unwrap_or_else(|e| panic!("no private daemon (`cargo build -p offloadd` makes it): {e}"))
}

pub(crate) fn settings(daemon: &PrivateDaemon, job: &str) -> SwapperSettings {
    toy::settings(Backing::Store(StoreSettings {
        socket: daemon.socket().to_path_buf(),
        job: job.into(),
        durability: Durability::Committed,
        nodes: None,
    }))
}

/// Sends a signal to the daemon. Returns when all of its threads have stopped or ended, if it makes them: `kill` itself does not wait.
pub(crate) fn send(daemon: &PrivateDaemon, signal: &str) {
    let pid = daemon.pid().to_string();
    let sent = Command::new("kill").args([signal, &pid]).status();
    assert!(sent.unwrap().success());
    let state = match signal {
        "-STOP" => 'T',
        "-9" => 'Z',
        _ => return,
    };
    let is_in_state = |stat: String| stat[stat.rfind(')').unwrap()..].chars().nth(2) == Some(state);
    loop {
        let threads = std::fs::read_dir(format!("/proc/{pid}/task")).unwrap();
        // One that has ended is not there.
        let stats = threads
            .flatten()
            .filter_map(|thread| std::fs::read_to_string(thread.path().join("stat")).ok());
        if stats.into_iter().all(is_in_state) {
            return;
        }
        std::thread::yield_now();
    }
}

#[test]
fn wherever_tiles_live_the_bytes_are_the_same() {
    let dir = tempfile::tempdir().unwrap();
    let daemon = start(dir.path());
    let expected = toy::reference(3);
    for schedule in [Schedule::Immediate, Schedule::Deferred] {
        for (fraction, commit_every) in [(0.0, 1), (0.5, 2), (1.0, 0)] {
            let job = format!("{schedule:?}-{commit_every}");
            let settings = SwapperSettings {
                schedule,
                param_fraction: fraction,
                state_fraction: fraction,
                grad_fraction: fraction,
                commit_every,
                ..settings(&daemon, &job)
            };
            let (mut swapper, opened, step) = toy::open(&settings).unwrap();
            assert_eq!((step, opened.devices.len()), (0, 2));
            let mut moved = (0, 0);
            for step in 1..=3 {
                let io = toy::train_step(&mut swapper, step).unwrap();
                moved = (moved.0 + io.read_bytes, moved.1 + io.written_bytes);
            }
            let found = toy::contents(&mut swapper).unwrap();
            toy::assert_same(&found, &expected, &job);
            assert_eq!(moved.0 > 0, fraction < 1.0, "{job} read {} bytes", moved.0);
            swapper.close().unwrap();

            // A second incarnation, with all tiles elsewhere and the other schedule.
            let settings = SwapperSettings {
                schedule: Schedule::Deferred,
                param_fraction: 1.0 - fraction,
                staging: Staging::Slots {
                    param: 2,
                    state: 5,
                    grad: 3,
                },
                ..settings
            };
            let (mut swapper, _, step) = toy::open(&settings).unwrap();
            assert_eq!(step, 3, "{job} resumes at its last step");
            let found = toy::contents(&mut swapper).unwrap();
            toy::assert_same(&found, &expected, &job);
            // What it has beside its commit is free for the next job.
            swapper.close().unwrap();
        }
    }
}

#[test]
fn a_step_whose_updates_begin_within_it_moves_the_bytes_of_another_one() {
    let dir = tempfile::tempdir().unwrap();
    let daemon = start(dir.path());
    let written_by = |parts: &[usize]| -> Vec<u64> {
        let settings = SwapperSettings {
            schedule: Schedule::Deferred,
            ..settings(&daemon, &format!("{}-parts", parts.len()))
        };
        let (mut swapper, ..) = toy::open(&settings).unwrap();
        let step = |step| {
            let joins = !parts.is_empty();
            let io = toy::train_step_in_parts(&mut swapper, step, parts, joins).unwrap();
            swapper.drain().unwrap();
            io.written_bytes - io.grad_written_bytes
        };
        let written = (1..=4).map(step).collect();
        drop(swapper);
        let (mut swapper, _, step) = toy::open(&settings).unwrap();
        let found = toy::contents(&mut swapper).unwrap();
        toy::assert_same(&found, &toy::reference(4), &format!("step {step}"));
        written
    };
    let all: Vec<usize> = (1..=toy::UNITS.len()).collect();
    assert_eq!(written_by(&all)[1..], written_by(&[])[1..]);
}

#[test]
fn a_step_in_passes_is_committed_with_the_blob_that_comes_after_it() {
    let dir = tempfile::tempdir().unwrap();
    let daemon = start(dir.path());
    for schedule in [Schedule::Immediate, Schedule::Deferred] {
        let settings = SwapperSettings {
            schedule,
            ..settings(&daemon, &format!("{schedule:?}"))
        };
        let (mut swapper, ..) = toy::open(&settings).unwrap();
        for step in 1..=3 {
            toy::train_step_in_passes(&mut swapper, step).unwrap();
        }
        if schedule == Schedule::Deferred {
            // The third step's updates have at most begun; a pass over all units runs them, and the commit follows.
            swapper
                .begin_pass(StepProgram::reading(0..toy::UNITS.len()))
                .unwrap();
            for unit in 0..toy::UNITS.len() {
                swapper.gather(unit, toy::ignore_parts).unwrap();
            }
            swapper.drain().unwrap();
        }
        drop(swapper);
        let (mut swapper, _, step) = toy::open(&settings).unwrap();
        assert_eq!(
            step, 3,
            "{schedule:?}: at once, nothing but the seal commits"
        );
        let found = toy::contents(&mut swapper).unwrap();
        toy::assert_same(&found, &toy::reference(3), &format!("{schedule:?}"));
    }
}

#[test]
fn gradients_that_do_not_stay_move_as_planned_and_take_no_room_afterwards() {
    let dir = tempfile::tempdir().unwrap();
    let daemon = start(dir.path());
    let expected = toy::reference(3);
    for schedule in [Schedule::Immediate, Schedule::Deferred] {
        for grad_fraction in [0.0, 0.5] {
            let job = format!("grads-{schedule:?}-{}", grad_fraction > 0.0);
            let settings = SwapperSettings {
                schedule,
                grad_fraction,
                ..settings(&daemon, &job)
            };
            let plan = settings.plan().unwrap();
            let planned = settings.step_bytes().unwrap().grad_written_bytes;
            assert!(planned > 0.0 && plan.scratch_bytes == planned as u64);
            // Gradients that stay in staging from the end of backward to their update are not read, and perhaps not even written.
            let kept = f64::from(plan.grad_staging_count) * plan.grad_slot_bytes as f64;
            let (mut swapper, ..) = toy::open(&settings).unwrap();
            let free = swapper::Daemon::connect(daemon.socket()).unwrap();
            let reserved: u64 = free.info().devices.iter().map(|d| d.free_bytes).sum();
            for step in 1..=3 {
                let io = toy::train_step(&mut swapper, step).unwrap();
                let written = io.grad_written_bytes as f64;
                // A step ends when its gradients have arrived; writes of the last ones are counted in the next step.
                let late = if step == 1 { 0.0 } else { kept };
                assert!(
                    (planned - kept..=planned + late).contains(&written),
                    "{job}: {written} of {planned} bytes written in step {step}"
                );
                assert!(io.grad_read_bytes as f64 <= planned + kept);
            }
            let found = toy::contents(&mut swapper).unwrap();
            toy::assert_same(&found, &expected, &job);
            swapper.close().unwrap();
            let free = swapper::Daemon::connect(daemon.socket()).unwrap();
            let after: u64 = free.info().devices.iter().map(|d| d.free_bytes).sum();
            assert_eq!(after, reserved + plan.scratch_bytes);
        }
    }
}

#[test]
fn a_step_at_once_moves_what_the_formula_says() {
    let dir = tempfile::tempdir().unwrap();
    let daemon = start(dir.path());
    let settings = SwapperSettings {
        schedule: Schedule::Immediate,
        grad_fraction: 1.0,
        ..settings(&daemon, "bytes")
    };
    let bytes = settings.step_bytes().unwrap();
    let staging_bytes = settings.plan().unwrap().staging_bytes() as f64;
    let (mut swapper, ..) = toy::open(&settings).unwrap();
    for step in 1..=4 {
        let io = toy::train_step(&mut swapper, step).unwrap();
        assert_eq!(io.written_bytes as f64, bytes.written_bytes, "step {step}");
        // Tiles read ahead for the next step or kept from the one before: at most the staging slots, in either case.
        let kept = bytes.read_bytes() - io.read_bytes as f64;
        assert!(
            kept.abs() <= staging_bytes,
            "step {step}: {kept} bytes less"
        );
        assert_eq!(io.generation, step + 1, "filled tiles are generation 1");
    }
}

#[test]
fn spans_tell_what_a_step_moved_and_updated_and_nothing_is_kept_unasked() {
    let dir = tempfile::tempdir().unwrap();
    let daemon = start(dir.path());
    for schedule in [Schedule::Immediate, Schedule::Deferred] {
        let settings = SwapperSettings {
            schedule,
            ..settings(&daemon, &format!("spans-{schedule:?}"))
        };
        let (mut swapper, ..) = toy::open(&settings).unwrap();
        toy::train_step(&mut swapper, 1).unwrap();
        assert_eq!(swapper.take_spans(), Spans::default());
        swapper.record_spans(true).unwrap();
        // I/O between two steps is counted for the second one.
        let started = Instant::now();
        toy::train_step(&mut swapper, 2).unwrap();
        swapper.take_spans();
        let io = toy::train_step(&mut swapper, 3).unwrap();
        let spans = swapper.take_spans().list;
        swapper.record_spans(false).unwrap();
        let of = |kind: SpanKind| spans.iter().filter(move |span| span.kind == kind);
        let sum = |kind| of(kind).map(|span| span.bytes).sum::<u64>();
        assert_eq!(sum(SpanKind::Read), io.read_bytes, "{schedule:?}");
        assert_eq!(sum(SpanKind::Write), io.written_bytes, "{schedule:?}");
        assert_eq!(of(SpanKind::Read).count() as u64, io.read_count);
        let ranges = swapper.layout().ranges().to_vec();
        let mut updated: Vec<_> = of(SpanKind::Update)
            .map(|span| (span.unit.unwrap(), span.elems.start))
            .collect();
        updated.sort_unstable();
        let all = ranges.iter().map(|range| (range.unit, range.elems.start));
        assert_eq!(updated, all.collect::<Vec<_>>(), "{schedule:?}");
        // With deferred updates, the commit of the previous step may still be running.
        let commits = of(SpanKind::Commit).count();
        assert!(commits == 1 || schedule == Schedule::Deferred, "{commits}");
        let units = toy::UNITS.len();
        assert_eq!(of(SpanKind::Gather).count(), 2 * units);
        assert_eq!(of(SpanKind::Scatter).count(), units);
        for span in &spans {
            // The transfers of a deferred step may have begun before it.
            assert!(span.start <= span.end && span.end >= started && span.end <= Instant::now());
        }
        toy::train_step(&mut swapper, 4).unwrap();
        assert_eq!(swapper.take_spans(), Spans::default());
        swapper.close().unwrap();
    }
}

#[test]
fn after_kill_9_of_the_daemon_the_last_committed_step_comes_back() {
    let dir = tempfile::tempdir().unwrap();
    let mut daemon = start(dir.path());
    let mut step = 0;
    for kill in 0..5u64 {
        let settings = SwapperSettings {
            schedule: [Schedule::Deferred, Schedule::Immediate][kill as usize % 2],
            ..settings(&daemon, "killed")
        };
        let (mut swapper, ..) = toy::open(&settings).unwrap();
        let pid = daemon.pid().to_string();
        let killer = std::thread::spawn(move || {
            std::thread::sleep(Duration::from_millis(10 + 23 * kill));
            let killed = Command::new("kill").args(["-9", &pid]).status();
            assert!(killed.unwrap().success());
            Instant::now()
        });
        let mut acknowledged = step;
        let failed = loop {
            match toy::train_step(&mut swapper, step + 1) {
                Ok(io) => {
                    step += 1;
                    // Generation 1 holds the filled tiles, and every step commits.
                    acknowledged = acknowledged.max(io.generation - 1);
                }
                Err(error) => break error,
            }
        };
        let waited = killer.join().unwrap().elapsed();
        assert!(waited < SOON, "{waited:?} for {failed}");
        assert!(matches!(failed, SwapperError::Client { .. }), "{failed}");
        drop(swapper);
        drop(daemon);

        daemon = start(dir.path());
        let (mut swapper, _, resumed) = toy::open(&self::settings(&daemon, "killed")).unwrap();
        // A step may be committed although its acknowledgement, or its last call, was lost.
        assert!(
            (acknowledged..=step + 1).contains(&resumed),
            "step {step} was finished, {acknowledged} acknowledged, {resumed} came back"
        );
        let found = toy::contents(&mut swapper).unwrap();
        toy::assert_same(&found, &toy::reference(resumed), "after kill -9");
        swapper.close().unwrap();
        step = resumed;
    }
}

#[test]
fn a_second_drain_commits_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let daemon = start(dir.path());
    let settings = SwapperSettings {
        commit_every: 0,
        ..settings(&daemon, "drains")
    };
    let (mut swapper, ..) = toy::open(&settings).unwrap();
    let io = toy::train_step(&mut swapper, 1).unwrap();
    assert_eq!(io.generation, 1, "only a drain commits");
    for _ in 0..3 {
        swapper.drain().unwrap();
    }
    let io = toy::train_step(&mut swapper, 2).unwrap();
    assert_eq!(io.generation, 2);
}

#[test]
fn without_durability_an_orderly_end_comes_back_and_a_crash_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let mut daemon = start(dir.path());
    let in_place = |daemon: &PrivateDaemon| {
        // Commits only in drains, so that a crash while training is a crash between commits.
        let mut settings = SwapperSettings {
            commit_every: 0,
            ..settings(daemon, "in-place")
        };
        if let Backing::Store(store) = &mut settings.backing {
            store.durability = Durability::None;
        }
        settings
    };
    let (mut swapper, ..) = toy::open(&in_place(&daemon)).unwrap();
    toy::train_step(&mut swapper, 1).unwrap();
    swapper.drain().unwrap();
    swapper.close().unwrap();
    let (mut swapper, _, step) = toy::open(&in_place(&daemon)).unwrap();
    assert_eq!(step, 1);
    let found = toy::contents(&mut swapper).unwrap();
    toy::assert_same(&found, &toy::reference(1), "written in place");

    let pid = daemon.pid().to_string();
    let dead = std::cell::Cell::new(false);
    let failed = (2..1000).find_map(|step| {
        let result = toy::train_step(&mut swapper, step);
        if step == 3 && !dead.replace(true) {
            let killed = Command::new("kill").args(["-9", &pid]).status();
            assert!(killed.unwrap().success());
        }
        result.err()
    });
    assert!(failed.is_some());
    drop(swapper);
    drop(daemon);
    daemon = start(dir.path());
    let refused = Swapper::open(in_place(&daemon), toy::workers());
    let error = refused.map(drop).unwrap_err();
    assert!(matches!(error, SwapperError::Client { .. }), "{error}");
    assert!(error.to_string().contains("durability"), "{error}");
}

#[test]
fn two_ranks_share_a_job_and_commit_together() {
    let dir = tempfile::tempdir().unwrap();
    let daemon = start(dir.path());
    for (from, to) in [(0, 2), (2, 3)] {
        std::thread::scope(|scope| {
            for rank in 0..2 {
                let settings = SwapperSettings {
                    rank,
                    ranks: 2,
                    ..settings(&daemon, "two-ranks")
                };
                scope.spawn(move || {
                    let (mut swapper, _, step) = toy::open(&settings).unwrap();
                    assert_eq!(step, from, "rank {rank} resumes where both were");
                    for step in from + 1..=to {
                        toy::train_step(&mut swapper, step).unwrap();
                    }
                    let found = toy::contents(&mut swapper).unwrap();
                    let expected = toy::reference_of(to, rank, 2);
                    toy::assert_same(&found, &expected, &format!("rank {rank}"));
                    swapper.close().unwrap();
                });
            }
        });
    }
}

#[test]
fn a_job_resumes_with_any_number_of_ranks() {
    let dir = tempfile::tempdir().unwrap();
    let daemon = start(dir.path());
    // With three ranks a unit belongs to the first rank alone, and the last of four ranks owns nothing.
    for (from, ranks) in [(0, 1), (2, 3), (4, 2), (6, 4), (8, 1)] {
        std::thread::scope(|scope| {
            for rank in 0..ranks {
                let settings = SwapperSettings {
                    rank,
                    ranks,
                    ..settings(&daemon, "any-ranks")
                };
                scope.spawn(move || {
                    let (mut swapper, _, step) = toy::open(&settings).unwrap();
                    assert_eq!(step, from, "rank {rank} of {ranks}");
                    for step in from + 1..=from + 2 {
                        toy::train_step(&mut swapper, step).unwrap();
                    }
                    let found = toy::contents(&mut swapper).unwrap();
                    let expected = toy::reference_of(from + 2, rank, ranks);
                    toy::assert_same(&found, &expected, &format!("rank {rank} of {ranks}"));
                    swapper.close().unwrap();
                });
            }
        });
    }
}

#[test]
fn a_commit_that_waits_for_another_rank_can_be_cancelled() {
    let dir = tempfile::tempdir().unwrap();
    let daemon = start(dir.path());
    std::thread::scope(|scope| {
        let settings = |rank| SwapperSettings {
            rank,
            ranks: 2,
            ..settings(&daemon, "cancelled")
        };
        let (other, this) = (settings(1), settings(0));
        let other = scope.spawn(move || toy::open(&other).unwrap());
        let (mut swapper, ..) = toy::open(&this).unwrap();
        // The other rank is open, but takes no step.
        let other = other.join().unwrap();
        let canceller = swapper.canceller();
        let since = Instant::now();
        scope.spawn(move || {
            std::thread::sleep(Duration::from_millis(300));
            canceller.cancel("rank 1 does not answer".into());
        });
        toy::train_step(&mut swapper, 1).unwrap();
        let error = swapper.drain().unwrap_err();
        assert!(since.elapsed() < SOON);
        assert_eq!(error.to_string(), "rank 1 does not answer");
        assert!(matches!(swapper.drain(), Err(SwapperError::Stopped)));
        drop(other);
    });
}

#[test]
fn a_daemon_that_hangs_is_an_error_and_no_hang() {
    let dir = tempfile::tempdir().unwrap();
    let daemon = start(dir.path());
    let (mut swapper, ..) = toy::open(&settings(&daemon, "hangs")).unwrap();
    toy::train_step(&mut swapper, 1).unwrap();
    swapper.drain().unwrap();
    swapper.set_stall_max(Duration::from_millis(300)).unwrap();
    send(&daemon, "-STOP");
    let since = Instant::now();
    let error = toy::train_step(&mut swapper, 2).unwrap_err();
    let waited = since.elapsed();
    send(&daemon, "-CONT");
    assert!(matches!(error, SwapperError::Stalled { .. }), "{error}");
    for device in devices(dir.path()) {
        let device = device.display().to_string();
        assert!(error.to_string().contains(&device), "{error}");
    }
    assert!(waited < SOON, "{waited:?}");
}

#[test]
fn another_layout_is_refused_in_words() {
    let dir = tempfile::tempdir().unwrap();
    let daemon = start(dir.path());
    let first = settings(&daemon, "layout");
    let (swapper, ..) = toy::open(&first).unwrap();
    swapper.close().unwrap();
    let described = SwapperSettings {
        layout: b"another model".to_vec(),
        ..first.clone()
    };
    let cut = SwapperSettings {
        tile_elems: 4096,
        ..first
    };
    for (other, words) in [(described, "layout description"), (cut, "tile_elems")] {
        match Swapper::open(other, toy::workers()) {
            Err(SwapperError::LayoutChanged { what, .. }) => {
                assert!(what.contains(words), "{what}")
            }
            Err(other) => panic!("{other}"),
            Ok(_) => panic!("another layout was accepted"),
        }
    }
}

#[test]
fn a_damaged_tile_is_named_and_never_handed_out() {
    let dir = tempfile::tempdir().unwrap();
    let daemon = start(dir.path());
    let (mut swapper, ..) = toy::open(&settings(&daemon, "damaged")).unwrap();
    toy::train_step(&mut swapper, 1).unwrap();
    swapper.drain().unwrap();
    swapper.close().unwrap();
    drop(daemon);

    // The second device holds only tiles after its first MiB: flips one byte in each block.
    let device = std::fs::File::options()
        .read(true)
        .write(true)
        .open(&devices(dir.path())[1])
        .unwrap();
    let mut byte = [0];
    for offset in ((1 << 20)..DEVICE_BYTES).step_by(4096) {
        device.read_exact_at(&mut byte, offset + 77).unwrap();
        device.write_all_at(&[byte[0] ^ 4], offset + 77).unwrap();
    }
    drop(device);

    let daemon = start(dir.path());
    let (mut swapper, _, step) = toy::open(&settings(&daemon, "damaged")).unwrap();
    assert_eq!(step, 1);
    let expected = toy::reference(1);
    let mut seen = 0;
    let error = swapper
        .visit(&mut |range, param, state| {
            let (of, expected_param, expected_state) = &expected[seen];
            assert!(of == range && expected_param == param && expected_state == state);
            seen += 1;
        })
        .unwrap_err();
    assert!(
        matches!(
            &error,
            SwapperError::Tile {
                doing: "reading",
                source: TileError::Damaged { device, .. },
                ..
            } if device.ends_with("b.tiles")
        ),
        "{error}"
    );
    assert!(matches!(swapper.drain(), Err(SwapperError::Stopped)));
}

#[test]
fn a_swapper_dropped_like_a_crash_loses_what_was_not_committed_and_no_more() {
    let dir = tempfile::tempdir().unwrap();
    let daemon = start(dir.path());
    let settings = SwapperSettings {
        commit_every: 2,
        ..settings(&daemon, "dropped")
    };
    let (mut swapper, ..) = toy::open(&settings).unwrap();
    for step in 1..=3 {
        toy::train_step(&mut swapper, step).unwrap();
    }
    drop(swapper);
    let (mut swapper, _, resumed) = reopen(&settings);
    assert!(
        resumed == 0 || resumed == 2,
        "step {resumed} was never to be committed"
    );
    let found = toy::contents(&mut swapper).unwrap();
    toy::assert_same(&found, &toy::reference(resumed), "after a drop");
}

/// Opens again. A dropped session ends when its I/O has ended; until then its rank is busy.
fn reopen(settings: &SwapperSettings) -> (Swapper<u64>, swapper::OpenReport, u64) {
    let since = Instant::now();
    loop {
        match toy::open(settings) {
            Ok(opened) => return opened,
            Err(error) if since.elapsed() > SOON => panic!("{error}"),
            Err(_) => std::thread::sleep(Duration::from_millis(20)),
        }
    }
}
