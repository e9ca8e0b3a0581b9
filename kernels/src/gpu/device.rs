//! One GPU: opened once a process, its context made current on whatever thread calls.

use std::ffi::{CStr, c_char};
use std::fmt;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use super::compiler::{CompileOptions, Compiler, Module};
use super::kernels::Kernels;
use super::library::{folders_of_toolkit, open_first};
use super::table::{Differences, Driver};
use super::{GpuError, Vendor};

/// hipDeviceProp_t has 792 bytes in ROCm 5 and 1472 in ROCm 6 and 7.
const HIP_PROPERTIES_BYTES_MAX: usize = 16 * 1024;

/// A GPU. Cheap to clone; the same device opened twice is the same `Gpu`.
///
/// Devices stay open until the process ends, as the drivers' own threads do.
#[derive(Clone)]
pub struct Gpu(Arc<Device>);

/// What is known of a GPU without asking it again.
#[derive(Clone, Debug)]
pub struct GpuInfo {
    /// Whose it is.
    pub vendor: Vendor,
    /// Its place among those this process sees.
    pub index: u32,
    /// As the vendor calls it.
    pub name: String,
    /// What its compiler calls it: `sm_90`, `gfx942:sramecc+:xnack-`.
    pub arch: String,
    /// All of its memory.
    pub memory_bytes: u64,
    /// The driver API's version: `CUDA 13.0`.
    pub driver: String,
}

struct Device {
    info: GpuInfo,
    runtime: &'static Runtime,
    /// CUDA's primary context, which torch uses too; 0 with HIP, where a device is chosen by number.
    context: usize,
    compiler: OnceLock<Compiler>,
    kernels: OnceLock<Kernels>,
    /// Held while the compiler is opened or the kernels are compiled, so that both happen once.
    opening: Mutex<()>,
}

/// A vendor's library, opened and initialised.
struct Runtime {
    vendor: Vendor,
    library_name: String,
    driver: Driver,
    differences: Differences,
}

impl Gpu {
    /// Opens device `index` of this process: CUDA's if there is one, HIP's otherwise.
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

    /// How many GPUs this process sees.
    ///
    /// # Errors
    /// As [`Gpu::open`]; no device at all is an error, not zero.
    pub fn count() -> Result<u32, GpuError> {
        let runtime = runtime()?;
        runtime.device_count()
    }

    /// What it is.
    pub fn info(&self) -> &GpuInfo {
        &self.0.info
    }

    /// Bytes of its memory that nobody holds now, other processes included.
    ///
    /// # Errors
    /// The call failed.
    pub fn free_bytes(&self) -> Result<u64, GpuError> {
        let (mut free, mut total) = (0usize, 0usize);
        self.make_current()?;
        // SAFETY: both places are live for the call.
        let code = unsafe { (self.driver().memory_info)(&mut free, &mut total) };
        self.check(code, || "asking for free memory".to_owned())?;
        Ok(free as u64)
    }

    /// Waits until all work of this process on this device is done, spinning. Streams and events wait asleep.
    ///
    /// # Errors
    /// Something enqueued failed.
    pub fn synchronize(&self) -> Result<(), GpuError> {
        self.make_current()?;
        // SAFETY: takes nothing; the context is current.
        let code = unsafe { (self.driver().synchronize)() };
        self.check(code, || "work enqueued on the device".to_owned())
    }

    /// Our own kernels, compiled for this device on the first call (0.1 to 1 s).
    ///
    /// # Errors
    /// No run-time compiler, or it refused a source.
    pub fn kernels(&self) -> Result<&Kernels, GpuError> {
        self.once(&self.0.kernels, || Kernels::compile(self))
    }

