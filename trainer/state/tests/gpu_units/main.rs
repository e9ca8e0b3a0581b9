//! Units in a GPU's memory of a run whose state is on drives give the bits of one without a GPU, through commits, crashes and other places.
//!
//! Likely faults are a commit that has a tile of another step, a copy that starts before the update or is overtaken by the next one, a tile that is
//! loaded from the wrong place, and one that a checkpoint lacks. On a fake GPU (`kernels/tests/gpu/fake`) work runs only when it is waited for, so a
//! missing wait shows as other bytes.

#[path = "../../../../kernels/tests/shared/on_fake.rs"]
mod on_fake;

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::Path;
use std::sync::{Arc, Condvar, Mutex};

use kernels::adamw::{Hyper, Master, Moments, Rounding, init_tile, write_moments};
use kernels::gpu::Gpu;
use swapper::private::{PrivateDaemon, PrivateSettings};
use swapper::{
    Backing, Durability, Op, Optimizer, Schedule, ScratchSettings, Staging, StepProgram,
    StoreSettings, Swapper, SwapperError, SwapperSettings, TileUpdate, UninitTile, UnitShape,
};
use training_state::backend::{BackendError, BesideGpu, Both, GpuBackend, TileBackend};
use training_state::checkpoint_tap::{CheckpointTap, TappedOptimizer};
use training_state::update::{
    ByGroup, CpuUpdate, ParamGroup, ParamGroups, TileFormats, tile_bytes,
};

const UNITS: [u64; 5] = [40_000, 20_032, 20_032, 20_032, 8192];
const TILE_ELEMS: u64 = 8192;
const STEPS: u64 = 9;

/// Step whose gradients overflow.
const SKIPPED: u64 = 3;

/// Last step before the crash.
const CRASH: u64 = 7;

/// Closed while copies for commits must not begin.
#[derive(Default)]
struct Gate {
    closed: Mutex<bool>,
    opened: Condvar,
}

impl Gate {
    fn set_closed(&self, closed: bool) {
        *self.closed.lock().unwrap() = closed;
        self.opened.notify_all();
    }

    fn pass(&self) {
        let closed = self.closed.lock().unwrap();
        drop(self.opened.wait_while(closed, |closed| *closed).unwrap());
    }
}

/// Copies tiles only where a gate is open.
struct GatedOptimizer<O> {
    optimizer: O,
    gate: Arc<Gate>,
}

impl<S, O: Optimizer<S>> Optimizer<S> for GatedOptimizer<O> {
    fn update(&mut self, tile: TileUpdate<'_>, step: &S) {
        self.optimizer.update(tile, step);
    }

    fn copy(&mut self, tile: UninitTile<'_>) {
        self.gate.pass();
        self.optimizer.copy(tile);
    }
}

/// Contents by unit and first element.
type Tiles = BTreeMap<(usize, u64), (Vec<u8>, Vec<u8>)>;

/// Elements that AdamW updates; those between them are updated by directions. Some tiles have both, and the last unit has the first only.
fn rest(elems: u64) -> Vec<Range<u64>> {
    match elems {
        40_000 => vec![0..64, 20_000..20_064],
        8192 => std::iter::once(0..8192).collect(),
        _ => std::iter::once(64..128).collect(),
    }
}

fn formats() -> TileFormats {
    TileFormats::muon(Master::SplitBf16, Moments::Fp32, UNITS.map(rest))
}

fn groups() -> ParamGroups {
    let group = |by_direction| ParamGroup {
        lr_factor: 1.0,
        weight_decay: 0.1,
        by_direction,
    };
    let of_unit = |elems: u64| {
        let rest = rest(elems).into_iter();
        let changes = rest.flat_map(|rest| [(rest.start, false), (rest.end, true)]);
        let mut changes: Vec<_> = changes.collect();
        if changes[0].0 > 0 {
            changes.insert(0, (0, true));
        }
        changes.retain(|(first, _)| *first < elems);
        let groups = changes.into_iter();
        groups.map(move |(first, by_direction)| (first, group(by_direction)))
    };
    ParamGroups::new(UNITS.map(|elems| (elems, of_unit(elems))))
}

