//! The layout of a tile's numbers, and the tile cut into one slice per plane.
//!
//! ```text
//!   param tile   [ parameter; n ]
//!   state tile   [ residual or master; n ] pad [ momentum; n ] pad [ variance; n ] pad      each pad to a multiple of 64 bytes
//!                                              fp32, bf16 or       like the momentum; Lion and Muon have none, and SGD neither
//!                                              codes of 8 bits
//!                  then, where moments are codes:  [ largest of each block of momentums ] pad [ of variances ] pad
//!   grad tile    [ gradient; n ]
//! ```
//!
//! The layout uses planes instead of records, so that each kernel reads and writes whole cache lines of one type.

use std::ops::Range;

use super::eight_bit::{self, BLOCK_ELEMS, CodeSign};
use crate::cast::{view, view_mut};
use crate::grad_type::GradType;
use crate::number;

/// Alignment of each plane: a cache line and the widest vector.
pub(crate) const PLANE_ALIGN_BYTES: usize = 64;

/// Rule of an optimizer's step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum UpdateRule {
    /// AdamW, with momentum and variance.
    #[default]
    AdamW,
    /// Lion, with momentum alone.
    Lion,
    /// Plain SGD, without moments.
    Sgd,
    /// SGD by directions that the caller computes from whole matrices: their momentum is stored, and a step leaves it as it is.
    Muon,
}

/// Storage of a parameter's master beside its moments.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Master {
    /// The bf16 parameter is the upper half of the master; the state begins with the i16 residual. Gradients are bf16.
    SplitBf16,
    /// The bf16 parameter is all there is: rounded stochastically after each step, see [`super::Rounding`]. The state is the moments
    /// only. Gradients are bf16.
    Bf16,
    /// Both the parameter and the gradients are fp32; the state is the moments only.
    Fp32,
    /// Both the parameter and the gradients are fp16; the state begins with the whole fp32 master.
    Fp16WholeMaster,
}

impl Master {
    /// Bytes of one parameter.
    pub fn param_bytes(self) -> usize {
        match self {
            Self::SplitBf16 | Self::Bf16 | Self::Fp16WholeMaster => 2,
            Self::Fp32 => 4,
        }
    }

    /// Bytes of one gradient in host memory.
    pub fn grad_bytes(self) -> usize {
        self.grad_type().elem_bytes()
    }

    /// Storage type of the gradients.
    pub fn grad_type(self) -> GradType {
        match self {
            Self::SplitBf16 | Self::Bf16 => GradType::Bf16,
            Self::Fp32 => GradType::Fp32,
            Self::Fp16WholeMaster => GradType::Fp16,
        }
    }

    /// Bytes of one element of the plane before the moments.
    fn first_plane_bytes(self) -> usize {
        match self {
            Self::SplitBf16 => 2,
            Self::Bf16 | Self::Fp32 => 0,
            Self::Fp16WholeMaster => 4,
        }
    }
}

/// Storage of the moments.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Moments {
    /// As they are computed.
    #[default]
    Fp32,
    /// Rounded stochastically after each step, see [`super::Rounding`].
    Bf16,
    /// Codes of 8 bits and the largest magnitude of each block, as bitsandbytes has them (`eight_bit.rs`).
    EightBit,
}

impl Moments {
    /// Bytes of one element of each moment, without what a block of elements shares.
    pub fn elem_bytes(self) -> usize {
        match self {
            Self::Fp32 => 4,
            Self::Bf16 => 2,
            Self::EightBit => 1,
        }
    }
}

/// Storage of a tile's numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TileFormat {
    /// Rule of the steps, which determines the moments.
    pub rule: UpdateRule,
    /// Storage of the parameters, their masters and gradients.
    pub master: Master,
    /// Storage of the moments.
    pub moments: Moments,
}

/// The format of AdamW with moments in fp32.
impl From<Master> for TileFormat {
    fn from(master: Master) -> Self {
        Self {
            rule: UpdateRule::AdamW,
            master,
            moments: Moments::Fp32,
        }
    }
}

impl TileFormat {
    /// Bytes of state per parameter, without the padding of planes and what blocks of moments share: 1/32 byte for two moments.
    pub fn state_bytes(self) -> usize {
        self.master.first_plane_bytes() + self.moment_bytes().iter().sum::<usize>()
    }

