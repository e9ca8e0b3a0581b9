//! The library functions in use: one table for both vendors.
//!
//! CUDA's driver API and HIP's module API have the same functions with the same arguments under other names, and so
//! have NVRTC and hipRTC. Handles (contexts, streams, events, modules, functions, programs) are pointers; here they are
//! `usize`, which is passed the same way and may be sent to other threads. Device pointers are `u64`, as in CUDA.

use std::ffi::{c_char, c_void};

use libloading::Library;

use super::Vendor;

macro_rules! table {
    ($(#[$about:meta])* $table:ident { $($field:ident($($argument:ty),*) = $cuda:literal, $hip:literal;)* }) => {
        $(#[$about])*
        pub(super) struct $table {
            $(pub(super) $field: unsafe extern "C" fn($($argument),*) -> i32,)*
        }

        impl $table {
            /// Finds every function, or reports the one that the library lacks. The library must stay loaded.
            pub(super) fn load(library: &'static Library, vendor: Vendor) -> Result<Self, String> {
                Ok(Self {
                    $($field: {
                        let name = match vendor {
                            Vendor::Cuda => $cuda,
                            Vendor::Hip => $hip,
                        };
                        // SAFETY: the vendor's headers declare a function of this name with these arguments, an int-sized
                        // enum as result and the C calling convention.
                        unsafe { symbol::<unsafe extern "C" fn($($argument),*) -> i32>(library, name)? }
                    },)*
                })
            }
        }
    };
}

table! {
    /// Driver functions: devices, memory, streams, launches. 0 is success.
    Driver {
        init(u32) = "cuInit", "hipInit";
        version(*mut i32) = "cuDriverGetVersion", "hipDriverGetVersion";
        device_count(*mut i32) = "cuDeviceGetCount", "hipGetDeviceCount";
        device(*mut i32, i32) = "cuDeviceGet", "hipDeviceGet";
        device_name(*mut c_char, i32, i32) = "cuDeviceGetName", "hipDeviceGetName";
        device_pci(*mut c_char, i32, i32) = "cuDeviceGetPCIBusId", "hipDeviceGetPCIBusId";
        device_total_bytes(*mut usize, i32) = "cuDeviceTotalMem_v2", "hipDeviceTotalMem";
        memory_info(*mut usize, *mut usize) = "cuMemGetInfo_v2", "hipMemGetInfo";
        alloc(*mut u64, usize) = "cuMemAlloc_v2", "hipMalloc";
        synchronize() = "cuCtxSynchronize", "hipDeviceSynchronize";
        free(u64) = "cuMemFree_v2", "hipFree";
        host_register(usize, usize, u32) = "cuMemHostRegister_v2", "hipHostRegister";
        host_unregister(usize) = "cuMemHostUnregister", "hipHostUnregister";
        copy_up(u64, *const c_void, usize, usize) = "cuMemcpyHtoDAsync_v2", "hipMemcpyHtoDAsync";
        copy_down(*mut c_void, u64, usize, usize) = "cuMemcpyDtoHAsync_v2", "hipMemcpyDtoHAsync";
        copy_across(u64, u64, usize, usize) = "cuMemcpyDtoDAsync_v2", "hipMemcpyDtoDAsync";
        fill(u64, u8, usize, usize) = "cuMemsetD8Async", "hipMemsetD8Async";
        stream_create(*mut usize, u32, i32) = "cuStreamCreateWithPriority", "hipStreamCreateWithPriority";
        stream_destroy(usize) = "cuStreamDestroy_v2", "hipStreamDestroy";
        stream_synchronize(usize) = "cuStreamSynchronize", "hipStreamSynchronize";
        stream_wait(usize, usize, u32) = "cuStreamWaitEvent", "hipStreamWaitEvent";
        event_create(*mut usize, u32) = "cuEventCreate", "hipEventCreateWithFlags";
        event_destroy(usize) = "cuEventDestroy_v2", "hipEventDestroy";
        event_record(usize, usize) = "cuEventRecord", "hipEventRecord";
        event_query(usize) = "cuEventQuery", "hipEventQuery";
        event_synchronize(usize) = "cuEventSynchronize", "hipEventSynchronize";
        event_elapsed(*mut f32, usize, usize) = "cuEventElapsedTime", "hipEventElapsedTime";
        module_load(*mut usize, *const c_void) = "cuModuleLoadData", "hipModuleLoadData";
        module_unload(usize) = "cuModuleUnload", "hipModuleUnload";
        module_function(*mut usize, usize, *const c_char) = "cuModuleGetFunction", "hipModuleGetFunction";
        function_attribute(*mut i32, i32, usize) = "cuFuncGetAttribute", "hipFuncGetAttribute";
        launch(usize, u32, u32, u32, u32, u32, u32, u32, usize, *mut *mut c_void, *mut *mut c_void)
            = "cuLaunchKernel", "hipModuleLaunchKernel";
    }
}

table! {
    /// Functions of the run-time compiler. 0 is success.
    CompilerTable {
        version(*mut i32, *mut i32) = "nvrtcVersion", "hiprtcVersion";
        create(*mut usize, *const c_char, *const c_char, i32, *const *const c_char, *const *const c_char)
            = "nvrtcCreateProgram", "hiprtcCreateProgram";
        compile(usize, i32, *const *const c_char) = "nvrtcCompileProgram", "hiprtcCompileProgram";
        log_bytes(usize, *mut usize) = "nvrtcGetProgramLogSize", "hiprtcGetProgramLogSize";
        log(usize, *mut c_char) = "nvrtcGetProgramLog", "hiprtcGetProgramLog";
        code_bytes(usize, *mut usize) = "nvrtcGetCUBINSize", "hiprtcGetCodeSize";
        code(usize, *mut c_char) = "nvrtcGetCUBIN", "hiprtcGetCode";
        destroy(*mut usize) = "nvrtcDestroyProgram", "hiprtcDestroyProgram";
    }
}

/// Functions in which the vendors differ.
pub(super) enum Differences {
    /// Contexts are made current, and error texts are returned through an argument.
    Cuda {
        context_retain: unsafe extern "C" fn(*mut usize, i32) -> i32,
        context_set: unsafe extern "C" fn(usize) -> i32,
        device_attribute: unsafe extern "C" fn(*mut i32, i32, i32) -> i32,
        error_text: unsafe extern "C" fn(i32, *mut *const c_char) -> i32,
    },
    /// Devices are selected by number.
    Hip {
        device_set: unsafe extern "C" fn(i32) -> i32,
        device_properties: unsafe extern "C" fn(*mut c_void, i32) -> i32,
        error_text: unsafe extern "C" fn(i32) -> *const c_char,
    },
}

impl Differences {
    pub(super) fn load(library: &'static Library, vendor: Vendor) -> Result<Self, String> {
        // SAFETY: as in `table!`: names, arguments and results are those of the vendors' headers.
        // hipGetDeviceProperties fills a structure whose length depends on the release, for which the caller leaves
        // room.
        unsafe {
            Ok(match vendor {
                Vendor::Cuda => Self::Cuda {
                    context_retain: symbol(library, "cuDevicePrimaryCtxRetain")?,
                    context_set: symbol(library, "cuCtxSetCurrent")?,
                    device_attribute: symbol(library, "cuDeviceGetAttribute")?,
                    error_text: symbol(library, "cuGetErrorString")?,
                },
                Vendor::Hip => Self::Hip {
                    device_set: symbol(library, "hipSetDevice")?,
                    // ROCm 6 renamed it when its structure grew; the old name remains for old programs.
                    device_properties: symbol(library, "hipGetDevicePropertiesR0600")
                        .or_else(|_| symbol(library, "hipGetDeviceProperties"))?,
                    error_text: symbol(library, "hipGetErrorString")?,
                },
            })
        }
    }
}

/// # Safety
/// `T` is a function pointer of the type that `name` has in `library`.
unsafe fn symbol<T: Copy>(library: &'static Library, name: &str) -> Result<T, String> {
    // SAFETY: the caller's promise; the library is never unloaded, so the copy stays valid.
    unsafe { library.get::<T>(name) }
        .map(|symbol| *symbol)
        .map_err(|_| format!("it lacks the function {name}: unsupported version"))
}
