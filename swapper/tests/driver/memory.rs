//! Tests without a daemon.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, mpsc};
use std::time::Instant;

use swapper::{
    Backing, Op, Schedule, StepProgram, Swapper, SwapperError, SwapperSettings, TileUpdate,
};

use crate::toy::{self, UNITS};

fn settings(schedule: Schedule) -> SwapperSettings {
    SwapperSettings {
        schedule,
        ..toy::settings(Backing::Memory)
    }
}

#[test]
fn both_schedules_train_as_plain_vectors_do() {
    for schedule in [Schedule::Immediate, Schedule::Deferred] {
        let (mut swapper, opened, _) = toy::open(&settings(schedule)).unwrap();
        assert_eq!((opened.engine.as_str(), opened.resumed), ("memory", None));
        for step in 1..=4 {
            let io = toy::train_step(&mut swapper, step).unwrap();
            assert_eq!((io.read_bytes, io.written_bytes), (0, 0));
        }
        let found = toy::contents(&mut swapper).unwrap();
        toy::assert_same(&found, &toy::reference(4), &format!("{schedule:?}"));
        swapper.close().unwrap();
    }
}

#[test]
fn passes_of_a_step_add_up() {
    for schedule in [Schedule::Immediate, Schedule::Deferred] {
        let (mut swapper, ..) = toy::open(&settings(schedule)).unwrap();
        for step in 1..=3 {
            toy::train_step_in_passes(&mut swapper, step).unwrap();
        }
        let found = toy::contents(&mut swapper).unwrap();
        toy::assert_same(&found, &toy::reference(3), &format!("{schedule:?}"));
    }
}

#[test]
fn updates_that_begin_within_a_step_change_no_bit() {
    for schedule in [Schedule::Immediate, Schedule::Deferred] {
        let (mut swapper, ..) = toy::open(&settings(schedule)).unwrap();
        for (step, (parts, joins)) in (1..).zip([(1, true), (1, false), (2, true), (2, false)]) {
            let parts: Vec<usize> = (1..=UNITS.len()).step_by(parts).collect();
            toy::train_step_in_parts(&mut swapper, step, &parts, joins).unwrap();
        }
        let found = toy::contents(&mut swapper).unwrap();
        toy::assert_same(&found, &toy::reference(4), &format!("{schedule:?}"));
    }
}

#[test]
fn a_step_whose_updates_have_begun_is_finished_first() {
    let (mut swapper, ..) = toy::open(&settings(Schedule::Deferred)).unwrap();
    let scatter = StepProgram::new(vec![Op::Scatter { unit: 1 }]).unwrap();
    let refused = |result: Result<(), SwapperError>, why: &str| match result {
        Err(SwapperError::Program { what }) => assert!(what.contains(why), "{what}"),
        other => panic!("{other:?} where it says: {why}"),
    };
    swapper.begin_step(scatter.clone()).unwrap();
    swapper.scatter(1, toy::all(7)).unwrap();
    refused(swapper.begin_updates(None), "bring its hyperparameters");
    refused(swapper.finish_begun().map(drop), "no update of this step");
    swapper.begin_updates(Some(1)).unwrap();
    refused(swapper.begin_updates(Some(1)), "bring its hyperparameters");
    swapper.begin_pass(scatter.clone()).unwrap();
    refused(swapper.scatter(1, toy::all(7)), "takes no more gradients");
    refused(swapper.begin_step(scatter), "finish it first");
    refused(swapper.skip_step(toy::blob(1)).map(drop), "finish it first");
    refused(swapper.seal(toy::blob(1)), "finish it first");
    refused(swapper.drain(), "finish it first");
    refused(
        swapper.visit_units(&[1], &mut |_, _, _| {}),
        "finish it first",
    );
    refused(swapper.begin_rewrite(&[1], toy::blob(1)), "finish it first");
    swapper.finish_begun().unwrap();
    swapper.seal(toy::blob(1)).unwrap();
    swapper.drain().unwrap();
}

