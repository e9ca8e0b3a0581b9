//! torch on a GPU: its GPU half opened at run time, and device memory of ours seen as tensors.
//!
//! The program links torch's CPU half only, so that it starts without a GPU's libraries. torch asks once whether its GPU half is there,
//! so that has to be opened before the first question about a GPU: [`use_gpu`] does both in this order.

use std::ffi::c_void;
use std::sync::Mutex;

use tch::{Device, Kind, Tensor};

use super::ffi::{self, RawTensor};
use super::memory::contiguous;
use super::{TorchError, set_deterministic};
use kernels::gpu::library::{dirs_of_loaded, open_first};
use kernels::gpu::{DeviceBuffer, Gpu};

/// The library that makes torch's CPU half know GPUs, of either vendor.
const GPU_HALVES: [&str; 2] = ["libtorch_cuda.so", "libtorch_hip.so"];

/// Read by cuBLAS when it starts. Only with one of [`CUBLAS_WORKSPACES`] does it give the same bits each time.
pub const CUBLAS_WORKSPACE: &str = "CUBLAS_WORKSPACE_CONFIG";

/// Buffers cuBLAS may choose from that make it deterministic; the first is as large as torch's own choice for Hopper.
pub const CUBLAS_WORKSPACES: [&str; 2] = [":4096:8", ":16:8"];

/// Makes torch compute on `gpu` in this process: opens its GPU half, makes the GPU the calling thread's, chooses deterministic algorithms,
/// and products of fp32 numbers in fp32.
///
/// # Errors
/// No GPU half of torch in reach; a torch that does not see the GPU; [`CUBLAS_WORKSPACE`] is not set as it must be, which only who
/// starts the process can do; what torch throws.
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

/// The device as torch names it; a HIP device is called by the same name.
pub fn device_of(gpu: &Gpu) -> Device {
    Device::Cuda(gpu.info().index as usize)
}

/// Opens torch's GPU half: by its plain name (a RUNPATH, LD_LIBRARY_PATH), then beside the loaded CPU half. Once a process.
///
/// # Errors
/// It is not there, or what it needs is not; each place that was tried is named.
pub fn load_gpu_half() -> Result<(), TorchError> {
    static LOADED: Mutex<bool> = Mutex::new(false);
    let mut loaded = LOADED
        .lock()
        .unwrap_or_else(std::sync::PoisonError::into_inner);
    if !*loaded {
        open_first(&GPU_HALVES, &dirs_of_loaded("libtorch_cpu.so"))
            .map_err(|tried| TorchError::NoGpuHalf { tried })?;
        *loaded = true;
    }
    Ok(())
}

/// A tensor over `shape` elements of `kind` of a buffer, from element `offset_elems` on, contiguous. No copy; the buffer's memory stays
/// allocated while the tensor or a view of it lives.
///
/// What is computed with it on torch's stream (the default stream) is not ordered against other streams: that is the caller's.
///
/// Panics if the elements are not within the buffer.
///
/// # Errors
/// What torch throws.
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
    // SAFETY: the elements are device memory within the buffer (asserted above; its start is aligned to 256 bytes, so every element is to
    // its size), which the clone in `owner` keeps allocated until torch calls `release` with it. `sizes` and `strides` have
    // `shape.len()` numbers each. The message is checked below and used nowhere else.
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
        // SAFETY: on an error the shim never calls `release`, so this is still the only owner of what `into_raw` gave.
        drop(unsafe { Box::from_raw(owner) });
        return Err(error);
    }
    // SAFETY: a new `at::Tensor` the shim released to us, owned by nobody else.
    Ok(unsafe { Tensor::from_ptr(result.cast()) })
}

/// torch's number of a kind, as in its `ScalarType.h`.
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

/// Called by torch when the last tensor over a buffer goes.
extern "C" fn release(owner: *mut c_void) {
    // SAFETY: `owner` is what `device_view` got from `into_raw`, and torch calls this once.
    drop(unsafe { Box::from_raw(owner.cast::<DeviceBuffer>()) });
}

/// What torch's own memory of a GPU reached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TorchMemory {
    /// The most bytes of tensors at a time since the last reset. Buffers of [`kernels::gpu`] are not among them.
    pub allocated_bytes_peak: u64,
    /// The most bytes it had taken from the device, which it keeps for later tensors.
    pub reserved_bytes_peak: u64,
}

/// torch's memory on `gpu`, counted anew from now on if `reset`.
///
/// # Errors
/// torch has not used the GPU yet.
pub fn gpu_memory(gpu: &Gpu, reset: bool) -> Result<TorchMemory, TorchError> {
    let (mut allocated, mut reserved) = (0u64, 0u64);
    let index = gpu.info().index as i32;
    // SAFETY: both places are live for the call; the message is checked here and used nowhere else.
    unsafe {
        let message = ffi::offload_gpu_memory(index, &mut allocated, &mut reserved, reset.into());
        ffi::check("asking for the GPU's memory", message)?;
    }
    Ok(TorchMemory {
        allocated_bytes_peak: allocated,
        reserved_bytes_peak: reserved,
    })
}

/// Gives back to the device what torch keeps for later tensors. Waits for the device.
///
/// # Errors
/// What torch throws.
pub fn empty_gpu_cache() -> Result<(), TorchError> {
    // SAFETY: no pointer goes in; the message is checked here and used nowhere else.
    unsafe {
        ffi::check(
            "giving back the GPU's memory",
            ffi::offload_gpu_empty_cache(),
        )
    }
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
            let said = check_workspace(bad.to_owned()).unwrap_err().to_string();
            assert!(said.contains(CUBLAS_WORKSPACE), "{said}");
            assert!(said.contains(&format!("\"{bad}\"")), "{said}");
            assert!(said.contains(":4096:8"), "{said}");
        }
    }

    #[test]
    fn a_missing_gpu_half_is_named_with_the_places_looked_at() {
        // The directory of the CPU half that this machine's torch may or may not have a GPU half in: both answers are looked at.
        match load_gpu_half() {
            Ok(()) => assert!(!dirs_of_loaded("libtorch_").is_empty()),
            Err(error) => {
                let said = error.to_string();
                let beside = dirs_of_loaded("libtorch_cpu.so");
                assert!(said.contains("libtorch_cuda.so"), "{said}");
                assert!(said.contains(&beside[0].display().to_string()), "{said}");
            }
        }
    }
}
