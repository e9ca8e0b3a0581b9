//! The tests of this directory hold without a GPU too, on a fake driver (`kernels/tests/gpu/fake.rs` says what that is).
//!
//! torch's operators beside the kernels run at once on the CPU, so the kernels do too.

use std::path::Path;

use crate::on_fake::{CUDA_INFO, run_on_fake};

#[test]
fn the_tests_of_fused_kernels_hold_on_a_fake() {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/gpu/fake");
    let libraries = ["libcuda.so.1", "libnvrtc.so.13"];
    let options = ["-DFAKE_EAGER"];
    run_on_fake(&source, &libraries, &options, &["formulas::"], CUDA_INFO, 4);
}
