//! A vendor's driver library: found, opened and initialised once per process.

use std::ffi::{CStr, c_char};
use std::path::PathBuf;
use std::sync::{Mutex, PoisonError};

use super::library::{dirs_of_toolkit, open_first};
use super::table::{Differences, Driver};
use super::{GpuError, GpuInfo, Vendor};

/// hipDeviceProp_t has 792 bytes in ROCm 5 and 1472 in ROCm 6 and 7.
const HIP_PROPERTIES_BYTES_MAX: usize = 16 * 1024;

/// CUDA_ERROR_NO_DEVICE and hipErrorNoDevice; hipErrorInvalidDevice, with which ROCm 5 answers the same.
const NO_DEVICE: [i32; 2] = [100, 101];

/// A vendor's library, opened and initialised.
pub(super) struct Runtime {
    vendor: Vendor,
    pub(super) library_name: String,
    pub(super) driver: Driver,
    differences: Differences,
}

/// Returns the process's runtime: the first vendor's that has a device. A failure is not cached, so a driver that
/// appears later is found.
pub(super) fn runtime() -> Result<&'static Runtime, GpuError> {
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

/// Chooses which of two vendors' errors to report: that of an available library, both if neither is available.
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
        let dirs = match vendor {
            // The driver library is never part of a toolkit; one found there would be a stub.
            Vendor::Cuda => Vec::new(),
            Vendor::Hip => dirs_of_toolkit(vendor),
        };
        Self::open_of(vendor, names, &dirs)
    }

    fn open_of(vendor: Vendor, names: &[&str], dirs: &[PathBuf]) -> Result<Self, GpuError> {
        let (library, library_name) =
            open_first(names, dirs).map_err(|tried| GpuError::NoLibrary { tried })?;
        let unknown = |why: String| GpuError::NoLibrary {
            tried: vec![format!("{library_name}: {why}")],
        };
        let runtime = Self {
            vendor,
            driver: Driver::load(library, vendor).map_err(unknown)?,
            differences: Differences::load(library, vendor).map_err(unknown)?,
            library_name,
        };
        // SAFETY: takes a number only.
        let code = unsafe { (runtime.driver.init)(0) };
        runtime.none_or(code, "initialising")?;
        runtime.device_count()?;
        Ok(runtime)
    }

    /// Number of devices, at least 1.
    pub(super) fn device_count(&self) -> Result<u32, GpuError> {
        let mut count = 0;
        // SAFETY: the pointer is live for the call.
        let code = unsafe { (self.driver.device_count)(&mut count) };
        self.none_or(code, "counting devices")?;
        match count {
            1.. => Ok(count as u32),
            _ => Err(self.none()),
        }
    }

    /// Like `check`, with "no device" as its own error: on a machine without a GPU that has the vendor's library as a
    /// dependency of another package, it is the expected answer.
    fn none_or(&self, code: i32, op: &str) -> Result<(), GpuError> {
        if NO_DEVICE.contains(&code) {
            return Err(self.none());
        }
        self.check(code, || format!("{op} with {}", self.library_name))
    }

    fn none(&self) -> GpuError {
        GpuError::NoDevice {
            message: format!("{} finds no device", self.library_name),
        }
    }

    pub(super) fn context(&self, index: u32, handle: i32) -> Result<usize, GpuError> {
        let mut context = 0;
        if let Differences::Cuda { context_retain, .. } = &self.differences {
            // SAFETY: the pointer is live for the call. The context is never released: torch in this process shares it.
            let code = unsafe { context_retain(&mut context, handle) };
            self.check(code, || format!("taking the context of device {index}"))?;
        }
        Ok(context)
    }

    pub(super) fn make_current(&self, index: u32, context: usize) -> Result<(), GpuError> {
        let code = match &self.differences {
            // SAFETY: the context came from this library and is never released.
            Differences::Cuda { context_set, .. } => unsafe { context_set(context) },
            // SAFETY: takes a number only.
            Differences::Hip { device_set, .. } => unsafe { device_set(index as i32) },
        };
        self.check(code, || format!("making device {index} current"))
    }

    pub(super) fn info(&self, index: u32, handle: i32) -> Result<GpuInfo, GpuError> {
        let mut name: [c_char; 256] = [0; 256];
        let (mut bytes, mut version) = (0usize, 0i32);
        // SAFETY: the buffer has room for 256 bytes, the terminator included, which is the length given.
        let code = unsafe { (self.driver.device_name)(name.as_mut_ptr(), 256, handle) };
        self.check(code, || format!("reading the name of device {index}"))?;
        let mut pci: [c_char; 32] = [0; 32];
        // SAFETY: the buffer has room for 32 bytes, the length given; an address takes 13.
        let code = unsafe { (self.driver.device_pci)(pci.as_mut_ptr(), 32, handle) };
        if code != 0 {
            // A plan then assumes the bus.
            pci = [0; 32];
        }
        // SAFETY: the pointer is live for the call.
        let code = unsafe { (self.driver.device_total_bytes)(&mut bytes, handle) };
        self.check(code, || format!("reading the memory of device {index}"))?;
        // SAFETY: the pointer is live for the call.
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
        // Drivers write hexadecimal digits in capitals, the kernel in small letters.
        let pci = text_of(&pci.map(|letter| letter as u8)).to_ascii_lowercase();
        Ok(GpuInfo {
            vendor: self.vendor,
            index,
            name: text_of(&name),
            arch: self.arch(index, handle)?,
            pci,
            memory_bytes: bytes as u64,
            driver,
        })
    }

    fn arch(&self, index: u32, handle: i32) -> Result<String, GpuError> {
        let op = || format!("reading the architecture of device {index}");
        match &self.differences {
            Differences::Cuda {
                device_attribute, ..
            } => {
                // CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR and _MINOR.
                let mut capability = [0, 0];
                for (number, attribute) in capability.iter_mut().zip([75, 76]) {
                    // SAFETY: the pointer is live for the call.
                    let code = unsafe { device_attribute(number, attribute, handle) };
                    self.check(code, op)?;
                }
                Ok(format!("sm_{}{}", capability[0], capability[1]))
            }
            Differences::Hip {
                device_properties, ..
            } => {
                let mut bytes = vec![0u64; HIP_PROPERTIES_BYTES_MAX / 8];
                // SAFETY: the buffer is much larger than every release's structure and aligned to 8 bytes.
                let code = unsafe { device_properties(bytes.as_mut_ptr().cast(), index as i32) };
                self.check(code, op)?;
                let bytes: Vec<u8> = bytes.iter().flat_map(|word| word.to_le_bytes()).collect();
                gfx_name(&bytes).ok_or_else(|| GpuError::NoDevice {
                    message: format!("{} names no gfx architecture", self.library_name),
                })
            }
        }
    }

    pub(super) fn check(&self, code: i32, op: impl FnOnce() -> String) -> Result<(), GpuError> {
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
            // SAFETY: the pointer is live for the call; the library sets it to NULL or a constant text.
            Differences::Cuda { error_text, .. } => unsafe {
                error_text(code, &mut text);
            },
            // SAFETY: takes a number and returns NULL or a constant text.
            Differences::Hip { error_text, .. } => text = unsafe { error_text(code) },
        }
        if text.is_null() {
            return "the library has no text for this".to_owned();
        }
        // SAFETY: not NULL, hence a constant text of the library, which stays loaded.
        unsafe { CStr::from_ptr(text) }
            .to_string_lossy()
            .into_owned()
    }
}

/// Finds the architecture in a hipDeviceProp_t, whose layout differs between releases: the last text in it that starts
/// with `gfx`, since the first one may be the device's name.
fn gfx_name(properties: &[u8]) -> Option<String> {
    let at = properties.windows(3).rposition(|three| three == b"gfx")?;
    Some(text_of(&properties[at..]))
}

/// Returns the text up to the first zero byte.
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
            // A library without any of the functions.
            let other = Runtime::open_of(vendor, &["libc.so.6"], &[]).err();
            let Some(GpuError::NoLibrary { tried }) = other else {
                panic!("{other:?}");
            };
            let name = match vendor {
                Vendor::Cuda => "libc.so.6: it lacks the function cuInit",
                Vendor::Hip => "libc.so.6: it lacks the function hipInit",
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
                // No failed operation and no error code in the message.
                assert!(
                    message.starts_with("libamdhip64.so") && message.ends_with(" finds no device"),
                    "{message}"
                );
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
