//! A toy model over real tiles, and the expected result of its training, computed on plain vectors.

use std::ops::Range;

use swapper::{
    Backing, Op, OpenReport, Optimizer, Part, PartMut, Schedule, ScratchSettings, Staging, StepIo,
    StepProgram, Swapper, SwapperError, SwapperSettings, TileBytes, TileRange, TileUpdate,
    UninitTile, UnitShape,
};

/// Several tiles per unit, odd lengths, and one unit of a single tile.
pub(crate) const UNITS: [u64; 4] = [70_000, 20_001, 4096, 33_333];

pub(crate) const TILE_ELEMS: u64 = 8192;

const TILE_BYTES: TileBytes = TileBytes {
    param_bytes_per_elem: 2,
    grad_bytes_per_elem: 2,
    state_tile_bytes: |elems| elems * 10 + 64,
};

pub(crate) fn settings(backing: Backing) -> SwapperSettings {
    SwapperSettings {
        units: UNITS
            .map(|elems| UnitShape {
                elems,
                tile_bytes: TILE_BYTES,
                trained: true,
                other_state: None,
                revised: false,
                external: false,
            })
            .to_vec(),
        tile_elems: TILE_ELEMS,
        param_fraction: 0.0,
        state_fraction: 0.0,
        grad_fraction: 0.0,
        staging: Staging::Slots {
            param: 3,
            state: 2,
            grad: 2,
        },
        schedule: Schedule::Deferred,
        commit_every: 1,
        scratch: ScratchSettings::default(),
        iodepth: 8,
        backing,
        layout: b"toy".to_vec(),
        rank: 0,
        ranks: 1,
        node_ranks: None,
    }
}

pub(crate) fn mix(a: u64, b: u64) -> u64 {
    let z = (a ^ b.rotate_left(32)).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    z ^ (z >> 29)
}

pub(crate) fn fill(range: &TileRange, param: &mut [u8], state: &mut [u8]) {
    for (i, byte) in param.iter_mut().enumerate() {
        *byte = mix(range.unit as u64, range.elems.start * 2 + i as u64) as u8;
    }
    for (i, byte) in state.iter_mut().enumerate() {
        *byte = mix(range.elems.start, i as u64) as u8;
    }
}

pub(crate) fn gradient(step: u64, elems: &Range<u64>, param: &[u8], grad: &mut [u8]) {
    for (i, (grad, param)) in grad.iter_mut().zip(param).enumerate() {
        *grad = mix(step ^ elems.start, i as u64 ^ u64::from(*param) << 32) as u8;
    }
}

/// The optimizer: every byte of the result depends on every byte of the input.
pub(crate) fn update(tile: TileUpdate<'_>, step: &u64) {
    let TileUpdate {
        range,
        param,
        state,
        grad,
    } = tile;
    let of_grad = grad
        .iter()
        .fold(*step, |hash, &byte| mix(hash, byte.into()));
    for (i, byte) in state.iter_mut().enumerate() {
        *byte = byte.wrapping_add(mix(of_grad, i as u64 ^ range.elems.start) as u8);
    }
    let of_state = state.iter().fold(0, |hash, &byte| mix(hash, byte.into()));
    for (i, byte) in param.iter_mut().enumerate() {
        *byte = byte
            .wrapping_mul(5)
            .wrapping_add(mix(of_state, i as u64) as u8);
    }
}

/// All tiles: range, param, state.
pub(crate) type Contents = Vec<(TileRange, Vec<u8>, Vec<u8>)>;

/// Trains `steps` steps without a swapper.
pub(crate) fn reference(steps: u64) -> Contents {
    reference_of(steps, 0, 1)
}

/// Returns the expected tiles of one rank of several.
pub(crate) fn reference_of(steps: u64, rank: u32, ranks: u32) -> Contents {
    let units = settings(Backing::Memory).units;
    let layout = swapper::Layout::new(&units, TILE_ELEMS, rank, ranks).unwrap();
    let mut all: Contents = layout
        .ranges()
        .iter()
        .map(|range| {
            let elems = (range.elems.end - range.elems.start) as usize;
            let (mut param, mut state) = (vec![0; elems * 2], vec![0; elems * 10 + 64]);
            fill(range, &mut param, &mut state);
            (range.clone(), param, state)
        })
        .collect();
    for step in 1..=steps {
        for (range, param, state) in &mut all {
            let mut grad = vec![0; param.len()];
            gradient(step, &range.elems, param, &mut grad);
            let tile = TileUpdate {
                range,
                param,
                state,
                grad: &grad,
            };
            update(tile, &step);
        }
    }
    all
}

