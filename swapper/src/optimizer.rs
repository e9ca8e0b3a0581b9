//! What updates tiles: the caller's arithmetic.

use crate::layout::TileRange;

/// Updates one tile. Runs on a thread of its own, tiles in the program's order, and must be deterministic.
///
/// `param` and `state` are updated in place, `grad` is read; `hyper` is the argument of `finish_step`. Slices start at
/// multiples of 4096 bytes. A closure with the same arguments is an optimizer too.
pub trait Optimizer<H>: Send {
    /// Updates the tile of `range`.
    fn update(
        &mut self,
        range: &TileRange,
        param: &mut [u8],
        state: &mut [u8],
        grad: &[u8],
        hyper: &H,
    );
}

impl<H, F> Optimizer<H> for F
where
    F: FnMut(&TileRange, &mut [u8], &mut [u8], &[u8], &H) + Send,
{
    fn update(
        &mut self,
        range: &TileRange,
        param: &mut [u8],
        state: &mut [u8],
        grad: &[u8],
        hyper: &H,
    ) {
        self(range, param, state, grad, hyper);
    }
}
