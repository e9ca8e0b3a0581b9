//! Tests that a tile's planes have the documented places, and that an invalid tile is refused before it is touched.
//!
//! Likely faults are planes that overlap or move between versions (stored tiles would be misread), padding with old bytes (equal tiles with different
//! checksums), and masters that change when they are stored and read.

use crate::common::{AlignedBytes, OwnedTile, Random, formats, step_tile};
use kernels::adamw::{
    Hyper, Master, Moments, Rounding, Tile, UpdateRule, init_tile, read_masters, state_tile_bytes,
    step_range,
};
use kernels::number;

const HYPER: Hyper = Hyper {
    lr: 1.0,
    beta1: 0.5,
    beta2: 0.75,
    eps: 0.0,
    weight_decay: 0.0,
    step: 1,
    grad_scale: 1.0,
    rounding: Rounding::ZERO,
};

#[test]
fn sizes_are_those_the_design_counts_with() {
    let sizes = formats().map(|format| {
        let master = format.master;
        let sizes = (
            master.param_bytes(),
            master.grad_bytes(),
            format.state_bytes(),
        );
        assert_eq!(state_tile_bytes(format, 0), 0);
        // Two blocks of 256 elements: their largest magnitudes take a line a moment.
        let lines = match (format.moments, format.rule) {
            (Moments::EightBit, UpdateRule::AdamW) => 2,
            (Moments::EightBit, UpdateRule::Lion) => 1,
            _ => 0,
        };
        let bytes = 320 * format.state_bytes() + 64 * lines;
        assert_eq!(state_tile_bytes(format, 320), bytes);
        sizes
    });
    assert_eq!(
        sizes.collect::<Vec<_>>(),
        [
            (2, 2, 10),
            (4, 4, 8),
            (2, 2, 12),
            (2, 2, 8),
            (2, 2, 6),
            (4, 4, 4),
            (2, 2, 8),
            (2, 2, 4),
            (2, 2, 4),
            (4, 4, 2),
            (2, 2, 6),
            (2, 2, 2),
            // Lion
            (2, 2, 6),
            (4, 4, 4),
            (2, 2, 8),
            (2, 2, 4),
            (2, 2, 4),
            (4, 4, 2),
            (2, 2, 6),
            (2, 2, 2),
            (2, 2, 3),
            (4, 4, 1),
            (2, 2, 5),
            (2, 2, 1),
            // SGD
            (2, 2, 2),
            (4, 4, 0),
            (2, 2, 4),
            (2, 2, 0),
            (2, 2, 2),
            (4, 4, 0),
            (2, 2, 4),
            (2, 2, 0),
            (2, 2, 2),
            (4, 4, 0),
            (2, 2, 4),
            (2, 2, 0),
        ]
    );
}

#[test]
fn planes_are_padded_to_lines() {
    let tile_bytes = |elems| -> Vec<usize> {
        formats()
            .map(|format| state_tile_bytes(format, elems))
            .collect()
    };
    // One element: each plane is padded to 64 bytes.
    let (adamw, lion, sgd) = ([192, 128, 192, 128], [128, 64, 128, 64], [64, 0, 64, 0]);
    let (adamw_8bit, lion_8bit) = ([320, 256, 320, 256], [192, 128, 192, 128]);
    assert_eq!(
        tile_bytes(1),
        [
            adamw, adamw, adamw_8bit, lion, lion, lion_8bit, sgd, sgd, sgd
        ]
        .concat()
    );
    // 33 elements: 66 bytes of each 16-bit plane, 132 of each fp32 plane, 33 of codes and 4 of their block.
    assert_eq!(
        tile_bytes(33),
        [
            128 + 192 + 192,
            192 + 192,
            192 * 3,
            192 * 2,
            128 * 3,
            128 * 2,
            192 + 128 * 2,
            128 * 2,
            128 + 64 * 4,
            64 * 4,
            192 + 64 * 4,
            64 * 4,
            128 + 192,
            192,
            192 * 2,
            192,
            128 * 2,
            128,
            192 + 128,
            128,
            128 + 64 * 2,
            64 * 2,
            192 + 64 * 2,
            64 * 2,
            128,
            0,
            192,
            0,
            128,
            0,
            192,
            0,
            128,
            0,
            192,
            0
        ]
    );
}

#[test]
fn a_stepped_tile_has_the_bytes_it_always_had() {
    // Golden: one element, master 1 + 2^-20, gradient 2. m = 0.5 * 2 = 1, v = 0.25 * 4 = 1; corrected 2 / sqrt(4) = 1; p = 2^-20.
    let mut tile = OwnedTile::zeroed(Master::SplitBf16, 1);
    init_tile(
        Master::SplitBf16.into(),
        &[1.0 + 2f32.powi(-20)],
        &mut tile.param,
        &mut tile.state,
    );
    assert_eq!(*tile.param, [0x80, 0x3F]);
    assert_eq!(tile.state[..2], [8, 0]);
    tile.grad = AlignedBytes::of_u16(&[0x4000]);
    step_tile(
        Master::SplitBf16.into(),
        &HYPER,
        &mut tile.param,
        &mut tile.state,
        &tile.grad,
        1,
    );
    let mut state = vec![0; 192];
    state[64..68].copy_from_slice(&[0, 0, 0x80, 0x3F]);
    state[128..132].copy_from_slice(&[0, 0, 0x80, 0x3F]);
    assert_eq!(*tile.param, [0x80, 0x35]);
    assert_eq!(*tile.state, *state);
}

