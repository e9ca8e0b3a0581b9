//! AdamW over tiles, on the CPU or on a GPU, with scalars that may differ between a tile's elements.
//!
//! CPU and GPU give the same bits, so either may update any tile.

use std::ops::Range;
use std::sync::Arc;

use kernels::adamw::{Hyper, Master, Tile, state_tile_bytes, step_range, step_range_fp32_grad};
use kernels::gpu::TileUpdater;
use kernels::reduce::GradType;
use swapper::{Optimizer, TileBytes, TileRange};

/// Threads that stream tiles through a GPU: one copies to the GPU, one computes and one copies back at a
/// time.
pub const GPU_UPDATERS: usize = 3;

/// Bytes of tiles whose master weights have the format `master`.
pub fn tile_bytes(master: Master) -> TileBytes {
    let state_tile_bytes = match master {
        Master::SplitBf16 => |elems| state_tile_bytes(Master::SplitBf16, elems),
        Master::Fp32 => |elems| state_tile_bytes(Master::Fp32, elems),
        Master::Fp16WholeMaster => |elems| state_tile_bytes(Master::Fp16WholeMaster, elems),
    };
    TileBytes {
        param_bytes_per_elem: master.param_bytes(),
        grad_bytes_per_elem: master.grad_bytes(),
        state_tile_bytes,
    }
}

/// Elements that weight decay applies to; it does not apply to other parameters and padding. Clones share one
/// table.
#[derive(Clone, Debug)]
pub struct Decay(Arc<Vec<Vec<Range<u64>>>>);

impl Decay {
    /// Makes the table from ranges of each unit's decaying elements in ascending order.
    pub fn new<R: IntoIterator<Item = Range<u64>>>(units: impl IntoIterator<Item = R>) -> Self {
        let merged = |ranges: R| {
            let mut merged: Vec<Range<u64>> = Vec::new();
            for range in ranges {
                match merged.last_mut() {
                    Some(last) if last.end == range.start => last.end = range.end,
                    _ => merged.push(range),
                }
            }
            merged
        };
        Self(Arc::new(units.into_iter().map(merged).collect()))
    }

    /// Splits a tile where decay begins or ends. Returns the parts as elements of the tile, and whether each
    /// decays.
    pub fn parts(&self, range: &TileRange) -> Vec<(Range<usize>, bool)> {
        parts(&range.elems, &self.0[range.unit])
    }
}

/// AdamW over one tile.
pub struct TileStep {
    pub master: Master,
    pub grads: GradType,
    /// Elements of the tile with their scalars; all other elements stay as they are.
    pub parts: Vec<(Range<usize>, Hyper)>,
}

/// Knows AdamW's scalars of each element. `S` is what all tiles of a step share.
pub trait Scalars<S> {
    /// Returns the scalars of the tile of `range`.
    fn of_tile(&self, range: &TileRange, step: &S) -> TileStep;
}

/// The same scalars for all elements, except that some have no weight decay.
#[derive(Clone, Debug)]
pub struct WithDecay {
    pub master: Master,
    pub decay: Decay,
}

impl Scalars<Hyper> for WithDecay {
    fn of_tile(&self, range: &TileRange, step: &Hyper) -> TileStep {
        let parts = self.decay.parts(range).into_iter();
        TileStep {
            master: self.master,
            grads: self.master.grad_type(),
            parts: parts
                .map(|(part, decays)| (part, step.of_part(decays)))
                .collect(),
        }
    }
}

/// Updates on the CPU, on the calling thread.
pub struct CpuUpdate<A>(pub A);

impl<S, A: Scalars<S> + Send> Optimizer<S> for CpuUpdate<A> {
    fn update(
        &mut self,
        range: &TileRange,
        param: &mut [u8],
        state: &mut [u8],
        grad: &[u8],
        step: &S,
    ) {
        let TileStep {
            master,
            grads,
            parts,
        } = self.0.of_tile(range, step);
        let elems = (range.elems.end - range.elems.start) as usize;
        let step_range = match grads {
            GradType::Fp32 => step_range_fp32_grad,
            GradType::Bf16 | GradType::Fp16 => step_range,
        };
        for (part, hyper) in parts {
            step_range(master, &hyper, param, state, grad, elems, part);
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
    fn update(
        &mut self,
        range: &TileRange,
        param: &mut [u8],
        state: &mut [u8],
        grad: &[u8],
        step: &S,
    ) {
        let TileStep {
            master,
            grads,
            parts,
        } = self.scalars.of_tile(range, step);
        let tile = Tile {
            master,
            param,
            state,
            grad,
            elems: (range.elems.end - range.elems.start) as usize,
        };
        // The tile may be partly updated, so the run cannot continue. The swapper names the tile.
        if let Err(error) = self.updater.update(tile, grads, &parts) {
            panic!("{error}");
        }
    }
}

/// Computes [`Decay::parts`] of `tile` from the decaying elements of its unit.
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
    fn a_tile_is_split_where_decay_begins_and_ends() {
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
    fn only_the_named_elements_decay() {
        let mut update = CpuUpdate(WithDecay {
            master: Master::Fp32,
            decay: Decay::new([std::iter::once(64..128)]),
        });
        let range = TileRange {
            unit: 0,
            elems: 0..192,
        };
        let state_bytes = kernels::adamw::state_tile_bytes(Master::Fp32, 192);
        // A vector of cache lines is aligned to a line.
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
