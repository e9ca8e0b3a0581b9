//! Runs the tests of this directory without a GPU, on a fake driver that runs kernels on the CPU.
//!
//! This finds arguments in the wrong order or size, wrong offsets, missing waits and kernel operations that differ from the definition, which
//! otherwise show only on a machine with a GPU. `fake/driver.cc` has the functions of the driver and the run-time compiler that we call, under CUDA's
//! and HIP's names. Enqueued work runs there only when it is waited for. This program runs itself with the fake driver first in the library path. It
//! does not show what a GPU's compiler makes of a kernel.

use std::path::Path;

use crate::on_fake::{CUDA_INFO, run_on_fake};

#[test]
fn the_tests_of_a_gpu_hold_on_a_fake_cuda() {
    let libraries = ["libcuda.so.1", "libnvrtc.so.13"];
    let tests = [
        "adamw::",
        "memory::",
        "reduce::",
        "host_copies::",
        "host_stash::",
        "streams::",
        "tile_updater::",
    ];
    run_on_fake(source(), &libraries, &[], &tests, CUDA_INFO);
}

#[test]
fn the_tests_of_a_gpu_hold_on_a_fake_hip() {
    let libraries = ["libamdhip64.so.7", "libhiprtc.so.7"];
    // The kernels are tested in another test.
    let tests = [
        "memory::",
        "streams::",
        "hundred_steps",
        "tile_updater::a_tile",
    ];
    let info = "vendor: Hip, index: 0, name: \"fake\", arch: \"gfx90a:sramecc+:xnack-\"";
    run_on_fake(source(), &libraries, &["-DFAKE_HIP"], &tests, info);
}

fn source() -> &'static Path {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/gpu/fake"))
}
