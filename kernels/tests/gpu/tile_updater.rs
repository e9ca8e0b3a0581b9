//! Tests that a tile updated through the GPU has the same bytes as one updated on the CPU, with other updaters at work.
//!
//! Likely faults are a part of the tile that is not downloaded, or downloaded before its step, the scalars of another part, device memory shared
//! by two updaters, and changed elements outside all parts.

use kernels::adamw::{Hyper, Master, TileFormat, step_range};
use kernels::gpu::{Gpu, TileUpdater};
use kernels::reduce::GradType;
use std::ops::Range;

use crate::device::{HYPER, gpu, grad_type_of, grads, hard_tile};
use crate::shared::{OwnedTile, Random};

type Parts<'a> = &'a [(Range<usize>, Hyper)];

/// Scalars without weight decay, of another parameter.
const OTHER: Hyper = Hyper {
    weight_decay: 0.0,
    lr: HYPER.lr * 3.0,
    step: HYPER.step + 5,
    ..HYPER
};

fn on_cpu(before: &OwnedTile, parts: Parts<'_>) -> OwnedTile {
    let mut tile = before.clone();
    for (range, hyper) in parts {
        let grad_type = grad_type_of(before);
        step_range(hyper, tile.borrow(), grad_type, range.clone());
    }
    tile
}

fn updater(gpu: &Gpu, format: impl Into<TileFormat>, elems_max: usize) -> TileUpdater {
    let bytes = TileUpdater::device_bytes(format.into(), GradType::Fp32, elems_max);
    TileUpdater::new(gpu, bytes).unwrap()
}

fn update(updater: &mut TileUpdater, tile: &mut OwnedTile, parts: Parts<'_>) {
    let grad_type = grad_type_of(tile);
    updater.update(tile.borrow(), grad_type, parts).unwrap();
}

#[test]
fn a_tile_updated_on_the_gpu_has_the_cpus_bytes() {
    let Some(gpu) = gpu() else { return };
    let mut random = Random(1);
    for (format, grad_type) in grads() {
        let mut updater = updater(&gpu, format, 100_003);
        for elems in [100_003, 1, 4096, 77] {
            let before = hard_tile(format, grad_type, elems, &mut random);
            // A gap before the last part: its elements must not change.
            let parts = [
                (0..elems / 3, HYPER),
                (elems / 3..elems / 2, OTHER),
                (elems / 2 + elems / 10..elems, HYPER),
            ];
            let mut tile = before.clone();
            update(&mut updater, &mut tile, &parts);
            let expected = on_cpu(&before, &parts);
            // A few bf16 masters without state may all be rounded to what they were.
            assert!(
                elems < 32 || *expected.param != *before.param,
                "nothing was stepped"
            );
            tile.assert_same_bits(&expected, "GPU and CPU");
        }
    }
}

#[test]
fn threads_update_at_the_same_time_without_disturbing_each_other() {
    let Some(gpu) = gpu() else { return };
    std::thread::scope(|scope| {
        for thread in 0..3 {
            let gpu: &kernels::gpu::Gpu = &gpu;
            scope.spawn(move || {
                let mut random = Random(10 + thread);
                let mut updater = updater(gpu, Master::SplitBf16, 300_000);
                for _ in 0..20 {
                    let elems = 1 + random.below(300_000);
                    let mut tile = OwnedTile::hard(Master::SplitBf16, elems, &mut random);
                    let parts = [(0..elems, HYPER)];
                    let expected = on_cpu(&tile, &parts);
                    update(&mut updater, &mut tile, &parts);
                    tile.assert_same_bits(&expected, "one of three threads");
                }
            });
        }
    });
}

#[test]
fn a_tile_larger_than_the_updater_is_refused() {
    let Some(gpu) = gpu() else { return };
    let mut updater = updater(&gpu, Master::SplitBf16, 1000);
    let mut tile = OwnedTile::zeroed(Master::SplitBf16, 100_000);
    let refused = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        update(&mut updater, &mut tile, &[(0..100_000, HYPER)]);
    }));
    assert!(refused.is_err());
}