    /// Bytes of one element of momentum and variance; 0 for a moment that the rule does not have.
    fn moment_bytes(self) -> [usize; 2] {
        let bytes = self.moments.elem_bytes();
        match self.rule {
            UpdateRule::AdamW => [bytes; 2],
            UpdateRule::Lion | UpdateRule::Muon => [bytes, 0],
            UpdateRule::Sgd => [0; 2],
        }
    }

    /// Bytes of what the blocks of momentum and variance share, in a tile of `elems` elements.
    fn block_bytes(self, elems: usize) -> [usize; 2] {
        let bytes = |moment: usize| match self.moments {
            Moments::EightBit if moment > 0 => 4 * elems.div_ceil(BLOCK_ELEMS),
            _ => 0,
        };
        self.moment_bytes().map(bytes)
    }
}

/// One tile's buffers. Each starts at a multiple of 64 bytes and may be longer than the tile needs.
#[derive(Debug)]
pub struct Tile<'a> {
    /// Storage of the numbers.
    pub format: TileFormat,
    /// `elems * param_bytes` bytes, updated in place.
    pub param: &'a mut [u8],
    /// [`state_tile_bytes`] bytes, updated in place.
    pub state: &'a mut [u8],
    /// `elems * grad_bytes` bytes.
    pub grad: &'a [u8],
    /// Elements of the tile.
    pub elems: usize,
}

/// Bytes of the state of a tile of `elems` elements.
pub fn state_tile_bytes(format: TileFormat, elems: usize) -> usize {
    plane_bytes(format, elems).into_iter().map(padded).sum()
}

/// Byte ranges of the planes of the state of a tile of `elems` elements, without padding: what is before the moments, momentum, variance,
/// and the largest magnitudes of the blocks of both. The first is empty where the parameter is the master, the third for Lion and Muon, all moments for
/// SGD, the last two unless moments are in 8 bits.
pub fn state_planes(format: TileFormat, elems: usize) -> [Range<usize>; 5] {
    let mut start = 0;
    plane_bytes(format, elems).map(|bytes| {
        let plane = start..start + bytes;
        start += padded(bytes);
        plane
    })
}

/// Bytes of each plane of the state.
fn plane_bytes(format: TileFormat, elems: usize) -> [usize; 5] {
    let [momentum, variance] = format.moment_bytes();
    let [momentum_blocks, variance_blocks] = format.block_bytes(elems);
    [
        elems * format.master.first_plane_bytes(),
        elems * momentum,
        elems * variance,
        momentum_blocks,
        variance_blocks,
    ]
}

/// Bytes of a plane with the padding after it.
fn padded(bytes: usize) -> usize {
    bytes.next_multiple_of(PLANE_ALIGN_BYTES)
}

/// Initializes a tile from fp32 masters: writes `param`, zeroes the moments and the padding, so that equal masters give
/// equal bytes.
///
/// The tile has `masters.len()` elements. Panics if a slice is too short or does not start at a multiple of 64 bytes.
pub fn init_tile(format: TileFormat, masters: &[f32], param: &mut [u8], state: &mut [u8]) {
    let (master, elems) = (format.master, masters.len());
    check("param", param, elems * master.param_bytes());
    check("state", state, state_tile_bytes(format, elems));
    let param = &mut param[..elems * master.param_bytes()];
    let state = &mut state[..state_tile_bytes(format, elems)];
    state.fill(0);
    let first = &mut state[..elems * master.first_plane_bytes()];
    match master {
        Master::SplitBf16 => {
            let planes = view_mut(param).iter_mut().zip(view_mut(first));
            for (from, (param, residual)) in masters.iter().zip(planes) {
                (*param, *residual) = number::split(*from);
            }
        }
        Master::Bf16 => {
            for (from, param) in masters.iter().zip(view_mut(param)) {
                *param = number::to_bf16(*from);
            }
        }
        Master::Fp32 => {
            for (from, param) in masters.iter().zip(view_mut(param)) {
                *param = number::canonical(*from);
            }
        }
        Master::Fp16WholeMaster => {
            let planes = view_mut(param).iter_mut().zip(view_mut(first));
            for (from, (param, whole)) in masters.iter().zip(planes) {
                *param = number::to_fp16(*from);
                *whole = number::canonical(*from);
            }
        }
    }
}