fn settings(backing: Backing, schedule: Schedule, commit_every: u64) -> SwapperSettings {
    SwapperSettings {
        units: (0..)
            .zip(UNITS)
            .map(|(unit, elems)| UnitShape {
                elems,
                tile_bytes: tile_bytes(formats().usual(), formats().master().grad_bytes()),
                trained: true,
                other_state: formats().other_state(unit),
                revised: false,
                external: false,
            })
            .collect(),
        tile_elems: TILE_ELEMS,
        param_fraction: 0.0,
        state_fraction: 0.0,
        grad_fraction: 1.0,
        staging: Staging::Slots {
            param: 3,
            state: 2,
            grad: 2,
        },
        schedule,
        commit_every,
        scratch: ScratchSettings::default(),
        iodepth: 8,
        backing,
        layout: Vec::new(),
        rank: 0,
        ranks: 1,
        node_ranks: None,
    }
}

/// Opens the tiles, those of the units of `in_gpu` in the GPU's memory. Returns the newest committed step, if any.
fn open(
    settings: &SwapperSettings,
    gpu: Option<&Gpu>,
    in_gpu: &[bool; 5],
    gate: &Arc<Gate>,
) -> (TileBackend, Option<u64>) {
    let gpu = gpu.filter(|_| in_gpu.contains(&true));
    let backend = gpu.map(|gpu| {
        let mut kept = settings.clone();
        kept.backing = Backing::Memory;
        for (unit, there) in kept.units.iter_mut().zip(in_gpu) {
            unit.elems *= u64::from(*there);
        }
        GpuBackend::new(gpu, kept.cut().unwrap(), formats(), groups()).unwrap()
    });
    let mut streamed = settings.clone();
    for (unit, there) in streamed.units.iter_mut().zip(in_gpu) {
        unit.external = *there;
    }
    let optimizer = || {
        let groups = groups();
        let formats = formats();
        let optimizer = BesideGpu {
            optimizer: TappedOptimizer {
                optimizer: CpuUpdate(ByGroup { formats, groups }),
                checkpoint_tap: CheckpointTap::default(),
            },
            reader: backend.as_ref().map(|backend| backend.reader().unwrap()),
        };
        let gate = gate.clone();
        Box::new(GatedOptimizer { optimizer, gate }) as Box<dyn Optimizer<Hyper>>
    };
    let (swapper, opened) = Swapper::open(streamed, vec![optimizer(), optimizer()]).unwrap();
    let swapper = Box::new(swapper);
    let mut tiles = match backend {
        None => TileBackend::Swapper(swapper, ()),
        Some(backend) => {
            let backend = Box::new(backend);
            TileBackend::Both(Both { swapper, backend }, (), ())
        }
    };
    let committed = opened.resumed.map(|blob| {
        tiles.load().unwrap();
        u64::from_le_bytes(blob[..].try_into().unwrap())
    });
    (tiles, committed)
}

/// A number from -1 to 1 that depends on all of `parts`.
fn number(parts: [u64; 4]) -> f32 {
    let hash = parts.iter().fold(0x9E37_79B9_7F4A_7C15u64, |hash, part| {
        let mixed = (hash ^ part).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        mixed ^ (mixed >> 29)
    });
    (hash >> 40) as f32 / (1 << 23) as f32 - 1.0
}

fn initialize(tiles: &mut TileBackend) {
    let fill = |blanks: &mut [UninitTile]| {
        for blank in blanks {
            let elems = blank.range.elems.clone();
            let masters: Vec<f32> = elems
                .map(|elem| number([0, blank.range.unit as u64, elem, 0]))
                .collect();
            blank.param.fill(0);
            blank.state.fill(0);
            let format = formats().of_tile(blank.range);
            init_tile(format, &masters, blank.param, blank.state);
            // Matrices keep the momentum that they begin with.
            let (elems, variance) = (masters.len(), vec![0.0; masters.len()]);
            write_moments(format, blank.state, elems, 0..elems, [&masters, &variance]);
        }
        Ok::<(), BackendError>(())
    };
    tiles.initialize(fill, 0u64.to_le_bytes().to_vec()).unwrap();
}

