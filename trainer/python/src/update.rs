//! Arithmetic over tiles: an optimizer's scalars by parameter groups, sums of gradients and their norms.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;

use half::{bf16, f16};
use kernels::adamw::{
    Hyper, Master, Rounding, UpdateRule, init_tile, read_masters, read_moments, state_planes,
    state_tile_bytes, write_moments,
};
use kernels::gpu::TileUpdater;
use kernels::muon::MomentumStep;
use kernels::reduce::GradType;
use swapper::{Op, StepProgram, SwapperError, TileRange, UninitTile};
use training_state::update::{Scalars, StepPart, TileStep, parts, rounding};

use crate::format::{Format, ParamPlan, UpdateFormat};

/// Seed of the rounding of moments and masters in bf16. Runs need not differ in it.
const SEED: u64 = 0;

/// One step's scalars of every parameter, in the units' order; `None` if the parameter got no gradient and stays as it is.
#[derive(Clone, Debug)]
pub(crate) struct StepHyper(Arc<Vec<Option<Hyper>>>);

impl StepHyper {
    pub(crate) fn new(
        groups: &[(f64, f64, f64, f64, f64)],
        of_params: &[(usize, u64, f64)],
    ) -> Self {
        let hyper = |&(group, step, scale): &(usize, u64, f64)| {
            let (lr, beta1, beta2, eps, weight_decay) = groups[group];
            (step > 0).then_some(Hyper {
                lr: lr as f32,
                beta1: beta1 as f32,
                beta2: beta2 as f32,
                eps: eps as f32,
                weight_decay: weight_decay as f32,
                step,
                grad_scale: scale as f32,
                rounding: Rounding::ZERO,
            })
        };
        Self(Arc::new(of_params.iter().map(hyper).collect()))
    }
}

/// What a step needs between backward and its updates, with Muon.
pub(crate) struct Directions {
    pub(crate) hyper: StepHyper,
    /// The step of each parameter's momentum, in the units' order; `None` if it has no momentum or got no gradient.
    steps: Vec<Option<MomentumStep>>,
    /// The units that are still to be revised, in this order.
    pub(crate) left: VecDeque<usize>,
}

impl Directions {
    /// `steps` has decay, Nesterov's mixture or not, and the factor of the gradient.
    pub(crate) fn new(
        hyper: StepHyper,
        steps: &[Option<(f64, bool, f64)>],
        units: Vec<usize>,
    ) -> Self {
        let step = |&(decay, nesterov, grad_scale): &(f64, bool, f64)| MomentumStep {
            decay,
            nesterov,
            grad_scale: grad_scale as f32,
        };
        Self {
            hyper,
            steps: steps.iter().map(|one| one.as_ref().map(step)).collect(),
            left: units.into(),
        }
    }

    /// The operations that are still to come.
    pub(crate) fn rest(&self) -> Result<StepProgram, SwapperError> {
        let of_unit = |&unit: &usize| [Op::Revise { unit }, Op::Scatter { unit }];
        StepProgram::new(self.left.iter().flat_map(of_unit).collect())
    }

    /// The elements of those of `params` whose momenta change, and their steps. The first parameter has the index `first` over all units.
    pub(crate) fn of_unit(
        &self,
        params: &[ParamPlan],
        first: usize,
    ) -> Vec<(Range<u64>, MomentumStep)> {
        let steps = params.iter().zip(&self.steps[first..]);
        let of_param = |(param, step): (&ParamPlan, &Option<MomentumStep>)| {
            Some((param.offset..param.offset + param.elems, (*step)?))
        };
        steps.filter_map(of_param).collect()
    }
}

/// A unit's parameters: elements of each, and its index over all units.
pub(crate) type Params = Vec<(Range<u64>, usize)>;

/// An optimizer's scalars, parameter by parameter.
#[derive(Clone)]
pub(crate) struct ByParam {
    pub(crate) units: Arc<Vec<(Format, Params)>>,
}

