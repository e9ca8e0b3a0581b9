//! What updates tiles: the caller's arithmetic.

use crate::layout::TileRange;

/// One tile that is to be updated, with its gradients. Slices start at multiples of 4096 bytes.
#[derive(Debug)]
pub struct TileUpdate<'a> {
    /// The elements of the tile.
    pub range: &'a TileRange,
    /// Parameters, updated in place.
    pub param: &'a mut [u8],
    /// Optimizer state, updated in place.
    pub state: &'a mut [u8],
    /// Gradients, which are read.
    pub grad: &'a [u8],
}

/// Updates one tile. Runs on a thread of its own, tiles in the program's order, and must be deterministic.
///
/// `hyper` is the argument of `finish_step`. A closure with the same arguments is an optimizer too.
pub trait Optimizer<H>: Send {
    /// Updates the tile.
    fn update(&mut self, tile: TileUpdate<'_>, hyper: &H);
}

impl<H, F> Optimizer<H> for F
where
    F: FnMut(TileUpdate<'_>, &H) + Send,
{
    fn update(&mut self, tile: TileUpdate<'_>, hyper: &H) {
        self(tile, hyper);
    }
}
