//! One GPU: opened once per process; its context is made current on the calling thread.

use std::fmt;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use super::compiler::{CompileOptions, Compiler};
use super::kernels::Kernels;
use super::module::Module;
use super::runtime::{Runtime, runtime};
use super::table::Driver;
use super::{GpuError, SOURCES, Vendor};

/// A GPU. Cheap to clone; opening a device twice returns the same `Gpu`.
///
/// Devices stay open until the process ends, as the drivers' own threads do.
#[derive(Clone)]
pub struct Gpu(Arc<Device>);

/// Properties of a GPU, read once.
#[derive(Clone, Debug)]
pub struct GpuInfo {
    /// Vendor.
    pub vendor: Vendor,
    /// Index among the devices that this process sees.
    pub index: u32,
    /// The vendor's name of the model.
    pub name: String,
    /// The compiler's name of the architecture: `sm_90`, `gfx942:sramecc+:xnack-`.
    pub arch: String,
    /// Address among the PCI devices, as the kernel writes it: `0000:41:00.0`. Empty if the driver does not say.
    pub pci: String,
    /// Total memory.
    pub memory_bytes: u64,
    /// Version of the driver API: `CUDA 13.0`.
    pub driver: String,
}

struct Device {
    info: GpuInfo,
    runtime: &'static Runtime,
    /// CUDA's primary context, which torch uses too; 0 with HIP, which selects devices by number.
    context: usize,
    compiler: OnceLock<Compiler>,
    kernels: OnceLock<Kernels>,
}

impl Gpu {
    /// Opens device `index` of this process: CUDA's if there is one, else HIP's.
    ///
    /// # Errors
    /// [`GpuError::NoLibrary`], [`GpuError::NoDevice`] (see [`GpuError::is_absent`]), or a call that failed.
    pub fn open(index: u32) -> Result<Self, GpuError> {
        static OPENED: Mutex<Vec<Gpu>> = Mutex::new(Vec::new());
        let mut opened = OPENED.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(gpu) = opened.iter().find(|gpu| gpu.0.info.index == index) {
            return Ok(gpu.clone());
        }
        let gpu = Self(Arc::new(Device::open(index)?));
        opened.push(gpu.clone());
        Ok(gpu)
    }

    /// Number of GPUs that this process sees.
    ///
    /// # Errors
    /// Same as [`Gpu::open`]; no device at all is an error, not zero.
    pub fn count() -> Result<u32, GpuError> {
        let runtime = runtime()?;
        runtime.device_count()
    }

    /// Properties.
    pub fn info(&self) -> &GpuInfo {
        &self.0.info
    }

    /// Free memory in bytes, as all processes see it.
    ///
    /// # Errors
    /// The call failed.
    pub fn free_bytes(&self) -> Result<u64, GpuError> {
        let (mut free, mut total) = (0usize, 0usize);
        self.make_current()?;
        // SAFETY: both pointers are live for the call.
        let code = unsafe { (self.driver().memory_info)(&mut free, &mut total) };
        self.check(code, || "asking for free memory".to_owned())?;
        Ok(free as u64)
    }

    /// Waits, spinning, until all work of this process on this device is done. Streams and events wait without
    /// spinning.
    ///
    /// # Errors
    /// Enqueued work failed.
    pub fn synchronize(&self) -> Result<(), GpuError> {
        self.make_current()?;
        // SAFETY: no arguments; the context is current.
        let code = unsafe { (self.driver().synchronize)() };
        self.check(code, || "work enqueued on the device".to_owned())
    }

    /// This crate's kernels, compiled for this device on the first call (0.1 to 1 s).
    ///
    /// # Errors
    /// There is no run-time compiler, or it refused a source.
    pub fn kernels(&self) -> Result<&Kernels, GpuError> {
        self.once(&self.0.kernels, || Kernels::compile(self))
    }

    /// Compiles the source of [`SOURCES`] that has this name, for this device.
    ///
    /// Panics if there is none of this name.
    ///
    /// # Errors
    /// There is no run-time compiler, or it refused the source.
    pub fn compile_own(&self, name: &str) -> Result<Module, GpuError> {
        let (name, source) = SOURCES
            .iter()
            .find(|(own, _)| *own == name)
            .expect("a source of ours");
        self.compile(name, source, &CompileOptions::default())
    }

    /// Compiles `source` for this device, with `source/prelude.h` before it. `name` appears in messages.
    ///
    /// # Errors
    /// There is no run-time compiler, or it refused the source; the error contains its log.
    pub fn compile(
        &self,
        name: &str,
        source: &str,
        options: &CompileOptions,
    ) -> Result<Module, GpuError> {
        let compiler = self.once(&self.0.compiler, || Compiler::open(self.info().vendor, &[]))?;
        let code = compiler.compile(&self.info().arch, name, source, options)?;
        Module::load(self, name, &code)
    }

    fn once<'a, T>(
        &self,
        place: &'a OnceLock<T>,
        make: impl FnOnce() -> Result<T, GpuError>,
    ) -> Result<&'a T, GpuError> {
        if let Some(made) = place.get() {
            return Ok(made);
        }
        // Two threads may both create it; one result is kept.
        let made = make()?;
        Ok(place.get_or_init(|| made))
    }

    pub(super) fn driver(&self) -> &'static Driver {
        &self.0.runtime.driver
    }

    /// Makes this device current on the calling thread. Precedes every call to the driver, also those of a library
    /// above it.
    ///
    /// # Errors
    /// The call failed.
    pub fn make_current(&self) -> Result<(), GpuError> {
        self.0
            .runtime
            .make_current(self.0.info.index, self.0.context)
    }

    /// Turns a driver's code into a result; `op` is evaluated only for an error.
    pub(super) fn check(&self, code: i32, op: impl FnOnce() -> String) -> Result<(), GpuError> {
        self.0.runtime.check(code, op)
    }
}

impl fmt::Debug for Gpu {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Gpu").field(&self.0.info).finish()
    }
}

impl Device {
    fn open(index: u32) -> Result<Self, GpuError> {
        let runtime = runtime()?;
        let count = runtime.device_count()?;
        if index >= count {
            return Err(GpuError::NoDevice {
                message: format!(
                    "device {index} was requested, but {} has only {count}",
                    runtime.library_name
                ),
            });
        }
        let mut handle = 0;
        // SAFETY: the pointer is live for the call.
        let code = unsafe { (runtime.driver.device)(&mut handle, index as i32) };
        runtime.check(code, || format!("opening device {index}"))?;
        let context = runtime.context(index, handle)?;
        runtime.make_current(index, context)?;
        Ok(Self {
            info: runtime.info(index, handle)?,
            runtime,
            context,
            compiler: OnceLock::new(),
            kernels: OnceLock::new(),
        })
    }
}
