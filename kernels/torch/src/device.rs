//! torch on a GPU: opens its GPU half at run time, and views device memory as tensors.
//!
//! The program links only torch's CPU half, so that it starts without a GPU's libraries. torch checks once whether its
//! GPU half is loaded, so that must happen before the first question about a GPU: [`use_gpu`] does both in this order.

use std::ffi::c_void;
use std::sync::{Mutex, MutexGuard, PoisonError};

use tch::{Device, Kind, Tensor};

use super::ffi::{self, RawTensor};
use super::memory::contiguous;
use super::{TorchError, set_deterministic};
use kernels::gpu::library::{dirs_of_loaded, open_first};
pub use kernels::gpu::{CUBLAS_WORKSPACE, CUBLAS_WORKSPACES};
use kernels::gpu::{DeviceBuffer, Gpu};

/// Library that adds GPUs of either vendor to torch's CPU half.
const GPU_HALVES: [&str; 2] = ["libtorch_cuda.so", "libtorch_hip.so"];

/// Makes torch compute on `gpu` in this process: opens its GPU half, makes the GPU current, and selects deterministic
/// algorithms and fp32 products of fp32 numbers.
///
/// # Errors
/// torch's GPU half is missing; torch does not see the GPU; [`CUBLAS_WORKSPACE`] has a wrong value, which must be set
/// before the process starts; an error of torch.
pub fn use_gpu(gpu: &Gpu) -> Result<Device, TorchError> {
    check_workspace(std::env::var(CUBLAS_WORKSPACE).unwrap_or_default())?;
    load_gpu_half()?;
    let index = gpu.info().index as i32;
    let seen = tch::Cuda::device_count();
    if i64::from(index) >= seen {
        return Err(TorchError::UnseenGpu { index, seen });
    }
    // SAFETY: no pointer goes in; the message is checked here and used nowhere else.
    unsafe { ffi::check("choosing the GPU", ffi::offload_use_gpu(index))? };
    set_deterministic(true)?;
    Ok(device_of(gpu))
}

fn check_workspace(found: String) -> Result<(), TorchError> {
    if CUBLAS_WORKSPACES.contains(&found.as_str()) {
        Ok(())
    } else {
        Err(TorchError::Workspace { found })
    }
}

/// torch's name of the device, the same for CUDA and HIP.
pub fn device_of(gpu: &Gpu) -> Device {
    Device::Cuda(gpu.info().index as usize)
}

/// Opens torch's GPU half, once per process: by its plain name (a RUNPATH, LD_LIBRARY_PATH), then beside the loaded CPU
/// half.
///
/// # Errors
/// The library or one of its dependencies is missing; the error names each place tried.
pub fn load_gpu_half() -> Result<(), TorchError> {
    let mut loaded = gpu_half_loaded();
    if !*loaded {
        open_first(&GPU_HALVES, &dirs_of_loaded("libtorch_cpu.so"))
            .map_err(|tried| TorchError::NoGpuHalf { tried })?;
        *loaded = true;
    }
    Ok(())
}

/// Whether torch's GPU half is open.
pub(crate) fn gpu_half_loaded() -> MutexGuard<'static, bool> {
    static LOADED: Mutex<bool> = Mutex::new(false);
    LOADED.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Creates a contiguous tensor over `shape` elements of `kind` of a buffer, from element `offset_elems`. It does not
