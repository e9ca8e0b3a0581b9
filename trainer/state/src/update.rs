//! Optimizer steps over tiles, on the CPU or on a GPU, with scalars that may differ between a tile's elements.
//!
//! CPU and GPU give the same bits, so either may update any tile.

use std::ops::Range;
use std::sync::Arc;

use kernels::adamw::{
    Hyper, Master, Moments, Rounding, Tile, TileFormat, UpdateRule, state_planes, state_tile_bytes,
    step_range,
};
use kernels::cast::view_mut;
use kernels::gpu::TileUpdater;
use kernels::muon::MomentumStep;
use kernels::reduce::GradType;
use swapper::{Optimizer, OtherState, Revision, TileBytes, TileRange, TileUpdate};

/// Threads that stream tiles through a GPU: for one that copies to the GPU, one that computes and one that copies back, one more each, because
/// a thread that waited for a copy wakes late on busy cores. With bf16 masters and moments in host memory, beside 13 threads of the CPU, an
/// update of 1.345 G parameters took 0.244 s with three and 0.215 s with six.
pub const GPU_UPDATERS: usize = 6;

/// Least bytes of the state of a tile: where all state is in the parameters, as with SGD and fp32, a line stands for it.
const STATE_BYTES_MIN: usize = 64;

/// Bytes of tiles of `format` whose gradients take `grad_bytes` each.
pub fn tile_bytes(format: TileFormat, grad_bytes: usize) -> TileBytes {
    /// A function for each format: the swapper's settings hold no closure.
    macro_rules! state_tile_bytes_of {
        ($($rule:ident $moments:ident: $($master:ident)*;)*) => {
            match format {
                $($(TileFormat {
                    rule: UpdateRule::$rule,
                    master: Master::$master,
                    moments: Moments::$moments,
                } => |elems| {
                    let (rule, master) = (UpdateRule::$rule, Master::$master);
                    let moments = Moments::$moments;
                    state_tile_bytes(TileFormat { rule, master, moments }, elems).max(STATE_BYTES_MIN)
                },)*)*
            }
        };
    }
    TileBytes {
        param_bytes_per_elem: format.master.param_bytes(),
        grad_bytes_per_elem: grad_bytes,
        state_tile_bytes: state_tile_bytes_of!(
            AdamW Fp32: SplitBf16 Bf16 Fp32 Fp16WholeMaster;
            AdamW Bf16: SplitBf16 Bf16 Fp32 Fp16WholeMaster;
            AdamW EightBit: SplitBf16 Bf16 Fp32 Fp16WholeMaster;
            Lion Fp32: SplitBf16 Bf16 Fp32 Fp16WholeMaster;
            Lion Bf16: SplitBf16 Bf16 Fp32 Fp16WholeMaster;
            Lion EightBit: SplitBf16 Bf16 Fp32 Fp16WholeMaster;
            Sgd Fp32: SplitBf16 Bf16 Fp32 Fp16WholeMaster;
            Sgd Bf16: SplitBf16 Bf16 Fp32 Fp16WholeMaster;
            Sgd EightBit: SplitBf16 Bf16 Fp32 Fp16WholeMaster;
            Muon Fp32: SplitBf16 Bf16 Fp32 Fp16WholeMaster;
            Muon Bf16: SplitBf16 Bf16 Fp32 Fp16WholeMaster;
            Muon EightBit: SplitBf16 Bf16 Fp32 Fp16WholeMaster;
        ),
    }
}

/// Storage of the numbers of each tile of a run. With Muon, tiles of matrices alone have one moment, and all others two.
#[derive(Clone, Debug)]
pub struct TileFormats {
    format: TileFormat,
    /// With Muon, the elements of each unit that it does not update, in ascending order.
    rest: Option<Arc<Vec<Elements>>>,
}

/// Elements of a unit, in ascending order.
type Elements = Arc<[Range<u64>]>;

/// All tiles have the same format.
impl From<TileFormat> for TileFormats {
    fn from(format: TileFormat) -> Self {
        assert_ne!(format.rule, UpdateRule::Muon, "its tiles have two formats");
        Self { format, rest: None }
    }
}

