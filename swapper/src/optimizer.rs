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

/// A range to write. For a first content every byte of `param` and `state` must be written, which hold arbitrary bytes
/// before; for another one they hold the present content.
#[derive(Debug)]
pub struct UninitTile<'a> {
    /// The range.
    pub range: &'a TileRange,
    /// Parameters to write.
    pub param: &'a mut [u8],
    /// State to write; empty for a unit that is not trained.
    pub state: &'a mut [u8],
}

/// Updates one tile. Runs on a thread of its own, tiles in the program's order, and must be deterministic.
///
/// `hyper` is the argument of `finish_step`. A closure with the same arguments is an optimizer too.
pub trait Optimizer<H>: Send {
    /// Updates the tile.
    fn update(&mut self, tile: TileUpdate<'_>, hyper: &H);

    /// Writes the caller's newest content of a range of an external unit ([`crate::UnitShape::external`]), every byte of it, for a commit.
    ///
    /// # Panics
    /// The optimizer knows of no external unit, or the content cannot be read: like a panic of an update, it ends the swapper.
    fn copy(&mut self, tile: UninitTile<'_>) {
        panic!("nothing has the content of {:?}", tile.range);
    }
}

impl<H, F> Optimizer<H> for F
where
    F: FnMut(TileUpdate<'_>, &H) + Send,
{
    fn update(&mut self, tile: TileUpdate<'_>, hyper: &H) {
        self(tile, hyper);
    }
}
