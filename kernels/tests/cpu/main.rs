//! Tests of the arithmetic on the CPU, in one program: `cargo test -p kernels --test cpu`.

mod adamw_bits;
mod adamw_definition;
mod adamw_tiles;
mod bf16_masters;
mod bf16_moments;
mod common;
mod eight_bit_moments;
mod lion;
mod reduce;
mod sgd;
#[path = "../shared/mod.rs"]
mod shared;