/// Gradients in bf16 of elements with these parameters.
fn gradients(step: u64, unit: usize, elems: Range<u64>, params: &[u8]) -> Vec<u8> {
    let params = params.chunks_exact(2);
    let grads = elems.zip(params).flat_map(|(elem, param)| {
        let param = u64::from(u16::from_le_bytes([param[0], param[1]]));
        let grad = number([step, unit as u64, elem, param]);
        ((grad.to_bits() >> 16) as u16).to_le_bytes()
    });
    grads.collect()
}

/// Forward and backward of a step, and its update. Where the GPU has all units, copies for the commit of the step before come only at the end.
fn train_step(tiles: &mut TileBackend, gate: &Gate, step: u64) {
    let program = StepProgram::training(UNITS.len());
    tiles.begin_step(program.clone()).unwrap();
    let (swapper, mut backend) = match tiles {
        TileBackend::Swapper(swapper, ()) => (&mut **swapper, None),
        TileBackend::Both(both, ..) => (&mut *both.swapper, Some(&mut *both.backend)),
        TileBackend::Gpu(..) => panic!("a store has all"),
    };
    let has_all = |backend: &&mut GpuBackend| (0..UNITS.len()).all(|unit| backend.has(unit));
    gate.set_closed(backend.as_ref().is_some_and(has_all));
    let mut params = vec![Vec::new(); UNITS.len()];
    for &op in program.ops() {
        match op {
            Op::Gather { unit } => {
                params[unit].clear();
                let gathered = swapper.gather(unit, |parts| {
                    parts
                        .iter()
                        .for_each(|(_, part)| params[unit].extend(*part));
                    Ok::<(), SwapperError>(())
                });
                gathered.unwrap();
                if let Some(backend) = backend.as_mut().filter(|backend| backend.has(unit)) {
                    assert!(params[unit].is_empty(), "the GPU has them");
                    let from = &backend.unit(unit).param;
                    params[unit].resize(2 * UNITS[unit] as usize, 0);
                    let gpu = from.gpu();
                    let to = &mut [(0, &mut params[unit][..])];
                    gpu.download(&gpu.default_stream(), from, to).unwrap();
                }
            }
            Op::Scatter { unit } => {
                let all = gradients(step, unit, 0..UNITS[unit], &params[unit]);
                let scattered = swapper.scatter(unit, |parts| {
                    for (elems, grad) in parts {
                        let bytes = 2 * elems.start as usize..2 * elems.end as usize;
                        grad.copy_from_slice(&all[bytes]);
                    }
                    Ok::<(), SwapperError>(())
                });
                scattered.unwrap();
                if let Some(backend) = backend.as_mut().filter(|backend| backend.has(unit)) {
                    let to = &backend.unit(unit).grad;
                    let gpu = to.gpu();
                    gpu.upload(&gpu.default_stream(), to, &[(0, &all)]).unwrap();
                }
            }
            other => panic!("{other:?}"),
        }
    }
    let hyper = (step != SKIPPED).then_some(Hyper {
        lr: 0.01,
        beta1: 0.9,
        beta2: 0.99,
        eps: 1e-8,
        weight_decay: 0.0,
        step,
        grad_scale: 1.0,
        rounding: Rounding::ZERO,
    });
    gate.set_closed(false);
    tiles
        .finish_step(hyper, step.to_le_bytes().to_vec())
        .unwrap();
}

/// All tiles, as a checkpoint sees them.
fn contents(tiles: &mut TileBackend) -> Tiles {
    let mut all = Tiles::new();
    let mut last = (0, 0);
    let seen = tiles.visit(&mut |range, param, state| {
        let key = (range.unit, range.elems.start);
        assert!(key >= last, "in the order of units");
        last = key;
        all.insert(key, (param.to_vec(), state.to_vec()));
    });
    seen.unwrap();
    all
}

