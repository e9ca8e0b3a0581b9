//! Units whose newest content the caller has, as in a GPU's memory: commits copy it.
//!
//! Likely faults are a commit that lacks a copy or has one of another step, a copy of content that changes meanwhile, and tiles of these units that are
//! read, or written between commits.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use swapper::{
    Backing, OpenReport, Optimizer, Schedule, StepIo, Swapper, SwapperError, SwapperSettings,
    TileRange, TileUpdate, UninitTile,
};

use crate::store::{settings, start};
use crate::toy;

/// What the caller has: parameters and state by unit and first element.
type CallerTiles = Arc<Mutex<BTreeMap<(usize, u64), (TileRange, Vec<u8>, Vec<u8>)>>>;

struct Holder(CallerTiles);

impl Optimizer<u64> for Holder {
    fn update(&mut self, tile: TileUpdate<'_>, step: &u64) {
        toy::update(tile, step);
    }

    fn copy(&mut self, tile: UninitTile<'_>) {
        let held = self.0.lock().unwrap();
        let (_, param, state) = &held[&(tile.range.unit, tile.range.elems.start)];
        tile.param.copy_from_slice(param);
        tile.state.copy_from_slice(state);
    }
}

/// Opens `settings`, with content of `external` units in the result.
fn open(
    settings: &SwapperSettings,
    external: &[usize],
) -> (Swapper<u64>, OpenReport, CallerTiles, u64) {
    let mut settings = settings.clone();
    for &unit in external {
        settings.units[unit].external = true;
    }
    let held = CallerTiles::default();
    let worker = || Box::new(Holder(held.clone())) as Box<dyn Optimizer<u64>>;
    let workers = || (0..3).map(|_| worker()).collect();
    let (mut swapper, opened) = Swapper::open(settings.clone(), workers()).unwrap();
    assert_eq!(swapper.external_units(), external);
    let step = match &opened.resumed {
        Some(blob) => u64::from_le_bytes(blob[..].try_into().unwrap()),
        None => {
            swapper.initialize(toy::fill_all, toy::blob(0)).unwrap();
            0
        }
    };
    let mut take = |range: &TileRange, param: &[u8], state: &[u8]| {
        let content = (range.clone(), param.to_vec(), state.to_vec());
        let key = (range.unit, range.elems.start);
        held.lock().unwrap().insert(key, content);
    };
    swapper.visit_units(external, &mut take).unwrap();
    (swapper, opened, held, step)
}

/// Runs one step; the caller updates what it has.
fn train_step(
    swapper: &mut Swapper<u64>,
    held: &CallerTiles,
    step: u64,
) -> Result<StepIo, SwapperError> {
    toy::pass(swapper, step)?;
    swapper.settle_updates()?;
    for (range, param, state) in held.lock().unwrap().values_mut() {
        let mut grad = vec![0; param.len()];
        toy::gradient(step, &range.elems, param, &mut grad);
        let grad = &grad;
        toy::update(
            TileUpdate {
                range,
                param,
                state,
                grad,
            },
            &step,
        );
    }
    swapper.finish_step(step, toy::blob(step))
}

/// All tiles, wherever they are.
fn contents(swapper: &mut Swapper<u64>, held: &CallerTiles) -> toy::Contents {
    let mut all = toy::contents(swapper).unwrap();
    all.extend(held.lock().unwrap().values().cloned());
    all.sort_by_key(|(range, ..)| (range.unit, range.elems.start));
    all
}

#[test]
fn commits_contain_what_the_caller_has_and_a_crash_loses_only_what_came_after_them() {
    for schedule in [Schedule::Immediate, Schedule::Deferred] {
        let dir = tempfile::tempdir().unwrap();
        let daemon = start(dir.path());
        for (external, then) in [
            (vec![0, 3], vec![1]),
            (vec![1], vec![]),
            (vec![0, 1, 2, 3], vec![2, 3]),
            (vec![], vec![0, 1, 2, 3]),
        ] {
            let what = format!("{schedule:?}-{external:?}");
            let job = what.replace(|letter: char| !letter.is_alphanumeric(), "-");
            let settings = SwapperSettings {
                schedule,
                param_fraction: 0.5,
                commit_every: 2,
                ..settings(&daemon, &job)
            };
            let (mut swapper, _, held, step) = open(&settings, &external);
            assert_eq!(step, 0);
            for step in 1..=5 {
                let io = train_step(&mut swapper, &held, step).unwrap();
                let all_stay = external.len() == toy::UNITS.len();
                assert!(
                    !all_stay || io.read_bytes == 0 || step == 1,
                    "{what}: {io:?}"
                );
            }
            let found = contents(&mut swapper, &held);
            toy::assert_same(&found, &toy::reference(5), &what);
            train_step(&mut swapper, &held, 6).unwrap();
            drop(swapper);

            // The rest with the content of other units.
            let (mut swapper, _, held, step) = open(&settings, &then);
            assert_eq!(step, 5, "{what}: the drain committed");
            toy::assert_same(&contents(&mut swapper, &held), &toy::reference(5), &what);
            for step in 6..=8 {
                train_step(&mut swapper, &held, step).unwrap();
            }
            swapper.drain().unwrap();
            swapper.close().unwrap();
            let (mut swapper, _, held, step) = open(&settings, &[]);
            assert_eq!(step, 8);
            toy::assert_same(&contents(&mut swapper, &held), &toy::reference(8), &what);
        }
    }
}

#[test]
fn between_commits_nothing_of_these_units_moves() {
    let dir = tempfile::tempdir().unwrap();
    let daemon = start(dir.path());
    let settings = SwapperSettings {
        schedule: Schedule::Immediate,
        commit_every: 3,
        ..settings(&daemon, "still")
    };
    let (mut swapper, _, held, _) = open(&settings, &[0, 1, 2, 3]);
    let io: Vec<StepIo> = (1..=6)
        .map(|step| train_step(&mut swapper, &held, step).unwrap())
        .collect();
    let written: Vec<bool> = io.iter().map(|io| io.written_bytes > 0).collect();
    assert_eq!(written, [false, false, true, false, false, true]);
    assert!(io[1..].iter().all(|io| io.read_bytes == 0), "{io:?}");
    // A step that changes nothing commits nothing but its blob.
    swapper.skip_step(toy::blob(7)).unwrap();
    swapper.drain().unwrap();
    let io = swapper.skip_step(toy::blob(8)).unwrap();
    assert_eq!((io.written_bytes, io.generation), (0, 4), "{io:?}");
}

#[test]
fn what_cannot_be_is_refused() {
    let mut settings = toy::settings(Backing::Memory);
    (
        settings.param_fraction,
        settings.state_fraction,
        settings.grad_fraction,
    ) = (1.0, 1.0, 1.0);
    settings.units[1].external = true;
    let error = Swapper::open(settings, toy::workers()).unwrap_err();
    assert!(error.to_string().contains("there is no store"), "{error}");
    let dir = tempfile::tempdir().unwrap();
    let daemon = start(dir.path());
    let (mut swapper, ..) = open(&self::settings(&daemon, "rewritten"), &[1]);
    let error = swapper.begin_rewrite(&[1], toy::blob(1)).unwrap_err();
    assert!(error.to_string().contains("unit 1 is external"), "{error}");
}
