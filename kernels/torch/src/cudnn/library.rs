//! cuDNN's backend functions, opened at run time: torch's GPU half brings the library.

use std::ffi::{CStr, c_char, c_void};
use std::path::PathBuf;
use std::sync::OnceLock;

use kernels::gpu::library::open_first;
use libloading::Library;

use super::CudnnError;

/// Oldest version whose kernels were checked here: the one that torch 2.11 brings.
const VERSION_MIN: usize = 91900;

/// Major version 9 has one ABI.
const NAMES: [&str; 1] = ["libcudnn.so.9"];

/// The functions in use. 0 is success.
pub(super) struct Library9 {
    version: unsafe extern "C" fn() -> usize,
    last_error: unsafe extern "C" fn(*mut c_char, usize),
    pub(super) create: unsafe extern "C" fn(*mut usize) -> i32,
    pub(super) create_descriptor: unsafe extern "C" fn(i32, *mut usize) -> i32,
    pub(super) destroy_descriptor: unsafe extern "C" fn(usize) -> i32,
    pub(super) set: unsafe extern "C" fn(usize, i32, i32, i64, *const c_void) -> i32,
    pub(super) get: unsafe extern "C" fn(usize, i32, i32, i64, *mut i64, *mut c_void) -> i32,
    pub(super) finalize: unsafe extern "C" fn(usize) -> i32,
    pub(super) execute: unsafe extern "C" fn(usize, usize, usize) -> i32,
}

impl Library9 {
    /// Opens the library once per process: by name, then in `dirs` of the first call.
    ///
    /// # Errors
    /// It is missing, lacks a function, or is too old.
    pub(super) fn open(dirs: &[PathBuf]) -> Result<&'static Self, CudnnError> {
        static OPENED: OnceLock<Result<Library9, String>> = OnceLock::new();
        let opened = OPENED.get_or_init(|| Self::find(dirs));
        opened
            .as_ref()
            .map_err(|why| CudnnError::Missing { why: why.clone() })
    }

    fn find(dirs: &[PathBuf]) -> Result<Self, String> {
        let (library, name) = open_first(&NAMES, dirs).map_err(|tried| tried.join("; "))?;
        let found = Self::load(library).map_err(|why| format!("{name}: {why}"))?;
        if found.version() < VERSION_MIN {
            return Err(format!(
                "{name} is version {}, older than {}",
                found.version_text(),
                dotted(VERSION_MIN)
            ));
        }
        Ok(found)
    }

    fn version(&self) -> usize {
        // SAFETY: no arguments.
        unsafe { (self.version)() }
    }

    /// Such as 9.19.0.
    pub(super) fn version_text(&self) -> String {
        dotted(self.version())
    }

    fn load(library: &'static Library) -> Result<Self, String> {
        // SAFETY: cuDNN 9's headers declare functions of these names with these arguments: handles and descriptors
        // are pointers, enumerations and statuses are ints.
        unsafe {
            Ok(Self {
                version: symbol(library, "cudnnGetVersion")?,
                last_error: symbol(library, "cudnnGetLastErrorString")?,
                create: symbol(library, "cudnnCreate")?,
                create_descriptor: symbol(library, "cudnnBackendCreateDescriptor")?,
                destroy_descriptor: symbol(library, "cudnnBackendDestroyDescriptor")?,
                set: symbol(library, "cudnnBackendSetAttribute")?,
                get: symbol(library, "cudnnBackendGetAttribute")?,
                finalize: symbol(library, "cudnnBackendFinalize")?,
                execute: symbol(library, "cudnnBackendExecute")?,
            })
        }
    }

    /// Turns a status into a result; `op` says what failed.
    pub(super) fn check(&self, status: i32, op: &'static str) -> Result<(), CudnnError> {
        if status == 0 {
            return Ok(());
        }
        let mut text = [0 as c_char; 512];
        // SAFETY: cuDNN writes at most that many bytes, a zero byte last; the array had zeros before.
        let message = unsafe {
            (self.last_error)(text.as_mut_ptr(), text.len());
            CStr::from_ptr(text.as_ptr()).to_string_lossy()
        };
        Err(CudnnError::Call {
            op,
            status,
            message: message.trim().replace('\n', "; "),
        })
    }
}

/// The text of a version such as 91900.
fn dotted(version: usize) -> String {
    format!(
        "{}.{}.{}",
        version / 10000,
        version / 100 % 100,
        version % 100
    )
}

/// # Safety
/// `T` is a function pointer of the type that `name` has in `library`.
unsafe fn symbol<T: Copy>(library: &'static Library, name: &str) -> Result<T, String> {
    // SAFETY: the caller's promise; the library is never unloaded, so the copy stays valid.
    unsafe { library.get::<T>(name) }
        .map(|symbol| *symbol)
        .map_err(|_| format!("it lacks the function {name}"))
}