/// The tiles after each step, of a run in host memory.
fn reference() -> Vec<Tiles> {
    let gate = Arc::default();
    let settings = SwapperSettings {
        param_fraction: 1.0,
        state_fraction: 1.0,
        ..settings(Backing::Memory, Schedule::Immediate, 0)
    };
    let (mut tiles, _) = open(&settings, None, &[false; 5], &gate);
    initialize(&mut tiles);
    let mut all = vec![contents(&mut tiles)];
    for step in 1..=STEPS {
        train_step(&mut tiles, &gate, step);
        all.push(contents(&mut tiles));
    }
    all
}

fn units_in_a_gpu_change_no_bit(gpu: &Gpu) {
    let reference = reference();
    let gate = Arc::default();
    let dir = on_fake::scratch();
    let daemon = PrivateDaemon::start(PrivateSettings {
        program: None,
        dir: dir.path().to_owned(),
        devices: vec![(dir.path().join("tiles"), 256 << 20)],
        arena_bytes_max: 64 << 20,
        engine: "auto".into(),
        iodepth_max: 64,
    })
    .unwrap();
    let (none, some, all) = ([false; 5], [true, false, true, false, true], [true; 5]);
    let others = [false, true, true, false, false];
    for schedule in [Schedule::Deferred, Schedule::Immediate] {
        for (in_gpu, then, commit_every) in [
            (some, others, 2),
            (some, none, 1),
            (all, some, 4),
            (all, others, 1),
            (none, all, 1),
            (others, some, 0),
        ] {
            let what = format!("{schedule:?}, {in_gpu:?}, every {commit_every}");
            let backing = Backing::Store(StoreSettings {
                socket: daemon.socket().to_owned(),
                job: format!(
                    "{schedule:?}-{commit_every}-{}",
                    in_gpu.map(u8::from).iter().sum::<u8>()
                ),
                durability: Durability::Committed,
                nodes: None,
            });
            let settings = settings(backing, schedule, commit_every);
            let (mut tiles, committed) = open(&settings, Some(gpu), &in_gpu, &gate);
            assert_eq!(committed, None);
            initialize(&mut tiles);
            for step in 1..=CRASH {
                train_step(&mut tiles, &gate, step);
                // A checkpoint drains, which commits.
                if step == 4 {
                    assert!(contents(&mut tiles) == reference[4], "{what}: a checkpoint");
                }
            }
            // What was not committed is lost.
            drop(tiles);
            let (mut tiles, committed) = open(&settings, Some(gpu), &then, &gate);
            let committed = committed.unwrap();
            assert!((4..=CRASH).contains(&committed), "{what}: {committed}");
            let found = contents(&mut tiles);
            assert!(
                found == reference[committed as usize],
                "{what}: at step {committed}"
            );
            for step in committed + 1..=STEPS {
                train_step(&mut tiles, &gate, step);
            }
            tiles.drain().unwrap();
            tiles.close().unwrap();
            // Without a GPU.
            let (mut tiles, committed) = open(&settings, None, &none, &gate);
            assert_eq!(committed, Some(STEPS));
            let found = contents(&mut tiles);
            assert!(found == reference[STEPS as usize], "{what}: at the end");
            tiles.close().unwrap();
        }
    }
}

#[test]
fn units_in_the_memory_of_a_gpu_change_no_bit_of_a_run_on_drives() {
    let gpu = match Gpu::open(0) {
        Ok(gpu) => gpu,
        Err(error) if error.is_absent() => {
            println!("skipped: {error}: units in a GPU's memory, state on drives");
            return;
        }
        Err(error) => panic!("{error}"),
    };
    println!("{:?}", gpu.info());
    units_in_a_gpu_change_no_bit(&gpu);
}

#[test]
fn units_in_the_memory_of_a_fake_gpu_change_no_bit_of_a_run_on_drives() {
    let manifest = Path::new(env!("CARGO_MANIFEST_DIR"));
    let source = manifest.join("../../kernels/tests/gpu/fake");
    let source = source.canonicalize().unwrap_or(source);
    let libraries = ["libcuda.so.1", "libnvrtc.so.13"];
    let tests = ["units_in_the_memory_of_a_gpu_"];
    on_fake::run_on_fake(&source, &libraries, &[], &tests, on_fake::CUDA_INFO);
}