impl TileFormats {
    /// Formats of a run with Muon, which does not update the elements `rest` of each unit.
    pub fn muon(
        master: Master,
        moments: Moments,
        rest: impl IntoIterator<Item = Vec<Range<u64>>>,
    ) -> Self {
        let format = TileFormat {
            rule: UpdateRule::Muon,
            master,
            moments,
        };
        let rest = rest.into_iter().map(Arc::from).collect();
        Self {
            format,
            rest: Some(Arc::new(rest)),
        }
    }

    /// Storage of the parameters, their masters and gradients, which all tiles share.
    pub fn master(&self) -> Master {
        self.format.master
    }

    /// The format of most tiles.
    pub fn usual(&self) -> TileFormat {
        self.format
    }

    /// The format of the tiles with the largest state.
    pub fn largest(&self) -> TileFormat {
        match self.format.rule {
            UpdateRule::Muon => TileFormat {
                rule: UpdateRule::AdamW,
                ..self.format
            },
            _ => self.format,
        }
    }

    /// The format of a tile of `range`.
    pub fn of_tile(&self, range: &TileRange) -> TileFormat {
        match self.other_state(range.unit) {
            Some(other) if other.is_in(&range.elems) => self.largest(),
            _ => self.format,
        }
    }

    /// Tiles of `unit` whose state has not the usual size.
    pub fn other_state(&self, unit: usize) -> Option<OtherState> {
        let rest = self.rest.as_ref()?;
        Some(OtherState {
            elems: rest[unit].clone(),
            state_tile_bytes: tile_bytes(self.largest(), 0).state_tile_bytes,
        })
    }
}

/// Settings of a group of parameters that differ from those of the step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ParamGroup {
    /// Factor of the step's learning rate.
    pub lr_factor: f32,
    /// Decoupled weight decay of the group.
    pub weight_decay: f32,
    /// Whether directions stand in place of the group's gradients, and are subtracted as they are: matrices that Muon updates.
    pub by_direction: bool,
}

impl ParamGroup {
    /// The step's scalars with the group's settings, for a tile of `range`.
    fn scalars(&self, step: &Hyper, range: &TileRange) -> Hyper {
        Hyper {
            lr: step.lr * self.lr_factor,
            weight_decay: self.weight_decay,
            grad_scale: if self.by_direction {
                1.0
            } else {
                step.grad_scale
            },
            rounding: rounding(step.rounding.seed, range),
            ..*step
        }
    }

    /// The rule of the group's step, in a tile whose others have `rule`.
    fn rule(&self, rule: UpdateRule) -> UpdateRule {
        match self.by_direction {
            true => UpdateRule::Sgd,
            false => rule,
        }
    }
}

/// Identifies the elements of a tile of `range` for the rounding of their moments and masters.
pub fn rounding(seed: u64, range: &TileRange) -> Rounding {
    Rounding {
        seed,
        unit: range.unit as u64,
        first_elem: range.elems.start,
    }
}

/// The group of each element of each unit. Clones share one table.
#[derive(Clone, Debug)]
pub struct ParamGroups(Arc<Vec<UnitGroups>>);

/// Ranges of a unit's elements in ascending order, with their groups.
type UnitGroups = Vec<(Range<u64>, ParamGroup)>;

impl ParamGroups {
    /// Makes the table from the first element and the group of each unit's parameters, in ascending order, and the
    /// unit's element count. Padding belongs to the parameter before it: it is zero, and every update keeps it zero.
    pub fn new(
        units: impl IntoIterator<Item = (u64, impl IntoIterator<Item = (u64, ParamGroup)>)>,
    ) -> Self {
        let ranges = |(elems, params): (u64, _)| {
            let mut ranges = UnitGroups::new();
            for (first, group) in params {
                match ranges.last_mut() {
                    Some((_, last)) if *last == group => continue,
                    Some((range, _)) => range.end = first,
                    None => {}
                }
                ranges.push((first..elems, group));
            }
            ranges
        };
        Self(Arc::new(units.into_iter().map(ranges).collect()))
    }

    /// Splits a tile where the group changes. Returns the parts as elements of the tile, with their scalars. Those of no direction have `rule`.
    pub fn parts(&self, range: &TileRange, rule: UpdateRule, step: &Hyper) -> Vec<StepPart> {
        let parts = parts(&range.elems, &self.0[range.unit]);
        parts
            .map(|(elems, group)| StepPart {
                elems,
                rule: group.rule(rule),
                hyper: group.scalars(step, range),
            })
            .collect()
    }
}

