//! Tests that a tile updated through the GPU has the same bytes as one updated on the CPU, with other updaters at work.
//!
//! Likely faults are a part of the tile that is not downloaded, or downloaded before its step, weight decay on parts without it, device memory shared
//! by two updaters, and changed elements outside all parts.

use kernels::adamw::{Hyper, Master, step_range};
use kernels::gpu::TileUpdater;
use std::ops::Range;

use crate::device::{HYPER, gpu};
use crate::shared::{MASTERS, OwnedTile, Random};

fn on_cpu(before: &OwnedTile, parts: &[(Range<usize>, bool)]) -> OwnedTile {
    let mut tile = before.clone();
    for (range, decays) in parts {
        let hyper = Hyper {
            weight_decay: if *decays { HYPER.weight_decay } else { 0.0 },
            ..HYPER
        };
        let (elems, t) = (tile.elems, tile.borrow());
        step_range(
            t.master,
            &hyper,
            t.param,
            t.state,
            t.grad,
            elems,
            range.clone(),
        );
    }
    tile
}

fn update(updater: &mut TileUpdater, tile: &mut OwnedTile, parts: &[(Range<usize>, bool)]) {
    updater.update(&HYPER, tile.borrow(), parts).unwrap();
}

#[test]
fn a_tile_updated_on_the_gpu_has_the_cpus_bytes() {
    let Some(gpu) = gpu() else { return };
    let mut random = Random(1);
    for master in MASTERS {
        let mut updater = TileUpdater::new(&gpu, master, 100_003).unwrap();
        for elems in [100_003, 1, 4096, 77] {
            let before = OwnedTile::hard(master, elems, &mut random);
            // A gap before the last part: its elements must not change.
            let parts = [
                (0..elems / 3, true),
                (elems / 3..elems / 2, false),
                (elems / 2 + elems / 10..elems, true),
            ];
            let mut tile = before.clone();
            update(&mut updater, &mut tile, &parts);
            let expected = on_cpu(&before, &parts);
            assert!(*expected.state != *before.state, "nothing was stepped");
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
                let mut updater = TileUpdater::new(gpu, Master::SplitBf16, 300_000).unwrap();
                for _ in 0..20 {
                    let elems = 1 + random.below(300_000);
                    let mut tile = OwnedTile::hard(Master::SplitBf16, elems, &mut random);
                    let parts = [(0..elems, true)];
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
    let mut updater = TileUpdater::new(&gpu, Master::SplitBf16, 1000).unwrap();
    let mut tile = OwnedTile::zeroed(Master::SplitBf16, 100_000);
    let refused = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        update(&mut updater, &mut tile, &[(0..100_000, true)]);
    }));
    assert!(refused.is_err());
}
