//! Helpers of this package's test programs: memory aligned like an arena's slots, and numbers that expose arithmetic faults.

use kernels::adamw::{
    Master, Moments, Tile, TileFormat, UpdateRule, state_planes, state_tile_bytes,
};
use std::ops::{Deref, DerefMut};

/// Masters that are fp32.
pub(crate) const MASTERS: [Master; 3] = [Master::SplitBf16, Master::Fp32, Master::Fp16WholeMaster];

/// Every format of a tile.
pub(crate) fn formats() -> impl Iterator<Item = TileFormat> {
    let rules = [UpdateRule::AdamW, UpdateRule::Lion, UpdateRule::Sgd].into_iter();
    rules.flat_map(|rule| {
        let of = move |moments| {
            let masters = MASTERS.into_iter().chain([Master::Bf16]);
            masters.map(move |master| TileFormat {
                rule,
                master,
                moments,
            })
        };
        [Moments::Fp32, Moments::Bf16, Moments::EightBit]
            .into_iter()
            .flat_map(of)
    })
}

/// Bytes that start at a multiple of 64.
pub(crate) struct AlignedBytes {
    memory: Vec<u8>,
    start: usize,
    len: usize,
}

impl AlignedBytes {
    pub(crate) fn from_bytes(bytes: &[u8]) -> Self {
        let mut memory = vec![0; bytes.len() + 64];
        let start = memory.as_ptr().align_offset(64);
        memory[start..start + bytes.len()].copy_from_slice(bytes);
        let len = bytes.len();
        Self { memory, start, len }
    }

    pub(crate) fn zeroed(len: usize) -> Self {
        Self::from_bytes(&vec![0; len])
    }

    pub(crate) fn of_f32(numbers: &[f32]) -> Self {
        Self::from_bytes(
            &numbers
                .iter()
                .flat_map(|x| x.to_le_bytes())
                .collect::<Vec<_>>(),
        )
    }

    pub(crate) fn of_u16(numbers: &[u16]) -> Self {
        Self::from_bytes(
            &numbers
                .iter()
                .flat_map(|x| x.to_le_bytes())
                .collect::<Vec<_>>(),
        )
    }

    pub(crate) fn f32_at(&self, byte: usize) -> f32 {
        f32::from_le_bytes(self[byte..byte + 4].try_into().unwrap())
    }

    pub(crate) fn u16_at(&self, byte: usize) -> u16 {
        u16::from_le_bytes(self[byte..byte + 2].try_into().unwrap())
    }
}

impl Clone for AlignedBytes {
    fn clone(&self) -> Self {
        Self::from_bytes(self)
    }
}

impl Deref for AlignedBytes {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        &self.memory[self.start..self.start + self.len]
    }
}

impl DerefMut for AlignedBytes {
    fn deref_mut(&mut self) -> &mut [u8] {
        &mut self.memory[self.start..self.start + self.len]
    }
}

/// A tile that owns its memory.
#[derive(Clone)]
pub(crate) struct OwnedTile {
    pub(crate) format: TileFormat,
    pub(crate) elems: usize,
    pub(crate) param: AlignedBytes,
    pub(crate) state: AlignedBytes,
    pub(crate) grad: AlignedBytes,
}

impl OwnedTile {
    pub(crate) fn zeroed(format: impl Into<TileFormat>, elems: usize) -> Self {
        let format = format.into();
        let master = format.master;
        Self {
            format,
            elems,
            param: AlignedBytes::zeroed(elems * master.param_bytes()),
            state: AlignedBytes::zeroed(state_tile_bytes(format, elems)),
            grad: AlignedBytes::zeroed(elems * master.grad_bytes()),
        }
    }

    /// Fills every plane with special numbers, including some that training never has (a negative variance).
    pub(crate) fn hard(format: impl Into<TileFormat>, elems: usize, random: &mut Random) -> Self {
        let mut tile = Self::zeroed(format, elems);
        let TileFormat {
            master, moments, ..
        } = tile.format;
        random.fill_hard(&mut tile.param, master.param_bytes());
        let [_, momentum, _, largest, _] = state_planes(tile.format, elems);
        let (first, moments_planes) = tile.state.split_at_mut(momentum.start);
        let first_bytes = if master == Master::SplitBf16 { 2 } else { 4 };
        random.fill_hard(first, first_bytes);
        let (moments_planes, largest) = moments_planes.split_at_mut(largest.start - momentum.start);
        random.fill_hard(moments_planes, moments.elem_bytes());
        random.fill_hard(largest, 4);
        random.fill_hard(&mut tile.grad, master.grad_bytes());
        tile
    }

