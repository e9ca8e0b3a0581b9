//! Measures the GPU's kernels and copies: `cargo run --release -p kernels --example update_speed [MILLION_ELEMENTS]`, default 128.
//!
//! Each line is the median of 20 runs after 3 that do not count. Bytes are those that the work must read and write. The bottleneck is the device's
//! memory for kernels, and the bus for copies and updates.

use std::time::Instant;

use kernels::adamw::{
    Hyper, Master, Moments, Rounding, Tile, TileFormat, UpdateRule, state_tile_bytes,
};
use kernels::gpu::{
    DeviceBuffer, Event, Gpu, GpuError, Stream, TileAt, TileUpdater, sum_squares_scratch_bytes,
};
use kernels::reduce::GradType;

const HYPER: Hyper = Hyper {
    lr: 3e-4,
    beta1: 0.9,
    beta2: 0.95,
    eps: 1e-8,
    weight_decay: 0.1,
    step: 7,
    grad_scale: 0.37,
    rounding: Rounding::ZERO,
};

/// Elements of one tile of the streamed updates: 8 MiB of bf16 parameters.
const TILE_ELEMS: usize = 4 << 20;
/// Tiles that each updating thread goes through, so that none stays in the host's caches.
const TILES_EACH: usize = 12;

fn main() -> Result<(), GpuError> {
    let million: usize = std::env::args().nth(1).map_or(128, |text| {
        text.parse().expect("a number of million elements")
    });
    let gpu = Gpu::open(0)?;
    println!(
        "{:?}, {:.1} GB free",
        gpu.info(),
        gpu.free_bytes()? as f64 / 1e9
    );
    let start = Instant::now();
    for (name, needs) in gpu.kernels()?.resources()? {
        println!(
            "{name}: {} registers, {} bytes spilled",
            needs.register_count, needs.local_bytes
        );
    }
    println!("compiled in {:.2} s", start.elapsed().as_secs_f64());
    steps(&gpu, million << 20)?;
    reductions(&gpu, million << 20)?;
    copies(&gpu)?;
    for thread_count in [1, 2, 3, 4] {
        streamed_updates(&gpu, thread_count)?;
    }
    Ok(())
}

fn steps(gpu: &Gpu, elems: usize) -> Result<(), GpuError> {
    let stream = gpu.stream()?;
    let kernels = gpu.kernels()?;
    use Master::{Fp16WholeMaster, SplitBf16};
    use UpdateRule::{AdamW, Lion};
    for (rule, master, moments, bytes_each) in [
        (AdamW, SplitBf16, Moments::Fp32, 26),
        (AdamW, Master::Fp32, Moments::Fp32, 28),
        (AdamW, Fp16WholeMaster, Moments::Fp32, 28),
        (AdamW, SplitBf16, Moments::Bf16, 18),
        (AdamW, Master::Fp32, Moments::Bf16, 20),
        (AdamW, Fp16WholeMaster, Moments::Bf16, 20),
        (Lion, SplitBf16, Moments::Fp32, 18),
        (Lion, SplitBf16, Moments::Bf16, 14),
    ] {
        let format = TileFormat {
            rule,
            master,
            moments,
        };
        let param = zeroed(gpu, &stream, elems * master.param_bytes())?;
        let state = zeroed(gpu, &stream, state_tile_bytes(format, elems))?;
        let grad = zeroed(gpu, &stream, elems * master.grad_bytes())?;
        let seconds = median(&stream, || {
            let tile = TileAt {
                format,
                param: param.at(0),
                state: state.at(0),
                grad: grad.at(0),
                grad_type: master.grad_type(),
                elems,
            };
            kernels.adamw_range(&stream, &HYPER, tile, 0..elems)
        })?;
        report(
            &format!("{rule:?} {master:?}, moments {moments:?}"),
            elems,
            elems * bytes_each,
            seconds,
        );
    }
    Ok(())
}

fn reductions(gpu: &Gpu, elems: usize) -> Result<(), GpuError> {
    let stream = gpu.stream()?;
    let kernels = gpu.kernels()?;
    let grad = zeroed(gpu, &stream, elems * 2)?;
    let sum = zeroed(gpu, &stream, elems * 4)?;
    let scratch = gpu.alloc(sum_squares_scratch_bytes(elems))?;
    let out = gpu.alloc(8)?;
    let seconds = median(&stream, || {
        kernels.sum_squares(
            &stream,
            GradType::Bf16,
            grad.at(0),
            elems,
            scratch.at(0),
            out.at(0),
        )
    })?;
    report("sum_squares bf16", elems, elems * 2, seconds);
    let seconds = median(&stream, || {
        kernels.accumulate(&stream, sum.at(0), grad.at(0), GradType::Bf16, elems)
    })?;
    report("accumulate bf16", elems, elems * 10, seconds);
    let seconds = median(&stream, || {
        kernels.store_grad(&stream, GradType::Bf16, sum.at(0), grad.at(0), elems)
    })?;
    report("store_grad bf16", elems, elems * 6, seconds);
    Ok(())
}

