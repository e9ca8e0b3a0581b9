//! Tests the errors on a machine without a GPU, without libraries, or with a library that has no device.
//!
//! A loader must not panic or hang, and must name everything that it looked for.

use kernels::gpu::{Gpu, GpuError};

#[test]
fn a_machine_without_a_gpu_is_told_what_was_looked_for() {
    match Gpu::open(0) {
        Ok(gpu) => println!(
            "skipped: the answer without a GPU: {:?} is here",
            gpu.info()
        ),
        Err(GpuError::NoLibrary { tried }) => {
            let tried = tried.join("\n");
            for name in ["libcuda.so.1", "libamdhip64.so.7", "libamdhip64.so.5"] {
                assert!(tried.contains(name), "{name} is not named in:\n{tried}");
            }
        }
        Err(GpuError::NoDevice { message }) => {
            assert!(
                message.contains("libcuda.so.1") || message.contains("libamdhip64.so"),
                "the library is not named: {message}"
            );
            println!("no device: {message}");
        }
        Err(other) => panic!("neither a GPU nor the word that there is none: {other}"),
    }
}
