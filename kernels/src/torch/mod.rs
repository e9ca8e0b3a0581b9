//! Everything unsafe of torch, behind safe functions. What the trainer computes with torch it computes with
//! `tch`'s safe half; what that half lacks is here.
//!
//! ```text
//! autograd.rs  vjp()                gradients for given output gradients, by shim.cpp
//! memory.rs    HostBuffer           torch's own memory, seen as bytes
//!              with_tensor_over()   foreign bytes, seen as a tensor while a closure runs
//! settings.rs  set_threads(), set_deterministic()
//! ```
//!
//! A C++ exception never crosses into Rust: each shim function catches and returns its text.

mod autograd;
mod ffi;
mod memory;
mod settings;

pub use autograd::vjp;
pub use memory::{HostBuffer, with_tensor_over};
pub use settings::{set_deterministic, set_threads};

/// What can go wrong between torch and us.
#[derive(Debug, thiserror::Error)]
pub enum TorchError {
    /// torch threw. Out of memory comes this way too; so do shapes that do not fit, which is our bug.
    #[error("torch failed in {op}: {message}")]
    Torch {
        /// What was tried.
        op: &'static str,
        /// torch's own words.
        message: String,
    },
    /// A buffer's length is not the number of bytes its shape and kind need.
    #[error(
        "a tensor of {elems} elements of {elem_bytes} bytes does not fit a buffer of {bytes} bytes exactly"
    )]
    Length {
        /// Elements asked for.
        elems: usize,
        /// Bytes of one element.
        elem_bytes: usize,
        /// Bytes given.
        bytes: usize,
    },
    /// A buffer does not start on a multiple of its element's size.
    #[error(
        "a buffer at address {address:#x} cannot hold elements of {elem_bytes} bytes: align it"
    )]
    Alignment {
        /// Where the buffer starts.
        address: usize,
        /// Bytes of one element.
        elem_bytes: usize,
    },
}

impl From<tch::TchError> for TorchError {
    fn from(error: tch::TchError) -> Self {
        let message = error.to_string();
        TorchError::Torch {
            op: "a tensor operation",
            message: first_line(&message),
        }
    }
}

/// torch appends a C++ backtrace to its messages; the first line says what is wrong.
fn first_line(message: &str) -> String {
    message.lines().next().unwrap_or_default().to_owned()
}