#[test]
fn evaluation_sees_the_last_step_and_changes_nothing() {
    let (mut swapper, ..) = toy::open(&settings(Schedule::Deferred)).unwrap();
    toy::train_step(&mut swapper, 1).unwrap();
    swapper.drain().unwrap();
    let mut seen = Vec::new();
    for _ in 0..2 {
        swapper
            .begin_step(StepProgram::reading(0..UNITS.len()))
            .unwrap();
        seen.clear();
        for unit in 0..UNITS.len() {
            swapper
                .gather(unit, |parts| {
                    seen.extend(parts.iter().map(|(_, param)| param.to_vec()));
                    Ok::<(), SwapperError>(())
                })
                .unwrap();
        }
    }
    let expected = toy::reference(1);
    assert!(seen.iter().eq(expected.iter().map(|(_, param, _)| param)));
    toy::train_step(&mut swapper, 2).unwrap();
    let found = toy::contents(&mut swapper).unwrap();
    toy::assert_same(&found, &toy::reference(2), "after evaluation");
}

#[test]
fn a_skipped_step_changes_no_tile() {
    let (mut swapper, ..) = toy::open(&settings(Schedule::Deferred)).unwrap();
    toy::train_step(&mut swapper, 1).unwrap();
    swapper
        .begin_step(StepProgram::training(UNITS.len()))
        .unwrap();
    for unit in 0..UNITS.len() {
        swapper.gather(unit, toy::ignore_parts).unwrap();
    }
    for unit in (0..UNITS.len()).rev() {
        swapper.gather(unit, toy::ignore_parts).unwrap();
        swapper.scatter(unit, toy::all(0xFF)).unwrap();
    }
    swapper.skip_step(toy::blob(2)).unwrap();
    let found = toy::contents(&mut swapper).unwrap();
    toy::assert_same(&found, &toy::reference(1), "a step that overflowed");
}

#[test]
fn what_was_saved_can_be_filled_in_again() {
    let (mut swapper, ..) = toy::open(&settings(Schedule::Immediate)).unwrap();
    toy::train_step(&mut swapper, 1).unwrap();
    let saved = toy::contents(&mut swapper).unwrap();
    swapper.close().unwrap();

    let (mut swapper, _) = Swapper::open(settings(Schedule::Deferred), toy::workers()).unwrap();
    let mut next = saved.iter();
    swapper
        .initialize(
            |blanks| {
                for blank in blanks {
                    let (of, saved_param, saved_state) = next.next().unwrap();
                    assert_eq!(of, blank.range);
                    blank.param.copy_from_slice(saved_param);
                    blank.state.copy_from_slice(saved_state);
                }
                Ok::<(), SwapperError>(())
            },
            toy::blob(1),
        )
        .unwrap();
    toy::train_step(&mut swapper, 2).unwrap();
    let found = toy::contents(&mut swapper).unwrap();
    toy::assert_same(&found, &toy::reference(2), "a restored run");
}

#[test]
fn calls_out_of_order_are_refused_and_harm_nothing() {
    let (mut swapper, _) = Swapper::open(settings(Schedule::Immediate), toy::workers()).unwrap();
    assert!(matches!(
        swapper.begin_step(StepProgram::training(UNITS.len())),
        Err(SwapperError::NotInitialized)
    ));
    swapper.initialize(toy::fill_all, toy::blob(0)).unwrap();
    assert!(matches!(
        swapper.begin_step(StepProgram::reading([UNITS.len()])),
        Err(SwapperError::Program { .. })
    ));
    swapper.begin_step(StepProgram::reading([1])).unwrap();
    let refused = swapper.gather(0, |_| -> Result<(), SwapperError> {
        panic!("lent out of order")
    });
    assert!(matches!(
        refused,
        Err(SwapperError::OutOfOrder {
            asked: Op::Gather { unit: 0 },
            announced: Some(Op::Gather { unit: 1 }),
        })
    ));
    swapper.gather(1, toy::ignore_parts).unwrap();
    toy::train_step(&mut swapper, 1).unwrap();
    let found = toy::contents(&mut swapper).unwrap();
    toy::assert_same(&found, &toy::reference(1), "after refusals");
}

