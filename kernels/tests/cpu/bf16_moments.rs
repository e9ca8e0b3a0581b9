//! Tests of moments that are stored as bf16: their rounding is right on average, and depends on seed, unit, step and element alone.
//!
//! Likely faults are a rounding to the nearest (the variance then stops far from its limit), random bits that favour a direction or are the same for both
//! moments, a hash that counts elements from the tile's start instead of the unit's, and moments that are rounded before the parameter uses them.

use crate::common::{AlignedBytes, MASTERS, OwnedTile, Random, step};
use kernels::adamw::{
    Hyper, Master, Moments, Rounding, TileFormat, init_tile, read_masters, read_moments,
};
use kernels::number;

const HYPER: Hyper = Hyper {
    lr: 1e-3,
    beta1: 0.0,
    beta2: 0.0,
    eps: 1e-8,
    weight_decay: 0.0,
    step: 1,
    grad_scale: 1.0,
    rounding: Rounding::ZERO,
};

fn bf16(master: Master) -> TileFormat {
    TileFormat {
        moments: Moments::Bf16,
        ..master.into()
    }
}

/// Returns momentum and variance of each element.
fn moments(tile: &OwnedTile) -> Vec<[f32; 2]> {
    let [momentum, variance] = read_moments(tile.format, &tile.state, tile.elems);
    momentum
        .into_iter()
        .zip(variance)
        .map(<[f32; 2]>::from)
        .collect()
}

/// A tile of equal gradients.
fn tile_of(format: TileFormat, elems: usize, grad: f32) -> OwnedTile {
    let mut tile = OwnedTile::zeroed(format, elems);
    kernels::reduce::store_grad(
        format.master.grad_type(),
        &vec![grad; elems],
        &mut tile.grad,
    );
    tile
}

/// Asserts that roundings go up as often as they should, and those of the two moments independently. `rounded` has momentum and variance of steps from
/// zero with both decays 0 and the gradient `GRAD`.
fn assert_right_on_average(rounded: &[[f32; 2]], what: &str) {
    // Both moments lie between two bf16; the variance is the square.
    let exact = [GRAD, GRAD * GRAD];
    let below = exact.map(|x| number::from_bf16((x.to_bits() >> 16) as u16));
    let wanted = [0, 1].map(|moment| (exact[moment] - below[moment]) / (1.0 / 128.0));
    let share = |which: &dyn Fn(&[f32; 2]) -> bool| {
        rounded.iter().filter(|moments| which(moments)).count() as f32 / rounded.len() as f32
    };
    let up = |moment: usize| move |moments: &[f32; 2]| moments[moment] != below[moment];
    let (momentum, variance) = (share(&up(0)), share(&up(1)));
    let both = share(&|moments| up(0)(moments) && up(1)(moments));
    // Five deviations of the mean of this many roundings.
    let off = 5.0 * 0.5 / (rounded.len() as f32).sqrt();
    let near = |found: f32, wanted: f32| (found - wanted).abs() < off;
    assert!(
        near(momentum, wanted[0]),
        "{what}: {momentum}, not {}",
        wanted[0]
    );
    assert!(
        near(variance, wanted[1]),
        "{what}: {variance}, not {}",
        wanted[1]
    );
    assert!(
        near(both, momentum * variance),
        "{what}: {both} of both moments"
    );
}

/// 0.3 of the way from 1 to the next bf16.
const GRAD: f32 = 1.0 + 0.3 / 128.0;

#[test]
fn rounded_moments_are_right_on_average_over_elements_seeds_units_and_steps() {
    const COUNT: usize = 20_000;
    let mut tile = tile_of(bf16(Master::Fp32), COUNT, GRAD);
    step(&mut tile, &HYPER);
    assert_right_on_average(&moments(&tile), "elements");
    let of_first = |hyper: Hyper| {
        let mut tile = tile_of(bf16(Master::Fp32), 1, GRAD);
        step(&mut tile, &hyper);
        moments(&tile)[0]
    };
    let seeded = |number: usize, rounding: fn(u64) -> Rounding| {
        let rounding = rounding(number as u64);
        of_first(Hyper { rounding, ..HYPER })
    };
    let all = |of: &dyn Fn(usize) -> [f32; 2]| (1..=COUNT).map(of).collect::<Vec<_>>();
    let seeds = all(&|number| {
        seeded(number, |seed| Rounding {
            seed,
            ..Rounding::ZERO
        })
    });
    assert_right_on_average(&seeds, "seeds");
    let units = all(&|number| {
        seeded(number, |unit| Rounding {
            unit,
            ..Rounding::ZERO
        })
    });
    assert_right_on_average(&units, "units");
    let steps = all(&|step| {
        of_first(Hyper {
            step: step as u64,
            ..HYPER
        })
    });
    assert_right_on_average(&steps, "steps");
    assert!(seeds != units && units != steps, "each has bits of its own");
}

