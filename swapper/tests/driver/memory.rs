//! Without a daemon.

use std::time::Instant;

use swapper::{
    Backing, Op, Schedule, StepProgram, Swapper, SwapperError, SwapperSettings, TileRange,
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
    for schedule in [Schedule::AtOnce, Schedule::Deferred] {
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
                .gather(unit, &mut |_, param| seen.push(param.to_vec()))
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
        swapper.gather(unit, &mut |_, _| {}).unwrap();
    }
    for unit in (0..UNITS.len()).rev() {
        swapper.gather(unit, &mut |_, _| {}).unwrap();
        swapper
            .scatter(unit, &mut |_, grad| grad.fill(0xFF))
            .unwrap();
    }
    swapper.skip_step(toy::blob(2)).unwrap();
    let found = toy::contents(&mut swapper).unwrap();
    toy::assert_same(&found, &toy::reference(1), "a step that overflowed");
}

#[test]
fn what_was_saved_can_be_filled_in_again() {
    let (mut swapper, ..) = toy::open(&settings(Schedule::AtOnce)).unwrap();
    toy::train_step(&mut swapper, 1).unwrap();
    let saved = toy::contents(&mut swapper).unwrap();
    swapper.close().unwrap();

    let (mut swapper, _) = Swapper::open(settings(Schedule::Deferred), toy::update).unwrap();
    let mut next = saved.iter();
    swapper
        .initialize(
            &mut |range, param, state| {
                let (of, saved_param, saved_state) = next.next().unwrap();
                assert_eq!(of, range);
                param.copy_from_slice(saved_param);
                state.copy_from_slice(saved_state);
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
    let (mut swapper, _) = Swapper::open(settings(Schedule::AtOnce), toy::update).unwrap();
    assert!(matches!(
        swapper.begin_step(StepProgram::training(UNITS.len())),
        Err(SwapperError::NotInitialized)
    ));
    swapper.initialize(&mut toy::fill, toy::blob(0)).unwrap();
    assert!(matches!(
        swapper.begin_step(StepProgram::reading([UNITS.len()])),
        Err(SwapperError::Program { .. })
    ));
    swapper.begin_step(StepProgram::reading([1])).unwrap();
    let refused = swapper.gather(0, &mut |_, _| panic!("lent out of order"));
    assert!(matches!(
        refused,
        Err(SwapperError::OutOfOrder {
            asked: Op::Gather { unit: 0 },
            announced: Some(Op::Gather { unit: 1 }),
        })
    ));
    swapper.gather(1, &mut |_, _| {}).unwrap();
    toy::train_step(&mut swapper, 1).unwrap();
    let found = toy::contents(&mut swapper).unwrap();
    toy::assert_same(&found, &toy::reference(1), "after refusals");
}

#[test]
fn an_optimizer_that_panics_ends_the_swapper_with_its_message() {
    for schedule in [Schedule::AtOnce, Schedule::Deferred] {
        let broken =
            |range: &TileRange, param: &mut [u8], state: &mut [u8], grad: &[u8], step: &u64| {
                assert!(*step < 2 || range.unit != 2, "unit 2 overflowed");
                toy::update(range, param, state, grad, step);
            };
        let (mut swapper, _) = Swapper::open(settings(schedule), broken).unwrap();
        swapper.initialize(&mut toy::fill, toy::blob(0)).unwrap();
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
fn a_program_left_early_still_updates_what_was_scattered() {
    let (mut swapper, ..) = toy::open(&settings(Schedule::Deferred)).unwrap();
    toy::train_step(&mut swapper, 1).unwrap();
    swapper
        .begin_step(StepProgram::training(UNITS.len()))
        .unwrap();
    swapper.gather(0, &mut |_, _| {}).unwrap();
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
    let (mut swapper, ..) = toy::open(&settings(Schedule::AtOnce)).unwrap();
    let scatter = StepProgram::new(vec![Op::Scatter { unit: 1 }]).unwrap();
    swapper.begin_step(scatter).unwrap();
    swapper.scatter(1, &mut |_, grad| grad.fill(7)).unwrap();
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
            swapper.gather(unit, &mut |_, _| lent += 1).unwrap();
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