/// Reads the exact fp32 masters of a tile of `out.len()` elements.
///
/// Panics if a slice is too short or does not start at a multiple of 64 bytes.
pub fn read_masters(format: TileFormat, param: &[u8], state: &[u8], out: &mut [f32]) {
    let (master, elems) = (format.master, out.len());
    check("param", param, elems * master.param_bytes());
    check("state", state, state_tile_bytes(format, elems));
    let param = &param[..elems * master.param_bytes()];
    let first = &state[..elems * master.first_plane_bytes()];
    match master {
        Master::SplitBf16 => {
            let planes = view(param).iter().zip(view(first));
            for (out, (param, residual)) in out.iter_mut().zip(planes) {
                *out = number::join(*param, *residual);
            }
        }
        Master::Bf16 => {
            for (out, param) in out.iter_mut().zip(view(param)) {
                *out = number::from_bf16(*param);
            }
        }
        Master::Fp32 => out.copy_from_slice(view(param)),
        Master::Fp16WholeMaster => out.copy_from_slice(view(first)),
    }
}

/// Reads momentum and variance of a tile of `elems` elements as fp32; one that the rule does not have is empty.
///
/// Panics if the slice is too short or does not start at a multiple of 64 bytes.
pub fn read_moments(format: TileFormat, state: &[u8], elems: usize) -> [Vec<f32>; 2] {
    check("state", state, state_tile_bytes(format, elems));
    let [_, momentum, variance, momentum_largest, variance_largest] = state_planes(format, elems);
    let read = |plane: Range<usize>, largest: Range<usize>, sign| {
        let plane = &state[plane];
        match format.moments {
            Moments::Fp32 => view(plane).to_vec(),
            Moments::Bf16 => view(plane).iter().copied().map(number::from_bf16).collect(),
            Moments::EightBit => {
                let mut wide = vec![0.0; plane.len()];
                eight_bit::widen(sign, plane, view(&state[largest]), &mut wide);
                wide
            }
        }
    };
    [
        read(momentum, momentum_largest, CodeSign::Signed),
        read(variance, variance_largest, CodeSign::Unsigned),
    ]
}

/// Replaces momentum and variance of the elements `range` of a tile of `elems` elements by `new`, rounded to the nearest. One that the rule does
/// not have is ignored. Moments in 8 bits of elements in the same blocks are stored anew, unless all of a block's are those of some stored block, as the
/// moments are that were read from there: these stay as they are.
///
/// Panics if a slice has another length than the range, or the state does not start at a multiple of 64 bytes.
pub fn write_moments(
    format: TileFormat,
    state: &mut [u8],
    elems: usize,
    range: Range<usize>,
    new: [&[f32]; 2],
) {
    check("state", state, state_tile_bytes(format, elems));
    let planes = state_planes(format, elems);
    let signs = [CodeSign::Signed, CodeSign::Unsigned];
    for (moment, (new, sign)) in new.into_iter().zip(signs).enumerate() {
        let [plane, largest] = [1, 3].map(|first: usize| planes[first + moment].clone());
        if plane.is_empty() {
            continue;
        }
        assert_eq!(new.len(), range.len(), "one new moment for each element");
        match format.moments {
            Moments::Fp32 => view_mut(&mut state[plane])[range.clone()].copy_from_slice(new),
            Moments::Bf16 => {
                let stored = &mut view_mut(&mut state[plane])[range.clone()];
                for (to, from) in stored.iter_mut().zip(new) {
                    *to = number::to_bf16(*from);
                }
            }
            Moments::EightBit => {
                let blocks = blocks_around(&range, elems);
                let (codes, rest) = state.split_at_mut(largest.start);
                let largest = view_mut(&mut rest[..largest.len()]);
                let codes = &mut codes[plane][blocks.clone()];
                let largest = &mut largest[blocks.start / BLOCK_ELEMS..];
                let mut wide = vec![0.0; codes.len()];
                eight_bit::widen(sign, codes, largest, &mut wide);
                wide[range.start - blocks.start..][..range.len()].copy_from_slice(new);
                eight_bit::narrow_again(sign, &wide, codes, largest);
            }
        }
    }
}

/// All elements of the blocks that `part` of a tile touches.
pub(super) fn blocks_around(part: &Range<usize>, elems: usize) -> Range<usize> {
    if part.is_empty() {
        return part.clone();
    }
    let end = part.end.next_multiple_of(BLOCK_ELEMS).min(elems);
    part.start / BLOCK_ELEMS * BLOCK_ELEMS..end
}

/// A range of elements: one slice per plane, all of one length. Moments are fp32.
pub(super) struct Elements<'a> {
    pub(super) weights: Weights<'a>,
    pub(super) moments: MomentPlanes<'a>,
}

