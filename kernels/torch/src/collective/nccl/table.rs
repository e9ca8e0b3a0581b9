//! The functions of NCCL and RCCL, which have the same names and arguments: one table, opened at run time.
//!
//! Handles are pointers; here they are `usize`, which is passed the same way and may be sent to other threads.

use std::ffi::{CStr, c_char};
use std::path::PathBuf;
use std::sync::OnceLock;

use libloading::Library;

use kernels::gpu::Vendor;
use kernels::gpu::library::{dirs_of_loaded, dirs_of_toolkit, open_first};
use training_ranks::CollectiveError;

/// NCCL's ncclUniqueId: the meeting point of a communicator's ranks.
#[derive(Clone, Copy)]
#[repr(C)]
pub(super) struct UniqueId(pub(super) [u8; 128]);

/// `ncclSum`, the first of the operations.
pub(super) const SUM: i32 = 0;

macro_rules! table {
    ($($field:ident($($argument:ty),*) = $name:literal;)*) => {
        /// Library functions in use. 0 is success.
        pub(super) struct Table {
            $(pub(super) $field: unsafe extern "C" fn($($argument),*) -> i32,)*
            error_text: unsafe extern "C" fn(i32) -> *const c_char,
        }

        impl Table {
            /// Finds every function, or reports the one that the library lacks. The library must stay loaded.
            fn load(library: &'static Library) -> Result<Self, String> {
                Ok(Self {
                    // SAFETY: nccl.h and rccl.h declare functions of these names with these arguments, an int-sized enum as result
                    // and the C calling convention.
                    $($field: unsafe {
                        symbol::<unsafe extern "C" fn($($argument),*) -> i32>(library, $name)?
                    },)*
                    // SAFETY: as above; it returns static text.
                    error_text: unsafe { symbol(library, "ncclGetErrorString")? },
                })
            }
        }
    };
}

table! {
    version(*mut i32) = "ncclGetVersion";
    unique_id(*mut UniqueId) = "ncclGetUniqueId";
    init_rank(*mut usize, i32, UniqueId, i32) = "ncclCommInitRank";
    destroy(usize) = "ncclCommDestroy";
    abort(usize) = "ncclCommAbort";
    async_error(usize, *mut i32) = "ncclCommGetAsyncError";
    all_gather(u64, u64, usize, i32, usize, usize) = "ncclAllGather";
    reduce_scatter(u64, u64, usize, i32, i32, usize, usize) = "ncclReduceScatter";
    all_reduce(u64, u64, usize, i32, i32, usize, usize) = "ncclAllReduce";
    group_start() = "ncclGroupStart";
    group_end() = "ncclGroupEnd";
    send(u64, usize, i32, i32, usize, usize) = "ncclSend";
    receive(u64, usize, i32, i32, usize, usize) = "ncclRecv";
}

impl Table {
    /// Opens the library for GPUs of `vendor`, once.
    ///
    /// # Errors
    /// [`CollectiveError::NoLibrary`] with every place that was tried; an unknown library.
    pub(super) fn open(vendor: Vendor) -> Result<&'static Table, CollectiveError> {
        static CUDA: OnceLock<Result<Table, CollectiveError>> = OnceLock::new();
        static HIP: OnceLock<Result<Table, CollectiveError>> = OnceLock::new();
        let opened = match vendor {
            Vendor::Cuda => CUDA.get_or_init(|| load(&["libnccl.so.2"], &dirs(vendor))),
            Vendor::Hip => HIP.get_or_init(|| load(&["librccl.so.1", "librccl.so"], &dirs(vendor))),
        };
        opened.as_ref().map_err(Clone::clone)
    }

    /// Turns an answer of the library into a result.
    pub(super) fn check(&self, code: i32, op: &str) -> Result<(), CollectiveError> {
        if code == 0 {
            return Ok(());
        }
        // SAFETY: the library returns static text for every number.
        let text = unsafe { (self.error_text)(code) };
        let text = if text.is_null() {
            "no text".into()
        } else {
            // SAFETY: not NULL, ends with NUL and is never freed.
            unsafe { CStr::from_ptr(text) }.to_string_lossy()
        };
        Err(CollectiveError::Backend {
            op: op.to_owned(),
            message: format!("{text} (error {code}; NCCL_DEBUG=WARN says more)"),
        })
    }

    /// Version, such as 22809 for 2.28.9.
    pub(super) fn version(&self) -> Result<u32, CollectiveError> {
        let mut version = 0;
        // SAFETY: the pointer is live for the call.
        let code = unsafe { (self.version)(&mut version) };
        self.check(code, "asking NCCL's version")?;
        Ok(version.unsigned_abs())
    }
}

pub(super) fn load(names: &[&str], dirs: &[PathBuf]) -> Result<Table, CollectiveError> {
    let (library, name) =
        open_first(names, dirs).map_err(|tried| CollectiveError::NoLibrary { tried })?;
    Table::load(library).map_err(|lacks| CollectiveError::NoLibrary {
        tried: vec![format!("{name}: {lacks}")],
    })
}

/// Directories where pip installs NCCL beside a loaded torch, torch's own directory (RCCL is in it), and the toolkit's.
fn dirs(vendor: Vendor) -> Vec<PathBuf> {
    let beside = dirs_of_loaded("libc10")
        .into_iter()
        .flat_map(|lib| [lib.join("../../nvidia/nccl/lib"), lib]);
    beside.chain(dirs_of_toolkit(vendor)).collect()
}

/// # Safety
/// `T` is a function pointer of the type that `name` has in `library`.
unsafe fn symbol<T: Copy>(library: &'static Library, name: &str) -> Result<T, String> {
    // SAFETY: the caller's promise; the library is never unloaded, so the copy stays valid.
    unsafe { library.get::<T>(name) }
        .map(|symbol| *symbol)
        .map_err(|_| format!("it lacks the function {name}: unsupported version"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_library_that_is_not_there_or_is_another_one_is_an_error_that_names_it() {
        let error = load(&["libnccl-not-here.so.2"], &["/nowhere-at-all".into()]).map(|_| ());
        let text = error.unwrap_err().to_string();
        assert!(text.contains("libnccl-not-here.so.2"), "{text}");
        assert!(text.contains("/nowhere-at-all"), "{text}");
        // The C library exists and has none of these functions.
        let text = load(&["libc.so.6"], &[])
            .map(|_| ())
            .unwrap_err()
            .to_string();
        assert!(
            text.contains("libc.so.6: it lacks the function ncclGetVersion"),
            "{text}"
        );
    }
}