impl Scalars<StepHyper> for ByParam {
    fn of_tile(&self, range: &TileRange, step: &StepHyper) -> TileStep {
        let (format, params) = &self.units[range.unit];
        let UpdateFormat { format, grads } = format.update.expect("only trained units are updated");
        let of_param = |(elems, index): (_, &usize)| {
            let rounding = rounding(SEED, range);
            let hyper = step.0[*index]?;
            Some(StepPart {
                elems,
                // A direction stands in place of the gradient.
                rule: match format.rule {
                    UpdateRule::Muon => UpdateRule::Sgd,
                    rule => rule,
                },
                hyper: Hyper { rounding, ..hyper },
            })
        };
        TileStep {
            format,
            grads,
            parts: parts(&range.elems, params).filter_map(of_param).collect(),
        }
    }
}

impl ByParam {
    /// Device memory that a GPU's update of a tile needs, bytes.
    pub(crate) fn gpu_bytes(&self, tile_elems: usize) -> usize {
        let updated = self.units.iter().filter_map(|(format, _)| format.update);
        let bytes =
            |UpdateFormat { format, grads }| TileUpdater::device_bytes(format, grads, tile_elems);
        updated.map(bytes).max().unwrap_or(0)
    }
}

/// Gives a tile its first content: the parameters `from`, masters that equal them, and moments of zero.
pub(crate) fn init(format: &Format, from: &[u8], tile: &mut UninitTile<'_>) {
    match format.update {
        Some(UpdateFormat { format, .. }) => {
            // A state may be longer than its format needs.
            tile.state.fill(0);
            init_tile(
                format,
                &masters(format.master, from),
                tile.param,
                tile.state,
            );
        }
        None => tile.param.copy_from_slice(from),
    }
}

/// Gives `params`, whole parameters of a tile's unit, the values they have in `from`. Other parameters and all moments stay.
pub(crate) fn rewrite(
    format: &Format,
    params: &[(Range<u64>, usize)],
    from: &[u8],
    tile: &mut UninitTile<'_>,
) {
    let updated = format.update.expect("only trained units are rewritten");
    let new: Vec<u8> = (masters(updated.format.master, from).into_iter())
        .flat_map(f32::to_ne_bytes)
        .collect();
    rewrite_masters(format, params, &new, tile);
}

/// The fp32 masters, momentum and variance of a tile of a trained unit, as bytes; those that the rule does not have are empty.
pub(crate) fn read_state(format: &Format, param: &[u8], state: &[u8]) -> [Vec<u8>; 3] {
    let param_bytes = format.param_bytes;
    let UpdateFormat { format, .. } = format.update.expect("only trained units have state");
    let mut whole = vec![0.0; param.len() / param_bytes];
    read_masters(format, param, state, &mut whole);
    let [momentum, variance] = read_moments(format, state, whole.len());
    [whole, momentum, variance].map(|plane| plane.into_iter().flat_map(f32::to_ne_bytes).collect())
}

/// Gives `params`, whole parameters of a tile's unit, the fp32 masters `new` of the tile. Other parameters and all moments stay.
pub(crate) fn rewrite_masters(
    format: &Format,
    params: &[(Range<u64>, usize)],
    new: &[u8],
    tile: &mut UninitTile<'_>,
) {
    let elems = tile.param.len() / format.param_bytes;
    let UpdateFormat { format, .. } = format.update.expect("only trained units are rewritten");
    let mut kept = vec![0.0; elems];
    read_masters(format, tile.param, tile.state, &mut kept);
    for (within, _) in parts(&tile.range.elems, params) {
        let new = new[bytes_of(&within, 4)].chunks_exact(4);
        for (kept, new) in kept[within].iter_mut().zip(new) {
            *kept = f32_of(new);
        }
    }
    let moments = state_planes(format, elems)[1].start..state_tile_bytes(format, elems);
    let before = tile.state[moments.clone()].to_vec();
    init_tile(format, &kept, tile.param, tile.state);
    tile.state[moments].copy_from_slice(&before);
}