    /// Compiles `source` for this device. What every source may use is in `source/prelude.h`, which is put before it.
    ///
    /// `name` is for messages.
    ///
    /// # Errors
    /// No run-time compiler; or it refused the source, and its log is in the error.
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
        // Making the kernels makes the compiler, so the lock is not held while making; a second thread's work is thrown away.
        let made = make()?;
        let _opening = self
            .0
            .opening
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        Ok(place.get_or_init(|| made))
    }

    pub(super) fn driver(&self) -> &'static Driver {
        &self.0.runtime.driver
    }

    /// Makes this device the calling thread's; every call to the driver comes after one of these.
    pub(crate) fn make_current(&self) -> Result<(), GpuError> {
        self.0
            .runtime
            .make_current(self.0.info.index, self.0.context)
    }

    /// The driver's answer as a result; `op` is built only for an error.
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
                    "device {index} was asked for, {} has {count}, counted from 0",
                    runtime.library_name
                ),
            });
        }
        let mut handle = 0;
        // SAFETY: the place is live for the call.
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
            opening: Mutex::new(()),
        })
    }
}

/// The process's runtime: the first vendor's that has a device. A failure is not kept, so a driver that comes up late is found.
fn runtime() -> Result<&'static Runtime, GpuError> {
    static RUNTIME: Mutex<Option<&'static Runtime>> = Mutex::new(None);
    let mut known = RUNTIME.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(runtime) = *known {
        return Ok(runtime);
    }
    let runtime = match Runtime::open(Vendor::Cuda) {
        Ok(runtime) => runtime,
        Err(cuda) => Runtime::open(Vendor::Hip).map_err(|hip| worse(cuda, hip))?,
    };
    let runtime: &'static Runtime = Box::leak(Box::new(runtime));
    *known = Some(runtime);
    Ok(runtime)
}

/// Which of two vendors' answers to show: that of a library that is there, both where neither is.
fn worse(cuda: GpuError, hip: GpuError) -> GpuError {
    match (cuda, hip) {
        (GpuError::NoLibrary { mut tried }, GpuError::NoLibrary { tried: more }) => {
            tried.extend(more);
            GpuError::NoLibrary { tried }
        }
        (GpuError::NoLibrary { .. }, hip) => hip,
        (cuda, _) => cuda,
    }
}

impl Runtime {
    fn open(vendor: Vendor) -> Result<Self, GpuError> {
        let names: &[&str] = match vendor {
            Vendor::Cuda => &["libcuda.so.1"],
            Vendor::Hip => &["libamdhip64.so.7", "libamdhip64.so.6", "libamdhip64.so.5"],
        };
        let folders = match vendor {
            // The driver's own library is never part of a toolkit; one found there would be a stub.
            Vendor::Cuda => Vec::new(),
            Vendor::Hip => folders_of_toolkit(vendor),
        };
        Self::open_of(vendor, names, &folders)
    }

    fn open_of(vendor: Vendor, names: &[&str], folders: &[PathBuf]) -> Result<Self, GpuError> {
        let (library, library_name) =
            open_first(names, folders).map_err(|tried| GpuError::NoLibrary { tried })?;
        let unknown = |why: String| GpuError::NoLibrary {
            tried: vec![format!("{library_name}: {why}")],
        };
        let runtime = Self {
            vendor,
            driver: Driver::of(library, vendor).map_err(unknown)?,
            differences: Differences::of(library, vendor).map_err(unknown)?,
            library_name,
        };
        // SAFETY: takes a number only.
        let code = unsafe { (runtime.driver.init)(0) };
        runtime.absent_or(code, "initialising")?;
        runtime.device_count()?;
        Ok(runtime)
    }

    /// At least 1.
    fn device_count(&self) -> Result<u32, GpuError> {
        let mut count = 0;
        // SAFETY: the place is live for the call.
        let code = unsafe { (self.driver.device_count)(&mut count) };
        self.absent_or(code, "counting devices")?;
        if count < 1 {
            return Err(GpuError::NoDevice {
                message: format!("{} counts {count} devices", self.library_name),
            });
        }
        Ok(count as u32)
    }

    /// As `check`, but "no device" is an error of its own: without a GPU it is the expected answer.
    fn absent_or(&self, code: i32, op: &str) -> Result<(), GpuError> {
        // CUDA_ERROR_NO_DEVICE and hipErrorNoDevice; hipErrorInvalidDevice, with which ROCm 5 answers the same.
        const NO_DEVICE: [i32; 2] = [100, 101];
        let answer = self.check(code, || format!("{op} with {}", self.library_name));
        if NO_DEVICE.contains(&code) {
            return Err(GpuError::NoDevice {
                message: format!(
                    "{} says in {op}: {} ({code})",
                    self.library_name,
                    self.text(code)
                ),
            });
        }
        answer
    }