/// Fills every tile it gets.
pub(crate) fn fill_all(blanks: &mut [UninitTile]) -> Result<(), SwapperError> {
    for UninitTile {
        range,
        param,
        state,
    } in blanks
    {
        fill(range, param, state);
    }
    Ok(())
}

/// Returns three optimizers: which one updates a tile must not matter.
pub(crate) fn workers() -> Vec<Box<dyn Optimizer<u64>>> {
    vec![Box::new(update), Box::new(update), Box::new(update)]
}

/// Takes a unit's parameters and ignores them.
pub(crate) fn ignore_parts(_: &[Part]) -> Result<(), SwapperError> {
    Ok(())
}

/// Returns a closure that sets all gradients to `byte`.
pub(crate) fn all(byte: u8) -> impl FnMut(&mut [PartMut]) -> Result<(), SwapperError> {
    move |parts| {
        parts.iter_mut().for_each(|(_, grad)| grad.fill(byte));
        Ok(())
    }
}

/// Opens a swapper, fills it if nothing was committed, and returns its step.
pub(crate) fn open(
    settings: &SwapperSettings,
) -> Result<(Swapper<u64>, OpenReport, u64), SwapperError> {
    let (mut swapper, opened) = Swapper::open(settings.clone(), workers())?;
    let step = match &opened.resumed {
        Some(blob) => u64::from_le_bytes(blob[..].try_into().unwrap()),
        None => {
            swapper.initialize(fill_all, blob(0))?;
            0
        }
    };
    Ok((swapper, opened, step))
}

pub(crate) fn blob(step: u64) -> Vec<u8> {
    step.to_le_bytes().to_vec()
}

/// Runs one step: a forward pass, a backward pass, and its end.
pub(crate) fn train_step(swapper: &mut Swapper<u64>, step: u64) -> Result<StepIo, SwapperError> {
    pass(swapper, step)?;
    swapper.finish_step(step, blob(step))
}

/// Runs the forward pass and the backward pass of a step.
pub(crate) fn pass(swapper: &mut Swapper<u64>, step: u64) -> Result<(), SwapperError> {
    let program = StepProgram::training(UNITS.len());
    swapper.begin_step(program.clone())?;
    let mut params: Vec<Vec<(Range<u64>, Vec<u8>)>> = vec![Vec::new(); UNITS.len()];
    for &op in program.ops() {
        match op {
            Op::Gather { unit } => {
                let mut taken = Vec::new();
                swapper.gather(unit, |parts| {
                    taken.extend(
                        parts
                            .iter()
                            .map(|(elems, bytes)| (elems.clone(), bytes.to_vec())),
                    );
                    Ok::<(), SwapperError>(())
                })?;
                let before = std::mem::replace(&mut params[unit], taken);
                assert!(
                    before.is_empty() || before == params[unit],
                    "backward sees other parameters than forward"
                );
            }
            Op::Scatter { unit } => {
                let mut params = params[unit].iter();
                swapper.scatter(unit, |parts| {
                    for (elems, grad) in parts {
                        let (of, param) = params.next().unwrap();
                        assert_eq!(of, elems);
                        gradient(step, elems, param, grad);
                    }
                    Ok::<(), SwapperError>(())
                })?;
            }
            other => unreachable!("{other:?} in a trainer's program"),
        }
    }
    Ok(())
}