/// The moments of a rule.
pub(super) enum MomentPlanes<'a> {
    AdamW {
        momentum: &'a mut [f32],
        variance: &'a mut [f32],
    },
    Lion {
        momentum: &'a mut [f32],
    },
    /// None, or none that the step uses.
    Sgd,
}

/// The planes whose types depend on the storage of the master.
pub(super) enum Weights<'a> {
    SplitBf16 {
        param: &'a mut [u16],
        residual: &'a mut [i16],
        grad: &'a [u16],
    },
    Fp32 {
        param: &'a mut [f32],
        grad: &'a [f32],
    },
    Fp16WholeMaster {
        param: &'a mut [u16],
        whole: &'a mut [f32],
        grad: &'a [u16],
    },
}

/// The stored bytes of a range of elements, plane by plane. Moments that the rule does not have are empty.
pub(super) struct Planes<'a> {
    pub(super) param: &'a mut [u8],
    pub(super) first: &'a mut [u8],
    pub(super) momentum: &'a mut [u8],
    pub(super) variance: &'a mut [u8],
    /// Largest magnitudes of the blocks of momentum and variance; empty unless moments are in 8 bits.
    pub(super) largest: [&'a mut [u8]; 2],
    pub(super) grad: &'a [u8],
}

impl<'a> Planes<'a> {
    /// Selects the elements of `range` of a tile whose gradients are of `grad_type`, and the moments of `blocks`, which is the range or, where
    /// moments have blocks, all elements of the blocks around it. Panics if a slice is too short or not aligned.
    pub(super) fn select(
        tile: Tile<'a>,
        grad_type: GradType,
        range: Range<usize>,
        blocks: Range<usize>,
    ) -> Self {
        let Tile {
            format,
            param,
            state,
            grad,
            elems,
        } = tile;
        let master = format.master;
        check("param", param, elems * master.param_bytes());
        check("state", state, state_tile_bytes(format, elems));
        check("grad", grad, elems * grad_type.elem_bytes());

        let part = |elem_bytes: usize| range.start * elem_bytes..range.end * elem_bytes;
        let mut rest = state;
        let [
            first,
            momentum,
            variance,
            momentum_largest,
            variance_largest,
        ] = plane_bytes(format, elems).map(|bytes| {
            let (plane, after) = std::mem::take(&mut rest).split_at_mut(padded(bytes));
            rest = after;
            &mut plane[..bytes]
        });
        let of_blocks = |elem_bytes: usize| blocks.start * elem_bytes..blocks.end * elem_bytes;
        let [momentum_bytes, variance_bytes] = format.moment_bytes();
        let largest = [momentum_largest, variance_largest].map(|plane: &mut [u8]| {
            let end = (4 * blocks.end.div_ceil(BLOCK_ELEMS)).min(plane.len());
            let start = (4 * (blocks.start / BLOCK_ELEMS)).min(end);
            &mut plane[start..end]
        });
        Self {
            param: &mut param[part(master.param_bytes())],
            first: &mut first[part(master.first_plane_bytes())],
            momentum: &mut momentum[of_blocks(momentum_bytes)],
            variance: &mut variance[of_blocks(variance_bytes)],
            largest,
            grad: &grad[part(grad_type.elem_bytes())],
        }
    }
}

impl<'a> Weights<'a> {
    /// Views planes whose gradients are of the master's own type.
    pub(super) fn view(
        master: Master,
        param: &'a mut [u8],
        first: &'a mut [u8],
        grad: &'a [u8],
    ) -> Self {
        match master {
            Master::SplitBf16 => Weights::SplitBf16 {
                param: view_mut(param),
                residual: view_mut(first),
                grad: view(grad),
            },
            Master::Bf16 => unreachable!("is stepped in fp32"),
            Master::Fp32 => Weights::Fp32 {
                param: view_mut(param),
                grad: view(grad),
            },
            Master::Fp16WholeMaster => Weights::Fp16WholeMaster {
                param: view_mut(param),
                whole: view_mut(first),
                grad: view(grad),
            },
        }
    }
}

fn check(name: &str, slice: &[u8], bytes_min: usize) {
    assert!(
        slice.len() >= bytes_min,
        "the {name} slice has {} bytes, its tile needs {bytes_min}",
        slice.len()
    );
    assert!(
        slice.as_ptr().addr().is_multiple_of(PLANE_ALIGN_BYTES),
        "the {name} slice starts at address {:#x}, which is no multiple of {PLANE_ALIGN_BYTES}",
        slice.as_ptr().addr()
    );
}
