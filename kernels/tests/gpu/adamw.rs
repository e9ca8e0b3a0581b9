//! Tests that each optimizer on the GPU gives the same bits as on the CPU.
//!
//! Likely faults are a compiler that fuses or splits an operation, divides or takes a root with another rounding, flushes a denormal or returns
//! another NaN, a thread that takes a wrong group at the ends of a range, and a plane at a wrong place. All bytes are compared, including those
//! around the tile.

use kernels::adamw::{Hyper, Master, Moments, step_range};
use kernels::gpu::{Gpu, Stream, TileAt};
use kernels::reduce::GradType;
use std::ops::Range;

use crate::device::{DeviceTile, HYPER, PART_AT, gpu, grad_type_of, grads, hard_tile};
use crate::shared::{OwnedTile, Random, formats};

fn on_cpu(hyper: &Hyper, before: &OwnedTile, range: Range<usize>) -> OwnedTile {
    let mut tile = before.clone();
    step_range(hyper, tile.borrow(), grad_type_of(before), range);
    tile
}

fn on_gpu(
    gpu: &Gpu,
    stream: &Stream,
    hyper: &Hyper,
    before: &OwnedTile,
    range: Range<usize>,
) -> OwnedTile {
    let tile = DeviceTile::upload(gpu, stream, before);
    enqueue(gpu, stream, hyper, before, &tile, range);
    tile.download(gpu, stream, before)
}

fn enqueue(
    gpu: &Gpu,
    stream: &Stream,
    hyper: &Hyper,
    like: &OwnedTile,
    tile: &DeviceTile,
    range: Range<usize>,
) {
    let kernels = gpu.kernels().unwrap();
    let tile = TileAt {
        format: like.format,
        param: tile.param.at(PART_AT),
        state: tile.state.at(PART_AT),
        grad: tile.grad.at(PART_AT),
        grad_type: grad_type_of(like),
        elems: like.elems,
    };
    kernels.adamw_range(stream, hyper, tile, range).unwrap();
}

#[test]
fn every_length_gives_the_cpus_bits() {
    let Some(gpu) = gpu() else { return };
    let stream = gpu.stream().unwrap();
    let mut random = Random(1);
    for elems in (0..=70).chain([1000, 1023, 1024, 1025, 16 * 1024 + 17, 1_000_003]) {
        for (format, grad_type) in grads() {
            let before = hard_tile(format, grad_type, elems, &mut random);
            let expected = on_cpu(&HYPER, &before, 0..elems);
            // A few bf16 masters without state may all be rounded to what they were.
            assert!(
                elems < 32 || *expected.param != *before.param || *expected.state != *before.state,
                "nothing was stepped"
            );
            on_gpu(&gpu, &stream, &HYPER, &before, 0..elems)
                .assert_same_bits(&expected, "GPU and CPU");
        }
    }
}

#[test]
fn a_range_starts_and_ends_anywhere_and_leaves_the_rest_alone() {
    let Some(gpu) = gpu() else { return };
    let stream = gpu.stream().unwrap();
    let mut random = Random(2);
    for (format, grad_type) in grads() {
        for start in 0..12 {
            for len in [0, 1, 2, 3, 4, 5, 7, 8, 9, 70] {
                let before = hard_tile(format, grad_type, 100, &mut random);
                let range = start..start + len;
                let expected = on_cpu(&HYPER, &before, range.clone());
                on_gpu(&gpu, &stream, &HYPER, &before, range.clone())
                    .assert_same_bits(&expected, &format!("range {range:?}"));
            }
        }
    }
}

#[test]
fn a_range_of_many_blocks_starts_and_ends_anywhere() {
    let Some(gpu) = gpu() else { return };
    let stream = gpu.stream().unwrap();
    let mut random = Random(8);
    // More blocks of moments than a group of threads takes, and a last block with fewer elements.
    const ELEMS: usize = 20_017;
    let starts = [0, 255, 256, 300, 4095, 12_345];
    for (format, grad_type) in grads().filter(|(of, _)| of.moments == Moments::EightBit) {
        for start in starts {
            for end in [start + 2, start + 256, start + 16 * 256 + 5, ELEMS] {
                let before = hard_tile(format, grad_type, ELEMS, &mut random);
                let expected = on_cpu(&HYPER, &before, start..end);
                on_gpu(&gpu, &stream, &HYPER, &before, start..end)
                    .assert_same_bits(&expected, &format!("range {start} to {end}"));
            }
        }
    }
}