    pub(crate) fn borrow(&mut self) -> Tile<'_> {
        Tile {
            format: self.format,
            param: &mut self.param,
            state: &mut self.state,
            grad: &self.grad,
            elems: self.elems,
        }
    }

    /// Finds the first element that differs and prints its bytes on both sides.
    pub(crate) fn assert_same_bits(&self, other: &Self, what: &str) {
        for (name, a, b) in [
            ("param", &self.param, &other.param),
            ("state", &self.state, &other.state),
        ] {
            if let Some(at) = (0..a.len()).find(|at| a[*at] != b[*at]) {
                panic!(
                    "{what}: {name} of {} {:?} elements differs at byte {at} of {}: {:02x?} and {:02x?}",
                    self.elems,
                    self.format,
                    a.len(),
                    &a[at & !3..(at & !3) + 4],
                    &b[at & !3..(at & !3) + 4]
                );
            }
        }
        assert!(
            *self.grad == *other.grad,
            "{what}: the gradient was written"
        );
    }
}

/// fp32 numbers at which roundings and comparisons change.
pub(crate) const SPECIAL_F32: [u32; 20] = [
    0x0000_0000, // 0
    0x8000_0000, // -0
    0x7F80_0000, // inf
    0xFF80_0000, // -inf
    0x7FC0_0000, // quiet NaN
    0xFFC0_1234, // negative NaN with a payload
    0x7F80_0001, // signalling NaN
    0xFFBF_FFFF, // negative signalling NaN
    0x0000_0001, // least denormal
    0x807F_FFFF, // greatest negative denormal
    0x0040_0000, // a denormal
    0x0080_0000, // least normal
    0x7F7F_FFFF, // greatest
    0xFF7F_FFFF, // least
    0x7F7F_8000, // rounds to infinity as bf16
    0x3F80_8000, // half way between two bf16
    0x477F_F000, // half way between the greatest fp16 and infinity
    0x3380_0000, // half the least denormal fp16
    0x3F80_0000, // 1
    0xBF80_0000, // -1
];

/// The same kind of numbers in 16 bits, fp16 and bf16.
pub(crate) const SPECIAL_U16: [u16; 16] = [
    0x0000, 0x8000, 0x7F80, 0xFF80, 0x7FC0, 0x7F81, 0xFFFF, 0x0001, 0x807F, 0x7F7F, 0x7C00, 0xFC00,
    0x7C01, 0x7BFF, 0x0400, 0x3F80,
];

/// Splitmix64: the same numbers on every machine.
pub(crate) struct Random(pub(crate) u64);

impl Random {
    pub(crate) fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let x = (self.0 ^ self.0 >> 30).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let x = (x ^ x >> 27).wrapping_mul(0x94D0_49BB_1331_11EB);
        x ^ x >> 31
    }

    pub(crate) fn below(&mut self, end: usize) -> usize {
        (self.bits() % end as u64) as usize
    }

    /// Returns a number evenly distributed in -1..1.
    pub(crate) fn even(&mut self) -> f32 {
        (self.bits() >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    }

    /// Returns a number that is roughly normal with deviation 1.
    pub(crate) fn normal(&mut self) -> f32 {
        (0..12).map(|_| self.even()).sum::<f32>() / 2.0
    }

    /// Returns a special number in one of eight cases, random bits in one of four, and otherwise a number near 1 in magnitude.
    pub(crate) fn hard_f32(&mut self) -> f32 {
        match self.below(8) {
            0 => f32::from_bits(SPECIAL_F32[self.below(SPECIAL_F32.len())]),
            1 | 2 => f32::from_bits(self.bits() as u32),
            _ => self.normal(),
        }
    }

    pub(crate) fn hard_u16(&mut self) -> u16 {
        match self.below(8) {
            0 => SPECIAL_U16[self.below(SPECIAL_U16.len())],
            _ => self.bits() as u16,
        }
    }

    pub(crate) fn fill_hard(&mut self, bytes: &mut [u8], elem_bytes: usize) {
        for elem in bytes.chunks_exact_mut(elem_bytes) {
            match elem_bytes {
                1 => elem[0] = self.bits() as u8,
                2 => elem.copy_from_slice(&self.hard_u16().to_le_bytes()),
                4 => elem.copy_from_slice(&self.hard_f32().to_le_bytes()),
                _ => unreachable!("elements have 1, 2 or 4 bytes"),
            }
        }
    }
}
