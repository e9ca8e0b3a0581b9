//! Tests of the GPU: `cargo test -p kernels --test gpu -- --show-output`. Without one each prints that it skips; the loaders' answers are
//! tested then.

mod adamw;
mod compile;
mod device;
mod fake;
mod host_stash;
mod loaders;
mod memory;
#[path = "../shared/on_fake.rs"]
mod on_fake;
mod reduce;
#[path = "../shared/mod.rs"]
mod shared;
mod streams;
mod tile_updater;