    fn context(&self, index: u32, handle: i32) -> Result<usize, GpuError> {
        let mut context = 0;
        if let Differences::Cuda { context_retain, .. } = &self.differences {
            // SAFETY: the place is live for the call. It is never released: torch in this process shares it.
            let code = unsafe { context_retain(&mut context, handle) };
            self.check(code, || format!("taking the context of device {index}"))?;
        }
        Ok(context)
    }

    fn make_current(&self, index: u32, context: usize) -> Result<(), GpuError> {
        let code = match &self.differences {
            // SAFETY: the context came from this library and is never released.
            Differences::Cuda { context_set, .. } => unsafe { context_set(context) },
            // SAFETY: takes a number only.
            Differences::Hip { device_set, .. } => unsafe { device_set(index as i32) },
        };
        self.check(code, || format!("making device {index} current"))
    }

    fn info(&self, index: u32, handle: i32) -> Result<GpuInfo, GpuError> {
        let mut name: [c_char; 256] = [0; 256];
        let (mut bytes, mut version) = (0usize, 0i32);
        // SAFETY: the name has room for 256 bytes, its end included, which is the length given.
        let code = unsafe { (self.driver.device_name)(name.as_mut_ptr(), 256, handle) };
        self.check(code, || format!("asking the name of device {index}"))?;
        // SAFETY: the place is live for the call.
        let code = unsafe { (self.driver.device_total_bytes)(&mut bytes, handle) };
        self.check(code, || format!("asking the memory of device {index}"))?;
        // SAFETY: the place is live for the call.
        let code = unsafe { (self.driver.version)(&mut version) };
        self.check(code, || "asking the driver's version".to_owned())?;
        let driver = match self.vendor {
            Vendor::Cuda => format!("CUDA {}.{}", version / 1000, version % 1000 / 10),
            Vendor::Hip => format!(
                "HIP {}.{}.{}",
                version / 10_000_000,
                version / 100_000 % 100,
                version % 100_000
            ),
        };
        let name = name.map(|letter| letter as u8);
        Ok(GpuInfo {
            vendor: self.vendor,
            index,
            name: text_of(&name),
            arch: self.arch(index, handle)?,
            memory_bytes: bytes as u64,
            driver,
        })
    }

    fn arch(&self, index: u32, handle: i32) -> Result<String, GpuError> {
        let op = || format!("asking the architecture of device {index}");
        match &self.differences {
            Differences::Cuda {
                device_attribute, ..
            } => {
                // CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR and _MINOR.
                let mut capability = [0, 0];
                for (number, attribute) in capability.iter_mut().zip([75, 76]) {
                    // SAFETY: the place is live for the call.
                    let code = unsafe { device_attribute(number, attribute, handle) };
                    self.check(code, op)?;
                }
                Ok(format!("sm_{}{}", capability[0], capability[1]))
            }
            Differences::Hip {
                device_properties, ..
            } => {
                let mut bytes = vec![0u64; HIP_PROPERTIES_BYTES_MAX / 8];
                // SAFETY: every release's structure fits many times over and is aligned to 8 bytes.
                let code = unsafe { device_properties(bytes.as_mut_ptr().cast(), index as i32) };
                self.check(code, op)?;
                let bytes: Vec<u8> = bytes.iter().flat_map(|word| word.to_le_bytes()).collect();
                gfx_name(&bytes).ok_or_else(|| GpuError::NoDevice {
                    message: format!("{} names no gfx architecture", self.library_name),
                })
            }
        }
    }

    fn check(&self, code: i32, op: impl FnOnce() -> String) -> Result<(), GpuError> {
        if code == 0 {
            return Ok(());
        }
        Err(GpuError::Call {
            op: op(),
            code,
            text: self.text(code),
        })
    }

