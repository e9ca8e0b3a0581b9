//! Run-time compilation of kernel sources to device code.

use std::ffi::{CString, c_char};
use std::path::PathBuf;
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::library::{dirs_beside_torch, dirs_of_loaded, dirs_of_toolkit, open, open_first};
use super::table::CompilerTable;
use super::{GpuError, PRELUDE, Vendor};

/// A vendor's run-time compiler (NVRTC, hipRTC). It needs no GPU.
pub struct Compiler {
    vendor: Vendor,
    table: CompilerTable,
}

/// Options of a compilation.
#[derive(Clone, Debug, Default)]
pub struct CompileOptions {
    /// Macros to define, with their values.
    pub defines: Vec<(String, String)>,
    /// Allows fusing a multiplication with an addition. Otherwise each operation rounds on its own.
    pub contract: bool,
}

impl Compiler {
    /// Opens the vendor's compiler: by name, beside a loaded torch, in the vendor's toolkit, then in `dirs`.
    ///
    /// # Errors
    /// [`GpuError::NoCompiler`] with everything that was tried.
    pub fn open(vendor: Vendor, dirs: &[PathBuf]) -> Result<Self, GpuError> {
        let names: &[&str] = match vendor {
            Vendor::Cuda => &["libnvrtc.so.13", "libnvrtc.so.12"],
            // The last one is the runtime itself, which contains the compiler up to ROCm 5.
            Vendor::Hip => &[
                "libhiprtc.so.7",
                "libhiprtc.so.6",
                "libhiprtc.so.5",
                "libhiprtc.so",
                "libamdhip64.so.5",
            ],
        };
        let mut places = match vendor {
            Vendor::Cuda => dirs_beside_torch(),
            Vendor::Hip => dirs_of_loaded("libamdhip64.so"),
        };
        places.extend(dirs_of_toolkit(vendor));
        places.extend(dirs.iter().cloned());
        let none = |tried| GpuError::NoCompiler { vendor, tried };
        let _alone = alone();
        let (library, name) = open_first(names, &places).map_err(none)?;
        if vendor == Vendor::Cuda {
            open_other_part_of_nvrtc();
        }
        let table = CompilerTable::load(library, vendor)
            .map_err(|why| none(vec![format!("{name}: {why}")]))?;
        Ok(Self { vendor, table })
    }

    /// Version, major and minor.
    ///
    /// # Errors
    /// The call failed.
    pub fn version(&self) -> Result<(i32, i32), GpuError> {
        let (mut major, mut minor) = (0, 0);
        // SAFETY: both pointers are live for the call.
        let code = unsafe { (self.table.version)(&mut major, &mut minor) };
        self.check(code, "asking the compiler's version")?;
        Ok((major, minor))
    }

    /// Compiles `source`, with the prelude before it, for `arch` (`sm_90`, `gfx942`).
    ///
    /// # Errors
    /// [`GpuError::Compile`] with the compiler's log, or a call failed.
    pub fn compile(
        &self,
        arch: &str,
        name: &str,
        source: &str,
        options: &CompileOptions,
    ) -> Result<Vec<u8>, GpuError> {
        let _alone = alone();
        let source = text(&format!("{PRELUDE}\n#line 1 \"{name}\"\n{source}"));
        let options: Vec<CString> = self
            .options(arch, options)
            .iter()
            .map(|o| text(o))
            .collect();
        let options: Vec<*const c_char> = options.iter().map(|option| option.as_ptr()).collect();
        let label = text(name);
        let mut program = Program {
            table: &self.table,
            handle: 0,
        };
        // SAFETY: both texts end in a zero byte and live through the call; no headers are given.
        let code = unsafe {
            let (headers, names) = (std::ptr::null(), std::ptr::null());
            (self.table.create)(
                &mut program.handle,
                source.as_ptr(),
                label.as_ptr(),
                0,
                headers,
                names,
            )
        };
        self.check(code, "handing a source to the compiler")?;
        // SAFETY: the program and as many options as stated are live.
        let compiled =
            unsafe { (self.table.compile)(program.handle, options.len() as i32, options.as_ptr()) };
        if compiled != 0 {
            return Err(GpuError::Compile {
                name: name.to_owned(),
                arch: arch.to_owned(),
                log: program.log(),
            });
        }
        let mut bytes = 0;
        // SAFETY: the program and the pointer are live.
        let code = unsafe { (self.table.code_bytes)(program.handle, &mut bytes) };
        self.check(code, "asking the size of compiled code")?;
        let mut compiled = vec![0u8; bytes];
        // SAFETY: the buffer has the size that the compiler reported.
        let code = unsafe { (self.table.code)(program.handle, compiled.as_mut_ptr().cast()) };
        self.check(code, "taking compiled code")?;
        Ok(compiled)
    }

