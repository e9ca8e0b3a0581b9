//! Tests of the GPU: `cargo test -p kernels --test gpu`. Without a GPU each prints what it skips, and the loaders are tested instead.

mod loaders;