#[test]
fn masters_come_back_as_they_went_in() {
    let mut random = Random(21);
    let masters: Vec<f32> = (0..3001).map(|_| random.hard_f32()).collect();
    for format in formats() {
        let mut tile = OwnedTile::zeroed(format, masters.len());
        init_tile(format, &masters, &mut tile.param, &mut tile.state);
        let mut out = vec![1.0; masters.len()];
        read_masters(format, &tile.param, &tile.state, &mut out);
        for (read, written) in out.iter().zip(&masters) {
            let kept = match format.master {
                Master::Bf16 => number::from_bf16(number::to_bf16(*written)),
                _ => number::canonical(*written),
            };
            assert_eq!(read.to_bits(), kept.to_bits(), "{format:?}");
        }
    }
}

#[test]
fn equal_masters_give_equal_bytes_whatever_the_slot_held() {
    let masters: Vec<f32> = (0..77).map(|i| i as f32).collect();
    for format in formats() {
        let mut clean = OwnedTile::zeroed(format, 77);
        let mut used = OwnedTile::hard(format, 77, &mut Random(22));
        for tile in [&mut clean, &mut used] {
            init_tile(format, &masters, &mut tile.param, &mut tile.state);
        }
        assert_eq!(*clean.param, *used.param, "{format:?}");
        assert_eq!(*clean.state, *used.state, "{format:?}");
    }
}

#[test]
fn what_lies_behind_the_tile_in_its_slot_is_left_alone() {
    for format in formats() {
        let state_bytes = state_tile_bytes(format, 10);
        let mut param = AlignedBytes::from_bytes(&[0xAB; 4096]);
        let mut state = AlignedBytes::from_bytes(&[0xAB; 4096]);
        let grad = AlignedBytes::from_bytes(&[0x3F; 4096]);
        init_tile(format, &[1.0; 10], &mut param, &mut state);
        step_tile(format, &HYPER, &mut param, &mut state, &grad, 10);
        assert!(
            param[10 * format.master.param_bytes()..]
                .iter()
                .all(|b| *b == 0xAB)
        );
        assert!(state[state_bytes..].iter().all(|b| *b == 0xAB));
        assert_ne!(param[0], 0xAB);
    }
}

/// Steps a tile of 32 elements whose slices have the given lengths.
fn step_cut(
    param: std::ops::Range<usize>,
    state: std::ops::Range<usize>,
    grad: std::ops::Range<usize>,
) {
    let [mut p, mut s, g] = [4096; 3].map(AlignedBytes::zeroed);
    step_tile(
        Master::SplitBf16.into(),
        &HYPER,
        &mut p[param],
        &mut s[state],
        &g[grad],
        32,
    );
}

#[test]
fn a_tile_that_just_fits_is_stepped() {
    step_cut(0..64, 0..320, 0..64);
}

#[test]
#[should_panic(expected = "the param slice has 63 bytes, its tile needs 64")]
fn a_short_parameter_is_refused() {
    step_cut(0..63, 0..320, 0..64);
}

#[test]
#[should_panic(expected = "the state slice has 319 bytes, its tile needs 320")]
fn a_short_state_is_refused() {
    step_cut(0..64, 0..319, 0..64);
}

#[test]
#[should_panic(expected = "the grad slice has 62 bytes, its tile needs 64")]
fn a_short_gradient_is_refused() {
    step_cut(0..64, 0..320, 0..62);
}

#[test]
#[should_panic(expected = "the state slice starts at address")]
fn a_misaligned_state_is_refused() {
    step_cut(0..64, 32..4096, 0..64);
}

#[test]
#[should_panic(expected = "is not within the tile's 32 elements")]
fn a_range_beyond_the_tile_is_refused() {
    let [mut p, mut s, g] = [4096; 3].map(AlignedBytes::zeroed);
    let tile = Tile {
        format: Master::SplitBf16.into(),
        param: &mut p,
        state: &mut s,
        grad: &g,
        elems: 32,
    };
    step_range(&HYPER, tile, Master::SplitBf16.grad_type(), 0..33);
}

#[test]
#[should_panic(expected = "steps are counted from 1")]
fn step_zero_is_refused() {
    let [mut p, mut s, g] = [4096; 3].map(AlignedBytes::zeroed);
    step_tile(
        Master::Fp32.into(),
        &Hyper { step: 0, ..HYPER },
        &mut p,
        &mut s,
        &g,
        32,
    );
}
