//! Tests of the GPU: `cargo test -p kernels --test gpu -- --show-output`. Without one each prints that it skips; the loaders' answers are
//! tested then.

mod adamw;
mod compile;
mod device;
#[cfg(feature = "torch")]
mod fused;
mod loaders;
mod memory;
mod reduce;
#[path = "../shared/mod.rs"]
mod shared;
mod shelf;
mod stand_in;
mod streams;
mod tile_updater;
