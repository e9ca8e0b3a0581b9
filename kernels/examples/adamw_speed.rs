//! Measures the optimizer step on this machine, by instruction set and thread count.
//!
//! `cargo run --release -p kernels --example adamw_speed [million elements [TEXT]]`; with TEXT only formats whose name contains it, such as `AdamW`,
//! with the best instruction set
//!
//! Each thread steps tiles of its own. A row is the best of several passes over tiles that together exceed every cache. GB/s counts the bytes that
//! must move, each read once and written once, as the module `adamw` lists them per parameter. `sum_squares` is a reader only, for comparison.

use std::time::Instant;

use kernels::InstructionSet;
use kernels::adamw::{
    Hyper, Master, Moments, Rounding, Tile, TileFormat, UpdateRule, init_tile, state_tile_bytes,
    step_range_with,
};
use kernels::reduce::sum_squares_with;
use rayon::prelude::*;

/// Elements of one tile: 10 MiB of state with the split master, a size drives like.
const TILE_ELEMS: usize = 1 << 20;
const PASS_COUNT: u64 = 5;

const HYPER: Hyper = Hyper {
    lr: 1e-4,
    beta1: 0.9,
    beta2: 0.95,
    eps: 1e-8,
    weight_decay: 0.1,
    step: 1,
    grad_scale: 0.5,
    rounding: Rounding::ZERO,
};

fn main() {
    let argument = std::env::args().nth(1);
    let million_elems: usize = argument.map_or(128, |text| {
        text.parse()
            .expect("the argument is a count of million elements")
    });
    let tile_count = (million_elems * 1_000_000).div_ceil(TILE_ELEMS);
    let core_count = std::thread::available_parallelism().map_or(1, |count| count.get());

    println!(
        "{} M parameters in {tile_count} tiles",
        tile_count * TILE_ELEMS / 1_000_000
    );
    println!("master             set      threads  Gparam/s   GB/s  bytes/param");
    let masters = [
        Master::SplitBf16,
        Master::Bf16,
        Master::Fp32,
        Master::Fp16WholeMaster,
    ];
    let rules = [UpdateRule::AdamW, UpdateRule::Lion];
    let moments = [Moments::Fp32, Moments::Bf16, Moments::EightBit];
    let formats = rules.iter().flat_map(|rule| {
        let of = |moments| (*rule, moments);
        moments.map(of)
    });
    let formats = formats.flat_map(|(rule, moments)| {
        masters.map(|master| TileFormat {
            rule,
            master,
            moments,
        })
    });
    let wanted = std::env::args().nth(2);
    let sets = InstructionSet::ALL.into_iter();
    let sets: Vec<InstructionSet> = match wanted {
        Some(_) => vec![InstructionSet::best()],
        None => sets.collect(),
    };
    for format in formats {
        let name = format!(
            "{:?} {:?}, {:?}",
            format.rule, format.master, format.moments
        );
        if wanted.as_ref().is_some_and(|text| !name.contains(text)) {
            continue;
        }
        let mut tiles: Vec<Buffers> = (0..tile_count).map(|_| Buffers::new(format)).collect();
        for &set in &sets {
            if !set.available() {
                println!("skipped {set:?}: this processor has none");
                continue;
            }
            for thread_count in thread_counts(core_count) {
                let seconds = best_seconds(thread_count, |pass| {
                    tiles
                        .par_iter_mut()
                        .for_each(|tile| tile.step(set, pass + 1));
                });
                report(
                    &name,
                    set,
                    thread_count,
                    tile_count,
                    seconds,
                    step_bytes(format),
                );
            }
        }
        if format != format.master.into() || wanted.is_some() {
            continue;
        }
        let grad_type = format.master.grad_type();
        let set = InstructionSet::best();
        for thread_count in thread_counts(core_count) {
            let seconds = best_seconds(thread_count, |_| {
                for tile in &tiles {
                    assert!(sum_squares_with(set, grad_type, tile.grad.bytes()) > 0.0);
                }
            });
            report(
                &format!("  norm of {grad_type:?}"),
                set,
                thread_count,
                tile_count,
                seconds,
                grad_type.elem_bytes(),
            );
        }
    }
}

