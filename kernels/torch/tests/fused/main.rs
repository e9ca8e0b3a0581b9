//! Tests of the fused kernels over torch's tensors: `cargo test -p kernels-torch --test fused`.

mod fake;
mod formulas;
#[path = "../../../tests/shared/on_fake.rs"]
mod on_fake;
