//! The tests of this directory hold without a GPU too, on a fake driver that runs kernels on the CPU.
//!
//! What could go wrong: an argument is passed in another order or size, an offset is wrong, a wait is forgotten, an operation of a kernel
//! is not that of the definition; and all of it shows only on a machine nobody has at hand. `fake/driver.cc` has the functions of
//! the driver and the run-time compiler that we call, under CUDA's and under HIP's names; what is enqueued there runs only when it is
//! waited for. This program runs itself with the fake driver first among the libraries. What a GPU's compiler makes of a kernel is not seen
//! here.

use std::path::Path;

use crate::on_fake::{CUDA_INFO, run_on_fake};

#[test]
fn the_tests_of_a_gpu_hold_on_a_fake_cuda() {
    let libraries = ["libcuda.so.1", "libnvrtc.so.13"];
    let tests = [
        "adamw::",
        "memory::",
        "reduce::",
        "shelf::",
        "streams::",
        "tile_updater::",
    ];
    run_on_fake(source(), &libraries, &[], &tests, CUDA_INFO, 14);
}

#[test]
fn the_tests_of_a_gpu_hold_on_a_fake_hip() {
    let libraries = ["libamdhip64.so.7", "libhiprtc.so.7"];
    // The kernels are those of the other test.
    let tests = [
        "memory::",
        "streams::",
        "hundred_steps",
        "tile_updater::a_tile",
    ];
    let info = "vendor: Hip, index: 0, name: \"fake\", arch: \"gfx90a:sramecc+:xnack-\"";
    run_on_fake(source(), &libraries, &["-DFAKE_HIP"], &tests, info, 14);
}

fn source() -> &'static Path {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/gpu/fake"))
}
