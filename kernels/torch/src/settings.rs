//! Process-wide settings of torch, and the end of a process that has loaded it.

use super::device::gpu_half_loaded;
use super::{TorchError, ffi};

/// Sets the number of threads of torch's operators, the calling thread included, for the whole process.
///
/// # Errors
/// torch's error.
pub fn set_threads(count: usize) -> Result<(), TorchError> {
    let count = i32::try_from(count.max(1)).unwrap_or(i32::MAX);
    // SAFETY: no pointer goes in; the message is checked here and used nowhere else.
    unsafe { ffi::check("setting the threads", ffi::offload_set_threads(count)) }
}

/// Makes torch use only deterministic algorithms, and fail where there is none.
///
/// # Errors
/// torch's error.
pub fn set_deterministic(on: bool) -> Result<(), TorchError> {
    // SAFETY: no pointer goes in; the message is checked here and used nowhere else.
    unsafe {
        ffi::check(
            "choosing deterministic algorithms",
            ffi::offload_set_deterministic(on.into()),
        )
    }
}

/// Ends the process with this exit status. Buffers of Rust's standard output must have been flushed; C's are flushed here.
///
/// Without a GPU, nothing else happens: libtorch's static destructors take its operators out of their tables one by one, which
/// takes 0.2 s and twice as long as loading it, and the operating system frees all of it anyway. With a GPU, the process ends as
/// usual, because profilers write what they measured when it does.
pub fn exit(status: u8) -> ! {
    if *gpu_half_loaded() {
        std::process::exit(status.into());
    }
    // SAFETY: no pointer goes in, and the function may be called on any thread.
    unsafe { ffi::offload_exit(status.into()) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tch::{Device, Kind, Tensor};

    #[test]
    fn threads_and_determinism_reach_torch() {
        set_threads(2).unwrap();
        assert_eq!(tch::get_num_threads(), 2);
        // An operation without a deterministic form must now be refused.
        set_deterministic(true).unwrap();
        let x = Tensor::ones([4], (Kind::Float, Device::Cpu));
        let indices = Tensor::from_slice(&[0i64, 0]);
        let refused = x.f_put(&indices, &Tensor::from_slice(&[1.0f32, 2.0]), false);
        assert!(refused.is_err());
        set_deterministic(false).unwrap();
        assert!(
            x.f_put(&indices, &Tensor::from_slice(&[1.0f32, 2.0]), false)
                .is_ok()
        );
    }
}