#[test]
fn an_optimizer_that_panics_ends_the_swapper_with_its_message() {
    for schedule in [Schedule::Immediate, Schedule::Deferred] {
        let broken = |tile: TileUpdate<'_>, step: &u64| {
            assert!(*step < 2 || tile.range.unit != 2, "unit 2 overflowed");
            toy::update(tile, step);
        };
        let (mut swapper, _) = Swapper::open(settings(schedule), vec![Box::new(broken)]).unwrap();
        swapper.initialize(toy::fill_all, toy::blob(0)).unwrap();
        let error = (1..=3)
            .find_map(|step| toy::train_step(&mut swapper, step).err())
            .unwrap();
        assert!(
            matches!(&error, SwapperError::UpdatePanicked { unit: 2, message, .. }
                if message.contains("overflowed")),
            "{error}"
        );
        assert!(matches!(swapper.drain(), Err(SwapperError::Stopped)));
    }
}

#[test]
fn an_interrupted_wait_ends_and_the_step_it_left_counts() {
    for schedule in [Schedule::Immediate, Schedule::Deferred] {
        let (go_on, held) = mpsc::channel::<()>();
        let held = Arc::new(Mutex::new(held));
        let blocked = move |tile: TileUpdate<'_>, step: &u64| {
            if *step == 2 && tile.range.unit == 2 && tile.range.elems.start == 0 {
                held.lock().unwrap().recv().unwrap();
            }
            toy::update(tile, step);
        };
        let (mut swapper, _) = Swapper::open(settings(schedule), vec![Box::new(blocked)]).unwrap();
        swapper.initialize(toy::fill_all, toy::blob(0)).unwrap();
        let asked = Arc::new(AtomicBool::new(false));
        let asks = asked.clone();
        swapper.set_interrupt(move || asks.swap(false, Ordering::SeqCst));
        toy::train_step(&mut swapper, 1).unwrap();
        asked.store(true, Ordering::SeqCst);
        // At once, the step's end waits for its updates; deferred, the next forward does.
        let left = match toy::train_step(&mut swapper, 2) {
            Ok(_) => swapper.drain().map(|()| panic!("an update is blocked")),
            Err(error) => Err::<(), _>(error),
        };
        assert!(matches!(left, Err(SwapperError::Interrupted)), "{left:?}");
        // Another interrupt while the next call waits for the one that was left.
        asked.store(true, Ordering::SeqCst);
        let left = swapper.drain();
        assert!(matches!(left, Err(SwapperError::Interrupted)), "{left:?}");
        go_on.send(()).unwrap();
        toy::train_step(&mut swapper, 3).unwrap();
        let found = toy::contents(&mut swapper).unwrap();
        toy::assert_same(&found, &toy::reference(3), &format!("{schedule:?}"));
    }
}

#[test]
fn an_interrupted_scatter_can_only_be_begun_again() {
    let (go_on, held) = mpsc::channel::<()>();
    let held = Arc::new(Mutex::new(held));
    let blocked = move |tile: TileUpdate<'_>, step: &u64| {
        if *step == 1 && tile.range.unit == 0 && tile.range.elems.start == 0 {
            held.lock().unwrap().recv().unwrap();
        }
        toy::update(tile, step);
    };
    let settings = settings(Schedule::Deferred);
    let (mut swapper, _) = Swapper::open(settings, vec![Box::new(blocked)]).unwrap();
    swapper.initialize(toy::fill_all, toy::blob(0)).unwrap();
    toy::train_step(&mut swapper, 1).unwrap();
    let scatter = StepProgram::new(vec![Op::Scatter { unit: 0 }]).unwrap();
    // The scatter waits for the update of the same unit.
    swapper.begin_step(scatter.clone()).unwrap();
    swapper.set_interrupt(|| true);
    let left = swapper.scatter(0, toy::all(7));
    assert!(matches!(left, Err(SwapperError::Interrupted)), "{left:?}");
    swapper.set_interrupt(|| false);
    go_on.send(()).unwrap();
    let torn = "a scatter of this step was interrupted: begin the step again";
    for refused in [
        swapper.begin_pass(scatter).unwrap_err(),
        swapper.finish_step(2, toy::blob(2)).unwrap_err(),
    ] {
        assert!(refused.to_string().ends_with(torn), "{refused}");
    }
    toy::train_step(&mut swapper, 2).unwrap();
    let found = toy::contents(&mut swapper).unwrap();
    toy::assert_same(&found, &toy::reference(2), "after the interrupt");
}