/// Runs the same step in three passes whose gradients add up to those of [`train_step`]. Announces one operation at a time, like a caller that does
/// not know the order, and passes the blob after the step's end.
pub(crate) fn train_step_in_passes(
    swapper: &mut Swapper<u64>,
    step: u64,
) -> Result<(), SwapperError> {
    let program = StepProgram::training(UNITS.len());
    let one = |op| StepProgram::new(vec![op]);
    swapper.begin_step(StepProgram::default())?;
    for pass in 0..3u8 {
        let mut params: Vec<Vec<Vec<u8>>> = vec![Vec::new(); UNITS.len()];
        for &op in program.ops() {
            swapper.begin_pass(one(op)?)?;
            match op {
                Op::Gather { unit } => {
                    params[unit].clear();
                    swapper.gather(unit, |parts| {
                        params[unit].extend(parts.iter().map(|(_, bytes)| bytes.to_vec()));
                        Ok::<(), SwapperError>(())
                    })?;
                }
                Op::Scatter { unit } => {
                    assert_eq!(swapper.has_gradients(unit), pass > 0);
                    let mut params = params[unit].iter();
                    swapper.scatter(unit, |parts| {
                        for (elems, grad) in parts {
                            if pass == 0 {
                                grad.fill(1);
                            } else if pass == 1 {
                                grad.iter_mut()
                                    .for_each(|byte| *byte = byte.wrapping_add(6));
                            } else {
                                let mut last = vec![0; grad.len()];
                                gradient(step, elems, params.next().unwrap(), &mut last);
                                for (sum, last) in grad.iter_mut().zip(last) {
                                    *sum = sum.wrapping_add(last).wrapping_sub(7);
                                }
                            }
                        }
                        Ok::<(), SwapperError>(())
                    })?;
                }
                other => unreachable!("{other:?} in a trainer's program"),
            }
        }
    }
    swapper.finish_unsealed(Some(step))?;
    swapper.seal(blob(step))
}

/// Runs the same step, and lets updates begin while other gradients come, in `parts`: after how many scatters each time. The last units are
/// updated like the others with `joins`, and otherwise behind them.
pub(crate) fn train_step_in_parts(
    swapper: &mut Swapper<u64>,
    step: u64,
    parts: &[usize],
    joins: bool,
) -> Result<StepIo, SwapperError> {
    swapper.begin_step(StepProgram::training(UNITS.len()))?;
    let mut params = vec![Vec::new(); UNITS.len()];
    let gather = |swapper: &mut Swapper<u64>, unit: usize| {
        let mut taken: Vec<Vec<u8>> = Vec::new();
        swapper.gather(unit, |parts| {
            taken.extend(parts.iter().map(|(_, bytes)| bytes.to_vec()));
            Ok::<(), SwapperError>(())
        })?;
        Ok::<_, SwapperError>(taken)
    };
    for (unit, params) in params.iter_mut().enumerate() {
        *params = gather(swapper, unit)?;
    }
    let mut begun = false;
    for (count, unit) in (0..UNITS.len()).rev().enumerate() {
        let rest = [Op::Gather { unit }, Op::Scatter { unit }];
        swapper.begin_pass(StepProgram::new(rest.to_vec())?)?;
        assert_eq!(
            gather(swapper, unit)?,
            params[unit],
            "an update of another unit"
        );
        let mut params = params[unit].iter();
        swapper.scatter(unit, |parts| {
            for (elems, grad) in parts {
                gradient(step, elems, params.next().unwrap(), grad);
            }
            Ok::<(), SwapperError>(())
        })?;
        if parts.contains(&(count + 1)) {
            swapper.begin_updates((!begun).then_some(step))?;
            begun = true;
        }
    }
    let io = match joins {
        true => swapper.finish_begun()?,
        false => swapper.finish_unsealed(Some(step))?,
    };
    swapper.seal(blob(step))?;
    Ok(io)
}

pub(crate) fn contents(swapper: &mut Swapper<u64>) -> Result<Contents, SwapperError> {
    let mut all = Contents::new();
    swapper.visit(&mut |range, param, state| {
        all.push((range.clone(), param.to_vec(), state.to_vec()));
    })?;
    Ok(all)
}

/// Compares without `assert_eq`, which would print megabytes.
pub(crate) fn assert_same(found: &Contents, expected: &Contents, what: &str) {
    assert_eq!(found.len(), expected.len(), "{what}: number of ranges");
    for (found, expected) in found.iter().zip(expected) {
        assert_eq!(found.0, expected.0, "{what}");
        assert!(found.1 == expected.1, "{what}: param of {:?}", found.0);
        assert!(found.2 == expected.2, "{what}: state of {:?}", found.0);
    }
}
