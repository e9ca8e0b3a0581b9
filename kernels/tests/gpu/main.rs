//! Tests of the GPU: `cargo test -p kernels --test gpu -- --show-output`. Without one each prints that it skips; the loaders' answers are
//! tested then.

mod adamw;
mod compile;
mod device;
mod loaders;
mod memory;
#[path = "../shared/on_stand_in.rs"]
mod on_stand_in;
mod reduce;
#[path = "../shared/mod.rs"]
mod shared;
mod shelf;
mod stand_in;
mod streams;
mod tile_updater;
