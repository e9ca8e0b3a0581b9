//! Kernels from source: the run-time compiler, modules, functions and their launch.

use std::ffi::{CString, c_char, c_void};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::library::{
    folders_beside_torch, folders_of_loaded, folders_of_toolkit, open, open_first,
};
use super::table::CompilerTable;
use super::{Gpu, GpuError, PRELUDE, Stream, Vendor};

/// A vendor's run-time compiler (NVRTC, hipRTC). It needs no GPU.
pub struct Compiler {
    vendor: Vendor,
    table: CompilerTable,
}

/// How a source is compiled.
#[derive(Clone, Debug, Default)]
pub struct CompileOptions {
    /// Names and values the source sees as macros.
    pub defines: Vec<(String, String)>,
    /// Lets the compiler fuse a multiplication and an addition. Off, each operation rounds as it is written.
    pub contract: bool,
}

/// Code loaded on a device.
#[derive(Clone, Debug)]
pub struct Module(Arc<RawModule>);

#[derive(Debug)]
struct RawModule {
    gpu: Gpu,
    name: String,
    handle: usize,
}

/// A kernel of a module, which it keeps loaded.
#[derive(Clone, Debug)]
pub struct Function {
    module: Module,
    handle: usize,
}

/// What the compiler needed for a kernel, each thread.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FunctionUse {
    /// Registers.
    pub register_count: u32,
    /// Bytes of the thread's own memory: more than 0 means registers were spilled, or an array is indexed at run time.
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

impl Compiler {
    /// The vendor's compiler: by name, beside a loaded torch, in the vendor's toolkit, then in `folders`.
    ///
    /// # Errors
    /// [`GpuError::NoCompiler`] with all that was tried.
    pub fn open(vendor: Vendor, folders: &[PathBuf]) -> Result<Self, GpuError> {
        let names: &[&str] = match vendor {
            Vendor::Cuda => &["libnvrtc.so.13", "libnvrtc.so.12"],
            // The last is the runtime itself, which contains the compiler up to ROCm 5.
            Vendor::Hip => &[
                "libhiprtc.so.7",
                "libhiprtc.so.6",
                "libhiprtc.so.5",
                "libhiprtc.so",
                "libamdhip64.so.5",
            ],
        };
        let mut places = match vendor {
            Vendor::Cuda => folders_beside_torch(),
            Vendor::Hip => folders_of_loaded("libamdhip64.so"),
        };
        places.extend(folders_of_toolkit(vendor));
        places.extend(folders.iter().cloned());
        let none = |tried| GpuError::NoCompiler { vendor, tried };
        let _alone = alone();
        let (library, name) = open_first(names, &places).map_err(none)?;
        if vendor == Vendor::Cuda {
            open_other_part_of_nvrtc();
        }
        let table = CompilerTable::of(library, vendor)
            .map_err(|why| none(vec![format!("{name}: {why}")]))?;
        Ok(Self { vendor, table })
    }

    /// Its version, major and minor.
    ///
    /// # Errors
    /// It does not say.
    pub fn version(&self) -> Result<(i32, i32), GpuError> {
        let (mut major, mut minor) = (0, 0);
        // SAFETY: both places are live for the call.
        let code = unsafe { (self.table.version)(&mut major, &mut minor) };
        self.check(code, "asking the compiler's version")?;
        Ok((major, minor))
    }

    /// Device code of `source`, the prelude before it, for `arch` (`sm_90`, `gfx942`).
    ///
    /// # Errors
    /// [`GpuError::Compile`] with the compiler's log; or a call failed.
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
        // SAFETY: both texts end in a zero byte and live through the call; no headers are given, so none are read.
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
        // SAFETY: the program is live, and so are the options, as many as said.
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
        // SAFETY: the program is live, and so is the place.
        let code = unsafe { (self.table.code_bytes)(program.handle, &mut bytes) };
        self.check(code, "asking the size of compiled code")?;
        let mut compiled = vec![0u8; bytes];
        // SAFETY: there is room for as many bytes as the compiler just said it has.
        let code = unsafe { (self.table.code)(program.handle, compiled.as_mut_ptr().cast()) };
        self.check(code, "taking compiled code")?;
        Ok(compiled)
    }

    /// Division, square root and denormals are IEEE's by default in both compilers; they are told all the same.
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
                text: format!("the run-time compiler for {} GPUs refused", self.vendor),
            }),
        }
    }
}

