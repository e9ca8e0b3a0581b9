//! Tests of the fused kernels over torch's tensors: `cargo test -p kernels-torch --test fused`.

mod formulas;
#[path = "../../../tests/shared/on_stand_in.rs"]
mod on_stand_in;
mod stand_in;