/// Gives `params`, whole parameters of a tile's unit, the fp32 momentum and variance `new` of the tile. Other parameters stay.
pub(crate) fn rewrite_moments(
    format: &Format,
    params: &[(Range<u64>, usize)],
    new: [&[u8]; 2],
    tile: &mut UninitTile<'_>,
) {
    let elems = tile.param.len() / format.param_bytes;
    let UpdateFormat { format, .. } = format.update.expect("only trained units are rewritten");
    // Lion and Muon have no variance.
    let new = new.map(|plane| plane.chunks_exact(4).map(f32_of).collect::<Vec<_>>());
    for (within, _) in parts(&tile.range.elems, params) {
        let planes = [&new[0], &new[1]].map(|plane| plane.get(within.clone()).unwrap_or_default());
        write_moments(format, tile.state, elems, within, planes);
    }
}

fn bytes_of(elems: &Range<usize>, elem_bytes: usize) -> Range<usize> {
    elems.start * elem_bytes..elems.end * elem_bytes
}

/// The fp32 masters of `params`, which are numbers of the master's parameter type.
fn masters(master: Master, params: &[u8]) -> Vec<f32> {
    match master {
        Master::Fp32 => params.chunks_exact(4).map(f32_of).collect(),
        Master::SplitBf16 | Master::Bf16 => {
            (params.chunks_exact(2).map(|b| bf16_of(b).to_f32())).collect()
        }
        Master::Fp16WholeMaster => (params.chunks_exact(2).map(|b| f16_of(b).to_f32())).collect(),
    }
}

/// `sum += grad`, rounded to their type each time, as PyTorch accumulates into `param.grad`.
pub(crate) fn add(of: GradType, grad: &[u8], sum: &mut [u8]) {
    fn each<const N: usize>(grad: &[u8], sum: &mut [u8], add: impl Fn(&[u8], &[u8]) -> [u8; N]) {
        for (sum, grad) in sum.chunks_exact_mut(N).zip(grad.chunks_exact(N)) {
            let added = add(sum, grad);
            sum.copy_from_slice(&added);
        }
    }
    match of {
        GradType::Fp32 => each(grad, sum, |a, b| (f32_of(a) + f32_of(b)).to_ne_bytes()),
        GradType::Bf16 => each(grad, sum, |a, b| {
            bf16::from_f32(bf16_of(a).to_f32() + bf16_of(b).to_f32()).to_ne_bytes()
        }),
        GradType::Fp16 => each(grad, sum, |a, b| {
            f16::from_f32(f16_of(a).to_f32() + f16_of(b).to_f32()).to_ne_bytes()
        }),
    }
}

/// Adds to `squares` the squares of `grad`, the gradients of `elems` of a unit with these parameters.
pub(crate) fn squares(
    grads: GradType,
    params: &[ParamPlan],
    elems: &Range<u64>,
    grad: &[u8],
    squares: &mut [f64],
) {
    let bytes = grads.elem_bytes();
    for (param, squares) in params.iter().zip(squares) {
        let start = param.offset.max(elems.start);
        let end = (param.offset + param.elems).min(elems.end);
        if start >= end {
            continue;
        }
        let at = |elem: u64| (elem - elems.start) as usize * bytes;
        let grad = &grad[at(start)..at(end)];
        let square = |value: f32| f64::from(value) * f64::from(value);
        *squares += match grads {
            GradType::Fp32 => grad.chunks_exact(4).map(|b| square(f32_of(b))).sum::<f64>(),
            GradType::Bf16 => grad
                .chunks_exact(2)
                .map(|b| square(bf16_of(b).to_f32()))
                .sum(),
            GradType::Fp16 => grad
                .chunks_exact(2)
                .map(|b| square(f16_of(b).to_f32()))
                .sum(),
        };
    }
}

fn f32_of(bytes: &[u8]) -> f32 {
    f32::from_ne_bytes(bytes.try_into().expect("four bytes"))
}

fn bf16_of(bytes: &[u8]) -> bf16 {
    bf16::from_ne_bytes(bytes.try_into().expect("two bytes"))
}

fn f16_of(bytes: &[u8]) -> f16 {
    f16::from_ne_bytes(bytes.try_into().expect("two bytes"))
}