fn copies(gpu: &Gpu) -> Result<(), GpuError> {
    let bytes = 256 << 20;
    let stream = gpu.stream()?;
    let buffer = gpu.alloc(bytes)?;
    let mut memory = vec![1u8; bytes];
    for pinned in [false, true] {
        let registration = if pinned {
            let start = Instant::now();
            let registration = gpu.register(memory.as_ptr() as usize, bytes, Box::new(()))?;
            println!(
                "pinning {bytes} bytes: {:.1} ms",
                start.elapsed().as_secs_f64() * 1e3
            );
            Some(registration)
        } else {
            None
        };
        let seconds = median(&stream, || gpu.upload(&stream, &buffer, &[(0, &memory)]))?;
        report(&format!("upload, pinned {pinned}"), 0, bytes, seconds);
        let seconds = median(&stream, || {
            gpu.download(&stream, &buffer, &mut [(0, &mut memory)])
        })?;
        report(&format!("download, pinned {pinned}"), 0, bytes, seconds);
        drop(registration);
    }
    Ok(())
}

fn streamed_updates(gpu: &Gpu, thread_count: usize) -> Result<(), GpuError> {
    let master = Master::SplitBf16;
    let format = TileFormat::from(master);
    let sizes = [
        TILE_ELEMS * master.param_bytes(),
        state_tile_bytes(format, TILE_ELEMS),
        TILE_ELEMS * master.grad_bytes(),
    ];
    let mut threads = Vec::new();
    for _ in 0..thread_count {
        let mut tiles = Vec::new();
        for _ in 0..TILES_EACH {
            let parts = sizes.map(|bytes| vec![0u8; bytes]);
            let mut pinned = Vec::new();
            for part in &parts {
                pinned.push(gpu.register(part.as_ptr() as usize, part.len(), Box::new(()))?);
            }
            tiles.push((pinned, parts));
        }
        let bytes = TileUpdater::device_bytes(format, master.grad_type(), TILE_ELEMS);
        threads.push((TileUpdater::new(gpu, bytes)?, tiles));
    }
    // The first round does not count.
    let mut seconds = 0.0;
    for _ in 0..2 {
        let start = Instant::now();
        let updated: Result<(), GpuError> = std::thread::scope(|scope| {
            let running: Vec<_> = threads
                .iter_mut()
                .map(|(updater, tiles)| {
                    scope.spawn(move || {
                        for (_, [param, state, grad]) in tiles {
                            let all = [(0..TILE_ELEMS, HYPER)];
                            let tile = Tile {
                                format,
                                param,
                                state,
                                grad,
                                elems: TILE_ELEMS,
                            };
                            updater.update(tile, master.grad_type(), &all)?;
                        }
                        Ok(())
                    })
                })
                .collect();
            running
                .into_iter()
                .try_for_each(|thread| thread.join().expect("an updating thread"))
        });
        updated?;
        seconds = start.elapsed().as_secs_f64();
    }
    let elems = thread_count * TILES_EACH * TILE_ELEMS;
    report(
        &format!("streamed updates, {thread_count} threads"),
        elems,
        elems * 26,
        seconds,
    );
    Ok(())
}

fn zeroed(gpu: &Gpu, stream: &Stream, bytes: usize) -> Result<DeviceBuffer, GpuError> {
    let buffer = gpu.alloc(bytes)?;
    stream.fill_zero(buffer.at(0), bytes)?;
    Ok(buffer)
}

/// Returns the median in seconds by the device's clock.
fn median(
    stream: &Stream,
    mut work: impl FnMut() -> Result<(), GpuError>,
) -> Result<f64, GpuError> {
    let mut times = Vec::new();
    for turn in 0..23 {
        let before: Event = stream.record_timed()?;
        work()?;
        let after = stream.record_timed()?;
        after.synchronize()?;
        if turn >= 3 {
            times.push(f64::from(after.elapsed_ms_since(&before)?) / 1e3);
        }
    }
    times.sort_by(f64::total_cmp);
    Ok(times[times.len() / 2])
}

fn report(what: &str, elems: usize, bytes: usize, seconds: f64) {
    let (ms, gb_s) = (seconds * 1e3, bytes as f64 / seconds / 1e9);
    if elems == 0 {
        println!("{what}: {ms:.3} ms, {gb_s:.1} GB/s");
    } else {
        let g_elems_s = elems as f64 / seconds / 1e9;
        println!("{what}: {ms:.3} ms, {gb_s:.1} GB/s, {g_elems_s:.2} G elements/s");
    }
}