/// Destroyed on every way out.
struct Program<'a> {
    table: &'a CompilerTable,
    handle: usize,
}

impl Program<'_> {
    fn log(&self) -> String {
        let mut bytes = 0;
        // SAFETY: the program is live, and so is the place.
        if unsafe { (self.table.log_bytes)(self.handle, &mut bytes) } != 0 {
            return "the compiler has no log".to_owned();
        }
        let mut log = vec![0u8; bytes.max(1)];
        // SAFETY: there is room for as many bytes as the compiler just said it has.
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

impl Module {
    pub(super) fn load(gpu: &Gpu, name: &str, code: &[u8]) -> Result<Self, GpuError> {
        let mut handle = 0;
        gpu.make_current()?;
        // SAFETY: the code is what the compiler for this device made, whole; the place is live for the call.
        let answer =
            unsafe { (gpu.driver().module_load)(&mut handle, code.as_ptr().cast::<c_void>()) };
        gpu.check(answer, || format!("loading the compiled {name}"))?;
        Ok(Self(Arc::new(RawModule {
            gpu: gpu.clone(),
            name: name.to_owned(),
            handle,
        })))
    }

    /// The kernel of that name (`extern "C"` in the source).
    ///
    /// # Errors
    /// The module has none of that name.
    pub fn function(&self, name: &str) -> Result<Function, GpuError> {
        let gpu = &self.0.gpu;
        let label = text(name);
        let mut handle = 0;
        gpu.make_current()?;
        // SAFETY: the module is live, the name ends in a zero byte, the place is live for the call.
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
            // SAFETY: every Function keeps its module, so none is left.
            let _ = unsafe { (self.gpu.driver().module_unload)(self.handle) };
        }
    }
}

impl Function {
    /// What the compiler needed for it.
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
        // SAFETY: the place is live for the call, and the module keeps the function.
        let code = unsafe { (gpu.driver().function_attribute)(&mut value, attribute, self.handle) };
        gpu.check(code, || "asking what a kernel needs".to_owned())?;
        Ok(value.max(0) as u32)
    }

    /// Enqueues `grid` blocks of `block` threads with `shared_bytes` of shared memory beyond what the kernel declares.
    ///
    /// # Errors
    /// The call failed: a shape the device does not take, or earlier work that broke the context.
    ///
    /// # Safety
    /// `args` are as many and of such types as the kernel declares; every address among them is of device memory that is long enough
    /// for what the kernel does with it and stays allocated until it has run.
    pub(crate) unsafe fn launch(
        &self,
        grid: [u32; 3],
        block: [u32; 3],
        shared_bytes: u32,
        stream: &Stream,
        args: &[Arg],
    ) -> Result<(), GpuError> {
        let gpu = &self.module.0.gpu;
        // Little endian, as `cast.rs` asserts: an argument of four bytes is the first four of its place.
        let mut places: Vec<u64> = args.iter().map(|arg| arg.bits()).collect();
        let mut pointers: Vec<*mut c_void> = places
            .iter_mut()
            .map(|place| std::ptr::from_mut(place).cast())
            .collect();
        gpu.make_current()?;
        // SAFETY: each pointer leads to a place as large as the largest argument, live for the call, which copies them; the rest is
        // the caller's promise.
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

/// One thread at a time in the compilers: hipRTC of ROCm 5 crashed with several.
fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// NVRTC looks for its other library by the plain name, which is found if it is loaded already. It need not be an error that none is
/// found here: NVRTC may find it.
fn open_other_part_of_nvrtc() {
    for folder in folders_of_loaded("libnvrtc.so") {
        for part in files_starting_with(&folder, "libnvrtc-builtins.so.") {
            let _ = open(&part);
        }
    }
}

fn files_starting_with(folder: &std::path::Path, prefix: &str) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    entries
        .filter(|entry| entry.file_name().to_string_lossy().starts_with(prefix))
        .map(|entry| entry.path())
        .collect()
}

/// Panics on a zero byte within: names and sources are ours.
fn text(text: &str) -> CString {
    CString::new(text).expect("no zero byte within a name or a source")
}