#[test]
fn a_caller_that_fails_gets_its_own_error_and_nothing_more() {
    #[derive(Debug)]
    enum Error {
        Ours,
        Swapper(SwapperError),
    }
    impl From<SwapperError> for Error {
        fn from(error: SwapperError) -> Self {
            Self::Swapper(error)
        }
    }
    let (mut swapper, ..) = toy::open(&settings(Schedule::Deferred)).unwrap();
    swapper
        .begin_step(StepProgram::training(UNITS.len()))
        .unwrap();
    let failed = swapper.gather(0, |_| Err(Error::Ours));
    assert!(matches!(failed, Err(Error::Ours)), "{failed:?}");
    let after = swapper.gather(1, |_| Err(Error::Ours));
    assert!(
        matches!(after, Err(Error::Swapper(SwapperError::Stopped))),
        "{after:?}"
    );
}

#[test]
fn a_program_left_early_still_updates_what_was_scattered() {
    let (mut swapper, ..) = toy::open(&settings(Schedule::Deferred)).unwrap();
    toy::train_step(&mut swapper, 1).unwrap();
    swapper
        .begin_step(StepProgram::training(UNITS.len()))
        .unwrap();
    swapper.gather(0, toy::ignore_parts).unwrap();
    swapper.finish_step(2, toy::blob(2)).unwrap();
    let found = toy::contents(&mut swapper).unwrap();
    toy::assert_same(
        &found,
        &toy::reference(1),
        "nothing was scattered in step 2",
    );
}

#[test]
fn a_pass_that_is_never_finished_changes_nothing() {
    let (mut swapper, ..) = toy::open(&settings(Schedule::Immediate)).unwrap();
    let scatter = StepProgram::new(vec![Op::Scatter { unit: 1 }]).unwrap();
    swapper.begin_step(scatter).unwrap();
    swapper.scatter(1, toy::all(7)).unwrap();
    toy::train_step(&mut swapper, 1).unwrap();
    let found = toy::contents(&mut swapper).unwrap();
    toy::assert_same(&found, &toy::reference(1), "after a pass given up");
}

#[test]
fn lending_a_tile_costs_microseconds() {
    let (mut swapper, ..) = toy::open(&settings(Schedule::Deferred)).unwrap();
    let (mut lent, mut calls) = (0u64, 0u64);
    let since = Instant::now();
    for _ in 0..200 {
        swapper
            .begin_step(StepProgram::reading(0..UNITS.len()))
            .unwrap();
        for unit in 0..UNITS.len() {
            swapper
                .gather(unit, |parts| {
                    lent += parts.len() as u64;
                    Ok::<(), SwapperError>(())
                })
                .unwrap();
            calls += 1;
        }
    }
    let elapsed = since.elapsed();
    println!(
        "{} ns a tile, {} ns a call of {} tiles",
        elapsed.as_nanos() as u64 / lent,
        elapsed.as_nanos() as u64 / calls,
        lent / calls
    );
    assert!(
        elapsed.as_micros() as u64 / lent < 1000,
        "{elapsed:?} for {lent} tiles"
    );
}
