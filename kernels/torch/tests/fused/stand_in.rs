//! The tests of this folder hold without a GPU too, on a stand-in for its driver (`kernels/tests/gpu/stand_in.rs` says what that is).
//!
//! torch's operators beside the kernels run at once on the CPU, so the kernels do too.

use std::path::Path;

use crate::on_stand_in::{CUDA_INFO, run_on_stand_in};

#[test]
fn the_tests_of_fused_kernels_hold_on_a_stand_in() {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/gpu/stand_in");
    let libraries = ["libcuda.so.1", "libnvrtc.so.13"];
    let options = ["-DSTAND_IN_EAGER"];
    run_on_stand_in(&source, &libraries, &options, &["formulas::"], CUDA_INFO, 4);
}
