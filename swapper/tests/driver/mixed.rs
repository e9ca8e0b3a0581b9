//! Units with parameters and states of several sizes, some of them not trained, in host memory and with a daemon.

use std::ops::Range;

use swapper::{
    Backing, Durability, Layout, Op, OtherState, Revision, Schedule, StepProgram, StoreSettings,
    Swapper, SwapperError, SwapperSettings, TileBytes, TileUpdate, UnitShape,
};

use crate::store;
use crate::toy::{self, Contents, TILE_ELEMS};

/// Elements, bytes of a parameter, and whether it is trained.
const UNITS: [(u64, usize, bool); 4] = [
    (70_000, 2, true),
    (50_001, 2, false),
    (33_333, 4, true),
    (9000, 4, false),
];

/// The unit whose states are revised, and elements of it that make two of its tiles larger: the third and the last one.
const REVISED: usize = 0;
const OTHER_ELEMS: [Range<u64>; 2] = [20_000..20_001, 69_999..70_000];

fn state_bytes(unit: usize, elems: &Range<u64>) -> usize {
    let count = (elems.end - elems.start) as usize;
    let is_in = |other: &Range<u64>| other.start < elems.end && elems.start < other.end;
    let each = if unit == REVISED && OTHER_ELEMS.iter().any(is_in) {
        10
    } else {
        8
    };
    count * each + 64
}

/// What a revision makes of a state.
fn revise(state: &mut [u8], grad: &[u8]) {
    for (state, grad) in state.iter_mut().zip(grad) {
        *state = state.wrapping_mul(3) ^ grad;
    }
}

fn settings(schedule: Schedule, backing: Backing) -> SwapperSettings {
    let units = UNITS.map(|(elems, param_bytes_per_elem, trained)| UnitShape {
        elems,
        tile_bytes: TileBytes {
            param_bytes_per_elem,
            grad_bytes_per_elem: 4,
            state_tile_bytes: |elems| elems * 8 + 64,
        },
        trained,
        other_state: None,
        revised: false,
        external: false,
    });
    let mut units = units.to_vec();
    units[REVISED].other_state = Some(OtherState {
        elems: OTHER_ELEMS.into(),
        state_tile_bytes: |elems| elems * 10 + 64,
    });
    SwapperSettings {
        units,
        schedule,
        param_fraction: 0.3,
        ..toy::settings(backing)
    }
}

fn trained() -> impl Iterator<Item = usize> {
    (0..UNITS.len()).filter(|&unit| UNITS[unit].2)
}

/// All tiles after `steps` steps; the trained ones are rewritten after `rewritten` of them.
fn reference(steps: u64, rewritten: u64) -> Contents {
    trained_tiles(steps, rewritten, true)
}

/// All tiles after `steps` steps in which nothing is revised.
fn unrevised(steps: u64) -> Contents {
    trained_tiles(steps, 0, false)
}

fn trained_tiles(steps: u64, rewritten: u64, revises: bool) -> Contents {
    let settings = settings(Schedule::Immediate, Backing::Memory);
    let layout = Layout::new(&settings.units, TILE_ELEMS, 0, 1).unwrap();
    let ranges = layout.ranges().iter();
    ranges
        .map(|range| {
            let (elems, (_, param_bytes, trained)) = (
                (range.elems.end - range.elems.start) as usize,
                UNITS[range.unit],
            );
            let mut param = vec![0; elems * param_bytes];
            let state_bytes = state_bytes(range.unit, &range.elems);
            let mut state = vec![0; if trained { state_bytes } else { 0 }];
            toy::fill(range, &mut param, &mut state);
            for step in (1..=steps).filter(|_| trained) {
                let mut grad = vec![0; elems * 4];
                toy::gradient(step, &range.elems, &param, &mut grad);
                if revises && range.unit == REVISED {
                    revise(&mut state, &grad);
                    rewrite(&mut grad);
                }
                let tile = TileUpdate {
                    range,
                    param: &mut param,
                    state: &mut state,
                    grad: &grad,
                };
                toy::update(tile, &step);
                if step == rewritten {
                    rewrite(&mut param);
                }
            }
            (range.clone(), param, state)
        })
        .collect()
}

fn rewrite(param: &mut [u8]) {
    param.iter_mut().for_each(|byte| *byte ^= 0x5A);
}

fn step(swapper: &mut Swapper<u64>, step: u64) -> Result<(), SwapperError> {
    let again = [Op::Revise { unit: REVISED }, Op::Scatter { unit: REVISED }];
    scatter(swapper, step, &again)?;
    swapper.settle_updates_before(&StepProgram::new(again.to_vec())?)?;
    swapper.revise(REVISED, |parts| {
        for Revision { range, state, grad } in parts {
            assert_eq!(state.len(), state_bytes(range.unit, &range.elems));
            revise(state, grad);
        }
        Ok::<(), SwapperError>(())
    })?;
    swapper.scatter(REVISED, |parts| {
        parts.iter_mut().for_each(|(_, grad)| rewrite(grad));
        Ok::<(), SwapperError>(())
    })?;
    // Every other step, its update begins before the others'.
    if step.is_multiple_of(2) {
        swapper.update_revised(REVISED, &step, &StepProgram::default())?;
    }
    swapper.finish_step(step, toy::blob(step)).map(drop)
}