/// copy; the buffer stays allocated while the tensor or a view of it lives.
///
/// Work on torch's stream (the default stream) is not ordered against other streams: that is the caller's task.
///
/// Panics if the elements are not within the buffer.
///
/// # Errors
/// torch's error.
pub fn device_view(
    buffer: &DeviceBuffer,
    kind: Kind,
    offset_elems: usize,
    shape: &[i64],
) -> Result<Tensor, TorchError> {
    let elem_bytes = kind.elt_size_in_bytes();
    let elems = shape
        .iter()
        .map(|&n| usize::try_from(n).expect("a size is not negative"))
        .product::<usize>();
    assert!(
        (offset_elems + elems) * elem_bytes <= buffer.bytes(),
        "{elems} elements of {elem_bytes} bytes from element {offset_elems} on are not within a buffer of {} bytes",
        buffer.bytes()
    );
    let address = buffer.address() + (offset_elems * elem_bytes) as u64;
    let strides = contiguous(shape);
    let owner = Box::into_raw(Box::new(buffer.clone()));
    let mut result: RawTensor = std::ptr::null_mut();
    // SAFETY: the elements are device memory within the buffer (asserted above; its start is aligned to 256 bytes,
    // hence every element to its size), which the clone in `owner` keeps allocated until torch calls `release` with it.
    // `sizes` and `strides` have `shape.len()` numbers each. The message is checked below and used nowhere else.
    let message = unsafe {
        ffi::offload_gpu_tensor(
            address as *mut c_void,
            scalar_type(kind),
            shape.as_ptr(),
            strides.as_ptr(),
            shape.len(),
            buffer.gpu().info().index as i32,
            owner.cast(),
            release,
            &mut result,
        )
    };
    // SAFETY: as above.
    if let Err(error) = unsafe { ffi::check("a tensor over device memory", message) } {
        // SAFETY: on an error the shim never calls `release`, so this is the only owner of the pointer from `into_raw`.
        drop(unsafe { Box::from_raw(owner) });
        return Err(error);
    }
    // SAFETY: a new `at::Tensor` that the shim released to us.
    Ok(unsafe { Tensor::from_ptr(result.cast()) })
}

/// torch's number of a kind, from its `ScalarType.h`.
fn scalar_type(kind: Kind) -> i32 {
    match kind {
        Kind::Uint8 => 0,
        Kind::Int64 => 4,
        Kind::Half => 5,
        Kind::Float => 6,
        Kind::Double => 7,
        Kind::BFloat16 => 15,
        other => panic!("nothing here has elements of kind {other:?}"),
    }
}

/// torch calls this when the last tensor over a buffer is freed.
extern "C" fn release(owner: *mut c_void) {
    // SAFETY: `owner` comes from `into_raw` in `device_view`, and torch calls this once.
    drop(unsafe { Box::from_raw(owner.cast::<DeviceBuffer>()) });
}

/// Peaks of torch's own GPU memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TorchMemory {
    /// Most bytes of tensors at a time since the last reset, without buffers of [`kernels::gpu`].
    pub allocated_bytes_peak: u64,
    /// Most bytes taken from the device, cached ones included.
    pub reserved_bytes_peak: u64,
}

/// Reads torch's memory on `gpu`, and resets the peaks if `reset`.
///
/// # Errors
/// torch has not used the GPU yet.
pub fn gpu_memory(gpu: &Gpu, reset: bool) -> Result<TorchMemory, TorchError> {
    let (mut allocated, mut reserved) = (0u64, 0u64);
    let index = gpu.info().index as i32;
    // SAFETY: both pointers are live for the call; the message is checked here and used nowhere else.
    unsafe {
        let message = ffi::offload_gpu_memory(index, &mut allocated, &mut reserved, reset.into());
        ffi::check("asking for the GPU's memory", message)?;
    }
    Ok(TorchMemory {
        allocated_bytes_peak: allocated,
        reserved_bytes_peak: reserved,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_workspace_that_makes_products_differ_is_refused_with_one_that_does_not() {
        for good in CUBLAS_WORKSPACES {
            check_workspace(good.to_owned()).unwrap();
        }
        for bad in ["", ":4096:2:16:8", "4096:8"] {
            let error_text = check_workspace(bad.to_owned()).unwrap_err().to_string();
            assert!(error_text.contains(CUBLAS_WORKSPACE), "{error_text}");
            assert!(error_text.contains(&format!("\"{bad}\"")), "{error_text}");
            assert!(error_text.contains(":4096:8"), "{error_text}");
        }
    }

    #[test]
    fn a_missing_gpu_half_is_named_with_the_places_looked_at() {
        // Whether the CPU half's directory contains a GPU half depends on the machine: both results are checked.
        match load_gpu_half() {
            Ok(()) => assert!(!dirs_of_loaded("libtorch_").is_empty()),
            Err(error) => {
                let error_text = error.to_string();
                let beside = dirs_of_loaded("libtorch_cpu.so");
                assert!(error_text.contains("libtorch_cuda.so"), "{error_text}");
                assert!(
                    error_text.contains(&beside[0].display().to_string()),
                    "{error_text}"
                );
            }
        }
    }
}
