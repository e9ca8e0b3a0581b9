//! Units with parameters of several sizes, some of them not trained, in host memory and with a daemon.

use swapper::{
    Backing, Durability, Layout, Schedule, StepProgram, StoreSettings, Swapper, SwapperError,
    SwapperSettings, TileBytes, TileUpdate, UnitShape,
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

fn settings(schedule: Schedule, backing: Backing) -> SwapperSettings {
    let units = UNITS.map(|(elems, param_bytes_per_elem, trained)| UnitShape {
        elems,
        tile_bytes: TileBytes {
            param_bytes_per_elem,
            grad_bytes_per_elem: 4,
            state_tile_bytes: |elems| elems * 8 + 64,
        },
        trained,
        external: false,
    });
    SwapperSettings {
        units: units.to_vec(),
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
            let mut state = vec![0; if trained { elems * 8 + 64 } else { 0 }];
            toy::fill(range, &mut param, &mut state);
            for step in (1..=steps).filter(|_| trained) {
                let mut grad = vec![0; elems * 4];
                toy::gradient(step, &range.elems, &param, &mut grad);
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
    scatter(swapper, step)?;
    swapper.finish_step(step, toy::blob(step)).map(drop)
}

fn scatter(swapper: &mut Swapper<u64>, step: u64) -> Result<(), SwapperError> {
    let mut ops = StepProgram::reading(0..UNITS.len()).ops().to_vec();
    ops.extend(trained().map(|unit| swapper::Op::Scatter { unit }));
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
                scatter(&mut swapper, number).unwrap();
                let found = toy::contents(&mut swapper).unwrap();
                toy::assert_same(&found, &reference(number - 1, 0), &what);
                swapper.finish_step(number, toy::blob(number)).unwrap();
            }
            let found = toy::contents(&mut swapper).unwrap();
            toy::assert_same(&found, &reference(3, 0), &what);
            swapper.close().unwrap();
        }
    }
}

#[test]
fn what_is_not_trained_takes_no_gradients_and_no_other_parameters() {
    let settings = settings(Schedule::Deferred, Backing::Memory);
    let (mut swapper, ..) = toy::open(&settings).unwrap();
    let scatter = StepProgram::new(vec![swapper::Op::Scatter { unit: 1 }]).unwrap();
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