/// Gathers and scatters all units. The operations `after` are to follow.
fn scatter(swapper: &mut Swapper<u64>, step: u64, after: &[Op]) -> Result<(), SwapperError> {
    let mut ops = StepProgram::reading(0..UNITS.len()).ops().to_vec();
    ops.extend(trained().map(|unit| Op::Scatter { unit }));
    ops.extend(after);
    swapper.begin_step(StepProgram::new(ops)?)?;
    let mut params = vec![Vec::new(); UNITS.len()];
    for (unit, params) in params.iter_mut().enumerate() {
        swapper.gather(unit, |parts| {
            params.extend(parts.iter().map(|(_, bytes)| bytes.to_vec()));
            Ok::<(), SwapperError>(())
        })?;
    }
    for unit in trained() {
        let mut params = params[unit].iter();
        swapper.scatter(unit, |parts| {
            for (elems, grad) in parts {
                // Gradients take more bytes than parameters, and a slot holds what was in it.
                grad.fill(0);
                toy::gradient(step, elems, params.next().unwrap(), grad);
            }
            Ok::<(), SwapperError>(())
        })?;
    }
    Ok(())
}

fn steps(settings: &SwapperSettings, last: u64, rewritten: u64) -> Contents {
    let (mut swapper, _, done) = toy::open(settings).unwrap();
    for number in done + 1..=last {
        step(&mut swapper, number).unwrap();
        if number == rewritten {
            let units: Vec<usize> = trained().collect();
            swapper.begin_rewrite(&units, toy::blob(number)).unwrap();
            assert!(matches!(swapper.drain(), Err(SwapperError::Program { .. })));
            for unit in units {
                let written = swapper.fill(unit, |tiles| {
                    tiles.iter_mut().for_each(|tile| rewrite(tile.param));
                    Ok::<(), SwapperError>(())
                });
                written.unwrap();
            }
            swapper.end_fill().unwrap();
        }
    }
    let contents = toy::contents(&mut swapper).unwrap();
    swapper.close().unwrap();
    contents
}

#[test]
fn nothing_but_the_rest_of_a_step_follows_a_revision() {
    let settings = settings(Schedule::Deferred, Backing::Memory);
    let (mut swapper, ..) = toy::open(&settings).unwrap();
    let again = [Op::Revise { unit: REVISED }, Op::Scatter { unit: REVISED }];
    let rest = StepProgram::new(again.to_vec()).unwrap();
    scatter(&mut swapper, 1, &again).unwrap();
    swapper.settle_updates_before(&rest).unwrap();
    (swapper.revise(REVISED, |_| Ok::<(), SwapperError>(()))).unwrap();
    for refused in [
        swapper.begin_step(StepProgram::default()),
        swapper.settle_updates_before(&rest),
        swapper.skip_step(toy::blob(1)).map(drop),
        swapper.drain(),
    ] {
        let Err(SwapperError::Program { what }) = refused else {
            panic!("{refused:?}");
        };
        assert!(what.contains("start again"), "{what}");
    }
    (swapper.scatter(REVISED, |_| Ok::<(), SwapperError>(()))).unwrap();
    swapper.finish_step(1, toy::blob(1)).unwrap();
    swapper.drain().unwrap();
}

#[test]
fn mixed_units_train_in_memory_as_plain_vectors_do() {
    for schedule in [Schedule::Immediate, Schedule::Deferred] {
        let settings = settings(schedule, Backing::Memory);
        let what = format!("{schedule:?}");
        toy::assert_same(&steps(&settings, 4, 2), &reference(4, 2), &what);
    }
}

#[test]
fn mixed_units_come_back_from_devices_and_frozen_ones_are_written_once() {
    let dir = tempfile::tempdir().unwrap();
    let daemon = store::start(dir.path());
    for schedule in [Schedule::Immediate, Schedule::Deferred] {
        let what = format!("{schedule:?}");
        let backing = Backing::Store(StoreSettings {
            socket: daemon.socket().to_path_buf(),
            job: what.clone(),
            durability: Durability::Committed,
            nodes: None,
        });
        let settings = settings(schedule, backing);
        toy::assert_same(&steps(&settings, 2, 2), &reference(2, 2), &what);
        toy::assert_same(&steps(&settings, 4, 0), &reference(4, 2), &what);
    }
}

#[test]
fn a_visit_in_the_middle_of_a_step_sees_the_step_before_and_keeps_the_gradients() {
    let dir = tempfile::tempdir().unwrap();
    let daemon = store::start(dir.path());
    for schedule in [Schedule::Immediate, Schedule::Deferred] {
        let store = StoreSettings {
            socket: daemon.socket().to_path_buf(),
            job: format!("{schedule:?}"),
            durability: Durability::Committed,
            nodes: None,
        };
        for backing in [Backing::Memory, Backing::Store(store)] {
            let what = format!("{schedule:?} {backing:?}");
            let (mut swapper, ..) = toy::open(&settings(schedule, backing)).unwrap();
            for number in 1..=3 {
                scatter(&mut swapper, number, &[]).unwrap();
                let found = toy::contents(&mut swapper).unwrap();
                toy::assert_same(&found, &unrevised(number - 1), &what);
                swapper.finish_step(number, toy::blob(number)).unwrap();
            }
            let found = toy::contents(&mut swapper).unwrap();
            toy::assert_same(&found, &unrevised(3), &what);
            swapper.close().unwrap();
        }
    }
}

#[test]
fn what_is_not_trained_takes_no_gradients_and_no_other_parameters() {
    let settings = settings(Schedule::Deferred, Backing::Memory);
    let (mut swapper, ..) = toy::open(&settings).unwrap();
    let scatter = StepProgram::new(vec![Op::Scatter { unit: 1 }]).unwrap();
    let refused = swapper.begin_step(scatter).unwrap_err().to_string();
    assert!(refused.contains("not trained"), "{refused}");
    let refused = swapper
        .begin_rewrite(&[0, 1], toy::blob(9))
        .unwrap_err()
        .to_string();
    assert!(refused.contains("written once"), "{refused}");
    step(&mut swapper, 1).unwrap();
    let found = toy::contents(&mut swapper).unwrap();
    toy::assert_same(&found, &reference(1, 0), "refused without effect");
}
