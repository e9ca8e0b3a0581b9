//! The layout of a tile's numbers, and the tile cut into one slice per plane.
//!
//! ```text
//!   param tile   [ parameter; n ]
//!   state tile   [ residual or master; n ] pad [ momentum; n ] pad [ variance; n ] pad      each pad to a multiple of 64 bytes
//!                                              fp32 or bf16        like the momentum; Lion has none, and SGD neither
//!   grad tile    [ gradient; n ]
//! ```
//!
//! The layout uses planes instead of records, so that each kernel reads and writes whole cache lines of one type.

use std::ops::Range;

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
    /// Plain SGD, without moments: also both halves of Muon, whose momentum is a tile of its own.
    Sgd,
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
}

impl Moments {
    /// Bytes of one element of each moment.
    pub fn elem_bytes(self) -> usize {
        match self {
            Self::Fp32 => 4,
            Self::Bf16 => 2,
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
    /// Bytes of state per parameter, without the padding of planes.
    pub fn state_bytes(self) -> usize {
        self.master.first_plane_bytes() + self.moment_bytes().iter().sum::<usize>()
    }

    /// Bytes of one element of momentum and variance; 0 for a moment that the rule does not have.
    fn moment_bytes(self) -> [usize; 2] {
        let bytes = self.moments.elem_bytes();
        match self.rule {
            UpdateRule::AdamW => [bytes; 2],
            UpdateRule::Lion => [bytes, 0],
            UpdateRule::Sgd => [0; 2],
        }
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
    let [_, variance] = moment_offsets_bytes(format, elems);
    variance + plane_bytes(format.moment_bytes()[1], elems)
}

/// Byte ranges of the three planes of the state of a tile of `elems` elements, without padding; the first is empty where the
/// parameter is the master, the last for Lion, the last two for SGD.
pub fn state_planes(format: TileFormat, elems: usize) -> [Range<usize>; 3] {
    let [momentum, variance] = moment_offsets_bytes(format, elems);
    let [momentum_bytes, variance_bytes] = format.moment_bytes();
    [
        0..elems * format.master.first_plane_bytes(),
        momentum..momentum + elems * momentum_bytes,
        variance..variance + elems * variance_bytes,
    ]
}

/// Offsets of the momentum and the variance within the state of a tile of `elems` elements.
pub(crate) fn moment_offsets_bytes(format: TileFormat, elems: usize) -> [usize; 2] {
    let momentum = plane_bytes(format.master.first_plane_bytes(), elems);
    [
        momentum,
        momentum + plane_bytes(format.moment_bytes()[0], elems),
    ]
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
    pub(super) grad: &'a [u8],
}

impl<'a> Planes<'a> {
    /// Selects the elements of `range` of a tile whose gradients are of `grad_type`. Panics if a slice is too short or not aligned.
    pub(super) fn select(tile: Tile<'a>, grad_type: GradType, range: Range<usize>) -> Self {
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
        let [momentum_bytes, variance_bytes] = format.moment_bytes();
        let (first, rest) = state.split_at_mut(plane_bytes(master.first_plane_bytes(), elems));
        let (momentum, variance) = rest.split_at_mut(plane_bytes(momentum_bytes, elems));
        Self {
            param: &mut param[part(master.param_bytes())],
            first: &mut first[part(master.first_plane_bytes())],
            momentum: &mut momentum[part(momentum_bytes)],
            variance: &mut variance[part(variance_bytes)],
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

fn plane_bytes(elem_bytes: usize, elems: usize) -> usize {
    (elem_bytes * elems).next_multiple_of(PLANE_ALIGN_BYTES)
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
