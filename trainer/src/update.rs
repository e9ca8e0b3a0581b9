//! The optimizer over tiles: AdamW, weight decay only where a parameter wants it, on the processor or on a GPU.
//!
//! Both give the same bits, so either may update any tile.

use std::ops::Range;
use std::sync::Arc;

use kernels::adamw::{Hyper, Master, Tile, step_range};
use kernels::gpu::TileUpdater;
use swapper::{Optimizer, TileRange};

use crate::config::Decaying;
use crate::model::{ParamLayout, UnitLayout};

/// Which elements decay. The rest is other parameters and padding. A clone is the same table.
#[derive(Clone, Debug)]
pub(crate) struct Decay(Arc<Vec<Vec<Range<u64>>>>);

impl Decay {
    /// Of a model's units, by what the settings say.
    pub(crate) fn new(units: &[UnitLayout], rule: &Decaying) -> Self {
        let ranges = |unit: &UnitLayout| {
            let mut merged: Vec<Range<u64>> = Vec::new();
            for param in unit.params.iter().filter(|param| decays(rule, param)) {
                let range = param.range_elems();
                let (start, end) = (range.start as u64, range.end as u64);
                match merged.last_mut() {
                    Some(last) if last.end == start => last.end = end,
                    _ => merged.push(start..end),
                }
            }
            merged
        };
        Self(Arc::new(units.iter().map(ranges).collect()))
    }

    /// A tile cut where decay begins or ends: parts within the tile, and whether each decays.
    pub(crate) fn parts(&self, range: &TileRange) -> Vec<(Range<usize>, bool)> {
        parts(&range.elems, &self.0[range.unit])
    }
}

fn decays(rule: &Decaying, param: &ParamLayout) -> bool {
    match rule {
        Decaying::Matrices => param.decay,
        Decaying::All => true,
        Decaying::AllBut(patterns) => !patterns
            .iter()
            .any(|pattern| param.name.contains(pattern.as_str())),
    }
}

/// On the processor's threads.
pub(crate) struct CpuUpdate {
    pub(crate) master: Master,
    pub(crate) decay: Decay,
}

impl Optimizer<Hyper> for CpuUpdate {
    fn update(
        &mut self,
        range: &TileRange,
        param: &mut [u8],
        state: &mut [u8],
        grad: &[u8],
        hyper: &Hyper,
    ) {
        let elems = (range.elems.end - range.elems.start) as usize;
        for (part, decays) in self.decay.parts(range) {
            let hyper = hyper.of_part(decays);
            step_range(self.master, &hyper, param, state, grad, elems, part);
        }
    }
}

/// On a GPU: up, one step, down. Several of these on threads of their own keep both ways of the bus busy.
pub(crate) struct GpuUpdate {
    pub(crate) master: Master,
    pub(crate) decay: Decay,
    pub(crate) updater: TileUpdater,
}

impl Optimizer<Hyper> for GpuUpdate {
    fn update(
        &mut self,
        range: &TileRange,
        param: &mut [u8],
        state: &mut [u8],
        grad: &[u8],
        hyper: &Hyper,
    ) {
        let tile = Tile {
            master: self.master,
            param,
            state,
            grad,
            elems: (range.elems.end - range.elems.start) as usize,
        };
        let parts = self.decay.parts(range);
        let done = self.updater.update(hyper, tile, &parts);
        // The tile's bytes may be half old, half new: nothing can go on from here, and the swapper says which tile it was.
        if let Err(error) = done {
            panic!("{error}");
        }
    }
}

