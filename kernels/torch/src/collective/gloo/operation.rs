//! An operation on which Gloo's threads work.

use std::ffi::{c_char, c_void};
use std::ptr::NonNull;
use std::time::Duration;

use super::{ffi, milliseconds};
use crate::ffi::take_message;

/// An operation on which Gloo's threads work. Dropping it neither ends it nor waits for it.
pub(in crate::collective) struct Operation {
    raw: NonNull<c_void>,
}

// SAFETY: the C++ side locks the object on every use.
unsafe impl Send for Operation {}

impl Operation {
    /// Wraps the results of a shim function that starts an operation.
    ///
    /// # Safety
    /// Both come from one call of such a function and are used nowhere else.
    pub(super) unsafe fn started(message: *mut c_char, raw: *mut c_void) -> Result<Self, String> {
        // SAFETY: the caller's promise is the same.
        match unsafe { take_message(message) } {
            Some(message) => Err(message),
            None => Ok(Operation {
                raw: NonNull::new(raw).expect("the shim made an operation"),
            }),
        }
    }

    /// Waits at most `time`. `None` means in progress. After any other result Gloo no longer touches its memory.
    pub(in crate::collective) fn wait(&self, time: Duration) -> Option<Result<(), String>> {
        let mut done = 0;
        // SAFETY: the operation is live until this is dropped; `done` has room for a C int.
        let message =
            unsafe { ffi::offload_gloo_wait(self.raw.as_ptr(), milliseconds(time), &mut done) };
        // SAFETY: just returned by the shim, used only here.
        let failed = unsafe { take_message(message) };
        (done != 0).then(|| failed.map_or(Ok(()), Err))
    }
}

impl Drop for Operation {
    fn drop(&mut self) {
        // SAFETY: owned here, and not used again. The C++ side keeps what its threads still need.
        unsafe { ffi::offload_gloo_operation_free(self.raw.as_ptr()) };
    }
}