#[test]
fn any_scalars_give_the_cpus_bits() {
    let Some(gpu) = gpu() else { return };
    let stream = gpu.stream().unwrap();
    let mut random = Random(3);
    let magnitudes = [0.0, 1e-9, 1e-4, 0.37, 1.0, 1e30];
    let formats: Vec<_> = formats().collect();
    for case in 0..200 {
        let mut pick = |from: &[f32]| from[random.below(from.len())];
        let hyper = Hyper {
            lr: pick(&magnitudes),
            beta1: pick(&[0.0, 0.5, 0.9, 0.999]),
            beta2: pick(&[0.0, 0.5, 0.95, 0.9999]),
            eps: pick(&magnitudes),
            weight_decay: pick(&magnitudes),
            step: [1, 2, 100, 100_000][case % 4],
            grad_scale: pick(&[0.0, 1e-9, 1.0, 3.7, f32::NAN, f32::INFINITY]),
            rounding: HYPER.rounding,
        };
        let before = OwnedTile::hard(formats[case % formats.len()], 2000, &mut random);
        let expected = on_cpu(&hyper, &before, 0..2000);
        on_gpu(&gpu, &stream, &hyper, &before, 0..2000)
            .assert_same_bits(&expected, &format!("{hyper:?}"));
    }
}

#[test]
fn hundred_steps_drift_by_no_bit() {
    let Some(gpu) = gpu() else { return };
    let stream = gpu.stream().unwrap();
    let mut random = Random(4);
    for format in formats() {
        let elems = 5001;
        let masters: Vec<f32> = (0..elems).map(|_| random.normal() * 0.02).collect();
        let mut cpu = OwnedTile::zeroed(format, elems);
        kernels::adamw::init_tile(format, &masters, &mut cpu.param, &mut cpu.state);
        let grads: Vec<f32> = (0..elems).map(|_| random.even() * 0.1).collect();
        kernels::reduce::store_grad(format.master.grad_type(), &grads, &mut cpu.grad);
        let tile = DeviceTile::upload(&gpu, &stream, &cpu);
        for step in 1..=100 {
            let hyper = Hyper {
                step,
                grad_scale: 1.0,
                ..HYPER
            };
            cpu = on_cpu(&hyper, &cpu, 0..elems);
            enqueue(&gpu, &stream, &hyper, &cpu, &tile, 0..elems);
        }
        tile.download(&gpu, &stream, &cpu)
            .assert_same_bits(&cpu, "after 100 steps");
    }
}

#[test]
fn a_tile_that_does_not_fit_its_buffer_is_refused() {
    let Some(gpu) = gpu() else { return };
    let stream = gpu.stream().unwrap();
    let small = gpu.alloc(64).unwrap();
    let large = gpu.alloc(4096).unwrap();
    let refused = |param: usize, state, at: usize| {
        let (gpu, stream, small, large) = (&gpu, &stream, &small, &large);
        let buffer = |n| if n == 0 { small } else { large };
        std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            let kernels = gpu.kernels().unwrap();
            let tile = TileAt {
                format: Master::SplitBf16.into(),
                param: buffer(param).at(at),
                state: buffer(state).at(0),
                grad: large.at(0),
                grad_type: GradType::Bf16,
                elems: 100,
            };
            kernels.adamw_range(stream, &HYPER, tile, 0..100)
        }))
        .is_err()
    };
    assert!(!refused(1, 1, 0), "one that fits is taken");
    assert!(refused(0, 1, 0), "the parameters do not fit");
    assert!(refused(1, 0, 0), "the state does not fit");
    assert!(refused(1, 1, 32), "the parameters are not aligned");
    stream.synchronize().unwrap();
}

#[test]
fn no_kernel_spills_registers() {
    let Some(gpu) = gpu() else { return };
    for (name, needs) in gpu.kernels().unwrap().resources().unwrap() {
        println!("{name}: {needs:?}");
        assert_eq!(needs.local_bytes, 0, "{name} uses the thread's own memory");
        assert!(
            needs.register_count <= 64,
            "{name}: {needs:?} halve the threads in flight"
        );
    }
}