fn thread_counts(core_count: usize) -> impl Iterator<Item = usize> {
    [1, 2, 4, 8, 16, 32]
        .into_iter()
        .filter(move |count| *count <= core_count)
}

/// Returns the bytes read and written per parameter.
fn step_bytes(format: TileFormat) -> usize {
    2 * (format.master.param_bytes() + format.state_bytes()) + format.master.grad_bytes()
}

fn best_seconds(thread_count: usize, mut pass: impl FnMut(u64) + Send) -> f64 {
    let pool = rayon::ThreadPoolBuilder::new()
        .num_threads(thread_count)
        .build()
        .expect("start threads");
    pool.install(|| {
        let mut seconds_of_pass = |index| {
            let start = Instant::now();
            pass(index);
            start.elapsed().as_secs_f64()
        };
        (0..PASS_COUNT)
            .map(&mut seconds_of_pass)
            .fold(f64::INFINITY, f64::min)
    })
}

fn report(
    name: &str,
    set: InstructionSet,
    thread_count: usize,
    tile_count: usize,
    seconds: f64,
    bytes: usize,
) {
    let giga_elems = (tile_count * TILE_ELEMS) as f64 / 1e9 / seconds;
    let set = format!("{set:?}");
    println!(
        "{name:<18} {set:<7} {thread_count:>8}  {giga_elems:>8.2}  {:>5.1}  {bytes:>11}",
        giga_elems * bytes as f64
    );
}

/// One tile's memory.
struct Buffers {
    format: TileFormat,
    param: AlignedBytes,
    state: AlignedBytes,
    grad: AlignedBytes,
}

impl Buffers {
    fn new(format: TileFormat) -> Self {
        let master = format.master;
        let masters: Vec<f32> = (0..TILE_ELEMS).map(|i| (i % 1000) as f32 / 1e4).collect();
        let mut param = AlignedBytes::zeroed(TILE_ELEMS * master.param_bytes());
        let mut state = AlignedBytes::zeroed(state_tile_bytes(format, TILE_ELEMS));
        init_tile(format, &masters, param.bytes_mut(), state.bytes_mut());
        let mut grad = AlignedBytes::zeroed(TILE_ELEMS * master.grad_bytes());
        // About 1e-3 in each format: moments stay clear of denormals, which would be timed instead.
        let pattern: &[u8] = match master {
            Master::SplitBf16 | Master::Bf16 => &[0x83, 0x3A],
            Master::Fp32 => &[0x6F, 0x12, 0x83, 0x3A],
            Master::Fp16WholeMaster => &[0x19, 0x14],
        };
        for elem in grad.bytes_mut().chunks_exact_mut(pattern.len()) {
            elem.copy_from_slice(pattern);
        }
        Self {
            format,
            param,
            state,
            grad,
        }
    }

    fn step(&mut self, set: InstructionSet, step: u64) {
        let tile = Tile {
            format: self.format,
            param: self.param.bytes_mut(),
            state: self.state.bytes_mut(),
            grad: self.grad.bytes(),
            elems: TILE_ELEMS,
        };
        let grad_type = self.format.master.grad_type();
        let hyper = Hyper { step, ..HYPER };
        step_range_with(set, &hyper, tile, grad_type, 0..TILE_ELEMS);
    }
}

/// Bytes that start at a multiple of 64, as an arena's slots do.
struct AlignedBytes {
    memory: Vec<u8>,
    start: usize,
    len: usize,
}

impl AlignedBytes {
    fn zeroed(len: usize) -> Self {
        let memory = vec![0; len + 64];
        let start = memory.as_ptr().align_offset(64);
        Self { memory, start, len }
    }

    fn bytes(&self) -> &[u8] {
        &self.memory[self.start..self.start + self.len]
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        &mut self.memory[self.start..self.start + self.len]
    }
}
