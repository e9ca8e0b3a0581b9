//! Process-wide settings of torch.

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