#[test]
fn the_variance_reaches_its_limit_in_steps_far_below_its_last_bit() {
    let hyper = Hyper {
        beta1: 0.9,
        beta2: 0.999,
        ..HYPER
    };
    let mut tile = tile_of(bf16(Master::SplitBf16), 256, 1.0);
    for step_index in 1..=4000 {
        step(
            &mut tile,
            &Hyper {
                step: step_index,
                ..hyper
            },
        );
    }
    let moments = moments(&tile);
    let mean = moments
        .iter()
        .map(|moments| f64::from(moments[1]))
        .sum::<f64>()
        / 256.0;
    let exact = 1.0 - 0.999f64.powi(4000);
    // Rounding to the nearest would stop at about a third.
    assert!((mean / exact - 1.0).abs() < 0.01, "{mean}, not {exact}");
}

#[test]
fn the_parameter_uses_moments_before_they_are_rounded() {
    for master in MASTERS {
        let mut wide = tile_of(master.into(), 100, GRAD);
        let mut rounded = tile_of(bf16(master), 100, GRAD);
        let [wide, rounded] = [&mut wide, &mut rounded].map(|tile| {
            step(tile, &HYPER);
            let mut masters = vec![0.0; 100];
            read_masters(tile.format, &tile.param, &tile.state, &mut masters);
            masters
        });
        assert_eq!(wide, rounded, "{master:?}");
    }
}

#[test]
fn the_cut_of_a_unit_into_tiles_changes_no_bit() {
    let elems = 5000;
    let mut random = Random(41);
    let masters: Vec<f32> = (0..elems).map(|_| random.normal()).collect();
    let grads: Vec<f32> = (0..elems).map(|_| random.normal()).collect();
    let stepped = |cut: &[usize]| {
        let mut found = Vec::new();
        for (start, end) in cut.iter().zip(&cut[1..]) {
            let mut tile = tile_of(bf16(Master::Fp32), end - start, 0.0);
            init_tile(
                tile.format,
                &masters[*start..*end],
                &mut tile.param,
                &mut tile.state,
            );
            tile.grad = AlignedBytes::of_f32(&grads[*start..*end]);
            for step_index in 1..=3 {
                let rounding = Rounding {
                    seed: 5,
                    unit: 2,
                    first_elem: *start as u64,
                };
                let hyper = Hyper {
                    beta1: 0.9,
                    beta2: 0.999,
                    step: step_index,
                    rounding,
                    ..HYPER
                };
                step(&mut tile, &hyper);
            }
            for (elem, [momentum, variance]) in moments(&tile).into_iter().enumerate() {
                let param = tile.param.f32_at(4 * elem);
                found.push([param, momentum, variance].map(f32::to_bits));
            }
        }
        found
    };
    assert!(stepped(&[0, 5000]) == stepped(&[0, 1024, 1027, 4000, 5000]));
}

/// Trains weights of a linear model on noisy batches. Returns the mean squared error every 50 steps.
pub(crate) fn losses(format: TileFormat, steps: u64) -> Vec<f64> {
    const ELEMS: usize = 64;
    let mut random = Random(42);
    let target: Vec<f32> = (0..ELEMS).map(|_| random.normal()).collect();
    let mut tile = tile_of(format, ELEMS, 0.0);
    let mut found = Vec::new();
    let mut sum = 0.0;
    for step_index in 1..=steps {
        let mut weights = vec![0.0; ELEMS];
        read_masters(format, &tile.param, &tile.state, &mut weights);
        let mut grads = vec![0.0f32; ELEMS];
        for _ in 0..8 {
            let input: Vec<f32> = (0..ELEMS).map(|_| random.normal()).collect();
            let pairs = input.iter().zip(weights.iter().zip(&target));
            let error = pairs.map(|(x, (w, t))| x * (w - t)).sum::<f32>() + random.normal();
            sum += f64::from(error * error) / 8.0;
            for (grad, x) in grads.iter_mut().zip(&input) {
                *grad += error * x / 8.0;
            }
        }
        kernels::reduce::store_grad(format.master.grad_type(), &grads, &mut tile.grad);
        let hyper = Hyper {
            lr: 1e-2,
            beta1: 0.9,
            beta2: 0.999,
            weight_decay: 0.01,
            step: step_index,
            ..HYPER
        };
        step(&mut tile, &hyper);
        if step_index % 50 == 0 {
            found.push(sum / 50.0);
            sum = 0.0;
        }
    }
    found
}

#[test]
fn four_hundred_steps_have_the_losses_of_fp32_moments_within_two_percent() {
    let of = |moments| TileFormat {
        moments,
        ..Master::Fp32.into()
    };
    let [fp32, bf16, eight] =
        [Moments::Fp32, Moments::Bf16, Moments::EightBit].map(|moments| losses(of(moments), 400));
    println!("fp32 {fp32:?}\nbf16 {bf16:?}\n8bit {eight:?}");
    assert!(fp32[7] < fp32[0] / 10.0, "{fp32:?}: nothing was learned");
    for rounded in [bf16, eight] {
        assert!(fp32 != rounded, "nothing was rounded");
        for (fp32, rounded) in fp32.iter().zip(&rounded) {
            assert!(
                (rounded / fp32 - 1.0).abs() < 0.02,
                "{rounded}, fp32 {fp32}"
            );
        }
    }
}
