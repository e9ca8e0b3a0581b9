//! Helpers of the tests on the CPU: the instruction sets of this machine, and a pool of threads.

use kernels::InstructionSet;
use kernels::adamw::{Hyper, Tile, TileFormat, step_range};

pub(crate) use crate::shared::*;

/// Returns the vector instruction sets of this machine; prints which ones it lacks.
pub(crate) fn available_vector_sets() -> Vec<InstructionSet> {
    let (present, missing): (Vec<_>, Vec<_>) = [InstructionSet::Avx2, InstructionSet::Avx512]
        .into_iter()
        .partition(|set| set.available());
    for set in missing {
        println!(
            "skipped: {}: {set:?}: this processor has none",
            std::thread::current().name().unwrap_or("a test")
        );
    }
    present
}

/// Runs `work` in a pool of its own.
pub(crate) fn with_threads<T: Send>(thread_count: usize, work: impl FnOnce() -> T + Send) -> T {
    let pool = rayon::ThreadPoolBuilder::new()
        .num_threads(thread_count)
        .build()
        .unwrap();
    pool.install(work)
}

/// Takes one step over a whole tile, with gradients of its master's own type.
pub(crate) fn step_tile(
    format: TileFormat,
    hyper: &Hyper,
    param: &mut [u8],
    state: &mut [u8],
    grad: &[u8],
    elems: usize,
) {
    let tile = Tile {
        format,
        param,
        state,
        grad,
        elems,
    };
    step_range(hyper, tile, format.master.grad_type(), 0..elems);
}

/// Steps all of a tile.
pub(crate) fn step(tile: &mut OwnedTile, hyper: &Hyper) {
    let (format, elems) = (tile.format, tile.elems);
    let OwnedTile {
        param, state, grad, ..
    } = tile;
    step_tile(format, hyper, param, state, grad, elems);
}
