//! Runs the tests of this directory without a GPU, on a fake driver (see `kernels/tests/gpu/fake.rs`).
//!
//! The kernels run at once on the CPU, because torch's operators, which run beside them, do so too.

use std::path::Path;

use crate::on_fake::{CUDA_INFO, run_on_fake};

#[test]
fn the_tests_of_fused_kernels_hold_on_a_fake() {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/gpu/fake");
    let libraries = ["libcuda.so.1", "libnvrtc.so.13"];
    let options = ["-DFAKE_EAGER"];
    run_on_fake(
        &source,
        &libraries,
        &options,
        &["formulas::", "fp8::"],
        CUDA_INFO,
    );
}