/// Splits `tile`, a range of a unit's elements, by `ranges` of the unit in ascending order. Returns the parts as elements
/// of the tile.
pub fn parts<'a, T>(
    tile: &'a Range<u64>,
    ranges: &'a [(Range<u64>, T)],
) -> impl Iterator<Item = (Range<usize>, &'a T)> + 'a {
    let first = ranges.partition_point(|(elems, _)| elems.end <= tile.start);
    let within = ranges[first..]
        .iter()
        .take_while(|(elems, _)| elems.start < tile.end);
    within.map(|(elems, value)| {
        let start = elems.start.max(tile.start) - tile.start;
        let end = elems.end.min(tile.end) - tile.start;
        (start as usize..end as usize, value)
    })
}

/// Updates the momenta of a tile of `format` by its gradients of type `grads`, and replaces these by what is to be made orthogonal. `steps` has elements of
/// the tile and their steps; all other elements stay as they are.
pub fn mix(
    format: TileFormat,
    grads: GradType,
    tile: &mut Revision<'_>,
    steps: impl IntoIterator<Item = (Range<usize>, MomentumStep)>,
) {
    let elems = &tile.range.elems;
    let [_, momenta, ..] = state_planes(format, (elems.end - elems.start) as usize);
    let momenta = view_mut::<f32>(&mut tile.state[momenta]);
    for (elems, step) in steps {
        let bytes = elems.start * grads.elem_bytes()..elems.end * grads.elem_bytes();
        step.apply(&mut momenta[elems], grads, &mut tile.grad[bytes]);
    }
}

/// A step over one tile.
pub struct TileStep {
    pub format: TileFormat,
    pub grads: GradType,
    /// All other elements stay as they are.
    pub parts: Vec<StepPart>,
}

/// Elements of a tile that take the same step.
#[derive(Clone, Debug)]
pub struct StepPart {
    pub elems: Range<usize>,
    /// That of the tile, or one whose moments are among those of the tile.
    pub rule: UpdateRule,
    pub hyper: Hyper,
}

/// Knows the scalars of each element. `S` is what all tiles of a step share.
pub trait Scalars<S> {
    /// Returns the scalars of the tile of `range`.
    fn of_tile(&self, range: &TileRange, step: &S) -> TileStep;
}

/// The step's scalars, with the settings of each group of parameters.
#[derive(Clone, Debug)]
pub struct ByGroup {
    pub formats: TileFormats,
    pub groups: ParamGroups,
}

impl Scalars<Hyper> for ByGroup {
    fn of_tile(&self, range: &TileRange, step: &Hyper) -> TileStep {
        let format = self.formats.of_tile(range);
        TileStep {
            format,
            grads: format.master.grad_type(),
            parts: self.groups.parts(range, format.rule, step),
        }
    }
}

/// Updates on the CPU, on the calling thread.
pub struct CpuUpdate<A>(pub A);

impl<S, A: Scalars<S> + Send> Optimizer<S> for CpuUpdate<A> {
    fn update(&mut self, tile: TileUpdate<'_>, step: &S) {
        let range = tile.range;
        let TileStep {
            format,
            grads,
            parts,
        } = self.0.of_tile(range, step);
        let elems = (range.elems.end - range.elems.start) as usize;
        for StepPart {
            elems: part,
            rule,
            hyper,
        } in parts
        {
            let tile = Tile {
                format: TileFormat { rule, ..format },
                param: tile.param,
                state: tile.state,
                grad: tile.grad,
                elems,
            };
            step_range(&hyper, tile, grads, part);
        }
    }
}

/// Updates on a GPU: tiles are copied to it, updated and copied back. Several of these, each on its own
/// thread, keep both directions of the bus busy.
pub struct GpuUpdate<A> {
    pub scalars: A,
    pub updater: TileUpdater,
}

impl<S, A: Scalars<S> + Send> Optimizer<S> for GpuUpdate<A> {
    fn update(&mut self, tile: TileUpdate<'_>, step: &S) {
        let range = tile.range;
        let TileStep {
            format,
            grads,
            parts,
        } = self.scalars.of_tile(range, step);
        let elems = (range.elems.end - range.elems.start) as usize;
        // Parts of one rule together: a rule with fewer moments moves fewer bytes.
        for parts in parts.chunk_by(|a, b| a.rule == b.rule) {
            let rule = parts[0].rule;
            let tile = Tile {
                format: TileFormat { rule, ..format },
                param: tile.param,
                state: tile.state,
                grad: tile.grad,
                elems,
            };
            let parts = parts.iter().map(|part| (part.elems.clone(), part.hyper));
            let parts: Vec<_> = parts.collect();
            // The tile may be partly updated, so the run cannot continue. The swapper names the tile.
            if let Err(error) = self.updater.update(tile, grads, &parts) {
                panic!("{error}");
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const DECAYS: ParamGroup = ParamGroup {
        lr_factor: 1.0,
        weight_decay: 0.5,
        by_direction: false,
    };
    const FIXED: ParamGroup = ParamGroup {
        lr_factor: 1.0,
        weight_decay: 0.0,
        by_direction: false,
    };
    const SLOW: ParamGroup = ParamGroup {
        lr_factor: 0.25,
        weight_decay: 0.5,
        by_direction: false,
    };

    const HYPER: Hyper = Hyper {
        lr: 0.5,
        beta1: 0.9,
        beta2: 0.99,
        eps: 1e-8,
        weight_decay: 0.0,
        step: 1,
        grad_scale: 1.0,
        rounding: Rounding::ZERO,
    };

    #[test]
    fn a_tile_is_split_where_the_group_changes() {
        // Elements 30 to 40 and 45 to 60 are padding.
        let params = [(0, FIXED), (10, DECAYS), (20, DECAYS), (40, SLOW)];
        let groups = ParamGroups::new([(60, params)]);
        let split = |elems: Range<u64>| {
            let range = TileRange { unit: 0, elems };
            let parts = groups.parts(&range, UpdateRule::AdamW, &HYPER).into_iter();
            parts
                .map(|part| (part.elems, part.hyper.lr, part.hyper.weight_decay))
                .collect::<Vec<_>>()
        };
        assert_eq!(split(0..10), [(0..10, 0.5, 0.0)]);
        assert_eq!(
            split(5..45),
            [(0..5, 0.5, 0.0), (5..35, 0.5, 0.5), (35..40, 0.125, 0.5)]
        );
        assert_eq!(split(12..18), [(0..6, 0.5, 0.5)]);
        assert_eq!(split(50..60), [(0..10, 0.125, 0.5)]);
    }

    #[test]
    fn no_tile_of_a_trained_unit_is_empty() {
        let bytes = |rule, master: Master| {
            let format = TileFormat {
                rule,
                ..master.into()
            };
            (tile_bytes(format, 4).state_tile_bytes)(1000)
        };
        assert_eq!(bytes(UpdateRule::Sgd, Master::Fp32), STATE_BYTES_MIN);
        // Padded to a line.
        assert_eq!(bytes(UpdateRule::Sgd, Master::SplitBf16), 2048);
        assert_eq!(bytes(UpdateRule::AdamW, Master::Fp32), 2 * 4032);
    }

    #[test]
    fn each_group_decays_at_its_own_rate() {
        let mut update = CpuUpdate(ByGroup {
            formats: TileFormat::from(Master::Fp32).into(),
            groups: ParamGroups::new([(192, [(0, FIXED), (64, DECAYS), (128, SLOW)])]),
        });
        let range = TileRange {
            unit: 0,
            elems: 0..192,
        };
        let state_bytes = kernels::adamw::state_tile_bytes(Master::Fp32.into(), 192);
        // A vector of cache lines is aligned to a line.
        let mut lines = vec![[0u8; 64]; (192 * 4 * 2 + state_bytes) / 64 + 1];
        let bytes = lines.as_flattened_mut();
        let align = bytes.as_ptr().align_offset(64);
        let (param, rest) = bytes[align..].split_at_mut(192 * 4);
        let (state, grad) = rest.split_at_mut(state_bytes.next_multiple_of(64));
        param
            .chunks_exact_mut(4)
            .for_each(|elem| elem.copy_from_slice(&1.0f32.to_ne_bytes()));
        let tile = TileUpdate {
            range: &range,
            param: &mut *param,
            state,
            grad: &grad[..192 * 4],
        };
        update.update(tile, &HYPER);
        let weight =
            |elem: usize| f32::from_ne_bytes(param[elem * 4..elem * 4 + 4].try_into().unwrap());
        assert_eq!(
            [0, 63, 64, 127, 128, 191].map(weight),
            [1.0, 1.0, 0.75, 0.75, 0.9375, 0.9375]
        );
    }
}