    /// Both compilers follow IEEE in division, square root and denormals by default; the options state it explicitly.
    fn options(&self, arch: &str, options: &CompileOptions) -> Vec<String> {
        let mut all = match self.vendor {
            Vendor::Cuda => vec![
                format!("--gpu-architecture={arch}"),
                format!("--fmad={}", options.contract),
                "--ftz=false".to_owned(),
                "--prec-div=true".to_owned(),
                "--prec-sqrt=true".to_owned(),
                "--std=c++17".to_owned(),
            ],
            Vendor::Hip => vec![
                format!("--offload-arch={arch}"),
                format!(
                    "-ffp-contract={}",
                    if options.contract { "fast" } else { "off" }
                ),
                "-fhip-fp32-correctly-rounded-divide-sqrt".to_owned(),
                "-fno-gpu-flush-denormals-to-zero".to_owned(),
                "-O3".to_owned(),
                "-std=c++17".to_owned(),
            ],
        };
        let defines = options.defines.iter();
        all.extend(defines.map(|(name, value)| format!("-D{name}={value}")));
        all
    }

    fn check(&self, code: i32, op: &str) -> Result<(), GpuError> {
        match code {
            0 => Ok(()),
            code => Err(GpuError::Call {
                op: op.to_owned(),
                code,
                text: format!("the run-time compiler for {} GPUs failed", self.vendor),
            }),
        }
    }
}

/// A program that is destroyed when dropped.
struct Program<'a> {
    table: &'a CompilerTable,
    handle: usize,
}

impl Program<'_> {
    fn log(&self) -> String {
        let mut bytes = 0;
        // SAFETY: the program and the pointer are live.
        if unsafe { (self.table.log_bytes)(self.handle, &mut bytes) } != 0 {
            return "the compiler has no log".to_owned();
        }
        let mut log = vec![0u8; bytes.max(1)];
        // SAFETY: the buffer has the size that the compiler reported.
        unsafe { (self.table.log)(self.handle, log.as_mut_ptr().cast()) };
        String::from_utf8_lossy(&log)
            .trim_end_matches('\0')
            .trim()
            .to_owned()
    }
}

impl Drop for Program<'_> {
    fn drop(&mut self) {
        if self.handle != 0 {
            // SAFETY: the program is live and used nowhere else.
            unsafe { (self.table.destroy)(&mut self.handle) };
        }
    }
}

/// Serializes compilations: hipRTC of ROCm 5 crashed with several threads.
fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Loads NVRTC's second library, which NVRTC finds by its plain name only if it is loaded already. Finding none here is
/// no error: NVRTC may find it itself.
fn open_other_part_of_nvrtc() {
    for dir in dirs_of_loaded("libnvrtc.so") {
        for part in files_starting_with(&dir, "libnvrtc-builtins.so.") {
            let _ = open(&part);
        }
    }
}

fn files_starting_with(dir: &std::path::Path, prefix: &str) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(dir).into_iter().flatten().flatten();
    entries
        .filter(|entry| entry.file_name().to_string_lossy().starts_with(prefix))
        .map(|entry| entry.path())
        .collect()
}

/// Panics on a zero byte: names and sources are ours.
pub(super) fn text(text: &str) -> CString {
    CString::new(text).expect("no zero byte within a name or a source")
}
