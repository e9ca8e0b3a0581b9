//! Arithmetic over tiles: AdamW by parameter groups, sums of gradients and their norms.

use std::ops::Range;
use std::sync::Arc;

use half::{bf16, f16};
use kernels::adamw::{Hyper, Master, step_range};
use swapper::{Optimizer, TileRange};

use crate::open::ParamPlan;

/// One step's scalars of every parameter, in the units' order; `None`: no gradient came, the parameter stays as it is.
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
            })
        };
        Self(Arc::new(of_params.iter().map(hyper).collect()))
    }
}

/// A unit's parameters: elements of each, and its index over all units.
pub(crate) type Params = Vec<(Range<u64>, usize)>;

/// AdamW over a tile, parameter by parameter.
#[derive(Clone)]
pub(crate) struct Update {
    pub(crate) master: Master,
    pub(crate) units: Arc<Vec<Params>>,
}

impl Optimizer<StepHyper> for Update {
    fn update(
        &mut self,
        range: &TileRange,
        param: &mut [u8],
        state: &mut [u8],
        grad: &[u8],
        hyper: &StepHyper,
    ) {
        let elems = (range.elems.end - range.elems.start) as usize;
        for (within, index) in parts(&range.elems, &self.units[range.unit]) {
            if let Some(hyper) = &hyper.0[index] {
                step_range(self.master, hyper, param, state, grad, elems, within);
            }
        }
    }
}

/// The parameters of which `tile` has elements: which elements of the tile, and the parameter.
fn parts<'a>(
    tile: &'a Range<u64>,
    params: &'a [(Range<u64>, usize)],
) -> impl Iterator<Item = (Range<usize>, usize)> + 'a {
    let first = params.partition_point(|(elems, _)| elems.end <= tile.start);
    let within = params[first..]
        .iter()
        .take_while(|(elems, _)| elems.start < tile.end);
    within.map(|(elems, index)| {
        let start = elems.start.max(tile.start) - tile.start;
        let end = elems.end.min(tile.end) - tile.start;
        (start as usize..end as usize, *index)
    })
}

/// The fp32 masters of `params`, which are numbers of the master's parameter type.
pub(crate) fn masters(master: Master, params: &[u8], out: &mut Vec<f32>) {
    out.clear();
    match master {
        Master::Fp32 => out.extend(params.chunks_exact(4).map(f32_of)),
        Master::SplitBf16 => out.extend(params.chunks_exact(2).map(|b| bf16_of(b).to_f32())),
        Master::Fp16WholeMaster => out.extend(params.chunks_exact(2).map(|b| f16_of(b).to_f32())),
    }
}

/// `sum += grad`, rounded once to the gradients' type, as PyTorch accumulates into `param.grad`.
pub(crate) fn add(master: Master, grad: &[u8], sum: &mut [u8]) {
    fn each<const N: usize>(grad: &[u8], sum: &mut [u8], add: impl Fn(&[u8], &[u8]) -> [u8; N]) {
        for (sum, grad) in sum.chunks_exact_mut(N).zip(grad.chunks_exact(N)) {
            let added = add(sum, grad);
            sum.copy_from_slice(&added);
        }
    }
    match master {
        Master::Fp32 => each(grad, sum, |a, b| (f32_of(a) + f32_of(b)).to_ne_bytes()),
        Master::SplitBf16 => each(grad, sum, |a, b| {
            bf16::from_f32(bf16_of(a).to_f32() + bf16_of(b).to_f32()).to_ne_bytes()
        }),
        Master::Fp16WholeMaster => each(grad, sum, |a, b| {
            f16::from_f32(f16_of(a).to_f32() + f16_of(b).to_f32()).to_ne_bytes()
        }),
    }
}

/// Adds to `squares` the squares of `grad`, the gradients of `elems` of a unit with these parameters.
pub(crate) fn squares(
    master: Master,
    params: &[ParamPlan],
    elems: &Range<u64>,
    grad: &[u8],
    squares: &mut [f64],
) {
    let bytes = master.grad_bytes();
    for (param, squares) in params.iter().zip(squares) {
        let start = param.offset.max(elems.start);
        let end = (param.offset + param.elems).min(elems.end);
        if start >= end {
            continue;
        }
        let at = |elem: u64| (elem - elems.start) as usize * bytes;
        let grad = &grad[at(start)..at(end)];
        let square = |value: f32| f64::from(value) * f64::from(value);
        *squares += match master {
            Master::Fp32 => grad.chunks_exact(4).map(|b| square(f32_of(b))).sum::<f64>(),
            Master::SplitBf16 => grad
                .chunks_exact(2)
                .map(|b| square(bf16_of(b).to_f32()))
                .sum(),
            Master::Fp16WholeMaster => grad
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
