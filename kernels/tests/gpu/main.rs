//! Tests of the GPU: `cargo test -p kernels --test gpu -- --show-output`. Without a GPU each prints that it skips, and the errors of the loaders are
//! tested instead.

mod adamw;
mod compile;
mod device;
mod fake;
mod host_copies;
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
