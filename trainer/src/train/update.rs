//! The optimizer as the swapper calls it: one tile at a time, AdamW over it, weight decay only where a parameter wants it.

use std::ops::Range;

use kernels::adamw::{Hyper, Master, step_range};
use swapper::{Optimizer, TileRange};

use crate::model::UnitLayout;

/// Updates tiles of a model.
pub(super) struct Update {
    master: Master,
    /// Of each unit, the elements that decay, in order. The rest is norms and padding.
    decaying: Vec<Vec<Range<u64>>>,
}

impl Update {
    pub(super) fn new(master: Master, units: &[UnitLayout]) -> Self {
        let ranges = |unit: &UnitLayout| {
            let decaying = unit
                .params
                .iter()
                .filter(|param| param.decay)
                .map(|param| param.range_elems());
            decaying
                .map(|range| range.start as u64..range.end as u64)
                .collect()
        };
        Self {
            master,
            decaying: units.iter().map(ranges).collect(),
        }
    }
}

impl Optimizer<Hyper> for Update {
    fn update(
        &mut self,
        range: &TileRange,
        param: &mut [u8],
        state: &mut [u8],
        grad: &[u8],
        hyper: &Hyper,
    ) {
        let elems = (range.elems.end - range.elems.start) as usize;
        for (part, decays) in parts(&range.elems, &self.decaying[range.unit]) {
            let weight_decay = if decays { hyper.weight_decay } else { 0.0 };
            let hyper = Hyper {
                weight_decay,
                ..*hyper
            };
            step_range(self.master, &hyper, param, state, grad, elems, part);
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
    fn only_elements_that_want_it_decay() {
        let mut update = Update {
            master: Master::Fp32,
            decaying: vec![std::iter::once(64..128).collect()],
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