    fn text(&self, code: i32) -> String {
        let mut text: *const c_char = std::ptr::null();
        match &self.differences {
            // SAFETY: the place is live for the call; the library leaves NULL or a constant text in it.
            Differences::Cuda { error_text, .. } => unsafe {
                error_text(code, &mut text);
            },
            // SAFETY: takes a number and returns NULL or a constant text.
            Differences::Hip { error_text, .. } => text = unsafe { error_text(code) },
        }
        if text.is_null() {
            return "the library has no text for this".to_owned();
        }
        // SAFETY: not NULL, so a constant text of the library, which stays loaded.
        unsafe { CStr::from_ptr(text) }
            .to_string_lossy()
            .into_owned()
    }
}

/// The architecture in a hipDeviceProp_t, whose layout differs from release to release: the last text in it that starts with `gfx`,
/// since the first may be the device's name.
fn gfx_name(properties: &[u8]) -> Option<String> {
    let at = properties.windows(3).rposition(|three| three == b"gfx")?;
    Some(text_of(&properties[at..]))
}

/// The text up to the first zero byte.
fn text_of(bytes: &[u8]) -> String {
    let end = bytes.iter().position(|byte| *byte == 0);
    String::from_utf8_lossy(&bytes[..end.unwrap_or(bytes.len())]).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_architecture_is_found_wherever_a_release_puts_it() {
        let mut properties = vec![0u8; 1472];
        properties[..8].copy_from_slice(b"gfx1036\0");
        properties[1160..1183].copy_from_slice(b"gfx942:sramecc+:xnack-\0");
        assert_eq!(
            gfx_name(&properties).as_deref(),
            Some("gfx942:sramecc+:xnack-")
        );
        assert_eq!(gfx_name(&[0; 64]), None);
    }

    #[test]
    fn a_library_that_is_missing_or_is_another_one_is_named() {
        for vendor in [Vendor::Cuda, Vendor::Hip] {
            let missing = Runtime::open_of(vendor, &["libnot-here.so.1"], &[]).err();
            let Some(GpuError::NoLibrary { tried }) = missing else {
                panic!("{missing:?}");
            };
            assert!(tried[0].contains("libnot-here.so.1"), "{tried:?}");
            // A library that is there and has none of the functions.
            let other = Runtime::open_of(vendor, &["libc.so.6"], &[]).err();
            let Some(GpuError::NoLibrary { tried }) = other else {
                panic!("{other:?}");
            };
            let name = match vendor {
                Vendor::Cuda => "libc.so.6: it lacks cuInit",
                Vendor::Hip => "libc.so.6: it lacks hipInit",
            };
            assert!(tried[0].contains(name), "{tried:?}");
        }
    }

    #[test]
    fn a_hip_runtime_without_a_device_says_so() {
        match Runtime::open(Vendor::Hip).err() {
            Some(GpuError::NoLibrary { .. }) => {
                println!("skipped: a HIP runtime without a device: libamdhip64 is not installed");
            }
            Some(GpuError::NoDevice { message }) => {
                assert!(message.contains("libamdhip64.so"), "{message}");
            }
            None => println!("skipped: a HIP runtime without a device: here is one"),
            Some(other) => panic!("{other}"),
        }
    }

    #[test]
    fn the_answer_of_a_library_that_is_there_is_the_one_shown() {
        let none = |name: &str| GpuError::NoLibrary {
            tried: vec![name.to_owned()],
        };
        let no_device = || GpuError::NoDevice {
            message: "HIP has none".to_owned(),
        };
        let shown = worse(none("libcuda"), none("libamdhip64")).to_string();
        assert!(
            shown.contains("libcuda") && shown.contains("libamdhip64"),
            "{shown}"
        );
        assert!(matches!(
            worse(none("libcuda"), no_device()),
            GpuError::NoDevice { .. }
        ));
        let failed = GpuError::Call {
            op: "initialising".to_owned(),
            code: 999,
            text: "unknown".to_owned(),
        };
        assert!(matches!(
            worse(failed, none("libamdhip64")),
            GpuError::Call { code: 999, .. }
        ));
    }
}