/// `tile` cut where decay begins or ends: parts within the tile, and whether each decays.
fn parts(tile: &Range<u64>, decaying: &[Range<u64>]) -> Vec<(Range<usize>, bool)> {
    let within = |elem: u64| (elem - tile.start) as usize;
    let mut parts = Vec::new();
    let mut at = tile.start;
    for range in decaying {
        let (start, end) = (range.start.max(at), range.end.min(tile.end));
        if start >= end {
            continue;
        }
        if at < start {
            parts.push((within(at)..within(start), false));
        }
        parts.push((within(start)..within(end), true));
        at = end;
    }
    if at < tile.end {
        parts.push((within(at)..within(tile.end), false));
    }
    parts
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::{Architecture, ModelConfig, ParamRole, unit_layouts};

    #[test]
    fn a_tile_is_cut_where_decay_begins_and_ends() {
        let decaying = [10..20, 20..30, 40..50];
        assert_eq!(parts(&(0..10), &decaying), [(0..10, false)]);
        assert_eq!(
            parts(&(5..45), &decaying),
            [
                (0..5, false),
                (5..15, true),
                (15..25, true),
                (25..35, false),
                (35..40, true)
            ]
        );
        assert_eq!(parts(&(12..18), &decaying), [(0..6, true)]);
        assert_eq!(parts(&(50..60), &decaying), [(0..10, false)]);
    }

    #[test]
    fn parameters_decay_as_the_settings_group_them() {
        let units = unit_layouts(&ModelConfig {
            architecture: Architecture::Gpt2,
            biases: Architecture::Gpt2.form().biases,
            vocab_size: 32,
            hidden_size: 64,
            intermediate_size: 64,
            layers: 1,
            heads: 1,
            kv_heads: 1,
            tied: true,
            ..ModelConfig::default()
        });
        let decaying = |rule: &Decaying| {
            let decay = Decay::new(&units, rule);
            let params = units.iter().zip(&*decay.0).flat_map(|(unit, ranges)| {
                let own = unit.params.iter().filter(|param| {
                    let start = param.offset_elems as u64;
                    ranges.iter().any(|range| range.contains(&start))
                });
                own.map(|param| param.member)
            });
            params.collect::<Vec<_>>()
        };
        let all: Vec<ParamRole> = units
            .iter()
            .flat_map(|unit| unit.params.iter().map(|param| param.member))
            .collect();
        assert_eq!(decaying(&Decaying::All), all);
        use ParamRole::{Down, Embedding, Key, Out, Positions, Query, Up, Value};
        let matrices = [Embedding, Positions, Query, Key, Value, Out, Up, Down];
        assert_eq!(decaying(&Decaying::Matrices), matrices);
        let but = |patterns: &[&str]| {
            Decaying::AllBut(patterns.iter().map(|text| (*text).to_owned()).collect())
        };
        assert_eq!(decaying(&but(&["bias", "ln_"])), matrices);
        assert_eq!(
            decaying(&but(&["bias", "ln_", "wpe", "c_attn"])),
            [Embedding, Out, Up, Down]
        );
        assert_eq!(decaying(&but(&[])), all);
    }

    #[test]
    fn only_elements_that_want_it_decay() {
        let mut update = CpuUpdate {
            master: Master::Fp32,
            decay: Decay(Arc::new(vec![std::iter::once(64..128).collect()])),
        };
        let range = TileRange {
            unit: 0,
            elems: 0..192,
        };
        let state_bytes = kernels::adamw::state_tile_bytes(Master::Fp32, 192);
        // Slices of a vector of cache lines start at one.
        let mut lines = vec![[0u8; 64]; (192 * 4 * 2 + state_bytes) / 64 + 1];
        let bytes = lines.as_flattened_mut();
        let align = bytes.as_ptr().align_offset(64);
        let (param, rest) = bytes[align..].split_at_mut(192 * 4);
        let (state, grad) = rest.split_at_mut(state_bytes.next_multiple_of(64));
        param
            .chunks_exact_mut(4)
            .for_each(|elem| elem.copy_from_slice(&1.0f32.to_ne_bytes()));
        let hyper = Hyper {
            lr: 0.5,
            beta1: 0.9,
            beta2: 0.99,
            eps: 1e-8,
            weight_decay: 0.5,
            step: 1,
            grad_scale: 1.0,
        };
        update.update(&range, param, state, &grad[..192 * 4], &hyper);
        let weight =
            |elem: usize| f32::from_ne_bytes(param[elem * 4..elem * 4 + 4].try_into().unwrap());
        assert_eq!(
            (weight(0), weight(63), weight(64), weight(127), weight(128)),
            (1.0, 1.0, 0.75, 0.75, 1.0)
        );
    }
}
