//! Tests of the fused kernels over torch's tensors: `cargo test -p kernels-torch --test fused`.

mod fake;
mod formulas;
mod fp8;
#[path = "../../../tests/shared/on_fake.rs"]
mod on_fake;

use kernels::gpu::Gpu;
use kernels_torch::{device_of, load_gpu_half};
use tch::Device;

/// Opens the GPU and torch's device of its tensors: the CPU with the fake driver, whose memory that is. Says that `what` is not tested
/// where there is none.
fn opened(what: &str) -> Option<(Gpu, Device)> {
    let gpu = match Gpu::open(0) {
        Ok(gpu) => gpu,
        Err(error) if error.is_absent() => {
            println!("skipped: {error}: {what}");
            return None;
        }
        Err(error) => panic!("{error}"),
    };
    println!("{:?}", gpu.info());
    let device = if std::env::var_os(on_fake::DRIVER).is_some() {
        Device::Cpu
    } else {
        load_gpu_half().unwrap();
        device_of(&gpu)
    };
    Some((gpu, device))
}
