//! Compiled kernels on a device: modules, functions and launches.

use std::ffi::c_void;
use std::sync::Arc;

use super::compiler::text;
use super::{Gpu, GpuError, Stream};

/// Code loaded on a device.
#[derive(Clone, Debug)]
pub struct Module(Arc<RawModule>);

#[derive(Debug)]
struct RawModule {
    gpu: Gpu,
    name: String,
    handle: usize,
}

/// A kernel. Keeps its module loaded.
#[derive(Clone, Debug)]
pub struct Function {
    module: Module,
    handle: usize,
}

/// Resources that the compiler assigned to each thread of a kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FunctionUse {
    /// Registers.
    pub register_count: u32,
    /// Bytes of local memory: more than 0 means spilled registers or an array indexed at run time.
    pub local_bytes: u32,
}

/// An argument of a kernel.
#[derive(Clone, Copy, Debug)]
pub enum Arg {
    /// An address on the device.
    Ptr(u64),
    /// `int`
    I32(i32),
    /// `unsigned`
    U32(u32),
    /// `long long`
    I64(i64),
    /// `unsigned long long`
    U64(u64),
    /// `float`
    F32(f32),
    /// `double`
    F64(f64),
}

impl Module {
    pub(super) fn load(gpu: &Gpu, name: &str, code: &[u8]) -> Result<Self, GpuError> {
        let mut handle = 0;
        gpu.make_current()?;
        // SAFETY: the code is the complete output of this device's compiler; the pointer is live for the call.
        let answer =
            unsafe { (gpu.driver().module_load)(&mut handle, code.as_ptr().cast::<c_void>()) };
        gpu.check(answer, || format!("loading the compiled {name}"))?;
        Ok(Self(Arc::new(RawModule {
            gpu: gpu.clone(),
            name: name.to_owned(),
            handle,
        })))
    }

    /// Returns the kernel `name` (`extern "C"` in the source).
    ///
    /// # Errors
    /// The module has no such kernel.
    pub fn function(&self, name: &str) -> Result<Function, GpuError> {
        let gpu = &self.0.gpu;
        let label = text(name);
        let mut handle = 0;
        gpu.make_current()?;
        // SAFETY: the module is live, the name ends in a zero byte, the pointer is live for the call.
        let code =
            unsafe { (gpu.driver().module_function)(&mut handle, self.0.handle, label.as_ptr()) };
        gpu.check(code, || format!("finding {name} in {}", self.0.name))?;
        Ok(Function {
            module: self.clone(),
            handle,
        })
    }
}

impl Drop for RawModule {
    fn drop(&mut self) {
        if self.gpu.make_current().is_ok() {
            // SAFETY: every Function keeps its module, so no function is left.
            let _ = unsafe { (self.gpu.driver().module_unload)(self.handle) };
        }
    }
}

impl Function {
    /// Resources of the kernel.
    ///
    /// # Errors
    /// The call failed.
    pub fn resources(&self) -> Result<FunctionUse, GpuError> {
        // CU_FUNC_ATTRIBUTE_NUM_REGS and _LOCAL_SIZE_BYTES; HIP has the same numbers.
        Ok(FunctionUse {
            register_count: self.attribute(4)?,
            local_bytes: self.attribute(3)?,
        })
    }

    fn attribute(&self, attribute: i32) -> Result<u32, GpuError> {
        let gpu = &self.module.0.gpu;
        let mut value = 0;
        gpu.make_current()?;
        // SAFETY: the pointer is live for the call, and the module keeps the function.
        let code = unsafe { (gpu.driver().function_attribute)(&mut value, attribute, self.handle) };
        gpu.check(code, || "asking what a kernel needs".to_owned())?;
        Ok(value.max(0) as u32)
    }

    /// Enqueues `grid` blocks of `block` threads with `shared_bytes` of shared memory beyond what the kernel declares.
    ///
    /// # Errors
    /// The call failed: the device does not support the shape, or earlier work broke the context.
    ///
    /// # Safety
    /// `args` match the kernel's parameters in number and types; every address among them is device memory that is long
    /// enough for the kernel and stays allocated until it has run.
    pub unsafe fn launch(
        &self,
        grid: [u32; 3],
        block: [u32; 3],
        shared_bytes: u32,
        stream: &Stream,
        args: &[Arg],
    ) -> Result<(), GpuError> {
        let gpu = &self.module.0.gpu;
        // Little endian, as `cast.rs` asserts: an argument of four bytes is the first four of its eight.
        let mut places: Vec<u64> = args.iter().map(|arg| arg.bits()).collect();
        let mut pointers: Vec<*mut c_void> = places
            .iter_mut()
            .map(|place| std::ptr::from_mut(place).cast())
            .collect();
        gpu.make_current()?;
        // SAFETY: each pointer leads to a value as large as the largest argument, live for the call, which copies it;
        // the caller promises the rest.
        let code = unsafe {
            (gpu.driver().launch)(
                self.handle,
                grid[0],
                grid[1],
                grid[2],
                block[0],
                block[1],
                block[2],
                shared_bytes,
                stream.raw(),
                pointers.as_mut_ptr(),
                std::ptr::null_mut(),
            )
        };
        gpu.check(code, || {
            let name = &self.module.0.name;
            format!("launching a kernel of {name}, {grid:?} blocks of {block:?}")
        })
    }
}

impl Arg {
    fn bits(self) -> u64 {
        match self {
            Self::Ptr(x) | Self::U64(x) => x,
            Self::I64(x) => x as u64,
            Self::I32(x) => u64::from(x as u32),
            Self::U32(x) => u64::from(x),
            Self::F32(x) => u64::from(x.to_bits()),
            Self::F64(x) => x.to_bits(),
        }
    }
}
